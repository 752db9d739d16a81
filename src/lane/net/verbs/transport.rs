//! All NICs of a rank: registers memory with them, and connects their queue pairs to those of
//! peers.
//!
//! ```text
//!   open: NICs --> open(peer): queue pairs, blocks, receives --ConnectionInfo of each, through the rendezvous--> connect
//! ```
//!
//! With several queue pairs to a peer (`SIDELANE_VERBS_QUEUE_PAIRS`), they lie on the rank's NICs
//! in turn. The nth of one end is joined to the nth of the other, as many as both have.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::block::{Block, Blocks};
use super::connection::{Connection, Parts, SMALL};
use super::depth::Depth;
use super::events::EventThread;
use super::forecast::{Forecast, Rules};
use super::nic::Nic;
use super::order::Signaling;
use super::receiver::{Inbox, Receiver};
use super::registration::{NicMemory, RemoteRegions, Rights, ZEROS, describe_region};
use super::sender::{ALONG, Bounds, Limits, Sender};
use super::settings::QUEUE_PAIRS;
use super::staging::{PoolSize, Staging, StagingPool};
use super::striped::StripedConnection;
use super::{
    Caps, ChainCaps, CompletionChannel, CompletionQueue, Endpoint, Library, MemoryRegion, QueuePair, Queues,
    Remote, SendChain, Settings, SignalMode, Sysfs, reach,
};
use crate::bootstrap::Health;
use crate::error::{Error, LaneError, VerbsError};
use crate::lane::net::{
    ConnectionEnd, ConnectionOffer, DeviceMemory, NetConnection, NetTransport, NoGpuDirect, Region, Regions,
    Registration,
};
use crate::topology::NodeMap;

/// Requests per doorbell.
const BATCH: usize = 16;
/// Bytes of a signal, with its tag, that travel inside a request where the NIC takes them.
const INSIDE: u32 = 24;

/// Settings of a rank for its NICs.
pub struct Setup {
    /// The rank (in the world).
    pub rank: u32,
    /// Which rank of its machine it is.
    pub nth: u32,
    /// Which ranks are on which node.
    pub nodes: NodeMap,
    /// Bytes at the start of the heap that hold flags and their tags.
    pub strict: u64,
    /// Regions that peers may write to, where this rank does it for them.
    pub regions: Arc<Regions>,
    /// Whether the world is alive.
    pub health: Arc<Health>,
    /// Wakes the thread that serves connections.
    pub wake_fd: Arc<OwnedFd>,
    /// Whether connections predict their requests to NICs.
    pub forecast: bool,
}

/// The library, the machine and the settings; another library and another machine in tests.
#[derive(Clone, Debug)]
pub struct VerbsEnvironment {
    /// libibverbs.
    pub library: Arc<Library>,
    /// The kernel's description of NICs.
    pub sysfs: Sysfs,
    /// Settings of the environment.
    pub settings: Settings,
}

impl VerbsEnvironment {
    /// This machine, with the environment's settings.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`](crate::error::BootstrapError::BadVariable),
    /// [`VerbsError::NoLibrary`], [`VerbsError::MissingSymbol`].
    pub fn here() -> Result<Self, Error> {
        let settings = Settings::from_env()?;
        let library = Library::load(settings.library.as_deref())?;
        Ok(VerbsEnvironment { library, sysfs: Sysfs::default(), settings })
    }
}

/// The NICs of a rank.
pub struct VerbsTransport {
    rank: u32,
    nodes: NodeMap,
    settings: Settings,
    nics: Vec<RankNic>,
    /// None before the first connection.
    events: Mutex<Option<EventThread>>,
    sysfs: Sysfs,
    strict: u64,
    relaxed: bool,
    regions: Arc<Regions>,
    health: Arc<Health>,
    forecast: bool,
    /// Description of the first region, for peers.
    heap: Mutex<Vec<u8>>,
}

/// A NIC of this rank, and what its connections share.
#[derive(Debug)]
struct RankNic {
    memory: Arc<NicMemory>,
    staging: Arc<StagingPool>,
    blocks: Blocks,
    /// Where signals may wake a thread.
    channel: Option<Arc<CompletionChannel>>,
    /// Limits of one of its queue pairs.
    caps: Caps,
}

impl RankNic {
    /// Of a rank with at most so many peers over it, and so many queue pairs to each.
    fn new(
        nic: Nic,
        settings: &Settings,
        (peers, queues): (u64, u64),
        wake_fd: &Arc<OwnedFd>,
    ) -> Result<Self, Error> {
        let memory = Arc::new(NicMemory::new(nic)?);
        let attributes = memory.nic.context.attributes();
        let depth = Depth::of_each(peers * queues, rustix::param::page_size() as u64);
        let requests = depth.requests.min(attributes.requests);
        let (receives, channel) = match settings.signal {
            Some(SignalMode::Write | SignalMode::FetchAdd) => (0, None),
            Some(SignalMode::Immediate) | None => {
                (requests, Some(CompletionChannel::create(&memory.nic.context)?))
            }
        };
        let Settings { chunk, in_flight: window, staging: most, .. } = *settings;
        let size = PoolSize { chunk, window, most, peers, queues };
        let staging = Arc::new(StagingPool::new(&memory.domain, size, wake_fd)?);
        let blocks = Blocks::new(&memory.domain, receives.into(), peers * queues);
        let send_sges = depth.pieces.min(attributes.sges);
        let caps = Caps { sends: requests, receives, send_sges, receive_sges: 1, inline: INSIDE };
        Ok(RankNic { memory, staging, blocks, channel, caps })
    }
}

/// This rank's end of one queue.
struct Half {
    /// Number of its NIC.
    nic: usize,
    qp: QueuePair,
    block: Block,
    staging: Staging,
    receiver: Receiver,
    completions: Arc<CompletionQueue>,
    memory: Arc<NicMemory>,
}

impl VerbsTransport {
    /// Opens the NICs of a rank.
    ///
    /// # Errors
    /// [`VerbsError`], if there are none or they cannot be used as the settings ask.
    pub fn open(environment: &VerbsEnvironment, setup: Setup) -> Result<Self, Error> {
        let VerbsEnvironment { library, sysfs, settings } = environment;
        if !QUEUE_PAIRS.contains(&settings.queue_pairs) {
            return Err(VerbsError::QueuePairs { asked: settings.queue_pairs }.into());
        }
        if let Some(mode @ (SignalMode::Write | SignalMode::FetchAdd)) = settings.signal
            && settings.queue_pairs > 1
        {
            return Err(VerbsError::StripesNeedImmediates { signal: mode.name() }.into());
        }
        let nics = Nic::open(library, sysfs, settings, setup.nth)?;
        for nic in &nics {
            if settings.signal == Some(SignalMode::FetchAdd) && !nic.context.attributes().atomics {
                return Err(VerbsError::NoAtomics { nic: nic.context.name().to_owned() }.into());
            }
        }
        let can_relax = nics.iter().all(|nic| MemoryRegion::can_relax(&nic.context));
        let Setup { rank, nodes, strict, regions, health, wake_fd, forecast, .. } = setup;
        let peers = nodes.ranks() - nodes.members(nodes.node_of(rank)).len() as u32;
        let queues = usize::from(settings.queue_pairs).div_ceil(nics.len());
        let expected = (peers.into(), queues as u64);
        let open = |nic| RankNic::new(nic, settings, expected, &wake_fd);
        let nics = nics.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(VerbsTransport {
            rank,
            nodes,
            settings: settings.clone(),
            nics,
            events: Mutex::default(),
            sysfs: sysfs.clone(),
            strict,
            relaxed: settings.relaxed.unwrap_or(can_relax),
            regions,
            health,
            forecast,
            heap: Mutex::default(),
        })
    }

    /// Number of the NIC of a queue towards a peer.
    fn nic_for(&self, peer: u32, queue: usize) -> usize {
        let nics = self.nics.len();
        (reach::rail(&self.nodes, self.rank, peer, nics) + queue) % nics
    }

    /// The thread that reads events of the NICs blames a connection for those of its queue pair. It
    /// starts with the first connection: a rank that has none takes no notice of its NICs.
    fn watch(&self, nic: usize, connection: &Arc<Connection>) -> Result<(), Error> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let to = (nic, connection);
        match &*events {
            Some(events) => events.attach(to),
            None => {
                let nics = self.memories().map(|memory| &memory.nic);
                let (grace, health) = (self.settings.grace(), &self.health);
                *events = Some(EventThread::start(self.rank, nics, &self.sysfs, grace, health, to)?);
            }
        }
        Ok(())
    }

    fn half(&self, peer: u32, inbox: &Arc<Inbox>, queue: usize) -> Result<Half, Error> {
        let nic = self.nic_for(peer, queue);
        let RankNic { memory, staging, blocks, channel, caps } = &self.nics[nic];
        let entries = caps.sends + caps.receives;
        let completions = CompletionQueue::create(&memory.nic.context, entries, channel.as_ref())?;
        let queues = Queues { send: &completions, receive: &completions };
        let qp = QueuePair::create(&memory.domain, queues, *caps, &memory.nic.path, peer)?;
        let (block, staging) = (blocks.take()?, Staging::new(Arc::clone(staging), peer));
        let receiver = Receiver::new(&qp, &block, caps.receives, (Arc::clone(inbox), queue))?;
        Ok(Half { nic, qp, block, staging, receiver, completions, memory: Arc::clone(memory) })
    }

    fn connect(&self, peer: u32, theirs: &ConnectionInfo, half: Half) -> Result<Connection, Error> {
        let Half { nic, qp, block, staging, mut receiver, completions, memory, .. } = half;
        let signal = self.signaling(&memory).agree(theirs.signaling, peer)?;
        qp.connect(&theirs.endpoint)?;
        let mut known = RemoteRegions::of_nic(theirs.nic);
        known.import(peer, 0, &theirs.heap)?;
        receiver.joined(theirs.receives, theirs.granted);
        let (caps, asked, settings) = (qp.caps(), self.nics[nic].caps, &self.settings);
        let sges = caps.send_sges.min(asked.send_sges) as usize;
        let requests = caps.sends.min(asked.sends);
        let mtu = memory.nic.path.mtu.min(theirs.endpoint.mtu).bytes().into();
        let chain =
            SendChain::new(ChainCaps { requests: BATCH, sges, inline: caps.inline.min(INSIDE) as usize });
        let limits = Limits { requests: requests.into(), bytes: settings.in_flight, batch: BATCH, mtu };
        let bounds = Bounds { bytes: settings.chunk, pieces: sges };
        let rules = Rules {
            chunk: settings.chunk,
            small: SMALL as u64,
            pieces: sges,
            zeros: ZEROS,
            batch: BATCH as u64,
            mtu,
            along: ALONG,
            signal,
        };
        Ok(Connection::new(Parts {
            me: self.rank,
            peer,
            signal,
            chunk: settings.chunk,
            memory,
            completions,
            theirs: known,
            health: Arc::clone(&self.health),
            sender: Sender::new(qp, (block, staging), chain, limits, bounds),
            receiver,
            forecast: self.forecast.then(|| Forecast::new(rules)),
        }))
    }

    /// How connections over one of the NICs may signal. Between queue pairs there is no order.
    fn signaling(&self, memory: &NicMemory) -> Signaling {
        let in_order = memory.nic.context.attributes().order.is_kept() && self.settings.queue_pairs == 1;
        Signaling { requested: self.settings.signal, in_order }
    }

    fn memories(&self) -> impl ExactSizeIterator<Item = &Arc<NicMemory>> {
        self.nics.iter().map(|nic| &nic.memory)
    }

    fn heap(&self) -> MutexGuard<'_, Vec<u8>> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One end of a connection, whose queue pairs have no peer yet.
struct VerbsEnd<'a> {
    transport: &'a VerbsTransport,
    peer: u32,
    inbox: Arc<Inbox>,
    /// One for each queue.
    halves: Vec<Half>,
}

impl ConnectionEnd for VerbsEnd<'_> {
    fn bytes(&self) -> Vec<u8> {
        let transport = self.transport;
        let offer = |half: &Half| ConnectionInfo {
            endpoint: half.qp.endpoint(),
            signaling: transport.signaling(&half.memory),
            nic: half.nic as u8,
            rate: half.memory.nic.rate(),
            receives: half.receiver.posted(),
            granted: half.block.granted_at(),
            heap: transport.heap().clone(),
        };
        self.halves.iter().flat_map(|half| offer(half).to_bytes()).collect()
    }

    fn connect(self: Box<Self>, offered: ConnectionOffer) -> Result<Arc<dyn NetConnection>, Error> {
        let VerbsEnd { transport, peer, inbox, halves } = *self;
        let theirs = ConnectionInfo::of_queues(peer, &offered.bytes)?;
        let joined: Vec<(Half, ConnectionInfo)> = halves.into_iter().zip(theirs).collect();
        // Before a queue pair can receive.
        inbox.join(joined.len());
        // Queues of one NIC share its rate.
        let shared = |nic: usize| joined.iter().filter(|(half, _)| half.nic == nic).count() as u32;
        let rate = |(half, theirs): &(Half, ConnectionInfo)| half.memory.nic.rate().min(theirs.rate);
        // In units that keep slow queues above 0, which is unknown.
        let speeds: Vec<u32> =
            joined.iter().map(|queue| rate(queue).saturating_mul(1000) / shared(queue.0.nic)).collect();
        let mut queues = Vec::new();
        for (half, theirs) in joined {
            let nic = half.nic;
            let queue = Arc::new(transport.connect(peer, &theirs, half)?);
            transport.watch(nic, &queue)?;
            queues.push(queue);
        }
        match <[_; 1]>::try_from(queues) {
            Ok([only]) => Ok(only),
            Err(queues) => {
                let (rank, chunk) = (transport.rank, transport.settings.chunk);
                Ok(Arc::new(StripedConnection::new(rank, &transport.health, queues, speeds, chunk)))
            }
        }
    }
}

impl NetTransport for VerbsTransport {
    fn lane(&self) -> &'static str {
        "verbs"
    }

    fn open(&self, peer: u32) -> Result<Box<dyn ConnectionEnd + '_>, Error> {
        let inbox = Arc::new(Inbox::new(Arc::clone(&self.regions)));
        let queues = 0..usize::from(self.settings.queue_pairs);
        let halves = queues.map(|queue| self.half(peer, &inbox, queue)).collect::<Result<_, _>>()?;
        Ok(Box::new(VerbsEnd { transport: self, peer, inbox, halves }))
    }

    fn register(&self, number: u32, region: &Region) -> Result<Vec<u8>, Error> {
        // Flags lie in the heap only.
        let strict = if number == 0 { self.strict } else { 0 };
        let atomics = self.settings.signal == Some(SignalMode::FetchAdd);
        let rights = Rights { strict, atomics, relaxed: self.relaxed };
        let each = self.memories().map(|memory| memory.register(number, region, rights));
        let description = describe_region(&each.collect::<Result<Vec<_>, _>>()?);
        if number == 0 {
            self.heap().clone_from(&description);
        }
        Ok(description)
    }

    fn register_device(
        &self,
        number: u32,
        given: &DeviceMemory,
    ) -> Result<(Vec<u8>, Registration), NoGpuDirect> {
        let (mut description, mut how) = (Vec::new(), Registration::DmaBuf);
        for memory in self.memories() {
            let (pieces, registered) = memory.register_device(number, given, self.relaxed)?;
            description.push(pieces);
            how = if registered == Registration::DmaBuf { how } else { registered };
        }
        Ok((describe_region(&description), how))
    }

    fn announcement(&self) -> Vec<u8> {
        reach::announcement(self.settings.queue_pairs, self.memories().map(|memory| &memory.nic))
    }

    fn compare(&self, announced: &[&[u8]]) -> Result<(), (u32, Error)> {
        reach::compare(&self.nodes, announced).map_err(|(rank, error)| (rank, LaneError::from(error).into()))
    }

    fn deregister(&self, number: u32) {
        self.memories().for_each(|memory| memory.deregister(number));
    }

    fn describe(&self) -> Vec<String> {
        self.memories().map(|memory| memory.nic.to_string()).collect()
    }

    fn signals(&self) -> Option<String> {
        if self.settings.queue_pairs > 1 {
            let (mode, pairs) = (SignalMode::Immediate.name(), self.settings.queue_pairs);
            return Some(format!("signals by {mode}: {pairs} queue pairs to each peer keep no order"));
        }
        if let Some(mode) = self.settings.signal {
            return Some(format!("signals by {}, as requested", mode.name()));
        }
        let mut contexts = self.memories().map(|memory| &memory.nic.context);
        let unknown = contexts.find(|context| !context.attributes().order.is_kept());
        Some(match unknown {
            Some(context) => {
                let (mode, nic) = (SignalMode::Immediate.name(), context.name());
                format!("signals by {mode}: {nic} may place writes in any order")
            }
            None => format!("signals by {} to NICs that place writes in order", SignalMode::Write.name()),
        })
    }
}

impl std::fmt::Debug for VerbsTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsTransport").field("rank", &self.rank).field("nics", &self.nics).finish()
    }
}

/// One end of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ConnectionInfo {
    /// Its queue pair. First, as it begins with the version of all this.
    endpoint: Endpoint,
    /// How it may signal.
    signaling: Signaling,
    /// Number of the rank's NIC, and its rate in Gb/s; 0: unknown.
    nic: u8,
    rate: u32,
    /// Receives that it keeps posted.
    receives: u32,
    /// Address for the peer's count of taken signals.
    granted: Remote,
    /// Its heap, as [`describe_region`] writes it.
    heap: Vec<u8>,
}

/// Bytes of it between the endpoint and the heap; the last are the length of that.
const FIXED: usize = 27;

impl ConnectionInfo {
    /// As bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.endpoint.to_bytes();
        bytes.extend(self.signaling.to_bytes());
        bytes.push(self.nic);
        bytes.extend(self.rate.to_le_bytes());
        bytes.extend(self.receives.to_le_bytes());
        bytes.extend(self.granted.addr.to_le_bytes());
        bytes.extend(self.granted.rkey.to_le_bytes());
        bytes.extend((self.heap.len() as u32).to_le_bytes());
        bytes.extend(&self.heap);
        bytes
    }

    /// Of all queues, from what rank `peer` says: at least one.
    ///
    /// # Errors
    /// [`VerbsError::EndpointVersion`] and its like.
    fn of_queues(peer: u32, bytes: &[u8]) -> Result<Vec<Self>, VerbsError> {
        let (first, mut rest) = Self::from_bytes(peer, bytes)?;
        let mut queues = vec![first];
        while !rest.is_empty() {
            let (queue, behind) = Self::from_bytes(peer, rest)?;
            queues.push(queue);
            rest = behind;
        }
        Ok(queues)
    }

    /// Of the first queue; and the bytes behind it.
    fn from_bytes(peer: u32, bytes: &[u8]) -> Result<(Self, &[u8]), VerbsError> {
        let (endpoint, rest) = Endpoint::from_bytes(peer, bytes)?;
        let (seen, expected) = (bytes.len(), bytes.len() - rest.len() + FIXED);
        let short = |expected| VerbsError::EndpointLength { peer, seen, expected };
        let (fixed, rest) = rest.split_first_chunk::<FIXED>().ok_or_else(|| short(expected))?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| fixed[at + i]));
        let addr = u64::from(word(11)) | u64::from(word(15)) << 32;
        let len = word(23) as usize;
        let (heap, behind) = rest.split_at_checked(len).ok_or_else(|| short(expected.saturating_add(len)))?;
        let queue = ConnectionInfo {
            endpoint,
            signaling: Signaling::from_bytes(peer, [fixed[0], fixed[1]])?,
            nic: fixed[2],
            rate: word(3),
            receives: word(7),
            granted: Remote { addr, rkey: word(19) },
            heap: heap.to_vec(),
        };
        Ok((queue, behind))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::error::Cause;
    use crate::lane::flag::WaitLimits;
    use crate::lane::net::RemoteAddress;
    use crate::lane::net::verbs::Access;
    use crate::lane::net::verbs::fake::Fabric;
    use crate::lane::net::verbs::tests::ranks;
    use crate::memory::{PeerMapping, Segment};

    fn rank(fabric: &Arc<Fabric>, rank: u32, settings: Settings) -> VerbsTransport {
        let nics = vec![["a", "b"][rank as usize].to_owned()];
        let settings = Settings { nics, ..settings };
        let setup = Setup {
            rank,
            nth: 0,
            nodes: NodeMap::from_labels(&[0u32, 1]),
            strict: 64,
            regions: Arc::default(),
            health: Arc::default(),
            wake_fd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
            forecast: false,
        };
        VerbsTransport::open(&fabric.ground(settings), setup).unwrap()
    }

    #[test]
    fn the_thread_for_events_starts_with_the_first_connection() {
        let fabric = Fabric::new(&["a", "b"]);
        let ranks = [0, 1].map(|at| rank(&fabric, at, Settings::default()));
        *ranks[0].heap() = describe_region(&[vec![]]);
        ranks[1].heap().clone_from(&ranks[0].heap());
        let watched = || ranks.each_ref().map(|rank| rank.events.lock().unwrap().is_some());
        let [a, b] = [(0, 1), (1, 0)].map(|(at, peer): (usize, u32)| ranks[at].open(peer).unwrap());
        let offers = [a.bytes(), b.bytes()];
        assert_eq!(watched(), [false, false]);
        let a = a.connect(offers[1].clone().into()).unwrap();
        assert_eq!(watched(), [true, false]);
        drop((a, b));
        drop(ranks);
        assert_eq!(fabric.leftovers(), (0, 0));
    }

    #[test]
    fn rows_are_relaxed_at_source_and_target_flags_are_not() {
        let segments = [0, 1].map(|_| Segment::create("sidelane-test", 1 << 16).unwrap());
        let mapped = Arc::new(PeerMapping::new(&segments.each_ref().map(Some)).unwrap());
        let heap = Region { mapped: Arc::clone(&mapped), member: 0 };
        for (setting, relaxed) in [(Some(false), Access::empty()), (None, Access::RELAXED)] {
            let fabric = Fabric::new(&["a"]);
            let rank = rank(&fabric, 0, Settings { relaxed: setting, ..Settings::default() });
            rank.register(0, &heap).unwrap();
            let access = |member, offset| fabric.accesses(mapped.at(member, offset, 1).unwrap().addr().get());
            let target = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            assert_eq!([access(0, 0), access(0, 64)], [vec![target], vec![target | relaxed]]);
            assert_eq!(access(1, 0), [relaxed], "memory of a local peer is only sent");
        }
    }

    #[test]
    fn ends_join_as_many_queue_pairs_as_both_have() {
        for (pairs, expected) in [([3, 2], 2), ([1, 3], 1), ([2, 2], 2)] {
            let fabric = Fabric::new(&["a", "b"]);
            let settings = |at: usize| Settings { queue_pairs: pairs[at], ..Settings::default() };
            let ranks = [0, 1].map(|at| rank(&fabric, at as u32, settings(at)));
            ranks.iter().for_each(|rank| *rank.heap() = describe_region(&[vec![]]));
            let joined = {
                let [a, b] = [(0, 1), (1, 0)].map(|(at, peer): (usize, u32)| ranks[at].open(peer).unwrap());
                let (mine, theirs) = (a.bytes(), b.bytes());
                [a.connect(theirs.into()), b.connect(mine.into())].map(|end| end.unwrap().event_fds().len())
            };
            assert_eq!(joined, [expected; 2], "{pairs:?}");
            drop(ranks);
            assert_eq!(fabric.leftovers(), (0, 0));
        }
    }

    /// Both ends of so many queues between ranks 0 and 1.
    fn joined<const QUEUES: usize>(transports: &[VerbsTransport; 2]) -> [[Connection; QUEUES]; 2] {
        let ends = [(0, 1), (1, 0)].map(|(at, peer): (usize, u32)| {
            let transport = &transports[at];
            let inbox = Arc::new(Inbox::new(Arc::clone(&transport.regions)));
            inbox.join(QUEUES);
            let halves = (0..QUEUES).map(|queue| transport.half(peer, &inbox, queue).unwrap()).collect();
            VerbsEnd { transport, peer, inbox, halves }
        });
        let [of_a, of_b] = ends.each_ref().map(|end| ConnectionInfo::of_queues(7, &end.bytes()).unwrap());
        let [a, b] = ends;
        let join = |end: VerbsEnd<'_>, theirs: Vec<ConnectionInfo>| {
            let mut queues = end.halves.into_iter().zip(&theirs);
            std::array::from_fn(|_| {
                let (half, theirs) = queues.next().unwrap();
                end.transport.connect(end.peer, theirs, half).unwrap()
            })
        };
        [join(a, of_b), join(b, of_a)]
    }

    fn limits(health: &Health) -> WaitLimits<'_> {
        let deadline = Duration::from_secs(20);
        WaitLimits { health, oversubscribed: true, awaited: 0, deadline, silent: true }
    }

    const WORD: RemoteAddress = RemoteAddress { region: 0, offset: 0 };

    #[test]
    fn holder_of_the_lock_looks_for_a_thread_that_arms() {
        let fabric = Fabric::new(&["a", "b"]);
        let settings = Settings { signal: Some(SignalMode::Immediate), ..Settings::default() };
        let transports = ranks(&fabric, 2, &settings);
        let [[a], [b]] = joined(&transports);
        let health = Health::new();
        for value in 1..=3 {
            a.hold(|_| {
                // The holder has looked already, and the queue wakes no thread yet.
                b.signal(WORD, value, None, limits(&health)).unwrap();
                assert!(!a.arm(&health), "the lock is taken");
            });
            assert_eq!(a.counters().received, value);
        }
    }

    #[test]
    fn ticks_taken_while_the_lead_is_held_are_granted() {
        const CHUNK: usize = 1024;
        let fabric = Fabric::new(&["a", "b"]);
        let settings = Settings { queue_pairs: 2, chunk: CHUNK as u64, ..Settings::default() };
        let transports = ranks(&fabric, 2, &settings);
        let health = Arc::<Health>::default();
        let ends = joined::<2>(&transports).map(|queues| queues.map(Arc::new));
        let [a, b] = [0, 1].map(|rank| {
            StripedConnection::new(rank as u32, &health, ends[rank].to_vec(), vec![1; 2], CHUNK as u64)
        });
        let limits = limits(&health);
        let [lead, second] = &ends[1];
        let put = |from: &StripedConnection| from.put(WORD.behind(64), &[7; CHUNK], limits).unwrap();
        let calls: [&dyn Fn(); 2] = [&|| assert!(b.progress(&health)), &|| {
            assert!(second.progress(&health));
            put(&b);
        }];
        let mut value = 0;
        for (nth, call) in calls.into_iter().enumerate() {
            // As many signals as an end takes before it reports them.
            for _ in 0..64 {
                value += 1;
                (0..2).for_each(|_| put(&a));
                a.signal(WORD, value, None, limits).unwrap();
            }
            // The next chunk goes to the second queue.
            put(&b);
            // Signals have come, and wait for their ticks.
            lead.settle(limits).unwrap();
            let before = lead.counters().requests;
            lead.hold(|_| call());
            assert_eq!(lead.counters().requests, before + 1, "call {nth} lets nothing be reported");
            b.flush(limits).unwrap();
            b.signal(WORD, nth as u64 + 1, None, limits).unwrap();
            a.flush(limits).unwrap();
        }
    }

    #[test]
    fn slot_of_ended_connection_is_free_once_flushed() {
        let fabric = Fabric::new(&["a", "b"]);
        let settings = Settings { chunk: 4096, in_flight: 4096, ..Settings::default() };
        let transports = ranks(&fabric, 2, &settings);
        let [[a], _b] = joined(&transports);
        fabric.hold();
        let health = Health::new();
        a.put(WORD.behind(64), &[7; 100], limits(&health)).unwrap();
        assert!(!a.settled() && a.progress(&health), "posted, and not executed");
        a.stop(&Cause::Cancelled { by: 1 });
        let mut other = Staging::new(Arc::clone(&transports[0].nics[0].staging), 2);
        assert!(other.stage(64, true).unwrap().is_none(), "the NIC may still read it");
        a.progress(&health);
        assert!(other.stage(64, true).unwrap().is_some());
    }

    #[test]
    fn offer_that_is_cut_short_names_its_rank() {
        let fabric = Fabric::new(&["a", "b"]);
        let rank = rank(&fabric, 0, Settings { queue_pairs: 2, ..Settings::default() });
        *rank.heap() = describe_region(&[vec![]]);
        let offer = rank.open(1).unwrap().bytes();
        let queues = ConnectionInfo::of_queues(7, &offer).unwrap();
        assert_eq!(queues.iter().flat_map(ConnectionInfo::to_bytes).collect::<Vec<_>>(), offer);
        for len in (0..offer.len()).filter(|&len| len != offer.len() / 2) {
            let error = ConnectionInfo::of_queues(7, &offer[..len]).unwrap_err();
            assert!(error.to_string().contains("rank 7"), "{len} bytes: {error}");
        }
    }
}
