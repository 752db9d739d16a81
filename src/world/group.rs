//! Groups: ordered ranks, and the steps that they take together.
//!
//! ```text
//!   gather     bytes of each rank to all, by the hub
//!   alike      values that all ranks must give alike at build: settings, places, fingerprints
//!   lanes      connections that a route needs, laid once
//! ```

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Window, WorldState, net_selection};
use crate::error::{BootstrapError, CallError, Error, LaneError, MemoryError, PlanError};
use crate::lane;
use crate::lane::{Lanes, PeerLane, RemoteAddress, WindowPart};
use crate::memory::SymmetricExtent;
use crate::topology::{NodeMap, Paths, Route};

/// Ordered ranks of a world. Positions in this order are the ranks of everything that is built on
/// the group.
#[derive(Debug)]
pub struct Group {
    pub(crate) shared: Arc<WorldState>,
    ranks: Vec<u32>,
    me: u32,
    name: String,
    steps: AtomicU64,
    /// By route, which decides the connections.
    lanes: [OnceLock<Arc<Lanes>>; Route::ALL.len()],
}

impl Group {
    pub(crate) fn new(shared: Arc<WorldState>, ranks: &[u32]) -> Result<Self, Error> {
        let bad = |rank: u32, expected| PlanError::BadParameter {
            parameter: "group rank",
            seen: rank.into(),
            expected,
        };
        let mut seen = HashSet::new();
        for &rank in ranks {
            if rank >= shared.hub.size() {
                return Err(bad(rank, "below the size of the world").into());
            }
            if !seen.insert(rank) {
                return Err(bad(rank, "each rank once").into());
            }
        }
        let own = shared.hub.rank();
        let Some(me) = ranks.iter().position(|&r| r == own) else {
            return Err(bad(own, "a list of ranks that has this rank").into());
        };
        let listed = ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let name = format!("group/{listed}/{}", shared.count_group(ranks));
        let (steps, lanes) = (AtomicU64::new(0), Default::default());
        Ok(Group { shared, ranks: ranks.to_vec(), me: me as u32, name, steps, lanes })
    }

    /// This rank's position.
    pub fn rank(&self) -> u32 {
        self.me
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The members' ranks in the world, in order.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Some of its members, by their ranks here, in this order. Collective among those.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for a rank that the group does not have, for one that is listed
    /// twice, and if this rank is not listed.
    pub fn subgroup(&self, members: &[u32]) -> Result<Group, Error> {
        let rank = |&member: &u32| {
            let (parameter, seen, expected) = ("group rank", member.into(), "below the size of the group");
            let rank = self.ranks.get(member as usize).copied();
            rank.ok_or(PlanError::BadParameter { parameter, seen, expected })
        };
        let ranks: Vec<u32> = members.iter().map(rank).collect::<Result<_, _>>()?;
        Group::new(Arc::clone(&self.shared), &ranks)
    }

    /// Which members share memory.
    pub fn nodes(&self) -> NodeMap {
        self.shared.nodes.subset(&self.ranks)
    }

    /// Touches so many bytes of the pool of each other member of this node, so that no first call
    /// pays for page faults. All members must have made their worlds before: the first rank to
    /// touch a page decides where it lies. A rank that fails here continues, because others wait
    /// for it, and pays in its first call.
    pub(crate) fn touch_pools(&self, bytes: u64) {
        for &rank in self.ranks.iter().filter(|&&rank| rank != self.ranks[self.me as usize]) {
            if let Err(error) = self.shared.heap.touch(rank, bytes) {
                tracing::debug!(rank, bytes, %error, "a local peer's pool was not touched");
            }
        }
    }

    /// Exchanges small blobs: what each member contributes, in order. Goes through the rendezvous,
    /// not the lanes.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`] naming the missing ranks, or the world's cause.
    pub fn gather(&self, blob: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let key = self.step();
        let deadline = self.shared.options.timeouts.deadline;
        Ok(self.shared.hub.gather(&key, self.me, self.size(), blob, deadline)?)
    }

    /// Memory of `len` bytes at every member, for one-sided puts. Collective.
    ///
    /// # Errors
    /// [`MemoryError::SizesDiffer`] if members ask for different sizes, [`MemoryError::OutOfSpace`]
    /// on every member if one of them has no room.
    pub fn window(&self, len: u64) -> Result<Window, Error> {
        Window::symmetric(self, len)
    }

    /// Compares settings between all members. The first says whether a rank can use its own.
    ///
    /// # Errors
    /// [`CallError::ConfigsDiffer`], but not at a rank that cannot use its own: that has its own
    /// reason to report.
    pub(crate) fn alike(&self, settings: &[(&'static str, u64)]) -> Result<(), Error> {
        let mine: Vec<u64> = settings.iter().map(|&(_, value)| value).collect();
        let rank = self.me;
        for (blob, peer) in self.gather(bytemuck::cast_slice(&mine))?.iter().zip(0..) {
            let theirs: Vec<u64> = bytemuck::allocation::pod_collect_to_vec(blob);
            let differs = settings.iter().zip(theirs.into_iter().chain(std::iter::repeat(u64::MAX)));
            if mine[0] == 1
                && let Some((&(what, mine), theirs)) =
                    differs.into_iter().find(|((_, mine), theirs)| mine != theirs)
            {
                return Err(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }.into());
            }
        }
        Ok(())
    }

    /// Makes a caller's own memory a window: `memory` is a memfd, sealed against shrinking, that
    /// the caller has mapped (a shared tensor, for example). Collective; sizes must be equal.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`] ([`MemoryError::NotUsable`] on the others),
    /// [`MemoryError::SizesDiffer`], [`MemoryError::OutOfSpace`] for its flags.
    pub fn register(&self, memory: OwnedFd) -> Result<Window, Error> {
        Window::registered(self, memory)
    }

    /// The lanes to all members. Collective the first time for each route: missing connections
    /// are laid then.
    pub(crate) fn lanes(&self, route: Route) -> Result<Arc<Lanes>, Error> {
        let cell = &self.lanes[route as usize];
        if let Some(lanes) = cell.get() {
            return Ok(Arc::clone(lanes));
        }
        let nodes = self.nodes();
        let paths = Paths::new(&nodes, route, self.me);
        net_selection::lay(self, &paths)?;
        let reach = self.ranks.iter().zip(0..).map(|(&rank, position)| self.reach(rank, position, &paths));
        let reach = reach.collect::<Result<Vec<_>, _>>()?;
        let lanes = Lanes {
            rank: self.me,
            world_ranks: self.ranks.clone(),
            silent: reach.iter().any(PeerLane::is_silent),
            reach,
            route,
            nodes: nodes.clone(),
            rows: self.shared.rows,
            health: Arc::clone(self.shared.hub.health()),
            deadline: self.shared.options.timeouts.deadline,
            oversubscribed: self.shared.oversubscribed(),
        };
        Ok(Arc::clone(cell.get_or_init(|| Arc::new(lanes))))
    }

    fn reach(&self, rank: u32, position: u32, paths: &Paths) -> Result<PeerLane, Error> {
        if position == self.me {
            return Ok(PeerLane::Own);
        }
        if paths.same_node(position) {
            return Ok(PeerLane::Load);
        }
        if !paths.needs_connection(position) {
            return Ok(PeerLane::Relayed);
        }
        let connection = self.shared.net.as_ref().and_then(|net| net.thread.connection_to(rank));
        let missing = LaneError::NoLane { rank: self.me, peer: position, missing: "a wire" };
        Ok(PeerLane::Net(connection.ok_or(missing)?))
    }

    /// Takes symmetric bytes at every member; all succeed or all give them back. Collective.
    ///
    /// The windows of a dropped layer are held until its peers have signaled that they are done
    /// with them. If there is no room, all members are here, so they have signaled: the second try
    /// finds the really free memory.
    pub(crate) fn take_symmetric(&self, len: u64) -> Result<SymmetricRange, Error> {
        let first = self.try_symmetric(len);
        if let Err(Error::Memory(MemoryError::OutOfSpace { .. })) = first {
            // Signals that are messages have come, but may not have been read.
            if let Some(net) = &self.shared.net {
                net.thread.progress();
            }
            self.shared.heap.pool().reap();
            return self.try_symmetric(len);
        }
        first
    }

    /// One try. Members agree on its outcome: each compares all sizes before it checks for room.
    fn try_symmetric(&self, len: u64) -> Result<SymmetricRange, Error> {
        // Relaxed: steps of a group are taken one at a time, by contract.
        let call = self.steps.load(Ordering::Relaxed);
        let taken = self.shared.heap.symmetric().take(len);
        let said = match &taken {
            Ok(extent) => [len, 1, extent.offset(), 0],
            Err(MemoryError::OutOfSpace { free, total, .. }) => [len, 0, *free, *total],
            Err(_) => [len, 0, 0, 0],
        };
        // This rank's earlier puts to this range have landed before any rank clears it.
        self.flush_rails()?;
        let mut answers = Vec::new();
        for (blob, &member) in self.gather(bytemuck::cast_slice(&said))?.iter().zip(&self.ranks) {
            let answer = bytemuck::try_pod_read_unaligned::<[u64; 4]>(blob);
            answers.push(answer.map_err(|_| BootstrapError::Malformed { peer: format!("rank {member}") })?);
        }
        if let Some((rank, &[seen, ..])) = (0..).zip(&answers).find(|(_, answer)| answer[0] != len) {
            return Err(MemoryError::SizesDiffer { call, me: self.me, rank, seen, expected: len }.into());
        }
        if let Some((rank, &[asked, _, free, total])) = (0..).zip(&answers).find(|(_, answer)| answer[1] == 0)
        {
            let (space, setting) = ("symmetric heap", "SIDELANE_SYMMETRIC");
            return Err(MemoryError::OutOfSpace { rank, asked, free, total, space, setting }.into());
        }
        let parts = answers.iter().zip(&self.ranks);
        let parts: Vec<WindowPart> =
            parts.map(|(&[.., offset, _], &member)| WindowPart { member, region: 0, offset, len }).collect();
        if let Some(net) = &self.shared.net {
            // Signals that are messages have come, but may not have been read.
            net.thread.progress();
        }
        // All members are here, so none is still in a call that used these bytes; none may use them
        // before all are clear.
        let mut extent = taken?;
        extent.clear()?;
        self.gather(&[])?;
        for &WindowPart { member, region, offset, len } in &parts {
            if let Some(connection) =
                self.shared.net.as_ref().and_then(|net| net.thread.connection_to(member))
            {
                connection.cleared(RemoteAddress { region, offset }, len);
            }
        }
        Ok(SymmetricRange { extent, parts })
    }

    /// Returns when everything sent to members has landed.
    fn flush_rails(&self) -> Result<(), Error> {
        let Some(net) = &self.shared.net else { return Ok(()) };
        let deadline = self.shared.options.timeouts.deadline;
        for connection in self.ranks.iter().filter_map(|&member| net.thread.connection_to(member)) {
            lane::flush(connection.as_ref(), self.shared.hub.health(), deadline, self.me)?;
        }
        Ok(())
    }

    /// The name of the next collective step: the same on all members, as they take the same steps.
    pub(crate) fn step(&self) -> String {
        // Relaxed: one thread takes steps of a group at a time, by contract.
        format!("{}/{}", self.name, self.steps.fetch_add(1, Ordering::Relaxed))
    }
}

/// Symmetric bytes at every member of a group; this rank's are given back when dropped.
#[derive(Debug)]
pub(crate) struct SymmetricRange {
    extent: SymmetricExtent,
    parts: Vec<WindowPart>,
}

impl SymmetricRange {
    /// As a window of the lanes.
    pub(crate) fn window(&self) -> lane::MappedWindow {
        lane::MappedWindow {
            mapped: Arc::clone(self.extent.mapped()),
            parts: self.parts.clone(),
            of_devices: false,
        }
    }
}
