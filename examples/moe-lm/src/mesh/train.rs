//! Steps of a rank of a mesh.
//!
//! ```text
//!   step     windows of this rank's part of the batch, in microbatches
//!            Pipeline::run     passes of its stage, in the order of the schedule
//!            loss              from the last stage to all
//!            Optimizer::step   of each kind of tensors, over the ranks that have the same ones
//! ```
//!
//! **Scales.** A rank's loss is the mean over its own tokens of a step, and data parallelism takes
//! means over ranks. Tensor parallel ranks share the tokens of a rank, so their gradients of whole
//! tensors are `tp` parts of one sum. The gradient of an expert is a sum over the `ep` ranks whose
//! rows came to it. So these two are multiplied by `tp`, and by `tp / ep`.
//!
//! **Reference.** One process plays a batch in parts, microbatch by microbatch and part by part. It
//! adds the gradients of each part by themselves, and the parts by ascending number, as data
//! parallel ranks do. The gradient of an expert is one product over the rows of the parts that
//! share it ([`InTurn`](crate::reference)), as on the rank that has it.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sidelane::World;
use sidelane::collective::Communicator;
use sidelane_parallel::pipeline::{Pipeline, Plan};

use super::groups::Groups;
use super::optimizer::Optimizer;
use super::stage::{Played, Stage};
use super::strategy::{Sizes, Strategy, StrategyError};
use super::tensors::{Rows, Sections, Tensor, part, tensors_of};
use crate::batches::{Batches, Windows};
use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::trainer::{History, agree_by};
use crate::weights::Weights;

/// Bytes that a rank put into memory of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Of its node, itself included.
    pub intra_node_bytes: u64,
    /// Of other nodes.
    pub inter_node_bytes: u64,
}

/// Bytes that a rank sent in a step, by the dimension of the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Tensor and sequence parallelism.
    pub tp: Moved,
    /// Attention.
    pub cp: Moved,
    /// Gradients and parameters of data parallelism and ZeRO.
    pub dp: Moved,
    /// Activations and their gradients, to other stages.
    pub pp_bytes: u64,
    /// Rows of experts to other ranks, and back: four for each token and rank.
    pub ep_bytes: u64,
    /// Parameters, gradients and optimizer states that the rank holds between steps.
    pub state_bytes: u64,
}

/// A rank's part of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPart {
    /// The tensor's name, as in the plain model.
    pub name: String,
    /// Places in the whole tensor, and the values there.
    pub values: Vec<(usize, f32)>,
}

/// A run, as a rank of its mesh has it.
pub struct MeshTrainer {
    /// Settings of the run.
    pub settings: Settings,
    /// Its strategy.
    pub strategy: Strategy,
    /// Losses so far.
    pub history: History,
    pub(super) stage: Stage,
    pub(super) optimizers: Sections<Optimizer>,
    pub(super) batches: Batches,
    /// Of the last step.
    traffic: Traffic,
    /// By model chunk.
    tensors: Vec<Sections<Vec<Tensor>>>,
    pipeline: Pipeline,
    /// The ranks that a reference plays; else one, and those that share its experts.
    played: Played,
}

impl MeshTrainer {
    /// A rank of this world, before the first step. Collective.
    ///
    /// # Errors
    /// As [`Strategy::check`], before anything moves; those of the layers and of the groups.
    pub fn new(
        world: &World,
        settings: &Settings,
        strategy: &Strategy,
        batches: Batches,
    ) -> Result<MeshTrainer> {
        strategy.check(settings, world.size())?;
        MeshTrainer::playing(world, settings, (strategy, strategy.plan()?), None, batches)
    }

    /// One process that plays the data parallel ranks of a mesh, in the order of their sums. It has
    /// no stages, schedule and ZeRO, which change no bit.
    ///
    /// # Errors
    /// [`StrategyError::NotPlayed`] for a mesh with `cp` or `tp`; as [`MeshTrainer::new`].
    pub fn reference(
        world: &World,
        settings: &Settings,
        strategy: &Strategy,
        batches: Batches,
    ) -> Result<MeshTrainer> {
        let Strategy { sizes: Sizes { dp, cp, tp, ep, .. }, microbatches, .. } = *strategy;
        if cp > 1 || tp > 1 {
            return Err(StrategyError::NotPlayed { cp, tp }.into());
        }
        let of = |sizes, microbatches| Strategy { microbatches, ..Strategy::of(sizes) };
        of(Sizes { dp, ep, ..Sizes::ONE }, microbatches).check(settings, dp)?;
        let (own, passes) = (of(Sizes::ONE, microbatches), of(Sizes::ONE, microbatches.saturating_mul(dp)));
        let played = Played { parts: dp as usize, sharing: ep as usize };
        MeshTrainer::playing(world, settings, (&own, passes.plan()?), Some(played), batches)
    }

    fn playing(
        world: &World,
        settings: &Settings,
        (strategy, plan): (&Strategy, Plan),
        played: Option<Played>,
        batches: Batches,
    ) -> Result<MeshTrainer> {
        let groups = Groups::new(world, strategy)?;
        let tensors = tensors_of(strategy, &settings.shape, groups.place);
        let mut stage = Stage::new(groups, strategy, settings, &tensors, played)?;
        let pipeline = Pipeline::new(&stage.groups.pipeline, &plan, stage.message_elements())?;
        let first = first_values(settings, &tensors);
        let sizes =
            of_chunks(&tensors).map(|of| of.iter().map(|tensor| tensor.elements()).collect::<Vec<_>>());
        let rate = settings.rate as f32;
        let each = |((sizes, values), group): ((Vec<usize>, Vec<f32>), &mut Communicator)| {
            Optimizer::new(group, strategy.zero, &sizes, values, rate)
        };
        let optimizers = sizes.zip(first).zip(stage.groups.copies.as_mut()).map(each).all()?;
        let played = played.unwrap_or(Played { parts: 1, sharing: strategy.sizes.ep as usize });
        let (settings, strategy, history) = (*settings, *strategy, History::default());
        let mut trainer = MeshTrainer {
            settings,
            strategy,
            history,
            stage,
            optimizers,
            batches,
            traffic: Traffic::default(),
            tensors,
            pipeline,
            played,
        };
        trainer.load_parameters()?;
        Ok(trainer)
    }

    /// Whether this rank writes what all ranks have alike.
    pub fn writes(&self) -> bool {
        self.stage.groups.all.rank() == 0
    }

    /// The result of this rank, if all ranks have one, as [`Ranks::agree`](crate::trainer::Ranks).
    /// Collective.
    ///
    /// # Errors
    /// As there.
    pub fn agree<T>(&self, own: Result<T>) -> Result<T> {
        agree_by(own, |said| Ok(self.stage.groups.all.gather(said)?))
    }

    /// Steps that were made.
    pub fn steps(&self) -> usize {
        self.history.losses.len()
    }

    /// One step: its mean loss. Nothing is learned from one that is not finite. Collective.
    ///
    /// # Errors
    /// Those of the layers, the pipeline and the optimizers; [`Error::NotFinite`].
    pub fn step(&mut self) -> Result<f32> {
        let steps = self.steps();
        self.take_traffic();
        self.stage.begin(&self.windows(steps));
        self.pipeline.run(&mut self.stage)?;
        let loss = self.mean_loss()?;
        if !loss.is_finite() {
            return Err(Error::NotFinite { what: "the loss of the next step", loss, steps });
        }
        let gradients = self.gradients();
        let (optimizers, copies) = (self.optimizers.as_mut(), self.stage.groups.copies.as_mut());
        let each = |((optimizer, group), gradient): ((&mut Optimizer, &mut Communicator), Vec<f32>)| {
            optimizer.step(group, &gradient)
        };
        optimizers.zip(copies).zip(gradients).map(each).all()?;
        self.load_parameters()?;
        self.history.losses.push(loss);
        self.traffic = self.take_traffic();
        Ok(loss)
    }

    /// Bytes that each rank sent in the last step. Collective.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn traffic_of_ranks(&mut self) -> Result<Vec<Traffic>> {
        let own = serde_json::to_vec(&self.traffic).map_err(Error::malformed("the counts of a rank"))?;
        let all = self.stage.groups.all.gather(&own)?;
        let of_rank = |said: &Vec<u8>| serde_json::from_slice(said);
        let all: std::result::Result<_, _> = all.iter().map(of_rank).collect();
        all.map_err(Error::malformed("the counts of a rank"))
    }

    /// Mean times of a stage's passes over a microbatch, over all stages, in the last step: those
    /// forward, and of the gradients of inputs and of weights. Collective.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn pass_times(&self) -> Result<[Duration; 3]> {
        let chunks = self.strategy.model_chunks();
        let own = self.stage.times.map(|of| (of.total * chunks / of.passes.max(1)).as_nanos() as u64);
        let all = self.stage.groups.all.gather(&own.map(u64::to_le_bytes).concat())?;
        let mean = |nth| {
            let times = all.iter().filter_map(|said| said.as_chunks::<8>().0.get(nth).copied());
            let times: Vec<u64> = times.map(u64::from_le_bytes).collect();
            Duration::from_nanos(times.iter().sum::<u64>() / times.len().max(1) as u64)
        };
        Ok([mean(0), mean(1), mean(2)])
    }

    /// Counts since the last call.
    fn take_traffic(&mut self) -> Traffic {
        let moved = |group: &mut Communicator| {
            let counts = group.take_counts();
            Moved { intra_node_bytes: counts.intra_node_bytes, inter_node_bytes: counts.inter_node_bytes }
        };
        let Groups { tp, cp, copies, .. } = &mut self.stage.groups;
        let mut dp = Moved::default();
        copies.as_mut().map(|group| {
            let of = moved(group);
            dp.intra_node_bytes += of.intra_node_bytes;
            dp.inter_node_bytes += of.inter_node_bytes;
        });
        let (tp, cp) = (moved(tp), moved(cp));
        let (pp_bytes, ep_bytes) = (self.stage.stage_bytes, self.stage.take_expert_bytes());
        Traffic { tp, cp, dp, pp_bytes, ep_bytes, state_bytes: self.state_bytes() }
    }

    fn state_bytes(&self) -> u64 {
        let mut bytes = 0;
        self.optimizers.as_ref().map(|optimizer| {
            let usage = optimizer.memory_usage();
            bytes += usage.parameters_bytes + usage.gradients_bytes + usage.states_bytes;
        });
        bytes
    }

    /// Gradients of the last step of this rank's own tokens, before they are added over ranks.
    pub fn local_gradients(&self) -> Vec<TensorPart> {
        let gradients = self.gradients();
        self.with_places(gradients.as_ref().map(|of| &of[..]))
    }

    /// This rank's parameters. Collective with ZeRO-3.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn parameters(&mut self) -> Result<Vec<TensorPart>> {
        let values = self.gathered()?;
        Ok(self.with_places(values.as_ref().map(|of| &of[..])))
    }

    fn with_places(&self, values: Sections<&[f32]>) -> Vec<TensorPart> {
        let mut parts = Vec::new();
        of_chunks(&self.tensors).zip(values).map(|(tensors, mut left)| {
            for tensor in tensors {
                let (own, rest) = left.split_at(tensor.elements());
                let values = tensor.places().zip(own.iter().copied()).collect();
                parts.push(TensorPart { name: tensor.name.clone(), values });
                left = rest;
            }
        });
        parts
    }

    /// The windows of this rank's microbatches, one after another; of a reference, those of each
    /// part of a microbatch.
    fn windows(&self, step: usize) -> Windows {
        let ranks = self.strategy.sizes.dp as usize * self.played.parts;
        let microbatches = self.strategy.microbatches as usize;
        let mut all = Windows { tokens: Vec::new(), following: Vec::new() };
        let (first, parts) = (self.stage.groups.parts.0, 0..self.played.parts);
        for (microbatch, of) in (0..microbatches).flat_map(|nth| parts.clone().map(move |of| (nth, of))) {
            let own = part(self.settings.batch, first + of, ranks);
            let windows = part(own.len(), microbatch, microbatches);
            let range = own.start + windows.start..own.start + windows.end;
            let Windows { tokens, following } = self.batches.of_step(&self.settings, step, range);
            all.tokens.extend(tokens);
            all.following.extend(following);
        }
        all
    }

    /// The mean over all tokens of the step. The sum is in `f64`, where sums of losses above 1e-5
    /// are exact, so it does not depend on the mesh.
    fn mean_loss(&self) -> Result<f32> {
        let groups = &self.stage.groups;
        let own = self.stage.loss.to_le_bytes();
        let said = groups.all.gather(if groups.counts_losses() { &own } else { &[] })?;
        let losses = said.iter().filter_map(|said| said.first_chunk().copied().map(f64::from_le_bytes));
        Ok((losses.sum::<f64>() / self.settings.tokens() as f64) as f32)
    }

    /// Gradients of the step on this rank, scaled so that means over ranks are those of the loss.
    fn gradients(&self) -> Rows {
        let Played { parts, sharing } = self.played;
        let (tp, ep) = (self.strategy.sizes.tp as f32, sharing as f32);
        let scale = Sections { cut: (1.0, 1.0), whole: (tp, 1.0), experts: (tp, ep) };
        let copies = Sections { cut: parts, whole: parts, experts: parts.div_ceil(sharing) };
        let zeros = self.stage.gradients[0].as_ref().map(|of| vec![0.0f32; of.len()]);
        let parts = self.stage.gradients.iter();
        let sums = parts.fold(zeros, |sums, part| {
            sums.zip(part.as_ref().zip(scale.clone())).map(|(mut sums, (part, (factor, divisor)))| {
                sums.iter_mut().zip(part).for_each(|(sum, of)| *sum += of * factor / divisor);
                sums
            })
        });
        sums.zip(copies).map(|(mut sums, copies)| {
            sums.iter_mut().for_each(|sum| *sum /= copies as f32);
            sums
        })
    }

    fn gathered(&mut self) -> Result<Rows> {
        let copies = self.stage.groups.copies.as_mut();
        self.optimizers.as_ref().zip(copies).map(|(optimizer, group)| optimizer.parameters(group)).all()
    }

    /// Gives the layers the optimizers' parameters.
    pub(super) fn load_parameters(&mut self) -> Result<()> {
        let values = self.gathered()?;
        self.stage.load(values.as_ref().map(|of| &of[..]));
        Ok(())
    }

    /// The tensors of each kind.
    pub(super) fn tensors(&self) -> Sections<Vec<&Tensor>> {
        of_chunks(&self.tensors)
    }
}

/// Tensors of each kind, over all model chunks.
pub(super) fn of_chunks(chunks: &[Sections<Vec<Tensor>>]) -> Sections<Vec<&Tensor>> {
    chunks.iter().fold(Sections::default(), |all: Sections<Vec<&Tensor>>, chunk| {
        all.zip(chunk.as_ref()).map(|(mut all, of)| {
            all.extend(of);
            all
        })
    })
}

/// A rank's parts of the values that the plain model begins with.
fn first_values(settings: &Settings, tensors: &[Sections<Vec<Tensor>>]) -> Rows {
    let (dense, mut experts) = (Weights::dense(settings), HashMap::new());
    of_chunks(tensors).map(|tensors| {
        let mut values = Vec::new();
        for tensor in tensors {
            let expert = tensor.name.split('.').nth(2).and_then(|expert| expert.parse::<usize>().ok());
            let whole = match expert {
                Some(expert) => {
                    experts.entry(expert).or_insert_with(|| Weights::experts(settings, expert..expert + 1))
                }
                None => &dense,
            };
            let whole = &whole.values[whole.range(&tensor.name)];
            values.extend(tensor.places().map(|place| whole[place]));
        }
        values
    })
}
