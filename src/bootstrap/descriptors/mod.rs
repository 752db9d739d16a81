//! Handing descriptors (memory, mostly) to the other ranks of a machine.
//!
//! ```text
//!   everyone:  abstract Unix listener with a random name
//!   hub:       gather (name, nonce, how many descriptors for whom)      all see the whole matrix: ranks that
//!                                                                       disagree find out before they connect
//!   pair i<j:  j connects to i, each proves that it was in the gather, both check the other's user
//! ```
//!
//! Abstract names are visible to every user of the machine, so a name proves nothing: the nonce
//! does, which went through the hub alone. A stranger's connection is closed, and no member waits
//! for it.
//!
//! The [`Location`]s decide which ranks are on one machine; the conversation of a pair is in
//! `passing`.

mod location;
mod passing;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
        socket_with,
    },
};

pub use location::Location;

use crate::{
    bootstrap::{
        hub::Hub,
        identity::random,
        os::{system, wait},
        wire::{Malformed, Reader, Writer},
    },
    error::BootstrapError,
};
use passing::{Exchange, Packet, Pair, Progress, check_user, receive};

/// How often the health of the world is looked at, which is no descriptor to wait for.
const SLICE: Duration = Duration::from_millis(20);
/// Connections queued at a listener; the kernel lowers it to its own bound.
const BACKLOG: i32 = 4096;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Exchanges descriptors among `members`, ranks of `hub` of which `members[me]` is this one.
/// Collective: all of them call it with the same key and the same members in the same order.
///
/// `offers(i)` are the descriptors for member `i`, or None if this pair is not linked; both sides
/// of a pair must agree. Returns what each member offered, empty where not linked. Linked members
/// must run on one machine, for one user.
pub fn exchange_fds<'fd>(
    hub: &dyn Hub,
    key: &str,
    members: &[u32],
    me: usize,
    offers: &dyn Fn(usize) -> Option<Vec<BorrowedFd<'fd>>>,
    deadline: Duration,
) -> Result<Vec<Vec<OwnedFd>>, BootstrapError> {
    let start = Instant::now();
    let offers: Vec<_> = (0..members.len()).map(|peer| offers(peer).filter(|_| peer != me)).collect();
    let listener = socket()?;
    let notice = Notice {
        name: random()?,
        nonce: random()?,
        counts: offers.iter().map(|offer| offer.as_ref().map(|offer| offer.len() as u32)).collect(),
    };
    bind(&listener, &notice.address()?).map_err(|errno| system("bind", errno))?;
    listen(&listener, BACKLOG).map_err(|errno| system("listen", errno))?;

    let blobs = hub.gather(key, me as u32, members.len() as u32, &notice.encode(), deadline)?;
    let notices = blobs.iter().zip(members).map(|(blob, rank)| {
        Notice::decode(blob, members.len())
            .map_err(|Malformed| BootstrapError::Malformed { peer: format!("rank {rank}") })
    });
    let notices: Vec<Notice> = notices.collect::<Result<_, _>>()?;
    agree(key, members, &notices)?;

    let exchange = Exchange { key, epoch: hub.epoch() };
    let table = Table { hub, members, me, exchange, notices: &notices, offers: &offers, listener };
    table.run(start, deadline)
}

/// Message of a member to the others over the hub.
struct Notice {
    name: [u8; 16],
    nonce: [u8; 32],
    /// Descriptors for each member; None where not linked.
    counts: Vec<Option<u32>>,
}

impl Notice {
    fn address(&self) -> Result<SocketAddrUnix, BootstrapError> {
        let name: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddrUnix::new_abstract_name(format!("sidelane-{name}").as_bytes())
            .map_err(|errno| system("bind", errno))
    }

    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.array(&self.name);
        w.array(&self.nonce);
        for count in &self.counts {
            w.u8(u8::from(count.is_some()));
            w.u32(count.unwrap_or(0));
        }
        w.finish()
    }

    fn decode(blob: &[u8], members: usize) -> Result<Self, Malformed> {
        let mut outer = Reader::new(blob);
        let body = outer.bytes()?;
        outer.end()?;
        let mut r = Reader::new(body);
        let (name, nonce) = (r.array()?, r.array()?);
        let count = |_| Ok((r.u8()? == 1).then_some(r.u32()?));
        let counts = (0..members).map(count).collect::<Result<_, Malformed>>()?;
        r.end()?;
        Ok(Notice { name, nonce, counts })
    }
}

/// Every member looks at every pair, so that all of them stop if one pair disagrees.
fn agree(key: &str, members: &[u32], notices: &[Notice]) -> Result<(), BootstrapError> {
    for (i, notice) in notices.iter().enumerate() {
        for j in i + 1..notices.len() {
            let (here, there) = (notice.counts[j].is_some(), notices[j].counts[i].is_some());
            if here != there {
                let word = |linked: bool| if linked { "linked" } else { "not linked" };
                return Err(BootstrapError::Disagree {
                    step: key.to_owned(),
                    rank: members[j],
                    seen: format!("{} with rank {}", word(there), members[i]),
                    expected: word(here).to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// The exchange of one member, after all know their peers.
struct Table<'a, 'fd> {
    hub: &'a dyn Hub,
    members: &'a [u32],
    me: usize,
    exchange: Exchange<'a>,
    notices: &'a [Notice],
    offers: &'a [Option<Vec<BorrowedFd<'fd>>>],
    listener: OwnedFd,
}

impl<'fd> Table<'_, 'fd> {
    fn run(self, start: Instant, deadline: Duration) -> Result<Vec<Vec<OwnedFd>>, BootstrapError> {
        let linked = |peer: &usize| self.offers[*peer].is_some();
        let mut to_call: Vec<usize> = (0..self.me).filter(linked).collect();
        let mut to_come: Vec<usize> = (self.me + 1..self.members.len()).filter(linked).collect();
        let mut visitors: Vec<OwnedFd> = Vec::new();
        let mut pairs: Vec<Pair<'fd>> = Vec::new();
        let mut results: Vec<Vec<OwnedFd>> = self.members.iter().map(|_| Vec::new()).collect();
        loop {
            let mut refused = Vec::new();
            for peer in to_call {
                match self.call(peer)? {
                    Some(pair) => pairs.push(pair),
                    None => refused.push(peer),
                }
            }
            to_call = refused;
            if !to_come.is_empty() {
                self.accept(&mut visitors)?;
            }
            for visitor in std::mem::take(&mut visitors) {
                self.hear(visitor, &mut to_come, &mut pairs, &mut visitors)?;
            }
            for mut pair in std::mem::take(&mut pairs) {
                match pair.step()? {
                    Progress::Done => results[pair.peer] = pair.received,
                    Progress::Waiting => pairs.push(pair),
                    Progress::Gone => return Err(self.gone(pair.peer)),
                }
            }
            if to_call.is_empty() && to_come.is_empty() && pairs.is_empty() {
                return Ok(results);
            }
            self.hub.health().check()?;
            let now = Instant::now();
            if now >= start + deadline {
                let open = to_call.iter().chain(&to_come).copied().chain(pairs.iter().map(|pair| pair.peer));
                let mut missing: Vec<u32> = open.map(|peer| peer as u32).collect();
                missing.sort_unstable();
                let (step, waited) = (self.exchange.key.to_owned(), now - start);
                return Err(BootstrapError::Deadline { step, missing, waited });
            }
            let mut fds: Vec<PollFd<'_>> = pairs.iter().filter_map(Pair::poll_fd).collect();
            if !to_come.is_empty() {
                fds.push(PollFd::new(&self.listener, PollFlags::IN));
            }
            fds.extend(visitors.iter().map(|visitor| PollFd::new(visitor, PollFlags::IN)));
            wait(&mut fds, (start + deadline).min(now + SLICE))?;
        }
    }

    /// Connects to a member of lower index. None: its queue is full, try again.
    fn call(&self, peer: usize) -> Result<Option<Pair<'fd>>, BootstrapError> {
        let socket = socket()?;
        match connect(&socket, &self.notices[peer].address()?) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            // The name is known but has no listener: there is no such process in this place.
            Err(Errno::CONNREFUSED) => {
                self.hub.health().check()?;
                return Err(BootstrapError::Unreachable {
                    me: self.members[self.me],
                    rank: self.members[peer],
                });
            }
            Err(errno) => return Err(system("connect", errno)),
        }
        check_user(&socket)?;
        let greeting = self.exchange.hello(&self.notices[peer].nonce, self.me, peer);
        let expects = self.exchange.hello(&self.notices[self.me].nonce, peer, self.me);
        Ok(Some(self.pair(peer, socket, greeting, Some(expects))))
    }

    fn accept(&self, visitors: &mut Vec<OwnedFd>) -> Result<(), BootstrapError> {
        loop {
            match accept_with(&self.listener, FLAGS) {
                Ok(visitor) => visitors.push(visitor),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(system("accept", errno)),
            }
        }
    }

    /// Reads from new connections: an awaited member becomes a pair, a stranger's connection is
    /// closed.
    fn hear(
        &self,
        visitor: OwnedFd,
        to_come: &mut Vec<usize>,
        pairs: &mut Vec<Pair<'fd>>,
        visitors: &mut Vec<OwnedFd>,
    ) -> Result<(), BootstrapError> {
        let hello = match receive(&visitor)? {
            Packet::Bytes(hello) => hello,
            Packet::Gone => return Ok(()),
            Packet::Later => {
                visitors.push(visitor);
                return Ok(());
            }
        };
        let caller = self.exchange.caller(&hello, &self.notices[self.me].nonce, self.me);
        let Some(at) = caller.and_then(|caller| to_come.iter().position(|&peer| peer == caller)) else {
            tracing::warn!("a stranger knocked at the exchange of descriptors");
            return Ok(());
        };
        check_user(&visitor)?;
        let peer = to_come.swap_remove(at);
        let greeting = self.exchange.hello(&self.notices[peer].nonce, self.me, peer);
        pairs.push(self.pair(peer, visitor, greeting, None));
        Ok(())
    }

    fn pair(&self, peer: usize, socket: OwnedFd, greeting: Vec<u8>, expects: Option<Vec<u8>>) -> Pair<'fd> {
        let offer = self.offers[peer].as_deref().unwrap_or_default();
        let awaited = self.notices[peer].counts[self.me].unwrap_or(0) as usize;
        Pair::new(peer, socket, greeting, expects, offer, awaited)
    }

    /// A member that hung up: lost, if the world knows; otherwise it gave up.
    fn gone(&self, peer: usize) -> BootstrapError {
        match self.hub.health().check() {
            Err(cause) => cause.into(),
            Ok(()) => BootstrapError::Left { rank: self.members[peer], step: self.exchange.key.to_owned() },
        }
    }
}

fn socket() -> Result<OwnedFd, BootstrapError> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
        .map_err(|errno| system("socket", errno))
}
