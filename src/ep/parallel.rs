//! The object that calls are made on, and how it drives them.

use std::sync::Arc;

use super::builder::Spec;
use super::fixed::{CHUNKS, Fixed, Ground, Room};
use super::flight::{Flight, Lent};
use super::gather::Gather;
use super::handle::Inner;
use super::host_call::HostCall;
use super::workspace::Workspace;
use super::{ExpertParallelBuilder, Handle, LaneUse, TokenBuffer};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::exec::{Until, drive};
use crate::memory::Pool;
use crate::plan::{ExpertMap, Strategy};
use crate::schedule::call::{Engines, RankPrograms, Relays};
use crate::world::Group;

/// MoE dispatch and combine over a group of ranks.
///
/// ```
/// use half::bf16;
/// use sidelane::{Dtype, World, gate::Routing};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut ep = sidelane::ExpertParallel::builder(&world.all()?)?
///             .experts(4).top_k(2).hidden(8).dtype(Dtype::Bf16).build()?;
///         let x = vec![bf16::ONE; 3 * 8];                                   // 3 tokens of 8 elements
///         let routing = Routing::new(2, vec![0, 3, 1, 2, 3, 0], vec![0.5; 6])?;
///         let (rows, handle) = ep.dispatch(&x, &routing)?;                  // rows of this rank's two experts
///         let mut y = handle.output()?;
///         y.rows_mut::<bf16>()?.copy_from_slice(rows.rows::<bf16>()?);      // experts that change nothing
///         let out = ep.combine::<bf16>(y, &handle)?;
///         assert_eq!(out, vec![bf16::from_f32(2.0); 3 * 8]);                // each token came back from 2 experts
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
pub struct ExpertParallel {
    /// What never changes, but for the expert map.
    pub(super) fixed: Arc<Fixed>,
    pub(super) programs: Arc<RankPrograms>,
    /// What calls use again.
    pub(super) space: Workspace,
    /// How rows go out, if not by exchange.
    pub(super) gather: Option<Box<Gather>>,
}

impl ExpertParallel {
    /// Starts to describe one.
    ///
    /// # Errors
    /// [`PlanError`] if the group is empty.
    pub fn builder(group: &Group) -> Result<ExpertParallelBuilder<'_>, PlanError> {
        ExpertParallelBuilder::new(group)
    }

    pub(super) fn new(group: &Group, spec: Spec) -> Result<Self, Error> {
        let gather = match spec.strategy {
            Strategy::Exchange => None,
            Strategy::Gather => Some(Box::new(Gather::new(group, &spec)?)),
        };
        let total = group.shared.heap.pool().total();
        let room = Room { total, space: "pool", setting: "SIDELANE_HEAP" };
        let (fixed, range) = Fixed::new(group, spec, room, Ground::Near)?;
        let fixed = Arc::new(fixed);
        let programs =
            RankPrograms::new(fixed.paths(), CHUNKS, fixed.partial_bytes().is_some(), Engines::default());
        let space = Workspace::new(&fixed, range);
        Ok(ExpertParallel { fixed, programs: Arc::new(programs), space, gather })
    }

    /// Enters a call, and drives it.
    ///
    /// # Errors
    /// Why the call was refused; those that end the world.
    pub(super) fn enter(&mut self, flight: &mut Flight, lent: Lent<'_>, until: Until) -> Result<(), Error> {
        self.fixed.shared.hub.health().check()?;
        self.space.calls.enter();
        self.proceed(flight, lent, until)
    }

    /// Drives a call that was entered.
    ///
    /// # Errors
    /// As [`ExpertParallel::enter`].
    pub(super) fn proceed(&mut self, flight: &mut Flight, lent: Lent<'_>, until: Until) -> Result<(), Error> {
        let ExpertParallel { fixed, programs, space, .. } = self;
        let relays = if flight.offloaded { Relays::Thread } else { Relays::Inline };
        let (mut machine, program) = (flight.machine, programs.own(flight.kind(), relays));
        let mut call = HostCall { fixed, programs, space, flight: &mut *flight, lent };
        let driven = drive(&mut machine, program, &mut call, until);
        flight.machine = machine;
        match driven {
            Ok(None) => Ok(()),
            Ok(Some(refusal)) => Err(refusal),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> u32 {
        self.fixed.lanes.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.fixed.lanes.ranks()
    }

    /// Where experts live.
    pub fn expert_map(&self) -> &ExpertMap {
        &self.fixed.spec.map
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.fixed.spec.hidden
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.fixed.spec.top_k
    }

    /// A buffer for rows to be dispatched, which network cards read in place.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn token_buffer(&self, tokens: u32) -> Result<TokenBuffer, Error> {
        let row_bytes = self.spec().sizing(CallKind::Dispatch, None).row_bytes;
        let extent = self.pool().take(u64::from(tokens) * row_bytes)?;
        Ok(TokenBuffer { extent, tokens, row_bytes })
    }

    /// The pool rows are received in.
    pub fn pool(&self) -> &Arc<Pool> {
        self.fixed.pool()
    }

    /// The lanes of this group, and how many ranks each reaches.
    pub fn lanes(&self) -> &[LaneUse] {
        &self.space.lane_use
    }

    pub(super) fn spec(&self) -> &Spec {
        &self.fixed.spec
    }

    pub(super) fn fail(&self, error: Error) -> Error {
        self.fixed.fail(error)
    }

    /// Whether a handle is one of this instance.
    pub(super) fn check_handle(&self, handle: &Handle) -> Result<(), Error> {
        let (seen, expected) = (handle.inner().instance, self.space.instance);
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    pub(super) fn handle_of(&self, inner: Inner) -> Handle {
        self.space.handle_of(inner, self.pool())
    }

    /// Makes one call, and does this once all ranks have agreed on it: from then on it is not refused, and what is left of it
    /// is to move rows. Not invoked for refused calls, nor for dispatches by [`Strategy::Gather`]. The gradient of a weighted
    /// combine is two calls, and the first invokes it: so it is not for that.
    pub(crate) fn on_agreed<R>(
        &mut self,
        agreed: impl FnOnce() + Send + Sync + 'static,
        call: impl FnOnce(&mut Self) -> R,
    ) -> R {
        self.space.on_agreed = Some(Box::new(agreed));
        let done = call(self);
        self.space.on_agreed = None;
        done
    }
}

impl std::fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertParallel").field("rank", &self.rank()).field("spec", self.spec()).finish()
    }
}
