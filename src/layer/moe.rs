//! The object that steps are made on, how it is built, and its successor on another group after a
//! loss.
//!
//! ```text
//!   MoeLayer::builder(group, ..) --> MoeLayerBuilder --build--> MoeLayer --rebuilt(group)--> MoeLayer
//!                                        `--on(stream)--> DeviceMoeLayerBuilder
//! ```
//!
//! **After a loss** settings, gate and weights stay, and experts move:
//!
//! ```text
//!   before    rank 0: 0 1 2      rank 1: 2 3 0      rank 2: 4 5 3         rank 1 is lost
//!   map       rank 0: 0 1 2                         rank 1: 4 5 3         replicas have all that it held, or
//!             rank 0: 0 1 2                         rank 1: 4 5 3 2       an expert moves: the caller has its weights
//! ```

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::experts::CheckedExperts;
use super::pass_order::ChunkCounts;
use super::router_step::Losses;
use super::{DeviceMoeLayerBuilder, Experts};
use crate::device::Stream;
use crate::dtype::Dtype;
use crate::ep::{ExpertParallel, ExpertParallelBuilder, RowCollective, RowPartition};
use crate::error::{CallKind, Cause, Error, ExpertKind, LayerError, OverlapError, PlanError, StreamId};
use crate::gate::{BalanceLoss, Gate, GateConfig, Noise, Routing};
use crate::overlap::{CallCost, ChunkRule, Graph, HostExecutor, RoundRobin, Run, TokenChunks};
use crate::plan::{ExpertMap, SumOrder};
use crate::rows::{Arithmetic, RowKernels};
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
    /// The objects that move rows: [`Transfers`](super::pass_order::Transfers).
    pub(super) exchanges: Vec<ExpertParallel>,
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
    pub(super) plan: OverlapSettings,
    pub(super) asked: RequestedSettings,
    pub(super) rows: RowKernels,
    pub(super) world: Arc<WorldState>,
    /// Distinguishes tapes of different layers within this process.
    pub(super) instance: u64,
}

/// Settings as the caller named them, which a [rebuilt](MoeLayer::rebuilt) layer goes by: the plan
/// in use depends on the sizes of the group, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestedSettings {
    pub route: Route,
    pub sum_order: SumOrder,
    pub align: u32,
    pub slices: Option<ChunkRule>,
    pub plan: OverlapSettings,
}

/// How a step is carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverlapSettings {
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

impl OverlapSettings {
    /// The tokens of each chunk.
    pub fn slices(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let slices = TokenChunks::new(self.chunks).of(tokens as u32);
        slices.map(|tokens| tokens.start as usize..tokens.end as usize)
    }

    /// Chunks of a pass.
    pub fn cut(&self) -> ChunkCounts {
        let OverlapSettings { chunks, groups, transfers, .. } = *self;
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
        self.exchanges[0].refuse(call, None, error)
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
        f.debug_struct("MoeLayer").field("exchanges", &self.exchanges).field("plan", &self.plan).finish()
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

impl MoeLayer {
    /// The settings, the gate and the weights of this layer for another group: that of the
    /// survivors, once [`World::rebuild`](crate::World::rebuild) has gathered them. `map` says
    /// where the experts live there ([`ExpertMap::subset`] leaves out those of lost ranks that have
    /// replicas). An expert that was on this rank before keeps its weights. `weights` supplies
    /// those of each other expert that the map gives to this rank, in the order of
    /// [`Experts::with_weights`]: from a replica on another rank, say, or a checkpoint.
    ///
    /// Settings may change until [`build`](MoeLayerBuilder::build) makes the layer: with fewer
    /// ranks each may have more tokens. It has no tapes of this layer. Its errors are, besides its
    /// others, [`LayerError::NoWeights`] where `weights` supplies nothing,
    /// [`LayerError::Failed`] for experts that cannot be rebuilt, and
    /// [`PlanError::WrongShape`] for weights of another number: on this rank, and
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) on the others.
    ///
    /// This layer stays as it is, in its failed world, so a rebuild that fails can be tried again.
    /// Drop it then: it holds the memory of that world.
    pub fn rebuilt<'g>(
        &self,
        group: &'g Group,
        map: ExpertMap,
        weights: impl FnMut(u32) -> Option<Vec<f32>>,
    ) -> MoeLayerBuilder<'g> {
        // A map of too few ranks is refused when the layer is built.
        let slots = if group.rank() < map.ranks() { map.slots_of(group.rank()) } else { 0..0 };
        let held: Vec<u32> = slots.map(|slot| map.expert_of(slot)).collect();
        let (experts, shared) =
            match self.moved(&held, weights).and_then(|experts| Ok((experts, self.same()?))) {
                Ok((experts, shared)) => (Ok(experts), shared),
                Err(error) => (Err(error), None),
            };
        let RequestedSettings { route, sum_order, align, slices, plan } = self.asked;
        MoeLayerBuilder {
            group,
            gate: self.gate.config().clone(),
            hidden: self.hidden,
            dtype: self.dtype,
            max_tokens: self.max_tokens,
            map: Some(map),
            route,
            sum_order,
            align,
            router: Some(self.router.clone()),
            experts,
            shared,
            losses: self.losses,
            slices,
            plan,
        }
    }

    /// These experts: those of this rank as they are, others with the weights that are given.
    fn moved(
        &self,
        experts: &[u32],
        mut given: impl FnMut(u32) -> Option<Vec<f32>>,
    ) -> Result<Box<dyn Experts>, Error> {
        let (map, rank) = (self.exchanges[0].expert_map(), self.exchanges[0].rank());
        let own = self.experts.weights();
        let mut each = own.len().checked_div(self.experts.count());
        let mut weights = Vec::new();
        for &expert in experts {
            let kept = map.slots_of(rank).position(|slot| map.expert_of(slot) == expert).zip(each);
            if let Some((nth, each)) = kept {
                weights.extend_from_slice(&own[nth * each..][..each]);
                continue;
            }
            let more = given(expert).ok_or(LayerError::NoWeights { expert })?;
            let (seen, columns) = (more.len(), *each.get_or_insert(more.len()));
            if seen != columns {
                let what = "weights of an expert";
                return Err(PlanError::WrongShape { what, seen, rows: 1, columns }.into());
            }
            weights.extend(more);
        }
        CheckedExperts { whose: ExpertKind::Routed, experts: &*self.experts }
            .with_weights(experts.len(), weights)
    }

    /// The shared expert again.
    fn same(&self) -> Result<Option<Box<dyn Experts>>, Error> {
        let shared =
            self.shared.as_deref().map(|experts| CheckedExperts { whose: ExpertKind::Shared, experts });
        shared.map(|shared| shared.with_weights(1, shared.experts.weights().to_vec())).transpose()
    }
}

/// Settings of a [`MoeLayer`]. All ranks must pass the same, except weights, overlap, streams,
/// groups of experts and the deadline.
pub struct MoeLayerBuilder<'g> {
    pub(super) group: &'g Group,
    pub(super) gate: GateConfig,
    pub(super) hidden: usize,
    pub(super) dtype: Dtype,
    pub(super) max_tokens: u32,
    pub(super) map: Option<ExpertMap>,
    pub(super) route: Route,
    pub(super) sum_order: SumOrder,
    pub(super) align: u32,
    pub(super) router: Option<Vec<f32>>,
    /// Or the reason why this rank cannot have them.
    pub(super) experts: Result<Box<dyn Experts>, Error>,
    pub(super) shared: Option<Box<dyn Experts>>,
    pub(super) losses: Losses,
    pub(super) slices: Option<ChunkRule>,
    pub(super) plan: OverlapSettings,
}

impl<'g> MoeLayerBuilder<'g> {
    pub(super) fn new(
        group: &'g Group,
        gate: GateConfig,
        hidden: usize,
        experts: Box<dyn Experts>,
    ) -> MoeLayerBuilder<'g> {
        MoeLayerBuilder {
            group,
            gate,
            hidden,
            dtype: Dtype::Bf16,
            max_tokens: 4096,
            map: None,
            route: Route::Direct,
            sum_order: SumOrder::default(),
            align: 1,
            router: None,
            experts: Ok(experts),
            shared: None,
            losses: Losses::default(),
            slices: None,
            plan: OverlapSettings {
                chunks: 1,
                groups: 1,
                transfers: 2,
                overlap: true,
                streams: 1,
                at_once: 1,
                deadline: None,
            },
        }
    }

    /// Weights of the router, `[hidden, experts]`: logits are `x` times them. Default: zeros.
    pub fn router(mut self, weights: Vec<f32>) -> Self {
        self.router = Some(weights);
        self
    }

    /// An expert that all tokens pass: experts of one segment. Default: none.
    pub fn shared(mut self, expert: impl Experts + 'static) -> Self {
        self.shared = Some(Box::new(expert));
        self
    }

    /// A loss that balances experts, over this rank's tokens; its gradient goes to the router.
    /// Default: none.
    pub fn balance(mut self, loss: BalanceLoss) -> Self {
        self.losses.balance = Some(loss);
        self
    }

    /// The coefficient of the loss that keeps logits small, [`z_loss`](crate::gate::z_loss).
    /// Default: none.
    pub fn z_loss(mut self, coefficient: f32) -> Self {
        self.losses.z = Some(coefficient);
        self
    }

    /// Element type of the tensors, but bytes. Products are made in f32. Default: bf16.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// The most tokens a rank will pass in one step. Default: 4096.
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Where experts live, if not in contiguous blocks.
    pub fn expert_map(mut self, map: ExpertMap) -> Self {
        self.map = Some(map);
        self
    }

    /// How rows reach other nodes. Default: [`Route::Direct`].
    pub fn route(mut self, route: Route) -> Self {
        self.route = route;
        self
    }

    /// Order in which a token's rows are summed. Default: by expert id.
    pub fn sum_order(mut self, sum_order: SumOrder) -> Self {
        self.sum_order = sum_order;
        self
    }

    /// Each expert's segment is padded to a multiple of this many rows. Default: 1.
    pub fn align(mut self, rows: u32) -> Self {
        self.align = rows;
        self
    }

    /// Number of chunks of a step's tokens, as even as possible; each is dispatched and combined by
    /// itself. Default: 1.
    pub fn chunks(mut self, chunks: u32) -> Self {
        (self.plan.chunks, self.slices) = (chunks, None);
        self
    }

    /// Replaces a number of [`chunks`](Self::chunks): as many as this rule computes for the most
    /// tokens, spread evenly over experts.
    pub fn slices(mut self, rule: ChunkRule) -> Self {
        self.slices = Some(rule);
        self
    }

    /// Number of transfers in flight at once, each with control memory of its own: while rows of
    /// one are on the link, those of another are packed, placed or summed. All ranks agree on one
    /// after another, so all refuse the same one. Each holds its memory of the pool until it has
    /// ended. A transfer without room is refused, though there might have been room later. In
    /// [`MoeLayer::combined_forward_backward`] it is one at a time. Default: 2; as many as chunks
    /// at most.
    pub fn transfers(mut self, transfers: u32) -> Self {
        self.plan.transfers = transfers;
        self
    }

    /// Whether transfers run concurrently with compute, in threads of their own; otherwise the
    /// caller's thread runs the same steps one after another. Default: on.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.plan.overlap = overlap;
        self
    }

    /// Number of groups of adjacent experts in a chunk, as even by rows as possible
    /// ([`expert_groups`](crate::overlap::expert_groups)): each is a turn on the compute streams,
    /// so that [several](Self::streams) share a chunk. Gradients of weights are computed in one
    /// piece, in an order that the experts choose. Default: 1.
    pub fn expert_groups(mut self, groups: u32) -> Self {
        self.plan.groups = groups;
        self
    }

    /// Number of compute streams among which the chunks' experts, or groups of them, rotate, and
    /// how many may run at once ([`RoundRobin`](crate::overlap::RoundRobin)).
    /// [`MoeLayer::combined_forward_backward`] runs all experts on the caller's thread. Default: 1
    /// and 1.
    pub fn streams(mut self, streams: u32, at_once: u32) -> Self {
        (self.plan.streams, self.plan.at_once) = (streams, at_once);
        self
    }

    /// Time limit of experts for a chunk, or of a transfer, not counting those [in
    /// flight](Self::transfers) before it. Default: a little longer than the deadline of the world,
    /// at which transfers name the missing ranks. The world ends when it has passed. Experts that
    /// still run are waited for, since no thread can be ended from outside. A layer [on a
    /// device](Self::on) has none of its own.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.plan.deadline = Some(deadline);
        self
    }

    /// The same layer with its tensors on the device of this stream, which its work goes on.
    pub fn on(self, stream: &Arc<Stream>) -> DeviceMoeLayerBuilder<'g> {
        DeviceMoeLayerBuilder::new(self, stream)
    }

    /// Allocates what transfers need. Collective.
    ///
    /// # Errors
    /// [`GateError`](crate::error::GateError) and [`PlanError`] if a setting cannot be used,
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks chose differently,
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank has no room for the control
    /// windows.
    pub fn build(mut self) -> Result<MoeLayer, Error> {
        let MoeLayerBuilder { route, sum_order, align, slices, plan, .. } = self;
        let asked = RequestedSettings { route, sum_order, align, slices, plan };
        self.cut();
        let held = self.experts().map_or(1, |experts| experts.count().max(1));
        self.plan.groups = self.plan.groups.clamp(1, u32::try_from(held).unwrap_or(u32::MAX));
        self.plan.transfers = self.plan.transfers.clamp(1, self.plan.chunks.max(1));
        let checked = self.check();
        let (group, plan) = (self.group, self.plan);
        // A rank with bad settings still takes part in the comparison: the others get an error
        // instead of waiting.
        let settings = [
            ("whether their settings can be used (1: yes)", checked.is_ok().into()),
            ("chunks", plan.chunks.into()),
            ("transfers at once", plan.transfers.into()),
            ("the digest of the gate's settings and of the losses", self.digest()),
            ("whether there is a shared expert (1: yes)", self.shared.is_some().into()),
        ];
        group.alike(&settings)?;
        checked?;
        let exchanges =
            (0..plan.transfers).map(|_| self.build_exchange()).collect::<Result<Vec<_>, Error>>()?;
        let (sources, one_each) = self.sources(exchanges[0].expert_map())?;
        let zeros = || vec![0.0; self.hidden * self.gate.experts as usize];
        let router = self.router.unwrap_or_else(zeros);
        Ok(MoeLayer {
            gate: Gate::new(self.gate)?,
            exchanges,
            sources,
            one_each,
            router,
            experts: self.experts?,
            shared: self.shared,
            losses: self.losses,
            max_tokens: self.max_tokens,
            hidden: self.hidden,
            dtype: self.dtype,
            plan,
            asked,
            rows: group.shared.rows,
            world: Arc::clone(&group.shared),
            instance: next_instance(),
        })
    }

    /// Makes the number of chunks that of the rule, if there is one.
    pub(super) fn cut(&mut self) {
        if let Some(rule) = &self.slices {
            self.plan.chunks = rule.slices(&self.load()).count();
        }
    }

    /// What gathers each rank's row counts for every expert in every chunk.
    pub(super) fn sources(&self, map: &ExpertMap) -> Result<(RowCollective, RowPartition), Error> {
        let bytes = 4 * sources_columns(self.plan.chunks, map);
        let sources = RowCollective::builder(self.group).columns(bytes).dtype(Dtype::Bytes).max_rows(1);
        let mut sources = sources.route(self.route).build()?;
        let one_each = sources.shares(&vec![1; self.group.size() as usize])?;
        Ok((sources, one_each))
    }

    /// One that moves rows of a chunk at a time.
    fn build_exchange(&self) -> Result<ExpertParallel, Error> {
        self.exchange_builder().build()
    }

    /// Settings of such a one.
    pub(super) fn exchange_builder(&self) -> ExpertParallelBuilder<'g> {
        let builder = ExpertParallel::builder(self.group).top_k(self.gate.top_k).hidden(self.hidden);
        let builder = builder.dtype(self.dtype).route(self.route).sum_order(self.sum_order).align(self.align);
        let builder = builder.max_tokens(self.max_tokens.div_ceil(self.plan.chunks));
        match &self.map {
            Some(map) => builder.expert_map(map.clone()),
            None => builder.experts(self.gate.experts),
        }
    }

    /// A step of the most tokens.
    fn load(&self) -> CallCost {
        let (tokens, k) = (self.max_tokens, self.gate.top_k);
        let row = (self.hidden as u64).saturating_mul(self.dtype.size() as u64);
        let token_bytes = row.saturating_mul(k.into());
        let rows = (u64::from(tokens) * u64::from(k)).saturating_mul(self.group.size().into());
        let expert_rows = u32::try_from(rows / u64::from(self.gate.experts.max(1))).unwrap_or(u32::MAX);
        CallCost { tokens, token_bytes, expert_rows }
    }

    /// By which ranks find out whether they route, and are balanced, by the same settings.
    pub(super) fn digest(&self) -> u64 {
        // Debug output shows every field, and floats to the bit except the payload of a NaN.
        let digest = Sha256::digest(format!("{:?} {:?}", self.gate, self.losses));
        digest.iter().take(8).fold(0, |word, &byte| word << 8 | u64::from(byte))
    }

    /// The experts of this rank.
    pub(super) fn experts(&self) -> Result<&dyn Experts, Error> {
        self.experts.as_deref().map_err(Error::clone)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.gate.check()?;
        Arithmetic::try_from(self.dtype)?;
        let bad = |parameter, seen: u64, expected| PlanError::BadParameter { parameter, seen, expected };
        let (rank, experts) = (self.group.rank(), self.gate.experts);
        let held = match &self.map {
            Some(map) if map.ranks() != self.group.size() || map.experts() != experts => {
                let expected = "as many as the gate's, on as many ranks as the group's";
                return Err(bad("experts of the map", map.experts().into(), expected).into());
            }
            Some(map) => map.slots_of(rank).len(),
            None => ExpertMap::contiguous(experts, self.group.size())?.slots_of(rank).len(),
        };
        let given = self.experts()?;
        if given.count() != held {
            return Err(PlanError::ExpertsGiven { rank, given: given.count(), held, experts }.into());
        }
        if let Some(shared) = self.shared.as_ref().filter(|shared| shared.count() != 1) {
            return Err(bad("shared experts given", shared.count() as u64, "1: a wider one").into());
        }
        let widths = [Some(given), self.shared.as_deref()].map(|of| of.map(|experts| experts.hidden()));
        if let Some(width) = widths.into_iter().flatten().find(|&width| width != self.hidden) {
            return Err(bad("hidden of experts", width as u64, "that of the layer").into());
        }
        if self.plan.chunks == 0 || self.plan.chunks > self.max_tokens.max(1) {
            let expected = "at least 1, and at most as many as tokens";
            return Err(bad("chunks", self.plan.chunks.into(), expected).into());
        }
        if matches!(self.gate.noise, Noise::Jitter { .. }) {
            return Err(bad("noise", 1, "none that multiplies logits: its gradient needs the factors").into());
        }
        let (what, rows, columns) = ("weights of the router", self.hidden, experts as usize);
        let Some(needed) = rows.checked_mul(columns) else {
            return Err(bad("hidden", rows as u64, "fewer: weights of the router are counted").into());
        };
        match self.router.as_ref().map(Vec::len) {
            Some(seen) if seen != needed => Err(PlanError::WrongShape { what, seen, rows, columns }.into()),
            _ => Ok(()),
        }
    }
}

/// Number of a layer in this process.
pub(super) fn next_instance() -> u64 {
    static INSTANCES: AtomicU64 = AtomicU64::new(0);
    // Relaxed: numbers only differ.
    INSTANCES.fetch_add(1, Ordering::Relaxed)
}

impl std::fmt::Debug for MoeLayerBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeLayerBuilder").field("gate", &self.gate).field("plan", &self.plan).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{OverlapSettings, *};
    use crate::gate::{BalanceLoss, Preset};
    use crate::layer::router_step::Losses;
    use crate::layer::{GroupedSwiGlu, MoeLayer};
    use crate::overlap::ChunkRule;
    use crate::plan::SumOrder;
    use crate::topology::Route;
    use crate::{Dtype, World};

    /// Every setting by its name. A new one has no place here until it is named.
    fn settings(builder: &MoeLayerBuilder<'_>) -> Vec<(&'static str, String)> {
        fn text(value: &dyn std::fmt::Debug) -> String {
            format!("{value:?}")
        }
        // The group and the map are those of the caller.
        let MoeLayerBuilder {
            group: _,
            map: _,
            gate,
            hidden,
            dtype,
            max_tokens,
            route,
            sum_order,
            align,
            router,
            experts,
            shared,
            losses,
            slices,
            plan,
        } = builder;
        let Losses { balance, z } = losses;
        let OverlapSettings { chunks, groups, transfers, overlap, streams, at_once, deadline } = plan;
        vec![
            ("gate", text(gate)),
            ("hidden", text(hidden)),
            ("dtype", text(dtype)),
            ("max_tokens", text(max_tokens)),
            ("route", text(route)),
            ("sum_order", text(sum_order)),
            ("align", text(align)),
            ("router", text(router)),
            ("experts", text(&experts.as_ref().map(|experts| experts.weights().to_vec()))),
            ("shared", text(&shared.as_ref().map(|shared| shared.weights().to_vec()))),
            ("balance", text(balance)),
            ("z_loss", text(z)),
            ("slices", text(slices)),
            ("chunks", text(chunks)),
            ("expert_groups", text(groups)),
            ("transfers", text(transfers)),
            ("overlap", text(overlap)),
            ("streams", text(streams)),
            ("streams at once", text(at_once)),
            ("deadline", text(deadline)),
        ]
    }

    #[test]
    fn layer_keeps_every_setting_in_a_rebuild() {
        let world = World::threads(1).unwrap().remove(0);
        let group = world.all().unwrap();
        let experts = |count: usize, hidden: usize, value: f32| {
            let weights = vec![value; GroupedSwiGlu::values(count, hidden, 4)];
            GroupedSwiGlu::new(count, hidden, 4, weights).unwrap()
        };
        let gate = |top_k| Preset::Mixtral.config(4, top_k).unwrap();
        let plain = || MoeLayer::builder(&group, gate(1), 8, experts(4, 8, 0.5));
        let asked = || {
            let builder = MoeLayer::builder(&group, gate(2), 16, experts(4, 16, 0.25)).dtype(Dtype::F32);
            let builder =
                builder.router(vec![0.125; 64]).shared(experts(1, 16, 0.75)).align(4).max_tokens(32);
            let builder =
                builder.route(Route::Pxn).sum_order(SumOrder::Node).z_loss(0.5).chunks(4).transfers(3);
            let builder = builder.balance(BalanceLoss::of(Preset::Mixtral)).overlap(false).expert_groups(2);
            builder.streams(2, 2).deadline(Duration::from_secs(77))
        };
        let mut set = Vec::new();
        let rule = ChunkRule { call_bytes: 64, gemm_rows: 2, most: 2 };
        for is_cut_by_rule in [false, true] {
            let asked = || if is_cut_by_rule { asked().slices(rule) } else { asked() };
            let (before, default) = (settings(&asked()), settings(&plain()));
            set.extend(before.iter().zip(&default).filter(|(a, b)| a != b).map(|(a, _)| a.0));
            let layer = asked().build().unwrap();
            let map = ExpertMap::contiguous(4, 1).unwrap();
            assert_eq!(settings(&layer.rebuilt(&group, map, |_| None)), before);
        }
        let never: Vec<_> =
            settings(&plain()).into_iter().map(|(name, _)| name).filter(|name| !set.contains(name)).collect();
        assert_eq!(never, [""; 0], "this test asks for no value of theirs but the default");
    }
}
