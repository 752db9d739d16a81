//! Ranks that die, leave, panic or fall silent, and a launcher that dies: all remaining ranks get
//! an error that names the rank.

use std::time::{Duration, Instant};

use crate::common::job::{Job, Setup, THREE_AND_FIVE, TWO_BY_FOUR, others};
use crate::common::{Command, Failure, LONG, Report, SOON};
use crate::support::cases;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use sidelane::plan::Strategy;
use sidelane::topology::Route;

/// One node; nodes of which each rank reaches all others itself; nodes that are reached by relays.
const WORLDS: [([u32; 8], Route); 5] = [
    ([0; 8], Route::Direct),
    (TWO_BY_FOUR, Route::Pxn),
    ([0, 1, 2, 3, 4, 5, 6, 7], Route::Direct),
    (THREE_AND_FIVE, Route::Pxn),
    (TWO_BY_FOUR, Route::Direct),
];

fn join((nodes, route): ([u32; 8], Route)) -> Job {
    Setup::on(&nodes).route(route).join()
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
fn rank_killed_between_dispatch_halves_is_named_by_all_others() {
    for (victim, world) in cases((0..8).zip(WORLDS.into_iter().cycle()), 3) {
        let mut job = join(world);
        set_waiting(&mut job, 8, victim, true);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {world:?} killed in mid-dispatch, named after {took:?}");
        assert_eq!(job.ended(victim), None, "a signal has no exit code");
        job.end(others(8, victim));
    }
}

#[test]
fn relay_killed_while_others_await_its_rows_is_named_by_all() {
    let all =
        [TWO_BY_FOUR, THREE_AND_FIVE].into_iter().flat_map(|nodes| (0..8).map(move |rank| (nodes, rank)));
    // A relay of two ranks whose own caller is absent.
    for (nodes, victim) in cases(all, 10) {
        let mut job = join((nodes, Route::Pxn));
        job.verify(0..8, 2);
        // Another rank does not call: the relay's own caller waits for it, too, or is away.
        let idle = (victim + 3) % 8;
        job.start_round(others(8, idle));
        job.tell([idle], Command::AwaitDeath);
        let away = |rank| rank == victim && victim.is_multiple_of(2);
        job.finish_round(others(8, idle).filter(|&rank| !away(rank)));
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("relay {victim} of {nodes:?} killed, named after {took:?}");
        job.end(others(8, victim));
    }
}

#[test]
fn each_rank_killed_at_any_moment_is_named_by_all_others() {
    for (victim, world) in cases((0..8).zip(WORLDS.into_iter().cycle().skip(1)), 2) {
        let mut job = join(world);
        set_running(&mut job, 8);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {world:?} killed in its rounds, named after {took:?}");
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_killed_while_all_gather_is_named_by_all_others() {
    for (victim, (nodes, route)) in cases([1, 6, 3].into_iter().zip(WORLDS), 1) {
        let mut job = Setup::on(&nodes).route(route).strategy(Strategy::AllGather).join();
        set_running(&mut job, 8);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {nodes:?} {route:?} killed in its rounds, named after {took:?}");
        job.end(others(8, victim));
    }
}

#[test]
fn rank_killed_during_collective_is_named_by_all_others() {
    let calls = [Command::AllReduceForever, Command::LandForever];
    let all =
        calls.into_iter().flat_map(|call| [0, 5, 2].into_iter().zip(WORLDS).map(move |who| (call, who)));
    for (call, (victim, world)) in cases(all, 4) {
        let mut job = join(world);
        job.tell(0..8, call);
        job.demand(0..8, Instant::now(), LONG, &Report::Running);
        let killed = job.kill(victim);
        let took = job.demand(others(8, victim), killed, SOON, &lost(victim));
        println!("rank {victim} of {world:?} killed in {call:?}, named after {took:?}");
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_killed_while_the_others_build_is_named() {
    for (victim, route) in cases([(0, Route::Direct), (5, Route::Pxn)], 1) {
        let mut job = join((TWO_BY_FOUR, route));
        // The first round makes connections and takes windows, which needs all ranks.
        job.tell(others(8, victim), Command::Rounds(1));
        let killed = job.kill(victim);
        job.demand(others(8, victim), killed, SOON, &lost(victim));
        job.end(others(8, victim));
    }
}

#[test]
fn a_rank_that_panics_is_named_by_all_others() {
    for victim in cases([0, 6], 0) {
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
fn awaited_rank_that_leaves_is_named_long_before_deadline() {
    let all = [0, 3, 5, 3, 2].into_iter().zip(WORLDS).chain([(0, WORLDS[1]), (3, WORLDS[0])]);
    for (leaver, world) in cases(all, 3) {
        let mut job = join(world);
        set_waiting(&mut job, 8, leaver, false);
        let told = Instant::now();
        job.tell([leaver], Command::End);
        let took = job.demand(others(8, leaver), told, SOON, &lost(leaver));
        println!("rank {leaver} of {world:?} left, named after {took:?}");
        assert_eq!(job.ended(leaver), Some(0));
        job.end(others(8, leaver));
    }
}

#[test]
fn ranks_that_exit_on_hearing_of_loss_are_not_taken_for_lost() {
    let victims = [0, 7, 2, 3, 0, 5, 1].into_iter().zip(WORLDS.into_iter().cycle());
    let all = victims.flat_map(|(victim, world)| [true, false].map(|killed| (victim, world, killed)));
    // Rank 0 leaves, which the others have their rendezvous at.
    for (victim, world, killed) in cases(all, 9) {
        let mut job = join(world);
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

#[test]
fn late_rank_is_told_first_cause_after_others_gave_up() {
    // Some wait for the leaver first, and inform those that wait for the late one first.
    let worlds = [WORLDS[4], WORLDS[1], WORLDS[4], WORLDS[3]];
    for ((leaver, late), world) in cases([(5, 2), (3, 0), (5, 7), (4, 1)].into_iter().zip(worlds), 3) {
        let mut job = join(world);
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
    for nodes in cases([1, 2], 1) {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        // The descriptor that the ranks inherit, and no other.
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
        // No rank is left to rebuild.
        job.tell(0..8, Command::Rebuild);
        job.demand(0..8, Instant::now(), SOON, &gone);
        job.end(0..8);
    }
}

const DEADLINE: Duration = Duration::from_secs(2);

fn join_with_deadline((nodes, route): ([u32; 8], Route)) -> Job {
    Setup::on(&nodes).route(route).var("SIDELANE_DEADLINE_MS", DEADLINE.as_millis()).join()
}

/// These ranks name the silent one, not before the deadline and soon after it; the first of them by
/// their own clocks.
fn demand_that_all_name(job: &mut Job, silent: u32, ranks: impl Iterator<Item = u32>, told: Instant) {
    let mut first = Vec::new();
    for (rank, heard) in job.hear(ranks) {
        let took = heard.at - told;
        assert!((DEADLINE..DEADLINE + SOON).contains(&took), "rank {rank} took {took:?}");
        match heard.said {
            Report::Failed(Failure::Deadline { rank: me, peer }) => {
                assert_eq!((me, peer), (rank, silent));
                first.push(rank);
            }
            // Its relay has said so.
            Report::Failed(Failure::Stalled { rank: named, by }) => {
                assert_eq!(named, silent, "rank {rank}");
                first.extend((by == rank).then_some(rank));
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    println!("rank {silent} silent, named first by {first:?}");
    assert!(!first.is_empty() && !first.contains(&silent));
}

/// It lives: the next world has all of them.
fn rebuild_with_all(mut job: Job) {
    job.tell(0..8, Command::Rebuild);
    for (rank, heard) in job.hear(0..8) {
        let previous = (0..8).collect();
        assert_eq!(heard.said.of_the_epoch_behind(0), Report::Joined { rank, size: 8, epoch: 1, previous });
    }
    job.verify(0..8, 3);
    job.end(0..8);
}

#[test]
fn live_rank_that_never_calls_is_named_after_deadline() {
    // After an even number of rounds callers run their relays themselves, after an odd one threads
    // do.
    for ((silent, rounds), world) in
        cases([(2, 2), (5, 3), (6, 2), (0, 2), (1, 3)].into_iter().zip(WORLDS), 3)
    {
        let mut job = join_with_deadline(world);
        job.verify(0..8, rounds);
        job.tell([silent], Command::AwaitDeath);
        let told = Instant::now();
        job.tell(others(8, silent), Command::Rounds(1));
        demand_that_all_name(&mut job, silent, 0..8, told);
        rebuild_with_all(job);
    }
}

#[test]
fn rank_that_never_finishes_dispatch_is_named_not_its_relays() {
    for (silent, world) in cases([(4, WORLDS[1]), (2, WORLDS[3]), (7, WORLDS[3]), (3, WORLDS[4])], 1) {
        let mut job = join_with_deadline(world);
        job.verify(0..8, 2);
        let told = Instant::now();
        job.start_round(0..8);
        job.finish_round(others(8, silent));
        demand_that_all_name(&mut job, silent, others(8, silent), told);
        job.finish_round([silent]);
        let heard = job.hear([silent]).remove(&silent).expect("heard").said;
        assert!(
            matches!(heard, Report::Failed(Failure::Stalled { rank, .. }) if rank == silent),
            "{heard:?}"
        );
        rebuild_with_all(job);
    }
}

#[test]
fn rank_with_wrong_secret_is_refused_and_named_by_others() {
    const PATIENCE: Duration = Duration::from_secs(3);
    let setup = Setup::new(8).var("SIDELANE_RENDEZVOUS_MS", PATIENCE.as_millis());
    let began = Instant::now();
    let mut job = setup.var_of(5, "SIDELANE_SECRET", "another secret of the same length").start();
    for (rank, heard) in job.hear(0..8) {
        let expected = if rank == 5 { Failure::WrongSecret } else { Failure::Missing(vec![5]) };
        assert_eq!(heard.said, Report::Failed(expected), "rank {rank}");
        assert!(heard.at - began < 10 * PATIENCE, "rank {rank}: {:?}", heard.at - began);
    }
    (0..8).for_each(|rank| assert_eq!(job.ended(rank), Some(0)));
}

#[test]
fn rendezvous_without_host_is_error_in_time() {
    let began = Instant::now();
    let mut job = Setup::new(8).only(&[3]).var("SIDELANE_RENDEZVOUS_MS", 500).start();
    let took = job.demand([3], began, 10 * SOON, &Report::Failed(Failure::NoRendezvous));
    assert!(took >= Duration::from_millis(400), "{took:?}");
    assert_eq!(job.ended(3), Some(0));
}
