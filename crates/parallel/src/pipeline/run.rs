//! Carries out a plan: each rank of a group is a stage, and messages are those of communicators.
//!
//! ```text
//!   plan                     calls of stage 1 of 3 (1F1B)
//!   {send F0, receive B0}    send F0 to 2, receive B0 from 2
//!   B0                       layers.backward(..)
//!   {send B0, receive F2}    send B0 to 0, receive F2 from 0
//! ```
//!
//! Calls block one after another, so messages leave their groups ([`Plan::one_by_one`]). Two stages
//! that have messages for each other share a communicator, so its window does not grow with the
//! number of stages. It holds two messages unread in each direction, if a message is one slot. If
//! the plan needs more, several communicators take messages in turn. If it needs none, slots may be
//! smaller than a message. Where activations and gradients go in one direction, as between two
//! stages with several model chunks, each kind has communicators of its own ([`Turns`]).
//!
//! A stage whose layers fail makes the rest of its calls with empty messages, and its layers refuse
//! the passes that are left ([`Stage::refuse`]). So all stages come to the end of the step, hear
//! there which stage has failed, and can make another step.

use std::collections::{BTreeSet, HashMap};
use std::marker::PhantomData;

use sidelane::Group;
use sidelane::collective::Communicator;
use sidelane::digest::Digest;
use sidelane::error::{CallError, CallKind, Error, PlanError};
use sidelane::exec::TransferCounts;

use super::plan::{Compute, Direction, Pass, Plan, Step, Tensor, Transfer};
use super::turns::{Turns, sends};
use crate::check::alike;
use crate::error::PipelineError;
use crate::float::Float;

/// Bytes of the smallest slot that a communicator has.
const LEAST_SLOT: u64 = 128;

/// Ranks of a communicator.
const PAIR: u64 = 2;

/// Bytes of a communicator chunk where slots may be smaller than a message.
const MOST_OF_A_CHUNK: u64 = 256 << 10;

/// The layers of a stage, one piece of the model for each model chunk.
///
/// A microbatch comes forward before it comes backward. Which microbatches come between is the
/// schedule's choice, so what a backward pass needs is kept by microbatch and model chunk. If the
/// plan recomputes ([`Plan::recomputes`]), a stage keeps inputs alone and repeats its forward pass.
///
/// `E` is the element type of the activations and gradients between stages: `f32`, or
/// `half::bf16` for half the bytes. Layers round what they give.
///
/// **Failures.** A pass may communicate with ranks of other pipelines: those that cut its matrices,
/// windows or experts. They wait for a rank that fails alone, and no message tells them. So a pass
/// that fails makes, of each group, the first call that is left of the pass, by
/// [`Communicator::refuse`] or [`MoeLayer::refuse`](sidelane::layer::MoeLayer::refuse), in the
/// order in which ranks make them. A group whose call was the one that failed has heard already.
/// [`Stage::refuse`] does the same for passes that are not made at all.
pub trait Stage<E: Float = f32> {
    /// Error of the layers.
    type Error: From<PipelineError>;

    /// Outputs of a model chunk. The first virtual stage of the model has no inputs. The last one
    /// keeps its loss, and needs no outputs.
    ///
    /// # Errors
    /// Those of the layers.
    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, Self::Error>;

    /// Gradients of the inputs of a model chunk, by [`Pass::Backward`] or [`Pass::BackwardInput`];
    /// nothing by [`Pass::BackwardWeight`], and on the first virtual stage. The last virtual stage
    /// has the gradient of its loss from its forward pass, and gets none here.
    ///
    /// # Errors
    /// Those of the layers.
    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, Self::Error>;

    /// Both passes of a [`Step::Overlap`]: what [`forward`](Stage::forward) returns, and what
    /// [`backward`](Stage::backward) returns. They are of different microbatches, and in DualPipe
    /// of different model chunks. Layers with transfers of their own make both in one graph, so
    /// that one computes while rows of the other move
    /// ([`MoeLayer::combined_with`](sidelane::layer::MoeLayer::combined_with)). Others need not
    /// have this: it makes the forward pass, and then the backward pass.
    ///
    /// # Errors
    /// Those of the layers.
    fn forward_and_backward(
        &mut self,
        forward: ForwardCall<'_, E>,
        backward: BackwardCall<'_, E>,
    ) -> Result<[Option<Vec<E>>; 2], Self::Error> {
        let ForwardCall { microbatch, model_chunk, inputs } = forward;
        let outputs = self.forward(microbatch, model_chunk, inputs);
        let BackwardCall { pass, microbatch, model_chunk, gradient } = backward;
        let outputs = outputs.inspect_err(|_| {
            self.refuse(&Step::Compute(Compute { pass, microbatch, model_chunk }));
        })?;
        Ok([outputs, self.backward(pass, microbatch, model_chunk, gradient)?])
    }

    /// Comes in place of the passes of each step that this stage does not make, because it or a
    /// stage before it has failed: a [`Step::Compute`], or the two of a [`Step::Overlap`]. Refuses
    /// the first call of each pass to each group of ranks that have the same stage of other
    /// pipelines. Of two passes that the stage makes as one graph of one `MoeLayer`, peers have one
    /// first call: that is `CombineBackward`, on the layer of the tape. Layers that communicate
    /// with none need not have it.
    fn refuse(&mut self, step: &Step) {
        let _ = step;
    }
}

/// A forward pass as [`Stage::forward`] gets it.
#[derive(Clone, Copy, Debug)]
pub struct ForwardCall<'a, E = f32> {
    /// The microbatch.
    pub microbatch: u32,
    /// The model chunk.
    pub model_chunk: u32,
    /// Inputs of the model chunk.
    pub inputs: Option<&'a [E]>,
}

/// A backward pass as [`Stage::backward`] gets it.
#[derive(Clone, Copy, Debug)]
pub struct BackwardCall<'a, E = f32> {
    /// Its kind.
    pub pass: Pass,
    /// The microbatch.
    pub microbatch: u32,
    /// The model chunk.
    pub model_chunk: u32,
    /// Gradient of the outputs of the model chunk.
    pub gradient: Option<&'a [E]>,
}

/// A pipeline over the ranks of a group: rank `s` is stage `s`.
///
/// ```
/// use sidelane::World;
/// use sidelane_parallel::PipelineError;
/// use sidelane_parallel::pipeline::{Pass, Pipeline, Schedule, Stage};
///
/// /// Multiplies by a weight; the loss is the sum of the last outputs.
/// struct Scale {
///     weight: f32,
///     inputs: Vec<Vec<f32>>,
///     gradient: f32,
/// }
///
/// impl Stage for Scale {
///     type Error = PipelineError;
///
///     fn forward(&mut self, microbatch: u32, _: u32, inputs: Option<&[f32]>) -> Result<Option<Vec<f32>>, PipelineError> {
///         let inputs = inputs.map_or(vec![microbatch as f32, 1.0], <[f32]>::to_vec);
///         let outputs = inputs.iter().map(|input| input * self.weight).collect();
///         self.inputs.push(inputs);
///         Ok(Some(outputs))
///     }
///
///     fn backward(
///         &mut self,
///         _: Pass,
///         microbatch: u32,
///         _: u32,
///         gradient: Option<&[f32]>,
///     ) -> Result<Option<Vec<f32>>, PipelineError> {
///         let gradient = gradient.unwrap_or(&[1.0, 1.0]);
///         let inputs = &self.inputs[microbatch as usize];
///         self.gradient += inputs.iter().zip(gradient).map(|(input, of)| input * of).sum::<f32>();
///         Ok(Some(gradient.iter().map(|of| of * self.weight).collect()))
///     }
/// }
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> Result<f32, PipelineError> {
///         let plan = Schedule::OneFOneB.plan(2, 4)?;
///         let mut pipeline = Pipeline::new(&world.all()?, &plan, 2)?;        // 2 values between stages
///         let mut layers = Scale { weight: 3.0 - world.rank() as f32, inputs: Vec::new(), gradient: 0.0 };
///         pipeline.run(&mut layers)?;
///         Ok(layers.gradient)
///     })
/// });
/// let gradients: Vec<f32> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
/// assert_eq!(gradients, [20.0, 30.0]);
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct Pipeline<E = f32> {
    /// With each message as a step of its own.
    plan: Plan,
    /// Elements of a message.
    elements: usize,
    /// Of all stages.
    verdicts: Communicator,
    channels: Channels,
    /// Before the first message.
    turns: Turns,
    stage: u32,
    rows: PhantomData<E>,
}

/// Communicators of a stage with each peer, by their [`Turns`].
type Channels = HashMap<u32, Vec<Communicator>>;

impl<E: Float> Pipeline<E> {
    /// A pipeline that carries out a plan with messages of so many elements: the outputs of a
    /// microbatch between two stages. Collective over the group, whose ranks compare plan,
    /// elements and their type.
    ///
    /// With `u` as the [`least_unread`](Plan::least_unread) of [`one_by_one`](Plan::one_by_one),
    /// windows take about 20 messages for each neighbor and each two of `u`. If `u` is 0, as for
    /// GPipe and 1F1B, they take no more than 2.5 MiB for each neighbor.
    ///
    /// # Errors
    /// [`PipelineError`] if the plan does not prove, or has not a stage for each rank;
    /// [`PipelineError::Sidelane`] with
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks differ, and if there
    /// is no room for the windows; [`PipelineError::Elsewhere`] if another rank has none.
    pub fn new(group: &Group, plan: &Plan, elements: usize) -> Result<Pipeline<E>, PipelineError> {
        let (own, stage) = (Settings::of::<E>(plan, group.size(), elements), group.rank());
        let mut verdicts = verdicts(group)?;
        let own = own.inspect_err(|_| {
            verdicts.refuse(CallKind::AllGather, PlanError::RefusedHere.into());
        })?;
        let digest = Digest::of(format!("{plan:?}").bytes());
        let message = ("elements of a message", elements as u64);
        let element = ("bytes of an element", size_of::<E>() as u64);
        alike(&mut verdicts, &[("plan of the pipeline", digest), message, element])?;
        let (mut channels, mut failed) = (Channels::new(), None);
        // In one order on all stages, so that none waits for a stage that waits for another. A
        // stage that fails with one peer goes on to the next, which waits for it.
        for &(first, second) in own.pairs.iter().filter(|of| of.0 == stage || of.1 == stage) {
            let peer = if first == stage { second } else { first };
            match own.channels(group, &[first, second]) {
                Ok(of_peer) => drop(channels.insert(peer, of_peer)),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match (first_of(&mut verdicts, failed.is_some())?, failed) {
            (_, Some(error)) => return Err(error.into()),
            (Some(stage), None) => return Err(PipelineError::Elsewhere { stage }),
            (None, None) => {}
        }
        let Settings { plan, turns, .. } = own;
        Ok(Pipeline { plan, elements, verdicts, channels, turns, stage, rows: PhantomData })
    }

    /// Makes one step: all passes and messages of this rank's stage. Collective.
    ///
    /// # Errors
    /// The first error of the layers of this stage. [`PipelineError::Length`] if they gave the next
    /// pass another number of elements than a message has. [`PipelineError::Elsewhere`] if another
    /// stage has failed: every stage hears of it, and the next step works. Stages of other
    /// pipelines hear in their own calls ([`Stage::refuse`]), or not at all if they have made the
    /// last one: compare results with them before you use any. [`PipelineError::Sidelane`] if the
    /// world fails.
    pub fn run<S: Stage<E>>(&mut self, layers: &mut S) -> Result<(), S::Error> {
        self.run_steps(layers, 1, |_, _| Ok(()))
    }

    /// As [`run`](Pipeline::run), for a plan of so many steps. A stage ends each of them by `end`,
    /// which hears whether the stage has stopped. The messages that it made in the step have gone,
    /// and it asks for none of the next one. So `end` may wait for the same end of other stages.
    pub(super) fn run_steps<S: Stage<E>>(
        &mut self,
        layers: &mut S,
        steps: u32,
        end: impl FnMut(&mut S, bool) -> Result<(), S::Error>,
    ) -> Result<(), S::Error> {
        let Pipeline { plan, elements, verdicts, channels, turns, stage, .. } = self;
        let (kept, spare) = (HashMap::new(), Vec::new());
        let passes = plan.passes(*stage).count() / steps as usize;
        let own = StageRun {
            plan,
            passes,
            left: passes,
            end,
            elements: *elements,
            verdicts,
            channels,
            stage: *stage,
            layers,
            kept,
            spare,
            turns: turns.clone(),
            stopped: false,
            failed: None,
        };
        own.run()
    }

    /// Counts of what this stage has sent since the last call of this function: messages, and a
    /// byte to each other stage at the end of a step.
    pub fn take_counts(&mut self) -> TransferCounts {
        let mut counts = self.verdicts.take_counts();
        let channels = self.channels.values_mut().flatten();
        channels.for_each(|channel| counts += channel.take_counts());
        counts
    }
}

/// Number and sizes of the communicators that a plan needs.
struct Settings {
    plan: Plan,
    /// Stages that have messages for each other.
    pairs: BTreeSet<(u32, u32)>,
    /// Before the first message.
    turns: Turns,
    /// Bytes of a communicator chunk.
    chunk: u64,
}

impl Settings {
    fn of<E: Float>(plan: &Plan, ranks: u32, elements: usize) -> Result<Settings, PipelineError> {
        let stages = plan.shape().stages;
        if stages != ranks {
            return Err(PipelineError::Ranks { ranks, stages });
        }
        if elements == 0 {
            let (parameter, expected) = ("elements of a message", "at least 1");
            return Err(Error::from(PlanError::BadParameter { parameter, seen: 0, expected }).into());
        }
        let plan = plan.one_by_one();
        let unread = plan.least_unread()?;
        let pairs = sends(&plan).into_iter().map(|(from, to, _)| (from.min(to), from.max(to))).collect();
        let bytes = (elements as u64).saturating_mul(size_of::<E>() as u64);
        let slot = bytes.checked_next_multiple_of(LEAST_SLOT).unwrap_or(bytes);
        let whole = slot.saturating_mul(PAIR);
        let chunk = if unread == 0 { whole.min(MOST_OF_A_CHUNK) } else { whole };
        Ok(Settings { turns: Turns::new(&plan, unread), plan, pairs, chunk })
    }

    /// Communicators of two stages. Collective among them.
    fn channels(&self, group: &Group, pair: &[u32; 2]) -> Result<Vec<Communicator>, Error> {
        let pair = group.subgroup(pair)?;
        let communicator = |_| Communicator::builder(&pair).chunk(self.chunk).build();
        (0..self.turns.communicators()).map(communicator).collect()
    }
}

/// A stage amid a step.
struct StageRun<'p, E: Float, S: Stage<E>, F> {
    plan: &'p Plan,
    /// Passes of this stage in a step of the plan, and those that are left.
    passes: usize,
    left: usize,
    /// Ends a step.
    end: F,
    elements: usize,
    verdicts: &'p mut Communicator,
    channels: &'p mut Channels,
    stage: u32,
    layers: &'p mut S,
    /// Results that no message has taken yet, and tensors that have come for a pass: by side,
    /// tensor, microbatch, and the model chunk that needs it.
    kept: HashMap<(Direction, Tensor, u32, u32), Vec<E>>,
    /// Vectors of messages that were sent, for those that come.
    spare: Vec<Vec<E>>,
    /// Of its messages so far.
    turns: Turns,
    /// Whether this stage or one before it has failed.
    stopped: bool,
    failed: Option<S::Error>,
}

impl<E: Float, S: Stage<E>, F: FnMut(&mut S, bool) -> Result<(), S::Error>> StageRun<'_, E, S, F> {
    fn run(mut self) -> Result<(), S::Error> {
        let verdict = self.steps().and_then(|()| self.first_failed());
        match (self.failed, verdict) {
            (Some(error), _) => Err(error),
            (None, Ok(None)) => Ok(()),
            (None, Ok(Some(stage))) => Err(PipelineError::Elsewhere { stage }.into()),
            (None, Err(error)) => Err(PipelineError::Sidelane(error).into()),
        }
    }

    fn steps(&mut self) -> Result<(), Error> {
        let plan = self.plan;
        for step in &plan.stages()[self.stage as usize] {
            if self.left == 0 && !only_sends(step) {
                self.end_step();
            }
            if !self.stopped {
                let made = self.compute(step);
                self.stop_at(made);
            } else if step.passes().next().is_some() {
                self.layers.refuse(step);
            }
            self.left -= step.passes().count();
            let Step::Transfer(group) = step else { continue };
            group.iter().try_for_each(|message| self.message(message))?;
        }
        self.end_step();
        Ok(())
    }

    /// Behind the last pass of a step and its messages.
    fn end_step(&mut self) {
        self.left = self.passes;
        let ended = (self.end)(self.layers, self.stopped);
        self.stop_at(ended);
    }

    fn stop_at(&mut self, made: Result<(), S::Error>) {
        if let Err(error) = made {
            self.stopped = true;
            self.failed.get_or_insert(error);
        }
    }

    /// The passes of a step, with the tensors that have come for them.
    fn compute(&mut self, step: &Step) -> Result<(), S::Error> {
        match *step {
            Step::Compute(compute) => {
                let came = self.came(compute);
                let Compute { pass, microbatch, model_chunk } = compute;
                let made = match pass {
                    Pass::Forward => self.layers.forward(microbatch, model_chunk, came.as_deref())?,
                    _ => self.layers.backward(pass, microbatch, model_chunk, came.as_deref())?,
                };
                self.keep(compute, made)
            }
            Step::Overlap { forward, backward } => {
                let (inputs, gradient) = (self.came(forward), self.came(backward));
                let Compute { microbatch, model_chunk, .. } = forward;
                let ahead = ForwardCall { microbatch, model_chunk, inputs: inputs.as_deref() };
                let Compute { pass, microbatch, model_chunk } = backward;
                let back = BackwardCall { pass, microbatch, model_chunk, gradient: gradient.as_deref() };
                let [outputs, made] = self.layers.forward_and_backward(ahead, back)?;
                self.keep(forward, outputs)?;
                self.keep(backward, made)
            }
            Step::Transfer(_) => Ok(()),
        }
    }

    /// The tensor that has come for a pass.
    fn came(&mut self, Compute { pass, microbatch, model_chunk }: Compute) -> Option<Vec<E>> {
        let tensor = match pass {
            Pass::Forward => Tensor::Activation,
            Pass::Backward | Pass::BackwardInput => Tensor::Gradient,
            Pass::BackwardWeight => return None,
        };
        self.kept.remove(&(Direction::Receive, tensor, microbatch, model_chunk))
    }

    /// Keeps what a pass made, for the pass that needs it.
    fn keep(&mut self, compute: Compute, made: Option<Vec<E>>) -> Result<(), S::Error> {
        let (shape, Compute { pass, microbatch, model_chunk }) = (self.plan.shape(), compute);
        let (tensor, next) = match pass {
            Pass::Forward => (Tensor::Activation, shape.after(self.stage, model_chunk)),
            Pass::Backward | Pass::BackwardInput => (Tensor::Gradient, shape.before(self.stage, model_chunk)),
            Pass::BackwardWeight => return Ok(()),
        };
        let Some((stage, chunk)) = next else { return Ok(()) };
        let made = made.unwrap_or_default();
        let (seen, expected) = (made.len(), self.elements);
        if seen != expected {
            return Err(PipelineError::Length { stage: self.stage, compute, seen, expected }.into());
        }
        let side = if stage == self.stage { Direction::Receive } else { Direction::Send };
        self.kept.insert((side, tensor, microbatch, chunk), made);
        Ok(())
    }

    /// Sends or receives a message. One without elements says that its sender has stopped.
    fn message(&mut self, message: &Transfer) -> Result<(), Error> {
        let Transfer { direction, tensor, peer, microbatch, model_chunk } = *message;
        let channels = self.channels.get_mut(&peer).expect("each peer of a proved plan has channels");
        let channel = &mut channels[self.turns.take(message) as usize];
        // The peer in a communicator of both.
        let there = u32::from(peer > self.stage);
        let key = (direction, tensor, microbatch, model_chunk);
        match direction {
            Direction::Send => {
                let data = self.kept.remove(&key).filter(|_| !self.stopped).unwrap_or_default();
                heard(channel.send(there, &data))?;
                self.spare.extend((!data.is_empty()).then_some(data));
                Ok(())
            }
            Direction::Receive => {
                let mut data = self.spare.pop().unwrap_or_else(|| vec![E::zeroed(); self.elements]);
                match channel.receive(there, &mut data) {
                    Ok(()) => drop(self.kept.insert(key, data)),
                    Err(Error::Call(CallError::Disagree { theirs: 0, .. })) => self.stopped = true,
                    Err(error) => return Err(error),
                }
                Ok(())
            }
        }
    }

    /// The first stage that has failed. Takes all answers to empty messages, so that the next step
    /// does not find them.
    fn first_failed(&mut self) -> Result<Option<u32>, Error> {
        if self.stopped {
            for (&peer, channels) in self.channels.iter_mut() {
                let there = u32::from(peer > self.stage);
                channels.iter_mut().try_for_each(|channel| heard(channel.flush(there)))?;
            }
        }
        first_of(self.verdicts, self.failed.is_some())
    }
}

/// Whether a step sends messages, and receives none.
fn only_sends(step: &Step) -> bool {
    matches!(step, Step::Transfer(group) if group.iter().all(|of| of.direction == Direction::Send))
}

/// A communicator for a few bytes of each rank.
pub(super) fn verdicts(group: &Group) -> Result<Communicator, Error> {
    Communicator::builder(group).chunk(LEAST_SLOT * u64::from(group.size())).build()
}

/// The first stage of all that has failed. Collective.
fn first_of(verdicts: &mut Communicator, failed: bool) -> Result<Option<u32>, Error> {
    let mut all = vec![0; verdicts.size() as usize];
    verdicts.all_gather(&[u8::from(failed)], &mut all)?;
    Ok((0..).zip(all).find_map(|(stage, failed)| (failed != 0).then_some(stage)))
}

/// Without the news that a peer has refused an empty message.
fn heard(sent: Result<(), Error>) -> Result<(), Error> {
    match sent {
        Err(Error::Call(CallError::MessageRefused { .. })) => Ok(()),
        sent => sent,
    }
}
