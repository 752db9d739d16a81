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
//! **Reference.** One process [replays](super::replay) all ranks, to the bit.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use sidelane::collective::Communicator;
use sidelane::exec::TransferCounts;
use sidelane::{Group, World};
use sidelane_parallel::pipeline::{Compute, Pass, Pipeline, Span};
use sidelane_parallel::tensor::TiedWeights;

use super::groups::{Groups, LayerGroups, communicator};
use super::optimizer::Optimizer;
use super::replay::Replay;
use super::stage::Stage;
use super::strategy::{Sizes, Strategy};
use super::tensors::{Rows, Sections, Tensor, part, tensors_of};
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::trainer::{History, agree_by};
use crate::weights::Weights;

/// Passes by number, for the messages in which ranks gather their spans.
const PASSES: [Pass; 4] = [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight];

/// Bytes that a rank put into memory of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Of its node, itself included.
    pub intra_node_bytes: u64,
    /// Of other nodes.
    pub inter_node_bytes: u64,
}

impl From<TransferCounts> for Moved {
    fn from(counts: TransferCounts) -> Moved {
        Moved { intra_node_bytes: counts.intra_node_bytes, inter_node_bytes: counts.inter_node_bytes }
    }
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
    /// Messages between stages, gradients of tied weights, and a byte to each stage of a pipeline.
    pub pp: Moved,
    /// Rows of experts to other ranks, and back: four for each token and rank.
    pub ep_bytes: u64,
    /// Bytes that the rank holds between steps: the layers' weights and the sums of their
    /// gradients, and parameters, gradients and states of the optimizers.
    pub state_bytes: u64,
    /// The most that the rank held for later passes at a time, without the rows of experts.
    pub activation_bytes: u64,
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
    pub(super) groups: Groups,
    model: Model,
    tied: Option<Tied>,
    pub(super) optimizers: Sections<Optimizer>,
    pub(super) batches: Batches,
    /// Of the last step.
    traffic: Traffic,
    /// By model chunk.
    tensors: Vec<Sections<Vec<Tensor>>>,
}

/// The embedding of a first or last stage, whose weights the head has, too.
struct Tied {
    ends: Communicator,
    weights: TiedWeights,
    /// Where its values are among those that are cut over tp.
    range: Range<usize>,
}

impl Tied {
    /// With these values. Collective over both ends of a pipeline, which compare them.
    fn new(ends: &Group, tensors: &[&Tensor], values: &[f32]) -> Result<Tied> {
        let mut ends = communicator(ends)?;
        let before = tensors.iter().take_while(|tensor| tensor.name != "token");
        let first: usize = before.map(|tensor| tensor.elements()).sum();
        let own = tensors.iter().find(|tensor| tensor.name == "token");
        let range = first..first + own.map_or(0, |tensor| tensor.elements());
        let weights = TiedWeights::new(&mut ends, &values[range.clone()])?;
        Ok(Tied { ends, weights, range })
    }

    /// Adds what the embedding and the head have: the embedding's first, from +0. Collective as
    /// [`Tied::new`].
    fn sum(&mut self, stage: &mut Stage) -> Result<()> {
        let gradient = &mut stage.gradients.cut[self.range.clone()];
        gradient.iter_mut().zip(&stage.of_tied_head).for_each(|(sum, of)| *sum += of);
        Ok(self.weights.sum(&mut self.ends, gradient)?)
    }
}

/// Model whose passes a step makes: that of this rank, or of all.
enum Model {
    /// The layers of a rank, and the order of their passes.
    Stage(Box<Stage>, Box<Pipeline>),
    /// Those of all ranks.
    Replay(Box<Replay>),
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
        let of_rank = |groups: &Groups, layers: LayerGroups, tensors: &[Sections<Vec<Tensor>>]| {
            let stage = Stage::new(groups, layers, strategy, settings, tensors)?;
            let pipeline = Pipeline::new(&groups.pipeline, &strategy.plan()?, stage.message_elements())?;
            Ok(Model::Stage(Box::new(stage), Box::new(pipeline)))
        };
        MeshTrainer::of_model(world, settings, strategy, of_rank, batches)
    }

    /// One process that [replays](super::replay) the ranks of a mesh, in the order of their sums.
    /// It has no stages, schedule and ZeRO, which change no bit.
    ///
    /// # Errors
    /// As [`MeshTrainer::new`].
    pub fn reference(
        world: &World,
        settings: &Settings,
        strategy: &Strategy,
        batches: Batches,
    ) -> Result<MeshTrainer> {
        strategy.check(settings, strategy.sizes.ranks())?;
        let own = Strategy { microbatches: strategy.microbatches, ..Strategy::of(Sizes::ONE) };
        let of_ranks = |_: &Groups, layers: LayerGroups, tensors: &[Sections<Vec<Tensor>>]| {
            let replay = Replay::new(&layers.ep, strategy, settings, &of_chunks(tensors))?;
            Ok(Model::Replay(Box::new(replay)))
        };
        MeshTrainer::of_model(world, settings, &own, of_ranks, batches)
    }

    fn of_model(
        world: &World,
        settings: &Settings,
        strategy: &Strategy,
        model: impl FnOnce(&Groups, LayerGroups, &[Sections<Vec<Tensor>>]) -> Result<Model>,
        batches: Batches,
    ) -> Result<MeshTrainer> {
        let (mut groups, layers) = Groups::new(world, strategy)?;
        let tensors = tensors_of(strategy, &settings.shape, groups.place);
        let model = model(&groups, layers, &tensors)?;
        let first = first_values(settings, &tensors);
        let ends = groups.ends.as_ref().filter(|_| settings.shape.tied);
        let tied = ends.map(|ends| Tied::new(ends, &of_chunks(&tensors).cut, &first.cut)).transpose()?;
        let sizes =
            of_chunks(&tensors).map(|of| of.iter().map(|tensor| tensor.elements()).collect::<Vec<_>>());
        let rate = settings.rate as f32;
        let each = |((sizes, values), group): ((Vec<usize>, Vec<f32>), &mut Communicator)| {
            Optimizer::new(group, strategy.zero, &sizes, values, rate)
        };
        let optimizers = sizes.zip(first).zip(groups.copies.as_mut()).map(each).all()?;
        let (settings, strategy, history) = (*settings, *strategy, History::default());
        let traffic = Traffic::default();
        let mut trainer = MeshTrainer {
            settings,
            strategy,
            history,
            groups,
            model,
            tied,
            optimizers,
            batches,
            traffic,
            tensors,
        };
        trainer.load_parameters()?;
        Ok(trainer)
    }

    /// Whether this rank writes what all ranks have alike.
    pub fn writes(&self) -> bool {
        self.groups.all.rank() == 0
    }

    /// The result of this rank, if all ranks have one, as [`Ranks::agree`](crate::trainer::Ranks).
    /// Collective.
    ///
    /// # Errors
    /// As there.
    pub fn agree<T>(&self, own: Result<T>) -> Result<T> {
        agree_by(own, |said| Ok(self.groups.all.gather(said)?))
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
        // Other pipelines may have made their last call before layers here failed.
        let made = self.make_passes(steps);
        self.agree(made)?;
        let loss = self.mean_loss()?;
        if !loss.is_finite() {
            return Err(Error::NotFinite { what: "the loss of the next step", loss, steps });
        }
        let gradients = self.gradients();
        let (optimizers, copies) = (self.optimizers.as_mut(), self.groups.copies.as_mut());
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
        let all = self.groups.all.gather(&own)?;
        let of_rank = |said: &Vec<u8>| serde_json::from_slice(said);
        let all: std::result::Result<_, _> = all.iter().map(of_rank).collect();
        all.map_err(Error::malformed("the counts of a rank"))
    }

    /// Passes of each rank in the last step, as they were made, in nanoseconds. Ranks begin their
    /// clocks when they leave a gather: two lines are shifted by as much as one of them leaves it
    /// later. Collective.
    ///
    /// # Errors
    /// Those of the gather.
    pub fn spans_of_ranks(&self) -> Result<Vec<Vec<Span>>> {
        let spans = match &self.model {
            Model::Stage(stage, _) => &stage.spans[..],
            Model::Replay(_) => &[],
        };
        let number = |pass| PASSES.iter().position(|of| *of == pass).unwrap_or_default() as u64;
        let numbers = |span: &Span| {
            let Compute { pass, microbatch, model_chunk } = span.compute;
            [number(pass), microbatch.into(), model_chunk.into(), span.begin, span.end]
        };
        let own: Vec<u8> = spans.iter().flat_map(numbers).flat_map(u64::to_le_bytes).collect();
        let span = |numbers: &[u64; 5]| {
            let [pass, microbatch, model_chunk, begin, end] = *numbers;
            let pass = PASSES[pass as usize % PASSES.len()];
            let compute = Compute { pass, microbatch: microbatch as u32, model_chunk: model_chunk as u32 };
            Span { compute, begin, end }
        };
        let of_rank = |said: Vec<u8>| {
            let numbers = said.as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes);
            numbers.collect::<Vec<_>>().as_chunks().0.iter().map(span).collect()
        };
        Ok(self.groups.all.gather(&own)?.into_iter().map(of_rank).collect())
    }

    /// Counts since the last call.
    fn take_traffic(&mut self) -> Traffic {
        let (mut dp, mut pp) = (TransferCounts::default(), TransferCounts::default());
        self.groups.copies.as_mut().map(|group| dp += group.take_counts());
        if let Some(tied) = &mut self.tied {
            pp += tied.ends.take_counts();
        }
        let mut traffic = Traffic { dp: dp.into(), state_bytes: self.state_bytes(), ..Traffic::default() };
        if let Model::Stage(stage, pipeline) = &mut self.model {
            pp += pipeline.take_counts();
            let LayerGroups { tp, cp, .. } = &mut stage.groups;
            [traffic.tp, traffic.cp] = [tp, cp].map(|group| group.take_counts().into());
            traffic.activation_bytes = stage.activations.most();
            traffic.ep_bytes = stage.take_expert_bytes();
        }
        Traffic { pp: pp.into(), ..traffic }
    }

    fn state_bytes(&self) -> u64 {
        let mut bytes = match &self.model {
            Model::Stage(stage, _) => stage.weight_bytes(),
            Model::Replay(_) => 0,
        };
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

    /// All passes of a step.
    fn make_passes(&mut self, step: usize) -> Result<()> {
        let MeshTrainer { settings, batches, groups, model, tied, strategy, .. } = self;
        let microbatches = strategy.microbatches as usize;
        // Windows of a data parallel rank and a microbatch.
        let windows = |(rank, ranks), microbatch| {
            let own = part(settings.batch, rank, ranks);
            let windows = part(own.len(), microbatch, microbatches);
            batches.of_step(settings, step, own.start + windows.start..own.start + windows.end)
        };
        match model {
            Model::Stage(stage, pipeline) => {
                let rank = (groups.parts.0, strategy.sizes.dp as usize);
                stage.begin((0..microbatches).map(|microbatch| windows(rank, microbatch)));
                groups.all.gather(&[])?;
                stage.begin_clock();
                pipeline.run(&mut **stage)?;
                tied.as_mut().map_or(Ok(()), |tied| tied.sum(stage))
            }
            Model::Replay(replay) => {
                let ranks = replay.strategy.sizes.dp as usize;
                replay.step(|rank, microbatch| windows((rank, ranks), microbatch))
            }
        }
    }

    /// The mean over all tokens of the step. The sum is in `f64`, where sums of losses above 1e-5
    /// are exact, so it does not depend on the mesh.
    fn mean_loss(&self) -> Result<f32> {
        let groups = &self.groups;
        let own = match &self.model {
            Model::Stage(stage, _) => stage.loss,
            Model::Replay(replay) => replay.loss,
        };
        let own = own.to_le_bytes();
        let said = groups.all.gather(if groups.counts_losses() { &own } else { &[] })?;
        let losses = said.iter().filter_map(|said| said.first_chunk().copied().map(f64::from_le_bytes));
        Ok((losses.sum::<f64>() / self.settings.tokens() as f64) as f32)
    }

    /// Gradients of the step on this rank, scaled so that means over ranks are those of the loss.
    fn gradients(&self) -> Rows {
        let scales = |strategy: &Strategy| {
            let (tp, ep) = (strategy.sizes.tp as f32, strategy.sizes.ep as f32);
            Sections { cut: (1.0, 1.0), whole: (tp, 1.0), experts: (tp, ep) }
        };
        match &self.model {
            Model::Stage(stage, _) => {
                stage.gradients.as_ref().zip(scales(&self.strategy)).map(|(gradient, (factor, divisor))| {
                    gradient.iter().map(|of| of * factor / divisor).collect()
                })
            }
            Model::Replay(replay) => replay.gradients(scales(&replay.strategy)),
        }
    }

    fn gathered(&mut self) -> Result<Rows> {
        let copies = self.groups.copies.as_mut();
        self.optimizers.as_ref().zip(copies).map(|(optimizer, group)| optimizer.parameters(group)).all()
    }

    /// Gives the layers the optimizers' parameters.
    pub(super) fn load_parameters(&mut self) -> Result<()> {
        let values = self.gathered()?;
        let values = values.as_ref().map(|of| &of[..]);
        match &mut self.model {
            Model::Stage(stage, _) => stage.load(values),
            Model::Replay(replay) => replay.load(values),
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sidelane::Options;
    use sidelane::bootstrap::Timeouts;

    use super::super::strategy::{Context, ScheduleName};
    use super::*;
    use crate::settings::Shape;

    const TOKENS: usize = 6000;

    fn settings() -> Settings {
        let shape = Shape {
            vocabulary: 8,
            window: 8,
            layers: 2,
            width: 8,
            heads: 4,
            kv_heads: 4,
            experts: 4,
            top_k: 2,
            expert_width: 2,
            tied: false,
        };
        let (batch, steps, rate, warm_up, balance, seed) = (8, 3, 0.01, 1, 0.0, 7);
        Settings { shape, batch, steps, rate, warm_up, balance, seed, ranks: 1, expert_parallel: 1 }
    }

    /// A text, in which the tokens of a window of the first step may be outside the vocabulary.
    fn batches(settings: &Settings, wrong: Option<usize>) -> Batches {
        let place = |window| {
            let places: Vec<u32> = (0..TOKENS as u32).collect();
            Batches::new(&places, settings).unwrap().of_step(settings, 0, window..window + 1).tokens
        };
        let wrong = wrong.map(place).unwrap_or_default();
        let token = |nth: u32| if wrong.contains(&nth) { 8 } else { (nth * nth / 7 + nth) % 8 };
        Batches::new(&(0..TOKENS as u32).map(token).collect::<Vec<_>>(), settings).unwrap()
    }

    /// Gives one rank a router that has a weight that is no number.
    fn poison(trainer: &mut MeshTrainer) {
        let mut values = trainer.gathered().unwrap();
        *values.whole.last_mut().unwrap() = f32::NAN;
        let Model::Stage(stage, _) = &mut trainer.model else { panic!("a rank") };
        stage.load(values.as_ref().map(|of| &of[..]));
    }

    /// A rank fails alone in the first layer of a pass of each microbatch, in the last one, or amid
    /// a pass, while others wait for it in calls of other groups.
    #[test]
    fn all_ranks_hear_of_one_that_fails_alone_and_the_next_step_works() {
        let settings = settings();
        let of =
            |sizes: &str, microbatches| Strategy { microbatches, ..Strategy::of(sizes.parse().unwrap()) };
        for strategy in [
            of("tp=2", 2),
            Strategy { context: Some(Context::Ring), ..of("pp=2,cp=2,tp=2,ep=2", 4) },
            Strategy {
                order: Some(ScheduleName::ZeroBubbleH1),
                recompute: true,
                ..of("pp=2,dp=2,tp=2,ep=4", 4)
            },
            Strategy { order: Some(ScheduleName::GPipe), ..of("pp=2,cp=4,ep=4", 2) },
        ] {
            // A rank that waits in vain ends the world, and the test.
            let timeouts = Timeouts::default().with_deadline(Duration::from_secs(60));
            let nodes = vec![0; strategy.sizes.ranks() as usize];
            let worlds = World::threads_with(&nodes, &Options::default().with_timeouts(timeouts)).unwrap();
            let run = |world: World| {
                let mut trainer =
                    MeshTrainer::new(&world, &settings, &strategy, batches(&settings, None)).unwrap();
                for failing in (0..world.size()).step_by(3) {
                    // Of the windows of its data parallel rank, one of the last microbatch.
                    let own = settings.batch / strategy.sizes.dp as usize;
                    let dp = trainer.groups.parts.0;
                    for window in [None, Some(dp * own), Some((dp + 1) * own - 1)] {
                        let is_failing = world.rank() == failing;
                        match window {
                            Some(_) if is_failing => trainer.batches = batches(&settings, window),
                            None if is_failing => poison(&mut trainer),
                            _ => {}
                        }
                        let error = trainer.step().unwrap_err();
                        let elsewhere = matches!(error, Error::Elsewhere { .. });
                        assert!(!(elsewhere && is_failing), "{failing}, {window:?}: {error}");
                        trainer.batches = batches(&settings, None);
                        trainer.load_parameters().unwrap();
                    }
                }
                (trainer.steps(), trainer.step().unwrap())
            };
            let seen: Vec<_> = std::thread::scope(|scope| {
                let ranks = worlds.into_iter().map(|world| scope.spawn(|| run(world)));
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let alone = World::threads(1).unwrap().remove(0);
            let mut replay =
                MeshTrainer::reference(&alone, &settings, &strategy, batches(&settings, None)).unwrap();
            let right = (0, replay.step().unwrap());
            assert_eq!(seen, vec![right; nodes.len()], "{}", strategy.sizes);
        }
    }
}
