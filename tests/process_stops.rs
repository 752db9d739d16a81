//! Ranks that are stopped in mid-dispatch, left behind, and woken up: they learn what happened, and harm nobody.

mod process_common;
mod support;

use std::time::{Duration, Instant};

use process_common::job::{Job, Setup, others};
use process_common::{Command, Failure, Report, SOON, rank};

#[test]
#[ignore = "started by the tests below, once per rank"]
fn a_rank_of_the_worlds_below() {
    rank::serve();
}

/// Stops `victim` in a dispatch that cannot end, because its neighbour does not call. Returns when all others have
/// named it.
fn stop_in_mid_dispatch(job: &mut Job, victim: u32) {
    let idle = (victim + 1) % 8;
    job.verify(0..8, 2);
    job.tell(others(8, idle), Command::StartRound);
    job.demand(others(8, idle), Instant::now(), Duration::MAX, &Report::Halfway);
    job.tell([idle], Command::AwaitDeath);
    job.tell(others(8, idle), Command::FinishRound);
    let stopped = job.stop(victim);
    let lost = Report::Failed(Failure::Lost { rank: victim, silent: true });
    let took = job.demand(others(8, victim), stopped, SOON, &lost);
    println!("rank {victim} stopped, named after {took:?}");
}

fn rebuild_without(job: &mut Job, victim: u32) {
    let asked = Instant::now();
    job.tell(others(8, victim), Command::Rebuild);
    for ((process, heard), rank) in job.hear(others(8, victim)).into_iter().zip(0..) {
        let previous = others(8, victim).collect();
        assert_eq!(heard.said, Report::Joined { rank, size: 7, epoch: 1, previous }, "process {process}");
    }
    println!("rebuilt without rank {victim} in {:?}", asked.elapsed());
}

#[test]
fn a_stopped_rank_is_left_behind_and_harms_nobody_when_it_wakes() {
    for (victim, nodes) in [(4, 1), (0, 1), (4, 2), (0, 2), (7, 8)] {
        let mut job = Setup::new(8).nodes(nodes).join();
        stop_in_mid_dispatch(&mut job, victim);
        rebuild_without(&mut job, victim);
        job.verify(others(8, victim), 5);

        // It wakes up in the old dispatch while the others are in rounds of the new world.
        job.tell(others(8, victim), Command::Rounds(200));
        let woken = job.wake(victim);
        job.tell([victim], Command::Scribble);
        let mut during = job.hear_any(0..8, 1);
        if during.keys().next() != Some(&victim) {
            panic!("the others were done before rank {victim} woke: {:?}", during.keys());
        }
        let heard = during.remove(&victim).expect("checked above");
        let evicted = Report::Failed(Failure::Evicted { rank: victim, epoch: 0 });
        assert_eq!(heard.said, evicted);
        println!("rank {victim} of {nodes} nodes told {:?} after it woke", heard.at - woken);
        job.verified(others(8, victim), 200);
    }
}
