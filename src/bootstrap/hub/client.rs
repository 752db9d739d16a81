//! The hub of a process: requests over the link to the coordinator.

use std::{
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Hub,
    link::{End, HOST, Link, Shared},
};
use crate::{
    bootstrap::{
        identity::{LauncherPipe, Secret},
        os::failed,
        rendezvous::{Membership, PeerAuth, rebuild},
        watch::{Health, LauncherWatch, Timeouts, lock},
        wire::{Answer, MAX_FRAME, Message},
    },
    error::{BootstrapError, Cause},
};

/// What stays the same from epoch to epoch.
#[derive(Clone)]
pub(in crate::bootstrap) struct Job {
    pub digest: [u8; 32],
    pub secret: Secret,
    pub clocks: Timeouts,
    pub launcher: Option<LauncherPipe>,
}

/// A rank's connection to its world.
pub(in crate::bootstrap) struct TcpHub {
    pub(in crate::bootstrap) job: Job,
    pub(in crate::bootstrap) rank: u32,
    pub(in crate::bootstrap) size: u32,
    pub(in crate::bootstrap) epoch: u16,
    pub(super) shared: Arc<Shared>,
    /// Where each rank listens for a rebuild.
    pub(in crate::bootstrap) doors: Vec<SocketAddr>,
    /// Where this rank does.
    pub(in crate::bootstrap) standing: TcpListener,
    tickets: AtomicU64,
    link: Option<JoinHandle<()>>,
    coordinator: Option<JoinHandle<()>>,
}

impl TcpHub {
    /// Joins the world of an epoch. `coordinator` is the thread that hosts it, if it is ours.
    pub(in crate::bootstrap) fn new(
        job: Job,
        epoch: u16,
        seat: Membership,
        coordinator: Option<JoinHandle<()>>,
    ) -> Result<Self, BootstrapError> {
        let launcher = job.launcher.map(LauncherWatch::open).transpose()?;
        let shared = Shared::new(Arc::new(Health::new()))?;
        let Membership { wire, rank, members, doors, standing } = seat;
        let link = Link { shared: shared.clone(), wire, launcher, clocks: job.clocks, rank, epoch };
        let name = format!("sidelane link {rank}");
        let link = thread::Builder::new().name(name).spawn(move || link.run());
        let link = Some(link.map_err(|error| failed("thread spawn", &error))?);
        let (size, tickets) = (members.len() as u32, AtomicU64::new(0));
        Ok(TcpHub { job, rank, size, epoch, shared, doors, standing, tickets, link, coordinator })
    }

    /// Sends a request and sleeps until its answer, a failure of the world, or the deadline.
    fn request(
        &self,
        step: &str,
        deadline: Duration,
        message: impl FnOnce(u64) -> Message,
    ) -> Result<Answer, BootstrapError> {
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
                until = now + self.job.clocks.liveness;
                state.outgoing.extend(Message::Withdraw { ticket }.encode());
                self.shared.ring();
            }
            let left = until.saturating_duration_since(Instant::now());
            let woken = self.shared.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    fn finish(&mut self, end: End) {
        self.shared.end(end);
        // The link first: its goodbye is what ends the coordinator.
        for thread in [self.link.take(), self.coordinator.take()].into_iter().flatten() {
            // A thread that panicked has said so already.
            let _ = thread.join();
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
        Answer::Missing(missing) => BootstrapError::Deadline { step, missing, waited },
        Answer::Left(rank) => BootstrapError::Left { rank, step },
        Answer::Disagree { rank, seen, expected } => BootstrapError::Disagree { step, rank, seen, expected },
        Answer::TooLarge(bytes) => BootstrapError::TooLarge { step, bytes, limit: MAX_FRAME as u64 },
        Answer::Done | Answer::Value(_) | Answer::Gathered(_) => {
            BootstrapError::World(Cause::Protocol { rank: HOST })
        }
    }
}

impl Hub for TcpHub {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn epoch(&self) -> u16 {
        self.epoch
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        let (start, deadline) = (Instant::now(), self.job.clocks.deadline);
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

    fn health(&self) -> &Arc<Health> {
        &self.shared.health
    }

    fn cancel(&self, cause: Cause) {
        // Sent before it is recorded here: a caller that sees the failure may end this process
        // next.
        self.shared.post(&Message::Dead(cause.clone()));
        self.shared.health.fail(cause);
    }

    fn rebuild(&self, deadline: Duration) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
        rebuild(self, deadline)
    }

    fn pass(&self) -> Result<PeerAuth, BootstrapError> {
        let doors = self.doors.iter().map(SocketAddr::ip).collect();
        Ok(PeerAuth::new(self.job.secret.clone(), self.job.digest, self.rank, self.epoch, doors))
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
