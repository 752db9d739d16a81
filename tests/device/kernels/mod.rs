//! The kernels of `cuda/`, built for the CPU and launched through the fake driver: bit for bit
//! what plain references and the loops of the room `rows` give.
//!
//! A process of its own for each test: the fake driver loads one library of kernels.
#![allow(unsafe_code, reason = "kernels are unsafe to launch by contract")]

mod buffer;
mod check;
mod choices;
mod counts;
mod cublas;
mod expand;
mod gate;
mod gradients;
mod layer;
mod pack;
mod plan_choices;
mod rank_sums;
mod records;
mod regroup;
mod sort_choices;
mod sum;
mod sum_choices;
mod swiglu_bf16;
mod work;
pub mod world;

use std::sync::Arc;
use std::time::Duration;

use sidelane::device::{Context, Driver, Kernels, Priority, Stream};
use sidelane_testkit::device::gpu::{Bench, Gpu};

use crate::apart::{Settings, each_with_kernels};

/// A device with kernels.
struct Device {
    context: Arc<Context>,
    stream: Arc<Stream>,
    kernels: Kernels,
}

impl Device {
    /// For checks of the test kit.
    fn bench(&self) -> Bench {
        let context = Arc::clone(&self.context);
        let gpu = Gpu { patience: Duration::from_secs(60), ..Gpu::of(context, true) };
        Bench { gpu, stream: Arc::clone(&self.stream), kernels: self.kernels.clone() }
    }
}

/// Runs the body with kernels to launch, then with the same kernels of one block. `test` is the
/// test's full name.
fn with_kernels(test: &str, body: impl Fn(&Device)) {
    with_kernels_each(test, &[&[]], body);
}

/// The same, once for each list of variables.
fn with_kernels_each(test: &str, runs: &[Settings<'_>], body: impl Fn(&Device)) {
    each_with_kernels(test, runs, || {
        let library = fake_cuda::install().unwrap().join("libcuda.so.1");
        let driver = Driver::load(Some(&library)).unwrap();
        assert!(driver.is_fake(), "tests run without a GPU");
        let context = driver.context(0).unwrap();
        let kernels = Kernels::load(&context).unwrap();
        for limit in [None, Some(1)] {
            let stream = Arc::new(Stream::new(&context, Priority::Normal).unwrap());
            let context = Arc::clone(&context);
            body(&Device { context, stream, kernels: kernels.clone().max_blocks(limit) });
        }
    });
}
