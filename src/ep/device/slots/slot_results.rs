//! Handle of a dispatch in fixed slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use super::expansion::Expansion;
use crate::device::DeviceRange;
use crate::ep::device::watchdog::Words;
use crate::ep::report::{CallKernels, NO_KERNELS};
use crate::ep::{CallExecutor, LaneUse, Report, Status};
use crate::error::{DeviceError, Error};
use crate::exec::EnqueueCounts;
use crate::plan::SlotShape;
use crate::world::{NoGpuDirect, Registration};

/// State that all handles of an exchange share.
#[derive(Debug)]
pub(super) struct ExchangeState {
    /// Number that distinguishes exchanges of a process.
    pub instance: u64,
    /// Where experts leave their rows, and how many there are.
    pub outputs: DeviceRange,
    pub rows: u32,
    /// The words of the host, and the place of the verdict of the last call among them. No clone or
    /// range of their memory: it would count as a stream that still uses them.
    pub words: Arc<Words>,
    pub verdict: u64,
    /// Kernels of a dispatch, and of a combine.
    pub kernels: [CallKernels; 2],
    pub max_blocks: Option<u32>,
    pub lanes: Vec<LaneUse>,
    pub same_device: u32,
    pub no_gpu_direct: Option<NoGpuDirect>,
    pub registration: Option<Registration>,
}

impl ExchangeState {
    /// How the last call that the stream has come to ended here, as the host sees it, and the
    /// number of that call, modulo 2^32.
    pub fn verdict(&self) -> (Status, u32) {
        let word = self.words.get(self.verdict as usize);
        (Status(word as u32), (word >> 32) as u32)
    }

    /// A report of what was enqueued, and of the kernels around it.
    fn report(&self, enqueued: EnqueueCounts, kernels: CallKernels) -> Report {
        let ExchangeState { max_blocks, same_device, no_gpu_direct: host_staged, registration, .. } = *self;
        let kernels = kernels.into_iter().flatten().collect();
        let (executor, lanes) = (CallExecutor::ConstantProgram, self.lanes.clone());
        Report {
            executor,
            lanes,
            enqueued,
            kernels,
            max_blocks,
            same_device,
            host_staged,
            registration,
            ..Report::default()
        }
    }
}

/// Slots as they were received.
#[derive(Debug)]
pub(in crate::ep) struct SlotRows {
    pub received: DeviceRange,
    pub shape: SlotShape,
    pub(super) ranks: u32,
    /// Within a budget: what they are expanded to.
    pub expanded: Option<ExpandedRows>,
}

/// Expert-major rows within a budget.
#[derive(Debug)]
pub(in crate::ep) struct ExpandedRows {
    budget: u32,
    pub rows: DeviceRange,
    pub weights: DeviceRange,
    pub counts: DeviceRange,
}

impl ExpandedRows {
    pub(super) fn of(expansion: &Expansion) -> Result<Self, DeviceError> {
        let (rows, weights) = (expansion.rows().clone(), expansion.weights().clone());
        Ok(ExpandedRows { budget: expansion.budget(), rows, weights, counts: expansion.counts()? })
    }
}

impl SlotRows {
    /// Rows of all slots, used or not; within a budget, as many as it has.
    pub fn len(&self) -> u32 {
        self.expanded.as_ref().map_or(self.ranks * self.shape.max_tokens(), |rows| rows.budget)
    }
}

/// A dispatch in slots. Its addresses are those of every other one.
#[derive(Debug)]
pub(in crate::ep) struct SlotHandle {
    pub(super) facts: Arc<ExchangeState>,
    /// Which dispatch of the exchange it is.
    pub(super) nth: u64,
    tokens: u32,
    /// Whether each choice was dropped.
    dropped: DeviceRange,
    dispatched: EnqueueCounts,
    combined: AtomicCell<Option<EnqueueCounts>>,
    copied: AtomicU64,
}

impl SlotHandle {
    pub(super) fn new(
        facts: Arc<ExchangeState>,
        (nth, tokens): (u64, u32),
        dropped: DeviceRange,
        dispatched: EnqueueCounts,
    ) -> Self {
        let (combined, copied) = (AtomicCell::default(), AtomicU64::new(0));
        SlotHandle { facts, nth, tokens, dropped, dispatched, combined, copied }
    }

    pub(super) fn combined(&self, enqueued: EnqueueCounts) {
        self.combined.store(Some(enqueued));
    }

    pub(super) fn count_copied(&self, bytes: u64) {
        // Relaxed: a figure of the report, which guards nothing.
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
        // Relaxed: as above.
        self.copied.load(Ordering::Relaxed)
    }

    /// Whether each choice was dropped, as the stream finds it.
    pub fn dropped(&self) -> &DeviceRange {
        &self.dropped
    }

    /// Where experts leave their rows.
    pub fn output(&self) -> SlotOutput {
        let (facts, rows) = (Arc::clone(&self.facts), self.facts.outputs.clone());
        SlotOutput { facts, nth: self.nth, rows }
    }

    /// How the bytes of the dispatch went.
    pub fn report(&self) -> Report {
        self.facts.report(self.dispatched, self.facts.kernels[0])
    }

    /// How those of the combine went; nothing before there was one.
    pub fn return_report(&self) -> Report {
        match self.combined.load() {
            Some(enqueued) => self.facts.report(enqueued, self.facts.kernels[1]),
            None => self.facts.report(EnqueueCounts::default(), NO_KERNELS),
        }
    }

    /// The status word, for kernels. It claims the words, not their memory, so it does not count as
    /// a stream that still uses them.
    pub fn status(&self) -> Result<DeviceRange, Error> {
        Ok(DeviceRange::part_of(&self.facts.words, Words::range, (self.facts.verdict, 4))?)
    }

    /// The status word as the host sees it.
    pub fn status_now(&self) -> Status {
        self.facts.verdict().0
    }
}

/// Memory for what experts make: the same in every call.
#[derive(Debug)]
pub(in crate::ep) struct SlotOutput {
    pub(super) facts: Arc<ExchangeState>,
    pub(super) nth: u64,
    pub rows: DeviceRange,
}

impl SlotOutput {
    /// The number of its instance.
    pub fn instance(&self) -> u64 {
        self.facts.instance
    }

    /// Number of rows, used or not.
    pub fn len(&self) -> u32 {
        self.facts.rows
    }
}
