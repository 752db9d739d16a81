//! The planner: a thread that does for a stream what the caller of an [`ExpertParallel`](crate::ExpertParallel) does.
//!
//! It looks at the bells of its seats, and serves one call after the other by the programs that the host steps, too: the
//! same licences, entries, counts and placement, the same judgement. Rows go by its stream ([`Engine`]). With several nodes it
//! plays this rank's relay, too, at the places of launch order: own puts and signals, what is relayed, own waits.
//!
//! Calls come in the order of the caller's stream, so no two bells are set at once: each call's wait stands before the
//! next call's bell.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::common::Common;
use super::shape::{Bell, Piece};
use crate::device::Range;
use crate::ep::Status;
use crate::ep::agreement::GroupCounts;
use crate::ep::host::CancelOnPanic;
use crate::ep::relay::Relay;
use crate::error::Error;
use crate::exec::Engine;
use crate::plan::{Arrivals, Crossing, Forward, Layout, Segment, Sorted};
use crate::schedule::call::RankPrograms;
use crate::schedule::{CallerTables, Calls};

/// Looks at the bells before the thread sleeps between two: calls often follow each other closely.
const AWAKE: u32 = 20_000;
/// How long the planner's stream is waited for when the world is dead: what it still uses could not be given back.
const DRAIN: Duration = Duration::from_secs(10);
/// Sleep between two looks.
const NAP: Duration = Duration::from_micros(50);

/// What the planner keeps of each seat.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub layout: Layout,
    /// What this rank's relay knows of it.
    pub forward: Arc<Forward>,
    /// The number of the dispatch that made it; 0 if there is none that landed.
    pub number: u64,
    /// How that dispatch ended.
    pub status: Status,
}

/// One rank's planner.
#[derive(Debug)]
pub(super) struct Planner {
    pub common: Arc<Common>,
    pub programs: Arc<RankPrograms>,
    pub engine: Engine,
    /// Does this rank's part for other nodes, in this thread; there is none where there is only one.
    pub relay: Option<Relay>,
    pub calls: Calls,
    pub tables: CallerTables,
    pub sorted: Sorted,
    pub crossing: Crossing,
    pub arrivals: Arrivals,
    pub numbers: GroupCounts,
    pub kept: Vec<Kept>,
    pub scratch: Scratch,
}

/// Used again by all calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub experts: Vec<u32>,
    pub weights: Vec<u32>,
    /// Per bin: its first row as rows lie packed.
    pub starts: Vec<u32>,
    /// What goes with each packed row.
    pub notes: Vec<u32>,
    pub summands: Vec<i32>,
    pub counts: Vec<i64>,
    /// Rows that came from other nodes: first row, and how many.
    pub landed: Vec<(u32, u32)>,
    /// Words of a header.
    pub header: Header,
}

/// What a header says of the rows for this rank.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub segments: Vec<Segment>,
    pub listed: Vec<u32>,
    pub weights: Vec<u32>,
    /// Zeros.
    pub pads: Vec<u32>,
    /// What a neighbour counts.
    pub counted: Vec<u32>,
}

impl Planner {
    /// Serves until the caller has closed and all is served, or the world is dead.
    pub fn serve(mut self) {
        let fixed = Arc::clone(&self.common.fixed);
        let _end = CancelOnPanic(&fixed.shared);
        if let Err(error) = self.listen() {
            let _ = self.common.fixed.fail(error);
            self.engine.run_out(DRAIN);
        }
        self.common.gone.store(true, Ordering::Release);
        self.common.seats.iter().for_each(|seat| seat.tell(|_| ()));
    }

    fn listen(&mut self) -> Result<(), Error> {
        let common = Arc::clone(&self.common);
        let mut idle = 0;
        loop {
            common.fixed.shared.hub.health().check()?;
            let closing = common.closing.load(Ordering::Acquire);
            if self.look()? {
                idle = 0;
                continue;
            }
            if closing && common.served.load(Ordering::Relaxed) >= common.space.enqueued() {
                return Ok(());
            }
            idle += 1;
            match idle {
                0..AWAKE => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
        }
    }

    /// Serves the first bell that is set.
    fn look(&mut self) -> Result<bool, Error> {
        let common = Arc::clone(&self.common);
        for seat in 0..common.shape.word_sets() {
            for bell in [Bell::Dispatch, Bell::Combine] {
                let word = common.bell(seat, bell)?;
                let rung = word.load(Ordering::Acquire);
                if rung == 0 {
                    continue;
                }
                word.store(0, Ordering::Relaxed);
                match bell {
                    Bell::Dispatch => self.dispatch(seat, (rung - 1) as u32)?,
                    _ => self.combine(seat, (rung - 1) as u32)?,
                }
                if !common.seats[seat as usize].is_captured() {
                    common.served.fetch_add(1, Ordering::Relaxed);
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Collects a copy of the first `len` bytes of a piece of the host's memory to one of the device's.
    pub fn send(&mut self, from: Piece, to: Piece, len: u64) -> Result<(), Error> {
        let (from, to): (Range, Range) = (self.common.host_piece(from)?, self.common.piece(to)?);
        Ok(self.engine.copy(to.span(0, len)?, from.span(0, len)?)?)
    }

    /// Waits for what is enqueued, and lets the caller's stream go on.
    pub fn answer(&mut self, seat: u32, bell: Bell, status: Status) -> Result<(), Error> {
        self.engine.settle()?;
        self.common.bell(seat, Bell::Status)?.store(status.0.into(), Ordering::Relaxed);
        // Of a world that died meanwhile the guard says so, again and again.
        self.common.fixed.shared.hub.health().check()?;
        Ok(self.common.ring(seat, bell)?)
    }
}
