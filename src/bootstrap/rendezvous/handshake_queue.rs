//! Where pending connections wait until they are authenticated.
//!
//! ```text
//!   listener ──► visitor: Hello, Challenge, Proofs ──► arrival (rank, wire)
//!                   └── silent or malformed: closed, and no other peer waits for it
//! ```

use std::{
    io::ErrorKind,
    net::TcpListener,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use crate::bootstrap::{
    identity::{Secret, random},
    wire::{Hello, JoinRefusal, Message, MessageConnection, RendezvousId, Responder},
};

/// Time limit of an authentication.
const PATIENCE: Duration = Duration::from_secs(5);
/// Visitors at a time; more wait in the listener's queue.
const MAX_VISITORS: usize = 1024;
/// Pause after the system had no descriptor left for a visitor.
const REST: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct PendingHandshake {
    wire: MessageConnection,
    porter: Responder,
    until: Instant,
}

/// An authenticated rank of this job.
#[derive(Debug)]
pub(in crate::bootstrap) struct AuthenticatedPeer {
    pub hello: Hello,
    pub wire: MessageConnection,
}

impl AuthenticatedPeer {
    /// Closes the connection. Queued bytes are sent; a reason that does not fit the socket's buffer
    /// is lost.
    pub(in crate::bootstrap) fn refuse(mut self, refusal: JoinRefusal) {
        self.wire.send(&Message::Refused(refusal));
        self.wire.flush();
    }
}

/// A listener and those it has not yet let in.
#[derive(Debug)]
pub(in crate::bootstrap) struct HandshakeQueue {
    listener: TcpListener,
    secret: Secret,
    meeting: RendezvousId,
    visitors: Vec<PendingHandshake>,
    rests_until: Option<Instant>,
}

impl HandshakeQueue {
    /// Visitors come through a listener that does not block.
    pub(super) fn new(listener: TcpListener, secret: Secret, meeting: RendezvousId) -> Self {
        HandshakeQueue { listener, secret, meeting, visitors: Vec::new(), rests_until: None }
    }

    pub(in crate::bootstrap) fn meeting(&self) -> &RendezvousId {
        &self.meeting
    }

    /// What to wait for.
    pub(in crate::bootstrap) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = self.rests_until.is_none() && self.visitors.len() < MAX_VISITORS;
        let listener = open.then(|| PollFd::new(&self.listener, PollFlags::IN));
        listener.into_iter().chain(self.visitors.iter().map(|visitor| visitor.wire.poll_fd()))
    }

    /// When to look even if nothing comes.
    pub(in crate::bootstrap) fn next(&self) -> Option<Instant> {
        self.visitors.iter().map(|visitor| visitor.until).chain(self.rests_until).min()
    }

    /// Advances the pending handshakes by one step. Returns the authenticated peers.
    pub(in crate::bootstrap) fn turn(&mut self, now: Instant) -> Vec<AuthenticatedPeer> {
        self.rests_until = self.rests_until.filter(|&until| now < until);
        if self.rests_until.is_none() {
            self.accept(now);
        }
        let mut arrivals = Vec::new();
        for visitor in std::mem::take(&mut self.visitors) {
            match visitor.step(now) {
                Next::Stays(visitor) => self.visitors.push(visitor),
                Next::Arrives(arrival) => arrivals.push(arrival),
                Next::Leaves => {}
            }
        }
        arrivals
    }

    fn accept(&mut self, now: Instant) {
        while self.visitors.len() < MAX_VISITORS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let (Ok(wire), Ok(nonce)) = (MessageConnection::new(stream), random()) else { continue };
                    let porter = Responder::new(self.secret.clone(), self.meeting, nonce);
                    self.visitors.push(PendingHandshake { wire, porter, until: now + PATIENCE });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept at the rendezvous");
                    self.rests_until = Some(now + REST);
                    return;
                }
            }
        }
    }
}

/// What becomes of a visitor.
enum Next {
    Stays(PendingHandshake),
    Arrives(AuthenticatedPeer),
    Leaves,
}

impl PendingHandshake {
    fn step(mut self, now: Instant) -> Next {
        self.wire.fill();
        while let Some(message) = self.wire.next() {
            if self.porter.challenged() {
                return self.judge(message);
            }
            match self.porter.challenge(message) {
                Ok(challenge) => self.wire.send(&challenge),
                Err(refusal) => return show_out(self.wire, refusal),
            }
        }
        self.wire.flush();
        if self.wire.is_closed() || now >= self.until { Next::Leaves } else { Next::Stays(self) }
    }

    fn judge(mut self, message: Message) -> Next {
        let (guest, proof) = match self.porter.recognise(message) {
            Ok(known) => known,
            Err(refusal) => return show_out(self.wire, refusal),
        };
        self.wire.send(&proof);
        match guest.admit() {
            Ok(hello) => {
                self.wire.trust();
                Next::Arrives(AuthenticatedPeer { hello, wire: self.wire })
            }
            Err(refusal) => show_out(self.wire, refusal),
        }
    }
}

fn show_out(mut wire: MessageConnection, refusal: JoinRefusal) -> Next {
    tracing::warn!(peer = ?wire.peer(), ?refusal, "refused at the rendezvous");
    wire.send(&Message::Refused(refusal));
    wire.flush();
    Next::Leaves
}
