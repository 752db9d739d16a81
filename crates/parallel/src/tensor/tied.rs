//! An embedding and an output layer with the same weights, on the first and the last stage of a
//! pipeline.
//!
//! ```text
//!              first stage                     last stage
//!   holds      the rows                        a copy of them
//!   forward    looks rows up                   logits = x W'
//!   backward   gradient G of the lookups       gradient H of the logits' weights
//!   sum        0 + G + H                       0 + G + H           all-reduce of both stages
//! ```
//!
//! Both stages take their optimizer step with this sum, so that the copies keep the same bits.
//! Stages add before data parallelism takes means, of all microbatches at once. A pipeline of one
//! stage has the rows once: it adds H to G, to the same bits.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::CallKind;

use super::activations::refuse;
use crate::check::{alike, digest_of, has_ranks, has_shape};

/// Weights that the first and the last stage of a pipeline hold a copy of each.
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::{Mesh, MeshError, tensor::TiedWeights};
///
/// fn step(world: World) -> Result<Option<Vec<f32>>, MeshError> {
///     let mesh = Mesh::new(3, [("pp", 3)])?;
///     let Some(ends) = mesh.world_ends(&world, "pp")? else { return Ok(None) };   // a stage between
///     let mut ends = Communicator::builder(&ends).build()?;
///     let tied = TiedWeights::new(&mut ends, &[0.5, 0.25])?;                      // compares the copies
///     let mut gradient = if ends.rank() == 0 { [1.0, 0.0] } else { [3.0, 4.0] };
///     tied.sum(&mut ends, &mut gradient)?;
///     Ok(Some(gradient.to_vec()))
/// }
///
/// let stages = World::threads(3)?.into_iter().map(|world| std::thread::spawn(|| step(world)));
/// let stages: Vec<_> = stages.collect();
/// let sums: Result<Vec<_>, _> = stages.into_iter().map(|stage| stage.join().unwrap()).collect();
/// assert_eq!(sums?, [Some(vec![4.0, 4.0]), None, Some(vec![4.0, 4.0])]);
/// # Ok::<(), MeshError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiedWeights {
    elements: usize,
    stages: usize,
}

impl TiedWeights {
    /// The weights of both stages, which `ends` holds, the first stage before the last: see
    /// [`Mesh::world_ends`](crate::Mesh::world_ends). One rank is both in a pipeline of one stage.
    /// Collective: the stages compare their copies.
    ///
    /// # Errors
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    pub fn new(ends: &mut Communicator, weight: &[f32]) -> Result<TiedWeights, Error> {
        let digest = ("digest of tied weights", digest_of(weight));
        alike(ends, &[("tied weights", weight.len() as u64), digest])?;
        Ok(TiedWeights { elements: weight.len(), stages: ends.size() as usize })
    }

    /// Makes this stage's gradient the sum of both, from +0 by ascending stage. Collective.
    ///
    /// # Errors
    /// [`PlanError`](sidelane::error::PlanError) for a gradient of another length or another group;
    /// as [`Communicator::all_reduce`].
    pub fn sum(&self, ends: &mut Communicator, gradient: &mut [f32]) -> Result<(), Error> {
        let checked = has_ranks(ends, self.stages)
            .and_then(|()| has_shape("gradient of tied weights", gradient.len(), 1, self.elements));
        checked.map_err(|error| refuse(ends, Some(CallKind::AllReduce), error))?;
        ends.all_reduce(gradient)
    }
}
