//! Ranks that are processes on two nodes: descriptors go within nodes, rows between them by
//! registered memory.

use std::time::{Duration, Instant};

use half::bf16;
use rustix::process::{Signal, getpid, kill_process};
use sidelane::ep::Report;
use sidelane::error::Cause;
use sidelane::topology::Route;
use sidelane::{Error, World};

use super::calls::some;
use super::on_devices;
use super::rank::{Case, Input, Rank, target};
use crate::support::processes::{Outcome, run_ranks};
use crate::support::{cases, tokens};

const ROUNDS: u64 = 200;
/// Rounds after which a rank is killed.
const LAST: u64 = 20;
const RANKS: u32 = 4;

fn case() -> Case {
    let pxn = std::env::var("SIDELANE_TEST_ROUTE").is_ok_and(|route| route == Route::Pxn.name());
    let route = if pxn { Route::Pxn } else { Route::Direct };
    Case { hidden: 8, max_tokens: 8, align: 2, route, ..Case::across(&[0, 0, 1, 1], 6, 3) }
}

#[test]
#[ignore = "started by a test below, once per rank"]
fn a_rank_of_a_world_below() {
    let world = World::from_env().unwrap();
    let (group, case) = (world.all().unwrap(), case());
    let mut rank = Rank::<bf16>::new(&group, &case);
    let me = u64::from(group.rank());
    let input = |round: u64| {
        let seed = round * 64 + me;
        tokens(seed, some(&case, seed), case.hidden, case.top_k, case.map.experts())
    };
    let Some(victim) = std::env::var("SIDELANE_TEST_VICTIM").ok().map(|rank| rank.parse::<u32>().unwrap())
    else {
        (0..ROUNDS).for_each(|round| rank.round(&input(round)));
        println!("rank {me}: {ROUNDS} rounds are right to the bit");
        return;
    };
    for round in 0.. {
        if round == LAST && group.rank() == victim {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let Err(fault) = there_and_back(&mut rank, &input(round)) else { continue };
        assert!(matches!(fault, Error::World(Cause::Lost { rank, .. }) if rank == victim), "{fault}");
        break;
    }
    let since = Instant::now();
    while rank.stream.is_done() == Ok(false) {
        assert!(since.elapsed() < Duration::from_secs(60), "the stream of rank {me} hangs");
        std::thread::yield_now();
    }
    println!("rank {me} knows that rank {victim} is lost");
}

/// A dispatch and a combine.
fn there_and_back(rank: &mut Rank<bf16>, input: &Input<bf16>) -> Result<Report, Error> {
    let (rows, handle) = rank.dispatch(input)?;
    let (y, out) = (handle.output()?, rank.out.part((input.x.len() * 2) as u64));
    drop(rows);
    rank.planned.combine_into(y, &handle, target::<bf16>(&out))?;
    handle.return_report()
}

fn launched(variables: &[(&str, &str)]) -> Outcome {
    run_ranks(&[2, 2], "enqueued::processes::a_rank_of_a_world_below", variables)
}

#[test]
fn processes_of_two_nodes_agree_for_hundreds_of_rounds() {
    on_devices("enqueued::processes::processes_of_two_nodes_agree_for_hundreds_of_rounds", 8, 1, || {
        for route in cases(Route::ALL, 1) {
            let job = launched(&[("SIDELANE_TEST_ROUTE", route.name())]);
            let right = job.text.matches(&format!("{ROUNDS} rounds are right to the bit")).count();
            assert!(job.is_success() && right == RANKS as usize, "{job:?}");
        }
    });
}

#[test]
fn a_killed_rank_of_another_node_ends_all_waits_with_its_name() {
    on_devices(
        "enqueued::processes::a_killed_rank_of_another_node_ends_all_waits_with_its_name",
        8,
        2,
        || {
            for (victim, route) in cases([(0, Route::Direct), (3, Route::Direct), (3, Route::Pxn)], 2) {
                let victim_named = victim.to_string();
                let variables =
                    [("SIDELANE_TEST_VICTIM", &*victim_named), ("SIDELANE_TEST_ROUTE", route.name())];
                let job = launched(&variables);
                for rank in (0..RANKS).filter(|&rank| rank != victim) {
                    assert!(
                        job.text.contains(&format!("rank {rank} knows that rank {victim} is lost")),
                        "{job:?}"
                    );
                }
            }
        },
    );
}
