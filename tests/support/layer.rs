//! All calls of a layer, bit for bit against a reference.

use std::ops::Deref;

use sidelane::ep::{ExpertParallelBuilder, ExpertRows, Handle, RowIndex};
use sidelane::gate::Routing;
use sidelane::{ExpertParallel, Group, Options, World};

use super::reference::{Case, Real, Reference};
use super::{To, Tokens, on_ranks, tiny};

/// Inputs of all ranks, and the results that follow.
pub struct Expected<E>(Reference<E>);

impl<E> Deref for Expected<E> {
    type Target = Reference<E>;

    fn deref(&self) -> &Reference<E> {
        &self.0
    }
}

/// The bytes of a tensor: -0 is not 0 here, and a NaN equals itself.
pub fn bits<T: bytemuck::NoUninit>(tensor: &[T]) -> &[u8] {
    bytemuck::cast_slice(tensor)
}

/// Rows of `columns` elements: the nth is row `landing[n]` of the tensor.
fn gather<T: Copy>(tensor: &[T], columns: usize, landing: &[usize]) -> Vec<T> {
    landing.iter().flat_map(|&at| tensor[at * columns..][..columns].iter().copied()).collect()
}

/// The other way round: row `landing[n]` is the nth.
fn scatter<T: Copy>(tensor: &[T], columns: usize, landing: &[usize]) -> Vec<T> {
    let mut rows = tensor.to_vec();
    for (row, &at) in tensor.chunks_exact(columns).zip(landing) {
        rows[at * columns..][..columns].copy_from_slice(row);
    }
    rows
}

impl<E: Real> Expected<E>
where
    f32: To<E>,
{
    /// Random tokens for this case.
    pub fn new(case: &Case) -> Self {
        Self::seeded(case, 100)
    }

    /// Others for each seed.
    pub fn seeded(case: &Case, seed: u64) -> Self {
        Expected(Reference::seeded(case, seed))
    }

    /// These tokens.
    pub fn of(case: &Case, all: Vec<Tokens<E>>) -> Self {
        Expected(Reference::of(case, all))
    }

    /// The settings that the case describes.
    pub fn builder<'g>(&self, group: &'g Group) -> ExpertParallelBuilder<'g> {
        let case = &self.case;
        let builder = ExpertParallel::builder(group).expert_map(case.map.clone()).top_k(case.top_k);
        let builder = builder.hidden(case.hidden).dtype(E::DTYPE).align(case.align).partial_dtype(case.wire);
        let builder = builder.layout(case.layout).mode(case.mode).route(case.route).sum_order(case.order);
        builder
            .weighted(case.weighted)
            .coalesce_relays(case.spans)
            .strategy(case.strategy)
            .max_tokens(case.max_tokens())
    }

    /// A layer with them.
    pub fn layer(&self, group: &Group) -> ExpertParallel {
        self.builder(group).build().unwrap()
    }

    pub fn routing(&self, me: usize) -> Routing<'_> {
        let mine = &self.all[me];
        Routing::new(self.case.top_k, mine.ids.as_slice(), mine.weights.as_slice()).unwrap()
    }

    pub fn dispatch(&self, ep: &mut ExpertParallel) -> (ExpertRows, Handle) {
        let me = ep.rank() as usize;
        ep.dispatch(&self.all[me].x, &self.routing(me)).unwrap()
    }

    /// For each row of this rank in visible order: where it lies.
    fn landing(&self, me: usize, index: Option<&RowIndex>) -> Vec<usize> {
        let rows = self.seen.rows[me].len();
        assert_eq!(index.is_some(), self.case.spans);
        let Some(index) = index else { return (0..rows).collect() };
        assert_eq!((index.landing().len(), index.visible().len()), (rows, rows));
        for (row, &at) in (0..).zip(index.landing()) {
            assert_eq!(index.visible()[at as usize], row, "there and back");
        }
        index.landing().iter().map(|&at| at as usize).collect()
    }

    /// Compares landed rows with the `x` of all ranks.
    fn landed(&self, me: usize, rows: &ExpertRows, x: impl Fn(usize) -> Vec<E>) {
        let (hidden, expected) = (self.case.hidden, self.rows(me, x));
        assert_eq!(rows.len() as usize, self.seen.rows[me].len(), "rows of rank {me}, {:?}", self.case);
        let landed = gather(rows.rows::<E>().unwrap(), hidden, &self.landing(me, rows.index()));
        assert!(bits(&landed) == bits(&expected), "rows of rank {me}, {:?}", self.case);
    }

    /// Holds rows and handle of a dispatch against what this rank must see.
    pub fn arrived(&self, me: usize, rows: &ExpertRows, handle: &Handle) {
        let (case, seen) = (&self.case, &self.seen);
        self.landed(me, rows, |source| self.all[source].x.clone());
        let (weights, experts) = self.metadata(me);
        assert_eq!(rows.index(), handle.index());
        let landing = self.landing(me, handle.index());
        let of_row = |all: usize| all / landing.len().max(1);
        let row_weights = gather(handle.row_weights(), of_row(weights.len()), &landing);
        let row_experts = gather(handle.row_experts(), of_row(experts.len()), &landing);
        assert_eq!(handle.row_weights().len(), weights.len());
        assert_eq!(bits(&row_weights), bits(&weights), "weights at rank {me}, {case:?}");
        assert_eq!(handle.row_experts().len(), experts.len());
        assert_eq!(row_experts, experts, "experts at rank {me}, {case:?}");
        assert_eq!(handle.dropped(), seen.dropped[me], "dropped at rank {me}, {case:?}");
        assert_eq!(handle.required_rows(), seen.required, "at rank {me}, {case:?}");
        assert_eq!(handle.tokens_per_expert(), seen.per_expert[me], "at rank {me}, {case:?}");
        assert_eq!(handle.padded_tokens_per_expert(), seen.padded[me], "at rank {me}, {case:?}");
        assert_eq!(handle.rows() as usize, seen.rows[me].len());
        assert_eq!(handle.tokens(), case.counts[me]);
    }

    /// Outputs of this rank's experts, where rows lie.
    fn made(&self, me: usize, number: u32, handle: &Handle) -> Vec<E> {
        scatter(&self.outputs(me, number), self.case.hidden, &self.landing(me, handle.index()))
    }

    /// Combine, in place or in halves or of a copy; and both gradients.
    pub fn returns(&self, world: &World, ep: &mut ExpertParallel, handle: &Handle, round: u32) {
        let (me, case) = (ep.rank() as usize, &self.case);
        let y = self.made(me, round, handle);
        let expected = self.sums(me, round, case.weighted);
        let mut out = vec![E::zeroed(); expected.len()];
        world.pool().poison(0xff);
        match round % 3 {
            1 => ep.start_combine(&y, handle).unwrap().finish(&mut out).unwrap(),
            2 => ep.combine_into(&y, handle, &mut out).unwrap(),
            _ => {
                let mut output = handle.output().unwrap();
                output.rows_mut::<E>().unwrap().copy_from_slice(&y);
                ep.combine_into(output, handle, &mut out).unwrap();
            }
        }
        assert!(bits(&out) == bits(&expected), "combine at rank {me}, round {round}, {case:?}");
        self.dispatch_gradients(world, ep, handle, round);
        self.combine_gradients(world, ep, handle, round);
    }

    fn dispatch_gradients(&self, world: &World, ep: &mut ExpertParallel, handle: &Handle, round: u32) {
        let (me, case) = (ep.rank() as usize, &self.case);
        let of_rows = self.made(me, 30 + round, handle);
        let landing = self.landing(me, handle.index());
        let of_weights = scatter(&self.row_words(me, 70 + round), self.words(), &landing);
        world.pool().poison(0xff);
        let (x, weights) = ep.dispatch_backward::<E>(&of_rows, Some(&of_weights), handle).unwrap();
        assert!(bits(&x) == bits(&self.sums(me, 30 + round, false)), "row gradients at rank {me}, {case:?}");
        let returned = self.returned_words(me, 70 + round);
        assert_eq!(weights.unwrap(), returned, "weight gradients at rank {me}, {case:?}");
        let (same, none) = ep.dispatch_backward::<E>(&of_rows, None, handle).unwrap();
        assert!(bits(&same) == bits(&x) && none.is_none(), "{case:?}");
    }

    fn combine_gradients(&self, world: &World, ep: &mut ExpertParallel, handle: &Handle, round: u32) {
        let (me, case) = (ep.rank() as usize, &self.case);
        let sent = |rank: usize| self.sent(90 + round, rank);
        world.pool().poison(0xff);
        let (rows, weights) = ep.combine_backward(&sent(me), handle).unwrap();
        if !case.weighted {
            assert!(weights.is_none());
            return self.landed(me, &rows, sent);
        }
        let expected = self.weighted_rows(me, 90 + round);
        assert!(bits(rows.rows::<E>().unwrap()) == bits(&expected), "rows of rank {me}, {case:?}");
        let products = self.products(me, round, 90 + round);
        assert_eq!(bits(&weights.unwrap()), bits(&products), "weight gradients at rank {me}, {case:?}");
    }

    /// Other tokens along the same layout.
    pub fn again(&self, ep: &mut ExpertParallel, handle: &Handle, number: u32) {
        let me = ep.rank() as usize;
        let sent = |rank: usize| self.sent(number, rank);
        let rows = ep.dispatch_cached(&sent(me), handle).unwrap();
        self.landed(me, &rows, sent);
    }

    /// Rounds of all calls on every rank; nothing is held afterwards.
    pub fn holds(&self, options: &Options) {
        on_ranks(&self.case.nodes, options, |world| {
            let group = world.all().unwrap();
            self.rounds(&world, &group);
        });
    }

    /// This rank's part of them, in the group of the case.
    pub fn rounds(&self, world: &World, group: &Group) {
        let mut ep = self.layer(group);
        let me = ep.rank() as usize;
        for round in 0..3 {
            world.pool().poison(0xff);
            let routing = self.routing(me);
            // In halves, relays work while their callers are away.
            let (rows, handle) = match round {
                1 => ep.start_dispatch(&self.all[me].x, &routing).unwrap().finish().unwrap(),
                _ => self.dispatch(&mut ep),
            };
            self.arrived(me, &rows, &handle);
            drop(rows);
            self.returns(world, &mut ep, &handle, round);
            world.pool().poison(0xff);
            self.again(&mut ep, &handle, 50 + round);
        }
        nothing_is_held(world, group);
    }
}

/// Plays a case in one element type, if its wire carries that.
pub fn play<E: Real>(case: &Case)
where
    f32: To<E>,
{
    if case.wire.carries(E::DTYPE) {
        Expected::<E>::new(case).holds(&tiny());
    }
}

/// Once all ranks have entered and all readers have finished, the pool is whole.
pub fn nothing_is_held(world: &World, group: &Group) {
    group.gather(&[]).unwrap();
    let report = world.pool().report();
    assert_eq!((report.used, report.live, report.retired), (0, 0, 0), "rank {}", world.rank());
    assert_eq!(report.largest_free, report.total);
}
