//! The thread of a rank that keeps its connection to the coordinator.
//!
//! ```text
//!   callers ── requests ──► Shared ──► link thread ──► coordinator
//!           ◄── answers ───   │  ◄───────────┘ heartbeats both ways, Dead, Left
//!                          Health ◄── end of the launcher's pipe
//! ```
//!
//! One thread owns the socket, so callers never block in it: they put a frame into [`Shared`], wake
//! the thread, and sleep on a condition variable that an answer or any failure wakes.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, Weak},
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use crate::{
    bootstrap::{
        os::{system, wait},
        watch::{Health, LauncherWatch, Liveness, Timeouts, lock},
        wire::{Answer, Message, MessageConnection},
    },
    error::{BootstrapError, Cause, LostReason},
};

/// Bound of handing the last words to the system.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The coordinator is always the first rank of its world.
pub(in crate::bootstrap) const HOST: u32 = 0;

/// How a hub ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Says goodbye.
    Leave,
    /// Falls silent, as a killed process does.
    Abandon,
}

#[derive(Default)]
pub(super) struct State {
    pub outgoing: Vec<u8>,
    pub answers: HashMap<u64, Option<Answer>>,
    /// The coordinator has left cleanly: no more answers come.
    pub closed: bool,
    end: Option<End>,
}

/// What callers and the link thread share.
pub(super) struct Shared {
    pub health: Arc<Health>,
    pub state: Mutex<State>,
    pub changed: Condvar,
    bell: OwnedFd,
}

impl Shared {
    pub(super) fn new(health: Arc<Health>) -> Result<Arc<Self>, BootstrapError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).map_err(|errno| system("eventfd", errno))?;
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { health, state, changed: Condvar::new(), bell });
        let sleeper: Weak<Shared> = Arc::downgrade(&shared);
        shared.health.on_failure(move |_| {
            if let Some(shared) = sleeper.upgrade() {
                shared.wake_callers();
            }
        });
        Ok(shared)
    }

    /// Wakes the link thread. It only fails when a wake-up is pending already.
    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Hands a message to the link thread.
    pub(super) fn post(&self, message: &Message) {
        lock(&self.state).outgoing.extend(message.encode());
        self.ring();
    }

    /// Requests the end of the link thread.
    pub(super) fn end(&self, end: End) {
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
pub(super) struct Link {
    pub shared: Arc<Shared>,
    pub wire: MessageConnection,
    pub launcher: Option<LauncherWatch>,
    pub clocks: Timeouts,
    pub rank: u32,
    pub epoch: u16,
}

impl Link {
    /// Runs until the hub ends or the connection does.
    pub(super) fn run(mut self) {
        let now = Instant::now();
        let mut liveness = Liveness::new(1, self.clocks.heartbeat, self.clocks.liveness, now);
        let mut beat = now;
        loop {
            let next = liveness.next().into_iter().fold(beat, Instant::min);
            if let Err(error) = self.wait(next) {
                tracing::error!(%error, "the heartbeat thread ends");
                self.fail(Cause::Lost { rank: HOST, how: LostReason::Closed });
                return;
            }
            let now = Instant::now();
            // After a long sleep of this process the socket has the others' verdict: read it before
            // using the clock.
            self.read(&mut liveness, now);
            if self.wire.is_closed() {
                return self.closed();
            }
            if let Some(&(_, silence)) = liveness.expired(now).first() {
                self.shared.health.note_absent(HOST);
                self.fail(Cause::Lost { rank: HOST, how: LostReason::Silent(silence) });
                self.wire.send(&Message::Dead(Cause::Evicted { rank: HOST, epoch: self.epoch }));
                self.wire.flush();
                return;
            }
            if now >= beat {
                beat = now + self.clocks.heartbeat;
                self.wire.send(&Message::Heartbeat);
            }
            let end = self.take_outgoing();
            match end {
                Some(End::Abandon) => return,
                Some(End::Leave) => return self.leave(),
                None => self.wire.flush(),
            }
        }
    }

    /// Waits for something to do.
    fn wait(&self, next: Instant) -> Result<(), BootstrapError> {
        let bell = PollFd::new(&self.shared.bell, PollFlags::IN);
        let mut fds = vec![self.wire.poll_fd(), bell];
        fds.extend(self.launcher.as_ref().map(LauncherWatch::poll_fd));
        wait(&mut fds, next)?;
        let mut count = [0; 8];
        // Clears the wake-up; there is none when another event woke this thread.
        let _ = rustix::io::read(&self.shared.bell, &mut count);
        Ok(())
    }

    fn read(&mut self, liveness: &mut Liveness, now: Instant) {
        self.wire.fill();
        // Read after that: ranks leave when they see the launcher's end, so their messages about it
        // come later.
        self.look_at_launcher();
        let mut answered = false;
        while let Some(message) = self.wire.next() {
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
                        self.shared.health.note_absent(rank);
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
            self.shared.health.note_absent(HOST);
            self.fail(Cause::Lost { rank: HOST, how: LostReason::Closed });
        }
    }

    fn take_outgoing(&mut self) -> Option<End> {
        let mut state = lock(&self.shared.state);
        self.wire.send_frame(&state.outgoing);
        state.outgoing.clear();
        state.end
    }

    fn leave(&mut self) {
        self.wire.send(&Message::Bye);
        let until = Instant::now() + LAST_WORDS;
        loop {
            self.wire.flush();
            if self.wire.is_flushed() || Instant::now() >= until {
                return;
            }
            if wait(&mut [self.wire.poll_fd()], until).is_err() {
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
