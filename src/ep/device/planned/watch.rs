//! Deadlines for streams: a stream waits for words of its peers for ever, so somebody looks.
//!
//! When the caller's thread has enqueued a call, it says which words the stream awaits. A thread
//! looks at them from the moment when the stream has come to the call: what the caller's own work
//! needs before is nobody's fault. If a word is missing when the deadline has passed, the world
//! ends with the name of the rank that is late, and the guard lets the stream go. The caller may be
//! many calls ahead of its stream, so the oldest call whose words are not all there is the one that
//! counts.

use std::collections::VecDeque;
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
    calls: Mutex<Calls>,
    over: AtomicBool,
}

/// Calls whose words may be missing, in the order in which the stream makes them.
#[derive(Debug, Default)]
struct Calls {
    ahead: VecDeque<Expected>,
    /// Buffers of calls that have ended: a steady call allocates none.
    spare: Vec<Vec<Awaited>>,
}

/// What the stream awaits in one call.
#[derive(Debug)]
struct Expected {
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
    /// [`PlanError::NoWatch`] if there is no thread for it.
    pub fn new(fixed: &Arc<EpState>, words: &PinnedMemory) -> Result<Self, PlanError> {
        let (fixed, words) = (Arc::clone(fixed), words.clone());
        let (calls, over) = (Mutex::default(), AtomicBool::new(false));
        let watched = Arc::new(Watched { fixed, words, calls, over });
        let here = Arc::clone(&watched);
        let thread = std::thread::Builder::new().name("sidelane-watch".into());
        let thread = thread.spawn(move || here.look()).map_err(|_| PlanError::NoWatch)?;
        Ok(Watch { watched, thread: Some(thread) })
    }

    /// The stream awaits these words from its mark on.
    pub fn expect(&self, mark: u64, awaited: &[Awaited]) {
        if awaited.is_empty() {
            return;
        }
        let mut calls = self.watched.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // Words that cannot be read are the other thread's to report.
        let _ = self.watched.forget_ended(&mut calls);
        let mut words = calls.spare.pop().unwrap_or_default();
        words.extend_from_slice(awaited);
        calls.ahead.push_back(Expected { mark, awaited: words, since: None });
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

    /// The value of a word of this rank.
    fn seen(&self, from: u32, flag: Flag) -> Result<u64, DeviceError> {
        let ranks = self.fixed.lanes.ranks();
        let word = self.words.word(ControlLayout::flag(from, flag, ranks) as usize)?;
        Ok(word.load(Ordering::Acquire))
    }

    /// Forgets the oldest calls whose words are all there.
    fn forget_ended(&self, calls: &mut Calls) -> Result<(), DeviceError> {
        while let Some(oldest) = calls.ahead.front() {
            for &Awaited { from, flag, value } in &oldest.awaited {
                if self.seen(from, flag)? < value {
                    return Ok(());
                }
            }
            if let Some(mut ended) = calls.ahead.pop_front() {
                ended.awaited.clear();
                calls.spare.push(ended.awaited);
            }
        }
        Ok(())
    }

    /// The first word that is missing when the deadline has passed.
    fn late(&self, deadline: Duration) -> Result<Option<Error>, DeviceError> {
        let rank = self.fixed.lanes.rank;
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.forget_ended(&mut calls)?;
        let Some(oldest) = calls.ahead.front_mut() else { return Ok(None) };
        if self.seen(rank, Flag::Returned)? < oldest.mark {
            return Ok(None);
        }
        let waited = oldest.since.get_or_insert_with(Instant::now).elapsed();
        if waited < deadline {
            return Ok(None);
        }
        for &Awaited { from, flag, value } in &oldest.awaited {
            let (seen, flag) = (self.seen(from, flag)?, flag as u32);
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
