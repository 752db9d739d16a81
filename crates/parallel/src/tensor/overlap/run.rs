//! A pass as a graph of `sidelane::overlap`: each step of its plan is a node.

use std::borrow::Cow;
use std::ops::Range;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::overlap::{Graph, Handoff, HostExecutor, Node, TokenChunks};

use super::plan::{LinearPass, Plan, Work};
use crate::calls::{Calls, reason};
use crate::check::alike;
use crate::float::Float;

/// Rows of tokens.
#[derive(Clone, Copy)]
pub(in crate::tensor) struct Rows<'a, E> {
    pub values: &'a [E],
    /// Elements of a row.
    pub width: usize,
}

impl<E: Float> Rows<'_, E> {
    /// None at all.
    pub const NONE: Rows<'static, E> = Rows { values: &[], width: 1 };
}

/// The call that a pass begins with on every rank.
pub(in crate::tensor) fn first_call(pass: LinearPass, chunks: TokenChunks) -> Option<CallKind> {
    // All plans of several chunks begin alike.
    Plan::new(pass, TokenChunks::new(chunks.count().min(2))).calls().first().copied()
}

/// Rows and products of a pass. A pass that gathers takes rows of this rank's tokens, a pass that
/// reduces takes rows of all tokens.
pub(in crate::tensor) struct Pass<'a, E, W> {
    pub pass: LinearPass,
    /// Rows of this rank's tokens that all ranks gather.
    pub own: Rows<'a, E>,
    /// Rows of all tokens, whose products are reduced.
    pub all: Rows<'a, E>,
    /// Elements of a row of products.
    pub width: usize,
    /// Products of rows.
    pub multiply: &'a (dyn Fn(&[E], &mut [E]) + Sync),
    /// Gradients of weights, from the gathered rows of all tokens.
    pub weights: &'a (dyn Fn(&[E]) -> W + Sync),
}

/// Memory of a pass on a rank, which its steps use in turn.
struct Memory<'a, 'g, E, W> {
    rows: &'a Pass<'a, E, W>,
    chunks: TokenChunks,
    me: usize,
    ranks: usize,
    /// Tokens of a rank, and those of each chunk.
    tokens: usize,
    pieces: Vec<Range<usize>>,
    calls: Handoff<&'a mut Calls<'g>>,
    /// By chunk: rows of all ranks, and products to reduce.
    gathered: Vec<Handoff<Vec<E>>>,
    products: Vec<Handoff<Vec<E>>>,
    results: Handoff<Vec<E>>,
    weights: Handoff<W>,
}

impl<E: Float, W: Send> Pass<'_, E, W> {
    /// Runs the pass on so many tokens of each rank. Returns products of all tokens, or their sums
    /// of this rank's, and gradients of weights if the pass has them.
    pub fn run(
        &self,
        group: &mut Communicator,
        tokens: usize,
        chunks: TokenChunks,
        executor: &HostExecutor<'_>,
    ) -> Result<(Vec<E>, Handoff<W>), Error> {
        let plan = Plan::new(self.pass, chunks);
        let (me, ranks) = (group.rank() as usize, group.size() as usize);
        let mut calls = Calls::new(group, plan.calls());
        let Ok(count) = u32::try_from(tokens) else {
            let (parameter, expected) = ("tokens", "at most 2^32 - 1 on a rank");
            let error = PlanError::BadParameter { parameter, seen: tokens as u64, expected };
            return Err(calls.refuse(error.into()));
        };
        let pieces: Vec<_> = chunks.of(count).map(|of| of.start as usize..of.end as usize).collect();
        let empty = || (0..pieces.len()).map(|_| Handoff::empty()).collect();
        let (gathered, products) = (empty(), empty());
        let results = if self.pass.reduces() { tokens } else { ranks * tokens };
        let memory = Memory {
            rows: self,
            chunks,
            me,
            ranks,
            tokens,
            pieces,
            calls: Handoff::new(&mut calls),
            gathered,
            products,
            results: Handoff::new(vec![E::zeroed(); results * self.width]),
            weights: Handoff::empty(),
        };
        let (mut graph, mut nodes) = (Graph::new(), Vec::<Node>::new());
        for step in plan.steps() {
            let (memory, work) = (&memory, step.work);
            let after: Vec<Node> = step.after.iter().map(|&at| nodes[at]).collect();
            nodes.push(graph.add(work.stream(), work.label(), &after, move |_| memory.step(work)));
        }
        let run = graph.run(executor);
        let Memory { results, weights, .. } = memory;
        run.map_err(|run| calls.refuse(reason(run)))?;
        Ok((results.take()?, weights))
    }
}

impl<E: Float, W> Memory<'_, '_, E, W> {
    fn step(&self, work: Work) -> Result<(), Error> {
        match work {
            Work::Compare => self.call(|group| {
                let chunks = self.chunks.count().into();
                alike(group, &[("tokens of a rank", self.tokens as u64), ("token chunks", chunks)])
            }),
            Work::Gather(chunk) => self.gather(chunk as usize),
            Work::Own => self.results.with(|results| {
                self.multiply(self.rows.own.values, self.me..self.me + 1, 0..self.tokens, results);
                Ok(())
            }),
            Work::Multiply(chunk) if self.rows.pass.reduces() => {
                let rows = self.cut(chunk as usize);
                let mut products = vec![E::zeroed(); rows.len() / self.rows.all.width * self.rows.width];
                (self.rows.multiply)(&rows, &mut products);
                self.products[chunk as usize].put(products)
            }
            Work::Multiply(chunk) => self.multiply_gathered(chunk as usize),
            Work::Reduce(chunk) => self.reduce(chunk as usize),
            Work::Weights => self.weights.put((self.rows.weights)(&self.assemble()?)),
        }
    }

    fn call(&self, make: impl FnOnce(&mut Communicator) -> Result<(), Error>) -> Result<(), Error> {
        self.calls.with(|calls| calls.call(make))
    }

    fn gather(&self, chunk: usize) -> Result<(), Error> {
        let Rows { values, width } = self.rows.own;
        let piece = &self.pieces[chunk];
        let rows = &values[piece.start * width..piece.end * width];
        let mut all = vec![E::zeroed(); self.ranks * rows.len()];
        self.call(|group| group.all_gather(rows, &mut all))?;
        self.gathered[chunk].put(all)
    }

    fn reduce(&self, chunk: usize) -> Result<(), Error> {
        let (piece, width) = (&self.pieces[chunk], self.rows.width);
        let products = self.products[chunk].take()?;
        self.results.with(|sums| {
            let sums = &mut sums[piece.start * width..piece.end * width];
            self.call(|group| group.reduce_scatter(&products, sums))
        })
    }

    /// Products of a chunk of all ranks, or, if there is more than one chunk, of the other ranks.
    fn multiply_gathered(&self, chunk: usize) -> Result<(), Error> {
        let (piece, width) = (self.pieces[chunk].clone(), self.rows.own.width);
        let others = match self.pieces.len() {
            1 => [0..self.ranks, 0..0],
            _ => [0..self.me, self.me + 1..self.ranks],
        };
        self.gathered[chunk].with(|all| {
            self.results.with(|results| {
                for ranks in others.into_iter().filter(|ranks| !ranks.is_empty()) {
                    let rows = &all[ranks.start * piece.len() * width..ranks.end * piece.len() * width];
                    self.multiply(rows, ranks, piece.clone(), results);
                }
                Ok(())
            })
        })
    }

    /// Multiplies rows of these tokens of adjacent ranks, and puts the products in their place.
    fn multiply(&self, rows: &[E], ranks: Range<usize>, piece: Range<usize>, results: &mut [E]) {
        let width = self.rows.width;
        let place = |rank: usize| (rank * self.tokens + piece.start) * width;
        let len = piece.len() * width;
        if piece.len() == self.tokens || ranks.len() == 1 {
            let results = &mut results[place(ranks.start)..][..ranks.len() * len];
            return (self.rows.multiply)(rows, results);
        }
        let mut products = vec![E::zeroed(); ranks.len() * len];
        (self.rows.multiply)(rows, &mut products);
        for (nth, rank) in ranks.enumerate() {
            results[place(rank)..][..len].copy_from_slice(&products[nth * len..][..len]);
        }
    }

    /// Rows of a chunk, of all ranks' tokens.
    fn cut(&self, chunk: usize) -> Cow<'_, [E]> {
        let Rows { values, width } = self.rows.all;
        let piece = &self.pieces[chunk];
        if piece.len() == self.tokens {
            return Cow::Borrowed(values);
        }
        let of_rank =
            |rank: usize| &values[(rank * self.tokens + piece.start) * width..][..piece.len() * width];
        Cow::Owned((0..self.ranks).flat_map(of_rank).copied().collect())
    }

    /// The gathered rows of all tokens, by rank.
    fn assemble(&self) -> Result<Vec<E>, Error> {
        let width = self.rows.own.width;
        let chunks: Vec<_> = self.gathered.iter().map(Handoff::take).collect::<Result<_, _>>()?;
        match <[Vec<E>; 1]>::try_from(chunks) {
            Ok([whole]) => Ok(whole),
            Err(chunks) => Ok((0..self.ranks)
                .flat_map(|rank| chunks.iter().zip(&self.pieces).map(move |(all, piece)| (rank, all, piece)))
                .flat_map(|(rank, all, piece)| &all[rank * piece.len() * width..][..piece.len() * width])
                .copied()
                .collect()),
        }
    }
}
