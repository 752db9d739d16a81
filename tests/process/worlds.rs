//! Worlds of real processes: their exchanges, their shared memory, and how they continue without
//! lost ranks.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::common::job::{Job, Setup, THREE_AND_FIVE, TWO_BY_FOUR, others};
use crate::common::{Command, Failure, Memory, Report, SOON};
use crate::support::cases;
use sidelane::World;
use sidelane::topology::{NodeMap, Paths, Route};

#[test]
fn every_row_lands_and_returns_between_processes() {
    let all = [
        ([0; 8], Route::Direct),
        (TWO_BY_FOUR, Route::Direct),
        (TWO_BY_FOUR, Route::Pxn),
        (THREE_AND_FIVE, Route::Pxn),
        ([0, 1, 2, 3, 4, 5, 6, 7], Route::Direct),
        ([0, 1, 2, 3, 4, 5, 6, 7], Route::Pxn),
    ];
    for (nodes, route) in cases(all, 3) {
        let mut job = Setup::on(&nodes).route(route).join();
        job.verify(0..8, 12);
        job.end(0..8);
    }
}

#[test]
fn world_refuses_a_misspelt_variable_before_it_looks_for_its_job() {
    const CHILD: &str = "SIDELANE_TEST_MISSPELT";
    if std::env::var_os(CHILD).is_some() {
        println!("refused: {}", World::from_env().unwrap_err());
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "worlds::world_refuses_a_misspelt_variable_before_it_looks_for_its_job",
            "--nocapture",
        ])
        .envs([(CHILD, "1"), ("SIDELANE_NETT", "tcp")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("refused: SIDELANE_NETT is no variable of Sidelane, SIDELANE_NET is"), "{said}");
}

/// What each rank has mapped, after rounds that have laid all wires.
fn memory_of(job: &mut Job, ranks: u32) -> Vec<Memory> {
    job.verify(0..ranks, 2);
    job.tell(0..ranks, Command::ListMemory);
    let heard = job.hear(0..ranks).into_values().map(|heard| match heard.said {
        Report::Memory(memory) => memory,
        other => panic!("{other:?}"),
    });
    heard.collect()
}

#[test]
fn rank_maps_node_heaps_and_wire_to_each_remote_partner() {
    let all =
        [TWO_BY_FOUR, THREE_AND_FIVE].into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route)));
    for (nodes, route) in cases(all, 3) {
        let mut job = Setup::on(&nodes).route(route).join();
        let (seen, map) = (memory_of(&mut job, 8), NodeMap::from_labels(&nodes));
        let mut wires = BTreeSet::<u64>::new();
        let mut pairs = 0;
        for (rank, mine) in (0..).zip(&seen) {
            let paths = Paths::new(&map, route, rank);
            let connected_peers = (0..8).filter(|&peer| paths.needs_connection(peer)).count();
            assert_eq!(mine.heaps.len(), paths.local_peers().count() + 1, "rank {rank}, {route:?}: {mine:?}");
            assert_eq!(mine.wires.len(), connected_peers, "rank {rank}, {route:?}: {mine:?}");
            assert_eq!((&mine.others[..], &mine.open[..]), (&[][..], &[][..]), "rank {rank}, {route:?}");
            for (peer, theirs) in (0..).zip(&seen).filter(|&(peer, _)| peer != rank) {
                let shared = |a: &[u64], b: &[u64]| a.iter().filter(|inode| b.contains(inode)).count();
                let common = (shared(&mine.heaps, &theirs.heaps), shared(&mine.wires, &theirs.wires));
                let expected = match paths.same_node(peer) {
                    true => (mine.heaps.len(), 0),
                    false => (0, usize::from(paths.needs_connection(peer))),
                };
                assert_eq!(common, expected, "ranks {rank} and {peer}, {route:?}: {mine:?}, {theirs:?}");
            }
            wires.extend(&mine.wires);
            pairs += connected_peers;
        }
        assert_eq!(2 * wires.len(), pairs, "one per pair of connected_peers");
        job.end(0..8);
    }
}

#[test]
fn a_rank_of_one_node_has_no_wires() {
    let mut job = Setup::new(3).join();
    for mine in memory_of(&mut job, 3) {
        assert_eq!((mine.heaps.len(), mine.wires.len()), (3, 0), "{mine:?}");
    }
    job.end(0..3);
}

/// Kills a rank of a world of `size` processes in the middle of rounds and rebuilds without it.
/// `processes` are those of the world, in order of rank; returns those of the next.
fn lose_and_rebuild(job: &mut Job, processes: &[u32], victim: u32, epoch: u16) -> Vec<u32> {
    job.tell(processes.iter().copied(), Command::Loop);
    for (process, heard) in job.hear(processes.iter().copied()) {
        assert_eq!(heard.said, Report::Running, "process {process}");
    }
    let killed = job.kill(processes[victim as usize]);
    let survivors: Vec<u32> =
        processes.iter().copied().filter(|&p| p != processes[victim as usize]).collect();
    let lost = Report::Failed(Failure::Lost { rank: victim, silent: false });
    job.demand(survivors.iter().copied(), killed, SOON, &lost);
    let asked = Instant::now();
    job.tell(survivors.iter().copied(), Command::Rebuild);
    let (size, previous) = (survivors.len() as u32, others(processes.len() as u32, victim));
    for (process, heard) in job.hear(survivors.iter().copied()) {
        let rank = survivors.iter().position(|&p| p == process).expect("a survivor") as u32;
        let joined = Report::Joined { rank, size, epoch, previous: previous.clone().collect() };
        assert_eq!(heard.said.of_the_epoch_behind(epoch - 1), joined, "process {process}");
    }
    println!("rebuilt {size} ranks, epoch {epoch}, in {:?}", asked.elapsed());
    job.verify(survivors.iter().copied(), 5);
    survivors
}

#[test]
fn a_world_is_rebuilt_again_and_again() {
    let all = [([0; 8], Route::Direct), (TWO_BY_FOUR, Route::Direct), (TWO_BY_FOUR, Route::Pxn)];
    for (nodes, route) in cases(all, 2) {
        let mut job = Setup::on(&nodes).route(route).join();
        let mut processes: Vec<u32> = (0..8).collect();
        for (victim, epoch) in [(3, 1), (0, 2), (5, 3)] {
            processes = lose_and_rebuild(&mut job, &processes, victim, epoch);
        }
        job.end(processes);
    }
}

#[test]
fn spare_takes_the_place_of_a_lost_rank_and_all_rows_are_right() {
    let mut job = Setup::new(3).spare().join();
    let survivors = lose_and_rebuild(&mut job, &[0, 1, 2], 1, 1);
    job.tell(survivors, Command::Grow);
    let processes = [0, 2, 3];
    for (expected, (process, heard)) in (0..).zip(job.hear(processes)) {
        let Report::Joined { rank, size: 3, epoch: 2.., previous } = heard.said else {
            panic!("process {process}: {:?}", heard.said)
        };
        assert_eq!((rank, previous), (expected, vec![0, 1]), "process {process}");
    }
    job.verify(processes, 5);
    job.end(processes);
}

#[test]
fn spare_that_dies_on_admission_is_named_and_old_world_goes_on() {
    let mut job = Setup::on(&[0, 1, 1]).dying_spare().join();
    job.verify(0..3, 2);
    job.tell(0..3, Command::Grow);
    let lost = Report::Failed(Failure::SpareLost { rank: 3 });
    for (process, heard) in job.hear(0..3) {
        assert_eq!(heard.said, lost, "process {process}");
    }
    job.verify(0..3, 5);
    // Two of three are the majority still.
    let survivors = lose_and_rebuild(&mut job, &[0, 1, 2], 0, 1);
    job.end(survivors);
}

#[test]
fn spare_with_other_setting_is_refused_and_ranks_admit_next_one() {
    for (setting, other) in [("SIDELANE_HEAP", "16M"), ("SIDELANE_LIVENESS_MS", "9000")] {
        let mut job = Setup::new(2).spare().spare().var_of(2, setting, other).join();
        // It asks once the other one was refused.
        job.stop(3);
        job.tell(0..2, Command::Grow);
        let refusal = Failure::SettingsDiffer { setting: setting.to_owned() };
        assert_eq!(job.hear([2])[&2].said, Report::Failed(refusal));
        job.wake(3);
        let processes = [0, 1, 3];
        for (expected, (process, heard)) in (0..).zip(job.hear(processes)) {
            let Report::Joined { rank, size: 3, .. } = heard.said else {
                panic!("process {process}: {:?}", heard.said)
            };
            assert_eq!(rank, expected, "process {process}");
        }
        job.verify(processes, 5);
        job.end(processes);
    }
}

#[test]
fn rank_killed_during_rebuild_is_left_out_by_further_rebuild() {
    for (first, second) in cases([(0, 1), (3, 0), (5, 6), (1, 7)], 0) {
        let mut job = Setup::on(&TWO_BY_FOUR).join();
        job.verify(0..8, 2);
        let killed = job.kill(first);
        job.tell(others(8, first), Command::AwaitDeath);
        let lost = Report::Failed(Failure::Lost { rank: first, silent: false });
        job.demand(others(8, first), killed, SOON, &lost);
        job.tell(others(8, first), Command::Rebuild);
        let killed = job.kill_in_next_build(second);
        let survivors: Vec<u32> = others(8, first).filter(|&rank| rank != second).collect();
        let is_met = |report: &Report| matches!(report, Report::Joined { size: 6, .. });
        // They fail to build it, or have done so before the kill, and try again.
        let mut rebuilds = 1;
        while !job.hear(survivors.iter().copied()).values().all(|heard| is_met(&heard.said)) {
            rebuilds += 1;
            job.tell(survivors.iter().copied(), Command::Rebuild);
        }
        println!("ranks {first} and {second}: {rebuilds} rebuilds in {:?}", killed.elapsed());
        job.verify(survivors.iter().copied(), 3);
        job.end(survivors);
    }
}
