//! Slots that cross straight: from memory of devices to memory of devices, by NICs that read and
//! write it. The driver is the fake of `tests/fake-cuda`; the NICs are not there either,
//! or those of two machines (`tests/testbed`).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fake_cuda::FakeDriver;

use crate::bootstrap::Timeouts;
use crate::config::NetChoice;
use crate::device::{PinnedMemory, Priority, Stream};
use crate::ep::Report;
use crate::ep::device::slots::tests::rank::{Case, Rank, content, dispatch, on_nodes, options};
use crate::ep::device::tests::{apart, devices, support};
use crate::error::{Cause, LaneError};
use crate::lane::{Fabric, Settings, SignalMode};
use crate::world::{NoDmaBuf, NoGpuDirect, Registration};
use crate::{Error, Options, World};

#[path = "../../../../tests/device/kernels/world.rs"]
#[allow(dead_code, reason = "tests of other lanes use the rest")]
mod packed;
#[path = "../../../../tests/device/slots/rank.rs"]
#[allow(dead_code, reason = "tests of other lanes use the rest")]
mod rank;
#[path = "../../../../tests/device/slots/replays.rs"]
mod replays;

const TWO_AND_TWO: [u32; 4] = [0, 0, 1, 1];
const THREE_AND_FIVE: [u32; 8] = [0, 0, 0, 1, 1, 1, 1, 1];
const CASE: Case = Case { ranks: 4, experts: 10, top_k: 3, hidden: 24, max_tokens: 3 };
const WIDE: Case = Case { ranks: 8, experts: 20, top_k: 4, hidden: 16, max_tokens: 4 };

/// Runs the body on the fake driver, once for each of these settings, in processes of their own.
fn on_each(test: &str, runs: &[&[(&str, &str)]], body: impl FnOnce()) {
    apart::each_with_kernels(&format!("ep::device::slots::tests::{test}"), runs, body);
}

fn on_fake_driver(test: &str, body: impl FnOnce()) {
    on_each(test, &[&[("SIDELANE_FAKE_CUDA_NIC_WRITES", "ordered")]], body);
}

/// A world over NICs that signal like this.
fn over(fabric: &Fabric, signal: SignalMode) -> Options {
    let fake_verbs = Some(fabric.ground(Settings { signal: Some(signal), ..Settings::default() }));
    Options { net: NetChoice::Verbs, fake_verbs, ..options() }
}

/// Each rank on a device of its own, all over two NICs; nothing of these is left. The NICs place
/// writes in any order, unless signals are writes.
fn on_nics(nodes: &[u32], case: Case, signal: SignalMode, body: impl Fn(Rank) + Sync) {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    if signal != SignalMode::Write {
        fabric.shuffle();
        fabric.hold();
    }
    on_nodes(nodes, &over(&fabric, signal), |world| body(Rank::new(case, world)));
    assert_eq!(fabric.leftovers(), (0, 0));
}

/// That NICs moved rows of this dispatch or combine from device to device.
fn is_straight(report: &Report) {
    assert_eq!(report.host_staged, None);
    assert_eq!(report.registration, Some(Registration::Address(NoDmaBuf::Driver)));
    assert_eq!((report.enqueued.staged_out_bytes, report.enqueued.staged_in_bytes), (0, 0));
    assert!(report.enqueued.gpu_direct_bytes > 0);
}

#[test]
fn slots_go_from_device_to_device_for_hundreds_of_rounds() {
    let run = |seed, queues, writes| {
        [
            ("SIDELANE_FAKE_CUDA_SEED", seed),
            ("CUDA_DEVICE_MAX_CONNECTIONS", queues),
            ("SIDELANE_FAKE_CUDA_NIC_WRITES", writes),
        ]
    };
    let runs = [run("0", "8", "ordered"), run("1", "2", "flushed")];
    let test = "slots_go_from_device_to_device_for_hundreds_of_rounds";
    on_each(test, &[&runs[0], &runs[1]], || {
        for (nodes, case, signal, rounds) in [
            (&TWO_AND_TWO[..], CASE, SignalMode::Write, 100),
            (&TWO_AND_TWO, CASE, SignalMode::FetchAdd, 40),
            (&TWO_AND_TWO, CASE, SignalMode::Immediate, 40),
            (&THREE_AND_FIVE, WIDE, SignalMode::Write, 20),
        ] {
            on_nics(nodes, case, signal, |mut rank| {
                rank.rounds(0..rounds, 20).iter().for_each(is_straight);
                rank.group.gather(&[]).unwrap();
            });
        }
        let flushed = std::env::var("SIDELANE_FAKE_CUDA_NIC_WRITES").is_ok_and(|writes| writes == "flushed");
        assert_eq!(FakeDriver::loaded().unwrap().counters().flushes > 0, flushed);
    });
}

#[test]
fn a_graph_is_replayed_with_nics_that_write_behind_its_back() {
    on_fake_driver("a_graph_is_replayed_with_nics_that_write_behind_its_back", || {
        on_nics(&TWO_AND_TWO, CASE, SignalMode::Write, replays::replays);
        on_nics(&THREE_AND_FIVE, WIDE, SignalMode::Write, replays::replays);
    });
}

#[test]
fn waits_for_words_in_memory_of_devices_end_with_the_world() {
    let runs = ["8", "2"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    let test = "waits_for_words_in_memory_of_devices_end_with_the_world";
    on_each(test, &[&runs[0], &runs[1]], || {
        on_nics(&TWO_AND_TWO, CASE, SignalMode::Write, |rank| dies_while_streams_wait(rank, is_straight));
    });
}

/// Rank 1 cancels the world. The others look at the report of their dispatch.
fn dies_while_streams_wait(mut rank: Rank, reported: impl Fn(&Report)) {
    let tensors = rank.tensors(&CASE.input(2, rank.me()));
    tensors.out.write(0, &[7; 64]).unwrap();
    let cause = Cause::Cancelled { by: 1 };
    if rank.me() == 1 {
        rank.group.gather(&[]).unwrap();
        rank.world.cancel();
        return;
    }
    let handle = rank.layer(&tensors).unwrap();
    reported(&handle.report().unwrap());
    assert!(!rank.stream.is_done().unwrap());
    let _ = rank.group.gather(&[]);
    assert_eq!(rank.ep.synchronize(), Err(Error::World(cause)));
    let sums = CASE.bytes(tensors.count) as usize;
    assert_eq!(content(&tensors.out)[..sums], vec![0; sums]);
}

#[test]
fn with_one_hardware_queue_slots_are_staged_by_the_host() {
    let test = "with_one_hardware_queue_slots_are_staged_by_the_host";
    on_each(test, &[&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")]], || {
        on_nics(&TWO_AND_TWO, CASE, SignalMode::Write, |mut rank| {
            let [report, _] = rank.rounds(0..10, 5);
            assert_eq!((report.host_staged, report.registration), (Some(NoGpuDirect::OneQueue), None));
            dies_while_streams_wait(rank, |report| {
                assert_eq!(report.host_staged, Some(NoGpuDirect::OneQueue))
            });
        });
    });
}

#[test]
fn with_all_hardware_queues_blocked_the_cause_is_returned() {
    let test = "with_all_hardware_queues_blocked_the_cause_is_returned";
    on_each(test, &[&[("CUDA_DEVICE_MAX_CONNECTIONS", "2")]], || {
        let case = Case { ranks: 2, ..CASE };
        on_nics(&[0, 1], case, SignalMode::Write, |mut rank| {
            if rank.me() == 1 {
                rank.group.gather(&[]).unwrap();
                rank.world.cancel();
                return;
            }
            let tensors = rank.tensors(&case.input(2, 0));
            let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            is_straight(&handle.report().unwrap());
            // Streams take the queues in turn.
            let word = PinnedMemory::new(&rank.context, 64).unwrap();
            let held = [(); 2].map(|()| Stream::new(&rank.context, Priority::Normal).unwrap());
            held.iter().for_each(|held| held.wait(word.range().word::<u32>(0).unwrap(), 1).unwrap());
            let _ = rank.group.gather(&[]);
            let cause = Error::World(Cause::Cancelled { by: 1 });
            assert_eq!(rank.ep.synchronize(), Err(cause));
            assert!(!rank.stream.is_done().unwrap());
            word.word(0).unwrap().store(1, Ordering::Release);
            let since = Instant::now();
            while !rank.stream.is_done().unwrap() {
                assert!(since.elapsed() < Duration::from_secs(30), "the wait goes on");
                std::thread::yield_now();
            }
            held.iter().for_each(|held| held.synchronize().unwrap());
        });
    });
}

#[test]
fn a_silent_rank_is_found_by_words_in_memory_of_the_device() {
    on_fake_driver("a_silent_rank_is_found_by_words_in_memory_of_the_device", || {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let timeouts = Timeouts { deadline: Duration::from_secs(5), ..Timeouts::default() };
        let options = Options { timeouts, ..over(&fabric, SignalMode::Write) };
        // With a node for each, words in memory of devices are all there is.
        for nodes in [&TWO_AND_TWO[..], &[0, 1, 2]] {
            let case = Case { ranks: nodes.len() as u32, ..CASE };
            let silent = case.ranks - 1;
            on_nodes(nodes, &options, |world| {
                let mut rank = Rank::new(case, world);
                let tensors = rank.tensors(&case.input(4, rank.me()));
                if rank.me() == silent {
                    let since = Instant::now();
                    while rank.world.health().check().is_ok() {
                        assert!(since.elapsed() < Duration::from_secs(30), "no rank named this rank");
                        std::thread::yield_now();
                    }
                } else {
                    let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
                    is_straight(&handle.report().unwrap());
                    match rank.ep.synchronize().unwrap_err() {
                        Error::Lane(LaneError::Deadline { peer, lane: "copy engine" | "verbs", .. })
                            if peer == silent => {}
                        Error::World(Cause::Stalled { rank, .. }) if rank == silent => {}
                        other => panic!("{other}"),
                    }
                }
                let status = rank.ep.check();
                assert!(matches!(status, Err(Error::World(Cause::Stalled { rank, .. })) if rank == silent));
            });
        }
    });
}

#[test]
fn slots_are_host_staged_if_stream_cannot_await_nics() {
    let test = "slots_are_host_staged_if_stream_cannot_await_nics";
    on_each(test, &[&[("SIDELANE_FAKE_CUDA_NIC_WRITES", "unordered")]], || {
        on_nics(&[0, 0, 1, 1], CASE, SignalMode::Immediate, |mut rank| {
            let [report, _] = rank.rounds(0..20, 5);
            assert_eq!((report.host_staged, report.registration), (Some(NoGpuDirect::Unordered), None));
            assert_eq!(report.enqueued.gpu_direct_bytes, 0);
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn nic_that_refuses_device_is_reason_for_host_staging() {
    on_fake_driver("nic_that_refuses_device_is_reason_for_host_staging", || {
        let fabric = Fabric::new(&["nic0"]);
        on_nodes(&[0, 1, 1], &over(&fabric, SignalMode::Write), |world| {
            let group = world.all().unwrap();
            // With heaps registered and wires laid, what is next is memory of a device, of the rank
            // that comes first.
            let _laid = group.window(64).unwrap();
            if world.rank() == 0 {
                fabric.change("nic0", |nic| nic.refuses = 1);
            }
            group.gather(&[]).unwrap();
            let mut rank = Rank::new(Case { ranks: 3, ..CASE }, world);
            let [report, _] = rank.rounds(0..10, 5);
            let host_staged = report.host_staged.unwrap();
            let refused = match host_staged {
                NoGpuDirect::Nic { dma_buf: NoDmaBuf::Driver, errno } => {
                    assert_eq!(errno, rustix::io::Errno::FAULT.raw_os_error());
                    vec![1]
                }
                NoGpuDirect::Rank(_) => vec![0],
                other => panic!("{other:?}"),
            };
            let said = rank.group.gather(&refused).unwrap();
            let by: Vec<usize> = (0..3).filter(|&rank| said[rank] == [1]).collect();
            assert_eq!(by.len(), 1, "{said:?}");
            assert!(refused == [1] || host_staged == NoGpuDirect::Rank(by[0] as u32), "{host_staged:?}");
            rank.group.gather(&[]).unwrap();
        });
        assert_eq!(fabric.leftovers(), (0, 0));
    });
}

/// Between the two machines of `tests/testbed`: so many rounds. Bytes that went straight.
pub(in crate::ep) fn between_two_machines(world: World, rounds: u64) -> u64 {
    let case = Case { ranks: world.size(), hidden: 256, ..CASE };
    let mut rank = Rank::on_device(case, world, 0);
    let reports = rank.rounds(0..rounds, 5);
    reports.iter().for_each(is_straight);
    rank.group.gather(&[]).unwrap();
    rounds * reports.map(|report| report.enqueued.gpu_direct_bytes).iter().sum::<u64>()
}
