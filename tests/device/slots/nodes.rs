//! Ranks of several nodes: rows are staged in pinned memory of the host, since the loopback lane
//! reaches no device. Tests inside the library have fake NICs, which reach devices.

use rustix::process::{Signal, getpid, kill_process};
use sidelane::device::PinnedMemory;
use sidelane::error::Cause;
use sidelane::world::NoGpuDirect;
use sidelane::{Error, World};

use super::faults::{cancelled, impatient, silent};
use super::rank::{Case, Rank, Tensors, content, dispatch, on_nodes, options, until};
use super::replays::replays;
use super::{calls, on_each, on_fake_driver};
use crate::support::cases;
use crate::support::processes::{Outcome, run_ranks};

const TWO_AND_TWO: [u32; 4] = [0, 0, 1, 1];
const THREE_AND_FIVE: [u32; 8] = [0, 0, 0, 1, 1, 1, 1, 1];
const CASE: Case = Case { ranks: 4, experts: 10, top_k: 3, hidden: 24, max_tokens: 3 };
const WIDE: Case = Case { ranks: 8, experts: 20, top_k: 4, hidden: 16, max_tokens: 4 };

#[test]
fn every_slot_and_every_sum_is_right_across_nodes() {
    on_fake_driver("slots::nodes::every_slot_and_every_sum_is_right_across_nodes", || {
        let three = Case { ranks: 3, experts: 7, top_k: 2, hidden: 40, max_tokens: 5 };
        for (case, nodes) in [(CASE, &TWO_AND_TWO[..]), (WIDE, &THREE_AND_FIVE), (three, &[0, 1, 0])] {
            on_nodes(nodes, &options(), |world| {
                let mut rank = Rank::new(case, world);
                let [report, _] = rank.rounds(1..2, 1);
                assert_eq!(
                    (report.host_staged, report.registration),
                    (Some(NoGpuDirect::Lane("loopback")), None)
                );
                let far = nodes.iter().filter(|&node| *node != nodes[rank.me() as usize]).count() as u64;
                let slots = far * case.shape().bytes();
                assert_eq!(
                    (report.enqueued.staged_out_bytes, report.enqueued.staged_in_bytes),
                    (slots, slots)
                );
                assert_eq!((report.enqueued.inter_node_puts, report.enqueued.inter_node_signals), (far, far));
                (2..=5).for_each(|number| calls::round(&mut rank, number));
            });
        }
    });
}

#[test]
fn hundreds_of_rounds_hold_on_one_hardware_queue_and_on_eight() {
    let run = |seed, queues| [("SIDELANE_FAKE_CUDA_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
    let runs = [run("0", "1"), run("1", "8")];
    let test = "slots::nodes::hundreds_of_rounds_hold_on_one_hardware_queue_and_on_eight";
    on_each(test, &[&runs[0], &runs[1]], || {
        on_nodes(&TWO_AND_TWO, &options(), |world| _ = Rank::new(CASE, world).rounds(0..100, 20));
        on_nodes(&THREE_AND_FIVE, &options(), |world| _ = Rank::new(WIDE, world).rounds(0..20, 20));
    });
}

#[test]
fn a_graph_of_a_whole_layer_is_replayed_across_nodes() {
    on_fake_driver("slots::nodes::a_graph_of_a_whole_layer_is_replayed_across_nodes", || {
        on_nodes(&TWO_AND_TWO, &options(), |world| replays(Rank::new(CASE, world)));
        on_nodes(&THREE_AND_FIVE, &options(), |world| replays(Rank::new(WIDE, world)));
    });
}

#[test]
fn released_dispatch_returns_nothing_and_the_next_one_follows() {
    on_fake_driver("slots::nodes::released_dispatch_returns_nothing_and_the_next_one_follows", || {
        on_nodes(&TWO_AND_TWO, &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            for number in 0..10 {
                let tensors = rank.tensors(&CASE.input(number, rank.me()));
                let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
                rank.ep.release(Some(&handle)).unwrap();
                rank.rounds(number..number + 2, 2);
            }
        });
    });
}

#[test]
fn a_silent_rank_of_another_node_is_named_by_the_deadline() {
    on_fake_driver("slots::nodes::a_silent_rank_of_another_node_is_named_by_the_deadline", || {
        on_nodes(&TWO_AND_TWO, &impatient(), |world| {
            silent(CASE, 3, world, |me| if me == 2 { "copy engine" } else { "loopback" });
        });
    });
}

#[test]
fn a_cancelled_world_ends_the_waits_of_streams_on_all_nodes() {
    on_fake_driver("slots::nodes::a_cancelled_world_ends_the_waits_of_streams_on_all_nodes", || {
        on_nodes(&TWO_AND_TWO, &options(), |world| cancelled(CASE, 1, world));
    });
}

#[test]
fn an_instance_may_go_before_its_last_call_is_done() {
    on_fake_driver("slots::nodes::an_instance_may_go_before_its_last_call_is_done", || {
        on_nodes(&TWO_AND_TWO, &options(), |world| {
            let Rank { world, group, stream, mut ep, context, .. } = Rank::new(CASE, world);
            let input = CASE.input(3, group.rank());
            let tensors = Tensors::of(&context, CASE, &input);
            let (_, handle) = dispatch(&mut ep, &tensors).unwrap();
            ep.release(Some(&handle)).unwrap();
            drop(ep);
            until(|| stream.is_done().unwrap());
            group.gather(&[]).unwrap();
            assert_eq!(world.health().check(), Ok(()));
        });
    });
}

#[test]
fn kept_status_range_lets_the_proxy_of_a_dropped_instance_end() {
    on_fake_driver("slots::nodes::kept_status_range_lets_the_proxy_of_a_dropped_instance_end", || {
        on_nodes(&TWO_AND_TWO, &options(), |world| {
            let Rank { group, stream, mut ep, context, .. } = Rank::new(CASE, world);
            let tensors = Tensors::of(&context, CASE, &CASE.input(3, group.rank()));
            let (_, handle) = dispatch(&mut ep, &tensors).unwrap();
            ep.release(Some(&handle)).unwrap();
            until(|| stream.is_done().unwrap());
            let status = handle.status().unwrap();
            // A stream that reads it now claims no more than that.
            let word = PinnedMemory::new(&context, 8).unwrap();
            stream.copy(word.range().span(0, 4).unwrap(), status.span(0, 4).unwrap()).unwrap();
            drop((ep, handle));
            group.gather(&[]).unwrap();
            until(|| !threads().iter().any(|name| name.starts_with("sidelane-slots")));
            until(|| stream.is_done().unwrap());
            assert_eq!(content(&word), [0; 8]);
        });
    });
}

/// Names of the threads of this process, as far as the kernel keeps them.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// Rounds of ranks that are processes, on 2 + 2 and 3 + 5, and those after which one is killed.
const ROUNDS: [u64; 2] = [300, 60];
const LAST: u64 = 20;

#[test]
#[ignore = "started by the tests below, once per rank"]
fn a_rank_of_a_world_below() {
    let wide = std::env::var_os("SIDELANE_TEST_WIDE").is_some();
    let (case, rounds) = if wide { (WIDE, ROUNDS[1]) } else { (CASE, ROUNDS[0]) };
    let world = World::from_env().unwrap();
    let group = world.all().unwrap();
    let mut rank = Rank::new(case, world);
    let me = rank.me();
    let victim = std::env::var("SIDELANE_TEST_VICTIM").ok().map(|rank| rank.parse::<u32>().unwrap());
    let Some(victim) = victim else {
        rank.rounds(0..rounds, 20);
        println!("rank {me}: {rounds} rounds are right to the bit");
        return;
    };
    rank.rounds(0..LAST, 10);
    // A stream that is done has set its last request; that its proxy has served it, too, is known
    // when all have their rows.
    group.gather(&[]).unwrap();
    if me == victim {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let tensors = rank.tensors(&case.input(LAST, me));
    let called = dispatch(&mut rank.ep, &tensors);
    let fault = called.and_then(|_| rank.ep.synchronize()).unwrap_err();
    assert!(matches!(fault, Error::World(Cause::Lost { rank, .. }) if rank == victim), "{fault}");
    until(|| rank.stream.is_done().unwrap());
    println!("rank {me} knows that rank {victim} is lost");
}

fn launched(sizes: &[u32], variables: &[(&str, &str)]) -> Outcome {
    run_ranks(sizes, "slots::nodes::a_rank_of_a_world_below", variables)
}

#[test]
fn processes_of_two_nodes_agree_for_hundreds_of_rounds() {
    on_fake_driver("slots::nodes::processes_of_two_nodes_agree_for_hundreds_of_rounds", || {
        let wide: &[(&str, &str)] = &[("SIDELANE_TEST_WIDE", "1")];
        let shapes = [(&[2, 2][..], &[][..]), (&[3, 5], wide)];
        for ((sizes, variables), rounds) in cases(shapes.into_iter().zip(ROUNDS), 1) {
            let job = launched(sizes, variables);
            let right = job.text.matches(&format!("{rounds} rounds are right to the bit")).count();
            assert!(job.is_success() && right == job.ends.len(), "{job:?}");
        }
    });
}

#[test]
fn a_killed_rank_of_another_node_is_named_by_all_others() {
    on_fake_driver("slots::nodes::a_killed_rank_of_another_node_is_named_by_all_others", || {
        let job = launched(&[2, 2], &[("SIDELANE_TEST_VICTIM", "3")]);
        for rank in 0..3 {
            assert!(job.text.contains(&format!("rank {rank} knows that rank 3 is lost")), "{job:?}");
        }
    });
}
