//! Deadlines for streams: a stream waits for words of its peers for ever, so somebody looks.
//!
//! When the caller's thread has enqueued a call, it says which words the stream awaits. A thread looks
//! at them from the moment when the stream has come to the call: what the caller's own work needs
//! before is nobody's fault. If a word is missing when the deadline has passed, the world ends with
//! the name of the rank that is late, and the guard lets the stream go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::PinnedMemory;
use crate::ep::fixed::EpState;
use crate::error::{DeviceError, Error, LaneError, PlanError};
use crate::exec::Awaited;
use crate::lane::COPY_ENGINE;
use crate::schedule::{ControlLayout, Flag};

/// Longest time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Watches the words that one stream awaits.
#[derive(Debug)]
pub(super) struct Watch {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watched {
    fixed: Arc<EpState>,
    /// This rank's words.
    words: PinnedMemory,
    last: Mutex<Last>,
    over: AtomicBool,
}

/// What the stream awaits in the last call.
#[derive(Debug, Default)]
struct Last {
    /// The stream leaves this mark when it has come to the call.
    mark: u64,
    awaited: Vec<Awaited>,
    /// When it was first seen that it has.
    since: Option<Instant>,
}

impl Watch {
    /// Starts to look at the words of this rank.
    ///
    /// # Errors
    /// [`PlanError::PlannerGone`] if there is no thread for it.
    pub fn new(fixed: &Arc<EpState>, words: &PinnedMemory) -> Result<Self, PlanError> {
        let (fixed, words) = (Arc::clone(fixed), words.clone());
        let (last, over) = (Mutex::default(), AtomicBool::new(false));
        let watched = Arc::new(Watched { fixed, words, last, over });
        let here = Arc::clone(&watched);
        let thread = std::thread::Builder::new().name("sidelane-watch".into());
        let thread = thread.spawn(move || here.look()).map_err(|_| PlanError::PlannerGone)?;
        Ok(Watch { watched, thread: Some(thread) })
    }

    /// The stream awaits these words from its mark on. A call that awaits none leaves those of the one before.
    pub fn expect(&self, mark: u64, awaited: &[Awaited]) {
        if awaited.is_empty() {
            return;
        }
        let mut last = self.watched.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.mark = mark;
        last.awaited.clear();
        last.awaited.extend_from_slice(awaited);
        last.since = None;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watched.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Watched {
    fn look(&self) {
        let lanes = &self.fixed.lanes;
        let period = (lanes.deadline / 16).min(PERIOD);
        while !self.over.load(Ordering::Acquire) && lanes.health.check().is_ok() {
            if let Ok(Some(late)) = self.late(lanes.deadline) {
                let _ = self.fixed.fail(late);
            }
            std::thread::park_timeout(period);
        }
    }

    /// The first word that is missing when the deadline has passed.
    fn late(&self, deadline: Duration) -> Result<Option<Error>, DeviceError> {
        let (rank, ranks) = (self.fixed.lanes.rank, self.fixed.lanes.ranks());
        let seen = |from, flag| {
            let word = self.words.word(ControlLayout::flag(from, flag, ranks) as usize)?;
            Ok::<_, DeviceError>(word.load(Ordering::Acquire))
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if seen(rank, Flag::Returned)? < last.mark {
            return Ok(None);
        }
        let waited = last.since.get_or_insert_with(Instant::now).elapsed();
        if waited < deadline {
            return Ok(None);
        }
        for &Awaited { from, flag, value } in &last.awaited {
            let (seen, flag) = (seen(from, flag)?, flag as u32);
            if seen < value {
                let (peer, lane, awaited) = (from, COPY_ENGINE, value);
                return Ok(Some(
                    LaneError::Deadline { rank, peer, lane, flag, awaited, seen, waited }.into(),
                ));
            }
        }
        Ok(None)
    }
}
