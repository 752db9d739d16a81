//! Building a layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::moe::{Asked, Plan, sources_columns};
use super::router_step::Losses;
use super::{DeviceMoeLayerBuilder, Experts, MoeLayer};
use crate::device::Stream;
use crate::dtype::Dtype;
use crate::ep::{ExpertParallel, ExpertParallelBuilder, RowCollective, RowPartition};
use crate::error::{Error, PlanError};
use crate::gate::{BalanceLoss, Gate, GateConfig, Noise};
use crate::overlap::{CallCost, ChunkRule};
use crate::plan::{ExpertMap, SumOrder};
use crate::rows::Arithmetic;
use crate::topology::Route;
use crate::world::Group;

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
    pub(super) plan: Plan,
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
            plan: Plan {
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
        let asked = Asked { route, sum_order, align, slices, plan };
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
        let movers = (0..plan.transfers).map(|_| self.mover()).collect::<Result<Vec<_>, Error>>()?;
        let (sources, one_each) = self.sources(movers[0].expert_map())?;
        let zeros = || vec![0.0; self.hidden * self.gate.experts as usize];
        let router = self.router.unwrap_or_else(zeros);
        Ok(MoeLayer {
            gate: Gate::new(self.gate)?,
            movers,
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
    fn mover(&self) -> Result<ExpertParallel, Error> {
        self.exchange().build()
    }

    /// Settings of such a one.
    pub(super) fn exchange(&self) -> ExpertParallelBuilder<'g> {
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
    INSTANCES.fetch_add(1, Ordering::Relaxed)
}

impl std::fmt::Debug for MoeLayerBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeLayerBuilder").field("gate", &self.gate).field("plan", &self.plan).finish()
    }
}
