//! The hub of a process: requests to the coordinator over a connection that one thread owns.
//!
//! ```text
//!   callers ── requests ──► Shared ──► link thread ──► coordinator
//!           ◄── answers ───   │  ◄───────────┘ heartbeats both ways, Dead, Left
//!                          Health ◄── end of the launcher's pipe
//! ```
//!
//! Callers never block in the socket: they put a frame into [`Shared`], wake the thread, and sleep
//! on a condition variable that an answer or any failure wakes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::Hub;
use crate::bootstrap::Secret;
use crate::bootstrap::health::{Health, LauncherWatch, Liveness, Timeouts, lock};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::rendezvous::{Growth, Hosted, Lineage, Membership, PeerAuth, grow, rebuild};
use crate::bootstrap::threads::{Thread, turn};
use crate::bootstrap::wait::{self, poll_until};
use crate::bootstrap::wire::{Answer, MAX_FRAME, Message, MessageConnection, Roster, Setting};
use crate::bootstrap::{failed, interrupted, system};
use crate::error::{BootstrapError, Cause, LostReason};

/// Facts that stay the same from epoch to epoch.
#[derive(Clone)]
pub struct Job {
    pub digest: [u8; 32],
    pub secret: Secret,
    pub timeouts: Timeouts,
    pub identity: Identity,
}

/// A rank's connection to its world.
pub struct TcpHub {
    pub job: Job,
    pub rank: u32,
    /// The world, by ranks of the first one.
    pub roster: Roster,
    /// State that this rank keeps from one world to the next.
    pub lineage: Arc<Lineage>,
    shared: Arc<Shared>,
    tickets: AtomicU64,
    /// Asks the coordinator for the listener; none at ranks that have no coordinator.
    released: Option<Arc<AtomicBool>>,
    link: Option<JoinHandle<()>>,
    coordinator: Option<JoinHandle<()>>,
}

impl TcpHub {
    /// Joins a world, which `hosted` serves if this rank hosts it.
    pub fn new(job: Job, membership: Membership, hosted: Option<Hosted>) -> Result<Self, BootstrapError> {
        let launcher = job.identity.launcher_pipe.map(LauncherWatch::open).transpose()?;
        let (health, released, coordinator) = match hosted {
            Some(hosted) => (hosted.health, Some(hosted.released), Some(hosted.coordinator)),
            None => (Arc::default(), None, None),
        };
        let shared = Shared::new(health)?;
        let Membership { connection, roster, lineage } = membership;
        let rank = roster.members.iter().take_while(|&&member| member < lineage.rank).count() as u32;
        let mut link = Link {
            shared: shared.clone(),
            connection,
            launcher,
            timeouts: job.timeouts,
            rank,
            roster: roster.clone(),
            lineage: lineage.clone(),
        };
        let thread = Thread::new("link", rank, &shared.health);
        let life = thread.clone();
        let link = thread.spawn(move || {
            if let Err(cause) = life.attempt(|| link.run()) {
                link.part(&Message::Dead(cause));
            }
        });
        let link = Some(link.map_err(|error| failed("thread spawn", &error))?);
        let tickets = AtomicU64::new(0);
        Ok(TcpHub { job, rank, roster, lineage, shared, tickets, released, link, coordinator })
    }

    /// Sends a request and sleeps until its answer, a failure of the world, or the deadline.
    fn request(
        &self,
        step: &str,
        deadline: Duration,
        message: impl FnOnce(u64) -> Message,
    ) -> Result<Answer, BootstrapError> {
        // Relaxed: tickets only differ. A lock orders what goes with them.
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let frame = message(ticket).encode();
        if frame.len() > MAX_FRAME {
            let (step, bytes) = (step.to_owned(), frame.len() as u64);
            return Err(BootstrapError::TooLarge { step, bytes, limit: MAX_FRAME as u64 });
        }
        let start = Instant::now();
        let health = &self.shared.health;
        let mut state = lock(&self.shared.state);
        health.check()?;
        state.answers.insert(ticket, None);
        state.outgoing.extend(frame);
        self.shared.ring();
        let mut until = start + deadline;
        let mut withdrawn = false;
        loop {
            if let Some(Some(_)) = state.answers.get(&ticket) {
                return state
                    .answers
                    .remove(&ticket)
                    .flatten()
                    .ok_or(BootstrapError::World(Cause::Protocol { rank: HOST }));
            }
            if let Err(cause) = health.check() {
                state.answers.remove(&ticket);
                return Err(cause.into());
            }
            if state.closed {
                state.answers.remove(&ticket);
                return Err(BootstrapError::Left { rank: HOST, step: step.to_owned() });
            }
            let now = Instant::now();
            if now >= until && withdrawn {
                state.answers.remove(&ticket);
                return Ok(Answer::Missing(Vec::new()));
            }
            if now >= until {
                // The coordinator knows the missing ranks.
                withdrawn = true;
                until = now + self.job.timeouts.liveness;
                state.outgoing.extend(Message::Withdraw { ticket }.encode());
                self.shared.ring();
            }
            let left = until.saturating_duration_since(Instant::now());
            drop(wait::on(&self.shared.changed, state, left));
            // Asked without the lock: the answer may take a while.
            let asked = interrupted();
            state = lock(&self.shared.state);
            if asked {
                state.answers.remove(&ticket);
                state.outgoing.extend(Message::Withdraw { ticket }.encode());
                self.shared.ring();
                return Err(BootstrapError::Interrupted { step: step.to_owned() });
            }
        }
    }

    /// Tells the coordinator of this process, if it has one, to leave its listener to this rank, or
    /// to use it again. The coordinator refuses late ranks there. In the first world the listener
    /// is at a port of the job, and the coordinator closes it for ever to free that port. In later
    /// worlds it is the listener where this rank would host survivors.
    pub fn release_listener(&self, released: bool) {
        if let Some(flag) = &self.released {
            // Relaxed: the coordinator looks again in each turn, and finds nothing else by it.
            flag.store(released, Ordering::Relaxed);
        }
    }

    fn finish(&mut self, end: End) {
        self.shared.end(end);
        // The link first: its goodbye is what ends the coordinator.
        for thread in [self.link.take(), self.coordinator.take()].into_iter().flatten() {
            wait::join(thread);
        }
    }
}

/// The error for a failed answer. Steps also fail because a world has failed and the first ranks to
/// hear of it have left: then the world's cause is the error.
pub(super) fn refused(health: &Health, answer: Answer, step: &str, waited: Duration) -> BootstrapError {
    if let Err(cause) = health.check() {
        return cause.into();
    }
    let step = step.to_owned();
    match answer {
        Answer::Missing(missing) => BootstrapError::Deadline { step, missing, waited, refused: None },
        Answer::Left(rank) => BootstrapError::Left { rank, step },
        Answer::Disagree { rank, seen, expected } => BootstrapError::Disagree { step, rank, seen, expected },
        Answer::TooLarge(bytes) => BootstrapError::TooLarge { step, bytes, limit: MAX_FRAME as u64 },
        Answer::Done | Answer::Value(_) | Answer::Gathered(_) | Answer::Exchanged(_) => {
            BootstrapError::World(Cause::Protocol { rank: HOST })
        }
    }
}

impl Hub for TcpHub {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.roster.members.len() as u32
    }

    fn epoch(&self) -> u16 {
        self.roster.epoch
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        let (start, deadline) = (Instant::now(), self.job.timeouts.deadline);
        let (name, value) = (key.to_owned(), value.to_vec());
        match self.request(key, deadline, |ticket| Message::Set { ticket, key: name, value })? {
            Answer::Done => Ok(()),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>, BootstrapError> {
        let (start, name) = (Instant::now(), key.to_owned());
        match self.request(key, deadline, |ticket| Message::Get { ticket, key: name })? {
            Answer::Value(value) => Ok(Arc::unwrap_or_clone(value)),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn gather(
        &self,
        key: &str,
        index: u32,
        count: u32,
        blob: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (start, name, blob) = (Instant::now(), key.to_owned(), blob.to_vec());
        match self.request(key, deadline, |ticket| Message::Gather {
            ticket,
            key: name,
            index,
            count,
            blob,
        })? {
            Answer::Gathered(blobs) if blobs.len() == count as usize => Ok(Arc::unwrap_or_clone(blobs)),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn exchange(
        &self,
        key: &str,
        index: u32,
        blobs: Vec<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (start, name, count) = (Instant::now(), key.to_owned(), blobs.len());
        let blobs = blobs.into_iter().collect();
        match self.request(key, deadline, |ticket| Message::Exchange { ticket, key: name, index, blobs })? {
            Answer::Gathered(blobs) if blobs.len() == count => Ok(Arc::unwrap_or_clone(blobs)),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn health(&self) -> &Arc<Health> {
        &self.shared.health
    }

    fn cancel(&self, cause: Cause) {
        // Sent before it is recorded here: a caller that sees the failure may end this process
        // next.
        self.shared.post(&Message::Dead(cause.clone()));
        self.shared.health.fail(cause);
    }

    fn rebuild(&self, deadline: Duration, at_least: u32) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
        rebuild(self, deadline, at_least)
    }

    fn grow(&self, deadline: Duration, settings: &[Setting]) -> Result<Growth<'_>, BootstrapError> {
        grow(self, deadline, settings)
    }

    fn pass(&self) -> Result<PeerAuth, BootstrapError> {
        let Roster { epoch, members } = &self.roster;
        let addresses = members.iter().map(|&rank| self.lineage.address(rank).ip()).collect();
        Ok(PeerAuth::new(self.job.secret.clone(), self.job.digest, self.rank, *epoch, addresses))
    }

    fn abandon(mut self: Box<Self>) {
        self.finish(End::Abandon);
    }
}

impl Drop for TcpHub {
    fn drop(&mut self) {
        // A rank that unwinds did not finish its work: the others shall hear of a loss.
        self.finish(if thread::panicking() { End::Abandon } else { End::Leave });
    }
}

/// Bound of the last send before this rank leaves.
const FINAL_SEND: Duration = Duration::from_millis(500);

/// The coordinator is always the first rank of its world.
pub const HOST: u32 = 0;

/// How a hub ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Says goodbye.
    Leave,
    /// Falls silent, as a killed process does.
    Abandon,
}

#[derive(Default)]
struct State {
    outgoing: Vec<u8>,
    answers: HashMap<u64, Option<Answer>>,
    /// The coordinator has left cleanly: no more answers come.
    closed: bool,
    end: Option<End>,
}

/// State that callers and the link thread share.
struct Shared {
    health: Arc<Health>,
    state: Mutex<State>,
    changed: Condvar,
    wake_fd: OwnedFd,
}

impl Shared {
    fn new(health: Arc<Health>) -> Result<Arc<Self>, BootstrapError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_fd = eventfd(0, flags).map_err(|errno| system("eventfd", errno))?;
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { health, state, changed: Condvar::new(), wake_fd });
        let sleeper: Weak<Shared> = Arc::downgrade(&shared);
        shared.health.on_failure(move |_| {
            if let Some(shared) = sleeper.upgrade() {
                shared.wake_callers();
            }
        });
        Ok(shared)
    }

    /// Wakes the link thread. It only fails when a wake-up is pending already.
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    /// Hands a message to the link thread.
    fn post(&self, message: &Message) {
        lock(&self.state).outgoing.extend(message.encode());
        self.ring();
    }

    /// Requests the end of the link thread.
    fn end(&self, end: End) {
        lock(&self.state).end = Some(end);
        self.ring();
    }

    /// With the lock taken, no thread is between its check and its sleep.
    fn wake_callers(&self) {
        drop(lock(&self.state));
        self.changed.notify_all();
    }
}

/// The link thread.
struct Link {
    shared: Arc<Shared>,
    connection: MessageConnection,
    launcher: Option<LauncherWatch>,
    timeouts: Timeouts,
    rank: u32,
    roster: Roster,
    lineage: Arc<Lineage>,
}

impl Link {
    /// Runs until the hub ends or the connection does.
    fn run(&mut self) {
        let now = Instant::now();
        let mut liveness = Liveness::new(1, self.timeouts.heartbeat, self.timeouts.liveness, now);
        let mut beat = now;
        loop {
            turn();
            let next = liveness.next().into_iter().fold(beat, Instant::min);
            if let Err(error) = self.await_event(next) {
                tracing::error!(%error, "the heartbeat thread ends");
                self.fail(Cause::Lost { rank: HOST, how: LostReason::Closed });
                return;
            }
            let now = Instant::now();
            // After a long sleep of this process the socket has the others' verdict: read it before
            // using the clock.
            self.read(&mut liveness, now);
            if self.connection.is_closed() {
                return self.closed();
            }
            if let Some(&(_, silence)) = liveness.expired(now).first() {
                self.lose(HOST);
                self.fail(Cause::Lost { rank: HOST, how: LostReason::Silent(silence) });
                self.connection.send(&Message::Dead(Cause::Evicted { rank: HOST, epoch: self.roster.epoch }));
                self.connection.flush();
                return;
            }
            if now >= beat {
                beat = now + self.timeouts.heartbeat;
                self.connection.send(&Message::Heartbeat);
            }
            let end = self.take_outgoing();
            match end {
                Some(End::Abandon) => return,
                Some(End::Leave) => return self.part(&Message::Bye),
                None => self.connection.flush(),
            }
        }
    }

    /// Waits for something to do.
    fn await_event(&self, next: Instant) -> Result<(), BootstrapError> {
        let wake_fd = PollFd::new(&self.shared.wake_fd, PollFlags::IN);
        let mut fds = vec![self.connection.poll_fd(), wake_fd];
        fds.extend(self.launcher.as_ref().map(LauncherWatch::poll_fd));
        poll_until(&mut fds, next)?;
        let mut count = [0; 8];
        // Clears the wake-up; there is none when another event woke this thread.
        let _ = rustix::io::read(&self.shared.wake_fd, &mut count);
        Ok(())
    }

    fn read(&mut self, liveness: &mut Liveness, now: Instant) {
        self.connection.fill();
        // Read after that: ranks leave when they see the launcher's end, so their messages about it
        // come later.
        self.look_at_launcher();
        let mut answered = false;
        while let Some(message) = self.connection.next() {
            liveness.heard(0, now);
            match message {
                Message::Heartbeat => {}
                Message::Answer { ticket, answer } => {
                    // No caller waits for the answer to an abandoned request.
                    if let Some(slot) = lock(&self.shared.state).answers.get_mut(&ticket) {
                        *slot = Some(answer);
                        answered = true;
                    }
                }
                Message::Dead(cause) => {
                    if let Cause::Lost { rank, .. } = cause {
                        self.lose(rank);
                    }
                    self.fail(cause);
                }
                Message::Left { rank } => self.shared.health.note_absent(rank),
                _ => self.fail(Cause::Protocol { rank: HOST }),
            }
        }
        if answered {
            self.shared.wake_callers();
        }
    }

    /// A rank is lost.
    fn lose(&self, rank: u32) {
        self.shared.health.note_absent(rank);
        if let Some(&first) = self.roster.members.get(rank as usize) {
            self.lineage.note_lost(self.roster.epoch, first);
        }
    }

    fn look_at_launcher(&mut self) {
        if let Some(launcher) = self.launcher.take_if(|launcher| launcher.is_gone()) {
            self.fail(Cause::LauncherGone { pid: launcher.pid() });
        }
    }

    /// The stream has ended: after a goodbye in peace, without one because rank 0 is gone.
    fn closed(&self) {
        if self.shared.health.is_absent(HOST) {
            lock(&self.shared.state).closed = true;
            self.shared.wake_callers();
        } else {
            self.lose(HOST);
            self.fail(Cause::Lost { rank: HOST, how: LostReason::Closed });
        }
    }

    fn take_outgoing(&mut self) -> Option<End> {
        let mut state = lock(&self.shared.state);
        self.connection.send_frame(&state.outgoing);
        state.outgoing.clear();
        state.end
    }

    /// Sends its last message.
    fn part(&mut self, message: &Message) {
        self.connection.send(message);
        let until = Instant::now() + FINAL_SEND;
        loop {
            self.connection.flush();
            if self.connection.is_flushed() || Instant::now() >= until {
                return;
            }
            if poll_until(&mut [self.connection.poll_fd()], until).is_err() {
                return;
            }
        }
    }

    fn fail(&self, cause: Cause) {
        if self.shared.health.fail(cause.clone()) {
            tracing::warn!(rank = self.rank, %cause, "the world is dead");
        }
    }
}
