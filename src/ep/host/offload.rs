//! Where a relay of the host works: with its caller or, while the caller is away, in a thread of
//! its own.
//!
//! ```text
//!   dispatch()                caller: entry | relay: agreement | caller: place, own rows | relay: rows | caller: waits
//!   start_dispatch()          caller: entry | -- away: compute of the caller's own --    | caller: place, own rows, waits
//!                             thread:         relay: agreement, rows
//! ```
//!
//! The two know each other through flags alone, so nothing has to be locked: a [`RelayTask`] goes
//! to the thread, and comes back when it is done.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::ep::fixed::EpState;
use crate::ep::relay::{Relay, RelayCall, RelayTask};
use crate::error::{Cause, Error, LaneError};
use crate::exec::{Executor, HostStepper, TransferCounts, Until};
use crate::lane::Io;
use crate::schedule::call::{Part, RankPrograms, Role, StageId, Work};
use crate::schedule::{Operands, TrackOp};
use crate::world::WorldState;

/// A relay that the host steps.
pub(in crate::ep) struct HostRelay {
    relay: Relay,
    host: HostStepper,
    fixed: Arc<EpState>,
}

impl HostRelay {
    pub fn new(fixed: &Arc<EpState>, host: HostStepper) -> Self {
        HostRelay { relay: Relay::new(Arc::clone(fixed)), host, fixed: Arc::clone(fixed) }
    }

    /// Runs one stage of the relay in its caller's thread.
    pub fn run(
        &mut self,
        programs: &RankPrograms,
        task: &mut RelayTask,
        stage: StageId,
    ) -> Result<(), Error> {
        self.call(programs, task, |call| call.run(Role::Relay, stage, Part::Whole))
    }

    /// Plans one step of the relay in its caller's thread.
    pub fn compute(
        &mut self,
        programs: &RankPrograms,
        task: &mut RelayTask,
        work: Work,
    ) -> Result<(), Error> {
        self.call(programs, task, |call| call.compute(Role::Relay, work))
    }

    /// Performs the whole task.
    fn perform(&mut self, programs: &RankPrograms, task: &mut RelayTask) -> Result<(), Error> {
        for until in [Until::Half, Until::End] {
            // Rows are what counts, and not the messages of the first half.
            self.host.take_moved();
            let (HostRelay { relay, host, fixed }, stores) = (&mut *self, task.stores);
            let run = &mut |items: &[TrackOp], operands: &Operands<'_>| {
                host.run(&fixed.port, items, operands, &mut Io::default(), stores)
            };
            relay.drive(programs, task, run, until)?;
        }
        task.moved = self.host.take_moved();
        Ok(())
    }

    /// Counts of moves since the last call of this function.
    pub fn take_moved(&mut self) -> TransferCounts {
        self.host.take_moved()
    }

    fn call<R>(
        &mut self,
        programs: &RankPrograms,
        task: &mut RelayTask,
        step: impl FnOnce(&mut RelayCall<'_, '_>) -> R,
    ) -> R {
        let (HostRelay { relay, host, fixed }, stores) = (self, task.stores);
        let run = &mut |items: &[TrackOp], operands: &Operands<'_>| {
            host.run(&fixed.port, items, operands, &mut Io::default(), stores)
        };
        step(&mut RelayCall { relay, programs, task, judged: None, run })
    }
}

/// Where a relay is: with its caller, or in a thread of its own.
pub(in crate::ep) struct RelayRunner {
    here: Option<Box<HostRelay>>,
    thread: Option<RelayThread>,
}

/// The thread that relays while the caller is away.
struct RelayThread {
    tasks: SyncSender<(Box<HostRelay>, RelayTask)>,
    done: Receiver<(Box<HostRelay>, RelayTask)>,
    thread: JoinHandle<()>,
}

impl RelayRunner {
    /// A relay that is with its caller.
    pub fn new(relay: HostRelay) -> Self {
        RelayRunner { here: Some(Box::new(relay)), thread: None }
    }

    /// The relay, unless it is away.
    pub fn here(&mut self) -> Option<&mut HostRelay> {
        self.here.as_deref_mut()
    }

    /// Gives the relay a task to perform in its thread.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no thread to be had.
    pub fn send(
        &mut self,
        task: RelayTask,
        fixed: &Arc<EpState>,
        programs: &Arc<RankPrograms>,
    ) -> Result<(), Error> {
        let Some(relay) = self.here.take() else { return Ok(()) };
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => RelayThread::start(fixed, programs)?,
        };
        // The thread ends only when this end is dropped.
        let _ = thread.tasks.send((relay, task));
        self.thread = Some(thread);
        Ok(())
    }

    /// Waits for the relay to come back. Nothing if it was not away.
    pub fn join(&mut self) -> Option<RelayTask> {
        if self.here.is_some() {
            return None;
        }
        let (relay, task) = self.thread.as_ref()?.done.recv().ok()?;
        self.here = Some(relay);
        Some(task)
    }
}

impl Drop for RelayRunner {
    fn drop(&mut self) {
        if let Some(RelayThread { tasks, done, thread }) = self.thread.take() {
            drop((tasks, done));
            let _ = thread.join();
        }
    }
}

/// Should a thread panic, its caller must not wait for it.
pub(in crate::ep) struct CancelOnPanic<'a>(pub &'a WorldState);

impl Drop for CancelOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hub = &self.0.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
        }
    }
}

impl RelayThread {
    fn start(fixed: &Arc<EpState>, programs: &Arc<RankPrograms>) -> Result<RelayThread, LaneError> {
        // There is one relay, so at most one task is in flight.
        let (tasks, todo) = sync_channel::<(Box<HostRelay>, RelayTask)>(1);
        let (back, done) = sync_channel(1);
        let (fixed, programs) = (Arc::clone(fixed), Arc::clone(programs));
        let thread = std::thread::Builder::new()
            .name(format!("sidelane-relay-{}", fixed.lanes.rank))
            .spawn(move || {
                let _end = CancelOnPanic(&fixed.shared);
                for (mut relay, mut task) in todo {
                    if let Err(error) = relay.perform(&programs, &mut task) {
                        // The caller finds the world failed.
                        fixed.fail(error);
                    }
                    let _ = back.send((relay, task));
                }
            })
            .map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(RelayThread { tasks, done, thread })
    }
}
