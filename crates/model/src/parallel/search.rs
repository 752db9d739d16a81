//! All meshes of a job, and the fastest ones that fit.
//!
//! ```text
//!   Question --> shapes, ep, ZeRO, microbatches --> Memory, Step of each --> the best of each shape, ranked
//! ```

use std::collections::BTreeMap;

use serde::Serialize;
use sidelane_core::error::PlanError;

use super::device_rates::Devices;
use super::dispatch::{DispatchTimes, LayerTransfers};
use super::memory::{Memory, Precision};
use super::mesh::{Mesh, Shape, Zero, divisors};
use super::step_time::{Overlap, Step};
use super::transformer::Transformer;
use crate::time::Hardware;

/// A training step that a mesh is wanted for.
///
/// ```
/// use sidelane_model::parallel::{Bound, Devices, Fixed, Overlap, Precision, Question};
///
/// let question = Question {
///     model: "llama-2-13b".parse()?,
///     devices: Devices::tpu_v5p(),
///     hardware: None,
///     count: 4_096,
///     tokens: 3 << 20,
///     sequence: 1_024,
///     precision: Precision::BOOK,
///     recompute: false,
///     overlap: Overlap::All,
///     fixed: Fixed { cp: Some(1), ..Fixed::default() },
/// };
/// let best = question.search()?.fitting[0];
/// assert!(best.mesh.shape.tp > 1 && best.step.bound == Bound::Compute);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Question {
    /// The model.
    pub model: Transformer,
    /// Rates of the devices.
    pub devices: Devices,
    /// The same machine for the time model, which times dispatch and combine. Without it experts
    /// stay on the ranks of their tokens: `ep` is 1.
    pub hardware: Option<Hardware>,
    /// Number of devices.
    pub count: u32,
    /// Tokens of a step.
    pub tokens: u64,
    /// Tokens of a sequence. A microbatch of a data parallel rank has at least one.
    pub sequence: u32,
    /// Bytes of an element.
    pub precision: Precision,
    /// Whether the backward pass repeats the forward pass.
    pub recompute: bool,
    /// Transfers that run while the device computes.
    pub overlap: Overlap,
    /// Sizes that are given.
    pub fixed: Fixed,
}

/// Sizes of dimensions that a search does not choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fixed {
    /// Pipeline stages.
    pub pp: Option<u32>,
    /// Data parallel ranks.
    pub dp: Option<u32>,
    /// Context parallel ranks.
    pub cp: Option<u32>,
    /// Tensor parallel ranks.
    pub tp: Option<u32>,
    /// Expert parallel ranks.
    pub ep: Option<u32>,
}

impl Fixed {
    fn allows(&self, shape: &Shape) -> bool {
        let Shape { pp, dp, cp, tp, ep } = *shape;
        let sizes = [(self.pp, pp), (self.dp, dp), (self.cp, cp), (self.tp, tp), (self.ep, ep)];
        sizes.iter().all(|(given, size)| given.is_none_or(|given| given == *size))
    }
}

/// A mesh with its memory and time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The mesh.
    #[serde(flatten)]
    pub mesh: Mesh,
    /// Memory of a device.
    pub memory: Memory,
    /// Time of a step.
    pub step: Step,
}

impl Candidate {
    /// By time, then by memory. Times that differ by rounding alone are equal.
    fn key(&self) -> (u64, u64, Mesh) {
        ((self.step.step_s * 1e12).round() as u64, self.memory.total_bytes(), self.mesh)
    }
}

/// Meshes of a question.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundMeshes {
    /// The best of each shape that fits, the fastest first.
    pub fitting: Vec<Candidate>,
    /// The mesh with the least memory, whether it fits or not.
    pub smallest: Option<Candidate>,
    /// Shapes that were looked at. Those of groups that the time model refuses are not.
    pub shapes: u32,
}

/// A question that has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SearchError {
    /// No device, or no token.
    #[error("{parameter} = {seen}, but it must be between 1 and {most}")]
    OutOfRange {
        /// Which.
        parameter: &'static str,
        /// Its value.
        seen: u64,
        /// The largest that can be.
        most: u64,
    },
    /// The time model cannot time the dispatches.
    #[error(transparent)]
    Dispatch(#[from] PlanError),
}

/// Devices of a job, tokens of a step, and tokens of a sequence: at most.
const MOST: [(&str, u64); 3] =
    [("devices", 1 << 17), ("tokens", Question::MOST_TOKENS), ("sequence", 1 << 24)];

impl Question {
    /// The most tokens that a step may have.
    pub const MOST_TOKENS: u64 = 1 << 40;

    /// Shapes that the model can take on these devices. Each pipeline stage has a layer. Tensor
    /// parallelism divides the query heads and the width of each MLP, and `ep` the experts. Each
    /// data parallel rank has a sequence, of which a context parallel rank has two pieces.
    pub fn shapes(&self) -> Vec<Shape> {
        let experts = self.model.experts.filter(|_| self.hardware.is_some());
        let with_experts = |shape: Shape| {
            let ways = divisors(experts.map_or(1, |experts| experts.count));
            let divides = move |ep: &u32| shape.stage().is_multiple_of(*ep);
            ways.into_iter().filter(divides).map(move |ep| Shape { ep, ..shape })
        };
        let shapes =
            Shape::all(self.count).into_iter().filter(|shape| self.is_cut_by(shape)).flat_map(with_experts);
        shapes.filter(|shape| self.fixed.allows(shape)).collect()
    }

    /// Sequences of a step.
    pub(super) fn sequences(&self) -> u64 {
        self.tokens.div_ceil(self.length().max(1))
    }

    /// Tokens of the longest sequence: a step of fewer tokens has one of its own length.
    pub(super) fn length(&self) -> u64 {
        self.tokens.min(self.sequence.into())
    }

    /// Memory of a device on a mesh.
    pub fn memory(&self, mesh: &Mesh) -> Memory {
        Memory::of(&self.model, mesh, &self.precision, self.tokens, self.recompute)
    }

    /// Searches all meshes. Data parallel states are cut in each of four ways, and microbatches are
    /// powers of two. Without a pipeline a step has as few microbatches as fit.
    ///
    /// # Errors
    /// [`SearchError::OutOfRange`] for no devices or tokens, and the time model's error if it
    /// refuses the groups of all shapes.
    pub fn search(&self) -> Result<FoundMeshes, SearchError> {
        self.find(&mut self.times())
    }

    /// The same for other numbers of tokens; each group of experts is timed once.
    ///
    /// # Errors
    /// As [`Question::search`].
    pub fn search_by_tokens(&self, tokens: &[u64]) -> Result<Vec<FoundMeshes>, SearchError> {
        let mut times = self.times();
        let of = |&tokens: &u64| Question { tokens, ..self.clone() }.find(&mut times);
        tokens.iter().map(of).collect()
    }

    fn times(&self) -> Option<DispatchTimes<'_>> {
        self.hardware.as_ref().map(|hardware| DispatchTimes::new(hardware, self.model.hidden))
    }

    fn find(&self, times: &mut Option<DispatchTimes<'_>>) -> Result<FoundMeshes, SearchError> {
        let seen = [self.count.into(), self.tokens, self.sequence.into()];
        for ((parameter, most), seen) in MOST.into_iter().zip(seen) {
            if !(1..=most).contains(&seen) {
                return Err(SearchError::OutOfRange { parameter, seen, most });
            }
        }
        let mut best: BTreeMap<Shape, Candidate> = BTreeMap::new();
        let mut smallest: Option<(Mesh, Memory)> = None;
        let (mut shapes, mut untimed) = (0, None);
        for shape in self.shapes() {
            // A group that the time model refuses leaves all others.
            if let Err(error) = self.transfers(times, &shape, 1) {
                untimed.get_or_insert(error);
                continue;
            }
            shapes += 1;
            for mesh in self.settings(shape) {
                let memory = self.memory(&mesh);
                if smallest.is_none_or(|(_, least)| memory.total_bytes() < least.total_bytes()) {
                    smallest = Some((mesh, memory));
                }
                if memory.total_bytes() > self.devices.memory_bytes {
                    continue;
                }
                let found = self.candidate(times, mesh, memory)?;
                let known = best.entry(shape).or_insert(found);
                if found.key() < known.key() {
                    *known = found;
                }
            }
        }
        if let (0, Some(error)) = (shapes, untimed) {
            return Err(error);
        }
        let mut fitting: Vec<_> = best.into_values().collect();
        fitting.sort_by_key(Candidate::key);
        let smallest = smallest.map(|(mesh, memory)| self.candidate(times, mesh, memory)).transpose()?;
        Ok(FoundMeshes { fitting, smallest, shapes })
    }

    /// A mesh, whether it fits or not.
    ///
    /// # Errors
    /// Those of the time model.
    pub fn cost(&self, mesh: Mesh) -> Result<Candidate, SearchError> {
        self.candidate(&mut self.times(), mesh, self.memory(&mesh))
    }

    fn candidate(
        &self,
        times: &mut Option<DispatchTimes<'_>>,
        mesh: Mesh,
        memory: Memory,
    ) -> Result<Candidate, SearchError> {
        let transfers = self.transfers(times, &mesh.shape, mesh.microbatches)?;
        Ok(Candidate { mesh, memory, step: Step::of(self, &mesh, transfers) })
    }

    /// Dispatch and combine in a layer of one of so many microbatches.
    fn transfers(
        &self,
        times: &mut Option<DispatchTimes<'_>>,
        shape: &Shape,
        microbatches: u32,
    ) -> Result<LayerTransfers, SearchError> {
        let experts = self.model.experts.filter(|_| shape.ep > 1);
        let (Some(experts), Some(times)) = (experts, times) else { return Ok(LayerTransfers::default()) };
        let ranks = u64::from(shape.stage()) * u64::from(microbatches);
        let group = shape.experts(self.devices.per_node);
        Ok(times.of(&experts, group, self.tokens as f64 / ranks as f64)?)
    }

    /// Settings of a shape.
    fn settings(&self, shape: Shape) -> Vec<Mesh> {
        let is_copied = shape.copies() > 1 || self.model.experts.is_some() && shape.expert_copies() > 1;
        let ways = if is_copied { &Zero::ALL[..] } else { &[Zero::Plain] };
        let most = self.sequences() / u64::from(shape.dp);
        // Microbatches are numbers of 32 bits, also where a step has more sequences.
        let powers = most.max(1).ilog2().min(u32::BITS - 1);
        let microbatches = (0..=powers).map(|power| 1 << power);
        let mut settings = Vec::new();
        for &zero in ways {
            for microbatches in microbatches.clone() {
                let mesh = Mesh { shape, zero, microbatches };
                settings.push(mesh);
                let fits = || self.memory(&mesh).total_bytes() <= self.devices.memory_bytes;
                // More of them only repeat transfers where there is no bubble to fill.
                if shape.pp == 1 && fits() {
                    break;
                }
            }
        }
        settings
    }
}
