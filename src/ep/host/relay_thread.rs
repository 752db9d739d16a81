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
//! to the thread with its relay, and comes back when it is done.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::bootstrap::{Thread, turn, wait};
use crate::ep::relay::{CallPlan, Relay, RelayCall, RelayTask};
use crate::ep::state::EpState;
use crate::error::{Error, LaneError};
use crate::exec::{HostStepper, TransferCounts, Until, drive};
use crate::lane::Io;
use crate::plan::RelayPlan;
use crate::schedule::call_program::{CallMachine, RankPrograms};
use crate::schedule::{Operands, TrackOp};

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

    /// Has the relay perform a step in its caller's thread.
    pub fn step(
        &mut self,
        programs: &RankPrograms,
        (task, plan): (&RelayTask, CallPlan<'_>),
        step: impl FnOnce(&mut RelayCall<'_, '_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (HostRelay { relay, host, fixed }, stores) = (self, task.stores);
        let run = &mut |items: &[TrackOp], operands: &Operands<'_>| {
            host.run(&fixed.port, items, operands, &mut Io::default(), stores)
        };
        step(&mut RelayCall { relay, programs, task, plan, judged: None, run })
    }

    /// Performs the whole task. A refusal ends it early; the rank itself finds that, too.
    ///
    /// # Errors
    /// Those that end the world; that of the lane's protocol if a header makes no sense.
    fn perform(
        &mut self,
        programs: &RankPrograms,
        (task, plan): (&mut RelayTask, &mut Arc<RelayPlan>),
    ) -> Result<(), Error> {
        let (mut machine, program) = (CallMachine::default(), programs.relay.of(task.kind));
        for until in [Until::Half, Until::End] {
            // Rows are what counts, and not the messages of the first half.
            self.host.take_counts();
            let plan =
                if task.kind.places() { CallPlan::Own(Arc::make_mut(plan)) } else { CallPlan::Known(plan) };
            self.step(programs, (task, plan), |call| drive(&mut machine, program, call, until).map(drop))?;
        }
        task.moved = self.host.take_counts();
        Ok(())
    }

    /// Counts of moves since the last call of this function.
    pub fn take_counts(&mut self) -> TransferCounts {
        self.host.take_counts()
    }
}

/// Where a relay is: with its caller, or in a thread of its own.
pub(in crate::ep) struct RelayRunner {
    here: Option<Box<HostRelay>>,
    thread: Option<RelayThread>,
}

/// A relay and its task, which go to the thread and come back when it is done.
struct Assignment {
    relay: Box<HostRelay>,
    task: RelayTask,
    plan: Arc<RelayPlan>,
}

/// The thread that relays while the caller is away.
struct RelayThread {
    tasks: SyncSender<Assignment>,
    done: Receiver<Assignment>,
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

    /// Gives the relay a task to perform in its thread, with the blocks that it copies.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no thread to be had.
    pub fn send(
        &mut self,
        (task, plan): (RelayTask, Arc<RelayPlan>),
        fixed: &Arc<EpState>,
        programs: &Arc<RankPrograms>,
    ) -> Result<(), Error> {
        let thread = match &self.thread {
            Some(thread) => thread,
            None => self.thread.insert(RelayThread::start(fixed, programs)?),
        };
        if let Some(relay) = self.here.take() {
            // The thread ends only when this end is dropped.
            let _ = thread.tasks.send(Assignment { relay, task, plan });
        }
        Ok(())
    }

    /// Waits for the relay to come back. Nothing if it was not away.
    pub fn join(&mut self) -> Option<(RelayTask, Arc<RelayPlan>)> {
        if self.here.is_some() {
            return None;
        }
        match self.thread.as_ref()?.done.recv() {
            Ok(Assignment { relay, task, plan }) => {
                self.here = Some(relay);
                Some((task, plan))
            }
            Err(_) => {
                // The thread has died, and ends by recording that: the caller finds the world
                // failed.
                if let Some(thread) = self.thread.take() {
                    thread.end();
                }
                None
            }
        }
    }
}

impl Drop for RelayRunner {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.end();
        }
    }
}

impl RelayThread {
    fn start(fixed: &Arc<EpState>, programs: &Arc<RankPrograms>) -> Result<RelayThread, LaneError> {
        // There is one relay, so at most one task is in flight.
        let (tasks, todo) = sync_channel::<Assignment>(1);
        let (back, done) = sync_channel(1);
        let (fixed, programs) = (Arc::clone(fixed), Arc::clone(programs));
        let hub = &fixed.shared.hub;
        let thread = Thread::new("relay", hub.rank(), hub.health())
            .spawn(move || {
                for Assignment { mut relay, mut task, mut plan } in todo {
                    turn();
                    if let Err(error) = relay.perform(&programs, (&mut task, &mut plan)) {
                        // The caller finds the world failed.
                        fixed.fail(error);
                    }
                    let _ = back.send(Assignment { relay, task, plan });
                }
            })
            .map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(RelayThread { tasks, done, thread })
    }

    fn end(self) {
        drop((self.tasks, self.done));
        wait::join(self.thread);
    }
}
