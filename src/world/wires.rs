//! Laying the wires of a group: every pair of members that the route wires, and that has no wire
//! yet, gets one.
//!
//! ```text
//!   open      each rank opens its ends; a rank that cannot open one offers none
//!   offer     ranks exchange what the other ends need
//!   join      each rank joins its ends to those that it was offered
//!   verdict   fine, I failed, or I saw another fail; all ranks name the first that failed
//! ```

use std::sync::Arc;

use super::Group;
use super::agree::Failure;
use crate::bootstrap::exchange_fds;
use crate::error::{BootstrapError, Error, LaneError, MemoryError};
use crate::lane::{ConnectionEnd, ConnectionOffer, NetConnection, NetTransport, ProgressThread};
use crate::topology::Paths;

/// Ends of this rank, by peer.
type Ends<'a> = Vec<Box<dyn ConnectionEnd + 'a>>;

/// Lays what wires are missing. Collective over the group.
///
/// # Errors
/// Of the lane at a rank that fails; [`LaneError::PeerUnsupported`] with the same words at the
/// others.
pub(super) fn lay(group: &Group, paths: &Paths) -> Result<(), Error> {
    match &group.shared.rails {
        Some(rails) => lay_by(&*rails.wiring, &rails.card, group, paths),
        None => Ok(()),
    }
}

fn lay_by(
    wiring: &dyn NetTransport,
    card: &ProgressThread,
    group: &Group,
    paths: &Paths,
) -> Result<(), Error> {
    let wanted = |&(_, (&rank, position)): &(usize, (&u32, u32))| {
        paths.needs_connection(position) && card.connection_to(rank).is_none()
    };
    let members = group.ranks().iter().zip(0..).enumerate();
    let peers: Vec<(usize, u32)> = members.filter(wanted).map(|(at, (&rank, _))| (at, rank)).collect();
    let opened: Result<Ends<'_>, Error> = peers.iter().map(|&(_, peer)| wiring.open(peer)).collect();
    let offered = match wiring.passes_descriptors() {
        true => pass_descriptors(group, &peers, opened.as_deref().unwrap_or_default()),
        false => pass_bytes(group, &peers, opened.as_deref().unwrap_or_default()),
    };
    let joined = opened.and_then(|ends| join(group.shared.hub.rank(), &peers, ends, offered?));
    // No rank sends before all ends are joined, and all learn of it if one is not.
    let answers = group.gather(&Failure::answer(&joined, is_own));
    match (joined, answers.as_deref().map(Failure::named)) {
        (Err(own), _) if is_own(&own) => Err(own),
        (_, Ok(Some(Failure { at, grave: true, reason })))
        | (Ok(_), Ok(Some(Failure { at, reason, .. }))) => {
            Err(LaneError::PeerUnsupported { rank: group.ranks()[at], lane: wiring.lane(), reason }.into())
        }
        (Err(seen), Ok(_)) => Err(seen),
        (Ok(joined), Ok(None)) => Ok(joined.into_iter().try_for_each(|rail| card.attach(rail))?),
        (_, Err(_)) => answers.map(drop),
    }
}

/// Whether the rank itself is at fault, because its own machine refused something. All other errors
/// concern another rank.
fn is_own(error: &Error) -> bool {
    match error {
        Error::Bootstrap(error) => matches!(error, BootstrapError::System { .. }),
        Error::Lane(error) => matches!(error, LaneError::System { .. } | LaneError::Verbs(_)),
        Error::Memory(error) => matches!(error, MemoryError::System { .. }),
        _ => false,
    }
}

/// Joins the ends of this rank to those of its peers. After a failure it joins the others all the
/// same, as their ranks wait for it. It stops where a peer did not come in time: they waited as
/// long.
fn join(
    own: u32,
    peers: &[(usize, u32)],
    ends: Ends<'_>,
    offered: Vec<ConnectionOffer>,
) -> Result<Vec<Arc<dyn NetConnection>>, Error> {
    let (mut joined, mut failed) = (Vec::new(), Ok(()));
    for ((&(_, peer), end), offered) in peers.iter().zip(ends).zip(offered) {
        let missing = "its end of a wire";
        let rail = match offered.is_empty() {
            true => Err(LaneError::NoLane { rank: own, peer, missing }.into()),
            false => end.connect(offered),
        };
        match rail {
            Ok(rail) => joined.push(rail),
            Err(error @ Error::Lane(LaneError::NoConnection { .. })) => {
                return Err(failed.err().unwrap_or(error));
            }
            Err(error) if failed.is_ok() || is_own(&error) => failed = Err(error),
            Err(_) => {}
        }
    }
    failed.map(|()| joined)
}

/// Offers by the rendezvous: empty ones where this rank has no ends.
fn pass_bytes(
    group: &Group,
    peers: &[(usize, u32)],
    ends: &[Box<dyn ConnectionEnd + '_>],
) -> Result<Vec<ConnectionOffer>, Error> {
    let (hub, step) = (group.shared.hub.as_ref(), group.step());
    let (own, deadline) = (hub.rank(), group.shared.options.clocks.rendezvous);
    let key = |from: u32, to: u32| format!("{step}/{from}-{to}");
    for (nth, &(_, peer)) in peers.iter().enumerate() {
        let offer = ends.get(nth).map(|end| end.bytes()).unwrap_or_default();
        hub.set(&key(own, peer), &offer)?;
    }
    peers.iter().map(|&(_, peer)| Ok(hub.get(&key(peer, own), deadline)?.into())).collect()
}

/// Offers between processes of one machine: empty ones where this rank has no ends.
fn pass_descriptors(
    group: &Group,
    peers: &[(usize, u32)],
    ends: &[Box<dyn ConnectionEnd + '_>],
) -> Result<Vec<ConnectionOffer>, Error> {
    let offer = |member: usize| {
        let nth = peers.iter().position(|&(at, _)| at == member)?;
        Some(ends.get(nth).map(|end| end.descriptors()).unwrap_or_default())
    };
    let (hub, me) = (group.shared.hub.as_ref(), group.rank() as usize);
    let deadline = group.shared.options.clocks.rendezvous;
    let mut received = exchange_fds(hub, &group.step(), group.ranks(), me, &offer, deadline)?;
    let mut take = |&(at, _): &(usize, u32)| std::mem::take(&mut received[at]);
    Ok(peers.iter().map(|peer| ConnectionOffer { bytes: Vec::new(), descriptors: take(peer) }).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::fd::BorrowedFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Mutex;

    use super::super::rails::NetState;
    use super::*;
    use crate::config::Config;
    use crate::lane::LOOPBACK;
    use crate::topology::Route;
    use crate::{Options, World};

    /// Step at which a rank fails.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Step {
        Open,
        Join,
    }

    /// The wires of a rank, of which the end to one peer may fail.
    #[derive(Debug)]
    struct Failing<'a> {
        wires: &'a dyn NetTransport,
        fails: Option<(u32, Step)>,
        /// Inodes of the segments of all ends.
        segments: &'a Mutex<HashSet<u64>>,
    }

    struct FailingEnd<'a> {
        end: Box<dyn ConnectionEnd + 'a>,
        fails: bool,
    }

    fn failure() -> Error {
        LaneError::System { call: "open", errno: 24 }.into()
    }

    impl NetTransport for Failing<'_> {
        fn lane(&self) -> &'static str {
            self.wires.lane()
        }

        fn passes_descriptors(&self) -> bool {
            self.wires.passes_descriptors()
        }

        fn open(&self, peer: u32) -> Result<Box<dyn ConnectionEnd + '_>, Error> {
            if self.fails == Some((peer, Step::Open)) {
                return Err(failure());
            }
            let end = self.wires.open(peer)?;
            let inodes =
                end.descriptors().into_iter().skip(1).map(|fd| rustix::fs::fstat(fd).unwrap().st_ino);
            self.segments.lock().unwrap().extend(inodes);
            Ok(Box::new(FailingEnd { end, fails: self.fails == Some((peer, Step::Join)) }))
        }
    }

    impl ConnectionEnd for FailingEnd<'_> {
        fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
            self.end.descriptors()
        }

        fn connect(self: Box<Self>, offered: ConnectionOffer) -> Result<Arc<dyn NetConnection>, Error> {
            if self.fails { Err(failure()) } else { self.end.connect(offered) }
        }
    }

    /// Errors of four ranks on two nodes, of which rank 3 fails, and the segments of their ends.
    fn errors(step: Step) -> (Vec<Error>, HashSet<u64>) {
        let config = Config { heap: 4 << 20, symmetric: 1 << 20, ..Config::default() };
        let options = Options { config, ..Options::default() };
        let worlds = World::threads_with(&[0, 0, 1, 1], &options).unwrap();
        let segments = Mutex::default();
        let lay = |world: World| {
            let group = world.all().unwrap();
            let NetState { wiring, card, .. } = group.shared.rails.as_ref().unwrap();
            let nodes = group.nodes();
            let paths = Paths::new(&nodes, Route::Direct, group.rank());
            let fails = (group.rank() == 3).then_some((0, step));
            let failing = Failing { wires: &**wiring, fails, segments: &segments };
            let error = lay_by(&failing, card, &group, &paths).unwrap_err();
            // The world is as good as before.
            group.lanes(Route::Direct).unwrap();
            error
        };
        let errors = std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| lay(world))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        (errors, segments.into_inner().unwrap())
    }

    #[test]
    fn failed_end_of_a_wire_names_its_rank_on_every_rank() {
        for step in [Step::Open, Step::Join] {
            let (errors, _) = errors(step);
            let reason = failure().to_string();
            let seen = Error::from(LaneError::PeerUnsupported { rank: 3, lane: LOOPBACK, reason });
            assert_eq!(errors, [seen.clone(), seen.clone(), seen, failure()], "{step:?}");
        }
    }

    #[test]
    fn segments_of_failed_wires_are_given_back() {
        for step in [Step::Open, Step::Join] {
            let (_, segments) = errors(step);
            assert!(!segments.is_empty());
            let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let open = open.filter_map(|fd| Some(std::fs::metadata(fd.path()).ok()?.ino()));
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let mapped = maps.lines().filter(|line| line.contains("sidelane-wire"));
            let mapped = mapped.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
            let held: HashSet<u64> = open.chain(mapped).collect();
            assert!(segments.is_disjoint(&held), "{step:?}");
        }
    }
}
