//! A world that ends in the middle of dispatches and is built again while packets of the old one
//! are still on the wire: a rank's part. `tests/testbed` starts it on two machines, holds the wire,
//! and says by files when to go on.
//!
//! ```text
//!   ranks   dispatch, dispatch .. | rank 3 cancels | rebuild, epoch 1 |            | dispatches, verified
//!   wire    ------------------ held .................................. let go -----------------------
//! ```
//!
//! Ranks 0 and 2 keep the old world, whose queue pairs are in error then; ranks 1 and 3 drop it,
//! and theirs no longer exist.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use half::bf16;

use crate::config::Config;
use crate::error::{Cause, Error};
use crate::gate::{Pattern, Routing, synthetic};
use crate::memory::PeerMapping;
use crate::topology::Route;
use crate::{ExpertParallel, Options, World};

const RANKS: u32 = 4;
const TOKENS: u32 = 192;
const EXPERTS: u32 = 8;
const TOP_K: u32 = 3;
/// A row fills a packet.
const HIDDEN: usize = 2048;
/// Rounds of dispatch and combine that are verified, per route.
const ROUNDS: u64 = 2;
/// The rank that ends the old world.
const CANCELS: u32 = 3;
/// Longer than anything takes, a virtual machine that gets no processor time included.
const PATIENCE: Duration = Duration::from_secs(150);

#[test]
#[ignore = "needs four processes on two machines, and a program that holds the link between them"]
fn late_packets_of_world_ended_in_dispatch_miss_next_world() {
    let signs = Signs(std::env::var_os("SIDELANE_TEST_SIGNS").expect("the folder of signs").into());
    let config = Config { heap: 32 << 20, symmetric: 4 << 20, ..Config::default() };
    let mut options = Options { config, ..Options::from_env().unwrap() };
    // No rank dies here, and an emulated machine may be unresponsive for seconds.
    options.timeouts.liveness = PATIENCE;
    let old = World::from_env_with(options).unwrap();
    assert_eq!((old.size(), old.epoch(), old.net().unwrap().lane), (RANKS, 0, "verbs"));
    for route in Route::ALL {
        verify(&mut layer(&old, route), &old);
    }

    let end = std::thread::scope(|scope| {
        if old.rank() == CANCELS {
            scope.spawn(|| {
                signs.wait("cancel");
                old.cancel();
            });
        }
        dispatch_until_the_end(&old)
    });
    assert_eq!(end, Error::World(Cause::Cancelled { by: CANCELS }));
    let new = old.rebuild(PATIENCE, 1).unwrap();
    assert_eq!((new.size(), new.epoch()), (RANKS, 1));
    let old = old.rank().is_multiple_of(2).then_some(old);

    let mut layers = Route::ALL.map(|route| layer(&new, route));
    let group = new.all().unwrap();
    let heaps = group.take_symmetric(64).unwrap().window().mapped;
    let before = bytes(&heaps, new.rank());
    println!("rebuilt");
    signs.wait("go");
    assert!(bytes(&heaps, new.rank()) == before, "bytes landed that no rank of this world has sent");
    let rows: u64 = layers.iter_mut().map(|layer| verify(layer, &new)).sum();
    let failed = old.map_or(0, |old| old.nic_counters().failed);
    println!("verified {rows} rows; requests of the old world that failed: {failed}");
    // No rank leaves while another one still receives.
    group.gather(&[]).unwrap();
}

/// Files of the test that directs the ranks.
struct Signs(PathBuf);

impl Signs {
    fn wait(&self, name: &str) {
        let (sign, until): (&Path, _) = (&self.0.join(name), Instant::now() + PATIENCE);
        while !sign.exists() {
            assert!(Instant::now() < until, "no sign to {name}");
            std::thread::yield_now();
        }
    }
}

fn layer(world: &World, route: Route) -> ExpertParallel {
    let group = world.all().unwrap();
    let builder = ExpertParallel::builder(&group);
    builder.experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN).route(route).build().unwrap()
}

/// Choices and contents of a rank's tokens; no two worlds or rounds send the same.
fn tokens(world: &World, round: u64, rank: u32) -> (Routing<'static>, Vec<bf16>) {
    let seed = (u64::from(world.epoch()) << 32) + round;
    let routing = synthetic(Pattern::Uniform, EXPERTS, TOP_K, TOKENS, seed, rank).unwrap();
    let start = seed.wrapping_mul(101) + u64::from(rank) * 7;
    let value = |i: u64| bf16::from_f32(((start + i / HIDDEN as u64 * 31 + i * 13) % 251) as f32);
    (routing, (0..u64::from(TOKENS) * HIDDEN as u64).map(value).collect())
}

/// Only dispatches, so that it is the middle of one wherever it ends.
fn dispatch_until_the_end(world: &World) -> Error {
    let mut layer = layer(world, Route::Pxn);
    let (routing, x) = tokens(world, ROUNDS, world.rank());
    loop {
        if let Err(error) = layer.dispatch(&x, &routing) {
            return error;
        }
    }
}

/// Rounds of dispatch and combine, each row and each sum compared. Returns the number of both.
fn verify(layer: &mut ExpertParallel, world: &World) -> u64 {
    let mut compared = 0;
    for round in 0..ROUNDS {
        let all: Vec<_> = (0..RANKS).map(|rank| tokens(world, round, rank)).collect();
        let (routing, x) = &all[world.rank() as usize];
        let (rows, handle) = layer.dispatch(x, routing).unwrap();
        let seen = rows.rows::<bf16>().unwrap();
        let expected = placed(&all, world.rank());
        assert_eq!(seen.len(), expected.len());
        assert!(bits(seen).eq(bits(&expected)), "rows of rank {} in round {round}", world.rank());
        let mut y = handle.output().unwrap();
        y.rows_mut::<bf16>().unwrap().copy_from_slice(seen);
        let sums = layer.combine::<bf16>(y, &handle).unwrap();
        assert!(bits(&sums).eq(bits(&summed(routing, x))), "sums of rank {} in round {round}", world.rank());
        compared += u64::from(rows.len()) + u64::from(TOKENS);
    }
    compared
}

fn bits(values: &[bf16]) -> impl Iterator<Item = u16> {
    values.iter().map(|value| value.to_bits())
}

/// The rows of a rank's experts, in the order (expert, source, token).
fn placed(all: &[(Routing<'_>, Vec<bf16>)], rank: u32) -> Vec<bf16> {
    let share = EXPERTS / RANKS;
    let mut rows = Vec::new();
    for expert in (rank * share..(rank + 1) * share).map(|expert| expert as i32) {
        for (routing, x) in all {
            let chosen = (0..TOKENS).filter(|&token| routing.experts_of(token).contains(&expert));
            chosen.for_each(|token| rows.extend_from_slice(&x[token as usize * HIDDEN..][..HIDDEN]));
        }
    }
    rows
}

/// Result of experts that change nothing: each token as often as it was chosen, rounded once.
fn summed(routing: &Routing<'_>, x: &[bf16]) -> Vec<bf16> {
    let times = |token: u32| routing.experts_of(token).iter().filter(|&&expert| expert >= 0).count();
    let rows = x.chunks_exact(HIDDEN).zip(0..TOKENS);
    rows.flat_map(|(row, token)| row.iter().map(move |x| bf16::from_f32(x.to_f32() * times(token) as f32)))
        .collect()
}

/// A rank's whole heap, flags among it.
fn bytes(heaps: &PeerMapping, rank: u32) -> Vec<u8> {
    let mut bytes = vec![0; heaps.len_of(rank) as usize];
    heaps.read(rank, 0, &mut bytes).unwrap();
    bytes
}
