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
//! A network may take the packets of one queue pair over several paths, and NICs then place writes
//! in any order. The standard orders three things behind all earlier writes: an atomic, and the
//! completion of the receive that an immediate or a send takes. So *write* alone is for NICs that
//! place writes in order. The first two wake no thread, so a waiter polls. The third takes a
//! receive, and its credits are the peer's *grant*: its receives less those that it has yet to
//! repost.
//!
//! A *word* in memory of a device is always a write: no processor could raise it, and not every NIC
//! adds there. Unless signals are writes, it is fenced.
//!
//! Each call takes the lock, and no other while registrations stay as they are ([`Published`]).
//! The progress thread waits for the lock only to end a connection. It asks for a *visit* before it
//! sleeps, which the holder of the lock makes behind its call ([`Answers`]).
//!
//! A call updates the forecast, and queues requests. Bytes that the NIC can read go in place, all
//! others are staged. A put is cut where the gathered write is full, or where the peer's memory
//! ends, and each part travels with that write or begins the next.

mod signals;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::forecast::Forecast;
use super::receiver::{Receiver, SignalSender};
use super::registration::{NicMemory, Published, Reader, RemoteRegions, Source, Sources};
use super::sender::{self, PieceSource, RECEIVE, RequestSpace, Sender};
use super::staging::Staged;
use super::work::Failed;
use super::{Completion, CompletionChannel, CompletionQueue, Remote, SignalMode};
use crate::bootstrap::wait::nap;
use crate::bootstrap::{FatalGuard, FatalLock, Health};
use crate::error::{Cause, CompletionStatus, LaneError, LostReason, VerbsError};
use crate::lane::RowSource;
use crate::lane::flag::{WaitError, WaitLimits, Waiter};
use crate::lane::net::{
    Counters, DeviceAddress, DeviceConnection, NetConnection, RemoteAddress, SendBlocked,
};
use crate::schedule::Tag;
use crate::sync::owed_answers::Answers;

/// Puts of at most so many bytes are staged wherever they lie: copying costs less than to wait
/// until they are read.
pub const SMALL: usize = 1 << 10;
/// Completions taken at once.
const POLL: usize = 32;
/// Time between two polls of a sender that waits for its NIC.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A connection to one peer over a queue pair.
pub struct Connection {
    me: u32,
    peer: u32,
    signal: SignalMode,
    chunk: u64,
    memory: Arc<NicMemory>,
    completions: Arc<CompletionQueue>,
    theirs: Published<RemoteRegions>,
    state: FatalLock<State>,
    /// Visits that the progress thread asks for.
    visits: Answers,
    /// Number of its queue pair.
    queue_pair: u32,
    /// Error that the NIC reported beside its requests, before the world failed.
    reported: OnceLock<VerbsError>,
    health: Arc<Health>,
}

/// Parts of a connection.
pub struct Parts {
    pub me: u32,
    pub peer: u32,
    pub signal: SignalMode,
    pub chunk: u64,
    pub memory: Arc<NicMemory>,
    pub completions: Arc<CompletionQueue>,
    pub theirs: RemoteRegions,
    pub health: Arc<Health>,
    pub sender: Sender,
    pub receiver: Receiver,
    pub forecast: Option<Forecast>,
}

/// State behind the lock.
pub struct State {
    sender: Sender,
    receiver: Receiver,
    sent: SignalSender,
    /// Registered memory of this rank, and of the peer.
    sources: Reader<Sources>,
    theirs: Reader<RemoteRegions>,
    /// Prediction of requests, if one was requested.
    forecast: Option<Forecast>,
    /// The queue pair is lost, and a thread finds out by whose doing: nothing completes any more.
    lost: Option<VerbsError>,
    /// Why nothing more is sent.
    end: Option<End>,
}

impl State {
    /// All that was asked for goes out.
    fn hurry(&mut self) {
        self.sender.hurry();
        if let Some(forecast) = &mut self.forecast {
            forecast.hurry();
        }
    }
}

/// How a connection ended.
#[derive(Clone, Debug)]
enum End {
    /// The peer has left in peace.
    Left,
    /// This went wrong first.
    Failed(VerbsError, Cause),
    /// The world failed for another reason.
    Dead(Cause),
}

impl Connection {
    /// A connection that is connected.
    pub fn new(parts: Parts) -> Self {
        let Parts { me, peer, signal, chunk, memory, completions, theirs, health, .. } = parts;
        let (sender, receiver, forecast) = (parts.sender, parts.receiver, parts.forecast);
        let theirs = Published::new(theirs);
        let (sent, sources, known) = (SignalSender::default(), memory.sources.reader(), theirs.reader());
        let state = State { sender, receiver, sent, sources, theirs: known, forecast, lost: None, end: None };
        let queue_pair = state.sender.qp.endpoint().queue_pair;
        let (state, reported) = (FatalLock::new(state, me, &health), OnceLock::new());
        Connection {
            me,
            peer,
            signal,
            chunk,
            memory,
            completions,
            theirs,
            state,
            visits: Answers::default(),
            queue_pair,
            reported,
            health,
        }
    }

    /// Number of its queue pair.
    pub fn queue_pair(&self) -> u32 {
        self.queue_pair
    }

    /// The peer (in the world).
    pub fn peer_rank(&self) -> u32 {
        self.peer
    }

    /// Records an error that the NIC reported beside the requests, for
    /// [`fault`](NetConnection::fault). The first one stays. The world fails next, and its end is
    /// that of the connection.
    pub fn report(&self, error: VerbsError) {
        let _ = self.reported.set(error);
    }

    /// Target address of bytes, as the NIC knows it, and how many of them lie together there.
    fn remote(&self, theirs: &RemoteRegions, to: RemoteAddress) -> Result<(Remote, u64), VerbsError> {
        theirs.find(to).ok_or(VerbsError::NoKey { peer: self.peer, region: to.region, offset: to.offset })
    }

    /// Runs `act` on a working connection; one whose peer has left accepts every call as a no-op.
    fn with(
        &self,
        limits: WaitLimits<'_>,
        act: impl FnOnce(&mut State) -> Result<(), Halt>,
    ) -> Result<(), SendBlocked> {
        let outcome = self.act(limits, act);
        self.make_visit(limits.health);
        outcome
    }

    /// Runs `act` under the lock, and returns what it finds there.
    pub fn hold<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let found = act(&mut self.state.lock());
        self.make_visit(&self.health);
        found
    }

    fn act(
        &self,
        limits: WaitLimits<'_>,
        act: impl FnOnce(&mut State) -> Result<(), Halt>,
    ) -> Result<(), SendBlocked> {
        let mut state = self.state.lock();
        state.sources.refresh(&self.memory.sources);
        state.theirs.refresh(&self.theirs);
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
            Err(Halt::Blocked { holder, waited }) => {
                let (awaited, seen) = state.sender.progress();
                let (rank, peer, ms) = (self.me, self.peer, waited.as_millis());
                tracing::error!(rank, peer, holder, ms, "a put waits for staging that another rank holds");
                let why = WaitError::Dead(Cause::Stalled { rank: holder, by: self.me, waited });
                Err(SendBlocked { awaited, seen, why })
            }
            Err(Halt::Broken(error)) => {
                let state = self.fail(state, error, limits.health);
                state.end.clone().map_or(Ok(()), |end| end.stuck(&state.sender))
            }
            Err(Halt::Left) => {
                self.end(&mut state, End::Left);
                Ok(())
            }
        }
    }

    /// Sends no more. The NIC must not read bytes in flight once their memory belongs to others.
    fn end(&self, state: &mut State, end: End) {
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
    fn fail<'a>(
        &'a self,
        mut state: FatalGuard<'a, State>,
        error: VerbsError,
        health: &Health,
    ) -> FatalGuard<'a, State> {
        let of_peer = match &error {
            VerbsError::Completion { status: CompletionStatus::Flushed, .. } => {
                // A system call, which may take long: others need not wait for it. They take no
                // completion of this connection any more, so they are told that it is lost: one
                // that waited for completions would keep this lock until its deadline.
                state.lost = Some(error.clone());
                drop(state);
                let answers = self.nic_answers();
                state = self.state.lock();
                answers
            }
            VerbsError::Completion { status, .. } => status.is_remote(),
            _ => false,
        };
        if state.end.is_some() {
            return state;
        }
        let cause = match &error {
            _ if of_peer => Cause::Connection { rank: self.peer, by: self.me },
            VerbsError::Message { .. } => Cause::Protocol { rank: self.peer },
            _ => Cause::Nic { by: self.me },
        };
        // A NIC fails whichever peer is at the other end.
        let excused = matches!(error, VerbsError::Completion { .. } | VerbsError::Message { .. });
        if excused && health.is_absent(self.peer) {
            self.end(&mut state, End::Left);
            return state;
        }
        tracing::error!(rank = self.me, peer = self.peer, %error, "a connection failed");
        // If the world was dead already, that is why.
        let cause = health.check().err().unwrap_or(cause);
        self.end(&mut state, End::Failed(error, cause.clone()));
        health.fail(cause);
        state
    }

    /// Serves the connection: takes completions and posts what can be posted. Returns whether
    /// there was anything.
    fn serve<'a>(
        &'a self,
        mut state: FatalGuard<'a, State>,
        health: &Health,
    ) -> (bool, FatalGuard<'a, State>) {
        // Before the look at the completions: a visit that is asked for later is another one.
        let _ = self.visits.take();
        if state.end.is_some() {
            // The requests in flight are over: they are counted, and have no effect.
            let _ = self.complete(&mut state);
            return (false, state);
        }
        // Between two calls, so the forecast knows where the write ends.
        if state.sender.is_wanted() {
            state.hurry();
        }
        match self.step(&mut state) {
            Ok(any) => (any, state),
            Err(error) => (true, self.fail(state, error, health)),
        }
    }

    /// Serves the connection, unless another thread holds the lock. If a visit is asked for, that
    /// one makes it.
    fn visit(&self, health: &Health) -> bool {
        let mut news = false;
        let try_lock = || self.state.try_lock().map(Some);
        self.visits.tend(try_lock, |held| {
            let Some(state) = held.take() else { return false };
            let (any, state) = self.serve(state, health);
            news |= any;
            *held = Some(state);
            true
        });
        news
    }

    /// Has the connection served after all that this thread has done, if not by it then by the
    /// holder of the lock. Returns whether there was anything for this one.
    pub fn request_visit(&self, health: &Health) -> bool {
        self.visits.ask_again();
        self.visit(health)
    }

    /// Makes the visit that another thread left to this one, which has held the lock.
    fn make_visit(&self, health: &Health) -> bool {
        self.visits.is_owed() && self.visit(health)
    }

    /// The channel that wakes a thread for completions, where signals wake one.
    fn channel(&self) -> Option<&CompletionChannel> {
        self.completions.channel().filter(|_| self.signal == SignalMode::Immediate)
    }

    /// Whether the NIC still answers. Then a queue pair whose requests are flushed, although none
    /// failed before them, is lost by the peer's doing or on the way.
    fn nic_answers(&self) -> bool {
        let nic = &self.memory.nic;
        nic.context.port(nic.path.port).is_ok()
    }

    /// Takes completions and posts what can be posted. Returns whether there was anything.
    fn step(&self, state: &mut State) -> Result<bool, VerbsError> {
        if let Some(error) = &state.lost {
            return Err(error.clone());
        }
        let mut any = self.complete(state)?;
        if let Some(taken) = state.receiver.to_grant().filter(|_| state.sender.may_grant()) {
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
    fn complete(&self, state: &mut State) -> Result<bool, VerbsError> {
        let mut buffer = [Completion::EMPTY; POLL];
        let (mut any, mut refused, mut fault) = (false, None, None::<(u64, Failed)>);
        loop {
            let taken = self.completions.poll(&mut buffer)?;
            for completion in taken {
                let id = completion.wr_id();
                match completion.outcome() {
                    Err(failed) => {
                        state.sender.counters.failed += 1;
                        if id & RECEIVE == 0 {
                            state.sender.see(id);
                        }
                        // A flushed request only shows that another one failed.
                        let flushed = |failed: &Failed| failed.status == CompletionStatus::Flushed;
                        if fault.as_ref().is_none_or(|(_, first)| flushed(first) && !flushed(&failed)) {
                            fault = Some((id, failed));
                        }
                    }
                    Ok(_) if id & RECEIVE == 0 => state.sender.complete(id),
                    Ok(done) => {
                        state.sender.counters.received += 1;
                        let Sender { block, qp, .. } = &state.sender;
                        let take = || state.receiver.take(id & !RECEIVE, done, block, qp).err();
                        // Completions behind an error still end requests, and free staging.
                        refused = refused.or_else(take);
                    }
                }
            }
            any |= !taken.is_empty();
            if taken.len() < POLL {
                let failure = |(id, failed)| state.sender.qp.failure(sender::operation(id), failed);
                return refused.or_else(|| fault.map(failure)).map_or(Ok(any), Err);
            }
        }
    }

    /// Steps until `ready` holds.
    fn until<T>(
        &self,
        state: &mut State,
        limits: WaitLimits<'_>,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, VerbsError>,
    ) -> Result<T, Halt> {
        let mut waiter = Waiter::new(limits);
        loop {
            if let Some(value) = ready(state)? {
                return Ok(value);
            }
            if self.step(state)? && !state.sender.staging.waits_for_others() {
                // A rank that makes progress is not silent.
                waiter = Waiter::new(limits);
            } else {
                let turned = waiter.turn(|slice| nap(slice.min(POLL_INTERVAL)));
                turned.map_err(|why| self.left_or(why, limits))?;
            }
        }
    }

    /// Waiting for a peer that leaves in peace is over; it is no error to have sent it something.
    fn left_or(&self, why: WaitError, limits: WaitLimits<'_>) -> Halt {
        match why {
            WaitError::Dead(Cause::Lost { rank, how: LostReason::Closed })
                if rank == self.peer && limits.health.check().is_ok() =>
            {
                Halt::Left
            }
            why => Halt::Waiting(why),
        }
    }
}

/// Why an act did not come to its end.
enum Halt {
    Waiting(WaitError),
    /// The deadline passed, and this peer holds the staging that was awaited.
    Blocked {
        holder: u32,
        waited: Duration,
    },
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
        if let Err(error) = self.state.lock().sender.qp.error() {
            tracing::debug!(rank = self.me, peer = self.peer, %error, "a queue pair could not be stopped");
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Connection { me, peer, queue_pair, .. } = self;
        write!(f, "Connection({me} to {peer}, queue pair {queue_pair})")
    }
}

impl DeviceConnection for Connection {
    fn put_device(
        &self,
        to: RemoteAddress,
        from: DeviceAddress,
        len: u64,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            if len == 0 {
                return Ok(());
            }
            let nowhere = VerbsError::OutOfRegion { offset: from.offset, len, size: 0 };
            let source = state.sources.find_device(from, len).ok_or(nowhere)?;
            if let Some(forecast) = &mut state.forecast {
                forecast.device(self.remote(&state.theirs, to)?.0, len);
            }
            self.put_in_place(state, to, source, len as usize)
        })
    }

    fn write_word(&self, to: RemoteAddress, value: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            let (remote, _) = self.remote(&state.theirs, to)?;
            if let Some(forecast) = &mut state.forecast {
                forecast.word();
            }
            state.sender.close();
            if self.signal != SignalMode::Write {
                state.sender.fence();
            }
            self.write_words(state, remote, &[value], limits)?;
            state.sender.post()?;
            Ok(())
        })
    }
}

impl NetConnection for Connection {
    fn lane(&self) -> &'static str {
        "verbs"
    }

    fn peer(&self) -> u32 {
        self.peer
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            if bytes.is_empty() {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                let registered = state.sources.find(bytes).is_some();
                forecast.put(self.remote(&state.theirs, to)?.0, bytes.len() as u64, registered);
            }
            self.put_bytes(state, to, bytes, limits)
        })
    }

    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            let registered = state.sources.find(source.bytes);
            let in_place = registered.filter(|_| source.row_bytes <= self.chunk);
            if rows.is_empty() {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                forecast.rows(
                    self.remote(&state.theirs, to)?.0,
                    rows,
                    source.row_bytes,
                    registered.is_some(),
                );
            }
            match in_place {
                Some(place) => self.gather(state, to, (rows, source), place, limits),
                None => self.pack(state, to, rows, source, limits),
            }
        })
    }

    fn devices(&self) -> Option<&dyn DeviceConnection> {
        Some(self)
    }

    fn zero(&self, to: RemoteAddress, len: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            if len == 0 {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                forecast.zero(self.remote(&state.theirs, to)?.0, len);
            }
            self.zeros(state, to, len)
        })
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.lead_signal(to, (value, tag), false, limits)
    }

    fn settled(&self) -> bool {
        self.hold(|state| {
            state.hurry();
            state.end.is_some() || state.sender.is_settled()
        })
    }

    fn settle(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            state.hurry();
            self.until(state, limits, |state| Ok(state.sender.is_settled().then_some(())))
        })
    }

    fn flush(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(limits, |state| {
            state.hurry();
            self.until(state, limits, |state| Ok(state.sender.is_done().then_some(())))
        })
    }

    fn progress(&self, health: &Health) -> bool {
        // A holder that waits polls the completions itself, and any other is done soon: what it
        // leaves lying is for the next round.
        let Some(state) = self.state.try_lock() else { return false };
        let (any, state) = self.serve(state, health);
        drop(state);
        self.make_visit(health) || any
    }

    fn arm(&self, health: &Health) -> bool {
        if self.channel().is_none() {
            return self.progress(health);
        }
        if let Err(error) = self.completions.arm() {
            drop(self.fail(self.state.lock(), error, health));
            return false;
        }
        // An earlier completion wakes no thread, and the lock's holder may have polled before it.
        self.request_visit(health)
    }

    fn event_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.channel().map(AsFd::as_fd).into_iter().collect()
    }

    fn take_events(&self, health: &Health) {
        if let Some(Err(error)) = self.channel().map(CompletionChannel::take_events) {
            drop(self.fail(self.state.lock(), error, health));
        }
    }

    fn wakes(&self) -> bool {
        self.signal == SignalMode::Immediate
    }

    fn import_region(&self, region: u32, description: &[u8]) -> Result<(), LaneError> {
        self.theirs.change(|theirs| theirs.import(self.peer, region, description))
    }

    fn forget_region(&self, region: u32) {
        self.theirs.change(|theirs| theirs.forget(region));
    }

    fn stop(&self, cause: &Cause) {
        self.hold(|state| self.end(state, End::Dead(cause.clone())));
    }

    fn leave(&self, until: Instant) {
        let deadline = until.saturating_duration_since(Instant::now());
        let limits = WaitLimits {
            health: &self.health,
            oversubscribed: true,
            awaited: self.peer,
            deadline,
            silent: true,
        };
        if let Err(stuck) = self.flush(limits) {
            tracing::debug!(rank = self.me, peer = self.peer, ?stuck, "the last requests did not complete");
        }
    }

    fn cleared(&self, from: RemoteAddress, len: u64) {
        self.hold(|state| state.sent.cleared(from, len));
    }

    fn counters(&self) -> Counters {
        self.hold(|state| {
            if self.health.check().is_err() {
                // No progress thread serves the connections of a failed world any more.
                let _ = self.complete(state);
            }
            state.sender.counters
        })
    }

    fn forecast(&self) -> Counters {
        self.hold(|state| state.forecast.as_ref().map(Forecast::counters).unwrap_or_default())
    }

    fn fault(&self) -> Option<LaneError> {
        if let Some(error) = self.reported.get() {
            return Some(error.clone().into());
        }
        self.hold(|state| match &state.end {
            Some(End::Failed(error, _)) => Some(error.clone().into()),
            _ => None,
        })
    }
}

impl Connection {
    /// Room for data to `to` ([`Sender::room`]). If that ends a chunk, the NIC gets it now, before
    /// the data that comes next is copied.
    fn room(state: &mut State, to: Remote, least: u64, staged: bool) -> Result<RequestSpace, VerbsError> {
        let room = state.sender.room(to, least, staged);
        state.sender.post()?;
        Ok(room)
    }

    /// Room for `len` copied bytes, as [`Sender::stage`].
    fn stage(&self, state: &mut State, len: usize, limits: WaitLimits<'_>) -> Result<Staged, Halt> {
        let len = len as u32;
        if let Some(staged) = state.sender.stage(len)? {
            return Ok(staged);
        }
        // What fills the staging may still be held back.
        state.sender.post_soon();
        let staged = self.until(state, limits, |state| {
            state.sender.staging.ask_for_slots();
            state.sender.stage(len)
        });
        staged.map_err(|halt| {
            let holder = state.sender.staging.awaited_peer();
            state.sender.staging.ask_no_more();
            match (halt, holder.filter(|&holder| holder != self.peer)) {
                (Halt::Waiting(WaitError::Late { waited }), Some(holder)) => Halt::Blocked { holder, waited },
                (halt, _) => halt,
            }
        })
    }

    /// A line for `len` bytes of a signal, as [`Sender::line`].
    fn line(&self, state: &mut State, len: usize, limits: WaitLimits<'_>) -> Result<Staged, Halt> {
        if let Some(line) = state.sender.line(len as u32)? {
            return Ok(line);
        }
        state.sender.post_soon();
        self.until(state, limits, |state| state.sender.line(len as u32))
    }

    fn put_bytes(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        bytes: &[u8],
        limits: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        if let Some(source) = state.sources.find(bytes).filter(|_| bytes.len() > SMALL) {
            return self.put_in_place(state, to, source, bytes.len());
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let (remote, together) = self.remote(&state.theirs, to)?;
            let room = Self::room(state, remote, 1, true)?;
            let (head, tail) = rest.split_at(rest.len().min(together.min(room.bytes) as usize));
            let staged = self.stage(state, head.len(), limits)?;
            fill(&staged, head);
            state.sender.counters.copied += head.len() as u64;
            state.sender.write(remote, [staged.piece], PieceSource::Staged(staged.until));
            (rest, to) = (tail, to.behind(head.len() as u64));
        }
        Ok(())
    }

    /// Bytes that the NIC reads in place.
    fn put_in_place(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        source: Source,
        len: usize,
    ) -> Result<(), Halt> {
        let mut done = 0;
        while done < len {
            let (remote, together) = self.remote(&state.theirs, to)?;
            let room = Self::room(state, remote, 1, false)?;
            let part = (len - done).min(together.min(room.bytes) as usize);
            state.sender.write(remote, [source.piece(done, part)], PieceSource::InPlace);
            (done, to) = (done + part, to.behind(part as u64));
        }
        Ok(())
    }

    /// Rows in place: as many pieces as a request takes, local peers in one.
    fn gather(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        (rows, source): (&[u32], RowSource<'_>),
        place: Source,
        limits: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        let row_bytes = source.row_bytes as usize;
        let mut rest = rows;
        while let Some((&first, others)) = rest.split_first() {
            let (remote, together) = self.remote(&state.theirs, to)?;
            let room = Self::room(state, remote, source.row_bytes, false)?;
            let most = rest.len().min(together.min(room.bytes) as usize / row_bytes);
            if most == 0 {
                // A row that lies in two pieces of the peer's region.
                self.put_bytes(state, to, source.row(first), limits)?;
                (rest, to) = (others, to.behind(source.row_bytes));
                continue;
            }
            let count = runs(&rest[..most]).take(room.pieces).map(<[u32]>::len).sum::<usize>();
            let (head, tail) = rest.split_at(count);
            let piece = |run: &[u32]| place.piece(run[0] as usize * row_bytes, run.len() * row_bytes);
            state.sender.write(remote, runs(head).map(piece), PieceSource::InPlace);
            (rest, to) = (tail, to.behind((count * row_bytes) as u64));
        }
        Ok(())
    }

    /// Rows that are not registered: copied one behind the other.
    fn pack(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        limits: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        let row_bytes = source.row_bytes as usize;
        let large = source.row_bytes > self.chunk;
        let mut rest = rows;
        while let Some((&first, others)) = rest.split_first() {
            let (remote, together) = self.remote(&state.theirs, to)?;
            if large || together < source.row_bytes {
                self.put_bytes(state, to, source.row(first), limits)?;
                (rest, to) = (others, to.behind(source.row_bytes));
                continue;
            }
            let room = Self::room(state, remote, source.row_bytes, true)?;
            let most = rest.len().min(together.min(room.bytes) as usize / row_bytes);
            let (head, tail) = rest.split_at(most);
            let len = most * row_bytes;
            let staged = self.stage(state, len, limits)?;
            for (nth, &row) in head.iter().enumerate() {
                // SAFETY: the staged bytes hold all these rows, one behind the other.
                let at = unsafe { staged.at.add(nth * row_bytes) };
                let row = source.row(row);
                // SAFETY: as above; staging overlaps no source.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), at, row_bytes) };
            }
            state.sender.counters.copied += len as u64;
            state.sender.write(remote, [staged.piece], PieceSource::Staged(staged.until));
            (rest, to) = (tail, to.behind(len as u64));
        }
        Ok(())
    }

    /// Zeros, which are registered once for all.
    fn zeros(&self, state: &mut State, mut to: RemoteAddress, len: u64) -> Result<(), Halt> {
        let mut left = len;
        while left > 0 {
            let (remote, together) = self.remote(&state.theirs, to)?;
            let room = Self::room(state, remote, 1, false)?;
            let zeros = self.memory.zeros(left.min(together).min(room.bytes), room.pieces);
            let count: u64 = zeros.clone().map(|piece| u64::from(piece.len())).sum();
            state.sender.write(remote, zeros, PieceSource::Always);
            (left, to) = (left - count, to.behind(count));
        }
        Ok(())
    }
}

/// Runs of rows that lie one behind the other.
fn runs(rows: &[u32]) -> impl Iterator<Item = &[u32]> {
    rows.chunk_by(|&row, &next| next.checked_sub(1) == Some(row))
}

/// Copies bytes to where they were staged.
fn fill(staged: &Staged, bytes: &[u8]) {
    debug_assert_eq!(staged.piece.len() as usize, bytes.len());
    let len = bytes.len().min(staged.piece.len() as usize);
    // SAFETY: the staged bytes are the caller's until they are sent, and at least `len`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), staged.at, len) };
}
