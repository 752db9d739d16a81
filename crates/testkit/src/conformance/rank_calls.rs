//! One rank in one group: makes the calls of a case, and compares the results with the reference.
//!
//! ```text
//!   case     dispatch ----> combine | cached | gradients | refused | captured ...
//!              |               |
//!   ranks    ExpertRows      sums of tokens                 on the host or a device
//!              |               |
//!   compare  rows, metadata, layout, counts      sums, weights   --bit for bit-- Reference: naive, of all ranks
//! ```
//!
//! A difference is written down and ends nothing: the other ranks wait for the calls that follow.

use std::cell::Cell;
use std::fmt::Debug;
use std::rc::Rc;

use sidelane::device::{CudaGraph, Stream};
use sidelane::dtype::Dtype;
use sidelane::ep::{
    CallExecutor, Choices, ExpertOutput, ExpertRows, Graphs, Handle, PendingDispatch, Tensor,
};
use sidelane::error::{CallError, DeviceError, KernelFault, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::RowLayout;
use sidelane::rows::Stores;
use sidelane::{Error, ExpertParallel, Group};
use sidelane_verify::reference::{self, Real, Reference, Row, Tokens};

use crate::TestError;
use crate::conformance::case::{Bad, Call, reversed};
use crate::conformance::tensors::{Buffer, Device, Place};
use crate::device::whole;
use crate::difference::{Difference, compare, compare_list};
use crate::ep_settings::{OfDevice, Settings};
use crate::expected::Landing;

/// Dispatches that may be alive there.
const MAX_IN_FLIGHT: u32 = 4;
/// Member of a group that brings bad input.
const BAD_MEMBER: u32 = 1;
/// Launches of a captured layer.
const LAUNCHES: u32 = 4;

/// One rank in one group.
pub struct RankCalls<'r, E> {
    settings: Settings,
    group: &'r Group,
    /// The instance under test.
    pub ep: ExpertParallel,
    place: Place<'r>,
    seed: u64,
    /// Dispatches so far.
    dispatches: u32,
    /// Tensors so far: each has another number, and other elements.
    tensors: u32,
    alive: Vec<Rc<LiveDispatch<E>>>,
    /// Fault that kernels found in the last call that they refused, as they should.
    refused: Option<KernelFault>,
    /// Differences so far.
    pub found: Vec<Difference>,
}

impl<'r, E: Real> RankCalls<'r, E> {
    /// Builds the instance: the `part`th of a case.
    pub fn build(
        settings: &Settings,
        group: &'r Group,
        device: Option<&'r Device>,
        (seed, part): (u64, u64),
    ) -> Result<Self, TestError> {
        let place = Place::new(device, part);
        let mut builder = settings.builder(group);
        if let (Some(device), Some(stream)) = (device, place.stream()) {
            builder = builder.on(stream);
            if settings.case.mode.slots().is_none() && settings.graphs == Graphs::Off {
                let OfDevice { max_in_flight, device_heap, .. } = settings.device;
                builder = builder.device_heap(device_heap.unwrap_or(device.heap));
                builder = builder.max_in_flight(max_in_flight.unwrap_or(MAX_IN_FLIGHT));
            }
        }
        let (ep, settings) = (builder.build()?, settings.clone());
        let (alive, refused, found) = (Vec::new(), None, Vec::new());
        Ok(RankCalls { settings, group, ep, place, seed, dispatches: 0, tensors: 0, alive, refused, found })
    }

    /// Number of dispatches, and the requests of the last one that is alive.
    pub fn last_dispatch(&self) -> Result<String, TestError> {
        let last = self.alive.last().ok_or(TestError::Lacks("no dispatch is alive"))?;
        let asked = last.handle.report()?.enqueued;
        let how = if asked.batches > 0 { "batches" } else { "single ones" };
        let (dispatches, copies, operations) = (self.dispatches, asked.copies, asked.memory_operations);
        Ok(format!(
            "{dispatches} dispatches, the last by {copies} copies ({how}) and {operations} operations"
        ))
    }

    /// Whether sizes stay on the device: then a handle knows nothing, and hosts agree on nothing.
    fn sizes_stay(&self) -> bool {
        self.ep.executor() == CallExecutor::ConstantProgram
    }

    /// Rows that this rank sees of a dispatch.
    fn rows_seen(&self, alive: &LiveDispatch<E>) -> usize {
        if self.sizes_stay() { alive.rows().len() } else { alive.handle.rows() as usize }
    }

    /// Makes one call.
    pub fn carry_out(&mut self, call: Call) -> Result<(), TestError> {
        match call {
            Call::Dispatch => self.dispatch(|ep, x, choices| ep.dispatch(x, choices)),
            Call::DispatchHalves => self.dispatch(|ep, x, choices| ep.start_dispatch(x, choices)?.finish()),
            Call::TokenBuffer => self.dispatch(from_token_buffer),
            Call::Prepare => self.prepare(),
            Call::Cached(nth) => self.cached(nth),
            Call::Combine(nth) | Call::CombineHalves(nth) | Call::CombineCopy(nth) => self.combine(nth, call),
            Call::DispatchBackward(nth) => self.dispatch_backward(nth),
            Call::CombineBackward(nth) => self.combine_backward(nth),
            Call::Release(nth) => Ok(self.ep.release(Some(&self.alive[nth].handle))?),
            Call::Forget => {
                self.alive.clear();
                Ok(())
            }
            Call::SetMap => {
                let map = reversed(&self.settings.case.map)?;
                self.ep.set_expert_map(map.clone())?;
                self.settings.case.map = map;
                Ok(())
            }
            Call::Mask(active) => {
                self.ep.mask(active)?;
                self.settings.case.active = active.to_vec();
                self.found.extend(compare_list(self.ep.rank(), "active ranks", 1, self.ep.active(), active));
                Ok(())
            }
            Call::Stream => Ok(self.ep.set_stream(self.place.change_stream()?)?),
            Call::Refused(bad) => self.refused(bad),
            Call::OverBudget => self.over_budget(),
            Call::Capture => self.capture(),
            Call::Interleaved => {
                let layer = [Call::Dispatch, Call::Combine(0), Call::Forget];
                layer.into_iter().try_for_each(|call| self.carry_out(call))
            }
            Call::Floor => self.floor(),
        }
    }

    /// Waits for all calls, and says how they went.
    pub fn end(&self) -> Result<(), TestError> {
        match self.ep.synchronize() {
            // That of the last call, by its kernels.
            Err(Error::Device(DeviceError::Fault { fault, .. })) if Some(fault) == self.refused => Ok(()),
            ended => Ok(ended.and_then(|()| self.ep.check())?),
        }
    }

    fn me(&self) -> usize {
        self.ep.rank() as usize
    }

    fn number(&mut self) -> u32 {
        self.tensors += 1;
        self.tensors
    }

    /// New tokens of all ranks, whose numbers take turns.
    fn input(&mut self) -> Reference<E> {
        let mut case = self.settings.case.clone();
        let turn = self.dispatches as usize % case.counts.len();
        case.counts.rotate_left(turn);
        self.input_of(&case)
    }

    fn input_of(&mut self, case: &reference::Case) -> Reference<E> {
        self.dispatches += 1;
        Reference::seeded(case, self.seed.wrapping_mul(1 << 20).wrapping_add(u64::from(self.dispatches) << 8))
    }

    /// Makes a call with these tokens: `x` as they are dispatched.
    fn with_input<R>(
        &mut self,
        x: &[u8],
        tokens: &Tokens<E>,
        call: impl FnOnce(&mut ExpertParallel, Tensor<'_>, Choices<'_>) -> Result<R, Error>,
    ) -> Result<Result<R, Error>, TestError> {
        let (x, dtype) = (self.place.lend(x)?, self.settings.sent_shape().0);
        if self.place.stream().is_none() {
            let top_k = self.settings.case.top_k;
            let routing = Routing::new(top_k, tokens.ids.as_slice(), tokens.weights.as_slice())?;
            return Ok(call(&mut self.ep, x.tensor(dtype), (&routing).into()));
        }
        let (ids, weights) = (self.place.lend(&tokens.ids)?, self.place.lend(&tokens.weights)?);
        Ok(call(&mut self.ep, x.tensor(dtype), choices(&ids, &weights)?))
    }

    fn dispatch(
        &mut self,
        call: impl FnOnce(&mut ExpertParallel, Tensor<'_>, Choices<'_>) -> Result<(ExpertRows, Handle), Error>,
    ) -> Result<(), TestError> {
        let reference = self.input();
        let tokens = &reference.all[self.me()];
        let (rows, handle) = self.with_input(&self.settings.sent(&tokens.x)?, tokens, call)??;
        self.dispatched(&rows, handle, reference)
    }

    /// Checks what a dispatch gave, and keeps its handle.
    fn dispatched(
        &mut self,
        rows: &ExpertRows,
        handle: Handle,
        reference: Reference<E>,
    ) -> Result<(), TestError> {
        let alive = self.alive(reference, handle);
        let what = format!("rows of dispatch {}", self.alive.len());
        self.check_sent(&what, rows, &alive, |rank| alive.reference.all[rank].x.clone())?;
        self.check_metadata(rows, &alive)?;
        self.keep(alive)
    }

    fn alive(&self, reference: Reference<E>, handle: Handle) -> LiveDispatch<E> {
        LiveDispatch { reference, handle, me: self.me(), outputs: Cell::new(0) }
    }

    /// Checks what a handle knows, and keeps it.
    fn keep(&mut self, alive: LiveDispatch<E>) -> Result<(), TestError> {
        self.check_layout(&alive)?;
        self.alive.push(Rc::new(alive));
        Ok(())
    }

    fn prepare(&mut self) -> Result<(), TestError> {
        let reference = self.input();
        let tokens = &reference.all[self.me()];
        let handle = self.with_input(&[], tokens, |ep, _, choices| ep.prepare(choices))??;
        self.keep(self.alive(reference, handle))
    }

    fn cached(&mut self, nth: usize) -> Result<(), TestError> {
        let (me, number, dtype) = (self.me(), self.number(), self.settings.sent_shape().0);
        let alive = Rc::clone(&self.alive[nth]);
        let x = self.place.lend(&self.settings.sent(&alive.reference.sent(number, me))?)?;
        let rows = self.ep.dispatch_cached(x.tensor(dtype), &alive.handle)?;
        let what = format!("rows along dispatch {nth}");
        self.check_sent(&what, &rows, &alive, |rank| alive.reference.sent(number, rank))
    }

    fn combine(&mut self, nth: usize, way: Call) -> Result<(), TestError> {
        let (me, number) = (self.me(), self.number());
        let alive = Rc::clone(&self.alive[nth]);
        let (reference, handle) = (&alive.reference, &alive.handle);
        let expected = reference.sums(me, number, self.settings.case.weighted);
        let y = alive.lying(&reference.outputs(me, number));
        let mut out = self.place.room(bytes_of(&expected).len())?;
        let target = out.tensor_mut(E::DTYPE);
        match way {
            Call::CombineCopy(_) => {
                let y = self.elsewhere(y)?;
                self.ep.combine_into(y.tensor(E::DTYPE), handle, target)?;
            }
            Call::CombineHalves(_) => {
                let output = self.output(handle, &y)?;
                self.ep.start_combine(output, handle)?.finish(target)?;
            }
            _ => {
                let output = self.output(handle, &y)?;
                self.ep.combine_into(output, handle, target)?;
            }
        }
        handle.return_report()?;
        alive.outputs.set(number);
        self.check_tensor(&format!("sums of dispatch {nth}"), &out, &expected)
    }

    fn dispatch_backward(&mut self, nth: usize) -> Result<(), TestError> {
        let (me, rows, words) = (self.me(), self.number(), self.number());
        let alive = Rc::clone(&self.alive[nth]);
        let (reference, handle) = (&alive.reference, &alive.handle);
        let of_rows = self.elsewhere(alive.lying(&reference.outputs(me, rows)))?;
        let of_weights = self.place.lend(&alive.lying(&reference.row_words(me, words)))?;
        let (sums, returned) = (reference.sums(me, rows, false), reference.returned_words(me, words));
        for with_weights in [true, false] {
            let (mut x, mut weights_out) =
                (self.place.room(bytes_of(&sums).len())?, self.place.room(bytes_of(&returned).len())?);
            let given = with_weights.then(|| of_weights.tensor(Dtype::F32));
            let target = with_weights.then(|| weights_out.tensor_mut(Dtype::F32));
            let (y, tokens) = (of_rows.tensor(E::DTYPE), x.tensor_mut(E::DTYPE));
            self.ep.dispatch_backward_into(y, given, handle, tokens, target)?;
            self.check_tensor(&format!("token gradients of dispatch {nth}"), &x, &sums)?;
            if with_weights {
                let what = format!("gradients of dispatch {nth}'s choices");
                self.check_words(&what, &weights_out, &returned)?;
            }
        }
        Ok(())
    }

    fn combine_backward(&mut self, nth: usize) -> Result<(), TestError> {
        let (me, number, weighted) = (self.me(), self.number(), self.settings.case.weighted);
        let alive = Rc::clone(&self.alive[nth]);
        let (reference, handle) = (&alive.reference, &alive.handle);
        let g = self.place.lend(&reference.sent(number, me))?;
        let products = reference.products(me, alive.outputs.get(), number);
        let mut weights_out = self.place.room(bytes_of(&products).len())?;
        let target = weighted.then(|| weights_out.tensor_mut(Dtype::F32));
        let rows = self.ep.combine_backward_into(g.tensor(E::DTYPE), handle, target)?;
        let expected = match weighted {
            true => reference.weighted_rows(me, number),
            false => reference.rows(me, |rank| reference.sent(number, rank)),
        };
        let what = format!("row gradients of dispatch {nth}");
        let shape = (E::DTYPE, self.settings.case.hidden * E::DTYPE.size());
        self.check_rows(&what, &rows, &alive, shape, bytes_of(&expected))?;
        if weighted {
            self.check_words(&format!("weight gradients of dispatch {nth}"), &weights_out, &products)?;
        }
        Ok(())
    }

    /// One member's bad input is an error at all ranks; in slots on a device streams find it, but
    /// for what the member itself sees.
    fn refused(&mut self, bad: Bad) -> Result<(), TestError> {
        let is_bad = self.ep.rank() == BAD_MEMBER;
        let mut reference = self.input();
        let me = self.me();
        let mut x = self.settings.sent(&reference.all[me].x)?;
        if is_bad {
            match bad {
                Bad::Shape => x.truncate(x.len() - self.settings.sent_shape().1),
                Bad::Expert => reference.all[me].ids[0] = self.settings.case.map.experts() as i32,
            }
        }
        let seen = self.with_input(&x, &reference.all[me], |ep, x, choices| ep.dispatch(x, choices))?;
        let seen = match seen {
            Ok((_, handle)) if self.sizes_stay() => {
                let fault = match bad {
                    Bad::Expert if is_bad => KernelFault::ExpertOutOfRange { token: 0 },
                    _ => KernelFault::Refused { rank: BAD_MEMBER },
                };
                return self.refused_by_kernels(&handle, Some(fault), reference.all[me].x.len());
            }
            seen => seen.map(drop),
        };
        let (right, expected) = match (&seen, bad) {
            (Err(Error::Plan(PlanError::WrongShape { .. })), Bad::Shape) => (is_bad, "a wrong shape"),
            (Err(Error::Plan(PlanError::ExpertOutOfRange { .. })), Bad::Expert) => {
                (is_bad, "an expert out of range")
            }
            (Err(Error::Call(CallError::PeerRefused { peer, .. })), _) => {
                (!is_bad && *peer == BAD_MEMBER, "a refusal of member 1")
            }
            _ => (false, "a refusal"),
        };
        self.outcome("refusal of bad input", right, expected, seen);
        Ok(())
    }

    fn over_budget(&mut self) -> Result<(), TestError> {
        let reference = self.input();
        let needs = reference.seen.over_budget(&reference.case);
        let tokens = &reference.all[self.me()];
        let call = |ep: &mut ExpertParallel, x: Tensor<'_>, choices: Choices<'_>| ep.dispatch(x, choices);
        let seen = match self.with_input(&self.settings.sent(&tokens.x)?, tokens, call)? {
            Ok((_, handle)) if self.sizes_stay() => {
                let fault = needs.map(|(rank, _)| KernelFault::OverBudget { rank });
                return self.refused_by_kernels(&handle, fault, tokens.x.len());
            }
            seen => seen.map(drop),
        };
        let right = match &seen {
            Err(Error::Call(CallError::OverBudget { rank, required, .. })) => {
                needs == Some((*rank, *required))
            }
            _ => false,
        };
        self.outcome("refusal of a call over budget", right, &format!("rank and rows {needs:?}"), seen);
        Ok(())
    }

    /// The stream alone finds why a call is refused, and sums that are zeros.
    fn refused_by_kernels(
        &mut self,
        handle: &Handle,
        expected: Option<KernelFault>,
        sums: usize,
    ) -> Result<(), TestError> {
        let status: Vec<u32> = bytemuck::pod_collect_to_vec(&self.place.read(&handle.status()?)?);
        let seen = status.first().and_then(|&status| KernelFault::of(status));
        self.refused = expected;
        if seen != expected {
            let [expected, seen] = [expected, seen].map(|fault| format!("{fault:?}"));
            self.found.push(Difference::outcome(self.ep.rank(), "status of a refused call", expected, seen));
        }
        let mut out = self.place.room(sums * E::DTYPE.size())?;
        self.ep.combine_into(handle.output()?, handle, out.tensor_mut(E::DTYPE))?;
        self.check_tensor("sums of a refused call", &out, &vec![E::of(0.0); sums])
    }

    fn outcome(&mut self, what: &str, right: bool, expected: &str, seen: Result<(), Error>) {
        if !right {
            let seen = seen.map_or_else(|error| error.to_string(), |()| "no error".to_owned());
            self.found.push(Difference::outcome(self.ep.rank(), what, expected, seen));
        }
    }

    /// A dispatch, experts that change nothing, and a combine, by a graph; where sizes cannot stay
    /// on the device, the dispatch alone, which is refused.
    fn capture(&mut self) -> Result<(), TestError> {
        let me = self.me();
        let case = self.settings.case.clone();
        let mut inputs: Vec<Reference<E>> = (0..LAUNCHES).map(|_| self.input_of(&case)).collect();
        let first = inputs[0].all[me].clone();
        if !sidelane::ep::Feature::Capture.is_served_by(self.ep.executor()) {
            let x = self.settings.sent(&first.x)?;
            let call = |ep: &mut ExpertParallel, x: Tensor<'_>, choices: Choices<'_>| {
                ep.start_dispatch(x, choices)?.finish_async().map(drop)
            };
            return Ok(self.with_input(&x, &first, call)??);
        }
        let stream = self.place.stream().cloned().ok_or(TestError::Lacks("the host captures nothing"))?;
        let mut layer = self.layer(&first)?;
        let (graph, _handle) = layer.capture(&mut self.ep, &stream)?;
        for (launch, reference) in inputs.drain(..).enumerate() {
            layer.write(&self.place, &self.settings, &reference.all[me])?;
            graph.launch(&stream)?;
            self.ep.synchronize()?;
            let value = |rank: usize, row: usize, column: usize| -> f32 {
                reference.seen.rows[rank][row]
                    .as_ref()
                    .map_or(0.0, |row| reference.all[row.source].x[row.token * case.hidden + column].into())
            };
            let expected = reference.sums_of(me, case.weighted, value);
            self.check_tensor(&format!("sums of launch {launch}"), &layer.out, &expected)?;
        }
        Ok(())
    }

    /// Tensors of a layer of these tokens.
    pub fn layer(&mut self, tokens: &Tokens<E>) -> Result<Layer, TestError> {
        let (place, top_k) = (&mut self.place, self.settings.case.top_k);
        Ok(Layer {
            routing: Routing::new(top_k, tokens.ids.clone(), tokens.weights.clone())?,
            x: place.lend(&self.settings.sent(&tokens.x)?)?,
            sent: self.settings.sent_shape().0,
            ids: place.lend(&tokens.ids)?,
            weights: place.lend(&tokens.weights)?,
            out: place.room(bytes_of(&tokens.x).len())?,
            returned: E::DTYPE,
        })
    }

    /// A layer of this instance while another one's dispatch, begun before its combine, is under
    /// way.
    pub fn around(&mut self, other: &mut Self) -> Result<(), TestError> {
        self.carry_out(Call::Dispatch)?;
        let reference = other.input();
        let layer = other.layer(&reference.all[other.me()])?;
        let started = layer.start(&mut other.ep)?;
        self.carry_out(Call::Combine(0))?;
        let (rows, handle) = started.finish()?;
        other.dispatched(&rows, handle, reference)?;
        other.carry_out(Call::Combine(0))?;
        self.carry_out(Call::Forget)?;
        other.carry_out(Call::Forget)
    }

    fn floor(&mut self) -> Result<(), TestError> {
        let reference = self.input();
        let tokens = &reference.all[self.me()];
        let x = self.settings.sent(&tokens.x)?;
        let (rows, handle) = self.with_input(&x, tokens, |ep, x, choices| ep.dispatch(x, choices))??;
        let output = handle.output()?;
        let mut floor = self.ep.floor_bench(self.group, rows, output, &handle)?;
        self.group.gather(&[])?;
        floor.dispatch(&x, Stores::Cached);
        self.group.gather(&[])?;
        let rows = floor.lend_rows().ok_or(TestError::Lacks("the floor lends no rows"))?;
        let alive = self.alive(reference, handle);
        self.check_sent("rows of the floor", &rows, &alive, |rank| alive.reference.all[rank].x.clone())
    }

    /// The handle's own buffer, with these bytes.
    fn output(&self, handle: &Handle, y: &[u8]) -> Result<ExpertOutput, TestError> {
        let mut output = handle.output()?;
        match self.place.stream() {
            None => output.rows_mut::<u8>()?.copy_from_slice(y),
            Some(_) => self.place.write(output.range()?, y)?,
        }
        Ok(output)
    }

    /// The same bytes in memory of the caller's: where a budget's sizes stay on the device, as many
    /// rows as it has.
    fn elsewhere(&mut self, mut y: Vec<u8>) -> Result<Buffer, TestError> {
        if let (true, Some(rows)) = (self.sizes_stay(), self.settings.case.mode.budget()) {
            y.resize(rows as usize * self.settings.case.hidden * E::DTYPE.size(), 0);
        }
        self.place.lend(&y)
    }

    /// Holds dispatched rows against the tokens of all ranks.
    fn check_sent(
        &mut self,
        what: &str,
        rows: &ExpertRows,
        alive: &LiveDispatch<E>,
        x: impl Fn(usize) -> Vec<E>,
    ) -> Result<(), TestError> {
        let ((dtype, row), reference) = (self.settings.sent_shape(), &alive.reference);
        let ranks = 0..reference.all.len();
        let sent = ranks.map(|rank| self.settings.sent(&x(rank))).collect::<Result<Vec<_>, _>>()?;
        // The same rows, of bytes.
        let case = reference::Case { hidden: row, ..reference.case.clone() };
        let all = sent.iter().map(|x| Tokens { x: x.clone(), ids: Vec::new(), weights: Vec::new() });
        let bytes =
            Reference::<u8> { case, all: all.collect(), ids: Vec::new(), seen: reference.seen.clone() };
        let expected = bytes.rows(self.me(), |rank| sent[rank].clone());
        self.check_rows(what, rows, alive, (dtype, row), &expected)
    }

    /// Holds rows of so many bytes against these.
    fn check_rows(
        &mut self,
        what: &str,
        rows: &ExpertRows,
        alive: &LiveDispatch<E>,
        (dtype, row): (Dtype, usize),
        expected: &[u8],
    ) -> Result<(), TestError> {
        let mut seen = self.place.received(rows)?;
        match rows.slots() {
            Some(shape) => {
                let slots = seen.chunks_exact(shape.bytes() as usize);
                seen = slots.flat_map(|slot| slot[shape.rows_at() as usize..].to_vec()).collect();
                alive.blank(&mut seen, row, 0);
            }
            // Where a budget's sizes stay on the device, what lies beyond is undefined.
            None => seen.truncate(self.rows_seen(alive) * row),
        }
        self.compare(what, (dtype, row / dtype.size()), &alive.visible(&seen, row), expected);
        Ok(())
    }

    /// Holds what goes with rows against the choices of all ranks.
    fn check_metadata(&mut self, rows: &ExpertRows, alive: &LiveDispatch<E>) -> Result<(), TestError> {
        let LiveDispatch { reference, handle, me, .. } = alive;
        let words = reference.words();
        let (weights, mut experts) = reference.metadata(*me);
        let on_device = self.place.stream().is_some();
        let (seen_weights, seen_experts) = match rows.slots() {
            _ if !on_device => {
                (bytes_of(handle.row_weights()).to_vec(), bytes_of(handle.row_experts()).to_vec())
            }
            None => {
                let mut weights = self.place.read(&rows.weights()?)?;
                weights.truncate(self.rows_seen(alive) * words * 4);
                if reference.case.layout.is_per_rank() {
                    (weights, self.place.read(rows.experts()?)?)
                } else {
                    experts.clear();
                    (weights, Vec::new())
                }
            }
            Some(shape) => {
                let received = self.place.received(rows)?;
                let len = shape.max_tokens() as usize * words * 4;
                let array = |at: u64, unused: u8| -> Vec<u8> {
                    let slots = received.chunks_exact(shape.bytes() as usize);
                    let mut array =
                        slots.flat_map(|slot| slot[at as usize..][..len].to_vec()).collect::<Vec<_>>();
                    alive.blank(&mut array, words * 4, unused);
                    array
                };
                // Unused rows have no expert: -1.
                (array(shape.weights_at(), 0), array(shape.experts_at(), 0xff))
            }
        };
        let seen = alive.visible(&seen_weights, words * 4);
        self.compare("row weights", (Dtype::F32, words), &seen, bytes_of(&weights));
        let seen: Vec<i32> = bytemuck::pod_collect_to_vec(&alive.visible(&seen_experts, words * 4));
        self.compare_list("row experts", words, &seen, &experts);
        if on_device && rows.slots().is_none() {
            let seen: Vec<i64> = bytemuck::pod_collect_to_vec(&self.place.read(&rows.counts()?)?);
            let per_expert = &reference.seen.per_expert[*me][..];
            // Where rows are per rank, pads lie behind all experts.
            let expected = match reference.case.layout.is_per_rank() {
                true => per_expert.to_vec(),
                false => [per_expert, &reference.seen.padded[*me]].concat(),
            };
            self.compare_list("counts on the device", per_expert.len(), &seen, &expected);
        }
        Ok(())
    }

    /// Holds what the handle knows against the reference; where sizes stay on the device, what the
    /// stream finds of dropped choices.
    fn check_layout(
        &mut self,
        LiveDispatch { reference, handle, me, .. }: &LiveDispatch<E>,
    ) -> Result<(), TestError> {
        let (seen, me, k) = (&reference.seen, *me, reference.case.top_k as usize);
        self.compare_list("tokens", 1, &[handle.tokens()], &[reference.case.counts[me]]);
        if self.sizes_stay() {
            let mask = self.place.read(handle.dropped_mask()?)?;
            let mask: Vec<bool> = mask.iter().map(|&dropped| dropped != 0).collect();
            self.compare_list("dropped choices", k, &mask, &seen.dropped[me]);
            return Ok(());
        }
        // Rank-major, a device counts what its rows chose.
        let on_device = self.place.stream().is_some() && reference.case.layout == RowLayout::RankMajor;
        let per_expert = if on_device { &[][..] } else { &seen.per_expert[me] };
        self.compare_list("rows", 1, &[handle.rows() as usize], &[seen.rows[me].len()]);
        self.compare_list("required rows", 1, handle.required_rows(), &seen.required);
        self.compare_list("tokens per expert", 1, handle.tokens_per_expert(), per_expert);
        self.compare_list("padded rows", 1, handle.padded_tokens_per_expert(), &seen.padded[me]);
        self.compare_list("dropped choices", k, handle.dropped(), &seen.dropped[me]);
        let dropped_weight = handle.report()?.dropped_weight;
        self.compare_list("dropped weight", 1, &[dropped_weight], &[reference.dropped_weight(me)]);
        Ok(())
    }

    fn compare(&mut self, what: &str, shape: (Dtype, usize), seen: &[u8], expected: &[u8]) {
        self.found.extend(compare(self.ep.rank(), what, shape, seen, expected));
    }

    fn compare_list<T: PartialEq + Debug>(&mut self, what: &str, columns: usize, seen: &[T], expected: &[T]) {
        self.found.extend(compare_list(self.ep.rank(), what, columns, seen, expected));
    }

    fn check_tensor(&mut self, what: &str, seen: &Buffer, expected: &[E]) -> Result<(), TestError> {
        self.check_buffer(what, (E::DTYPE, self.settings.case.hidden), seen, bytes_of(expected))
    }

    fn check_words(&mut self, what: &str, seen: &Buffer, expected: &[f32]) -> Result<(), TestError> {
        self.check_buffer(what, (Dtype::F32, self.settings.case.top_k as usize), seen, bytes_of(expected))
    }

    fn check_buffer(
        &mut self,
        what: &str,
        shape: (Dtype, usize),
        seen: &Buffer,
        expected: &[u8],
    ) -> Result<(), TestError> {
        let seen = self.place.content(seen)?;
        self.compare(what, shape, &seen, expected);
        Ok(())
    }
}

/// A dispatch whose handle is alive, at this rank.
struct LiveDispatch<E> {
    reference: Reference<E>,
    handle: Handle,
    me: usize,
    /// Tensor of the last combine's rows.
    outputs: Cell<u32>,
}

impl<E: Real> LiveDispatch<E> {
    /// This rank's rows, in visible order.
    fn rows(&self) -> &[Option<Row>] {
        &self.reference.seen.rows[self.me]
    }

    /// The bytes of rows in visible order, as they lie.
    fn lying<T: bytemuck::NoUninit>(&self, rows: &[T]) -> Vec<u8> {
        let row = size_of_val(rows) / self.rows().len().max(1);
        Landing::of(self.handle.index()).lying(bytes_of(rows), row)
    }

    /// The bytes of rows that lie as they landed, in visible order.
    fn visible(&self, bytes: &[u8], row: usize) -> Vec<u8> {
        Landing::of(self.handle.index()).visible(bytes, row)
    }

    /// Fills unused rows, which are undefined in slots on a device.
    fn blank(&self, bytes: &mut [u8], row: usize, with: u8) {
        for (bytes, used) in bytes.chunks_exact_mut(row).zip(self.rows()) {
            if used.is_none() {
                bytes.fill(with);
            }
        }
    }
}

fn bytes_of<T: bytemuck::NoUninit>(content: &[T]) -> &[u8] {
    bytemuck::cast_slice(content)
}

fn choices<'b>(ids: &'b Buffer, weights: &'b Buffer) -> Result<Choices<'b>, TestError> {
    match (ids, weights) {
        (Buffer::Device(experts), Buffer::Device(weights)) => Ok(Choices::Device { experts, weights }),
        _ => Err(TestError::Lacks("choices on the host are no choices on a device")),
    }
}

/// Tensors of a dispatch and a combine.
pub struct Layer {
    /// Choices of a layer on the host.
    routing: Routing<'static>,
    x: Buffer,
    /// Type of `x`.
    sent: Dtype,
    ids: Buffer,
    weights: Buffer,
    out: Buffer,
    /// Type of `out`.
    returned: Dtype,
}

impl Layer {
    /// Writes other tokens, as many.
    fn write<E: Real>(
        &self,
        place: &Place,
        settings: &Settings,
        tokens: &Tokens<E>,
    ) -> Result<(), TestError> {
        let x = settings.sent(&tokens.x)?;
        let content = [&x[..], bytes_of(&tokens.ids), bytes_of(&tokens.weights)];
        for (to, bytes) in [&self.x, &self.ids, &self.weights].into_iter().zip(content) {
            if let Buffer::Device(to) = to {
                place.write(to, bytes)?;
            }
        }
        Ok(())
    }

    /// Starts the dispatch.
    pub fn start<'e>(&'e self, ep: &'e mut ExpertParallel) -> Result<PendingDispatch<'e>, TestError> {
        let chosen = match self.ids {
            Buffer::Host(..) => (&self.routing).into(),
            Buffer::Device(_) => choices(&self.ids, &self.weights)?,
        };
        Ok(ep.start_dispatch(self.x.tensor(self.sent), chosen)?)
    }

    /// Combines outputs of experts.
    pub fn combine(
        &mut self,
        ep: &mut ExpertParallel,
        y: ExpertOutput,
        handle: &Handle,
    ) -> Result<(), TestError> {
        Ok(ep.combine_into(y, handle, self.out.tensor_mut(self.returned))?)
    }

    /// Both, and experts that change nothing, as a graph; with its handle, which it may need.
    pub fn capture(
        &mut self,
        ep: &mut ExpertParallel,
        stream: &Stream,
    ) -> Result<(CudaGraph, Option<Handle>), TestError> {
        let mut kept = None;
        let graph = CudaGraph::capture(stream, || -> Result<(), TestError> {
            let (rows, handle) = self.start(ep)?.finish_async()?;
            let y = experts_copy(stream, &rows, &handle)?;
            self.combine(ep, y, &handle)?;
            kept = Some(handle);
            Ok(())
        })?;
        Ok((graph, kept))
    }
}

/// Enqueues experts whose outputs are the rows that came. Nothing waits for the host.
pub fn experts_copy(stream: &Stream, rows: &ExpertRows, handle: &Handle) -> Result<ExpertOutput, Error> {
    let (received, y) = (rows.range()?, handle.output()?);
    let Some(shape) = rows.slots() else {
        stream.copy(whole(y.range()?)?, whole(&received)?)?;
        return Ok(y);
    };
    let len = shape.bytes() - shape.rows_at();
    for source in 0..received.len() / shape.bytes() {
        let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
        stream.copy(y.range()?.span(source * len, len)?, from)?;
    }
    Ok(y)
}

/// A dispatch of tokens that NICs read in place.
fn from_token_buffer(
    ep: &mut ExpertParallel,
    x: Tensor<'_>,
    choices: Choices<'_>,
) -> Result<(ExpertRows, Handle), Error> {
    let tokens = match choices {
        Choices::Host(routing) => routing.tokens(),
        Choices::Device { experts, .. } => (experts.len() / (4 * u64::from(ep.top_k()))) as u32,
        _ => 0,
    };
    let mut buffer = ep.token_buffer(tokens)?;
    match (x, choices) {
        (Tensor::Host { bytes, dtype }, Choices::Host(routing)) => {
            buffer.rows_mut::<u8>()?.copy_from_slice(bytes);
            ep.dispatch(Tensor::Host { bytes: buffer.rows::<u8>()?, dtype }, routing)
        }
        (Tensor::Device { range, dtype }, choices) => {
            let here = buffer.range()?;
            if let (Some(stream), true) = (ep.stream(), !range.is_empty()) {
                stream.copy(here.span(0, range.len())?, range.span(0, range.len())?)?;
            }
            ep.dispatch(Tensor::device(here, dtype), choices)
        }
        (x, choices) => ep.dispatch(x, choices),
    }
}
