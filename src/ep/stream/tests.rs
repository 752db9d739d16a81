//! Slots that cross straight: from memory of devices to memory of devices, by cards that read and write it. The driver is the
//! stand-in of `tests/stand-in-cuda`; the cards are not there either, or those of two machines (`tests/testbed`).

#[path = "../../../tests/device/kernels/world.rs"]
#[allow(dead_code, reason = "tests of other lanes use the rest")]
mod packed;
#[path = "../../../tests/device/stream/rank.rs"]
#[allow(dead_code, reason = "tests of other lanes use the rest")]
mod rank;
#[path = "../../../tests/device/stream/replays.rs"]
mod replays;
#[path = "../../../tests/rows/common/mod.rs"]
mod rows_common;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stand_in_cuda::StandIn;

use self::rank::{Case, Rank, content, on_nodes, options};
use crate::bootstrap::Clocks;
use crate::config::RailChoice;
use crate::device::{PinnedMemory, Priority, Stream};
use crate::ep::planned::tests::apart;
use crate::error::{Cause, LaneError};
use crate::lane::{Fabric, Settings, SignalMode};
use crate::world::{Detour, NoDmaBuf, Registration};
use crate::{Error, Options, World};

const TWO_AND_TWO: [u32; 4] = [0, 0, 1, 1];
const THREE_AND_FIVE: [u32; 8] = [0, 0, 0, 1, 1, 1, 1, 1];
const CASE: Case = Case { ranks: 4, experts: 10, top_k: 3, hidden: 24, max_tokens: 3 };
const WIDE: Case = Case { ranks: 8, experts: 20, top_k: 4, hidden: 16, max_tokens: 4 };

/// Runs the body on the stand-in, once for each of these settings, in processes of their own.
fn on_each(test: &str, runs: &[&[(&str, &str)]], body: impl FnOnce()) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/kernels.cu");
    let library = stand_in_cuda::kernels(&source).unwrap();
    let driver = stand_in_cuda::install().unwrap();
    let usual = [
        ("LD_LIBRARY_PATH", driver.to_str().unwrap()),
        ("SIDELANE_STAND_IN_KERNELS", library.to_str().unwrap()),
        ("CUDA_MODULE_LOADING", "EAGER"),
    ];
    let runs: Vec<_> = runs.iter().map(|settings| [&usual, *settings].concat()).collect();
    let test = format!("ep::stream::tests::{test}");
    apart::each(&test, &runs.iter().map(Vec::as_slice).collect::<Vec<_>>(), body);
}

fn on_stand_in(test: &str, body: impl FnOnce()) {
    on_each(test, &[&[("SIDELANE_STAND_IN_CARD_WRITES", "ordered")]], body);
}

/// A world over cards that signal like this.
fn over(fabric: &Fabric, signal: SignalMode) -> Options {
    let stand_in = Some(fabric.ground(Settings { signal, ..Settings::default() }));
    Options { rail: RailChoice::Verbs, stand_in, ..options() }
}

/// Each rank on a device of its own, all over two cards; nothing of these is left.
fn on_cards(nodes: &[u32], case: Case, signal: SignalMode, body: impl Fn(Rank) + Sync) {
    let fabric = Fabric::new(&["card0", "card1"]);
    on_nodes(nodes, &over(&fabric, signal), |world| body(Rank::new(case, world)));
    assert_eq!(fabric.leftovers(), (0, 0));
}

fn is_straight(rank: &Rank) {
    let report = rank.exchange.report();
    assert_eq!(report.detour, None);
    assert_eq!(report.registration, Some(Registration::Address(NoDmaBuf::Driver)));
    assert_eq!((report.dispatch.out_bytes, report.combine.in_bytes), (0, 0));
    assert!(report.dispatch.straight_bytes > 0 && report.combine.straight_bytes > 0);
}

#[test]
fn slots_go_from_device_to_device_for_hundreds_of_rounds_to_the_bit() {
    let run = |seed, queues, writes| {
        [
            ("SIDELANE_STAND_IN_SEED", seed),
            ("CUDA_DEVICE_MAX_CONNECTIONS", queues),
            ("SIDELANE_STAND_IN_CARD_WRITES", writes),
        ]
    };
    let runs = [run("0", "8", "ordered"), run("1", "2", "flushed")];
    let test = "slots_go_from_device_to_device_for_hundreds_of_rounds_to_the_bit";
    on_each(test, &[&runs[0], &runs[1]], || {
        for (nodes, case, signal, rounds) in [
            (&TWO_AND_TWO[..], CASE, SignalMode::Write, 100),
            (&TWO_AND_TWO, CASE, SignalMode::FetchAdd, 40),
            (&THREE_AND_FIVE, WIDE, SignalMode::Write, 20),
        ] {
            on_cards(nodes, case, signal, |mut rank| {
                is_straight(&rank);
                rank.rounds(0..rounds, 20);
                rank.group.gather(&[]).unwrap();
            });
        }
        let flushed = std::env::var("SIDELANE_STAND_IN_CARD_WRITES").is_ok_and(|writes| writes == "flushed");
        assert_eq!(StandIn::loaded().unwrap().counters().flushes > 0, flushed);
    });
}

#[test]
fn a_graph_is_replayed_with_cards_that_write_behind_its_back() {
    on_stand_in("a_graph_is_replayed_with_cards_that_write_behind_its_back", || {
        on_cards(&TWO_AND_TWO, CASE, SignalMode::Write, replays::replays);
        on_cards(&THREE_AND_FIVE, WIDE, SignalMode::Write, replays::replays);
    });
}

#[test]
fn waits_for_words_in_memory_of_devices_end_with_the_world() {
    let runs = ["8", "2"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    let test = "waits_for_words_in_memory_of_devices_end_with_the_world";
    on_each(test, &[&runs[0], &runs[1]], || {
        on_cards(&TWO_AND_TWO, CASE, SignalMode::Write, |rank| {
            is_straight(&rank);
            dies_while_streams_wait(rank);
        });
    });
}

/// Rank 1 cancels the world.
fn dies_while_streams_wait(mut rank: Rank) {
    let tensors = rank.tensors(&CASE.input(2, rank.me()));
    tensors.out.write(0, &[7; 64]).unwrap();
    let cause = Cause::Cancelled { by: 1 };
    if rank.me() == 1 {
        rank.group.gather(&[]).unwrap();
        rank.world.cancel();
        return;
    }
    rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
    rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
    assert!(!rank.stream.is_done().unwrap());
    let _ = rank.group.gather(&[]);
    assert_eq!(rank.exchange.synchronize(&rank.stream), Err(Error::World(cause)));
    let sums = CASE.bytes(tensors.count) as usize;
    assert_eq!(content(&tensors.out)[..sums], vec![0; sums]);
}

#[test]
fn with_a_single_hardware_queue_slots_take_the_detour_and_waits_end() {
    let test = "with_a_single_hardware_queue_slots_take_the_detour_and_waits_end";
    on_each(test, &[&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")]], || {
        on_cards(&TWO_AND_TWO, CASE, SignalMode::Write, |mut rank| {
            let report = rank.exchange.report();
            assert_eq!((report.detour, report.registration), (Some(Detour::OneQueue), None));
            rank.rounds(0..10, 5);
            dies_while_streams_wait(rank);
        });
    });
}

#[test]
fn where_all_hardware_queues_are_held_up_the_cause_is_returned_and_waits_end_when_one_is_free() {
    let test = "where_all_hardware_queues_are_held_up_the_cause_is_returned_and_waits_end_when_one_is_free";
    on_each(test, &[&[("CUDA_DEVICE_MAX_CONNECTIONS", "2")]], || {
        let case = Case { ranks: 2, ..CASE };
        on_cards(&[0, 1], case, SignalMode::Write, |mut rank| {
            is_straight(&rank);
            if rank.me() == 1 {
                rank.group.gather(&[]).unwrap();
                rank.world.cancel();
                return;
            }
            let tensors = rank.tensors(&case.input(2, 0));
            rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
            // Streams take the queues in turn.
            let word = PinnedMemory::new(&rank.context, 64).unwrap();
            let held = [(); 2].map(|()| Stream::new(&rank.context, Priority::Usual).unwrap());
            held.iter().for_each(|held| held.wait(word.range().word::<u32>(0).unwrap(), 1).unwrap());
            let _ = rank.group.gather(&[]);
            let cause = Error::World(Cause::Cancelled { by: 1 });
            assert_eq!(rank.exchange.synchronize(&rank.stream), Err(cause));
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
    on_stand_in("a_silent_rank_is_found_by_words_in_memory_of_the_device", || {
        let fabric = Fabric::new(&["card0", "card1"]);
        let clocks = Clocks { deadline: Duration::from_secs(5), ..Clocks::default() };
        let options = Options { clocks, ..over(&fabric, SignalMode::Write) };
        // With a node for each, words in memory of devices are all there is.
        for nodes in [&TWO_AND_TWO[..], &[0, 1, 2]] {
            let case = Case { ranks: nodes.len() as u32, ..CASE };
            let silent = case.ranks - 1;
            on_nodes(nodes, &options, |world| {
                let mut rank = Rank::new(case, world);
                let tensors = rank.tensors(&case.input(4, rank.me()));
                is_straight(&rank);
                if rank.me() == silent {
                    let since = Instant::now();
                    while rank.world.health().check().is_ok() {
                        assert!(since.elapsed() < Duration::from_secs(30), "nobody named this rank");
                        std::thread::yield_now();
                    }
                } else {
                    rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
                    match rank.exchange.synchronize(&rank.stream).unwrap_err() {
                        Error::Lane(LaneError::Deadline { peer, lane: "copy engine" | "verbs", .. })
                            if peer == silent => {}
                        Error::World(Cause::Stalled { rank, .. }) if rank == silent => {}
                        other => panic!("{other}"),
                    }
                }
                let status = rank.exchange.status();
                assert!(matches!(status, Err(Error::World(Cause::Stalled { rank, .. })) if rank == silent));
            });
        }
    });
}

#[test]
fn where_a_stream_cannot_await_what_cards_write_slots_take_the_detour() {
    let test = "where_a_stream_cannot_await_what_cards_write_slots_take_the_detour";
    on_stand_in(test, || {
        on_cards(&[0, 0, 1, 1], CASE, SignalMode::Immediate, |mut rank| {
            let report = rank.exchange.report();
            assert_eq!((report.detour, report.registration), (Some(Detour::Messages), None));
            assert_eq!(report.dispatch.straight_bytes, 0);
            rank.rounds(0..20, 5);
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn a_card_that_refuses_the_device_is_named_and_all_take_the_detour() {
    on_stand_in("a_card_that_refuses_the_device_is_named_and_all_take_the_detour", || {
        let fabric = Fabric::new(&["card0"]);
        on_nodes(&[0, 1, 1], &over(&fabric, SignalMode::Write), |world| {
            let group = world.all().unwrap();
            // With heaps registered and wires laid, what is next is memory of a device, of whoever comes first.
            let _laid = group.window(64).unwrap();
            if world.rank() == 0 {
                fabric.change("card0", |card| card.refuses = 1);
            }
            group.gather(&[]).unwrap();
            let mut rank = Rank::new(Case { ranks: 3, ..CASE }, world);
            let detour = rank.exchange.report().detour.unwrap();
            let refused = match detour {
                Detour::Card { dma_buf: NoDmaBuf::Driver, errno } => {
                    assert_eq!(errno, rustix::io::Errno::FAULT.raw_os_error());
                    vec![1]
                }
                Detour::Rank(_) => vec![0],
                other => panic!("{other:?}"),
            };
            let said = rank.group.gather(&refused).unwrap();
            let by: Vec<usize> = (0..3).filter(|&rank| said[rank] == [1]).collect();
            assert_eq!(by.len(), 1, "{said:?}");
            assert!(refused == [1] || detour == Detour::Rank(by[0] as u32), "{detour:?}");
            rank.rounds(0..10, 5);
            rank.group.gather(&[]).unwrap();
        });
        assert_eq!(fabric.leftovers(), (0, 0));
    });
}

/// Between the two machines of `tests/testbed`: so many rounds. Bytes that went straight.
pub(in crate::ep) fn between_two_machines(world: World, rounds: u64) -> u64 {
    let case = Case { ranks: world.size(), hidden: 256, ..CASE };
    let mut rank = Rank::on_device(case, world, 0);
    is_straight(&rank);
    let report = rank.exchange.report();
    rank.rounds(0..rounds, 5);
    rank.group.gather(&[]).unwrap();
    rounds * (report.dispatch.straight_bytes + report.combine.straight_bytes)
}
