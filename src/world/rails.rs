//! Choice of the lane between nodes: made once per world, by all ranks together.

use std::sync::Arc;

use super::Options;
use super::agree::Failure;
use super::setup::oversubscribed;
use crate::bootstrap::{Hub, Location};
use crate::config::NetChoice;
use crate::error::{BootstrapError, Error, LaneError, VerbsError};
use crate::lane::{
    DeviceMemory, LOOPBACK, LinkEmulator, LoopbackTransport, NetTransport, NoGpuDirect, ProgressThread,
    Region, Registration, Setup, TcpTransport, VerbsEnvironment, VerbsTransport,
};
use crate::memory::Heap;
use crate::topology::NodeMap;

/// The connections of a rank, and the thread that serves them.
#[derive(Debug)]
pub(crate) struct NetState {
    /// Attends to all of them.
    pub card: ProgressThread,
    /// Lays them.
    pub wiring: Box<dyn NetTransport>,
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
const LOOPBACK_NET: Net = Net { lane: LOOPBACK, open: |place, card| place.segments(card) };
const VERBS_NET: Net = Net { lane: "verbs", open: |place, card| place.cards(card) };
const TCP_NET: Net = Net { lane: "tcp", open: |place, card| place.tcp(card) };

/// Which lane joins the nodes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetReport {
    /// Name of the lane.
    pub lane: &'static str,
    /// Why it is this one.
    pub why: NetReason,
    /// This rank's NICs; empty where the lane needs none.
    pub cards: Vec<String>,
}

/// Why a lane was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NetReason {
    /// It was asked for (`SIDELANE_NET`).
    Asked,
    /// All nodes are on one machine.
    OneMachine,
    /// They are on several, and all ranks have NICs.
    Cards,
    /// They are on several, and a rank has no usable NIC.
    NoCards {
        /// The rank.
        rank: u32,
        /// The reason in words.
        reason: String,
    },
}

impl std::fmt::Display for NetReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NetReason::Asked => f.write_str("asked for"),
            NetReason::OneMachine => f.write_str("all nodes are on one machine"),
            NetReason::Cards => f.write_str("the nodes are on several machines, and all ranks have cards"),
            NetReason::NoCards { rank, reason } => {
                write!(f, "the nodes are on several machines, and rank {rank} has no NIC: {reason}")
            }
        }
    }
}

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
        let NetSelection { hub, machines, heap, options, .. } = *place;
        let (rank, choice) = (hub.rank(), options.rail);
        place.compare()?;
        let here = &machines[rank as usize];
        let stranger = (0..).zip(machines).find(|(_, other)| !other.same_machine(here));
        let card = ProgressThread::start(rank, Arc::clone(hub.health()), oversubscribed(machines, rank, 2))?;
        let (wiring, why) = match (choice, stranger) {
            (NetChoice::Loopback, Some((rank, _))) => {
                return Err(BootstrapError::Unreachable { me: hub.rank(), rank }.into());
            }
            (NetChoice::Loopback, None) => (place.open(&LOOPBACK_NET, &card)??, NetReason::Asked),
            (NetChoice::Auto, None) => (place.open(&LOOPBACK_NET, &card)??, NetReason::OneMachine),
            _ if options.pace.is_some() => return Err(LaneError::NoLinkEmulation { rank }.into()),
            (NetChoice::Verbs, _) => (place.open(&VERBS_NET, &card)??, NetReason::Asked),
            (NetChoice::Tcp, _) => (place.open(&TCP_NET, &card)??, NetReason::Asked),
            (NetChoice::Auto, Some(_)) => match place.open(&VERBS_NET, &card)? {
                Ok(wiring) => (wiring, NetReason::Cards),
                // A setting of the user is never ignored silently.
                Err(lacking) if lacking.mistake => return Err(lacking.into()),
                Err(lacking) => {
                    let why = NetReason::NoCards { rank: lacking.rank, reason: lacking.reason.clone() };
                    (place.open(&TCP_NET, &card)??, why)
                }
            },
        };
        let report = NetReport { lane: wiring.lane(), why, cards: wiring.describe() };
        let rails = NetState { card, wiring, report };
        rails.register(Region { mapped: Arc::clone(heap.mapped()), member: rank })?;
        Ok(rails)
    }

    /// Lets peers write to a region. Returns its number, and the description that peers need.
    ///
    /// # Errors
    /// Of the lane, if the memory cannot be registered.
    pub fn register(&self, region: Region) -> Result<(u32, Vec<u8>), Error> {
        let number = self.card.regions().add(region.clone());
        match self.wiring.register(number, &region) {
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
        let number = self.card.regions().reserve();
        let registered = self.wiring.register_device(number, memory);
        let (said, how) = registered.inspect_err(|_| self.wiring.deregister(number))?;
        Ok((number, said, how))
    }

    /// The end of that.
    pub fn deregister(&self, number: u32) {
        self.wiring.deregister(number);
        self.card.regions().remove(number);
    }
}

impl NetSelection<'_> {
    /// All ranks must have asked for the same.
    fn compare(&self) -> Result<(), Error> {
        let (hub, mine) = (self.hub, self.options.rail as u8);
        let (rank, deadline) = (hub.rank(), self.options.clocks.rendezvous);
        let said = hub.gather("world/rail", rank, hub.size(), &[mine], deadline)?;
        match (0..).zip(&said).find(|(_, theirs)| theirs[..] != [mine]) {
            None => Ok(()),
            Some((peer, theirs)) => {
                let theirs = NetChoice::ALL.into_iter().find(|&choice| theirs[..] == [choice as u8]);
                let theirs = theirs.map_or("one that it does not know", NetChoice::name);
                let mine = self.options.rail.name();
                Err(LaneError::ChoicesDiffer { rank, peer, mine, theirs }.into())
            }
        }
    }

    /// This rank's segments.
    fn segments(&self, card: &ProgressThread) -> Opened {
        let egress = self.options.pace.map(|pace| Arc::new(LinkEmulator::new(pace)));
        let regions = Arc::clone(card.regions());
        Ok(Box::new(LoopbackTransport::new(self.hub.rank(), regions, card.event_fd(), egress)?))
    }

    /// This rank's sockets.
    fn tcp(&self, card: &ProgressThread) -> Opened {
        let NetSelection { hub, options, .. } = *self;
        let (health, regions) = (Arc::clone(hub.health()), Arc::clone(card.regions()));
        let wires = TcpTransport::open(hub.pass()?, &options.tcp_address, options.clocks, health, regions)?;
        Ok(Box::new(wires))
    }

    /// This rank's NICs.
    fn cards(&self, card: &ProgressThread) -> Opened {
        let NetSelection { hub, machines, options, .. } = *self;
        let rank = hub.rank();
        let here = &machines[rank as usize];
        let nth = machines[..rank as usize].iter().filter(|other| other.same_machine(here)).count() as u32;
        let (regions, health) = (Arc::clone(card.regions()), Arc::clone(hub.health()));
        let (strict, forecast) = (self.heap.boundary(), options.forecast);
        let nodes = self.nodes.clone();
        let setup = Setup { rank, nth, nodes, strict, regions, health, forecast };
        #[cfg(test)]
        if let Some(ground) = &options.stand_in {
            return Ok(Box::new(VerbsTransport::open(ground, setup)?));
        }
        Ok(Box::new(VerbsTransport::open(&VerbsEnvironment::here()?, setup)?))
    }

    /// The lane that this rank has opened, if all ranks could. A rank that could not reports it,
    /// and no rank waits for it.
    fn open(
        &self,
        net: &Net,
        card: &ProgressThread,
    ) -> Result<Result<Box<dyn NetTransport>, Lacking>, Error> {
        let (opened, lane) = ((net.open)(self, card), net.lane);
        let (hub, deadline) = (self.hub, self.options.clocks.rendezvous);
        let (key, said) = (format!("world/rail/{lane}"), Failure::answer(&opened, is_mistake));
        let answers = hub.gather(&key, hub.rank(), hub.size(), &said, deadline)?;
        Ok(match Failure::named(&answers) {
            None => Ok(opened?),
            Some(Failure { at, grave: mistake, reason }) => {
                Err(Lacking { rank: at as u32, reason, lane, mistake, own: opened.err() })
            }
        })
    }
}

/// Whether a rank requested something that is not available, rather than that nothing is available.
fn is_mistake(error: &Error) -> bool {
    use VerbsError as V;
    let of_cards = |error: &LaneError| match error {
        LaneError::Verbs(error) => matches!(
            error,
            V::NoSuchNic { .. }
                | V::NoSuchPort { .. }
                | V::NoSuchGid { .. }
                | V::MtuTooLarge { .. }
                | V::NoAtomics { .. }
        ),
        _ => false,
    };
    match error {
        Error::Bootstrap(BootstrapError::BadVariable { .. }) => true,
        Error::Lane(error) => of_cards(error),
        _ => false,
    }
}

/// Not all ranks can use a lane.
struct Lacking {
    /// The first that cannot.
    rank: u32,
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
