//! Handle of a dispatch in fixed slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::atomic::AtomicCell;

use crate::device::DeviceRange;
use crate::ep::device::guard::Words;
use crate::ep::{CallExecutor, LaneUse, Report, Status};
use crate::error::Error;
use crate::exec::EnqueueCounts;
use crate::plan::SlotShape;
use crate::world::{NoGpuDirect, Registration};

/// State that all handles of an exchange share.
#[derive(Debug)]
pub(super) struct Facts {
    /// Number that distinguishes exchanges of a process.
    pub instance: u64,
    /// Where experts leave their partial rows, and how many there are.
    pub partials: DeviceRange,
    pub rows: u32,
    /// The words of the host, and the place of the status among them. No clone or range of their
    /// memory: it would count as a stream that still uses them.
    pub words: Arc<Words>,
    pub status: u64,
    pub lanes: Vec<LaneUse>,
    pub same_device: u32,
    pub detour: Option<NoGpuDirect>,
    pub registration: Option<Registration>,
}

impl Facts {
    /// A report of what was enqueued, and of the kernels around it.
    fn report(&self, enqueued: EnqueueCounts, kernels: &[&'static str]) -> Report {
        let Facts { same_device, detour, registration, .. } = *self;
        let (executor, lanes, kernels) =
            (CallExecutor::ConstantProgram, self.lanes.clone(), kernels.to_vec());
        Report { executor, lanes, enqueued, kernels, same_device, detour, registration, ..Report::default() }
    }
}

/// Slots as they were received.
#[derive(Debug)]
pub(in crate::ep) struct SlotRows {
    pub received: DeviceRange,
    pub shape: SlotShape,
    pub(super) ranks: u32,
}

impl SlotRows {
    /// Rows of all slots, used or not.
    pub fn len(&self) -> u32 {
        self.ranks * self.shape.max_tokens()
    }
}

/// A dispatch in slots. Its addresses are those of every other one.
#[derive(Debug)]
pub(in crate::ep) struct SlotHandle {
    pub(super) facts: Arc<Facts>,
    /// Which dispatch of the exchange it is.
    pub(super) nth: u64,
    tokens: u32,
    dispatched: EnqueueCounts,
    combined: AtomicCell<Option<EnqueueCounts>>,
    copied: AtomicU64,
}

impl SlotHandle {
    pub(super) fn new(facts: Arc<Facts>, (nth, tokens): (u64, u32), dispatched: EnqueueCounts) -> Self {
        let (combined, copied) = (AtomicCell::default(), AtomicU64::new(0));
        SlotHandle { facts, nth, tokens, dispatched, combined, copied }
    }

    pub(super) fn combined(&self, enqueued: EnqueueCounts) {
        self.combined.store(Some(enqueued));
    }

    pub(super) fn count_copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The number of its instance.
    pub fn instance(&self) -> u64 {
        self.facts.instance
    }

    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    pub fn copied_bytes(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Where experts leave their partial rows.
    pub fn output(&self) -> SlotOutput {
        let (facts, partials) = (Arc::clone(&self.facts), self.facts.partials.clone());
        SlotOutput { facts, nth: self.nth, partials }
    }

    /// How the bytes of the dispatch went.
    pub fn report(&self) -> Report {
        self.facts.report(self.dispatched, &["pack", "check"])
    }

    /// How those of the combine went; nothing before there was one.
    pub fn returned(&self) -> Report {
        match self.combined.load() {
            Some(enqueued) => self.facts.report(enqueued, &["sum"]),
            None => self.facts.report(EnqueueCounts::default(), &[]),
        }
    }

    /// The status word, for kernels. It claims the words, not their memory, so it does not count as
    /// a stream that still uses them.
    pub fn status(&self) -> Result<DeviceRange, Error> {
        Ok(DeviceRange::part_of(&self.facts.words, Words::range, (self.facts.status, 4))?)
    }

    /// The status word as the host sees it.
    pub fn status_now(&self) -> Status {
        Status(self.facts.words.get(self.facts.status as usize) as u32)
    }
}

/// Memory for partial rows: the same in every call.
#[derive(Debug)]
pub(in crate::ep) struct SlotOutput {
    pub(super) facts: Arc<Facts>,
    pub(super) nth: u64,
    pub partials: DeviceRange,
}

impl SlotOutput {
    /// The number of its instance.
    pub fn instance(&self) -> u64 {
        self.facts.instance
    }

    /// Rows of all ranks, used or not.
    pub fn len(&self) -> u32 {
        self.facts.rows
    }
}
