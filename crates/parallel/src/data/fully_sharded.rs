//! ZeRO-3: each rank has its part of everything, and gathers a layer when it is needed.
//!
//! ```text
//!   forward, one layer ahead       compute 0         0     1     2
//!                                  transfer 0     g0 g1    g2                g gather of parameters
//!   backward                       compute 0         2     1     0
//!                                  transfer 0     g2 g1 r2   g0 r1    r0     r reduce-scatter of gradients
//! ```

use std::io::{Read, Write};
use std::sync::Arc;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::CallKind;
use sidelane::overlap::{Graph, Handoff, HostExecutor, Node, NodeLabel, Run as NodeRun, StreamId};

use super::adam::{Adam, States};
use super::buckets::{Cut, Layout};
use super::checkpoint::{Run, Shard, Wanted, load};
use super::error::DataError;
use super::memory::{Buffer, Gauge, MemoryUsage, bytes};
use super::pass::{add, keep, mean, reason};
use super::wire_dtype::Wire;
use crate::calls::Calls;
use crate::check::{Member, agree, digest, digest_of};

/// A model whose parameters, gradients and optimizer states are cut over the ranks of a group:
/// ZeRO-3, or FSDP's full shard. A layer is a bucket of the layout.
#[derive(Debug)]
pub struct FullySharded {
    layout: Layout,
    adam: Adam,
    prefetch: usize,
    member: Member,
    cut: Cut,
    wire: Wire,
    /// This rank's parts of all layers, padded.
    parameters: Vec<f32>,
    /// Sums over ranks and microbatches, in the shape of the parameters. Empty before the first
    /// microbatch and after the last.
    sums: Vec<f32>,
    /// Means in the shape of the parameters. Empty without a complete backward pass.
    gradients: Vec<f32>,
    /// Microbatches of the sums, or of the means.
    microbatches: u64,
    states: States,
    gauge: Arc<Gauge>,
}

/// The state that nodes of a pass use in turn.
struct Turns<'a, 'g, B> {
    pass: Handoff<&'a mut Calls<'g>>,
    body: Handoff<(B, &'a mut Option<DataError>)>,
    /// By layer: what was gathered.
    gathered: Vec<Handoff<Buffer>>,
}

impl<'a, 'g, B> Turns<'a, 'g, B> {
    fn new(layers: usize, pass: &'a mut Calls<'g>, body: B, said: &'a mut Option<DataError>) -> Self {
        let gathered = (0..layers).map(|_| Handoff::empty()).collect();
        Turns { pass: Handoff::new(pass), body: Handoff::new((body, said)), gathered }
    }
}

impl FullySharded {
    /// This rank's part of a model with these parameters, in the order of the layout and the same
    /// on all ranks. Up to `prefetch` layers are gathered next to the compute of another; 0 gathers
    /// each when the one before is done. Collective: ranks compare all that they give.
    ///
    /// # Errors
    /// As [`DataParallel::new`](super::DataParallel::new).
    pub fn new(
        group: &mut Communicator,
        layout: Layout,
        prefetch: usize,
        parameters: &[f32],
        adam: Adam,
    ) -> Result<Self, DataError> {
        let settings = layout.check(parameters).and_then(|()| adam.check()).map(|()| {
            vec![
                ("prefetch", prefetch as u64),
                ("number of parameters", layout.parameters() as u64),
                ("digest of sizes and layers", digest(layout.numbers())),
                ("digest of Adam's settings", digest(adam.numbers())),
                ("digest of the parameters", digest_of(parameters)),
            ]
        });
        agree(group, settings)?;
        let member = Member::of(group);
        let cut = Cut::new(&layout, member.part());
        let parameters = cut.shard(&layout, parameters);
        let (states, prefetch) = (States::new(cut.shard_len()), prefetch.min(layout.len()));
        Ok(FullySharded {
            layout,
            adam,
            prefetch,
            member,
            cut,
            wire: Wire::default(),
            parameters,
            sums: Vec::new(),
            gradients: Vec::new(),
            microbatches: 0,
            states,
            gauge: Arc::default(),
        })
    }

    /// The same model with other types of what travels. Call it once, on all ranks: calls of ranks
    /// that differ are errors on all of them.
    pub fn with_wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Bytes that this rank holds.
    pub fn memory_usage(&self) -> MemoryUsage {
        MemoryUsage {
            parameters_bytes: bytes(&self.parameters),
            gradients_bytes: bytes(&self.sums) + bytes(&self.gradients),
            states_bytes: bytes(&self.states.first) + bytes(&self.states.second),
            buffers_peak_bytes: self.gauge.peak(),
        }
    }

    /// All parameters, in the order of the layout, as passes compute with them. Collective.
    ///
    /// # Errors
    /// [`BadParameter`](sidelane::error::PlanError::BadParameter) for another group than before; as
    /// [`Communicator::all_gather`].
    pub fn gather(&self, group: &mut Communicator) -> Result<Vec<f32>, DataError> {
        let member = self.member.check(group);
        let mut pass = Calls::new(group, vec![CallKind::AllGather; self.layout.len()]);
        member.map_err(|error| pass.refuse(Error::from(error)))?;
        let mut whole = vec![0.0; self.layout.elements()];
        for layer in 0..self.layout.len() {
            let place = self.layout.bucket(layer);
            let all = self.gather_layer(layer, &mut pass)?;
            whole[place.clone()].copy_from_slice(&all[..place.len()]);
        }
        Ok(whole)
    }

    /// Runs a forward pass: `body` gets each layer and its parameters, ascending. They are dropped
    /// behind it. Collective.
    ///
    /// # Errors
    /// Errors of `body`, and [`BadParameter`](sidelane::error::PlanError::BadParameter) for another
    /// group than before, with [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the
    /// other ranks if a call is left; as [`Communicator::all_gather`]. The next pass begins anew.
    pub fn forward(
        &self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        body: impl FnMut(usize, &[f32]) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let layers = self.layout.len();
        let member = self.member.check(group);
        let mut pass = Calls::new(group, vec![CallKind::AllGather; layers]);
        member.map_err(|error| pass.refuse(Error::from(error)))?;
        let mut said = None;
        let turns = Turns::new(layers, &mut pass, body, &mut said);
        let (mut graph, mut computed) = (Graph::new(), Vec::new());
        let mut gathers = Vec::new();
        for step in 0..layers + self.prefetch {
            if step < layers {
                gathers.push(self.add_gather(&mut graph, step, step, &computed, &turns));
            }
            let Some(layer) = step.checked_sub(self.prefetch) else { continue };
            let (turns, label) = (&turns, NodeLabel::new("forward", layer as u32));
            let node = graph.add(StreamId::Compute(0), label, &[gathers[layer]], move |_| {
                let all = turns.gathered[layer].take()?;
                turns
                    .body
                    .with(|(body, said)| keep(said, body(layer, &all[..self.layout.bucket(layer).len()])))
            });
            computed.push(node);
        }
        let run = graph.run(executor);
        drop(turns);
        run.map_err(|run| pass.refuse(reason(said, run)))
    }

    /// Runs the backward pass of a microbatch that is not the last of its step: as
    /// [`backward`](Self::backward), which takes the last one. The sums over the ranks are added to
    /// those of the microbatches before it. Each microbatch moves as much as a step of one, and a
    /// rank holds no more than its part of the sums. Collective.
    ///
    /// # Errors
    /// As [`FullySharded::backward`]. If all calls were made, the microbatch counts as on the other
    /// ranks. Otherwise the microbatches so far are forgotten, and the next one is the first.
    pub fn accumulate(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        body: impl FnMut(usize, &[f32], &mut [f32]) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let before = self.begin();
        let (sums, run) = self.reduce(group, executor, body);
        if let Some(sums) = sums {
            (self.sums, self.microbatches) = (sums, before + 1);
        }
        run
    }

    /// Runs a backward pass: `body` gets each layer from the last on, its parameters, and zeros in
    /// their shape, to which it adds this rank's gradients. Parameters are gathered again and
    /// dropped again. Gradients are reduce-scattered, layer by layer. Collective.
    ///
    /// A mean is the sum by ascending rank from +0, divided by the number of ranks. If
    /// [`accumulate`](Self::accumulate) took microbatches before this one, their sums are added by
    /// ascending microbatch, and the division is by ranks x microbatches.
    ///
    /// # Errors
    /// As [`FullySharded::forward`] and [`Communicator::reduce_scatter`]. If all calls were made,
    /// for example when the last one overran a limit of the executor, the means are complete on all
    /// ranks, and a step may follow.
    pub fn backward(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        body: impl FnMut(usize, &[f32], &mut [f32]) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let microbatches = self.begin() + 1;
        let (sums, run) = self.reduce(group, executor, body);
        if let Some(mut means) = sums {
            mean(&mut means, u64::from(self.member.ranks) * microbatches);
            (self.gradients, self.microbatches) = (means, microbatches);
        }
        run
    }

    /// Forgets means. Returns the number of microbatches whose sums there are.
    fn begin(&mut self) -> u64 {
        self.gradients = Vec::new();
        let microbatches = std::mem::take(&mut self.microbatches);
        if self.sums.is_empty() { 0 } else { microbatches }
    }

    /// A backward pass, and its sums over ranks and microbatches if all calls were made: also if
    /// the last of them overran a limit, because the other ranks have their sums then.
    fn reduce(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        body: impl FnMut(usize, &[f32], &mut [f32]) -> Result<(), DataError> + Send,
    ) -> (Option<Vec<f32>>, Result<(), DataError>) {
        let before = std::mem::take(&mut self.sums);
        let (layers, prefetch) = (self.layout.len(), self.prefetch);
        let member = self.member.check(group);
        let mut pass = Calls::new(group, self.backward_calls());
        if let Err(error) = member {
            return (None, Err(pass.refuse(Error::from(error).into())));
        }
        let is_first = before.is_empty();
        let sums = if is_first { vec![0.0; self.cut.shard_len()] } else { before };
        // Sums, and how many layers have them.
        let (mut said, sums) = (None, Handoff::new((sums, 0)));
        let turns = Turns::new(layers, &mut pass, body, &mut said);
        let of_layers: Vec<Handoff<Buffer>> = (0..layers).map(|_| Handoff::empty()).collect();
        let (mut graph, mut computed, mut gathers) = (Graph::new(), Vec::new(), Vec::new());
        for step in 0..layers + prefetch {
            if step < layers {
                gathers.push(self.add_gather(&mut graph, step, layers - 1 - step, &computed, &turns));
            }
            let Some(nth) = step.checked_sub(prefetch) else { continue };
            let layer = layers - 1 - nth;
            let (model, turns, sums, gradients) = (&*self, &turns, &sums, &of_layers[layer]);
            let label = |name| NodeLabel::new(name, layer as u32);
            let node = graph.add(StreamId::Compute(0), label("backward"), &[gathers[nth]], move |_| {
                let all = turns.gathered[layer].take()?;
                let len = model.layout.bucket(layer).len();
                let mut gradient = Buffer::zeros(&model.gauge, all.len());
                turns.body.with(|(body, said)| keep(said, body(layer, &all[..len], &mut gradient[..len])))?;
                gradients.put(gradient)
            });
            computed.push(node);
            graph.add(StreamId::Transfer(0), label("reduce"), &[node], move |_| {
                let gradient = gradients.take()?;
                sums.with(|(sums, reduced)| {
                    let sums = &mut sums[model.cut.part(layer)];
                    let call = |sums: &mut [f32]| {
                        let (wire, gauge) = (model.wire.gradients, &model.gauge);
                        turns.pass.with(|pass| {
                            pass.call(|group| wire.reduce_scatter(group, gauge, &gradient, sums))
                        })
                    };
                    if is_first {
                        call(sums)?;
                    } else {
                        let mut of_microbatch = Buffer::zeros(&model.gauge, sums.len());
                        call(&mut of_microbatch)?;
                        add(sums, &of_microbatch);
                    }
                    *reduced += 1;
                    Ok(())
                })
            });
        }
        let run = graph.run(executor);
        drop(turns);
        let (sums, reduced) = sums.into_inner().unwrap_or_default();
        ((reduced == layers).then_some(sums), run.map_err(|run| pass.refuse(reason(said, run))))
    }

    /// Another size for the steps that follow, as
    /// [`DataParallel::set_learning_rate`](super::DataParallel::set_learning_rate).
    ///
    /// # Errors
    /// As there.
    pub fn set_learning_rate(&mut self, learning_rate: f32) -> Result<(), DataError> {
        self.adam = self.adam.at_rate(learning_rate)?;
        Ok(())
    }

    /// Changes this rank's part of the parameters by the means of the last backward pass, and
    /// forgets those. Collective: ranks compare their numbers of steps and of microbatches, and the
    /// size of the step, and nothing else moves.
    ///
    /// # Errors
    /// As [`DataParallel::step`](super::DataParallel::step). Then nothing has changed on any rank.
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
        let gradients = std::mem::take(&mut self.gradients);
        self.states.steps = self.states.steps.saturating_add(1);
        self.states.update(&self.adam, &mut self.parameters, &gradients);
        Ok(())
    }

    /// Writes this rank's shard of a checkpoint, as
    /// [`DataParallel::save`](super::DataParallel::save).
    ///
    /// # Errors
    /// As there.
    pub fn save(&self, writer: &mut impl Write) -> Result<(), DataError> {
        let runs = self.cut.places(&self.layout).into_iter().map(|(place, at)| Run {
            first: place.start,
            parameters: &self.parameters[at..][..place.len()],
            states: [&self.states.first, &self.states.second].map(|of| &of[at..][..place.len()]),
        });
        let shard = Shard { member: self.member, elements: self.layout.elements(), steps: self.states.steps };
        Ok(shard.write(runs.collect(), writer)?)
    }

    /// Reads a checkpoint, as [`DataParallel::load`](super::DataParallel::load).
    ///
    /// # Errors
    /// As there.
    pub fn load(
        &mut self,
        group: &mut Communicator,
        shards: impl IntoIterator<Item = impl Read>,
    ) -> Result<(), DataError> {
        let part = || Wanted::new(self.cut.places(&self.layout), self.cut.shard_len());
        let mut wanted = [part(), part(), part()];
        let steps = load(group, self.member, self.layout.elements(), shards, &mut wanted)?;
        let [parameters, first, second] = wanted.map(|wanted| wanted.values);
        (self.parameters, self.states) = (parameters, States { steps, first, second });
        (self.sums, self.gradients) = (Vec::new(), Vec::new());
        Ok(())
    }

    /// Adds the gather of a layer, the `nth` of a pass. It waits until no more layers are in memory
    /// than may be.
    fn add_gather<'a, B: Send>(
        &'a self,
        graph: &mut Graph<'a, NodeRun>,
        nth: usize,
        layer: usize,
        computed: &[Node],
        turns: &'a Turns<'_, '_, B>,
    ) -> Node {
        let dropped = nth.checked_sub(1 + self.prefetch).map(|before| computed[before]);
        let label = NodeLabel::new("gather", layer as u32);
        graph.add(StreamId::Transfer(0), label, dropped.as_slice(), move |_| {
            let all = turns.pass.with(|pass| self.gather_layer(layer, pass))?;
            turns.gathered[layer].put(all)
        })
    }

    fn gather_layer(&self, layer: usize, pass: &mut Calls<'_>) -> Result<Buffer, sidelane::Error> {
        let mut all = Buffer::zeros(&self.gauge, self.cut.padded_len(layer));
        let (wire, own) = (self.wire.parameters, &self.parameters[self.cut.part(layer)]);
        pass.call(|group| wire.all_gather(group, &self.gauge, own, &mut all))?;
        Ok(all)
    }

    /// In launch order, as the graph of a backward pass adds them.
    fn backward_calls(&self) -> Vec<CallKind> {
        let (layers, mut calls) = (self.layout.len(), Vec::new());
        for step in 0..layers + self.prefetch {
            if step < layers {
                calls.push(CallKind::AllGather);
            }
            if step >= self.prefetch {
                calls.push(CallKind::ReduceScatter);
            }
        }
        calls
    }
}
