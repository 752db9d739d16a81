//! Laying the connections of a rank: the lower rank of a pair listens, the other one connects.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::address::{ListenAddresses, parse};
use super::bells::Poller;
use super::link::{Shared, TcpConnection};
use crate::bootstrap::{Health, PeerAuth, PeerListener, Timeouts};
use crate::config::TcpAddress;
use crate::error::{BootstrapError, Error, LaneError};
use crate::lane::net::{NetConnection, NetTransport, Regions, WireEnd, WireOffer, system};

/// Offer of a rank that connects to its peer: empty, because the peer needs no address.
const GUEST: &[u8] = b"guest";
/// The longest time in which a rank that waits for a connection does not look whether the world is
/// alive.
const SLICE: Duration = Duration::from_millis(20);

/// The connections of a rank.
#[derive(Debug)]
pub struct TcpTransport {
    pass: PeerAuth,
    shared: Shared,
    clocks: Timeouts,
    /// Addresses at which peers of higher rank connect.
    told: String,
    reception: Mutex<PeerListener>,
}

impl TcpTransport {
    /// Listens for peers.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`] if the address asked for is none of this machine.
    pub fn open(
        pass: PeerAuth,
        asked: &TcpAddress,
        clocks: Timeouts,
        health: Arc<Health>,
        regions: Arc<Regions>,
    ) -> Result<Self, Error> {
        let places = ListenAddresses::find(&pass, asked)?;
        let failed = |call| {
            move |error: std::io::Error| LaneError::System { call, errno: error.raw_os_error().unwrap_or(0) }
        };
        let listener = TcpListener::bind((places.bind, 0)).map_err(|error| match asked {
            TcpAddress::Any => Error::from(failed("bind")(error)),
            TcpAddress::Ip(_) | TcpAddress::Interface(_) => {
                let (name, value) = ("SIDELANE_TCP_ADDRESS", asked.to_string());
                let expected = "an address of this machine, or an interface that has one";
                BootstrapError::BadVariable { name, value, expected }.into()
            }
        })?;
        let told = places.to_text(listener.local_addr().map_err(failed("getsockname"))?.port());
        let reception = Mutex::new(pass.receive(listener)?);
        let (rank, grace) = (pass.rank(), clocks.liveness / 2);
        let shared = Shared { rank, regions, health, bells: Arc::new(Poller::new()?), grace };
        Ok(TcpTransport { pass, shared, clocks, told, reception })
    }

    /// Connects to a peer of lower rank, at one of the addresses it offered.
    ///
    /// # Errors
    /// The reason of a refusal, if it is known. An answer from one address says more than the
    /// silence of another.
    fn knock(
        &self,
        peer: u32,
        addresses: &[SocketAddr],
        until: Instant,
    ) -> Result<TcpStream, Option<BootstrapError>> {
        let health = &self.shared.health;
        let stop = || health.check().is_err() || health.is_absent(peer);
        let mut answer = None;
        let mut silence = None;
        while Instant::now() < until && !stop() {
            for &address in addresses {
                match self.pass.connect(peer, address, &stop) {
                    Ok(stream) => return Ok(stream),
                    Err(error @ (BootstrapError::System { .. } | BootstrapError::NoRendezvous { .. })) => {
                        silence = Some(error)
                    }
                    Err(error) => answer = Some(error),
                }
            }
            std::thread::park_timeout(SLICE);
        }
        Err(answer.or(silence))
    }

    /// Waits for a peer of higher rank.
    fn admit(&self, peer: u32, until: Instant) -> Result<Option<TcpStream>, LaneError> {
        let health = &self.shared.health;
        loop {
            let now = Instant::now();
            let mut reception = self.reception.lock().unwrap_or_else(PoisonError::into_inner);
            let come = reception.accept(peer, until.min(now + SLICE)).map_err(|error| match error {
                BootstrapError::System { call, errno } => LaneError::System { call, errno },
                _ => LaneError::System { call: "accept", errno: 0 },
            })?;
            let over = now >= until || health.check().is_err() || health.is_absent(peer);
            if come.is_some() || over {
                return Ok(come);
            }
        }
    }

    /// Small records leave at once; a peer that the network has swallowed is noticed even if the
    /// rendezvous still hears of it, on another way.
    fn tune(&self, stream: &TcpStream) -> Result<(), LaneError> {
        let silence = self.clocks.liveness * 4;
        let second = Duration::from_secs(1);
        sockopt::set_tcp_nodelay(stream, true).map_err(system("setsockopt(TCP_NODELAY)"))?;
        sockopt::set_socket_keepalive(stream, true).map_err(system("setsockopt(SO_KEEPALIVE)"))?;
        sockopt::set_tcp_keepidle(stream, (silence / 2).max(second))
            .map_err(system("setsockopt(TCP_KEEPIDLE)"))?;
        sockopt::set_tcp_keepintvl(stream, second).map_err(system("setsockopt(TCP_KEEPINTVL)"))?;
        let silence = silence.as_millis().try_into().unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, silence).map_err(system("setsockopt(TCP_USER_TIMEOUT)"))
    }
}

impl NetTransport for TcpTransport {
    fn lane(&self) -> &'static str {
        "tcp"
    }

    fn open(&self, peer: u32) -> Result<Box<dyn WireEnd + '_>, Error> {
        Ok(Box::new(TcpEnd { wires: self, peer }))
    }
}

/// One end of a connection: the lower rank of a pair listens already.
struct TcpEnd<'a> {
    wires: &'a TcpTransport,
    peer: u32,
}

impl WireEnd for TcpEnd<'_> {
    fn bytes(&self) -> Vec<u8> {
        let TcpEnd { wires, peer } = self;
        if *peer < wires.pass.rank() { GUEST.to_vec() } else { wires.told.clone().into_bytes() }
    }

    fn connect(self: Box<Self>, offered: WireOffer) -> Result<Arc<dyn NetConnection>, Error> {
        let TcpEnd { wires, peer } = *self;
        let start = Instant::now();
        let until = start + wires.clocks.rendezvous;
        let rank = wires.pass.rank();
        let (told, seen_at) = match peer < rank {
            true => (&offered.bytes[..], wires.pass.seen_at(peer)),
            false => (wires.told.as_bytes(), wires.pass.seen_at(rank)),
        };
        let missing = "an offer that makes sense";
        let addresses = parse(told, seen_at).ok_or(LaneError::NoLane { rank, peer, missing })?;
        let stream = match peer < rank {
            true => wires.knock(peer, &addresses, until),
            false => wires.admit(peer, until)?.ok_or(None),
        };
        let stream = stream.map_err(|reason| {
            let (lane, waited, reason) = ("tcp", start.elapsed(), reason.map(Box::new));
            LaneError::NoConnection { rank, peer, lane, addresses, waited, reason }
        })?;
        wires.tune(&stream)?;
        Ok(Arc::new(TcpConnection::new(peer, stream, wires.shared.clone())?))
    }
}
