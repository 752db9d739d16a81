//! What the driver is asked, and what it is refused for.

use std::path::Path;

use sidelane::device::{BatchedCopies, Driver, ModuleLoading, Version};
use sidelane::error::DeviceError;

use super::{context, driver};
use crate::apart::{apart, each};

#[test]
fn a_library_that_is_missing_is_an_error_with_its_name() {
    let Err(error) = Driver::load(Some(Path::new("/nonexistent/libcuda.so.1"))) else {
        panic!("there is no such driver")
    };
    let DeviceError::NoLibrary { library, reason } = &error else { panic!("{error:?}") };
    assert_eq!(library, "/nonexistent/libcuda.so.1");
    assert!(reason.starts_with("cannot open shared object file"), "the name is not said twice: {reason}");
    assert!(error.to_string().contains("SIDELANE_CUDA_LIBRARY"), "{error}");
}

#[test]
fn library_that_is_no_driver_is_error_with_missing_symbol() {
    // Loaded by every program, and no driver.
    let seen = Driver::load(Some(Path::new("libc.so.6"))).map(|_| ());
    assert_eq!(seen, Err(DeviceError::MissingSymbol { library: "libc.so.6".into(), symbol: "cuInit" }));
}

#[test]
fn the_devices_of_a_driver_are_described() {
    apart(
        "driver::probe::the_devices_of_a_driver_are_described",
        &[
            ("SIDELANE_FAKE_CUDA_DEVICES", "4"),
            ("SIDELANE_FAKE_CUDA_PEERS", "0,1|2,3"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "2"),
            ("CUDA_MODULE_LOADING", "EAGER"),
        ],
        || {
            let driver = driver();
            let probe = driver.probe().unwrap();
            assert!(probe.fake_driver);
            assert_eq!((probe.version, probe.version.to_string()), (Version(12080), "12.8".to_owned()));
            assert_eq!(probe.batched_copies, BatchedCopies::First);
            assert_eq!((probe.module_loading, probe.queues), (ModuleLoading::Eager, 2));
            let (t, f) = (true, false);
            assert_eq!(probe.peers, [[t, t, f, f], [t, t, f, f], [f, f, t, t], [f, f, t, t]]);
            let mut ids: Vec<_> = probe.devices.iter().map(|device| device.uuid.clone()).collect();
            ids.sort();
            ids.dedup();
            assert_eq!(ids.len(), 4, "each device has an identity of its own");
            for (number, device) in probe.devices.iter().enumerate() {
                assert_eq!(device.device as usize, number);
                assert!(!device.name.is_empty() && device.memory > 0 && device.multiprocessors > 0);
                assert!(device.wide_memory_operations && device.virtual_memory && device.descriptors);
                assert!(!device.dma_buf, "the fake driver has none");
                assert!(device.several_processes);
            }
        },
    );
}

/// The driver's numbers: any process, none, one.
#[test]
fn only_default_compute_mode_allows_several_processes() {
    each(
        "driver::probe::only_default_compute_mode_allows_several_processes",
        &[
            &[("SIDELANE_FAKE_CUDA_COMPUTE_MODE", "0")],
            &[("SIDELANE_FAKE_CUDA_COMPUTE_MODE", "2")],
            &[("SIDELANE_FAKE_CUDA_COMPUTE_MODE", "3")],
        ],
        || {
            let shared = std::env::var("SIDELANE_FAKE_CUDA_COMPUTE_MODE").unwrap() == "0";
            assert_eq!(driver().device(0).unwrap().several_processes, shared);
        },
    );
}

#[test]
fn a_driver_of_cuda_13_takes_batches_in_its_own_form() {
    apart(
        "driver::probe::a_driver_of_cuda_13_takes_batches_in_its_own_form",
        &[("SIDELANE_FAKE_CUDA_DRIVER", "13000")],
        || {
            assert_eq!(driver().probe().unwrap().batched_copies, BatchedCopies::Second);
            super::copies::scatter(701);
        },
    );
}

#[test]
fn a_driver_that_is_too_old_is_named_with_the_version_it_takes() {
    apart(
        "driver::probe::a_driver_that_is_too_old_is_named_with_the_version_it_takes",
        &[("SIDELANE_FAKE_CUDA_DRIVER", "12040")],
        || {
            use sidelane::device::{CopyBatch, Reservation};
            assert_eq!(driver().probe().unwrap().batched_copies, BatchedCopies::None);
            let context = context(0);
            let old = |feature, needed: &str| DeviceError::TooOld {
                feature,
                version: "12.4".into(),
                needed: needed.into(),
            };
            let seen = Reservation::new(&context, 2, 2 << 20).map(|_| ());
            assert_eq!(seen, Err(old("stream memory operations on mapped memory", "12.5")));
            let seen = super::stream(&context).copy_batch(&mut CopyBatch::with_capacity(&context, 0));
            assert_eq!(seen, Err(old("a batch of copies", "12.8")));
        },
    );
}

#[test]
fn a_driver_older_than_cuda_12_is_refused() {
    apart(
        "driver::probe::a_driver_older_than_cuda_12_is_refused",
        &[("SIDELANE_FAKE_CUDA_DRIVER", "11080")],
        || {
            let seen = Driver::load(Some(&super::library())).map(|_| ());
            let old =
                DeviceError::TooOld { feature: "Sidelane", version: "11.8".into(), needed: "12.0".into() };
            assert_eq!(seen, Err(old));
        },
    );
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let count = driver().device_count().unwrap();
    let seen = driver().context(count).map(|_| ());
    assert_eq!(seen, Err(DeviceError::NoSuchDevice { device: count, count }));
}
