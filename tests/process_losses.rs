//! Ranks that die, leave, panic or fall silent, and a launcher that dies: whoever is left is told, and by name.

mod process_common;
mod support;

use std::time::{Duration, Instant};

use process_common::job::{Job, Setup, others};
use process_common::{Command, Failure, LONG, Report, SOON, rank};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};

#[test]
#[ignore = "started by the tests below, once per rank"]
fn a_rank_of_the_worlds_below() {
    rank::serve();
}

fn lost(rank: u32) -> Report {
    Report::Failed(Failure::Lost { rank, silent: false })
}

/// All ranks go through rounds.
fn set_running(job: &mut Job, ranks: u32) {
    job.tell(0..ranks, Command::Loop);
    job.demand(0..ranks, Instant::now(), LONG, &Report::Running);
}

/// All ranks but one go into a dispatch, of which that one has done the first half, or nothing.
fn set_waiting(job: &mut Job, ranks: u32, awaited: u32, halfway: bool) {
    job.verify(0..ranks, 2);
    let started = (0..ranks).filter(|&rank| halfway || rank != awaited);
    job.start_round(started.clone());
    job.finish_round(others(ranks, awaited));
}

#[test]
fn each_rank_killed_between_the_halves_of_a_dispatch_is_named_by_all_others() {
    for (victim, nodes) in (0..8).zip([1, 2, 8].into_iter().cycle()) {
        let mut job = Setup::new(8).nodes(nodes).join();
        set_waiting(&mut job, 8, victim, true);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {nodes} nodes killed in mid-dispatch, named after {took:?}");
        assert_eq!(job.ended(victim), None, "a signal has no exit code");
        job.end(others(8, victim));
    }
}

#[test]
fn each_rank_killed_at_any_moment_is_named_by_all_others() {
    for (victim, nodes) in (0..8).zip([2, 8, 1].into_iter().cycle()) {
        let mut job = Setup::new(8).nodes(nodes).join();
        set_running(&mut job, 8);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {nodes} nodes killed in its rounds, named after {took:?}");
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_killed_while_the_others_build_is_named() {
    for victim in [0, 5] {
        let mut job = Setup::new(8).nodes(2).join();
        // The first round lays wires and takes windows, which needs everybody.
        job.tell(others(8, victim), Command::Rounds(1));
        let killed = job.kill(victim);
        job.demand(others(8, victim), killed, SOON, &lost(victim));
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_that_panics_is_named_by_all_others() {
    for victim in [0, 6] {
        let mut job = Setup::new(8).join();
        set_waiting(&mut job, 8, victim, false);
        let told = Instant::now();
        job.tell([victim], Command::Panic);
        let took = job.demand(others(8, victim), told, SOON, &lost(victim));
        println!("rank {victim} panicked, named after {took:?}");
        assert_eq!(job.ended(victim), Some(101));
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_that_leaves_while_others_wait_for_it_is_named_long_before_the_deadline() {
    for (leaver, nodes) in [(0, 1), (3, 1), (0, 2), (3, 2), (3, 8)] {
        let mut job = Setup::new(8).nodes(nodes).join();
        set_waiting(&mut job, 8, leaver, false);
        let told = Instant::now();
        job.tell([leaver], Command::End);
        let took = job.demand(others(8, leaver), told, SOON, &lost(leaver));
        println!("rank {leaver} of {nodes} nodes left, named after {took:?}");
        assert_eq!(job.ended(leaver), Some(0));
        job.end(others(8, leaver));
    }
}

#[test]
fn ranks_that_end_as_soon_as_they_hear_of_a_loss_are_not_mistaken_for_it() {
    for (victim, nodes) in [(0, 1), (7, 2), (0, 8), (3, 2), (2, 8), (0, 2), (5, 1)] {
        for killed in [true, false] {
            let mut job = Setup::new(8).nodes(nodes).join();
            job.verify(0..8, 2);
            job.tell(others(8, victim), Command::LastRound);
            let since = Instant::now();
            if killed {
                job.kill(victim);
            } else {
                job.tell([victim], Command::End);
            }
            // Rank 0 stays for two seconds after it has left, for the others.
            job.demand(others(8, victim), since, SOON + SOON, &lost(victim));
            others(8, victim).for_each(|rank| assert_eq!(job.ended(rank), Some(0)));
        }
    }
}

#[test]
fn who_comes_after_others_have_given_up_is_told_the_first_reason() {
    // Some wait for the leaver first, and tell those who wait for the late one first.
    for (leaver, late) in [(5, 2), (3, 0), (5, 7)] {
        let mut job = Setup::new(8).nodes(2).join();
        job.verify(0..8, 2);
        job.end([leaver]);
        let given_up = (0..8).filter(|&rank| rank != leaver && rank != late);
        let since = Instant::now();
        job.tell(given_up.clone(), Command::LastRound);
        job.demand(given_up, since, SOON + SOON, &lost(leaver));
        job.tell([late], Command::Rounds(1));
        job.demand([late], since, SOON + SOON, &lost(leaver));
        job.end([late]);
    }
}

#[test]
fn a_launcher_that_dies_takes_its_ranks_along() {
    for nodes in [1, 2] {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        // What the ranks inherit, and nothing else.
        fcntl_setfd(&reader, FdFlags::empty()).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&reader);
        let setup = Setup::new(8).nodes(nodes).var("SIDELANE_LAUNCHER_FD", number);
        let mut job = setup.var("SIDELANE_LAUNCHER_PID", 4711).join();
        drop(reader);
        set_running(&mut job, 8);
        let died = Instant::now();
        drop(writer);
        let gone = Report::Failed(Failure::LauncherGone { pid: 4711 });
        let took = job.demand(0..8, died, SOON, &gone);
        println!("the launcher of {nodes} nodes named after {took:?}");
        // There is nobody to rebuild for.
        job.tell(0..8, Command::Rebuild);
        job.demand(0..8, Instant::now(), SOON, &gone);
        job.end(0..8);
    }
}

#[test]
fn a_rank_that_lives_but_never_calls_is_named_when_the_deadline_passes() {
    const DEADLINE: Duration = Duration::from_secs(3);
    for (silent, nodes) in [(2, 1), (0, 2)] {
        let mut job = Setup::new(8).nodes(nodes).var("SIDELANE_DEADLINE_MS", DEADLINE.as_millis()).join();
        job.verify(0..8, 2);
        job.tell([silent], Command::AwaitDeath);
        let called = Instant::now();
        job.tell(others(8, silent), Command::Rounds(1));
        let mut first = Vec::new();
        for (rank, heard) in job.hear(0..8) {
            let took = heard.at - called;
            assert!((DEADLINE..DEADLINE + SOON).contains(&took), "rank {rank} took {took:?}");
            match heard.said {
                Report::Failed(Failure::Deadline { rank: me, peer }) => {
                    assert_eq!((me, peer), (rank, silent));
                    first.push((rank, took));
                }
                Report::Failed(Failure::Stalled { rank: named, by }) => {
                    assert_eq!(named, silent, "rank {rank}");
                    assert_ne!(by, silent);
                }
                other => panic!("rank {rank}: {other:?}"),
            }
        }
        println!("rank {silent} of {nodes} nodes silent, named first by {first:?}");
        assert!(!first.is_empty() && first.iter().all(|&(rank, _)| rank != silent));
        // It lives: the next world has all of them.
        job.tell(0..8, Command::Rebuild);
        for (rank, heard) in job.hear(0..8) {
            let previous = (0..8).collect();
            assert_eq!(heard.said, Report::Joined { rank, size: 8, epoch: 1, previous });
        }
        job.verify(0..8, 3);
        job.end(0..8);
    }
}

#[test]
fn a_rank_with_the_wrong_secret_is_refused_and_the_others_name_it() {
    const PATIENCE: Duration = Duration::from_secs(3);
    let setup = Setup::new(8).var("SIDELANE_RENDEZVOUS_MS", PATIENCE.as_millis());
    let began = Instant::now();
    let mut job = setup.var_of(5, "SIDELANE_SECRET", "guessed").start();
    for (rank, heard) in job.hear(0..8) {
        let expected = if rank == 5 { Failure::WrongSecret } else { Failure::Missing(vec![5]) };
        assert_eq!(heard.said, Report::Failed(expected), "rank {rank}");
        assert!(heard.at - began < PATIENCE + SOON + SOON, "rank {rank}");
    }
    (0..8).for_each(|rank| assert_eq!(job.ended(rank), Some(0)));
}

#[test]
fn nobody_at_the_rendezvous_is_an_error_in_good_time() {
    let began = Instant::now();
    let mut job = Setup::new(8).only(&[3]).var("SIDELANE_RENDEZVOUS_MS", 500).start();
    let took = job.demand([3], began, SOON + SOON, &Report::Failed(Failure::NoRendezvous));
    assert!(took >= Duration::from_millis(400), "{took:?}");
    assert_eq!(job.ended(3), Some(0));
}
