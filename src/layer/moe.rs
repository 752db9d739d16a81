//! The object that steps are made on.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Duration;

use super::pass_order::ChunkCounts;
use super::router_step::Losses;
use super::{Experts, MoeLayerBuilder};
use crate::dtype::Dtype;
use crate::ep::{ExpertParallel, RowCollective, RowPartition};
use crate::error::{CallKind, Cause, Error, OverlapError, PlanError, StreamId};
use crate::gate::{Gate, GateConfig, Routing};
use crate::overlap::{ChunkRule, Graph, HostExecutor, RoundRobin, Run, TokenChunks};
use crate::plan::{ExpertMap, SumOrder};
use crate::rows::RowKernels;
use crate::topology::Route;
use crate::world::{Group, WorldState};

/// A Mixture-of-Experts layer of one rank, forward and backward.
///
/// ```
/// use sidelane::gate::Preset;
/// use sidelane::layer::{GroupedSwiGlu, Input, MoeLayer};
/// use sidelane::{Dtype, World};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let (hidden, ffn) = (8, 16);
///         let weights = vec![0.125; GroupedSwiGlu::values(2, hidden, ffn)];         // 2 of 4 experts are here
///         let experts = GroupedSwiGlu::new(2, hidden, ffn, weights)?;
///         let mut layer = MoeLayer::builder(&world.all()?, Preset::Mixtral.config(4, 2)?, hidden, experts)
///             .dtype(Dtype::F32).chunks(2).build()?;
///         let x = vec![0.5f32; 3 * hidden];                                         // [tokens, hidden]
///         let (out, tape) = layer.forward(&Input::new(&x[..]).with_residual(Some(&x)))?;
///         let gradients = layer.backward(tape, &vec![1.0f32; out.len()])?;          // of a loss that is the sum of out
///         assert_eq!(gradients.experts.len(), layer.experts().weights().len());
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
pub struct MoeLayer {
    /// The objects that move rows: [`Transfers`](super::transfers::Transfers).
    pub(super) movers: Vec<ExpertParallel>,
    /// Gathers each rank's row counts for every expert in every chunk.
    pub(super) sources: RowCollective,
    pub(super) one_each: RowPartition,
    pub(super) gate: Gate,
    pub(super) router: Vec<f32>,
    pub(super) experts: Box<dyn Experts>,
    pub(super) shared: Option<Box<dyn Experts>>,
    pub(super) losses: Losses,
    /// Of a rank in a step, over all chunks.
    pub(super) max_tokens: u32,
    pub(super) hidden: usize,
    pub(super) dtype: Dtype,
    pub(super) plan: Plan,
    pub(super) asked: Asked,
    pub(super) rows: RowKernels,
    pub(super) world: Arc<WorldState>,
    /// Distinguishes tapes of different layers within this process.
    pub(super) instance: u64,
}

/// Settings as the caller named them, which a [rebuilt](MoeLayer::rebuilt) layer goes by: the plan
/// in use depends on the sizes of the group, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub route: Route,
    pub sum_order: SumOrder,
    pub align: u32,
    pub slices: Option<ChunkRule>,
    pub plan: Plan,
}

/// How a step is carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub chunks: u32,
    /// Of the experts of a chunk.
    pub groups: u32,
    /// In flight at once.
    pub transfers: u32,
    pub overlap: bool,
    pub streams: u32,
    pub at_once: u32,
    /// Time limit of a node; none is that of the [world](Self::limit).
    pub deadline: Option<Duration>,
}

impl Plan {
    /// The tokens of each chunk.
    pub fn slices(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let slices = TokenChunks::new(self.chunks).of(tokens as u32);
        slices.map(|tokens| tokens.start as usize..tokens.end as usize)
    }

    /// Chunks of a pass.
    pub fn cut(&self) -> ChunkCounts {
        let Plan { chunks, groups, transfers, .. } = *self;
        ChunkCounts { chunks: chunks as usize, groups: groups as usize, transfers }
    }

    /// Turns of compute streams.
    pub fn turns(&self) -> RoundRobin {
        RoundRobin::new(self.streams, self.at_once)
    }

    /// Time limit of a node. A rank that is awaited in vain is named by the wait itself, not by the
    /// end of its time.
    pub fn limit(&self, world: &WorldState) -> Duration {
        let timeouts = &world.options.timeouts;
        self.deadline.unwrap_or_else(|| timeouts.deadline.saturating_add(timeouts.liveness))
    }

    /// Runs a graph. Unless all ranks were refused alike, an error ends the `world`, so that no
    /// rank waits for this one, nor its own transfers for others.
    pub fn run(&self, graph: Graph<'_, Run>, world: &WorldState) -> Result<(), Error> {
        let cancel = |error: &OverlapError| {
            if refused_alike(error) {
                return ControlFlow::Continue(());
            }
            // A transfer's failure is recorded already ([`WorldState::fail`]): that stays the
            // cause.
            if world.hub.health().check().is_ok() {
                world.hub.cancel(cause_of(error, world.hub.rank()));
            }
            ControlFlow::Break(())
        };
        let executor = HostExecutor::new().overlap(self.overlap).limit(self.limit(world)).on_error(&cancel);
        let executor = executor.recorder(world.recorder.as_deref());
        Ok(graph.run(&executor)?)
    }
}

/// Cause of the world's failure after the error of a graph.
pub(super) fn cause_of(error: &OverlapError, by: u32) -> Cause {
    match error {
        OverlapError::Panicked { at, message, .. } => {
            Cause::Panicked { by, thread: at.to_string(), message: message.clone() }
        }
        OverlapError::ThreadPanicked { name, message } => {
            Cause::Panicked { by, thread: name.clone(), message: message.clone() }
        }
        _ => Cause::Cancelled { by },
    }
}

/// Whether all ranks were refused the same transfer, with no rows moved: the world stays usable.
pub(super) fn refused_alike(error: &OverlapError) -> bool {
    let OverlapError::Failed { at, error, .. } = error else { return false };
    matches!(at.stream, StreamId::Transfer(_))
        && matches!(**error, Error::Plan(_) | Error::Call(_) | Error::Memory(_))
}

/// Elements of a rank's message about its choices: a word for each slot in each chunk, rounded up
/// to whole rows of 16 bytes.
pub(super) fn sources_columns(chunks: u32, map: &ExpertMap) -> usize {
    (chunks as usize * map.slots() as usize).next_multiple_of(4)
}

impl MoeLayer {
    /// Starts to describe one: its gate has the number of experts and of choices per token;
    /// `experts` are those of this rank.
    pub fn builder<'g>(
        group: &'g Group,
        gate: GateConfig,
        hidden: usize,
        experts: impl Experts + 'static,
    ) -> MoeLayerBuilder<'g> {
        MoeLayerBuilder::new(group, gate, hidden, Box::new(experts))
    }

    /// By what tokens are routed.
    pub fn gate(&self) -> &GateConfig {
        self.gate.config()
    }

    /// Weights of the router, `[hidden, experts]`.
    pub fn router(&self) -> &[f32] {
        &self.router
    }

    /// The same, to be changed between steps.
    pub fn router_mut(&mut self) -> &mut [f32] {
        &mut self.router
    }

    /// The experts of this rank.
    pub fn experts(&self) -> &dyn Experts {
        &*self.experts
    }

    /// The same, to be changed between steps.
    pub fn experts_mut(&mut self) -> &mut dyn Experts {
        &mut *self.experts
    }

    /// The expert that all tokens pass, if there is one.
    pub fn shared(&self) -> Option<&dyn Experts> {
        self.shared.as_deref()
    }

    /// The same, to be changed between steps.
    pub fn shared_mut(&mut self) -> Option<&mut (dyn Experts + 'static)> {
        self.shared.as_deref_mut()
    }

    /// Enters a pass that this rank cannot make, so that the other ranks hear of it and do not
    /// wait: [`CallKind::Dispatch`] in place of a forward pass, or [`CallKind::CombineBackward`] in
    /// place of a backward one. They get [`PeerRefused`](crate::error::CallError::PeerRefused),
    /// nothing moves, and the next pass works. Returns the error to report here: `error`, or the
    /// one that ended the world meanwhile.
    pub fn refuse(&mut self, call: CallKind, error: Error) -> Error {
        self.movers[0].refuse(call, None, error)
    }

    /// Whether a tensor has a row for each of `tokens`.
    pub(super) fn check_rows(&self, what: &'static str, seen: usize, tokens: usize) -> Result<(), Error> {
        let columns = self.hidden;
        if seen == tokens * columns {
            return Ok(());
        }
        Err(PlanError::WrongShape { what, seen, rows: tokens, columns }.into())
    }
}

impl std::fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeLayer").field("movers", &self.movers).field("plan", &self.plan).finish()
    }
}

/// The choices of a chunk's tokens.
pub(super) fn routing_of<'a>(
    routing: &'a Routing<'_>,
    tokens: &Range<usize>,
) -> Result<Routing<'a>, PlanError> {
    let k = routing.top_k() as usize;
    let choices = tokens.start * k..tokens.end * k;
    Routing::new(routing.top_k(), &routing.experts()[choices.clone()], &routing.weights()[choices])
}
