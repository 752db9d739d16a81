//! How the calls of a seat went, as soon as it is known: from whatever drives them to whoever holds a handle.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::space::Extent;
use crate::bootstrap::{Health, interrupted};
use crate::error::{Error, PlanError};
use crate::exec::EnqueueCounts;

/// Between two looks of a thread whether the world is alive.
const SLICE: Duration = Duration::from_millis(10);

/// One seat: memory and words of a dispatch that is alive, and of the combines that follow it.
#[derive(Debug, Default)]
pub(super) struct DispatchContext {
    taken: AtomicBool,
    captured: AtomicBool,
    told: Mutex<ContextProgress>,
    changed: Condvar,
}

/// All that was told so far. Calls of a seat are counted from 1, dispatches and combines apart.
#[derive(Debug, Default)]
pub(super) struct ContextProgress {
    /// Dispatches whose placement, or refusal, is known.
    pub placed: u64,
    /// Dispatches that have landed.
    pub landed: u64,
    /// Combines that are home.
    pub home: u64,
    pub placement: PlacementInfo,
    /// Why the last dispatch was refused.
    pub refused: Option<Error>,
    /// Why the last combine was refused.
    pub combine_refused: Option<Error>,
    /// Where rows of the last dispatch land, where memory is not fixed.
    pub extent: Option<Extent>,
    /// What the last dispatch asked of the planner's stream.
    pub dispatched: EnqueueCounts,
    /// What the last combine asked of it.
    pub combined: EnqueueCounts,
}

/// The placement of a dispatch, as its caller sees it.
#[derive(Clone, Debug, Default)]
pub(super) struct PlacementInfo {
    /// The number of the call that made it.
    pub number: u64,
    pub rows: u32,
    /// Tokens went as they lay.
    pub in_place: bool,
    pub tokens_per_expert: Vec<i64>,
    pub padded_per_expert: Vec<i64>,
    pub dropped: Vec<bool>,
    pub required: Vec<u32>,
}

impl DispatchContext {
    /// Takes the seat, if it is free.
    pub fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Gives it back. What was captured into a graph stays taken.
    pub fn free(&self) {
        if !self.is_captured() {
            self.taken.store(false, Ordering::Release);
        }
    }

    /// From now on its calls are replays, of which nobody on the host knows.
    pub fn capture(&self) {
        self.captured.store(true, Ordering::Release);
    }

    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Acquire)
    }

    /// Says something, and wakes who waits for it.
    pub fn tell(&self, say: impl FnOnce(&mut ContextProgress)) {
        say(&mut self.told());
        self.changed.notify_all();
    }

    /// Waits until `known` has an answer.
    ///
    /// # Errors
    /// The world's cause of death; [`PlanError::PlannerGone`] if nobody will say anything any more;
    /// [`PlanError::Interrupted`].
    pub fn wait<T>(
        &self,
        health: &Health,
        gone: &AtomicBool,
        mut known: impl FnMut(&mut ContextProgress) -> Option<T>,
    ) -> Result<T, Error> {
        let mut told = self.told();
        loop {
            if let Some(answer) = known(&mut told) {
                return Ok(answer);
            }
            health.check()?;
            if gone.load(Ordering::Acquire) {
                return Err(PlanError::PlannerGone.into());
            }
            if interrupted() {
                return Err(PlanError::Interrupted.into());
            }
            told = self.changed.wait_timeout(told, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn told(&self) -> MutexGuard<'_, ContextProgress> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle that is alive: it follows the map of its dispatch.
#[derive(Debug)]
pub(super) struct Alive(Arc<AtomicU32>);

impl Alive {
    /// One more of these.
    pub fn new(handles: &Arc<AtomicU32>) -> Self {
        handles.fetch_add(1, Ordering::Relaxed);
        Alive(Arc::clone(handles))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
