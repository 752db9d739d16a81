//! The net of a world: the lane between nodes, which all ranks choose together, and its
//! connections.
//!
//! The lane is chosen once per world, when all ranks have opened it and registered their heaps.
//! Every pair of members that the route of a group connects, and that has no connection yet, gets
//! one:
//!
//! ```text
//!   open      each rank opens its ends; a rank that cannot open one offers none
//!   offer     ranks exchange what the other ends need
//!   join      each rank joins its ends to those that it was offered
//!   verdict   fine, I failed, or I saw another fail; all ranks name the first that failed
//! ```

use std::sync::Arc;

use super::setup::oversubscribed;
use super::{Group, Options};
use crate::bootstrap::{Hub, Location, exchange_fds};
use crate::config::NetChoice;
use crate::error::{BootstrapError, Error, LaneError, MemoryError, VerbsError};
use crate::lane::{
    ConnectionEnd, ConnectionOffer, DeviceMemory, LOOPBACK, LinkEmulator, LoopbackTransport, NetConnection,
    NetTransport, NoGpuDirect, ProgressThread, Region, Registration, Setup, TcpTransport, VerbsTransport,
};
use crate::memory::Heap;
use crate::topology::{NodeMap, Paths};

/// The connections of a rank, and the thread that serves them.
#[derive(Debug)]
pub(crate) struct NetState {
    /// Attends to all of them.
    pub thread: ProgressThread,
    /// Lays them.
    pub transport: Box<dyn NetTransport>,
    /// The lane that was chosen.
    pub report: NetReport,
}

/// This rank's part of a lane.
type Opened = Result<Box<dyn NetTransport>, Error>;

/// A lane between nodes, as it is opened.
struct Net {
    lane: &'static str,
    open: fn(&NetSelection<'_>, &ProgressThread) -> Opened,
}

/// The lanes between nodes. [`NetState::open`] says which one a world takes.
const LOOPBACK_NET: Net = Net { lane: LOOPBACK, open: |place, thread| place.segments(thread) };
const VERBS_NET: Net = Net { lane: "verbs", open: |place, thread| place.nics(thread) };
const TCP_NET: Net = Net { lane: "tcp", open: |place, thread| place.tcp(thread) };

/// Which lane joins the nodes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetReport {
    /// Name of the lane.
    pub lane: &'static str,
    /// The reason for it in words; of verbs, also how signals travel, and why.
    pub reason: String,
    /// This rank's NICs; empty where the lane needs none.
    pub nics: Vec<String>,
}

/// Reasons for a lane.
const REQUESTED: &str = "requested";
const ONE_MACHINE: &str = "all nodes on one machine";
const ALL_HAVE_NICS: &str = "the nodes are on several machines, and all ranks have NICs";

/// First byte of the answer of a rank that has opened a lane; a [`Failure`] begins with 0 or 1.
const OPENED: u8 = 2;

/// Number of the heap among regions: the first.
const HEAP: u32 = 0;

/// Facts that the choice depends on.
pub(super) struct NetSelection<'a> {
    /// The meeting point.
    pub hub: &'a dyn Hub,
    /// Where each rank runs.
    pub machines: &'a [Location],
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// Memory that peers write to first.
    pub heap: &'a Heap,
    /// The lane that was requested.
    pub options: &'a Options,
}

impl NetState {
    /// Chooses, and opens this rank's part. Collective over the world.
    ///
    /// # Errors
    /// [`LaneError::ChoicesDiffer`] if ranks ask for different lanes,
    /// [`BootstrapError::Unreachable`] if the lane does not reach all of them; the error of this
    /// rank's part of a requested lane, [`LaneError::PeerUnsupported`] on the others.
    pub(super) fn open(place: &NetSelection<'_>) -> Result<Self, Error> {
        let NetSelection { hub, machines, options, .. } = *place;
        let (rank, choice) = (hub.rank(), options.net);
        place.compare()?;
        let here = &machines[rank as usize];
        let stranger = (0..).zip(machines).find(|(_, other)| !other.same_machine(here));
        let thread =
            ProgressThread::start(rank, Arc::clone(hub.health()), oversubscribed(machines, rank, 2))?;
        thread.regions().add(place.heap_region());
        let (transport, why) = match (choice, stranger) {
            (NetChoice::Loopback, Some((rank, _))) => {
                return Err(BootstrapError::Unreachable { me: hub.rank(), rank }.into());
            }
            (NetChoice::Loopback, None) => (place.open(&LOOPBACK_NET, &thread)??, REQUESTED.to_owned()),
            (NetChoice::Auto, None) => (place.open(&LOOPBACK_NET, &thread)??, ONE_MACHINE.to_owned()),
            _ if options.emulated_link.is_some() => return Err(LaneError::NoLinkEmulation { rank }.into()),
            (NetChoice::Verbs, _) => (place.open(&VERBS_NET, &thread)??, REQUESTED.to_owned()),
            (NetChoice::Tcp, _) => (place.open(&TCP_NET, &thread)??, REQUESTED.to_owned()),
            (NetChoice::Auto, Some(_)) => match place.open(&VERBS_NET, &thread)? {
                Ok(transport) => (transport, ALL_HAVE_NICS.to_owned()),
                // A setting of the user is never ignored silently.
                Err(lacking) if lacking.mistake => return Err(lacking.into()),
                Err(lacking) => {
                    let Lacking { rank, what, reason, .. } = lacking;
                    let why =
                        format!("the nodes are on several machines, and rank {rank} has {what}: {reason}");
                    (place.open(&TCP_NET, &thread)??, why)
                }
            },
        };
        let reason = [Some(why), transport.signals()].into_iter().flatten().collect::<Vec<_>>().join("; ");
        let report = NetReport { lane: transport.lane(), reason, nics: transport.describe() };
        Ok(NetState { thread, transport, report })
    }

    /// Lets peers write to a region. Returns its number, and the description that peers need.
    ///
    /// # Errors
    /// Of the lane, if the memory cannot be registered.
    pub fn register(&self, region: Region) -> Result<(u32, Vec<u8>), Error> {
        let number = self.thread.regions().add(region.clone());
        match self.transport.register(number, &region) {
            Ok(said) => Ok((number, said)),
            Err(error) => {
                self.deregister(number);
                Err(error)
            }
        }
    }

    /// The same for device memory, for NICs that reach it; and how it was registered.
    ///
    /// # Errors
    /// Why none does.
    pub fn register_device(
        &self,
        memory: &DeviceMemory,
    ) -> Result<(u32, Vec<u8>, Registration), NoGpuDirect> {
        let number = self.thread.regions().reserve();
        let registered = self.transport.register_device(number, memory);
        let (said, how) = registered.inspect_err(|_| self.transport.deregister(number))?;
        Ok((number, said, how))
    }

    /// The end of that.
    pub fn deregister(&self, number: u32) {
        self.transport.deregister(number);
        self.thread.regions().remove(number);
    }
}

impl NetSelection<'_> {
    /// All ranks must have asked for the same.
    fn compare(&self) -> Result<(), Error> {
        let (hub, mine) = (self.hub, self.options.net as u8);
        let (rank, deadline) = (hub.rank(), self.options.timeouts.rendezvous);
        let said = hub.gather("world/net", rank, hub.size(), &[mine], deadline)?;
        match (0..).zip(&said).find(|(_, theirs)| theirs[..] != [mine]) {
            None => Ok(()),
            Some((peer, theirs)) => {
                let theirs = NetChoice::ALL.into_iter().find(|&choice| theirs[..] == [choice as u8]);
                let theirs = theirs.map_or("one that it does not know", NetChoice::name);
                let mine = self.options.net.name();
                Err(LaneError::ChoicesDiffer { rank, peer, mine, theirs }.into())
            }
        }
    }

    /// The region that peers write to first. Its number is that of the heap in every lane.
    fn heap_region(&self) -> Region {
        Region { mapped: Arc::clone(self.heap.mapped()), member: self.hub.rank() }
    }

    /// This rank's segments.
    fn segments(&self, thread: &ProgressThread) -> Opened {
        let egress =
            self.options.emulated_link.map(|emulated_link| Arc::new(LinkEmulator::new(emulated_link)));
        let regions = Arc::clone(thread.regions());
        Ok(Box::new(LoopbackTransport::new(
            (self.hub.rank(), self.hub.health()),
            regions,
            thread.event_fd()?,
            egress,
        )))
    }

    /// This rank's sockets.
    fn tcp(&self, thread: &ProgressThread) -> Opened {
        let NetSelection { hub, options, .. } = *self;
        let (health, regions) = (Arc::clone(hub.health()), Arc::clone(thread.regions()));
        let wires = TcpTransport::open(hub.pass()?, &options.tcp_address, options.timeouts, health, regions)?;
        Ok(Box::new(wires))
    }

    /// This rank's NICs.
    fn nics(&self, thread: &ProgressThread) -> Opened {
        let NetSelection { hub, machines, options, .. } = *self;
        let rank = hub.rank();
        let here = &machines[rank as usize];
        let nth = machines[..rank as usize].iter().filter(|other| other.same_machine(here)).count() as u32;
        let (regions, health) = (Arc::clone(thread.regions()), Arc::clone(hub.health()));
        let (strict, forecast) = (self.heap.boundary(), options.forecast);
        let nodes = self.nodes.clone();
        let wake_fd = Arc::new(thread.event_fd()?);
        let setup = Setup { rank, nth, nodes, strict, regions, health, wake_fd, forecast };
        let mut environment = options.verbs_environment()?;
        if let Some(queue_pairs) = options.queue_pairs {
            environment.settings.queue_pairs = queue_pairs;
        }
        Ok(Box::new(VerbsTransport::open(&environment, setup)?))
    }

    /// The lane that this rank has opened, and registered its heap with, if all ranks could. A rank
    /// that could not reports it, and no rank waits for it.
    ///
    /// A lane that was not asked for must also join every rank to those of all other nodes, because
    /// the routes of groups are not known yet. One that was asked for fails where it is needed.
    fn open(
        &self,
        net: &Net,
        thread: &ProgressThread,
    ) -> Result<Result<Box<dyn NetTransport>, Lacking>, Error> {
        let opened = (net.open)(self, thread).and_then(|transport| {
            transport.register(HEAP, &self.heap_region())?;
            Ok(transport)
        });
        let lane = net.lane;
        let (hub, deadline) = (self.hub, self.options.timeouts.rendezvous);
        let said = match &opened {
            Ok(transport) => [&[OPENED][..], &transport.announcement()].concat(),
            Err(_) => Failure::answer(&opened, is_mistake),
        };
        let answers = hub.gather(&format!("world/net/{lane}"), hub.rank(), hub.size(), &said, deadline)?;
        if let Some(Failure { at, grave: mistake, reason }) = Failure::named(&answers) {
            let (rank, what, own) = (at as u32, "no usable NIC", opened.err());
            return Ok(Err(Lacking { rank, what, reason, lane, mistake, own }));
        }
        let transport = opened?;
        // A lane that was asked for fails where a group connects such ranks.
        if self.options.net != NetChoice::Auto {
            return Ok(Ok(transport));
        }
        let announced: Vec<&[u8]> =
            answers.iter().map(|answer| answer.get(1..).unwrap_or_default()).collect();
        match transport.compare(&announced) {
            Err((rank, error)) => {
                let (what, reason) = ("a NIC that does not reach all others", error.to_string());
                Ok(Err(Lacking { rank, what, reason, lane, mistake: false, own: None }))
            }
            Ok(()) => Ok(Ok(transport)),
        }
    }
}

/// Whether a rank requested something that is not available, rather than that nothing is available.
fn is_mistake(error: &Error) -> bool {
    use VerbsError as V;
    fn of_nics(error: &VerbsError) -> bool {
        match error {
            V::NoUsableNic { refused } => refused.iter().any(of_nics),
            V::NoSuchNic { .. }
            | V::NoSuchPort { .. }
            | V::NoSuchGid { .. }
            | V::NoGidInSubnets { .. }
            | V::NoSuchPkey { .. }
            | V::MtuTooLarge { .. }
            | V::NoAtomics { .. }
            | V::QueuePairs { .. }
            | V::StripesNeedImmediates { .. }
            | V::TooOld { .. } => true,
            _ => false,
        }
    }
    match error {
        Error::Bootstrap(BootstrapError::BadVariable { .. }) => true,
        Error::Lane(LaneError::Verbs(error)) => of_nics(error),
        _ => false,
    }
}

/// Not all ranks can use a lane.
struct Lacking {
    /// The first that cannot.
    rank: u32,
    /// Its lack, in words.
    what: &'static str,
    reason: String,
    /// Whether a rank requested something that is not available.
    mistake: bool,
    lane: &'static str,
    /// The error of this rank.
    own: Option<Error>,
}

impl From<Lacking> for Error {
    fn from(lacking: Lacking) -> Self {
        let Lacking { rank, reason, lane, own, .. } = lacking;
        own.unwrap_or(LaneError::PeerUnsupported { rank, lane, reason }.into())
    }
}

/// Ends of this rank, by peer.
type Ends<'a> = Vec<Box<dyn ConnectionEnd + 'a>>;

/// Lays missing connections. Collective over the group.
///
/// # Errors
/// Of the lane at a rank that fails; [`LaneError::PeerUnsupported`] with the same words at the
/// others.
pub(super) fn lay(group: &Group, paths: &Paths) -> Result<(), Error> {
    match &group.shared.net {
        Some(net) => lay_by(&*net.transport, &net.thread, group, paths),
        None => Ok(()),
    }
}

fn lay_by(
    transport: &dyn NetTransport,
    thread: &ProgressThread,
    group: &Group,
    paths: &Paths,
) -> Result<(), Error> {
    let wanted = |&(_, (&rank, position)): &(usize, (&u32, u32))| {
        paths.needs_connection(position) && thread.connection_to(rank).is_none()
    };
    let members = group.ranks().iter().zip(0..).enumerate();
    let peers: Vec<(usize, u32)> = members.filter(wanted).map(|(at, (&rank, _))| (at, rank)).collect();
    let opened: Result<Ends<'_>, Error> = peers.iter().map(|&(_, peer)| transport.open(peer)).collect();
    let offered = match transport.passes_descriptors() {
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
            Err(LaneError::PeerUnsupported { rank: group.ranks()[at], lane: transport.lane(), reason }.into())
        }
        (Err(seen), Ok(_)) => Err(seen),
        // Answers that are late because of what this rank has seen name other ranks.
        (Err(seen), Err(late)) if !matches!(late, Error::World(_)) => Err(seen),
        (Ok(joined), Ok(None)) => {
            Ok(joined.into_iter().try_for_each(|connection| thread.attach(connection))?)
        }
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
        let missing = "its end of a connection";
        let connection = match offered.is_empty() {
            true => Err(LaneError::NoLane { rank: own, peer, missing }.into()),
            false => end.connect(offered),
        };
        match connection {
            Ok(connection) => joined.push(connection),
            Err(error @ Error::Lane(LaneError::NoConnection { .. })) => {
                return Err(failed.err().unwrap_or(error));
            }
            Err(error) if failed.is_ok() || is_own(&error) => failed = Err(error),
            Err(_) => {}
        }
    }
    failed.map(|()| joined)
}

/// Offers by the rendezvous, all of a rank in one message: empty ones where it has no ends.
fn pass_bytes(
    group: &Group,
    peers: &[(usize, u32)],
    ends: &[Box<dyn ConnectionEnd + '_>],
) -> Result<Vec<ConnectionOffer>, Error> {
    let (hub, deadline) = (group.shared.hub.as_ref(), group.shared.options.timeouts.rendezvous);
    let mut offers = vec![Vec::new(); group.size() as usize];
    for (&(at, _), end) in peers.iter().zip(ends) {
        offers[at] = end.bytes();
    }
    let mut offered = hub.exchange(&group.step(), group.rank(), offers, deadline)?;
    Ok(peers.iter().map(|&(at, _)| std::mem::take(&mut offered[at]).into()).collect())
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
    let deadline = group.shared.options.timeouts.rendezvous;
    let mut received = exchange_fds(hub, &group.step(), group.ranks(), me, &offer, deadline)?;
    let mut take = |&(at, _): &(usize, u32)| std::mem::take(&mut received[at]);
    Ok(peers.iter().map(|peer| ConnectionOffer { bytes: Vec::new(), descriptors: take(peer) }).collect())
}

/// A failure at a rank, as the others learn it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    /// Position of the rank among those that answered.
    pub at: usize,
    /// Whether it counts more than failures that are not grave, wherever those are.
    pub grave: bool,
    /// Error of that rank, in words.
    pub reason: String,
}

impl Failure {
    /// A rank's answer to a step that all take: nothing if it could take it.
    pub fn answer<T>(taken: &Result<T, Error>, grave: impl FnOnce(&Error) -> bool) -> Vec<u8> {
        let error = taken.as_ref().err();
        let said = error.map(|error| [&[u8::from(grave(error))], error.to_string().as_bytes()].concat());
        said.unwrap_or_default()
    }

    /// The failure that all ranks name, if there is any: the first grave one, or the first.
    pub fn named(answers: &[Vec<u8>]) -> Option<Self> {
        let failures = answers.iter().enumerate().filter_map(|(at, answer)| {
            let (&grave, reason) = answer.split_first().filter(|&(&kind, _)| kind != OPENED)?;
            Some(Failure { at, grave: grave == 1, reason: String::from_utf8_lossy(reason).into_owned() })
        });
        failures.min_by_key(|failure| !failure.grave)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::lane::{Fabric, LOOPBACK, Settings};
    use crate::memory::{HeapSizes, Segment};
    use crate::topology::Route;
    use crate::{Options, World};
    use std::collections::HashSet;
    use std::os::fd::BorrowedFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Mutex;

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
            let NetState { transport, thread, .. } = group.shared.net.as_ref().unwrap();
            let nodes = group.nodes();
            let paths = Paths::new(&nodes, Route::Direct, group.rank());
            let fails = (group.rank() == 3).then_some((0, step));
            let failing = Failing { wires: &**transport, fails, segments: &segments };
            let error = lay_by(&failing, thread, &group, &paths).unwrap_err();
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

    /// The lane that two ranks on two machines choose, with a NIC each.
    fn chosen(fabric: &Fabric) -> Vec<NetReport> {
        let machines: Vec<Location> = (0..2)
            .map(|rank| {
                let mut label = Location::in_node("").unwrap().to_bytes();
                // Another boot: behind its length.
                label[10] = b'0' + rank as u8;
                Location::from_bytes(rank, &label).unwrap()
            })
            .collect();
        let nodes = NodeMap::from_labels(&machines);
        let choose = |hub: Box<dyn Hub>| {
            let rank = hub.rank();
            let settings = Settings { nics: vec![format!("nic{rank}")], ..Settings::default() };
            let fake_verbs = Some(fabric.ground(settings));
            let options = Options { net: NetChoice::Auto, fake_verbs, ..Options::default() };
            let sizes = HeapSizes { symmetric: 1 << 20, total: 4 << 20 };
            let mut segments = [None, None];
            segments[rank as usize] = Some(Segment::create("heap", sizes.total).unwrap());
            let heap = Heap::new(rank, sizes, &segments, hub.health(), options.timeouts.deadline).unwrap();
            let place = NetSelection {
                hub: &*hub,
                machines: &machines,
                nodes: &nodes,
                heap: &heap,
                options: &options,
            };
            NetState::open(&place).unwrap().report
        };
        std::thread::scope(|scope| {
            let hubs = crate::bootstrap::threads(2, Default::default());
            let ranks: Vec<_> = hubs.into_iter().map(|hub| scope.spawn(|| choose(hub))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn memory_unregistrable_by_nic_selects_tcp_on_all_with_reason() {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        assert_eq!(chosen(&fabric).iter().map(|report| report.lane).collect::<Vec<_>>(), ["verbs", "verbs"]);
        // Staging, or behind it the rows of the heap.
        for (lockable, bytes) in [(2 << 20, 4 << 20), ((6 << 20) + (64 << 10), 3 << 20)] {
            fabric.change("nic1", |nic| nic.lockable = lockable);
            for report in chosen(&fabric) {
                let why = format!("rank 1 has no usable NIC: NIC nic1 cannot register {bytes} bytes");
                assert!(report.reason.contains(&why) && report.reason.contains("memlock"), "{report:?}");
                assert_eq!(report.lane, "tcp");
            }
        }
    }

    #[test]
    fn mutually_unreachable_nics_select_tcp_on_all_with_reason() {
        let apart = Fabric::new(&["nic0", "nic1"]);
        apart.partition("nic1", 0, 0x8012);
        let mixed = Fabric::new(&["nic0", "nic1"]);
        mixed.infiniband("nic1", 3, "fe80::3");
        let keys = "NIC nic0 has partition keys 0xffff, the NIC of rank 1 has 0x8012";
        let links = "NIC nic0 cannot talk to the NIC of rank 1: one is InfiniBand, the other Ethernet";
        for (fabric, why) in [(apart, keys), (mixed, links)] {
            for report in chosen(&fabric) {
                let why = format!("rank 0 has a NIC that does not reach all others: {why}");
                assert!(report.lane == "tcp" && report.reason.contains(&why), "{report:?}");
            }
        }
    }

    #[test]
    fn setting_that_any_listed_nic_cannot_follow_is_mistake() {
        let down = VerbsError::PortDown { nic: "a".into(), port: 1, state: "down" };
        let asked = VerbsError::NoGidInSubnets { nic: "b".into(), port: 1 };
        let refused = |refused: &[&VerbsError]| {
            let refused = refused.iter().map(|&error| error.clone()).collect();
            is_mistake(&LaneError::from(VerbsError::NoUsableNic { refused }).into())
        };
        assert_eq!(
            [refused(&[&down, &asked]), refused(&[&asked, &down]), refused(&[&down])],
            [true, true, false]
        );
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
            let mapped = maps.lines().filter(|line| line.contains("memfd:"));
            let mapped = mapped.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
            let held: HashSet<u64> = open.chain(mapped).collect();
            assert!(segments.is_disjoint(&held), "{step:?}");
        }
    }
}
