//! Calls over NICs allocate nothing once shapes are known: neither the rank's thread nor those of
//! the library, which serve NICs. What the fake NICs allocate is not counted.

use half::bf16;

use super::apart::{apart, each_with_kernels};
use super::counting::Library;
use super::device_rounds::{RANKS, Settings, Tensors, counted_with, in_halves};
use super::host_rounds::{EXPERTS, HIDDEN, TOP_K, allocated_by, took};
use super::support::{medium, on_ranks, tokens};
use crate::config::NetChoice;
use crate::lane::{self, Fabric, SignalMode};
use crate::topology::Route;
use crate::world::NoGpuDirect;
use crate::{Dtype, ExpertParallel, Options, World};

/// How the fake driver has streams see what NICs write.
const NIC_WRITES: &str = "SIDELANE_FAKE_CUDA_NIC_WRITES";

/// Worlds over NICs that signal like this.
fn options(fabric: &Fabric, signal: SignalMode) -> Options {
    let settings = lane::Settings { signal: Some(signal), ..lane::Settings::default() };
    Options { net: NetChoice::Verbs, fake_verbs: Some(fabric.ground(settings)), ..medium() }
}

/// Ways to signal, and routes.
fn ways() -> impl Iterator<Item = (SignalMode, Route)> {
    SignalMode::ALL.into_iter().flat_map(|signal| Route::ALL.map(|route| (signal, route)))
}

#[test]
fn calls_of_hosts_over_nics_do_not_allocate() {
    apart("ep::device::tests::nic_allocations::calls_of_hosts_over_nics_do_not_allocate", &[], || {
        for (nodes, (signal, route)) in
            [[0, 1, 0, 1], [0, 1, 1, 1]].into_iter().flat_map(|nodes| ways().map(move |way| (nodes, way)))
        {
            let (library, fabric) = (Library::new(RANKS), Fabric::new(&["nic0", "nic1"]));
            on_ranks(&nodes, &options(&fabric, signal), |world: World| {
                let group = world.all().unwrap();
                let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
                let mut ep = builder.dtype(Dtype::Bf16).route(route).build().unwrap();
                let mine = tokens::<bf16>(u64::from(world.rank()), 9, HIDDEN, TOP_K, EXPERTS);
                let (allocated, reports) = allocated_by(&mut ep, &mine, &library);
                let what = format!("rank {}, {nodes:?}, {signal:?}, {route:?}", world.rank());
                assert_eq!(allocated, (0, 0), "{what}");
                assert!(reports.iter().all(|report| took(report, "verbs")), "{what}");
            });
        }
    });
}

/// Rows go from device to device, or by staging memory of the host.
#[test]
fn calls_of_devices_over_nics_do_not_allocate() {
    let test = "ep::device::tests::nic_allocations::calls_of_devices_over_nics_do_not_allocate";
    let runs = ["ordered", "unordered"].map(|writes| [(NIC_WRITES, writes)]);
    each_with_kernels(test, &[&runs[0], &runs[1]], || {
        // Where streams see writes of NICs in any order, rows go by memory of the host.
        let unordered = std::env::var(NIC_WRITES).is_ok_and(|writes| writes == "unordered");
        for ((signal, route), buffered) in
            ways().flat_map(|way| [false, true].map(|buffered| (way, buffered)))
        {
            let fabric = Fabric::new(&["nic0", "nic1"]);
            let settings: &Settings<'_> = &|builder| builder.route(route).device_heap(1 << 20);
            let what = format!("{signal:?}, {route:?}, tokens in a buffer: {buffered}");
            let world = ([0, 0, 1, 1], &options(&fabric, signal));
            let round = |ep: &mut ExpertParallel, of: &Tensors, _: bool| in_halves(ep, of);
            counted_with(world, (&what, buffered), settings, &round, &|report| {
                assert!(took(report, "verbs"), "{what}");
                let (staged, registered) = (report.host_staged, report.registration.is_some());
                let expected = unordered.then_some(NoGpuDirect::Unordered);
                assert_eq!((staged, registered), (expected, !unordered), "{what}");
            });
        }
    });
}
