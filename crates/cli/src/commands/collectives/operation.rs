//! Measured operations, their numbers, and their expected results.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sidelane::collective::Communicator;
use sidelane::ep::{RowCollective, RowPartition};
use sidelane::{Dtype, Error, Group};

use crate::options::word;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Sums of all ranks, on all of them
    AllReduce,
    /// Elements of rank 0 for all
    Broadcast,
    /// Elements of each rank for each
    AllToAll,
    /// The same, read where it lands
    AllToAllZeroCopy,
    /// Elements of all ranks for all
    AllGather,
    /// Sums of all ranks, a share for each
    ReduceScatter,
}

impl Operation {
    pub fn name(self) -> String {
        match self {
            Operation::AllToAllZeroCopy => "all-to-all, zero-copy".to_owned(),
            other => word(&other),
        }
    }

    /// The number that others know it by. Where a result lies is our affair alone.
    pub fn number(self) -> u32 {
        match self {
            Operation::AllReduce => 0,
            Operation::Broadcast => 1,
            Operation::AllToAll | Operation::AllToAllZeroCopy => 2,
            Operation::AllGather => 3,
            Operation::ReduceScatter => 4,
        }
    }
}

/// One operation on tensors of one size. The larger tensor of a rank has `elements`, the smaller,
/// where there is one, a share.
pub struct Test {
    operation: Operation,
    rank: usize,
    ranks: usize,
    input: Vec<f32>,
    output: Vec<f32>,
    communicator: Communicator,
    rows: Option<(RowCollective, RowPartition)>,
}

/// Any whole number, small enough that all sums are exact; others compute the same.
fn element(rank: usize, at: usize) -> f32 {
    ((rank * 7 + at * 3) % 17) as f32 - 8.0
}

/// Elements of a row of a reduce-scatter: whole pages of those that there are.
const COLUMNS: usize = 1024;

impl Test {
    pub fn new(operation: Operation, elements: usize, group: &Group) -> Result<Self, Error> {
        let (rank, ranks) = (group.rank() as usize, group.size() as usize);
        let share = elements / ranks;
        let given = if operation == Operation::AllGather { share } else { elements };
        let rows = match operation {
            Operation::ReduceScatter => {
                let columns = if share.is_multiple_of(COLUMNS) { COLUMNS } else { 4 };
                let count = (share / columns) as u32;
                let builder =
                    RowCollective::builder(group).columns(columns).dtype(Dtype::F32).max_rows(count.max(1));
                let mut collective = builder.build()?;
                let shares = collective.shares(&vec![count; ranks])?;
                Some((collective, shares))
            }
            _ => None,
        };
        let landing = if operation == Operation::AllToAllZeroCopy { 4 * elements as u64 } else { 0 };
        Ok(Test {
            operation,
            rank,
            ranks,
            input: (0..given).map(|at| element(rank, at)).collect(),
            output: vec![0.0; if operation == Operation::ReduceScatter { share } else { elements }],
            communicator: Communicator::builder(group).zero_copy_bytes(landing).build()?,
            rows,
        })
    }

    /// Restores the tensors, where a call changes its input.
    pub fn reset(&mut self) {
        if matches!(self.operation, Operation::AllReduce | Operation::Broadcast) {
            self.output.copy_from_slice(&self.input);
        }
    }

    /// One call on fresh tensors. All of its results are in [`Test::output`] then, and none of an
    /// earlier call. Collective.
    pub fn check(&mut self) -> Result<(), Error> {
        match self.operation {
            Operation::AllReduce | Operation::Broadcast => self.reset(),
            Operation::AllToAllZeroCopy => {
                self.input.iter_mut().for_each(|x| *x += 1.0);
                self.communicator.all_to_all_zero_copy(&self.input)?;
                self.input.iter_mut().for_each(|x| *x -= 1.0);
                self.output.copy_from_slice(self.communicator.all_to_all_zero_copy(&self.input)?);
                return Ok(());
            }
            _ => self.output.fill(f32::NAN),
        }
        self.call()
    }

    pub fn call(&mut self) -> Result<(), Error> {
        match (self.operation, &mut self.rows) {
            (Operation::AllReduce, _) => self.communicator.all_reduce(&mut self.output),
            (Operation::Broadcast, _) => self.communicator.broadcast(0, &mut self.output),
            (Operation::AllGather, _) => self.communicator.all_gather(&self.input, &mut self.output),
            (Operation::ReduceScatter, Some((collective, shares))) => {
                collective.reduce_scatter_into(&self.input[..], shares, &mut self.output)
            }
            (Operation::AllToAllZeroCopy, _) => {
                self.communicator.all_to_all_zero_copy(&self.input).map(|_| ())
            }
            (..) => self.communicator.all_to_all(&self.input, &mut self.output),
        }
    }

    pub fn output(&self) -> &[f32] {
        &self.output
    }

    pub fn is_right(&self) -> bool {
        let Test { rank, ranks, .. } = *self;
        let share = self.output.len() / ranks;
        let sum = |at: usize| (0..ranks).map(|rank| element(rank, at)).sum::<f32>();
        let right = |at: usize| match self.operation {
            Operation::AllReduce => sum(at),
            Operation::Broadcast => element(0, at),
            Operation::AllToAll | Operation::AllToAllZeroCopy => {
                element(at / share, rank * share + at % share)
            }
            Operation::AllGather => element(at / share, at % share),
            Operation::ReduceScatter => sum(rank * self.output.len() + at),
        };
        self.output.iter().enumerate().all(|(at, &seen)| seen == right(at))
    }
}
