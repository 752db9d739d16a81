//! Parameters of one kind on a rank, and their optimizer: whole on each rank, or cut by ZeRO.
//!
//! ZeRO-3 here holds parameters cut between two steps. All microbatches of a step use the
//! parameters that were gathered before it: with a gather for each pass, a pipeline of many
//! microbatches would move the parameters as many times.

use std::io::{Read, Write};
use std::ops::Range;

use sidelane::collective::Communicator;
use sidelane::overlap::HostExecutor;
use sidelane_parallel::data::{Adam, DataParallel, FullySharded, Layout, MemoryUsage, Sharding};

use super::strategy::Zero;
use crate::error::Result;

/// Bytes of a bucket.
const BUCKET_BYTES: usize = 1 << 20;

enum Model {
    Whole(DataParallel),
    Cut(FullySharded),
}

/// Parameters and their optimizer.
pub struct Optimizer {
    model: Model,
    /// Elements of each parameter, and of each bucket.
    parameters: Vec<Range<usize>>,
    buckets: Vec<Range<usize>>,
}

impl Optimizer {
    /// With these parameters, of so many elements each. Collective.
    ///
    /// # Errors
    /// Those of data parallelism.
    pub fn new(
        group: &mut Communicator,
        zero: Zero,
        sizes: &[usize],
        parameters: Vec<f32>,
        learning_rate: f32,
    ) -> Result<Optimizer> {
        let layout = Layout::buckets(sizes, BUCKET_BYTES)?;
        let places =
            (0..sizes.len()).map(|nth| layout.place(nth)).collect::<std::result::Result<Vec<_>, _>>()?;
        let of_bucket = |bucket: &Range<usize>| places[bucket.start].start..places[bucket.end - 1].end;
        let buckets = layout.bucket_parameters().iter().map(of_bucket).collect();
        let adam = Adam { learning_rate, ..Adam::default() };
        let sharding = match zero {
            Zero::None => Some(Sharding::None),
            Zero::One => Some(Sharding::OptimizerStates),
            Zero::Two => Some(Sharding::Gradients),
            Zero::Three => None,
        };
        let model = match sharding {
            Some(sharding) => Model::Whole(DataParallel::new(group, layout, sharding, parameters, adam)?),
            None => Model::Cut(FullySharded::new(group, layout, 0, &parameters, adam)?),
        };
        Ok(Optimizer { model, parameters: places, buckets })
    }

    /// All parameters. Collective with ZeRO-3.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn parameters(&self, group: &mut Communicator) -> Result<Vec<f32>> {
        Ok(match &self.model {
            Model::Whole(model) => model.parameters().to_vec(),
            Model::Cut(model) => model.gather(group)?,
        })
    }

    /// Changes the parameters by the mean of the ranks' gradients. Collective.
    ///
    /// # Errors
    /// Those of data parallelism.
    pub fn step(&mut self, group: &mut Communicator, gradient: &[f32]) -> Result<()> {
        let executor = HostExecutor::new().overlap(false);
        match &mut self.model {
            Model::Whole(model) => {
                let mut parameters = self.parameters.iter().enumerate().rev();
                model.backward(group, &executor, |pass| {
                    parameters.try_for_each(|(nth, place)| pass.gradient(nth, &gradient[place.clone()]))
                })?;
                model.step(group)?;
            }
            Model::Cut(model) => {
                model.backward(group, &executor, |bucket, _, into| {
                    into.copy_from_slice(&gradient[self.buckets[bucket].clone()]);
                    Ok(())
                })?;
                model.step(group)?;
            }
        }
        Ok(())
    }

    /// Bytes that this rank holds.
    pub fn memory_usage(&self) -> MemoryUsage {
        match &self.model {
            Model::Whole(model) => model.memory_usage(),
            Model::Cut(model) => model.memory_usage(),
        }
    }

    /// Writes this rank's shard of a checkpoint.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn save(&self, writer: &mut impl Write) -> Result<()> {
        match &self.model {
            Model::Whole(model) => model.save(writer)?,
            Model::Cut(model) => model.save(writer)?,
        }
        Ok(())
    }

    /// Reads a checkpoint that is one shard. Collective.
    ///
    /// # Errors
    /// Those of data parallelism.
    pub fn load(&mut self, group: &mut Communicator, shard: impl Read) -> Result<()> {
        match &mut self.model {
            Model::Whole(model) => model.load(group, [shard])?,
            Model::Cut(model) => model.load(group, [shard])?,
        }
        Ok(())
    }
}
