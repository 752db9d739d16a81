//! The tcp lane between real processes: on one machine, and between two network namespaces that can
//! be cut off from each other.

use std::time::Instant;

use crate::common::job::{Job, Setup, THREE_AND_FIVE, TWO_BY_FOUR, others};
use crate::common::{Command, Failure, LONG, Report, SOON};
use crate::support::cases;
use crate::support::network::Network;
use sidelane::topology::Route;

const TWO_BY_TWO: [u32; 4] = [0, 0, 1, 1];

fn lost(rank: u32, silent: bool) -> Report {
    Report::Failed(Failure::Lost { rank, silent })
}

pub fn set_running(job: &mut Job, ranks: u32) {
    job.tell(0..ranks, Command::Loop);
    job.demand(0..ranks, Instant::now(), LONG, &Report::Running);
}

fn demand_net(job: &mut Job, ranks: u32, net: &str) {
    job.tell(0..ranks, Command::NameRail);
    job.demand(0..ranks, Instant::now(), LONG, &Report::Net(net.to_owned()));
}

#[test]
fn every_row_lands_and_returns_over_tcp() {
    let all = [
        (&TWO_BY_TWO[..], Route::Direct),
        (&TWO_BY_TWO, Route::Pxn),
        (&TWO_BY_FOUR, Route::Direct),
        (&THREE_AND_FIVE, Route::Pxn),
        (&[0, 1, 2, 3], Route::Direct),
    ];
    for (nodes, route) in cases(all, 3) {
        let ranks = nodes.len() as u32;
        let mut job = Setup::on(nodes).route(route).var("SIDELANE_NET", "tcp").join();
        demand_net(&mut job, ranks, "tcp (requested)");
        job.verify(0..ranks, 12);
        job.end(0..ranks);
    }
}

#[test]
fn tcp_rank_that_dies_or_leaves_is_named_and_others_meet_again() {
    let all =
        [(2, Route::Direct, true), (0, Route::Pxn, true), (5, Route::Pxn, true), (6, Route::Direct, false)];
    for (victim, route, killed) in cases(all, 1) {
        let mut job = Setup::on(&TWO_BY_FOUR).route(route).var("SIDELANE_NET", "tcp").join();
        job.verify(0..8, 2);
        job.start_round((0..8).filter(|&rank| killed || rank != victim));
        job.finish_round(others(8, victim));
        let since = Instant::now();
        match killed {
            true => assert!(job.kill(victim) >= since),
            false => job.tell([victim], Command::End),
        }
        let took = job.demand(others(8, victim), since, SOON, &lost(victim, false));
        println!("rank {victim} gone ({killed}), named after {took:?}");
        job.tell(others(8, victim), Command::Rebuild);
        for (process, heard) in job.hear(others(8, victim)) {
            assert!(matches!(heard.said, Report::Joined { size: 7, .. }), "{process}: {:?}", heard.said);
        }
        job.verify(others(8, victim), 3);
        job.end(others(8, victim));
    }
}

#[test]
fn ranks_that_leave_at_once_have_delivered_everything() {
    let thrice = Route::ALL.into_iter().flat_map(|route| [route; 3]);
    for route in cases(thrice, 3) {
        let mut job = Setup::on(&TWO_BY_FOUR).route(route).var("SIDELANE_NET", "tcp").join();
        job.verify(0..8, 1);
        job.tell(0..8, Command::LastRound);
        job.verified(0..8, 1);
        (0..8).for_each(|rank| assert_eq!(job.ended(rank), Some(0)));
    }
}

#[test]
fn reset_wire_of_live_ranks_ends_world_by_name_and_is_rebuilt() {
    let mut job = Setup::on(&TWO_BY_TWO).var("SIDELANE_NET", "tcp").join();
    job.verify(0..4, 2);
    job.tell([1], Command::ResetWires);
    job.demand([1], Instant::now(), SOON, &Report::Reset(2));
    let since = Instant::now();
    job.tell(0..4, Command::Loop);
    for (rank, heard) in job.hear(0..4) {
        let Report::Failed(Failure::Wire { rank: a, by: b, first }) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        println!("rank {rank} after {:?}: wire from {b} to {a}, seen by itself: {first}", heard.at - since);
        assert!((a == 1 || b == 1) && a != b && a.max(b) >= 2, "{a} and {b}");
        assert!(!first || b == rank, "rank {rank} saw what rank {b} did");
        assert!(heard.at - since <= SOON, "rank {rank}");
    }
    job.tell(0..4, Command::Rebuild);
    for (rank, heard) in job.hear(0..4) {
        let previous = (0..4).collect();
        assert_eq!(heard.said.of_the_epoch_behind(0), Report::Joined { rank, size: 4, epoch: 1, previous });
    }
    job.verify(0..4, 3);
    job.end(0..4);
}

#[test]
fn tcp_address_of_other_machine_is_error_on_every_rank() {
    let setup = Setup::on(&TWO_BY_TWO).var("SIDELANE_NET", "tcp");
    let mut job = setup.var_of(2, "SIDELANE_TCP_ADDRESS", "203.0.113.7").start();
    for (rank, heard) in job.hear(0..4) {
        let Report::Failed(Failure::Other(words)) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        let expected = if rank == 2 { "SIDELANE_TCP_ADDRESS" } else { "rank 2 cannot use the tcp lane" };
        assert!(words.contains(expected), "rank {rank}: {words}");
    }
}

/// Two ranks on each of two machines.
pub fn across(network: &std::sync::Arc<Network>) -> Setup {
    Setup::on(&TWO_BY_TWO).across(network)
}

#[test]
fn machines_without_anything_better_are_joined_by_tcp() {
    let Some(network) = Network::new(2) else { return };
    for route in cases(Route::ALL, 1) {
        // Independent of the NICs of this machine.
        let setup = across(&network).var("SIDELANE_IBVERBS_LIBRARY", "/nowhere/libibverbs.so.1");
        let mut job = setup.route(route).join();
        job.tell(0..4, Command::NameRail);
        let why =
            "tcp (the nodes are on several machines, and rank 0 has no usable NIC: cannot load /nowhere/";
        for (rank, heard) in job.hear(0..4) {
            let Report::Net(net) = heard.said else { panic!("rank {rank}: {:?}", heard.said) };
            assert!(net.starts_with(why), "rank {rank}: {net}");
        }
        job.verify(0..4, 10);
        job.end(0..4);
    }
}

#[test]
fn the_interface_of_the_wires_can_be_named() {
    let Some(network) = Network::new(2) else { return };
    let mut job = across(&network).var("SIDELANE_TCP_ADDRESS", "wire").join();
    job.verify(0..4, 2);
    job.end(0..4);
}

#[test]
fn the_loop_lane_between_machines_is_refused_on_every_rank() {
    let Some(network) = Network::new(2) else { return };
    let mut job = across(&network).var("SIDELANE_NET", "loopback").start();
    for (rank, heard) in job.hear(0..4) {
        let Report::Failed(Failure::Other(words)) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        assert!(words.contains("another machine"), "rank {rank}: {words}");
    }
}

#[test]
fn a_machine_whose_ranks_are_killed_is_named_by_the_other() {
    let Some(network) = Network::new(2) else { return };
    let mut job = across(&network).join();
    set_running(&mut job, 4);
    let killed = Instant::now();
    job.kill(2);
    job.kill(3);
    for (rank, heard) in job.hear(0..2) {
        println!("rank {rank} after {:?}: {:?}", heard.at - killed, heard.said);
        assert!(
            matches!(heard.said, Report::Failed(Failure::Lost { rank: 2..=3, silent: false })),
            "rank {rank}: {:?}",
            heard.said
        );
        assert!(heard.at - killed <= SOON);
    }
    job.end(0..2);
}

#[test]
fn machines_whose_wires_are_reset_end_in_time() {
    let Some(network) = Network::new(2) else { return };
    let mut job = across(&network).join();
    job.verify(0..4, 2);
    job.tell([3], Command::ResetWires);
    job.demand([3], Instant::now(), SOON, &Report::Reset(2));
    let since = Instant::now();
    job.tell(0..4, Command::Loop);
    for (rank, heard) in job.hear(0..4) {
        let Report::Failed(Failure::Wire { rank: a, by: b, .. }) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        println!("rank {rank} after {:?}: wire from {b} to {a}", heard.at - since);
        assert!((a == 3 || b == 3) && a.min(b) < 2, "rank {rank}: {a} and {b}");
        assert!(heard.at - since <= SOON);
    }
    job.end(0..4);
}
