//! The exchange, as its caller calls it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::common::Common;
use super::enqueue::Lists;
use super::handle::{Lease, PlannedCombine, PlannedDispatch, PlannedHandle, PlannedOutput};
use super::shape::Shape;
use super::tokens::{Tokens, check_tensor};
use super::{PlannedBuilder, REFUSED};
use crate::device::{Kernels, Range, Stream};
use crate::ep::ExpertParallelBuilder;
use crate::ep::guard::Guard;
use crate::ep::passage::Passage;
use crate::error::{CallError, Error, PlanError};
use crate::world::SymmetricRange;

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
    pub(super) common: Arc<Common>,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) lists: Lists,
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
        let lists = Lists::new(&common, stream.context())?;
        let calls = vec![(0, 0); common.shape.seats() as usize];
        let planner = Some(planner);
        Ok(PlannedExchange {
            common,
            stream,
            kernels: Arc::new(kernels),
            lists,
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
        let (count, refused) = match tokens.count(&self.common.fixed.spec) {
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
