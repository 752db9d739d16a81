//! What the caller's thread holds of a call: its rows, its placement, its outputs, and how it went.

use std::sync::Arc;

use super::common::Common;
use super::seat::{Placement, Told};
use super::shape::Bell;
use super::space::Extent;
use super::status::Status;
use crate::device::{Kernels, Range, Stream};
use crate::ep::LaneUse;
use crate::error::{Error, PlanError};
use crate::exec::Enqueued;
use crate::lane::COPY_ENGINE;
use crate::plan::Chunk;
use crate::world::{Detour, Registration};

/// A seat, as long as anything of its dispatch is alive.
#[derive(Debug)]
pub(super) struct Lease {
    pub common: Arc<Common>,
    pub seat: u32,
    /// Which dispatch of the seat it is.
    pub nth: u64,
    /// Which dispatch of the exchange it is.
    pub call: u64,
    pub tokens: u32,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.common.seats[self.seat as usize].free();
    }
}

impl Lease {
    fn told<T>(&self, known: impl FnMut(&mut Told) -> Option<T>) -> Result<T, Error> {
        let common = &self.common;
        let seat = &common.seats[self.seat as usize];
        if seat.is_captured() {
            let (parameter, expected) =
                ("a captured call", "to be asked on the device: its host does not know of replays");
            return Err(PlanError::BadParameter { parameter, seen: self.seat.into(), expected }.into());
        }
        seat.wait(common.fixed.shared.hub.health(), &common.gone, known)
    }

    /// The status word of the seat, as devices read it.
    fn status_word(&self) -> Result<Range, Error> {
        Ok(self.common.host_piece((self.common.shape.bell(self.seat, Bell::Status), 4))?)
    }
}

/// A dispatch that is enqueued.
#[derive(Debug)]
pub struct PlannedDispatch {
    pub(super) lease: Arc<Lease>,
    /// What is wrong with this rank's input.
    pub(super) refused: Option<Error>,
    /// What puts rows into visible order, once it is known where they are.
    pub(super) regroups: Option<(Arc<Stream>, Arc<Kernels>)>,
}

impl PlannedDispatch {
    /// Waits until all ranks have said how many rows they have: not for the rows. Work on them can be enqueued then; where
    /// engines relay, behind the kernel that puts them into visible order, which this enqueues.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`](crate::ExpertParallel::dispatch). After those that leave the world usable the stream
    /// goes on with no rows, and the status word says why.
    pub fn finish(self) -> Result<(PlannedRows, PlannedHandle), Error> {
        let nth = self.lease.nth;
        let told = self.lease.told(|told| {
            (told.placed >= nth).then(|| match told.refused.take() {
                Some(error) => Err(error),
                None => Ok((told.placement.clone(), told.extent.take())),
            })
        })?;
        let (placement, extent) = match (told, self.refused) {
            (Err(Error::Plan(PlanError::RefusedHere)), Some(own)) => return Err(own),
            (told, _) => told?,
        };
        if let (Some((stream, kernels)), Some(extent)) = (self.regroups, &extent) {
            let (common, place) = (&self.lease.common, (self.lease.seat, extent.offset(), placement.rows));
            common.regroup(&stream, &kernels, place).map_err(|error| common.fixed.fail(error))?;
        }
        Self::land(self.lease, Some(placement), extent)
    }

    /// With a budget: goes on without waiting. How many rows come stands on the device
    /// ([`PlannedRows::counts`]), and [`PlannedHandle::status`] says whether they came.
    ///
    /// # Errors
    /// What was wrong with this rank's input; [`PlanError::BadParameter`] in eager mode, where rows have no place before
    /// their number is known.
    pub fn unfinished(self) -> Result<(PlannedRows, PlannedHandle), Error> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        if self.lease.common.shape.budget().is_none() {
            let (parameter, expected) = ("mode", "a budget: otherwise finish says where rows are");
            return Err(PlanError::BadParameter { parameter, seen: 0, expected }.into());
        }
        Self::land(self.lease, None, None)
    }

    fn land(
        lease: Arc<Lease>,
        placement: Option<Placement>,
        extent: Option<Extent>,
    ) -> Result<(PlannedRows, PlannedHandle), Error> {
        let (common, seat) = (&lease.common, lease.seat);
        let landed = placement.as_ref().map_or(0, |placement| placement.rows);
        let shape = &common.shape;
        let landing = shape.landing(landed);
        let base = extent.as_ref().map_or(shape.rows(seat).0, Extent::offset);
        let counts = common.piece(shape.counts(seat))?;
        let memory = common.piece((base, landing.bytes()))?;
        let arrived = match shape.arrives() {
            true => {
                let (index, end) = shape.landing(landed).arrivals();
                let at = landing.bytes();
                Some((common.piece((base + at, index - at))?, common.piece((base + index, end - index))?))
            }
            false => None,
        };
        let lease_of_rows = Arc::clone(&lease);
        let rows = PlannedRows { memory, counts, landing, arrived, _extent: extent, _lease: lease_of_rows };
        Ok((rows, PlannedHandle { placement: placement.unwrap_or_default(), lease }))
    }
}

/// Rows that were received, `[rows, hidden]`: (local expert, source rank, token). They are there for what is enqueued on the
/// exchange's stream after the dispatch. Their memory is given back when this is dropped, to calls enqueued later.
#[derive(Debug)]
pub struct PlannedRows {
    memory: Range,
    counts: Range,
    landing: Chunk,
    /// Where engines relay: rows as they arrived, and which is which.
    arrived: Option<(Range, Range)>,
    _extent: Option<Extent>,
    _lease: Arc<Lease>,
}

impl PlannedRows {
    /// The rows, `[rows, hidden]`; with a budget, as many as it has, of which those beyond the segments are undefined.
    ///
    /// # Errors
    /// None in practice: they lie inside their memory.
    pub fn rows(&self) -> Result<Range, Error> {
        Ok(self.memory.part(0, u64::from(self.landing.rows) * self.landing.row_bytes)?)
    }

    /// The routing weight of each row, `f32 [rows]`; 0 for pad rows.
    ///
    /// # Errors
    /// None in practice: they lie inside their memory.
    pub fn weights(&self) -> Result<Range, Error> {
        Ok(self.memory.part(self.landing.notes_at(), self.landing.notes * 4)?)
    }

    /// Where engines relay: rows as they arrived, and for each visible row which of them it is, `i32 [rows]`, -1 of pads. A
    /// grouped matrix product that takes an index can read them as they are; [`PlannedRows::rows`] are made of them.
    pub fn index(&self) -> Option<(&Range, &Range)> {
        self.arrived.as_ref().map(|(rows, index)| (rows, index))
    }

    /// Rows of each local expert, then the same with pads: `i64 [2, local experts]`.
    pub fn counts(&self) -> &Range {
        &self.counts
    }
}

/// The placement of one dispatch. Combines follow it.
#[derive(Debug)]
pub struct PlannedHandle {
    pub(super) lease: Arc<Lease>,
    placement: Placement,
}

impl PlannedHandle {
    /// Rows of each local expert; empty if the dispatch was not finished.
    pub fn tokens_per_expert(&self) -> &[i64] {
        &self.placement.tokens_per_expert
    }

    /// The same, pads counted: the segments of the rows.
    pub fn padded_tokens_per_expert(&self) -> &[i64] {
        &self.placement.padded_per_expert
    }

    /// Which of this rank's choices, `[tokens, top_k]`, were dropped for want of room.
    pub fn dropped(&self) -> &[bool] {
        &self.placement.dropped
    }

    /// Rows that each rank needed, pads counted; the same at every rank.
    pub fn required_rows(&self) -> &[u32] {
        &self.placement.required
    }

    /// Rows received, pads counted.
    pub fn len(&self) -> u32 {
        self.placement.rows
    }

    /// Whether no row came.
    pub fn is_empty(&self) -> bool {
        self.placement.rows == 0
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        self.lease.tokens
    }

    /// A buffer of the rows' shape where peers can read it: experts write into it. Its contents are undefined.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn output(&self) -> Result<PlannedOutput, Error> {
        let Lease { common, seat, .. } = &*self.lease;
        let (shape, rank) = (&common.shape, common.fixed.lanes.rank);
        let offer = shape.offer(self.placement.rows);
        let (base, extent) = match shape.budget() {
            Some(_) => (shape.output(*seat).0, None),
            None => {
                let taken = common.space.take(offer.bytes());
                let extent = taken.map_err(|free| common.fixed.room.lacks(rank, offer.bytes(), free))?;
                (extent.offset(), Some(extent))
            }
        };
        let rows = common.piece((base, u64::from(offer.rows) * offer.row_bytes))?;
        Ok(PlannedOutput { rows, base, _extent: extent, lease: Arc::clone(&self.lease) })
    }

    /// How the last call of this dispatch or its combines ended at this rank: a [`Status`] of 32 bits, for kernels. It is
    /// written before the stream goes on.
    ///
    /// # Errors
    /// None in practice.
    pub fn status(&self) -> Result<Range, Error> {
        self.lease.status_word()
    }

    /// The same, for the host; what it says is sure once the stream has come by.
    pub fn status_now(&self) -> Status {
        let word = self.lease.common.bell(self.lease.seat, Bell::Status);
        Status(word.map_or(0, |word| word.load(std::sync::atomic::Ordering::Acquire) as u32))
    }

    /// How the bytes of the dispatch went. Waits until its rows have landed.
    ///
    /// # Errors
    /// The world's cause of death.
    pub fn report(&self) -> Result<PlannedReport, Error> {
        let nth = self.lease.nth;
        let enqueued = self.lease.told(|told| (told.landed >= nth).then_some(told.dispatched))?;
        let relayed = self.lease.common.shape.arrives();
        let kernels = if relayed { &["regroup", "regroup"] } else { &["order", "regroup"] };
        Ok(PlannedReport::new(&self.lease.common, enqueued, kernels))
    }
}

/// What experts write.
#[derive(Debug)]
pub struct PlannedOutput {
    pub(super) rows: Range,
    pub(super) base: u64,
    pub(super) _extent: Option<Extent>,
    pub(super) lease: Arc<Lease>,
}

impl PlannedOutput {
    /// The rows, `[rows, hidden]`, to write to. What pad rows hold is never read.
    pub fn rows(&self) -> &Range {
        &self.rows
    }
}

/// A combine that is enqueued. There is no need to finish it.
#[derive(Debug)]
pub struct PlannedCombine {
    pub(super) lease: Arc<Lease>,
    /// Which combine of the seat it is.
    pub(super) nth: u64,
    pub(super) kernels: &'static [&'static str],
    pub(super) refused: Option<Error>,
}

impl PlannedCombine {
    /// Says at once what was wrong with this rank's input; the other ranks hear of it when they finish.
    ///
    /// # Errors
    /// As [`PlannedCombine::finish`], for this rank's own input.
    pub fn accepted(self) -> Result<Self, Error> {
        match self.refused {
            Some(refused) => Err(refused),
            None => Ok(self),
        }
    }

    /// Waits until the rows are home, though not for their sums. To be asked before another combine of the same dispatch is
    /// enqueued: the last one answers.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`](crate::ExpertParallel::combine). After those that leave the world usable the sums are
    /// zeros.
    pub fn finish(self) -> Result<PlannedReport, Error> {
        let nth = self.nth;
        let told = self.lease.told(|told| {
            (told.home >= nth).then(|| match told.combine_refused.take() {
                Some(error) => Err(error),
                None => Ok(told.combined),
            })
        })?;
        let enqueued = match (told, self.refused) {
            (Err(Error::Plan(PlanError::RefusedHere)), Some(own)) => return Err(own),
            (told, _) => told?,
        };
        Ok(PlannedReport::new(&self.lease.common, enqueued, self.kernels))
    }
}

/// How the bytes of one call went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedReport {
    /// Per lane: how many ranks are reached over it.
    pub lanes: Vec<LaneUse>,
    /// Why rows that cross go by memory of the host, if any do: from the device to that, over the rail, and from the host's
    /// memory there to the device. [`Enqueued::out_bytes`] and [`Enqueued::in_bytes`] did.
    pub detour: Option<Detour>,
    /// How cards know the device's memory, where they read rows that cross from there and write them there:
    /// [`Enqueued::straight_bytes`] did.
    pub registration: Option<Registration>,
    /// What the planner's stream was asked to do.
    pub enqueued: Enqueued,
    /// Kernels that ran on the caller's stream: before rows were packed, or after they had landed. In between, what
    /// [`Enqueued::copies_by_sms`] counts, and nothing else.
    pub kernels: &'static [&'static str],
}

impl PlannedReport {
    fn new(common: &Common, enqueued: Enqueued, kernels: &'static [&'static str]) -> Self {
        let mut lanes = LaneUse::of(&common.fixed.lanes);
        for used in lanes.iter_mut().filter(|used| used.lane == "shm") {
            used.lane = COPY_ENGINE;
        }
        lanes.sort_by_key(|used| (used.lane != "own", used.lane != COPY_ENGINE, used.lane));
        let (detour, registration) = (common.detour, common.registration);
        PlannedReport { lanes, detour, registration, enqueued, kernels }
    }
}
