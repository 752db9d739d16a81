//! Rebuilds while machines are cut off from each other. Tests begin in order of their names, so
//! these, which wait longest, are at work beside all others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;
use sidelane::bootstrap::Timeouts;

use crate::bootstrap::survivors::job::Setup;
use crate::bootstrap::survivors::{SIZE, storm, two_ranks};
use crate::support::network::Network;

/// A rank is killed while pairs of machines are cut off from each other; later the cuts heal.
fn partition(seed: u64, network: &Arc<Network>) -> Result<Duration, String> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (killed, _) = two_ranks(&mut random);
    let pairs = (0..SIZE).flat_map(|a| (a + 1..SIZE).map(move |b| (a, b)));
    let cuts: Vec<(u32, u32)> = if random.random_bool(0.5) {
        let side = random.random_range(1..(1u32 << SIZE) - 1);
        pairs.filter(|&(a, b)| (side >> a) & 1 != (side >> b) & 1).collect()
    } else {
        let share = random.random_range(0.05..0.6);
        pairs.filter(|_| random.random_bool(share)).collect()
    };
    let (lasts, at_least) = (Duration::from_millis(random.random_range(100..9000)), SIZE / 2 + 1);
    let case = |error| format!("rank {killed} killed, {lasts:?} of cuts {cuts:?}: {error}");
    let mut job =
        Setup { size: SIZE, at_least, faults: BTreeMap::new(), network: Some(Arc::clone(network)) }.join();
    cuts.iter().for_each(|&(a, b)| network.cut(a, b));
    job.signal(killed, Signal::KILL);
    job.hear_for(lasts);
    network.heal();
    let healed = Instant::now();
    let world = job.settle(at_least).map_err(case)?;
    let took = healed.elapsed();
    job.check_succession().map_err(case)?;
    println!("{took:?} after {lasts:?}: rank {killed} killed, {} cuts, {world:?}", cuts.len());
    Ok(took)
}

#[test]
fn of_two_ranks_that_only_reach_the_host_one_is_left_out() {
    let Some(network) = Network::new(4) else { return };
    let (size, faults) = (4, BTreeMap::new());
    let mut job = Setup { size, at_least: 3, faults, network: Some(Arc::clone(&network)) }.join();
    // A connection that breaks and can be made again costs no rank.
    job.break_connection(1, 2);
    let world = job.converge().unwrap();
    assert_eq!((world.epoch, world.members), (1, vec![0, 1, 2, 3]));
    network.cut(1, 2);
    job.break_connection(1, 2);
    job.hear_eviction(2).unwrap();
    let world = job.settle(3).unwrap().expect("three are left");
    assert_eq!(world.members, [0, 1, 3], "of two ranks with one cut each the higher one goes");
}

#[test]
fn cut_that_heals_during_a_rebuild_leaves_no_rank_out() {
    let Some(network) = Network::new(4) else { return };
    let (size, faults) = (4, BTreeMap::new());
    let mut job = Setup { size, at_least: 4, faults, network: Some(Arc::clone(&network)) }.join();
    network.cut(1, 2);
    job.break_connection(1, 2);
    // All wait at rank 0 by then: ranks 1 and 2 have named each other.
    job.hear_for(Timeouts::default().liveness * 3);
    network.heal();
    let world = job.converge().unwrap();
    assert_eq!((world.members, job.errors()), (vec![0, 1, 2, 3], 0));
}

#[test]
fn partitions_make_no_two_worlds_of_more_than_half_of_the_ranks() {
    storm(2, || Network::new(SIZE), partition);
}
