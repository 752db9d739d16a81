//! The lanes from one rank to all ranks of a group, and the limits of waits for them.
//!
//! ```text
//!   rank    0     1     2        3        4 (other node)    5 (other node, route pxn)
//!   lane   Load  Own   Load     Load     Net(connection)   Relayed: over a rank of its node
//! ```
//!
//! Words that devices write are awaited here too. Nothing wakes a thread for them, so it polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::flag::{WaitLimits, WaitProgress, Waiter};
use super::net::NetConnection;
use crate::bootstrap::Health;
use crate::bootstrap::wait::nap;
use crate::error::{Error, LaneError};
use crate::rows::RowKernels;
use crate::schedule::Flag;
use crate::topology::{NodeMap, Paths, Route};

/// How a rank reaches another.
#[derive(Clone, Debug)]
pub enum PeerLane {
    /// It is this rank itself.
    Own,
    /// By loads and stores: the shm lane.
    Load,
    /// Over a connection.
    Net(Arc<dyn NetConnection>),
    /// Only through a relay.
    Relayed,
}

impl PeerLane {
    /// Name of the lane, for reports and errors.
    pub fn name(&self) -> &'static str {
        match self {
            PeerLane::Own => "own",
            PeerLane::Load => "shm",
            PeerLane::Net(connection) => connection.lane(),
            PeerLane::Relayed => "relay",
        }
    }

    /// Whether signals over it wake no thread here.
    pub fn is_silent(&self) -> bool {
        self.connection().is_some_and(|connection| !connection.wakes())
    }

    /// The connection, if this is a lane over one.
    pub(super) fn connection(&self) -> Option<&dyn NetConnection> {
        match self {
            PeerLane::Net(connection) => Some(connection.as_ref()),
            PeerLane::Own | PeerLane::Load | PeerLane::Relayed => None,
        }
    }
}

/// One rank's lanes in a group. Ranks are positions in the group.
#[derive(Debug)]
pub struct Lanes {
    /// This rank.
    pub rank: u32,
    /// Each rank's number in the world.
    pub world_ranks: Vec<u32>,
    /// Which ranks share memory.
    pub nodes: NodeMap,
    /// How rows reach other nodes, which decides the connections.
    pub route: Route,
    /// The lane to each rank.
    pub reach: Vec<PeerLane>,
    /// Vector loops of this machine.
    pub rows: RowKernels,
    /// Whether the world is alive.
    pub health: Arc<Health>,
    /// How long a live but silent rank is waited for.
    pub deadline: Duration,
    /// Whether this machine has fewer cores than ranks of the world.
    pub oversubscribed: bool,
    /// Whether signals of any connection wake no thread ([`PeerLane::is_silent`]).
    pub silent: bool,
}

impl Lanes {
    /// This rank among its nodes.
    pub fn paths(&self) -> Paths<'_> {
        Paths::new(&self.nodes, self.route, self.rank)
    }

    /// Writer of the words here that concern `peer`: the rank itself, its relay on this node, or
    /// this rank's own relay.
    pub fn writer_of(&self, peer: u32) -> u32 {
        match self.reach.get(peer as usize) {
            Some(PeerLane::Relayed) => self.paths().of(peer).relay_to(self.rank),
            _ => peer,
        }
    }

    /// Limits of a wait for a word of this kind that concerns `peer`. The deadline is a little
    /// longer if the writer itself has to wait for others first: it knows the late rank better, so
    /// its report should come first. This holds for relays, and for a rank of another node that
    /// reports its whole node.
    pub fn limits_for(&self, peer: u32, flag: Flag) -> WaitLimits<'_> {
        let limits = self.limits_of(self.writer_of(peer));
        let waits_itself = match (self.reach.get(peer as usize), flag) {
            (Some(PeerLane::Relayed | PeerLane::Own), _) | (Some(PeerLane::Net(_)), Flag::Entry) => true,
            // Written by this rank's own relay.
            (Some(PeerLane::Net(_)), Flag::Landed) => self.route == Route::Pxn,
            _ => false,
        };
        let more = if waits_itself { limits.deadline / 8 } else { Duration::ZERO };
        WaitLimits { deadline: limits.deadline + more, ..limits }
    }

    /// Limits of a wait for `peer`.
    pub fn limits_of(&self, peer: u32) -> WaitLimits<'_> {
        WaitLimits {
            health: &self.health,
            oversubscribed: self.oversubscribed,
            deadline: self.deadline,
            awaited: self.world_ranks[peer as usize],
            silent: self.silent,
        }
    }

    /// Takes what has come over the connections, and sends what can be sent.
    pub fn progress(&self) {
        for (_, connection) in self.connections() {
            connection.progress(&self.health);
        }
    }

    /// Whether the world is alive. One load while it is.
    ///
    /// # Errors
    /// The fault of a connection of this rank, or else the world's
    /// [`Cause`](crate::error::Cause).
    #[inline]
    pub fn check(&self) -> Result<(), Error> {
        self.health.check().map_err(|cause| self.fault().map_or(cause.into(), Error::from))
    }

    /// The health of the world, as a connection of this rank sees it.
    pub fn fault(&self) -> Option<LaneError> {
        self.connections().find_map(|(_, connection)| connection.fault())
    }

    /// The ranks that are reached over connections.
    pub(super) fn connections(&self) -> impl Iterator<Item = (u32, &dyn NetConnection)> {
        (0..).zip(&self.reach).filter_map(|(rank, lane)| Some((rank, lane.connection()?)))
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.reach.len() as u32
    }
}

/// Name of the lane, for reports and errors.
pub const COPY_ENGINE: &str = "copy engine";

impl Lanes {
    /// Waits until a word here that a device of rank `from` writes has at least `value`; `look` is
    /// called between looks, and may end the wait. Connections are served meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Deadline`], the world's [`Cause`](crate::error::Cause), or an error of `look`.
    pub fn wait_for_word(
        &self,
        word: &AtomicU64,
        value: u64,
        (from, flag): (u32, Flag),
        look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.poll_word(word, value, (from, flag), self.limits_of(from), look)
    }

    /// Waits until this rank's own stream has set a word here to a value; `look` as above. There is
    /// no deadline: the caller's own work may come first.
    ///
    /// # Errors
    /// The world's [`Cause`](crate::error::Cause), an interruption, or an error of `look`.
    pub fn wait_for_stream(
        &self,
        word: &AtomicU64,
        value: u64,
        look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let limits = WaitLimits { deadline: Duration::MAX, ..self.limits_of(self.rank) };
        self.poll_word(word, value, (self.rank, Flag::Ready), limits, look)
    }

    fn poll_word(
        &self,
        word: &AtomicU64,
        value: u64,
        (from, flag): (u32, Flag),
        limits: WaitLimits<'_>,
        mut look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut waiter = Waiter::new(WaitLimits { silent: true, ..limits });
        loop {
            // The stream writes the word behind its work, so what it did is there with it.
            let seen = word.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            look()?;
            self.progress();
            waiter.turn(nap).map_err(|why| {
                let (rank, lane, flag) = (self.rank, COPY_ENGINE, flag as u32);
                WaitProgress { rank, peer: from, lane, flag, awaited: value, seen }.error(why, || None)
            })?;
        }
    }
}
