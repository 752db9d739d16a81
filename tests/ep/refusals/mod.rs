//! Refused calls are refused on every rank, move no rows, and leave a working world.

mod build;
mod calls;
mod halves;
mod input;
mod space;

use std::time::Duration;

use crate::support::{Tokens, on_ranks, placement, tokens};
use half::bf16;
use sidelane::bootstrap::Timeouts;
use sidelane::config::Config;
use sidelane::ep::{CombineInput, ExpertParallelBuilder, ExpertRows, Handle};
use sidelane::error::{CallError, Error};
use sidelane::gate::Routing;
use sidelane::memory::PoolReport;
use sidelane::topology::Route;
use sidelane::{Dtype, Element, ExpertParallel, Group, Options, World};

const RANKS: usize = 4;
/// One node; two of two ranks each, interleaved, where the bad rank is no rail peer of rank 1;
/// uneven ones, where rank 3 serves all others, or where the bad rank is alone.
const NODES: [[u32; RANKS]; 4] = [[0; RANKS], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 1]];
/// The rank that does something wrong.
const BAD: u32 = 2;
const HIDDEN: usize = 16;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 6;
const POISON: u8 = 0xab;

/// Bytes of each rank's symmetric heap.
const SYMMETRIC: u64 = 256 << 10;
/// Bytes of a pool that has room for the rows of all calls together.
const ROOMY: u64 = 128 << 10;

/// A pool of `pool` bytes; and a short deadline, because a test that hangs shows nothing.
fn options(pool: u64) -> Options {
    let config = Config::default().with_heap(pool + SYMMETRIC).with_symmetric(SYMMETRIC);
    let timeouts = Timeouts::default().with_deadline(Duration::from_secs(30));
    Options::default().with_config(config).with_timeouts(timeouts)
}

fn worlds() -> impl Iterator<Item = ([u32; RANKS], Route)> {
    NODES.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route)))
}

/// Runs `body` on every rank of every world.
fn everywhere(pool: u64, body: impl Fn(&mut Rank) + Sync) {
    for (nodes, route) in worlds() {
        on_ranks(&nodes, &options(pool), |world| body(&mut Rank::new(world, route)));
    }
}

/// One rank with a layer of its own.
struct Rank {
    world: World,
    group: Group,
    ep: ExpertParallel,
    route: Route,
    round: u64,
    /// Contents of the pool, and poisoned free bytes, before the refused call.
    before: Option<PoolReport>,
}

impl Rank {
    fn new(world: World, route: Route) -> Rank {
        let group = world.all().unwrap();
        let ep = settings(&group, route).build().unwrap();
        Rank { world, group, ep, route, round: 0, before: None }
    }

    /// A layer like this rank's, to be built once more.
    fn settings(&self) -> ExpertParallelBuilder<'_> {
        settings(&self.group, self.route)
    }

    fn is_bad(&self) -> bool {
        self.world.rank() == BAD
    }

    /// The tokens of all ranks in this round: other ones in every round.
    fn all(&self) -> Vec<Tokens<bf16>> {
        let counts = [5, 0, 7, 3];
        counts
            .iter()
            .zip(1..)
            .map(|(&n, rank)| tokens(self.round * 10 + rank, n, HIDDEN, TOP_K, EXPERTS))
            .collect()
    }

    fn mine(&self) -> Tokens<bf16> {
        self.all().swap_remove(self.world.rank() as usize)
    }

    /// A dispatch of this round's tokens that must succeed.
    fn dispatch(&mut self) -> (ExpertRows, Handle) {
        let mine = self.mine();
        let routing = routing(&mine);
        self.ep.dispatch(&mine.x, &routing).expect("a good dispatch")
    }

    /// Poisons the free memory and remembers the rest, once all ranks have read the memory that was
    /// offered to them.
    fn arm(&mut self) {
        self.group.gather(&[]).unwrap();
        self.world.pool().poison(POISON);
        self.before = Some(self.world.pool().report());
    }

    /// Nothing has moved on any rank since [`Rank::arm`].
    fn untouched(&self) {
        self.group.gather(&[]).unwrap();
        let pool = self.world.pool();
        let (mut before, after) = (self.before.expect("armed"), pool.report());
        before.peak = after.peak;
        assert_eq!(after, before);
        let free = pool.alloc(after.largest_free).unwrap();
        let bytes = free.slice::<u8>(0, after.largest_free as usize).unwrap();
        assert!(bytes.iter().all(|&byte| byte == POISON), "something landed at rank {}", self.world.rank());
        self.group.gather(&[]).unwrap();
    }

    /// Dispatch and combine with experts that change nothing, checked bit for bit. Twice: with both
    /// publications.
    fn works(&mut self) {
        for _ in 0..2 {
            self.round += 1;
            let (me, all) = (self.world.rank() as usize, self.all());
            let (rows, handle) = self.dispatch();
            let seen = rows.rows::<bf16>().unwrap();
            let expected = placement(&all, TOP_K, self.ep.expert_map(), 1).swap_remove(me);
            let expected: Vec<bf16> = expected
                .iter()
                .flat_map(|origin| origin.map(|(rank, token, _)| &all[rank].x[token * HIDDEN..][..HIDDEN]))
                .flatten()
                .copied()
                .collect();
            assert_eq!(seen, expected, "rank {me}, round {}", self.round);
            let out: Vec<bf16> = self.ep.combine(seen, &handle).unwrap();
            assert_eq!(out, repeated(&all[me]), "rank {me}, round {}", self.round);
        }
    }
}

/// Rows returned by experts that change nothing.
fn repeated(tokens: &Tokens<bf16>) -> Vec<bf16> {
    crate::support::repeated(tokens, TOP_K, HIDDEN)
}

fn settings(group: &Group, route: Route) -> ExpertParallelBuilder<'_> {
    let builder = ExpertParallel::builder(group).route(route);
    builder.experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN).dtype(Dtype::Bf16).max_tokens(64)
}

fn routing(tokens: &Tokens<bf16>) -> Routing<'_> {
    Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap()
}

/// A dispatch in one piece or in halves, between which a rank's relay works by itself.
fn dispatch<E: Element>(
    ep: &mut ExpertParallel,
    x: &[E],
    routing: &Routing<'_>,
    in_halves: bool,
) -> Result<(ExpertRows, Handle), Error> {
    if in_halves { ep.start_dispatch(x, routing)?.finish() } else { ep.dispatch(x, routing) }
}

/// A combine, likewise.
fn combine<'a, E: Element>(
    ep: &mut ExpertParallel,
    y: impl Into<CombineInput<'a>>,
    handle: &Handle,
    out: &mut [E],
    in_halves: bool,
) -> Result<(), Error> {
    if in_halves { ep.start_combine(y, handle)?.finish(out) } else { ep.combine_into(y, handle, out) }
}

/// The bad rank got its own error, all others the news that it was refused.
fn told(rank: &Rank, error: Error, own: impl Into<Error>) {
    if rank.is_bad() {
        assert_eq!(error, own.into());
    } else {
        assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: BAD, .. })), "{error:?}");
    }
}
