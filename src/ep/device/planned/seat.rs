//! How the calls of a seat went: from the enqueuer to whoever holds a handle.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::space::Extent;
use crate::error::Error;
use crate::exec::EnqueueCounts;

/// One seat: memory and flags of a dispatch that is alive, and of the returns that follow it.
#[derive(Debug, Default)]
pub(super) struct DispatchContext {
    taken: AtomicBool,
    told: Mutex<ContextProgress>,
}

/// How its last calls went.
#[derive(Debug, Default)]
pub(super) struct ContextProgress {
    /// Returns that are enqueued, counted from 1.
    pub home: u64,
    pub placement: PlacementInfo,
    /// Why the last dispatch was refused.
    pub refused: Option<Error>,
    /// Why the last return was refused.
    pub combine_refused: Option<Error>,
    /// Where rows of the last dispatch land.
    pub extent: Option<Extent>,
    /// What the last dispatch asked of the stream of copies.
    pub dispatched: EnqueueCounts,
    /// What the last return asked of it.
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

    /// Gives it back.
    pub fn free(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// Says something.
    pub fn tell(&self, say: impl FnOnce(&mut ContextProgress)) {
        say(&mut self.told());
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
