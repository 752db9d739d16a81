//! Ranks that are stopped in mid-dispatch, left behind, and woken up: they get the reason, and
//! disturb no other rank.

use std::time::{Duration, Instant};

use crate::common::job::{Job, Setup, THREE_AND_FIVE, TWO_BY_FOUR, others};
use crate::common::{Command, Failure, Report, SOON};
use crate::support::cases;
use sidelane::topology::Route;

/// Waits that last this long have gone from pausing to sleeping, and their deadline runs.
const SETTLE: Duration = Duration::from_millis(200);

/// Stops `victim` in a dispatch that cannot end, because its local peer does not call. Returns the
/// time when all others had named it, and when it was stopped.
fn stop_in_mid_dispatch(job: &mut Job, victim: u32) -> Instant {
    let idle = (victim + 1) % 8;
    job.verify(0..8, 2);
    job.start_round(others(8, idle));
    job.tell([idle], Command::AwaitDeath);
    job.finish_round(others(8, idle));
    job.demand_silence(SETTLE);
    let stopped = job.stop(victim);
    let lost = Report::Failed(Failure::Lost { rank: victim, silent: true });
    let took = job.demand(others(8, victim), stopped, SOON, &lost);
    println!("rank {victim} stopped, named after {took:?}");
    stopped
}

/// All ranks are in a dispatch, of which one has done the first half only.
fn set_waiting_for(job: &mut Job, awaited: u32) {
    job.verify(0..8, 2);
    job.start_round(0..8);
    job.finish_round(others(8, awaited));
    job.demand_silence(SETTLE);
}

fn rebuild_without(job: &mut Job, victim: u32) {
    let asked = Instant::now();
    job.tell(others(8, victim), Command::Rebuild);
    for ((process, heard), rank) in job.hear(others(8, victim)).into_iter().zip(0..) {
        let previous = others(8, victim).collect();
        assert_eq!(
            heard.said.of_the_epoch_behind(0),
            Report::Joined { rank, size: 7, epoch: 1, previous },
            "process {process}"
        );
    }
    println!("rebuilt without rank {victim} in {:?}", asked.elapsed());
}

#[test]
fn a_stopped_rank_is_left_behind_and_harms_nobody_when_it_wakes() {
    let all = [
        (4, [0; 8], Route::Direct),
        (0, [0; 8], Route::Direct),
        (4, TWO_BY_FOUR, Route::Direct),
        (0, TWO_BY_FOUR, Route::Pxn),
        // A relay of several ranks, and one of none.
        (1, THREE_AND_FIVE, Route::Pxn),
        (7, THREE_AND_FIVE, Route::Pxn),
        (7, [0, 1, 2, 3, 4, 5, 6, 7], Route::Direct),
    ];
    for (victim, nodes, route) in cases(all, 4) {
        let mut job = Setup::on(&nodes).route(route).join();
        stop_in_mid_dispatch(&mut job, victim);
        rebuild_without(&mut job, victim);
        job.verify(others(8, victim), 5);

        // It wakes up in the old dispatch while the others are in rounds of the new world, which
        // last until its worst actions are over.
        job.tell(others(8, victim), Command::Rounds(50));
        let woken = job.wake(victim);
        job.tell([victim], Command::Rebuild);
        job.tell([victim], Command::Scribble);
        job.verified(others(8, victim), 50);
        let evicted = |epoch| Report::Failed(Failure::Evicted { rank: victim, epoch });
        let took = job.demand([victim], woken, SOON, &evicted(0));
        job.demand([victim], woken, SOON, &evicted(0));
        let scribbled = loop {
            job.verify(others(8, victim), 20);
            if let Some(heard) = job.heard(victim) {
                break heard.said;
            }
        };
        let Report::Scribbled(bytes) = scribbled else { panic!("rank {victim}: {scribbled:?}") };
        assert!(bytes >= 4 << 20, "at least its own heap: {bytes}");
        println!(
            "rank {victim} of {nodes:?}, {route:?} told {took:?} after it woke; wrote {bytes} bytes in vain"
        );
        job.verify(others(8, victim), 20);
        job.end(0..8);
    }
}

#[test]
fn a_rank_that_slept_beyond_the_deadline_blames_nobody_for_it() {
    // Silence is told apart from a stall after 2 s: a loaded machine gets as long again, and more.
    const DEADLINE: Duration = Duration::from_secs(6);
    for victim in cases([4, 0], 1) {
        let mut job = Setup::new(8).var("SIDELANE_DEADLINE_MS", DEADLINE.as_millis()).join();
        let stopped = stop_in_mid_dispatch(&mut job, victim);
        rebuild_without(&mut job, victim);
        while stopped.elapsed() < DEADLINE {
            job.verify(others(8, victim), 20);
        }
        let woken = job.wake(victim);
        let evicted = Report::Failed(Failure::Evicted { rank: victim, epoch: 0 });
        job.demand([victim], woken, SOON, &evicted);
        job.end(0..8);
    }
}

#[test]
fn a_short_stop_is_no_loss() {
    for (victim, route) in cases([(0, Route::Direct), (5, Route::Pxn)], 1) {
        let mut job = Setup::new(8).nodes(2).route(route).join();
        set_waiting_for(&mut job, victim);
        job.stop(victim);
        job.demand_silence(Duration::from_millis(600));
        job.wake(victim);
        job.finish_round([victim]);
        job.verified(0..8, 1);
        job.verify(0..8, 3);
        job.end(0..8);
    }
}

#[test]
fn a_job_that_was_stopped_as_a_whole_goes_on_where_it_was() {
    const DEADLINE: Duration = Duration::from_secs(2);
    for route in cases(Route::ALL, 1) {
        let setup = Setup::on(&THREE_AND_FIVE).route(route);
        let mut job = setup.var("SIDELANE_DEADLINE_MS", DEADLINE.as_millis()).join();
        set_waiting_for(&mut job, 3);
        for rank in 0..8 {
            job.stop(rank);
        }
        job.demand_silence(DEADLINE + Duration::from_millis(500));
        for rank in 0..8 {
            job.wake(rank);
        }
        job.finish_round([3]);
        job.verified(0..8, 1);
        job.verify(0..8, 3);
        job.end(0..8);
    }
}
