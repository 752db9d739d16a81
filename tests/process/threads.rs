//! Threads of the library that panic: each rank gets an error that names the thread, long before
//! any deadline. A rank that hears nothing fails its test by the job's patience.

use crate::common::job::{Job, Setup, TWO_BY_FOUR, others};
use crate::common::{Command, Failure, Report, Thread};
use sidelane::topology::Route;

const RANKS: u32 = 8;

fn join(route: Route) -> Job {
    // A link that prints a backtrace is silent meanwhile, and its rank counts as lost for that.
    let mut job = Setup::on(&TWO_BY_FOUR).route(route).var("RUST_BACKTRACE", "0").join();
    // Connections and instances are made in the first round.
    job.verify(0..RANKS, 1);
    job
}

fn doom(job: &mut Job, rank: u32, thread: Thread) {
    job.tell([rank], Command::Doom(thread));
    assert_eq!(job.hear([rank])[&rank].said, Report::Doomed);
}

/// All ranks name the thread.
fn demand_name(job: &mut Job, by: u32, thread: Thread) {
    let died = Report::Failed(Failure::Panicked { by, thread: thread.of(by) });
    for (rank, heard) in job.hear(0..RANKS) {
        assert_eq!(heard.said, died, "rank {rank}");
    }
}

/// A thread that works all the time dies, while the other ranks are in a dispatch.
fn die_among_waiting_ranks(victim: u32, thread: Thread) -> Job {
    let mut job = join(Route::Direct);
    job.start_round(others(RANKS, victim));
    job.finish_round(others(RANKS, victim));
    doom(&mut job, victim, thread);
    job.tell([victim], Command::AwaitDeath);
    demand_name(&mut job, victim, thread);
    job
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_link_is_named_by_all_ranks() {
    die_among_waiting_ranks(5, Thread::Link).end(0..RANKS);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_link_of_the_host_is_named_by_all_ranks() {
    die_among_waiting_ranks(0, Thread::Link).end(0..RANKS);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_coordinator_is_named_by_all_ranks() {
    die_among_waiting_ranks(0, Thread::Coordinator).end(0..RANKS);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_progress_thread_is_named_by_all_and_its_rank_rebuilt() {
    let mut job = die_among_waiting_ranks(6, Thread::Net);
    job.tell(0..RANKS, Command::Rebuild);
    for (rank, heard) in job.hear(0..RANKS) {
        let previous = (0..RANKS).collect();
        assert_eq!(
            heard.said.of_the_epoch_behind(0),
            Report::Joined { rank, size: RANKS, epoch: 1, previous }
        );
    }
    job.verify(0..RANKS, 2);
    job.end(0..RANKS);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_relay_is_named_by_all_ranks() {
    let (mut job, victim) = (join(Route::Pxn), 2);
    doom(&mut job, victim, Thread::Relay);
    // Every second round is made in halves: then the relay works in its thread.
    job.tell(0..RANKS, Command::Rounds(1));
    demand_name(&mut job, victim, Thread::Relay);
    job.end(0..RANKS);
}
