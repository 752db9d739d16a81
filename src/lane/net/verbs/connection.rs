//! One connection: a queue pair to one peer, and the state that both ends keep about each other.
//!
//! ```text
//!   put, rows, zeros --> pieces in place, or staged --> Sender --> NIC ==> peer's memory
//!   signal           --> write, addition, or number --^             |
//!   progress         <-- completions: done | a signal has come | why it failed
//! ```
//!
//! | signal | without tag | with tag | writer of the word |
//! |---|---|---|---|
//! | write | write of 8 bytes | write of the tag before it | the NIC |
//! | fetch-add | addition | write of the tag before it | the NIC |
//! | immediate | travels with the last write, or alone | a record of 64 bytes | the peer, when it receives |
//!
//! The first two are for NICs that place data in order. They wake no thread, so a waiter polls. The
//! third is for NICs that do not place data in order. It takes a receive, and its credits are the
//! peer's *grant*: its receives less those that it has yet to repost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use super::completion::Failed;
use super::device::Device;
use super::forecast::Forecast;
use super::keys::RemoteRegions;
use super::receiver::Receiver;
use super::sender::{self, RECEIVE, Sender};
use super::signals::SignalSender;
use super::{Completion, CompletionQueue, Remote, SignalMode};
use crate::bootstrap::Health;
use crate::error::{Cause, CompletionStatus, LostReason, VerbsError};
use crate::lane::net::{RemoteAddress, SendBlocked};
use crate::lane::wait::{WaitError, WaitLimits, Waiter};

/// Puts of at most so many bytes are staged wherever they lie: copying costs less than to wait
/// until they are read.
pub const SMALL: usize = 1 << 10;
/// Completions taken at once.
const POLL: usize = 32;
/// Time between two polls of a sender that waits for its NIC.
const NAP: Duration = Duration::from_micros(20);

/// One rail.
pub struct Connection {
    pub(super) me: u32,
    pub(super) peer: u32,
    pub(super) signal: SignalMode,
    pub(super) chunk: u64,
    pub(super) device: Arc<Device>,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) theirs: RwLock<RemoteRegions>,
    pub(super) state: Mutex<State>,
    pub(super) health: Arc<Health>,
}

/// Parts of a connection.
pub struct Parts {
    pub me: u32,
    pub peer: u32,
    pub signal: SignalMode,
    pub chunk: u64,
    pub device: Arc<Device>,
    pub completions: Arc<CompletionQueue>,
    pub theirs: RemoteRegions,
    pub health: Arc<Health>,
    pub sender: Sender,
    pub receiver: Receiver,
    pub forecast: Option<Forecast>,
}

pub(super) struct State {
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
    pub(super) sent: SignalSender,
    /// Prediction of requests, if one was requested.
    pub(super) forecast: Option<Forecast>,
    /// Why nothing more is sent.
    pub(super) end: Option<End>,
}

impl State {
    /// All that was asked for goes out.
    pub(super) fn hurry(&mut self) {
        self.sender.hurry();
        if let Some(forecast) = &mut self.forecast {
            forecast.hurry();
        }
    }
}

/// How a rail ended.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// The peer has left in peace.
    Left,
    /// This went wrong first.
    Failed(VerbsError, Cause),
    /// The world failed for another reason.
    Dead(Cause),
}

impl Connection {
    /// A rail that is connected.
    pub fn new(parts: Parts) -> Self {
        let Parts { me, peer, signal, chunk, device, completions, theirs, health, .. } = parts;
        let (sender, receiver, forecast) = (parts.sender, parts.receiver, parts.forecast);
        let state =
            Mutex::new(State { sender, receiver, sent: SignalSender::default(), forecast, end: None });
        let theirs = RwLock::new(theirs);
        Connection { me, peer, signal, chunk, device, completions, theirs, state, health }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Target address of bytes, as the NIC knows it, and how many of them lie together there.
    pub(super) fn remote(&self, to: RemoteAddress) -> Result<(Remote, u64), VerbsError> {
        let found = self.theirs.read().unwrap_or_else(PoisonError::into_inner).find(to);
        found.ok_or(VerbsError::NoKey { peer: self.peer, region: to.region, offset: to.offset })
    }

    /// Runs `act` on a working connection; one whose peer has left accepts every call as a no-op.
    pub(super) fn with(
        &self,
        patience: WaitLimits<'_>,
        act: impl FnOnce(&mut State) -> Result<(), Halt>,
    ) -> Result<(), SendBlocked> {
        let mut state = self.lock();
        if let Some(end) = &state.end {
            return end.clone().stuck(&state.sender);
        }
        match act(&mut state) {
            Ok(()) => Ok(()),
            Err(Halt::Waiting(why)) => {
                let (awaited, seen) = state.sender.progress();
                if let WaitError::Dead(cause) = &why {
                    self.end(&mut state, End::Dead(cause.clone()));
                }
                Err(SendBlocked { awaited, seen, why })
            }
            Err(Halt::Broken(error)) => {
                self.fail(&mut state, error, patience.health);
                state.end.clone().map_or(Ok(()), |end| end.stuck(&state.sender))
            }
            Err(Halt::Left) => {
                self.end(&mut state, End::Left);
                Ok(())
            }
        }
    }

    /// Sends no more. The NIC must not read bytes in flight once their memory belongs to others.
    pub(super) fn end(&self, state: &mut State, end: End) {
        if state.end.is_some() {
            return;
        }
        state.end = Some(end);
        state.sender.abandon();
        if let Err(error) = state.sender.qp.error() {
            tracing::warn!(rank = self.me, peer = self.peer, %error, "a queue pair could not be stopped");
        }
    }

    /// Something went wrong. If the peer has left in peace, nothing did; otherwise the world ends.
    pub(super) fn fail(&self, state: &mut State, error: VerbsError, health: &Health) {
        if state.end.is_some() {
            return;
        }
        let cause = match &error {
            VerbsError::Completion { status, .. } if status.is_remote() => {
                Cause::Connection { rank: self.peer, by: self.me }
            }
            VerbsError::Message { .. } => Cause::Protocol { rank: self.peer },
            _ => Cause::Nic { by: self.me },
        };
        // A NIC fails whichever peer is at the other end.
        let of_partner = matches!(error, VerbsError::Completion { .. } | VerbsError::Message { .. });
        if of_partner && health.is_absent(self.peer) {
            self.end(state, End::Left);
            return;
        }
        tracing::error!(rank = self.me, peer = self.peer, %error, "a rail failed");
        // If the world was dead already, that is why.
        let cause = health.check().err().unwrap_or(cause);
        self.end(state, End::Failed(error, cause.clone()));
        health.fail(cause);
    }

    /// Takes completions and posts what can be posted. Returns whether there was anything.
    pub(super) fn step(&self, state: &mut State) -> Result<bool, VerbsError> {
        let mut any = self.complete(state)?;
        if let Some(taken) = state.receiver.to_grant() {
            state.sender.grant(state.receiver.grant_to(), taken)?;
            state.receiver.granted(taken);
            if let Some(forecast) = &mut state.forecast {
                forecast.grant();
            }
        }
        any |= state.sender.post()?;
        Ok(any)
    }

    /// Takes completions. Returns whether there were any.
    pub(super) fn complete(&self, state: &mut State) -> Result<bool, VerbsError> {
        let mut buffer = [Completion::EMPTY; POLL];
        let (mut any, mut fault): (bool, Option<(u64, Failed)>) = (false, None);
        loop {
            let taken = self.completions.poll(&mut buffer)?;
            for completion in taken {
                let id = completion.wr_id();
                match completion.outcome() {
                    Err(failed) => {
                        state.sender.counters.failed += 1;
                        // A flushed request only shows that another one failed.
                        let flushed = |failed: &Failed| failed.status == CompletionStatus::Flushed;
                        if fault.as_ref().is_none_or(|(_, first)| flushed(first) && !flushed(&failed)) {
                            fault = Some((id, failed));
                        }
                    }
                    Ok(_) if id & RECEIVE == 0 => state.sender.complete(id),
                    Ok(done) => {
                        state.sender.counters.received += 1;
                        state.receiver.take(id & !RECEIVE, done, &state.sender.block, &state.sender.qp)?;
                    }
                }
            }
            any |= !taken.is_empty();
            if taken.len() < POLL {
                return match fault {
                    None => Ok(any),
                    Some((id, failed)) => Err(state.sender.qp.failure(sender::operation(id), failed)),
                };
            }
        }
    }

    /// Steps until `ready` holds.
    pub(super) fn until<T>(
        &self,
        state: &mut State,
        patience: WaitLimits<'_>,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, VerbsError>,
    ) -> Result<T, Halt> {
        let mut waiter = Waiter::new(patience);
        loop {
            if let Some(value) = ready(state)? {
                return Ok(value);
            }
            if self.step(state)? {
                // A rank that makes progress is not silent.
                waiter = Waiter::new(patience);
            } else {
                let turned = waiter.turn(|slice| std::thread::sleep(slice.min(NAP)));
                turned.map_err(|why| self.left_or(why, patience))?;
            }
        }
    }

    /// Waiting for a peer that leaves in peace is over; it is no error to have sent it something.
    fn left_or(&self, why: WaitError, patience: WaitLimits<'_>) -> Halt {
        match why {
            WaitError::Dead(Cause::Lost { rank, how: LostReason::Closed })
                if rank == self.peer && patience.health.check().is_ok() =>
            {
                Halt::Left
            }
            why => Halt::Waiting(why),
        }
    }
}

/// Why an act did not come to its end.
pub(super) enum Halt {
    Waiting(WaitError),
    Broken(VerbsError),
    Left,
}

impl From<VerbsError> for Halt {
    fn from(error: VerbsError) -> Self {
        Halt::Broken(error)
    }
}

impl End {
    fn stuck(self, sender: &Sender) -> Result<(), SendBlocked> {
        let (awaited, seen) = sender.progress();
        match self {
            End::Left => Ok(()),
            End::Failed(_, cause) | End::Dead(cause) => {
                Err(SendBlocked { awaited, seen, why: WaitError::Dead(cause) })
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Err(error) = self.lock().sender.qp.error() {
            tracing::debug!(rank = self.me, peer = self.peer, %error, "a queue pair could not be stopped");
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).field("state", &self.lock().sender).finish()
    }
}
