//! What the caller's thread enqueues.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::common::Common;
use super::handle::{Lease, PlannedCombine, PlannedDispatch, PlannedHandle, PlannedOutput};
use super::shape::{Bell, Shape};
use super::{PlannedBuilder, REFUSED};
use crate::device::{Kernels, MemoryOperations, Order, Range, Regroup, Stream, SumChoices};
use crate::dtype::Wire;
use crate::ep::ExpertParallelBuilder;
use crate::ep::guard::Guard;
use crate::ep::passage::Passage;
use crate::error::{CallError, DeviceError, Error, PlanError};
use crate::world::SymmetricRange;

/// A rank's tokens, where its device has them.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Rows, `[tokens, hidden]`, at a multiple of 16 bytes.
    pub x: &'a Range,
    /// Chosen experts, `i32 [tokens, top_k]`; -1 is dropped.
    pub experts: &'a Range,
    /// Routing weights, `f32 [tokens, top_k]`.
    pub weights: &'a Range,
}

/// MoE dispatch and combine on a CUDA stream: see the [module](crate::ep::planned).
///
/// All calls are collective over the group, go on the stream the exchange was built with, and come in the same order on all
/// ranks. Dropping the exchange waits until what was enqueued is served; graphs must have drained before.
///
/// ```no_run
/// # use std::sync::Arc;
/// use sidelane::device::{Driver, Priority, Stream};
/// use sidelane::ep::planned::{PlannedExchange, Tokens};
/// use sidelane::{Dtype, ExpertParallel, World};
/// # fn layer([x, experts, weights, out]: [sidelane::device::Range; 4]) -> sidelane::Result<()> {
/// let world = World::from_env()?;
/// let stream = Arc::new(Stream::new(&Driver::open()?.context(0)?, Priority::Usual)?);
/// let group = world.all()?;
/// let settings = ExpertParallel::builder(&group)?.experts(64).top_k(8).hidden(2048).dtype(Dtype::Bf16);
/// let mut exchange = PlannedExchange::builder(settings, Arc::clone(&stream)).build()?;
/// let dispatch = exchange.dispatch(Tokens { x: &x, experts: &experts, weights: &weights })?;
/// let (rows, handle) = dispatch.finish()?;               // sizes are known; rows are on their way
/// let y = handle.output()?;
/// // ... enqueue the experts on `stream`: from rows.rows()? to y.rows(), by handle.tokens_per_expert() ...
/// exchange.combine(y, &handle, &out)?;                   // `out` is there for what is enqueued next
/// # Ok(())
/// # }
/// ```
pub struct PlannedExchange {
    common: Arc<Common>,
    stream: Arc<Stream>,
    kernels: Arc<Kernels>,
    /// Per seat, where engines relay: what comes before the packing.
    listed: Vec<MemoryOperations>,
    /// Per seat: what follows the packing, and what follows the bell of a combine.
    packed: Vec<MemoryOperations>,
    offered: Vec<MemoryOperations>,
    /// Per seat: dispatches and combines enqueued.
    calls: Vec<(u64, u64)>,
    /// All dispatches.
    dispatches: u64,
    planner: Option<JoinHandle<()>>,
    _guard: Guard,
    /// Other nodes write to it as long as this lives.
    _passage: Passage,
    _control: SymmetricRange,
}

/// How long streams of a dead world are waited for when the exchange goes.
const DRAIN: Duration = Duration::from_secs(10);

/// What an exchange is made of.
pub(super) struct Parts {
    pub common: Arc<Common>,
    pub stream: Arc<Stream>,
    pub kernels: Kernels,
    pub planner: JoinHandle<()>,
    pub guard: Guard,
    pub passage: Passage,
    pub control: SymmetricRange,
}

impl PlannedExchange {
    /// From the settings of an [`ExpertParallel`](crate::ExpertParallel), for calls on this stream.
    pub fn builder<'g>(settings: ExpertParallelBuilder<'g>, stream: Arc<Stream>) -> PlannedBuilder<'g> {
        PlannedBuilder::new(settings, stream)
    }

    pub(super) fn new(parts: Parts) -> Result<Self, Error> {
        let Parts { common, stream, kernels, planner, guard, passage, control } = parts;
        let context = stream.context();
        let (mut listed, mut packed, mut offered) = (Vec::new(), Vec::new(), Vec::new());
        for seat in 0..common.shape.seats() {
            let mut list = MemoryOperations::with_capacity(context, 2);
            list.wait(common.word(seat, Bell::Listed)?, 1)?;
            list.write(common.word(seat, Bell::Listed)?, 0)?;
            listed.push(list);
            let mut list = MemoryOperations::with_capacity(context, 3);
            list.write(common.word(seat, Bell::Packed)?, 1)?;
            list.wait(common.word(seat, Bell::Dispatched)?, 1)?;
            list.write(common.word(seat, Bell::Dispatched)?, 0)?;
            packed.push(list);
            let mut list = MemoryOperations::with_capacity(context, 2);
            list.wait(common.word(seat, Bell::Combined)?, 1)?;
            list.write(common.word(seat, Bell::Combined)?, 0)?;
            offered.push(list);
        }
        let calls = vec![(0, 0); packed.len()];
        let planner = Some(planner);
        Ok(PlannedExchange {
            common,
            stream,
            kernels: Arc::new(kernels),
            listed,
            packed,
            offered,
            calls,
            dispatches: 0,
            planner,
            _guard: guard,
            _passage: passage,
            _control: control,
        })
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> u32 {
        self.common.fixed.lanes.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.common.fixed.lanes.ranks()
    }

    /// The stream of its calls.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Enqueues that every token goes to the ranks of its experts, and that the rows of this rank's experts come. Collective.
    /// What is enqueued afterwards finds the rows.
    ///
    /// With a budget it may be captured into a graph: replays read `tokens` anew, as many as there were. The seat is then
    /// the graph's for good. The first capture of a seat waits until earlier calls have been served.
    ///
    /// # Errors
    /// [`CallError::NoSeat`] if as many dispatches are alive as there are seats; then the call is not made, and the other
    /// ranks wait. [`DeviceError`](crate::error::DeviceError) ends the world. Bad input is reported by
    /// [`PlannedDispatch::finish`], on all ranks.
    pub fn dispatch(&mut self, tokens: Tokens<'_>) -> Result<PlannedDispatch, Error> {
        self.common.fixed.shared.hub.health().check()?;
        let captured = self.stream.is_capturing()?;
        let common = Arc::clone(&self.common);
        if captured && common.shape.budget().is_none() {
            let (parameter, expected) =
                ("mode", "a budget: a graph does not know the sizes of eager dispatches");
            return Err(PlanError::BadParameter { parameter, seen: 0, expected }.into());
        }
        let seats = common.shape.seats();
        let free = (0..seats).find(|&seat| common.seats[seat as usize].take());
        let seat = free.ok_or(CallError::NoSeat { seats })?;
        let (count, refused) = match self.check(tokens) {
            Ok(count) => (count, None),
            Err(error) => (0, Some(error)),
        };
        let (dispatches, _) = &mut self.calls[seat as usize];
        *dispatches += 1;
        self.dispatches += 1;
        let (nth, call) = (*dispatches, self.dispatches);
        let lease = Arc::new(Lease { common, seat, nth, call, tokens: count });
        self.begin(seat, captured)?;
        let rung = if refused.is_some() { REFUSED } else { count };
        self.enqueue_dispatch(seat, tokens, count, rung).map_err(|error| self.common.fixed.fail(error))?;
        let shape = &self.common.shape;
        let late = shape.arrives() && shape.budget().is_none();
        let regroups = late.then(|| (Arc::clone(&self.stream), Arc::clone(&self.kernels)));
        Ok(PlannedDispatch { lease, refused, regroups })
    }

    /// Enqueues that expert outputs come back to their tokens and are summed into `out`, `[tokens, hidden]`. Collective.
    ///
    /// # Errors
    /// [`CallError::ForeignHandle`]; then the call is not made, and the other ranks wait.
    /// [`DeviceError`](crate::error::DeviceError) ends the world. Bad input is reported by [`PlannedCombine::finish`], on all
    /// ranks.
    pub fn combine(
        &mut self,
        y: PlannedOutput,
        handle: &PlannedHandle,
        out: &Range,
    ) -> Result<PlannedCombine, Error> {
        let (lease, spec) = (self.own(handle)?, &self.common.fixed.spec);
        let kernels = Kernels::sum_choices_names(spec.dtype)?;
        let shape = (spec.hidden, spec.dtype.size());
        let unfit = check_tensor("combined tokens", out, lease.tokens.into(), shape, 16).err();
        // A sum that is refused leaves zeros, where there is room for them.
        let summed = unfit.is_none().then_some(out);
        let foreign = (!Arc::ptr_eq(&y.lease, &lease))
            .then(|| CallError::WrongOutput { seen: y.lease.call, expected: lease.call }.into());
        let refused = foreign.or(unfit);
        let steps = if refused.is_some() { REFUSED } else { (y.base / Shape::STEP) as u32 };
        let nth = self.offer(&lease, Some(y), steps, summed)?;
        Ok(PlannedCombine { lease, nth, kernels, refused })
    }

    /// Takes part in a combine that this rank cannot make, because it has no output to bring: the other ranks are told, as of
    /// bad input, and do not wait. Nobody's sums are more than zeros.
    ///
    /// # Errors
    /// As [`PlannedExchange::combine`].
    pub fn refuse_combine(&mut self, handle: &PlannedHandle) -> Result<(), Error> {
        let lease = self.own(handle)?;
        self.offer(&lease, None, REFUSED, None).map(drop)
    }

    /// The seat of a handle of this exchange.
    fn own(&self, handle: &PlannedHandle) -> Result<Arc<Lease>, Error> {
        self.common.fixed.shared.hub.health().check()?;
        let (seen, expected) = (handle.lease.common.instance, self.common.instance);
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(Arc::clone(&handle.lease))
    }

    /// Enqueues a combine, and says which of the seat's it is.
    fn offer(
        &mut self,
        lease: &Lease,
        y: Option<PlannedOutput>,
        steps: u32,
        out: Option<&Range>,
    ) -> Result<u64, Error> {
        let captured = self.stream.is_capturing()?;
        let (_, combines) = &mut self.calls[lease.seat as usize];
        *combines += 1;
        let nth = *combines;
        self.begin(lease.seat, captured)?;
        // Given back as of this call: no earlier one may use it.
        drop(y);
        let enqueued = self.enqueue_combine(lease.seat, lease.tokens, steps, out);
        enqueued.map_err(|error| self.common.fixed.fail(error))?;
        Ok(nth)
    }

    /// Counts a call that the planner will count as served: none of a seat that is a graph's.
    fn begin(&self, seat: u32, captured: bool) -> Result<(), Error> {
        let kept = &self.common.seats[seat as usize];
        match (captured, kept.is_captured()) {
            (true, false) => {
                self.served()?;
                kept.capture();
            }
            (false, false) => self.common.space.count(),
            (_, true) => (),
        }
        Ok(())
    }

    /// Waits until the planner has served what was enqueued, so that it tells these calls from replays.
    fn served(&self) -> Result<(), Error> {
        let common = &self.common;
        while common.served.load(Ordering::Acquire) < common.space.enqueued() {
            common.fixed.shared.hub.health().check()?;
            if common.gone.load(Ordering::Acquire) {
                return Err(PlanError::PlannerGone.into());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn enqueue_dispatch(
        &mut self,
        seat: u32,
        tokens: Tokens<'_>,
        count: u32,
        rung: u32,
    ) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        let choices = u64::from(count) * u64::from(spec.top_k) * 4;
        for (from, to) in
            [(tokens.experts, shape.host_experts(seat)), (tokens.weights, shape.host_weights(seat))]
        {
            stream.copy(common.host.range().span(to.0, choices)?, from.span(0, choices)?)?;
        }
        stream.write(common.word(seat, Bell::Dispatch)?, rung + 1)?;
        if shape.arrives() {
            stream.operate(&mut self.listed[seat as usize])?;
        }
        if count > 0 {
            let order = common.piece(shape.order(seat))?;
            let (map, rows) = (common.piece(shape.map())?, common.piece(shape.staging(seat))?);
            let entries = count * spec.top_k;
            // Where engines relay, the planner has said it.
            if !shape.arrives() {
                self.kernels.order(
                    stream,
                    &Order {
                        experts: tokens.experts.span(0, choices)?,
                        choices: entries,
                        top_k: spec.top_k,
                        bin_of: map.span(0, map.len())?,
                        n_experts: spec.map.experts(),
                        bins: common.fixed.bins.count(),
                        order: order.span(0, order.len())?,
                    },
                )?;
            }
            self.kernels.regroup(
                stream,
                &Regroup {
                    row_bytes: shape.row_bytes(),
                    sources: count,
                    rows: entries,
                    from: tokens.x.span(0, tokens.x.len())?,
                    index: order.span(0, order.len())?,
                    out: rows.span(0, rows.len())?,
                    status: common.word(seat, Bell::Status)?,
                },
            )?;
        }
        stream.operate(&mut self.packed[seat as usize])?;
        match shape.budget() {
            Some(landing) if shape.arrives() => {
                common.regroup(stream, &self.kernels, (seat, shape.rows(seat).0, landing.rows))
            }
            _ => Ok(()),
        }
    }

    fn enqueue_combine(
        &mut self,
        seat: u32,
        tokens: u32,
        steps: u32,
        out: Option<&Range>,
    ) -> Result<(), Error> {
        let (common, stream) = (&*self.common, &*self.stream);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        stream.write(common.word(seat, Bell::Combine)?, steps + 1)?;
        stream.operate(&mut self.offered[seat as usize])?;
        if let Some(out) = out.filter(|_| tokens > 0) {
            let (rows, summands) = (common.piece(shape.staging(seat))?, common.piece(shape.summands(seat))?);
            self.kernels.sum_choices(
                stream,
                &SumChoices {
                    tokens,
                    top_k: spec.top_k,
                    columns: spec.hidden as u32,
                    dtype: spec.dtype,
                    wire: Wire::F32,
                    n_rows: shape.entries() as u32,
                    rows: rows.span(0, rows.len())?,
                    index: summands.span(0, summands.len())?,
                    n_experts: spec.map.experts(),
                    experts: None,
                    weights: None,
                    group_of: None,
                    status: common.word(seat, Bell::Status)?,
                    out: out.span(0, out.len())?,
                },
            )?;
        }
        Ok(())
    }

    /// How many tokens there are.
    fn check(&self, tokens: Tokens<'_>) -> Result<u32, Error> {
        let spec = &self.common.fixed.spec;
        let top_k = spec.top_k as usize;
        let count = tokens.experts.len() / (top_k as u64 * 4);
        check_tensor("routing", tokens.experts, count, (top_k, 4), 4)?;
        check_tensor("routing weights", tokens.weights, count, (top_k, 4), 4)?;
        check_tensor("tokens", tokens.x, count, (spec.hidden, spec.dtype.size()), 16)?;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens: count, max: spec.max_tokens }.into());
        }
        Ok(count)
    }
}

/// Checks the shape of a tensor, and that kernels can read it: an address that is a multiple of `align`.
fn check_tensor(
    what: &'static str,
    tensor: &Range,
    rows: u64,
    (columns, size): (usize, usize),
    align: u64,
) -> Result<(), Error> {
    if tensor.len() != rows * (columns * size) as u64 {
        let (seen, rows) = (tensor.len() as usize / size, rows as usize);
        return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
    }
    if !tensor.address().is_multiple_of(align) {
        return Err(DeviceError::Misaligned { what, value: tensor.address(), align }.into());
    }
    Ok(())
}

impl Drop for PlannedExchange {
    fn drop(&mut self) {
        self.common.closing.store(true, Ordering::Release);
        if let Some(planner) = self.planner.take() {
            let _ = planner.join();
        }
        // The guard ends waits as long as it lives.
        let since = Instant::now();
        while self.common.fixed.shared.hub.health().check().is_err()
            && self.stream.is_done() == Ok(false)
            && since.elapsed() < DRAIN
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Debug for PlannedExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spec = &self.common.fixed.spec;
        f.debug_struct("PlannedExchange")
            .field("rank", &self.rank())
            .field("spec", spec)
            .finish_non_exhaustive()
    }
}
