//! Ranks that are processes or threads: the groups that share experts, and those whose gradients
//! are added.
//!
//! ```text
//!   8 ranks, experts over 4         0  1  2  3 | 4  5  6  7      windows of the batch: a part for each
//!
//!   expert-parallel groups          [0  1  2  3] [4  5  6  7]    rows cross within one; gradients of an expert are of all its rows
//!   replicas of the same experts    [0, 4] [1, 5] [2, 6] [3, 7]  add gradients of experts
//!   all                             [0  1  2  3   4  5  6  7]    add all other gradients, and the loss
//! ```

use std::ops::Range;
use std::sync::Arc;

use sidelane::collective::Communicator;
use sidelane::device::{Driver, Priority, Stream};
use sidelane::error::DeviceError;
use sidelane::gate::{BalanceLoss, CountDivisor, Preset, TokenGroups};
use sidelane::layer::{Experts, GroupedSwiGlu, MoeLayer, Products};
use sidelane::overlap::ChunkRule;
use sidelane::plan::ExpertMap;
use sidelane::{Dtype, Group, World};

use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::growth;
use crate::layer::{Layer, Limits};
use crate::model::{Model, Pass};
use crate::moe::Moe;
use crate::record::Decisions;
use crate::settings::{Settings, Shape};
use crate::survival::{self, Backup};
use crate::trainer::{Learned, Ranks, State, Trainer};

/// Into how many chunks the tokens of a layer are cut. All ranks must come to the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// As many as a rule finds for a layer's sizes.
    By(ChunkRule),
    /// So many.
    Number(u32),
}

impl Chunks {
    /// Measured with ranks as processes on the cores of one machine: a dispatch or combine of one
    /// token takes as long as about 64 KiB of a large one, and a row costs an expert hardly less in
    /// products of more than 32.
    pub const AUTO: Chunks = Chunks::By(ChunkRule::new(64 << 10, 32, 8));
}

/// How a step is carried out. No bit depends on it, but for products by cuBLAS.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Chunks of a layer's tokens.
    pub chunks: Chunks,
    /// Whether transfers overlap with compute.
    pub overlap: bool,
    /// Where the MoE layers compute.
    pub device: Device,
    /// Whether the run goes on without ranks that are lost ([`survival`]).
    pub survives: bool,
    /// For tests: the step in whose middle this rank kills itself.
    pub killed_in: Option<usize>,
}

/// Where the MoE layers compute. Attention, losses and the optimizer are candle's, on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// On the host.
    Host,
    /// On the GPU of this number, with products by our own kernel or by cuBLAS.
    Cuda(u32, Products),
}

/// The groups of a rank in its world, and the sums over them.
pub(crate) struct Groups {
    pub world: World,
    pub all: Group,
    /// Ranks that share experts.
    sharing: Group,
    pub sums: Communicator,
    of_experts: Communicator,
}

impl Groups {
    /// Those of a world. Collective.
    ///
    /// # Errors
    /// Those of the sums.
    pub fn new(world: World, settings: &Settings) -> Result<Groups> {
        let (rank, spread) = (world.rank(), settings.expert_parallel as u32);
        let first = rank / spread * spread;
        let all = world.all()?;
        let sharing = world.group(&(first..first + spread).collect::<Vec<_>>())?;
        let replicas =
            world.group(&(rank % spread..world.size()).step_by(spread as usize).collect::<Vec<_>>())?;
        // Chunks that leave room in the symmetric memory of worlds of threads.
        let sums = |group: &Group| Communicator::builder(group).chunk(64 << 10).build();
        let (sums, of_experts) = (sums(&all)?, sums(&replicas)?);
        Ok(Groups { world, all, sharing, sums, of_experts })
    }
}

/// One rank among others.
pub struct Parallel {
    settings: Settings,
    model: Model,
    killed_in: Option<usize>,
    /// Number of ranks that the run began with.
    pub(crate) full: usize,
    pub(crate) groups: Groups,
    /// What the others go on by if a rank is lost; none where the run does not survive that.
    pub(crate) backup: Option<Backup>,
}

impl Parallel {
    /// A rank of this world. Collective.
    ///
    /// # Errors
    /// Those of the layers and of the sums.
    pub fn new(world: World, settings: &Settings, plan: Plan) -> Result<Parallel> {
        Parallel::of(Groups::new(world, settings)?, settings, plan, settings.ranks)
    }

    /// A rank with these groups, of a run that began with `full` ranks. Collective.
    ///
    /// # Errors
    /// Those of the layers.
    pub(crate) fn of(groups: Groups, settings: &Settings, plan: Plan, full: usize) -> Result<Parallel> {
        let layers = layers(&groups.sharing, settings, plan, settings.own_experts(), |experts| experts)?;
        Ok(Parallel {
            settings: *settings,
            model: Model::new(settings.shape, layers)?,
            killed_in: plan.killed_in,
            full,
            groups,
            backup: plan.survives.then(Backup::default),
        })
    }

    /// The same rank in another world, with these experts. Collective.
    ///
    /// # Errors
    /// Those of the layers.
    pub(crate) fn rebuilt(&self, groups: Groups, settings: &Settings, experts: &Learned) -> Result<Parallel> {
        let (all, spread) = (settings.shape.experts as u32, settings.expert_parallel as u32);
        let map = ExpertMap::contiguous(all, spread).map_err(sidelane::Error::from)?;
        let layer = |(nth, layer): (usize, &Moe)| {
            let weights = |expert| Some(experts.weights.of_expert(nth, expert as usize).to_vec());
            let state = layer.state();
            Ok(Moe::new(state.layer.rebuilt(&groups.sharing, map.clone(), weights, limits(settings))?))
        };
        let layers = self.model.layers().iter().enumerate().map(layer).collect::<Result<_>>()?;
        let (model, backup) = (Model::new(settings.shape, layers)?, Some(Backup::default()));
        let Parallel { killed_in, full, .. } = *self;
        Ok(Parallel { settings: *settings, model, killed_in, full, groups, backup })
    }

    /// The last step of all ranks before they go on in another world: copies of the experts there.
    /// Collective.
    ///
    /// # Errors
    /// Those of the exchange.
    pub(crate) fn begin(&mut self, settings: &Settings, own: (&Learned, usize)) -> Result<()> {
        // At once: a rank that is lost before the next step takes no experts along.
        if let Some(backup) = &mut self.backup {
            backup.renew(&mut self.groups.sums, settings, own)?;
        }
        // A rank that is lost before all are here costs another try, by the state of before.
        self.groups.all.gather(&[])?;
        Ok(())
    }

    fn windows(&self, batch: usize) -> Range<usize> {
        let first = batch * self.settings.batch + self.groups.all.rank() as usize * self.settings.windows();
        first..first + self.settings.windows()
    }
}

impl Ranks for Parallel {
    fn own_experts(&self) -> Range<usize> {
        self.settings.experts_of(self.groups.all.rank() as usize)
    }

    fn learn(&mut self, state: &State, batches: &Batches, step: usize) -> Result<Pass> {
        if let Some(backup) = &mut self.backup {
            backup.renew(&mut self.groups.sums, &self.settings, (&state.experts, step))?;
        }
        let windows = batches.of_step(&self.settings, step, self.windows(0));
        self.model.load(state)?;
        let halfway = || {
            if self.killed_in == Some(step) {
                survival::die(step);
            }
        };
        let mut pass = self.model.learn(&state.dense.weights, &windows, self.settings.tokens(), halfway)?;
        pass.dense.push(pass.loss);
        let Groups { sums, of_experts, .. } = &mut self.groups;
        sums.all_reduce(&mut pass.dense)?;
        of_experts.all_reduce(&mut pass.experts)?;
        if let Some(backup) = &mut self.backup {
            backup.follow(sums, (state, &pass.experts), (step, self.settings.rate_at(step)))?;
        }
        pass.loss = pass.dense.pop().unwrap_or_default();
        Ok(pass)
    }

    fn judge(&mut self, state: &State, batches: &Batches) -> Result<(f32, Decisions)> {
        self.model.load(state)?;
        let (mut loss, mut decisions) = (0.0, Decisions::default());
        let tokens = batches.held() * self.settings.shape.window;
        for batch in 0..batches.held() / self.settings.batch {
            let windows = batches.of_held(self.windows(batch));
            let (own, decided) = self.model.judge(&state.dense.weights, &windows, tokens)?;
            let mut own = [own];
            self.groups.sums.all_reduce(&mut own)?;
            loss += own[0];
            for blob in self.groups.all.gather(&decided.to_bytes())? {
                decisions.extend(Decisions::from_bytes(&blob));
            }
        }
        Ok((loss, decisions))
    }

    fn writes_dense(&self) -> bool {
        self.groups.all.rank() == 0
    }

    fn writes_experts(&self) -> bool {
        self.groups.all.rank() < self.settings.expert_parallel as u32
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.groups.all.gather(own)?)
    }

    fn recover(trainer: &mut Trainer<Parallel>, error: Error) -> Result<()> {
        survival::recover(trainer, error)
    }

    fn grow(trainer: &mut Trainer<Parallel>) -> Result<bool> {
        growth::grow(trainer)
    }
}

/// The MoE layers of a rank that has `own` experts of each, made of what `wrap` makes of them.
///
/// # Errors
/// Those of the layer's builder.
pub fn layers<E: Experts + 'static>(
    group: &Group,
    settings: &Settings,
    plan: Plan,
    own: usize,
    wrap: impl Fn(GroupedSwiGlu) -> E,
) -> Result<Vec<Moe>> {
    let Shape { window, width, expert_width, experts, top_k, layers, .. } = settings.shape;
    let gate = Preset::Mixtral.config(experts as u32, top_k as u32).map_err(sidelane::Error::from)?;
    let Limits { tokens, balance } = limits(settings);
    let stream = match plan.device {
        Device::Host => None,
        Device::Cuda(number, products) => Some((stream(number).map_err(sidelane::Error::from)?, products)),
    };
    let layer = |_| {
        let weights = vec![0.0; GroupedSwiGlu::values(own, width, expert_width)];
        let experts = GroupedSwiGlu::new(own, width, expert_width, weights).map_err(sidelane::Error::from)?;
        let builder =
            MoeLayer::builder(group, gate.clone(), width, wrap(experts)).dtype(Dtype::F32).balance(balance);
        let builder = builder.max_tokens(tokens).overlap(plan.overlap);
        let builder = match plan.chunks {
            Chunks::By(rule) => builder.slices(rule),
            Chunks::Number(chunks) => builder.chunks(chunks),
        };
        // All rows may come to one rank, and as many gradients, outputs and sums beside them.
        let rows = settings.windows() * window * top_k * group.size() as usize;
        let heap = (8 * rows * width * 4).max(4 << 20) as u64;
        let on = stream.as_ref().map(|(stream, products)| (stream, *products, heap));
        Ok(Moe::new(Layer::new(builder, on)?))
    };
    (0..layers).map(layer).collect()
}

/// Settings of layers that go by the number of ranks.
fn limits(settings: &Settings) -> Limits {
    // Of each window by itself, so that it does not depend on how windows are spread.
    let balance = BalanceLoss::of(Preset::Mixtral)
        .with_parts(TokenGroups::Consecutive(settings.windows() as u32))
        .with_coefficient(settings.balance / settings.ranks as f32)
        .with_share(CountDivisor::OfChoices);
    Limits { tokens: (settings.windows() * settings.shape.window) as u32, balance }
}

/// The stream of all layers of a rank: on one, they take turns. Ranks share GPUs if there are
/// fewer.
fn stream(rank: u32) -> std::result::Result<Arc<Stream>, DeviceError> {
    let driver = Driver::open()?;
    let device = rank % driver.device_count()?.max(1);
    Ok(Arc::new(Stream::new(&driver.context(device)?, Priority::Normal)?))
}
