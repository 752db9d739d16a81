//! Rebuilds of worlds of processes, in which a second rank is killed or stopped, or SYNs are lost.
//!
//! ```text
//!   parent   kills rank a ──► survivors rebuild; rank b signals itself at one of the library's events
//!            all that run are in one world, which has no others          ──► converged
//!            no two worlds of one epoch                                  ──► no split
//! ```

pub mod job;
mod rank;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;

use crate::bootstrap::common::REBUILDS;
use crate::support::network::Network;
use crate::support::random_seed;
use job::Setup;
use rank::Fault;

/// Ranks of a world.
pub const SIZE: u32 = 8;
/// Rebuilds at a time: most of a rebuild is waiting.
const AT_ONCE: u32 = 4;
/// Events of a rank between the first loss and its next world, and some that never come.
const EVENTS: u32 = 11;

#[test]
#[ignore = "a job starts it, once per rank"]
fn rank_serves_its_job() {
    rank::serve();
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Runs cases, several at a time, each with its own seed, and prints how long they took. Each
/// thread that runs cases has a place of its own for them; none if there can be none.
pub fn storm<P: Sync>(
    few: u32,
    place: impl Fn() -> Option<P> + Sync,
    case: impl Fn(u64, &P) -> Result<Duration, String> + Sync,
) {
    let cases = number(REBUILDS).map_or(few, |cases| cases as u32);
    let seed = random_seed();
    println!("{cases} rebuilds");
    let (next, times, failed) = (AtomicU32::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(cases) {
            scope.spawn(|| {
                let Some(place) = place() else { return };
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= cases {
                        return;
                    }
                    match case(seed.wrapping_add(u64::from(nth)), &place) {
                        Ok(took) => times.lock().unwrap().push(took),
                        Err(why) => {
                            println!("case {nth}: {why}");
                            failed.lock().unwrap().push(nth);
                        }
                    }
                }
            });
        }
    });
    let (mut times, failed) = (times.into_inner().unwrap(), failed.into_inner().unwrap());
    times.sort();
    if let Some(last) = times.last() {
        let at = |share: f64| times[((times.len() as f64 * share) as usize).min(times.len() - 1)];
        println!("{} rebuilds: p50 {:?}, p99 {:?}, max {last:?}", times.len(), at(0.5), at(0.99));
    }
    assert!(failed.is_empty(), "cases {failed:?} failed");
}

/// A rank, and another one. Ranks that host are the more interesting ones.
pub fn two_ranks(random: &mut ChaCha8Rng) -> (u32, u32) {
    let mut low = || random.random_range(0..SIZE).min(random.random_range(0..SIZE));
    let first = low();
    let second = (1..SIZE).map(|_| low()).find(|&rank| rank != first).unwrap_or((first + 1) % SIZE);
    (first, second)
}

/// One rebuild after a kill, with a second kill or stop.
fn second_loss(seed: u64, network: Option<&Arc<Network>>) -> Result<Duration, String> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (first, second) = two_ranks(&mut random);
    let fault = Fault { stops: random.random_bool(0.5), event: random.random_range(1..=EVENTS) };
    let (faults, network) = (BTreeMap::from([(second, fault)]), network.cloned());
    let mut job = Setup { size: SIZE, at_least: 1, faults, network }.join();
    let killed = Instant::now();
    job.signal(first, Signal::KILL);
    let case = |error| format!("rank {first} killed, rank {second}: {fault:?}: {error}");
    let world = job.converge().map_err(case)?;
    let took = killed.elapsed();
    if fault.stops && !world.members.contains(&second) {
        job.signal(second, Signal::CONT);
        job.hear_eviction(second).map_err(case)?;
    }
    job.check_succession().map_err(case)?;
    let out = (0..SIZE).filter(|rank| ![first, second].contains(rank) && !world.members.contains(rank));
    let (out, errors): (Vec<u32>, usize) = (out.collect(), job.errors());
    println!(
        "{took:?}: rank {first} killed, rank {second}: {fault:?}, {errors} errors, {world:?}, left out {out:?}"
    );
    Ok(took)
}

#[test]
fn survivors_meet_though_a_second_rank_is_killed_or_stopped() {
    storm(4, || Some(()), |seed, ()| second_loss(seed, None));
}

#[test]
fn survivors_meet_though_a_second_rank_is_lost_and_a_tenth_of_syns() {
    let lossy = || Network::new(SIZE).inspect(|network| network.lose_syns());
    storm(2, lossy, |seed, network| second_loss(seed, Some(network)));
}
