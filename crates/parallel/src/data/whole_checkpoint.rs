//! A checkpoint in one process, for a model whose parameters lie in another order elsewhere: other
//! stages of a pipeline, other parts of matrices.

use std::io::{Read, Write};

use super::checkpoint::{Run, Shard, Wanted, read};
use super::error::CheckpointError;
use crate::check::Member;

/// All that a checkpoint has of a model, in the order of its layout.
///
/// ```
/// use sidelane_parallel::data::Checkpoint;
///
/// let whole = Checkpoint { steps: 3, parameters: vec![1.0, 2.0], first: vec![0.5; 2], second: vec![0.25; 2] };
/// let mut shard = Vec::new();
/// whole.write(&mut shard)?;
/// assert_eq!(Checkpoint::read(2, [&shard[..]])?, whole);
/// # Ok::<(), sidelane_parallel::data::CheckpointError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Steps of the optimizer.
    pub steps: u64,
    /// The parameters.
    pub parameters: Vec<f32>,
    /// Means of gradients.
    pub first: Vec<f32>,
    /// Means of their squares.
    pub second: Vec<f32>,
}

impl Checkpoint {
    /// Reads all shards of a model of so many elements, in any order.
    ///
    /// # Errors
    /// [`CheckpointError`].
    pub fn read(
        elements: usize,
        shards: impl IntoIterator<Item = impl Read>,
    ) -> Result<Checkpoint, CheckpointError> {
        let mut wanted = [(); 3].map(|()| Wanted::new(vec![(0..elements, 0)], elements));
        let steps = read(elements, shards, &mut wanted)?.steps;
        let [parameters, first, second] = wanted.map(|wanted| wanted.values);
        Ok(Checkpoint { steps, parameters, first, second })
    }

    /// Writes it as one shard, which any number of ranks reads.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; [`CheckpointError::BadRun`] if means are not as many as parameters.
    pub fn write(&self, writer: &mut impl Write) -> Result<(), CheckpointError> {
        let Checkpoint { steps, parameters, first, second } = self;
        let elements = parameters.len();
        if let Some(states) = [first, second].into_iter().find(|states| states.len() != elements) {
            return Err(CheckpointError::BadRun { reader: 0, first: 0, len: states.len() as u64 });
        }
        let run = Run { first: 0, parameters, states: [&first[..], &second[..]] };
        Shard { member: Member { rank: 0, ranks: 1 }, elements, steps: *steps }.write(vec![run], writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shard of one of two ranks: their runs lie in turn.
    fn shard(rank: u32, of: &Checkpoint) -> Vec<u8> {
        let run = |first: usize| Run {
            first,
            parameters: &of.parameters[first..first + 2],
            states: [&of.first[first..first + 2], &of.second[first..first + 2]],
        };
        let runs = (0..2).map(|nth| run(4 * nth + 2 * rank as usize)).collect();
        let mut bytes = Vec::new();
        let shard = Shard { member: Member { rank, ranks: 2 }, elements: 8, steps: of.steps };
        shard.write(runs, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn shards_join_to_one_checkpoint_writable_as_one_shard() {
        let values = |from: usize| (from..from + 8).map(|value| value as f32).collect();
        let whole = Checkpoint { steps: 5, parameters: values(0), first: values(100), second: values(200) };
        let shards = [shard(1, &whole), shard(0, &whole)];
        let read = Checkpoint::read(8, shards.iter().map(|shard| &shard[..])).unwrap();
        assert_eq!(read, whole);
        let mut one = Vec::new();
        read.write(&mut one).unwrap();
        assert_eq!(Checkpoint::read(8, [&one[..]]), Ok(whole));
        assert!(Checkpoint::read(8, [&shards[0][..]]).is_err());
    }

    #[test]
    fn means_that_are_not_as_many_as_parameters_are_refused() {
        let short = Checkpoint { steps: 1, parameters: vec![1.0; 2], first: vec![0.0; 2], second: vec![0.0] };
        let refused = Err(CheckpointError::BadRun { reader: 0, first: 0, len: 1 });
        assert_eq!(short.write(&mut Vec::new()), refused);
    }
}
