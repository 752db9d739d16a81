//! The enqueuer: does for a stream what the caller of an [`ExpertParallel`](crate::ExpertParallel)
//! on the host does.
//!
//! It serves one call after the other by the programs that the host steps, too: the same releases,
//! entries, counts and placement, the same judgment. Rows go by its stream ([`CopyEngineStepper`]).
//! With several nodes it plays this rank's relay, too, at the places of launch order: own puts and
//! signals, relayed rows, own waits.
//!
//! The caller's thread drives it, in the second half of each call. So no stream waits for a thread
//! that has yet to call the driver.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::DeviceCall;
use super::common::Common;
use super::shape::StreamFlag;
use super::watch::Watch;
use crate::device::{Event, Kernels, Stream};
use crate::ep::Status;
use crate::ep::agreement::GroupCounts;
use crate::ep::relay::Relay;
use crate::error::{CallKind, DeviceError, Error};
use crate::exec::{CopyEngineStepper, Until};
use crate::plan::{
    Counts, DispatchLayout, InterNodeRows, ReceiveSizes, RelayPermutation, RelayPlan, Segment, SortedRouting,
};
use crate::schedule::call::{CallMachine, RankPrograms};
use crate::schedule::{CallerTables, Calls};

/// The caller's stream, as the enqueuer knows it: events order the streams.
#[derive(Debug)]
pub(super) struct CallerStream {
    pub stream: Arc<Stream>,
    pub kernels: Arc<Kernels>,
    /// The stream has come to the call, or has packed its rows.
    pub reached: Event,
    /// The stream of copies has done the call.
    pub done: Event,
    /// Looks whether peers' words come in time.
    pub watch: Watch,
}

/// What is kept of each seat.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub layout: DispatchLayout,
    /// What this rank's relay knows of it.
    pub forward: RelayPlan,
    /// If tokens may be sent without packing: the first of the layout's runs by token.
    pub in_place: Option<u32>,
    /// Where engines relay: what all ranks count, the layout's first run to arrivals, and the
    /// arrival of each visible row.
    pub numbers: (Counts, ReceiveSizes),
    pub first_run: u32,
    pub index: Vec<i32>,
    /// The number of the dispatch that made it; 0 if there is none that landed.
    pub number: u64,
    /// How that dispatch ended.
    pub status: Status,
}

/// One rank's enqueuer.
#[derive(Debug)]
pub(super) struct Enqueuer {
    pub common: Arc<Common>,
    pub caller: CallerStream,
    pub engine: CopyEngineStepper,
    /// Does this rank's part for other nodes, in this thread; there is none where there is only
    /// one.
    pub relay: Option<Relay>,
    pub calls: Calls,
    pub tables: CallerTables,
    pub sorted: SortedRouting,
    pub crossing: InterNodeRows,
    pub arrivals: RelayPermutation,
    pub numbers: GroupCounts,
    pub kept: Vec<Kept>,
    /// Per rank: where metadata of the call's rows lands.
    pub notes_at: Vec<u64>,
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
    /// Per choice: its packed row, and the place of its bin in the order of the sum.
    pub places: Vec<i32>,
    pub sums: Vec<i32>,
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
    /// What goes with them.
    pub weights: Vec<u32>,
    /// Zeros.
    pub pads: Vec<u32>,
    /// What a neighbour counts.
    pub counted: Vec<u32>,
}

/// Looks at the word of a stream between two questions to the driver whether that has failed.
const LOOKS: u32 = 4096;

impl Enqueuer {
    /// Enters the next call.
    ///
    /// # Errors
    /// The cause of a dead world.
    pub fn enter(&mut self) -> Result<CallMachine, Error> {
        self.common.fixed.shared.hub.health().check()?;
        self.calls.enter();
        Ok(CallMachine::default())
    }

    /// The first half of a call by the caller's thread, whose part of its stream is enqueued.
    ///
    /// # Errors
    /// Those that end the world.
    pub fn start(
        &mut self,
        programs: &RankPrograms,
        kind: CallKind,
        seat: u32,
    ) -> Result<CallMachine, Error> {
        let mut machine = self.enter()?;
        let CallerStream { stream, reached, .. } = &self.caller;
        reached.record(stream)?;
        // What comes back lies where sums before may still be reading; what goes out is packed.
        if !kind.places() {
            self.engine.follow(reached)?;
            self.common.started(self.engine.awaited().0);
        }
        self.common.reclaim();
        DeviceCall::new(self, programs, kind, seat).drive(&mut machine, Until::Half)?;
        Ok(machine)
    }

    /// Goes on with another stream of the caller's, behind the one before.
    pub fn follow(&mut self, next: &Arc<Stream>) -> Result<(), DeviceError> {
        let CallerStream { stream, done, .. } = &mut self.caller;
        next.join(stream, done)?;
        *stream = Arc::clone(next);
        Ok(())
    }

    /// Waits until the caller's stream has raised a flag.
    ///
    /// # Errors
    /// The cause of a dead world, an interruption, or the failure of the stream.
    pub fn await_stream(&self, seat: u32, flag: StreamFlag) -> Result<(), Error> {
        let CallerStream { stream, .. } = &self.caller;
        let word = self.common.flag(seat, flag)?;
        let mut looks = 0;
        self.common.fixed.port.lanes().wait_for_stream(word, || {
            looks = (looks + 1) % LOOKS;
            if looks == 0 { stream.is_done().map(drop).map_err(Error::from) } else { Ok(()) }
        })?;
        word.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// The call is enqueued: the caller's stream goes on behind it.
    pub fn answer(&mut self, seat: u32, status: Status) -> Result<(), Error> {
        // Of a world that died meanwhile the guard says so, again and again.
        self.common.fixed.shared.hub.health().check()?;
        let CallerStream { stream, done, watch, .. } = &self.caller;
        let (mark, awaited) = self.engine.awaited();
        watch.expect(mark, awaited);
        self.engine.precede(stream, done)?;
        // Kernels of earlier calls may have yet to read the word.
        stream.write(self.common.word(seat, StreamFlag::Status)?, status.0)?;
        Ok(())
    }
}
