//! Data parallelism with whole parameters on each rank: plain, ZeRO-1 and ZeRO-2.
//!
//! ```text
//!   compute 0     gradients 5  4  3  2  1  0               the caller's backward pass
//!   transfer 0            [5 4]    [3]   [2 1 0]           a bucket, when its last gradient has come
//! ```

use std::io::{Read, Write};
use std::sync::{Arc, mpsc};

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::CallKind;
use sidelane::overlap::{Graph, HostExecutor, NodeLabel, StreamId};

use super::adam::{Adam, States};
use super::buckets::{Cut, Layout};
use super::checkpoint::{Run, Shard, Wanted, load};
use super::error::DataError;
use super::memory::{Buffer, Counted, Gauge, MemoryUsage, bytes};
use super::pass::{add, keep, mean, reason};
use super::wire_dtype::{Wire, WireDtype};
use crate::calls::Calls;
use crate::check::{Member, agree, digest, digest_of};

/// State that is cut over the ranks of a group, where each rank has all parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Nothing: each rank has all gradients and optimizer states. Plain data parallelism.
    #[default]
    None,
    /// Optimizer states: ZeRO-1.
    OptimizerStates,
    /// Optimizer states and gradients: ZeRO-2.
    Gradients,
}

/// A model of which each rank trains a copy on its part of the batch.
#[derive(Debug)]
pub struct DataParallel {
    layout: Layout,
    sharding: Sharding,
    adam: Adam,
    member: Member,
    /// Elements that this rank updates: its part of each bucket, or the whole bucket.
    owned: Cut,
    wire: Wire,
    parameters: Vec<f32>,
    /// Parameters that this rank updates, if those that all ranks have are rounded.
    masters: Vec<f32>,
    /// By bucket: sums over microbatches, of this rank. Empty before the first and after the last.
    sums: Vec<Vec<f32>>,
    /// By bucket: means, of what this rank has. Empty without a complete backward pass.
    gradients: Vec<Vec<f32>>,
    /// Microbatches of the sums, or of the means.
    microbatches: u64,
    states: States,
    gauge: Arc<Gauge>,
}

impl DataParallel {
    /// A copy with these parameters, in the order of the layout and the same on all ranks.
    /// Collective: ranks compare all that they give.
    ///
    /// # Errors
    /// [`DataError::WrongLength`] and [`DataError::BadSetting`], with
    /// [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the other ranks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    pub fn new(
        group: &mut Communicator,
        layout: Layout,
        sharding: Sharding,
        parameters: Vec<f32>,
        adam: Adam,
    ) -> Result<Self, DataError> {
        let settings = layout.check(&parameters).and_then(|()| adam.check()).map(|()| {
            vec![
                ("sharding", sharding as u64),
                ("number of parameters", layout.parameters() as u64),
                ("digest of sizes and buckets", digest(layout.numbers())),
                ("digest of Adam's settings", digest(adam.numbers())),
                ("digest of the parameters", digest_of(&parameters)),
            ]
        });
        agree(group, settings)?;
        let member = Member::of(group);
        let owned = match sharding {
            Sharding::None => Cut::new(&layout, (0, 1)),
            Sharding::OptimizerStates | Sharding::Gradients => Cut::new(&layout, member.part()),
        };
        let states = States::new(owned.shard_len());
        Ok(DataParallel {
            layout,
            sharding,
            adam,
            member,
            owned,
            wire: Wire::default(),
            parameters,
            masters: Vec::new(),
            sums: Vec::new(),
            gradients: Vec::new(),
            microbatches: 0,
            states,
            gauge: Arc::default(),
        })
    }

    /// The same model with other types of what travels. Call it once, before the first step, on all
    /// ranks: calls of ranks that differ are errors on all of them.
    pub fn with_wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        let parameters = std::mem::take(&mut self.parameters);
        self.set_parameters(parameters);
        self
    }

    /// Takes parameters, and keeps this rank's own of them where all ranks see rounded ones.
    fn set_parameters(&mut self, parameters: Vec<f32>) {
        let gathers = self.sharding != Sharding::None;
        if gathers && self.wire.parameters == WireDtype::Bf16 {
            self.masters = self.owned.shard(&self.layout, &parameters);
            self.parameters = self.wire.parameters.moved(parameters);
        } else {
            (self.masters, self.parameters) = (Vec::new(), parameters);
        }
    }

    /// This rank's own parameters of a bucket, of those that it updates.
    fn own_parameters(&self, bucket: usize) -> &[f32] {
        let place = self.owned.place(&self.layout, bucket);
        if self.masters.is_empty() {
            return &self.parameters[place];
        }
        &self.masters[self.owned.part(bucket).start..][..place.len()]
    }

    /// The parameters, in the order of the layout, as a pass computes with them.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Bytes that this rank holds.
    pub fn memory_usage(&self) -> MemoryUsage {
        MemoryUsage {
            parameters_bytes: bytes(&self.parameters) + bytes(&self.masters),
            gradients_bytes: self.sums.iter().chain(&self.gradients).map(|of| bytes(of)).sum(),
            states_bytes: bytes(&self.states.first) + bytes(&self.states.second),
            buffers_peak_bytes: self.gauge.peak(),
        }
    }

    /// Runs the backward pass of a microbatch that is not the last of its step, and adds its
    /// gradients to the sums of those before it: Megatron's `no_sync`. `body` is as that of
    /// [`backward`](Self::backward), which takes the last microbatch. Nothing moves, and this rank
    /// holds gradients of all parameters until then.
    ///
    /// # Errors
    /// Errors of `body`, and [`DataError::GradientMissing`] after it. The microbatches so far are
    /// forgotten, and the next one is the first.
    pub fn accumulate(
        &mut self,
        body: impl FnOnce(&mut Backward<'_>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (before, sums) = self.begin();
        let (ready, arrivals) = mpsc::channel();
        let mut backward = Backward::new(self, sums, ready);
        body(&mut backward).and_then(|()| backward.is_complete())?;
        drop(backward);
        let mut sums: Vec<_> = arrivals.into_iter().map(Buffer::keep).collect();
        sums.reverse();
        (self.sums, self.microbatches) = (sums, before + 1);
        Ok(())
    }

    /// Forgets means, and takes the number of microbatches whose sums there are, and the sums.
    fn begin(&mut self) -> (u64, Vec<Vec<f32>>) {
        self.gradients.clear();
        let sums = std::mem::take(&mut self.sums);
        let microbatches = std::mem::take(&mut self.microbatches);
        (if sums.is_empty() { 0 } else { microbatches }, sums)
    }

    /// Runs a backward pass and makes the means of its gradients. `body` gives the gradient of each
    /// parameter once, from the last parameter on, or in another order with less overlap. A bucket
    /// is reduced when its last gradient has come and all buckets behind it are in flight, next to
    /// the rest of `body` if the executor overlaps. Collective.
    ///
    /// A mean is the sum by ascending rank from +0, divided by the number of ranks. With
    /// [`AllReduceAlgorithm::Ring`](sidelane::collective::AllReduceAlgorithm), only ZeRO-2 keeps
    /// this order. If [`accumulate`](Self::accumulate) took microbatches before this one, each rank
    /// first adds its own by ascending microbatch, and the division is by ranks x microbatches.
    ///
    /// All of `body` is one node of the executor, and all reductions are another, so a limit of the
    /// executor is one for the whole pass.
    ///
    /// # Errors
    /// Errors of `body`, [`DataError::GradientMissing`] after it,
    /// [`BadParameter`](sidelane::error::PlanError::BadParameter) for another group than before:
    /// the other ranks get [`PeerRefused`](sidelane::error::CallError::PeerRefused) if a bucket is
    /// left, no parameter changes, and the next backward pass begins anew. If no bucket is left,
    /// the means are complete on all ranks, and a step may follow. As [`Communicator::all_reduce`]
    /// and [`Communicator::reduce_scatter`].
    pub fn backward(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        body: impl FnOnce(&mut Backward<'_>) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let (before, sums) = self.begin();
        let microbatches = before + 1;
        let (call, buckets) = (self.reduction(), self.layout.len());
        let member = self.member.check(group);
        let mut pass = Calls::new(group, vec![call; buckets]);
        member.map_err(|error| pass.refuse(Error::from(error)))?;

        let (ready, arrivals) = mpsc::channel();
        let mut backward = Backward::new(self, sums, ready);
        let (mut said, mut means) = (None, Vec::with_capacity(buckets));
        let mut graph = Graph::new();
        graph.add(StreamId::Compute(0), NodeLabel::new("backward", 0), &[], |_| {
            keep(&mut said, body(&mut backward).and_then(|()| backward.is_complete()))?;
            // The other node ends when no bucket can come any more.
            drop(backward);
            Ok(())
        });
        graph.add(StreamId::Transfer(0), NodeLabel::new("reduce", 0), &[], |_| {
            for bucket in arrivals {
                pass.call(|group| {
                    let mut sums = self.reduce(group, bucket)?;
                    mean(&mut sums, u64::from(self.member.ranks) * microbatches);
                    means.push(sums);
                    Ok(())
                })?;
            }
            Ok(())
        });
        let run = graph.run(executor).map_err(|run| reason(said, run));
        if means.len() == buckets {
            means.reverse();
            (self.gradients, self.microbatches) = (means, microbatches);
        }
        run.map_err(|error| pass.refuse(error))
    }

    /// Another size for the steps that follow, on all ranks: the next step compares it. Checkpoints
    /// have none.
    ///
    /// # Errors
    /// [`DataError::BadSetting`].
    pub fn set_learning_rate(&mut self, learning_rate: f32) -> Result<(), DataError> {
        self.adam = self.adam.at_rate(learning_rate)?;
        Ok(())
    }

    /// Changes the parameters by the means of the last backward pass, and forgets those. With
    /// shards, each rank changes its own and all ranks gather the others'. Collective: ranks
    /// compare their numbers of steps and of microbatches, and the size of the step.
    ///
    /// # Errors
    /// [`DataError::NoGradients`], and [`BadParameter`](sidelane::error::PlanError::BadParameter)
    /// for another group than before, with [`PeerRefused`](sidelane::error::CallError::PeerRefused)
    /// on the other ranks; [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer). Then
    /// nothing has changed on any rank. As [`Communicator::all_gather`]; if the world fails, load a
    /// checkpoint.
    pub fn step(&mut self, group: &mut Communicator) -> Result<(), DataError> {
        let given = if self.gradients.is_empty() { Err(DataError::NoGradients) } else { Ok(()) };
        let member = self.member.check(group).map_err(|error| Error::from(error).into());
        let (steps, microbatches) = (self.states.steps, self.microbatches);
        let rate = self.adam.learning_rate.to_bits().into();
        let settings = vec![
            ("steps so far", steps),
            ("microbatches", microbatches),
            ("bits of the learning rate", rate),
        ];
        agree(group, member.and(given).map(|()| settings))?;
        for (bucket, gradients) in self.gradients.iter().enumerate().rev() {
            let (part, place) = (self.owned.part(bucket), self.owned.place(&self.layout, bucket));
            let whole = self.layout.bucket(bucket);
            // ZeRO-1 has the means of the whole bucket.
            let means = match self.sharding {
                Sharding::None | Sharding::Gradients => gradients,
                Sharding::OptimizerStates => &gradients[place.start - whole.start..][..place.len()],
            };
            // If the world fails in the call, the states of this bucket stay as they are.
            let mut states = self.states.next(part.clone());
            let _copies = Counted::new(&self.gauge, bytes(&states.first) + bytes(&states.second));
            let mut own = Buffer::zeros(&self.gauge, part.len());
            own[..place.len()].copy_from_slice(self.own_parameters(bucket));
            states.update(&self.adam, &mut own, means);
            if self.sharding == Sharding::None {
                self.parameters[whole].copy_from_slice(&own);
            } else {
                let mut all = Buffer::zeros(&self.gauge, self.owned.padded_len(bucket));
                self.wire.parameters.all_gather(group, &self.gauge, &own, &mut all)?;
                self.parameters[whole.clone()].copy_from_slice(&all[..whole.len()]);
            }
            if !self.masters.is_empty() {
                self.masters[part.clone()].copy_from_slice(&own);
            }
            self.states.put(part, &states);
        }
        self.states.steps = self.states.steps.saturating_add(1);
        self.gradients.clear();
        Ok(())
    }

    fn reduction(&self) -> CallKind {
        match self.sharding {
            Sharding::None | Sharding::OptimizerStates => CallKind::AllReduce,
            Sharding::Gradients => CallKind::ReduceScatter,
        }
    }

    /// The sums over ranks of a bucket that this rank keeps.
    fn reduce(&self, group: &mut Communicator, mut bucket: Buffer) -> Result<Vec<f32>, Error> {
        match self.sharding {
            Sharding::None | Sharding::OptimizerStates => {
                self.wire.gradients.all_reduce(group, &self.gauge, &mut bucket)?;
                Ok(bucket.keep())
            }
            Sharding::Gradients => {
                let mut part = vec![0.0; bucket.len() / group.size() as usize];
                self.wire.gradients.reduce_scatter(group, &self.gauge, &bucket, &mut part)?;
                Ok(part)
            }
        }
    }

    /// Elements of a bucket that is reduced.
    fn reduced_len(&self, bucket: usize) -> usize {
        match self.sharding {
            Sharding::None | Sharding::OptimizerStates => self.layout.bucket(bucket).len(),
            Sharding::Gradients => self.owned.padded_len(bucket),
        }
    }

    /// Writes this rank's shard of a checkpoint: parameters and optimizer states, not gradients.
    /// The shards of all ranks make the checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::Io`](super::CheckpointError::Io).
    pub fn save(&self, writer: &mut impl Write) -> Result<(), DataError> {
        let cut = Cut::new(&self.layout, self.member.part());
        let runs = (0..self.layout.len()).map(|bucket| {
            let place = cut.place(&self.layout, bucket);
            let at = place.start.saturating_sub(self.owned.place(&self.layout, bucket).start);
            let state = self.owned.part(bucket).start + at;
            Run {
                first: place.start,
                parameters: &self.own_parameters(bucket)[at..][..place.len()],
                states: [&self.states.first, &self.states.second].map(|of| &of[state..][..place.len()]),
            }
        });
        let shard = Shard { member: self.member, elements: self.layout.elements(), steps: self.states.steps };
        Ok(shard.write(runs.collect(), writer)?)
    }

    /// Reads a checkpoint: the shards of all ranks that wrote it, in any order. Their number, their
    /// strategy and their buckets may be others than here. Each rank reads for itself. Collective:
    /// ranks compare what they have read.
    ///
    /// # Errors
    /// [`CheckpointError`](super::CheckpointError), and
    /// [`BadParameter`](sidelane::error::PlanError::BadParameter) for another group than before,
    /// with [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the other ranks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have read different
    /// checkpoints. Then nothing has changed on any rank.
    pub fn load(
        &mut self,
        group: &mut Communicator,
        shards: impl IntoIterator<Item = impl Read>,
    ) -> Result<(), DataError> {
        let everything = Wanted::new(vec![(0..self.layout.elements(), 0)], self.layout.elements());
        let states = || Wanted::new(self.owned.places(&self.layout), self.owned.shard_len());
        let mut wanted = [everything, states(), states()];
        let steps = load(group, self.member, self.layout.elements(), shards, &mut wanted)?;
        let [parameters, first, second] = wanted.map(|wanted| wanted.values);
        self.states = States { steps, first, second };
        self.set_parameters(parameters);
        self.begin();
        Ok(())
    }
}

/// A backward pass in flight: it takes gradients, adds them to the sums of microbatches
/// before it, and sends each bucket that they complete.
#[derive(Debug)]
pub struct Backward<'a> {
    model: &'a DataParallel,
    /// By parameter: whether its gradient has come.
    arrived: Vec<bool>,
    /// By bucket: gradients that have not come, and sums with those that have.
    awaited: Vec<usize>,
    filling: Vec<Option<Buffer>>,
    ready: mpsc::Sender<Buffer>,
}

impl<'a> Backward<'a> {
    fn new(model: &'a DataParallel, sums: Vec<Vec<f32>>, ready: mpsc::Sender<Buffer>) -> Self {
        let awaited: Vec<_> = model.layout.bucket_parameters().iter().map(|bucket| bucket.len()).collect();
        let mut filling: Vec<_> =
            sums.into_iter().map(|sums| Some(Buffer::new(&model.gauge, sums))).collect();
        filling.resize_with(awaited.len(), || None);
        Backward { model, arrived: vec![false; model.layout.parameters()], awaited, filling, ready }
    }

    /// A parameter.
    ///
    /// # Errors
    /// [`DataError::UnknownParameter`].
    pub fn parameter(&self, parameter: usize) -> Result<&'a [f32], DataError> {
        Ok(&self.model.parameters[self.model.layout.place(parameter)?])
    }

    /// Gives this rank's gradient of a parameter.
    ///
    /// # Errors
    /// [`DataError::UnknownParameter`], [`DataError::WrongLength`], [`DataError::GradientTwice`].
    /// Then this gradient is not taken.
    pub fn gradient(&mut self, parameter: usize, gradient: &[f32]) -> Result<(), DataError> {
        let layout = &self.model.layout;
        let place = layout.place(parameter)?;
        if gradient.len() != place.len() {
            let (what, seen) = (format!("gradient of parameter {parameter}"), gradient.len());
            return Err(DataError::WrongLength { what, seen, expected: place.len() });
        }
        if std::mem::replace(&mut self.arrived[parameter], true) {
            return Err(DataError::GradientTwice { parameter });
        }
        let bucket = layout.bucket_of(parameter);
        let zeros = || Buffer::zeros(&self.model.gauge, self.model.reduced_len(bucket));
        let buffer = self.filling[bucket].get_or_insert_with(zeros);
        add(&mut buffer[place.start - layout.bucket(bucket).start..][..place.len()], gradient);
        self.awaited[bucket] -= 1;
        // All ranks reduce the buckets in one order, for any order of gradients.
        while self.awaited.last() == Some(&0) {
            self.awaited.pop();
            if let Some(Some(buffer)) = self.filling.pop() {
                // After a failed reduction no node takes it, and the pass reports that failure.
                let _ = self.ready.send(buffer);
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> Result<(), DataError> {
        match self.arrived.iter().position(|arrived| !arrived) {
            Some(parameter) => Err(DataError::GradientMissing { parameter }),
            None => Ok(()),
        }
    }
}
