//! Proof of a plan: each product, transfer and sum once, behind all that it reads.
//!
//! The memory of a rank is a set of [`Cell`]s, each the rows of one rank's tokens in one chunk.
//! Every cell has one writer, and each reader is ordered behind it, by its stream or by an edge. So
//! no interleaving of the streams reads a cell early, or writes one that is read. Collective calls
//! lie on one stream, so all ranks make them in the order of the plan that they share.

use std::collections::HashMap;
use std::fmt;

use sidelane::overlap::StreamId;

use super::plan::{LinearPass, Plan, Step, Work};
use crate::error::OverlapPlanError;

/// Rows in a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// Rows that came from a rank.
    Gathered {
        /// The rank.
        rank: u32,
        /// The token chunk.
        chunk: u32,
    },
    /// This rank's products of a rank's tokens.
    Products {
        /// The rank.
        rank: u32,
        /// The token chunk.
        chunk: u32,
    },
    /// Sums over the ranks, of this rank's tokens.
    Sums {
        /// The token chunk.
        chunk: u32,
    },
    /// Gradients of weights.
    Weights,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Gathered { rank, chunk } => write!(f, "rows of rank {rank}, chunk {chunk}"),
            Cell::Products { rank, chunk } => write!(f, "products of rank {rank}, chunk {chunk}"),
            Cell::Sums { chunk } => write!(f, "sums of chunk {chunk}"),
            Cell::Weights => write!(f, "gradients of weights"),
        }
    }
}

/// A rank that a plan is proved for.
#[derive(Clone, Copy)]
struct View {
    pass: LinearPass,
    chunks: u32,
    me: u32,
    ranks: u32,
}

impl View {
    fn all(self, cell: impl Fn(u32, u32) -> Cell + Copy) -> Vec<Cell> {
        (0..self.ranks).flat_map(|rank| (0..self.chunks).map(move |chunk| cell(rank, chunk))).collect()
    }

    /// Cells that a step reads, and those that it writes. None if the pass has no such step.
    fn accesses(self, work: Work) -> Option<(Vec<Cell>, Vec<Cell>)> {
        let View { pass, chunks, me, ranks } = self;
        let gathered = |rank, chunk| Cell::Gathered { rank, chunk };
        let products = |rank, chunk| Cell::Products { rank, chunk };
        let owns = pass.gathers() && !pass.reduces() && chunks > 1;
        let of = |cell: fn(u32, u32) -> Cell, chunk| (0..ranks).map(|rank| cell(rank, chunk)).collect();
        match work {
            Work::Compare => (chunks > 1).then(|| (Vec::new(), Vec::new())),
            Work::Gather(chunk) => {
                (pass.gathers() && chunk < chunks).then(|| (Vec::new(), of(gathered, chunk)))
            }
            Work::Own => owns.then(|| (Vec::new(), (0..chunks).map(|chunk| products(me, chunk)).collect())),
            Work::Multiply(chunk) if pass.reduces() => {
                (chunk < chunks).then(|| (Vec::new(), of(products, chunk)))
            }
            Work::Multiply(chunk) => (chunk < chunks).then(|| {
                let others = (0..ranks).filter(|&rank| rank != me || !owns);
                others.map(|rank| (gathered(rank, chunk), products(rank, chunk))).unzip()
            }),
            Work::Reduce(chunk) => {
                (pass.reduces() && chunk < chunks).then(|| (of(products, chunk), vec![Cell::Sums { chunk }]))
            }
            Work::Weights => pass.has_weights().then(|| (self.all(gathered), vec![Cell::Weights])),
        }
    }

    /// Results of the pass.
    fn results(self) -> Vec<Cell> {
        let mut results = match self.pass.reduces() {
            true => (0..self.chunks).map(|chunk| Cell::Sums { chunk }).collect(),
            false => self.all(|rank, chunk| Cell::Products { rank, chunk }),
        };
        if self.pass.has_weights() {
            results.push(Cell::Weights);
        }
        results
    }
}

impl Plan {
    /// Proves the plan for a group of this size.
    ///
    /// # Errors
    /// [`OverlapPlanError`] says which step is wrong, or which result is missing.
    pub fn prove(&self, ranks: u32) -> Result<(), OverlapPlanError> {
        let ended = self.ended_before()?;
        let (pass, chunks) = (self.pass(), self.chunks().count());
        (0..ranks).try_for_each(|me| self.prove_rank(View { pass, chunks, me, ranks }, &ended))
    }

    /// By step: how many steps of each stream have ended when it begins, its own not among them.
    fn ended_before(&self) -> Result<Vec<[usize; 2]>, OverlapPlanError> {
        let mut ended: Vec<[usize; 2]> = Vec::new();
        // The last step of each stream, and its number there.
        let mut counts = [0; 2];
        let mut last = [None; 2];
        let mut numbers: Vec<usize> = Vec::new();
        for (step, Step { work, after }) in self.steps().iter().enumerate() {
            if let Some(&needs) = after.iter().find(|&&needs| needs >= step) {
                return Err(OverlapPlanError::Ahead { step, work: *work, needs });
            }
            let stream = index(*work);
            let mut clock = [0; 2];
            for &before in after.iter().chain(&last[stream]) {
                let of = index(self.steps()[before].work);
                (0..2).for_each(|at| clock[at] = clock[at].max(ended[before][at]));
                clock[of] = clock[of].max(numbers[before] + 1);
            }
            numbers.push(counts[stream]);
            counts[stream] += 1;
            last[stream] = Some(step);
            ended.push(clock);
        }
        Ok(ended)
    }

    fn prove_rank(&self, view: View, ended: &[[usize; 2]]) -> Result<(), OverlapPlanError> {
        // By cell: the stream of its writer, and the writer's number there.
        let mut written: HashMap<Cell, (usize, usize)> = HashMap::new();
        let mut counts = [0; 2];
        for (step, &Step { work, .. }) in self.steps().iter().enumerate() {
            let (reads, writes) = view.accesses(work).ok_or(OverlapPlanError::Stray { step, work })?;
            let stream = index(work);
            // Until ranks have compared their chunks, they may not know each other's calls.
            let compares = work == Work::Compare;
            if stream == 0 && view.chunks > 1 && compares != (counts[0] == 0) {
                return Err(OverlapPlanError::Uncompared { step, work });
            }
            for cell in reads {
                let ready = written.get(&cell).is_some_and(|&(of, number)| number < ended[step][of]);
                if !ready {
                    return Err(OverlapPlanError::Early { step, work, needs: cell });
                }
            }
            for cell in writes {
                if written.insert(cell, (stream, counts[stream])).is_some() {
                    return Err(OverlapPlanError::Twice { step, work, cell });
                }
            }
            counts[stream] += 1;
        }
        match view.results().into_iter().find(|cell| !written.contains_key(cell)) {
            Some(cell) => Err(OverlapPlanError::Missing { cell }),
            None => Ok(()),
        }
    }
}

/// Position of a stream among the two of a plan.
fn index(work: Work) -> usize {
    usize::from(matches!(work.stream(), StreamId::Compute(_)))
}
