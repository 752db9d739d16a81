//! Machines that are cut off from each other. Tests begin in order of their names, so these, which
//! wait longest, are at work beside all others.

use std::time::{Duration, Instant};

use crate::common::job::Setup;
use crate::common::{Command, Failure, LONG, Report, SOON};
use crate::support::network::Network;
use crate::tcp::{across, set_running};

#[test]
fn machines_cut_off_by_silence_name_each_other_and_end_in_time() {
    let Some(network) = Network::new(2) else { return };
    let mut job = across(&network).join();
    set_running(&mut job, 4);
    let cut = Instant::now();
    network.cut(0, 1);
    // Silence is found in two seconds; heard of by others a moment later.
    let bound = SOON + Duration::from_secs(1);
    for (rank, heard) in job.hear(0..4) {
        let took = heard.at - cut;
        println!("rank {rank} after {took:?}: {:?}", heard.said);
        let Report::Failed(Failure::Lost { rank: named, silent: true }) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        // The rendezvous is at rank 0, which the other machine loses.
        assert!(if rank < 2 { named >= 2 } else { named == 0 }, "rank {rank} named {named}");
        assert!(took <= bound, "rank {rank} took {took:?}");
    }
    let leaving = Instant::now();
    job.end(0..4);
    let took = leaving.elapsed();
    assert!(took < LONG / 4, "survivors waited for a dead rank: {took:?}");
}

#[test]
fn of_two_machines_that_only_reach_the_third_one_is_left_out() {
    let Some(network) = Network::new(3) else { return };
    let mut job = Setup::on(&[0, 1, 2]).across(&network).join();
    set_running(&mut job, 3);
    network.cut(1, 2);
    for (rank, heard) in job.hear(0..3) {
        let Report::Failed(Failure::Wire { rank: a, by: b, .. }) = heard.said else {
            panic!("rank {rank}: {:?}", heard.said)
        };
        assert_eq!((a.min(b), a.max(b)), (1, 2), "rank {rank}");
    }
    job.tell(0..3, Command::Rebuild);
    let out = Report::Failed(Failure::Evicted { rank: 2, epoch: 1 });
    for (rank, heard) in job.hear(0..3) {
        let joined = Report::Joined { rank, size: 2, epoch: 1, previous: vec![0, 1] };
        let expected = if rank == 2 { out.clone() } else { joined };
        assert_eq!(heard.said.of_the_epoch_behind(0), expected, "rank {rank}");
    }
    job.verify(0..2, 2);
    job.end(0..3);
}
