//! Joining a rendezvous: the guest's side of a connection, from the first byte to its rank.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use crate::{
    bootstrap::{
        identity::{Secret, random},
        os::failed,
        wire::{
            Hello, Initiator, JoinRefusal, ListenAddress, Message, MessageConnection, PROTOCOL, RendezvousId,
        },
    },
    error::BootstrapError,
};

/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);
/// Bound of the proof of a host that has challenged.
const ANSWER: Duration = Duration::from_secs(5);
/// Bound of the query for missing ranks.
const LAST_QUESTION: Duration = Duration::from_secs(1);

/// A place in a world.
pub(in crate::bootstrap) struct Membership {
    pub wire: MessageConnection,
    pub rank: u32,
    /// For each rank of the new world, its rank before.
    pub members: Vec<u32>,
    /// Where each rank of the new world listens.
    pub doors: Vec<SocketAddr>,
    /// Where this one does.
    pub standing: TcpListener,
}

/// Reason why a guest cannot join.
pub(super) enum JoinError {
    /// No process, another process, or a closed connection: try again or elsewhere.
    Nobody,
    /// Of this job, and no.
    Refused(JoinRefusal),
    /// This side failed.
    Failed(BootstrapError),
}

/// The joining rank, and its waiting time.
pub(super) struct JoinRequest<'a> {
    pub secret: &'a Secret,
    pub meeting: RendezvousId,
    pub rank: u32,
    /// Whether other machines must reach the standing listener.
    pub beyond_loopback: bool,
    /// Bound of the host's challenge.
    pub greeted_until: Instant,
    /// Bound of the whole meeting.
    pub until: Instant,
    /// Whether to stop waiting for this host.
    pub stop: &'a dyn Fn() -> bool,
}

impl JoinRequest<'_> {
    /// Knocks at an address.
    pub(super) fn at(&self, address: SocketAddr) -> Result<Membership, JoinError> {
        let patience = self.greeted_until.saturating_duration_since(Instant::now()).min(CONNECT);
        let patience = patience.max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&address, patience).map_err(|_| JoinError::Nobody)?;
        let local = stream.local_addr().map_err(|_| JoinError::Nobody)?.ip();
        let mut wire = MessageConnection::new(stream).map_err(|_| JoinError::Nobody)?;
        let standing = self.listen(local)?;
        let port = standing.local_addr().map_err(fail("getsockname"))?.port();

        let RendezvousId { job, size, epoch, host } = self.meeting;
        let nonce = random().map_err(JoinError::Failed)?;
        let hello = Hello { version: PROTOCOL, job, rank: self.rank, size, epoch, host, port, nonce };
        let guest = Initiator::new(self.secret.clone(), hello);
        let greeted = shake_hands(&mut wire, guest, self.greeted_until, self.stop);
        greeted.ok_or(JoinError::Nobody)?.map_err(miss)?;
        let verdict = wire.await_message(self.until, self.stop).or_else(|| {
            wire.send(&Message::Withdraw { ticket: 0 });
            wire.await_message(Instant::now() + LAST_QUESTION, &|| false)
        });
        match verdict.ok_or(JoinError::Nobody)? {
            Message::Refused(refusal) => Err(miss(refusal)),
            Message::Welcome { rank, members, doors } => {
                let mine = members.get(rank as usize) == Some(&self.rank);
                if !mine || members.len() != doors.len() {
                    return Err(JoinError::Refused(JoinRefusal::Malformed));
                }
                let doors = doors.iter().map(|door| resolve(door, address.ip())).collect();
                Ok(Membership { wire, rank, members, doors, standing })
            }
            _ => Err(JoinError::Refused(JoinRefusal::Malformed)),
        }
    }

    /// The listener at which this rank would host a rebuild.
    fn listen(&self, local: IpAddr) -> Result<TcpListener, JoinError> {
        let ip = match (local, self.beyond_loopback && local.is_loopback()) {
            // The host's own machine is reached by its loopback address here, but not from
            // elsewhere.
            (IpAddr::V4(_), true) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (IpAddr::V6(_), true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            (local, false) => local,
        };
        let standing = TcpListener::bind((ip, 0)).map_err(fail("bind"))?;
        standing.set_nonblocking(true).map_err(fail("fcntl"))?;
        Ok(standing)
    }
}

/// The guest's part of the handshake. None if the host is silent.
pub(super) fn shake_hands(
    wire: &mut MessageConnection,
    mut guest: Initiator,
    greeted_until: Instant,
    stop: &dyn Fn() -> bool,
) -> Option<Result<(), JoinRefusal>> {
    wire.send(&guest.hello());
    let challenge = wire.await_message(greeted_until, stop)?;
    let proof = match guest.answer(challenge) {
        Ok(proof) => proof,
        Err(refusal) => return Some(Err(refusal)),
    };
    wire.send(&proof);
    let answer = wire.await_message(Instant::now() + ANSWER, stop)?;
    let known = guest.recognise(answer);
    if known.is_ok() {
        wire.trust();
    }
    Some(known)
}

/// Another job, or another protocol: not the wanted host.
fn miss(refusal: JoinRefusal) -> JoinError {
    match refusal {
        JoinRefusal::OtherJob | JoinRefusal::Malformed => JoinError::Nobody,
        refusal => JoinError::Refused(refusal),
    }
}

fn fail(call: &'static str) -> impl Fn(std::io::Error) -> JoinError {
    move |error| JoinError::Failed(failed(call, &error))
}

/// A door without an address is on the machine of the host.
fn resolve(door: &ListenAddress, host: IpAddr) -> SocketAddr {
    SocketAddr::new(door.ip.unwrap_or(host), door.port)
}
