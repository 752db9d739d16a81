//! The tcp lane: the interface of a NIC over sockets, for machines without one, and for tests with
//! partitions.
//!
//! One connection per pair of peers carries records both ways. The receiver writes for the sender,
//! after it has checked each target, and raises the flags itself.
//!
//! ```text
//!   rank a                              one connection                              rank b
//!   put: header, rows in place   --sendmsg-->  | record | record | ...  --readv-->  regions of b
//!   progress or waiting thread   <--readv---   | record | ...           <---------  put
//!
//!   flush:    a sends Ask(n) behind its puts;  b answers n;  a waits for it
//! ```
//!
//! *Credits* are TCP's own window. A sender that finds no room receives meanwhile, so two ranks
//! that fill each other's window cannot block each other. Rows are not packed: they go from their
//! place to the socket, and from the socket to their target. The rest of a record that a sender
//! gave up in the middle goes to an outbox, so that the stream stays whole.
//!
//! *Opening.* The lower rank of a pair listens, the other one connects:
//!
//! ```text
//!   lower rank    listens, offers its addresses --> rendezvous --> higher rank tries each, proves itself
//! ```
//!
//! *Identity* is proved as at the rendezvous, with the job's secret. The proof covers job, epoch
//! and ranks.
//!
//! *Ends.* A connection that ends while its peer has left, or is known to be lost, is no fault.
//! Otherwise the rendezvous is given a moment to report the fate of the peer. If it reports that
//! all are well, the connection broke ([`Cause::Connection`](crate::error::Cause::Connection)).

mod connection;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use connection::{Poller, Shared, TcpConnection};
use rustix::net::sockopt;

use super::{ConnectionEnd, ConnectionOffer, NetConnection, NetTransport, Regions, system};
use crate::bootstrap::wait::park;
use crate::bootstrap::{Health, PeerAuth, PeerListener, Timeouts, interrupted};
use crate::config::TcpAddress;
use crate::error::{BootstrapError, Error, LaneError};

/// Offer of a rank that connects to its peer: the peer needs no address.
const CONNECTS: &[u8] = b"connects";
/// The longest time in which a rank that waits for a connection does not look whether the world is
/// alive.
const SLICE: Duration = Duration::from_millis(20);

/// The connections of a rank.
#[derive(Debug)]
pub struct TcpTransport {
    auth: PeerAuth,
    shared: Shared,
    timeouts: Timeouts,
    /// Addresses at which peers of higher rank connect.
    offered: String,
    listener: Mutex<PeerListener>,
}

impl TcpTransport {
    /// Listens for peers.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`] if the address asked for is none of this machine.
    pub fn open(
        auth: PeerAuth,
        asked: &TcpAddress,
        timeouts: Timeouts,
        health: Arc<Health>,
        regions: Arc<Regions>,
    ) -> Result<Self, Error> {
        let addresses = ListenAddresses::find(&auth, asked)?;
        let failed = |call| {
            move |error: std::io::Error| LaneError::System { call, errno: error.raw_os_error().unwrap_or(0) }
        };
        let listener = TcpListener::bind((addresses.bind, 0)).map_err(|error| match asked {
            TcpAddress::Any => Error::from(failed("bind")(error)),
            TcpAddress::Ip(_) | TcpAddress::Interface(_) => {
                let (name, value) = ("SIDELANE_TCP_ADDRESS", asked.to_string());
                let expected = "an address of this machine, or an interface that has one";
                BootstrapError::BadVariable { name, value, expected }.into()
            }
        })?;
        let offered = addresses.to_text(listener.local_addr().map_err(failed("getsockname"))?.port());
        let listener = Mutex::new(auth.receive(listener)?);
        let (rank, grace) = (auth.rank(), timeouts.liveness / 2);
        let shared = Shared { rank, regions, health, poller: Arc::new(Poller::new()?), grace };
        Ok(TcpTransport { auth, shared, timeouts, offered, listener })
    }

    /// Connects to a peer of lower rank, at one of the addresses it offered.
    ///
    /// # Errors
    /// The reason of a refusal, if it is known. An answer from one address says more than the
    /// silence of another.
    fn connect_to(
        &self,
        peer: u32,
        addresses: &[SocketAddr],
        until: Instant,
    ) -> Result<TcpStream, Option<BootstrapError>> {
        let health = &self.shared.health;
        let stop = || health.check().is_err() || health.is_absent(peer) || interrupted();
        let mut answer = None;
        let mut silence = None;
        while Instant::now() < until && !stop() {
            for &address in addresses {
                match self.auth.connect(peer, address, &stop) {
                    Ok(stream) => return Ok(stream),
                    Err(error @ (BootstrapError::System { .. } | BootstrapError::NoRendezvous { .. })) => {
                        silence = Some(error)
                    }
                    Err(error) => answer = Some(error),
                }
            }
            park(SLICE);
        }
        Err(answer.or(silence))
    }

    /// Waits for a peer of higher rank.
    fn accept_from(&self, peer: u32, until: Instant) -> Result<Option<TcpStream>, LaneError> {
        let health = &self.shared.health;
        loop {
            let now = Instant::now();
            let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
            let come = listener.accept(peer, until.min(now + SLICE)).map_err(|error| match error {
                BootstrapError::System { call, errno } => LaneError::System { call, errno },
                _ => LaneError::System { call: "accept", errno: 0 },
            })?;
            let over = now >= until || health.check().is_err() || health.is_absent(peer) || interrupted();
            if come.is_some() || over {
                return Ok(come);
            }
        }
    }

    /// Small records leave at once; a peer that the network has swallowed is noticed even if the
    /// rendezvous still hears of it, on another way.
    fn tune(&self, stream: &TcpStream) -> Result<(), LaneError> {
        let silence = self.timeouts.liveness * 4;
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

    fn open(&self, peer: u32) -> Result<Box<dyn ConnectionEnd + '_>, Error> {
        Ok(Box::new(TcpEnd { transport: self, peer }))
    }
}

/// One end of a connection: the lower rank of a pair listens already.
struct TcpEnd<'a> {
    transport: &'a TcpTransport,
    peer: u32,
}

impl ConnectionEnd for TcpEnd<'_> {
    fn bytes(&self) -> Vec<u8> {
        let TcpEnd { transport, peer } = self;
        if *peer < transport.auth.rank() { CONNECTS.to_vec() } else { transport.offered.clone().into_bytes() }
    }

    fn connect(self: Box<Self>, offered: ConnectionOffer) -> Result<Arc<dyn NetConnection>, Error> {
        let TcpEnd { transport, peer } = *self;
        let start = Instant::now();
        let until = start + transport.timeouts.rendezvous;
        let rank = transport.auth.rank();
        let (offered, seen_at) = match peer < rank {
            true => (&offered.bytes[..], transport.auth.seen_at(peer)),
            false => (transport.offered.as_bytes(), transport.auth.seen_at(rank)),
        };
        let missing = "an offer that makes sense";
        let addresses = parse(offered, seen_at).ok_or(LaneError::NoLane { rank, peer, missing })?;
        let stream = match peer < rank {
            true => transport.connect_to(peer, &addresses, until),
            false => transport.accept_from(peer, until)?.ok_or(None),
        };
        let stream = stream.map_err(|reason| {
            let (lane, waited, reason) = ("tcp", start.elapsed(), reason.map(Box::new));
            LaneError::NoConnection { rank, peer, lane, addresses, waited, reason }
        })?;
        transport.tune(&stream)?;
        Ok(Arc::new(TcpConnection::new(peer, stream, transport.shared.clone())?))
    }
}

/// Addresses to listen at, and those that peers receive.
#[derive(Debug, PartialEq, Eq)]
struct ListenAddresses {
    /// The address to bind.
    bind: IpAddr,
    /// Addresses to try, in order. An unspecified one stands for that at which the rendezvous sees
    /// this rank.
    offered: Vec<IpAddr>,
}

impl ListenAddresses {
    /// Those of this rank: the configured address; or loopback, if all ranks meet there; or all
    /// addresses of this machine.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`] if the interface that was asked for has no address.
    fn find(auth: &PeerAuth, asked: &TcpAddress) -> Result<ListenAddresses, BootstrapError> {
        match asked {
            TcpAddress::Ip(ip) => Ok(ListenAddresses { bind: *ip, offered: vec![*ip] }),
            TcpAddress::Interface(name) => {
                let of_it = |(interface, ip): (String, IpAddr)| (interface == *name).then_some(ip);
                let ip = interfaces()?.into_iter().find_map(of_it).ok_or_else(|| {
                    let expected = "an address of this machine, or an interface that has one";
                    BootstrapError::BadVariable {
                        name: "SIDELANE_TCP_ADDRESS",
                        value: name.clone(),
                        expected,
                    }
                })?;
                Ok(ListenAddresses { bind: ip, offered: vec![ip] })
            }
            TcpAddress::Any if auth.is_local() => {
                let ip = auth.seen_at(auth.rank()).unwrap_or(Ipv4Addr::LOCALHOST.into());
                Ok(ListenAddresses { bind: ip, offered: vec![ip] })
            }
            TcpAddress::Any => {
                // The family in which the ranks have met.
                let six = (0..).map_while(|rank| auth.seen_at(rank)).any(|ip| ip.is_ipv6());
                let bind: IpAddr =
                    if six { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
                let fits = |ip: &IpAddr| !ip.is_loopback() && ip.is_ipv6() == six;
                let others = interfaces()?.into_iter().map(|(_, ip)| ip).filter(fits);
                Ok(ListenAddresses { bind, offered: std::iter::once(bind).chain(others).collect() })
            }
        }
    }

    /// The addresses as bytes for peers.
    fn to_text(&self, port: u16) -> String {
        let sockets = self.offered.iter().map(|&ip| SocketAddr::new(ip, port).to_string());
        sockets.collect::<Vec<_>>().join(",")
    }
}

/// Addresses that a peer received, if the bytes are valid. `seen_at` is where the rendezvous sees
/// their sender.
fn parse(offered: &[u8], seen_at: Option<IpAddr>) -> Option<Vec<SocketAddr>> {
    let resolve = |mut address: SocketAddr| {
        if address.ip().is_unspecified() {
            address.set_ip(seen_at?);
        }
        Some(address)
    };
    let addresses = std::str::from_utf8(offered).ok()?.split(',');
    addresses.map(|address| address.parse().ok().and_then(resolve)).collect()
}

/// Interfaces that are up, with their addresses, IPv4 first. Addresses that mean something on one
/// link only are left out.
fn interfaces() -> Result<Vec<(String, IpAddr)>, BootstrapError> {
    let all = if_addrs::get_if_addrs().map_err(|error| BootstrapError::System {
        call: "getifaddrs",
        errno: error.raw_os_error().unwrap_or(0),
    })?;
    let mut found: Vec<_> = all
        .into_iter()
        .filter(|interface| interface.is_oper_up() && !interface.is_link_local())
        .map(|interface| (interface.name.clone(), interface.ip()))
        .collect();
    found.sort_by_key(|(_, ip)| ip.is_ipv6());
    Ok(found)
}
