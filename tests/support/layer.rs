//! All calls of a layer, bit for bit against a reference.

use sidelane::ep::{ExpertParallelBuilder, ExpertRows, Handle, RowIndex};
use sidelane::gate::Routing;
use sidelane::plan::RowLayout;
use sidelane::{Element, ExpertParallel, Group, Options, World};

use super::visible::{Case, Visible};
use super::{To, Tokens, on_ranks, tiny, tokens};

/// An element type that is summed.
pub trait Real: Element + Into<f32> {}
impl<E: Element + Into<f32>> Real for E {}

/// Inputs of all ranks, and the results that follow.
pub struct Expected<E> {
    pub case: Case,
    pub all: Vec<Tokens<E>>,
    pub ids: Vec<Vec<i32>>,
    pub seen: Visible,
}

/// What stands in row `row` of rank `rank`, in a tensor of this number: any function of the three.
fn element<E>(tensor: u32, rank: usize, row: usize, column: usize) -> E
where
    f32: To<E>,
{
    let mixed = [rank as u32, row as u32, column as u32]
        .iter()
        .fold(tensor.wrapping_mul(0x9e37_79b9) ^ 0x55, |hash, &n| {
            (hash ^ n).wrapping_mul(0x85eb_ca6b).rotate_left(13)
        });
    ((mixed >> 8) as f32 / (1 << 22) as f32 - 2.0).to()
}

/// The bytes of a tensor: -0 is not 0 here, and a NaN equals itself.
pub fn bits<T: bytemuck::NoUninit>(tensor: &[T]) -> &[u8] {
    bytemuck::cast_slice(tensor)
}

/// `<a, b>` as documented: 16 lanes of rounded products, folded by halves.
pub fn dot<E: Real>(a: &[E], b: &[E]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (column, (&a, &b)) in a.iter().zip(b).enumerate() {
        lanes[column % 16] += a.into() * b.into();
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
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
        let of_rank = |(seed, &count)| tokens(seed, count, case.hidden, case.top_k, case.map.experts());
        Self::of(case, (seed..).zip(&case.counts).map(of_rank).collect())
    }

    /// These tokens.
    pub fn of(case: &Case, all: Vec<Tokens<E>>) -> Self {
        let ids: Vec<Vec<i32>> = all.iter().map(|tokens| tokens.ids.clone()).collect();
        let seen = Visible::new(case, &ids);
        Expected { case: case.clone(), all, ids, seen }
    }

    /// The settings that the case describes.
    pub fn builder<'g>(&self, group: &'g Group) -> ExpertParallelBuilder<'g> {
        let case = &self.case;
        let builder = ExpertParallel::builder(group).unwrap().expert_map(case.map.clone()).top_k(case.top_k);
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

    /// Rows `rows` of a tensor of this number.
    pub fn tensor(&self, number: u32, rank: usize, rows: usize) -> Vec<E> {
        let row = |row: usize| (0..self.case.hidden).map(move |column| element(number, rank, row, column));
        (0..rows).flat_map(row).collect()
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
        let hidden = self.case.hidden;
        let mut expected = vec![E::zeroed(); self.seen.rows[me].len() * hidden];
        for source in 0..self.all.len() {
            let x = x(source);
            for (row, at) in self.seen.rows[me].iter().zip((0..).step_by(hidden)) {
                if let Some(row) = row.as_ref().filter(|row| row.source == source) {
                    expected[at..at + hidden].copy_from_slice(&x[row.token * hidden..][..hidden]);
                }
            }
        }
        assert_eq!(rows.len() as usize, self.seen.rows[me].len(), "rows of rank {me}, {:?}", self.case);
        let landed = gather(rows.rows::<E>().unwrap(), hidden, &self.landing(me, rows.index()));
        assert!(bits(&landed) == bits(&expected), "rows of rank {me}, {:?}", self.case);
    }

    /// Holds rows and handle of a dispatch against what this rank must see.
    pub fn arrived(&self, me: usize, rows: &ExpertRows, handle: &Handle) {
        let (case, seen) = (&self.case, &self.seen);
        self.landed(me, rows, |source| self.all[source].x.clone());
        let (mut weights, mut experts) = (Vec::new(), Vec::new());
        for (at, row) in seen.rows[me].iter().enumerate() {
            let weight = |choice: usize| self.all[row.as_ref().unwrap().source].weights[choice];
            let choices = row.as_ref().map_or(&[][..], |row| &row.choices);
            match case.layout {
                RowLayout::ExpertMajor => weights.push(choices.first().map_or(0.0, |&choice| weight(choice))),
                RowLayout::RankMajor => {
                    let mut of_row = vec![0.0; case.top_k as usize];
                    choices.iter().for_each(|&c| of_row[c % case.top_k as usize] = weight(c));
                    weights.extend(of_row);
                    experts.extend(seen.local_experts(case, &self.ids, me, at));
                }
            }
        }
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

    /// What this rank's experts make, as an output to combine: what no sum may read is NaN.
    fn made(&self, me: usize, number: u32, handle: &Handle) -> Vec<E> {
        let mut y = self.tensor(number, me, self.seen.rows[me].len());
        for (row, y) in self.seen.rows[me].iter().zip(y.chunks_exact_mut(self.case.hidden)) {
            if row.is_none() {
                y.fill(f32::NAN.to());
            }
        }
        scatter(&y, self.case.hidden, &self.landing(me, handle.index()))
    }

    /// The rows of tensor `number` of all ranks, summed for the tokens of this one: from +0 in f32,
    /// in the order of the sum, partials rounded to the wire's type, one rounding at the end.
    pub fn summed(&self, me: usize, number: u32, weighted: bool) -> Vec<E> {
        let (case, mine) = (&self.case, &self.all[me]);
        let mut out = Vec::new();
        for token in 0..case.counts[me] as usize {
            let groups = self.seen.terms(case, &self.ids, me, token);
            out.extend((0..case.hidden).map(|column| -> E {
                let mut total = 0.0f32;
                for group in &groups {
                    let mut partial = 0.0f32;
                    for &(rank, row, choice) in group {
                        let y: f32 = element::<E>(number, rank, row, column).into();
                        partial += if weighted { mine.weights[choice] * y } else { y };
                    }
                    let narrow = case.wire == sidelane::dtype::PartialDtype::Bf16;
                    total += if narrow { half::bf16::from_f32(partial).to_f32() } else { partial };
                }
                total.to()
            }));
        }
        out
    }

    /// One returned word per choice: `of(rank, row, choice)`, 0 where it has no row.
    fn home(&self, me: usize, of: impl Fn(usize, usize, usize) -> f32) -> Vec<f32> {
        let k = self.case.top_k as usize;
        let word = |choice| {
            self.seen.place_of(me, choice / k, choice).map_or(0.0, |(rank, row)| of(rank, row, choice))
        };
        (0..self.ids[me].len()).map(word).collect()
    }

    /// Combine, in place or in halves or of a copy; and both gradients.
    pub fn returns(&self, world: &World, ep: &mut ExpertParallel, handle: &Handle, round: u32) {
        let (me, case) = (ep.rank() as usize, &self.case);
        let y = self.made(me, round, handle);
        let expected = self.summed(me, round, case.weighted);
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
        let words = if case.layout == RowLayout::RankMajor { case.top_k as usize } else { 1 };
        let word = |rank: usize, row: usize, nth: usize| element::<f32>(70 + round, rank, row, nth);
        let of_rows = self.made(me, 30 + round, handle);
        let of_weights: Vec<f32> = (0..self.seen.rows[me].len())
            .flat_map(|row| (0..words).map(move |nth| word(me, row, nth)))
            .collect();
        let of_weights = scatter(&of_weights, words, &self.landing(me, handle.index()));
        world.pool().poison(0xff);
        let (x, weights) = ep.dispatch_backward::<E>(&of_rows, Some(&of_weights), handle).unwrap();
        assert!(
            bits(&x) == bits(&self.summed(me, 30 + round, false)),
            "row gradients at rank {me}, {case:?}"
        );
        let home = self.home(me, |rank, row, choice| word(rank, row, choice % words));
        assert_eq!(weights.unwrap(), home, "weight gradients at rank {me}, {case:?}");
        let (same, none) = ep.dispatch_backward::<E>(&of_rows, None, handle).unwrap();
        assert!(bits(&same) == bits(&x) && none.is_none(), "{case:?}");
    }

    fn combine_gradients(&self, world: &World, ep: &mut ExpertParallel, handle: &Handle, round: u32) {
        let (me, case) = (ep.rank() as usize, &self.case);
        let sent = |rank: usize| self.tensor(90 + round, rank, case.counts[rank] as usize);
        world.pool().poison(0xff);
        let (rows, weights) = ep.combine_backward(&sent(me), handle).unwrap();
        if !case.weighted {
            assert!(weights.is_none());
            return self.landed(me, &rows, sent);
        }
        let (hidden, all): (usize, Vec<Vec<E>>) = (case.hidden, (0..self.all.len()).map(sent).collect());
        let rows = rows.rows::<E>().unwrap().chunks_exact(hidden);
        for (row, (got, expected)) in rows.zip(&self.seen.rows[me]).enumerate() {
            let Some(from) = expected else {
                assert!(got.iter().all(|&g| g.into() == 0.0), "row {row} has no gradient, {case:?}");
                continue;
            };
            let weight = self.all[from.source].weights[from.choices[0]];
            let sent = &all[from.source][from.token * hidden..][..hidden];
            let expected: Vec<E> = sent.iter().map(|&g| (weight * g.into()).to()).collect();
            assert!(bits(got) == bits(&expected), "row {row} of rank {me}, {case:?}");
        }
        let k = case.top_k as usize;
        let products = self.home(me, |rank, row, choice| {
            let y: Vec<E> = (0..hidden).map(|column| element(round, rank, row, column)).collect();
            dot(&y, &all[me][choice / k * hidden..][..hidden])
        });
        assert_eq!(bits(&weights.unwrap()), bits(&products), "weight gradients at rank {me}, {case:?}");
    }

    /// Other tokens along the same layout.
    pub fn again(&self, ep: &mut ExpertParallel, handle: &Handle, number: u32) {
        let me = ep.rank() as usize;
        let sent = |rank: usize| self.tensor(number, rank, self.case.counts[rank] as usize);
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
