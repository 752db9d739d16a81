//! Device heaps that grow: the same bits, the same addresses, and one end for all ranks.

use fake_cuda::FakeDriver;
use half::bf16;
use rustix::process::{Signal, getpid, kill_process};
use sidelane::error::{Cause, Error, MemoryError};
use sidelane::{Dtype, ExpertParallel, Group, World};

use super::rank::{Case, Input, Rank, call, target};
use super::{on_devices, on_settings};
use crate::support::processes::run_ranks;
use crate::support::{on_ranks, small, tokens};

/// Two rows of 1 KiB for each of 12 tokens. A heap of one dispatch of even routing has memory for
/// 24 rows, and an output of them.
const HIDDEN: usize = 512;
const ROW: u64 = 2 * HIDDEN as u64;
const EVEN: u64 = 24 * (2 * ROW + 64);
/// So much at most.
const LIMIT: u64 = 16 << 20;

fn case(ranks: u32) -> Case {
    Case { hidden: HIDDEN, max_in_flight: 8, ..Case::new(ranks, 2 * ranks, 2) }
}

/// A rank whose heap has memory for one dispatch of even routing.
fn growing(group: &Group, case: &Case) -> Rank<bf16> {
    Rank::with(group, case, |builder| builder.device_heap(EVEN).device_heap_limit(LIMIT))
}

/// Tokens of which each chooses both experts of rank `to`.
fn all_to(case: &Case, to: u32, salt: u64, me: u32) -> Input<bf16> {
    let ids = [2 * to as i32, 2 * to as i32 + 1].repeat(case.max_tokens as usize);
    let tokens = tokens(10 * salt + u64::from(me), case.max_tokens, HIDDEN, 2, 2 * case.map.ranks());
    Input { ids, ..tokens }
}

/// Tokens of which each chooses an expert of every other rank, as many for each.
fn even(case: &Case, salt: u64, me: u32) -> Input<bf16> {
    let ranks = case.map.ranks() as i32;
    let ids = (0..case.max_tokens as i32).flat_map(|token| [0, 1].map(|nth| 2 * ((token + nth) % ranks)));
    let ids = ids.collect();
    let tokens = tokens(10 * salt + u64::from(me), case.max_tokens, HIDDEN, 2, 2 * case.map.ranks());
    Input { ids, ..tokens }
}

fn heap(ep: &ExpertParallel) -> (u64, u32) {
    let heap = ep.device_heap().unwrap();
    (heap.total, heap.growths)
}

#[test]
fn bits_before_and_after_a_growth_are_those_of_the_host() {
    let test = "enqueued::growth::bits_before_and_after_a_growth_are_those_of_the_host";
    // With granules of 64 KiB, and of 2 MiB.
    let runs = ["70", "75"].map(|seed| [("SIDELANE_FAKE_CUDA_SEED", seed)]);
    on_settings(test, &[&runs[0], &runs[1]], (8, 0), &|| {
        let case = case(3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = growing(&group, &case);
            rank.round(&even(&case, 1, me));
            assert_eq!(heap(&rank.planned), (EVEN, 0));
            // Three times the rows, at one rank: all ranks grow.
            rank.round(&all_to(&case, 1, 2, me));
            let (grown, times) = heap(&rank.planned);
            assert!(times == 1 && (3 * EVEN..=LIMIT).contains(&grown), "{grown} {times}");
            for salt in 3..6 {
                rank.round(&all_to(&case, salt as u32 % 3, salt, me));
                rank.round(&even(&case, 10 + salt, me));
            }
            assert_eq!(heap(&rank.planned), (grown, 1), "calls that have memory map none");
        });
    });
}

#[test]
#[ignore = "started by a test below, once per rank"]
fn a_rank_whose_heap_grows() {
    let world = World::from_env().unwrap();
    let (group, case, me) = (world.all().unwrap(), case(3), world.rank());
    let mut rank = growing(&group, &case);
    rank.round(&even(&case, 1, me));
    rank.round(&all_to(&case, 1, 2, me));
    assert_eq!(heap(&rank.planned).1, 1);
    println!("rank {me}: its heap has grown");
    // A rank is gone before the others come to a call for which another heap should grow.
    let mut next = growing(&group, &case);
    if me == 2 {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let lost = next.dispatch(&all_to(&case, 1, 3, me)).map(drop).unwrap_err();
    assert!(matches!(lost, Error::World(Cause::Lost { rank: 2, .. })), "{lost}");
    println!("rank {me} knows that rank 2 is lost");
}

#[test]
fn heaps_of_processes_grow_and_a_lost_rank_is_named() {
    let test = "enqueued::growth::heaps_of_processes_grow_and_a_lost_rank_is_named";
    on_devices(test, 8, 82, || {
        let job = run_ranks(&[3], "enqueued::growth::a_rank_whose_heap_grows", &[]);
        for (line, ranks) in [("its heap has grown", 3), ("knows that rank 2 is lost", 2)] {
            assert_eq!(job.text.matches(line).count(), ranks, "{}", job.text);
        }
    });
}

#[test]
fn handles_alive_over_a_growth_keep_addresses_and_bytes() {
    let test = "enqueued::growth::handles_alive_over_a_growth_keep_addresses_and_bytes";
    on_devices(test, 8, 71, || {
        let case = case(2);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = growing(&group, &case);
            let stream = rank.stream.clone();
            // Rows of one dispatch stay while five more come, which takes several growths.
            let mut alive = Vec::new();
            for nth in 0..6 {
                let (rows, handle) = rank.dispatch(&even(&case, nth, me)).unwrap();
                let y = handle.output().unwrap();
                let range = rows.range().unwrap();
                stream
                    .copy(
                        y.range().unwrap().span(0, range.len()).unwrap(),
                        range.span(0, range.len()).unwrap(),
                    )
                    .unwrap();
                let bytes = rank.rows.read::<u8>(&stream, &range);
                alive.push((rows, handle, y, range.address(), bytes));
            }
            let (grown, times) = heap(&rank.planned);
            assert!(times >= 1 && grown >= 6 * EVEN, "{grown} {times}");
            for (nth, (rows, handle, y, address, bytes)) in (0..).zip(alive) {
                let range = rows.range().unwrap();
                assert_eq!((range.address(), rank.rows.read::<u8>(&stream, &range)), (address, bytes));
                let out = rank.out.part(u64::from(case.max_tokens) * ROW);
                rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
                let sums = rank.out.read::<bf16>(&stream, &out);
                let x = even(&case, nth, me).x;
                // Each token chose two experts, which change nothing.
                let twice: Vec<bf16> = x.iter().map(|x| bf16::from_f32(2.0 * x.to_f32())).collect();
                assert_eq!(sums, twice, "sums of dispatch {nth}");
            }
        });
    });
}

#[test]
fn cached_dispatches_and_gradients_grow_the_heap() {
    let test = "enqueued::growth::cached_dispatches_and_gradients_grow_the_heap";
    on_devices(test, 8, 72, || {
        let case = case(2);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = growing(&group, &case);
            let stream = rank.stream.clone();
            let input = even(&case, 1, me);
            let (rows, handle) = rank.dispatch(&input).unwrap();
            let expected = rank.rows.read::<u8>(&stream, &rows.range().unwrap());
            let tensors = rank.put(&input);
            let mut along = Vec::new();
            for _ in 0..4 {
                let (x, _) = call::<bf16>(&tensors);
                along.push(rank.planned.dispatch_cached(x, &handle).unwrap());
            }
            let (grown, times) = heap(&rank.planned);
            assert!(times >= 1 && grown > EVEN, "{grown} {times}");
            for landed in &along {
                assert_eq!(rank.rows.read::<u8>(&stream, &landed.range().unwrap()), expected);
            }
        });
    });
}

#[test]
fn two_groups_grow_apart_and_in_turn() {
    let test = "enqueued::growth::two_groups_grow_apart_and_in_turn";
    on_devices(test, 8, 73, || {
        let (all, two) = (case(4), case(2));
        on_ranks(&all.nodes, &small(), |world: World| {
            let me = world.rank();
            let group = world.all().unwrap();
            let pair = group.subgroup(&if me < 2 { [0, 1] } else { [2, 3] }).unwrap();
            // Ranks of a pair number the devices 0 and 1: two processes' worth of ranks share each.
            let (mut whole, mut half) = (growing(&group, &all), growing(&pair, &two));
            for salt in 0..4_u32 {
                whole.round(&all_to(&all, salt, u64::from(salt), me));
                // One pair needs more than the other.
                let input = match me < 2 {
                    true => all_to(&two, salt % 2, 20 + u64::from(salt), pair.rank()),
                    false => even(&two, 20 + u64::from(salt), pair.rank()),
                };
                half.round(&input);
            }
            assert!(heap(&whole.planned).1 >= 1);
            assert_eq!(heap(&half.planned).1 >= 1, me < 2);
        });
    });
}

/// What a refused growth is at every rank.
fn not_grown(error: &Error) -> (u32, u32, u64) {
    let Error::Memory(MemoryError::HeapNotGrown { rank, refused, total, .. }) = error else {
        panic!("{error}")
    };
    assert!(error.to_string().contains("or set device_heap"), "{error}");
    (*rank, *refused, *total)
}

#[test]
fn growth_refused_at_one_rank_is_an_error_on_all() {
    let test = "enqueued::growth::growth_refused_at_one_rank_is_an_error_on_all";
    on_devices(test, 8, 74, || {
        let case = case(3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            // Where the driver refuses: memory, a mapping, access.
            for kind in 0..3 {
                let mut rank = growing(&group, &case);
                rank.round(&even(&case, 1, me));
                let free = rank.stream.context().free_memory().unwrap();
                group.gather(&[]).unwrap();
                if me == 2 {
                    // For what the call wishes, and for what it must have.
                    FakeDriver::loaded().unwrap().refuse_memory(2, kind);
                }
                let input = all_to(&case, 1, 2, me);
                // A second try for less comes only if the first was for more than a call must have.
                let first = rank.dispatch(&input).map(drop);
                if let Err(error) = &first {
                    assert_eq!(not_grown(error), (1, 2, EVEN));
                    assert_eq!(heap(&rank.planned), (EVEN, 0));
                    assert_eq!(rank.stream.context().free_memory().unwrap(), free, "all of it is given back");
                }
                assert!(first.is_err(), "kind {kind}");
                // The next call works, and one that must have memory asks for it again.
                rank.round(&even(&case, 3, me));
                rank.round(&all_to(&case, 1, 4, me));
                assert_eq!(heap(&rank.planned).1, 1);
            }
        });
    });
}

#[test]
fn growth_that_is_only_wished_for_refuses_no_call() {
    let test = "enqueued::growth::growth_that_is_only_wished_for_refuses_no_call";
    on_devices(test, 8, 76, || {
        let case = case(2);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let rows = 24 * ROW;
            // Rows of two dispatches, and no output beside them.
            let mut rank = Rank::<bf16>::with(&group, &case, |builder| {
                builder.device_heap(2 * rows).device_heap_limit(LIMIT)
            });
            if me == 0 {
                FakeDriver::loaded().unwrap().refuse_memory(0, 0);
            }
            let (first, handle) = rank.dispatch(&even(&case, 1, me)).unwrap();
            assert_eq!(heap(&rank.planned), (2 * rows, 0));
            let second = rank.dispatch(&even(&case, 2, me)).unwrap();
            assert_eq!(heap(&rank.planned), (2 * rows, 0));
            // No call by which ranks could agree: the output is refused here, and says what to set.
            let Err(Error::Memory(MemoryError::OutOfSpace { setting, total, .. })) = handle.output() else {
                panic!("there is no memory for it")
            };
            assert_eq!((setting, total), ("device_heap", 2 * rows));
            // The next call of all ranks makes room for it.
            let third = rank.dispatch(&even(&case, 3, me)).unwrap();
            assert_eq!(heap(&rank.planned).1, 1);
            handle.output().unwrap();
            drop((first, second, third, handle));
            rank.round(&even(&case, 4, me));
            assert_eq!(heap(&rank.planned).1, 1);
        });
    });
}

#[test]
fn memory_requested_by_one_rank_exists_after_next_dispatch() {
    let test = "enqueued::growth::memory_requested_by_one_rank_exists_after_next_dispatch";
    on_devices(test, 8, 81, || {
        let case = case(2);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = growing(&group, &case);
            let tokens = 3000;
            if me == 1 {
                let refused = rank.planned.token_buffer(tokens).unwrap_err();
                assert!(refused.to_string().ends_with("raise device_heap"), "{refused}");
            }
            rank.round(&even(&case, 1, me));
            let grown = heap(&rank.planned);
            assert!(grown.1 == 1 && grown.0 >= u64::from(tokens) * ROW, "{grown:?}");
            let buffer = (me == 1).then(|| rank.planned.token_buffer(tokens).unwrap());
            rank.round(&even(&case, 2, me));
            assert_eq!(heap(&rank.planned), grown, "ranks ask once");
            drop(buffer);
        });
    });
}

#[test]
fn calls_with_memory_call_nothing_that_maps() {
    let test = "enqueued::growth::calls_with_memory_call_nothing_that_maps";
    on_devices(test, 8, 77, || {
        let case = case(2);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = growing(&group, &case);
            let (x, y) = (all_to(&case, 0, 1, me), even(&case, 2, me));
            rank.round(&x);
            rank.round(&y);
            group.gather(&[]).unwrap();
            let counted = || {
                let counters = FakeDriver::loaded().unwrap().counters();
                (counters.mappings, counters.allocations)
            };
            let before = counted();
            group.gather(&[]).unwrap();
            for _ in 0..3 {
                rank.round(&x);
                rank.round(&y);
            }
            // Handles that go without an output owe nothing any more: more than a chunk, otherwise.
            let tensors = rank.put(&y);
            for _ in 0..100 {
                let (x, choices) = call::<bf16>(&tensors);
                rank.planned.dispatch(x, choices).unwrap();
            }
            group.gather(&[]).unwrap();
            assert_eq!(counted(), before);
            group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn heap_at_its_limit_says_what_to_raise() {
    let test = "enqueued::growth::heap_at_its_limit_says_what_to_raise";
    on_devices(test, 8, 78, || {
        let case = case(3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let mut rank = Rank::<bf16>::with(&group, &case, |builder| {
                builder.device_heap(EVEN).device_heap_limit(EVEN + 16 * ROW)
            });
            rank.round(&even(&case, 1, me));
            let refused = rank.dispatch(&all_to(&case, 2, 2, me)).map(drop).unwrap_err();
            let Error::Memory(MemoryError::OutOfSpace { rank: 2, asked, setting, .. }) = &refused else {
                panic!("{refused}")
            };
            assert_eq!((*asked, *setting), (72 * ROW, "device_heap_limit"), "{refused}");
            assert!(refused.to_string().ends_with("raise device_heap_limit"), "{refused}");
            rank.round(&even(&case, 3, me));
        });
    });
}

#[test]
fn ranks_of_one_device_grow_while_the_driver_locks() {
    let test = "enqueued::growth::ranks_of_one_device_grow_while_the_driver_locks";
    let settings = [("SIDELANE_FAKE_CUDA_LOCKS", "1"), ("CUDA_MODULE_LOADING", "EAGER")];
    on_settings(test, &[&settings], (8, 79), &|| {
        let case = case(3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), world.rank());
            let stream = crate::devices::stream(0);
            let mut rank = Rank::<bf16>::on_stream(&group, &case, stream, |builder| {
                builder.device_heap(EVEN).device_heap_limit(LIMIT)
            });
            // Work of earlier calls is under way when the heap grows.
            let inputs: Vec<_> = (0..4).map(|nth| all_to(&case, nth % 3, u64::from(nth), me)).collect();
            rank.all_in_flight(&inputs);
            assert!(heap(&rank.planned).1 >= 1);
        });
    });
}

#[test]
fn growth_is_no_setting_of_several_nodes_or_below_the_heap() {
    let test = "enqueued::growth::growth_is_no_setting_of_several_nodes_or_below_the_heap";
    on_devices(test, 8, 80, || {
        for (nodes, heap, limit) in [([0, 1], 1 << 20, 2 << 20), ([0, 0], 2 << 20, 1 << 20)] {
            on_ranks(&nodes, &small(), |world: World| {
                let (group, stream) = (world.all().unwrap(), crate::devices::stream(world.rank()));
                let case = Case::across(&nodes, 4, 2);
                let builder = case.settings::<bf16>(&group).on(&stream).dtype(Dtype::Bf16);
                let refused = builder.device_heap(heap).device_heap_limit(limit).build().map(drop);
                let refused = refused.unwrap_err().to_string();
                assert!(refused.contains("device_heap_limit"), "{refused}");
            });
        }
    });
}
