//! The time interpreter: the same schedules and operands against a model of links, NICs and
//! engines.
//!
//! ```text
//!   routings --Placed--> layouts, forwards --the same skeletons and tables as in a real call--> tasks of every rank
//!                                                                                                    |
//!   Hardware ----------------------------------------------------------------> events in order of time, integer ns
//!                                                                                                    |
//!                                                                  Timing: phases, what is busiest, roofline, counts
//! ```
//!
//! **A rank.** A few *lines*, each of which does one task after the other and may wait for words:
//!
//! ```text
//!   host      plans, enqueues, posts, signals, waits               (the host executor also copies and sums here, on a core)
//!   stream    batches of copies, and lists of words around them    a copy: the longer of price and bytes / rate
//!   caller    kernels that sort, pack, regroup and sum             launch + bytes / rate of the memory
//!   NIC       what crosses: bytes / rate + a price a message       shared by the ranks that share the NIC
//! ```
//!
//! Bytes also pass the link of their source and of their target, or the receiver's NIC, first come,
//! first served. A copy holds its engine until its last byte has arrived; a NIC continues with its
//! next task. Behind a switch one engine makes all copies of a rank; without one, each peer has an
//! engine of its own. On a device, each call of the driver that the executor makes has its task
//! here: a test compares the counts.
//!
//! **Large groups.** If the routings of all ranks are given, every rank is simulated. If those of
//! one node are given, that node represents all: rank i of node v acts at the same time as rank i
//! of the first node, with nodes counted from its own. So a signal of the first node's rank to node
//! v is also the signal of node -v to the first. Programs are alike by construction,
//! since [`Paths`](sidelane_core::topology::Paths) enumerates from the next node on. The model
//! assumes that the *routing* is alike, too: true of balanced routing up to chance, and false for
//! routing that prefers some nodes. A test compares the two.
//!
//! **Not modeled.** Congestion inside the network, other traffic, clocks that differ, stragglers,
//! the caller's experts.

mod call_tasks;
mod device_tasks;
mod events;
mod hardware;
mod host_tasks;
mod measured_device;
mod measured_host;
mod placement;
mod sensitivity;
mod slot_tasks;
#[cfg(test)]
mod tests;
mod variants;

pub use hardware::{
    Compute, CopyCost, Engines, Executor, Hardware, Host, Link, NicModel, Peaks, Place, Source,
    UnknownHardware,
};
pub use measured_device::DeviceFigures;
pub use measured_host::{HostFigures, Loops};
pub use placement::{Case, Placed};
pub use sensitivity::{Assumption, Fastest, Outcome, outcomes};
pub use slot_tasks::slots;
pub use variants::{Timed, Variant, Wishes};

use hardware::at_rate;
use serde::Serialize;

/// Parts of a call, in order of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Sorting, the counts of all ranks, placement; of a combine: all ranks have entered.
    Plan,
    /// Slots: rows are packed.
    Pack,
    /// Rows move, once they are packed.
    Move,
    /// Rows that arrived come into visible order.
    Regroup,
    /// Crossing rows return, summed by relays or not.
    Return,
    /// Rows are pulled from local peers.
    Pull,
    /// Rows are summed.
    Sum,
}

/// Parts that can be busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// The host's thread; of a host executor: its cores.
    Host,
    /// Copy engines and words of streams.
    Engines,
    /// Bytes that a rank receives from its node.
    Link,
    /// NICs, out.
    NicOut,
    /// NICs, in.
    NicIn,
    /// Kernels.
    Compute,
}

impl Resource {
    /// All parts.
    pub const ALL: [Resource; 6] = [
        Resource::Host,
        Resource::Engines,
        Resource::Link,
        Resource::NicOut,
        Resource::NicIn,
        Resource::Compute,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Resource::Host => "host",
            Resource::Engines => "engines",
            Resource::Link => "link",
            Resource::NicOut => "nic-out",
            Resource::NicIn => "nic-in",
            Resource::Compute => "compute",
        }
    }
}

impl Phase {
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Plan => "plan",
            Phase::Pack => "pack",
            Phase::Move => "move",
            Phase::Regroup => "regroup",
            Phase::Return => "return",
            Phase::Pull => "pull",
            Phase::Sum => "sum",
        }
    }
}

/// Work of one rank in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankWork {
    /// Copies within the node; of a host: rows that it copies.
    pub copies: u64,
    /// Batches of those.
    pub batches: u64,
    /// Bytes of those to or from other ranks.
    pub intra_node_bytes: u64,
    /// Bytes of those within its own memory.
    pub self_bytes: u64,
    /// Bytes of those between memory of the host and of devices.
    pub host_bytes: u64,
    /// Memory operations of its streams.
    pub memory_ops: u64,
    /// Kernels.
    pub kernels: u64,
    /// Messages of its NIC; of a device, signals among them.
    pub messages: u64,
    /// Bytes of those.
    pub inter_node_bytes: u64,
    /// Bytes that kernels read and write, without those of local peers.
    pub kernel_bytes: u64,
    /// Bytes that kernels read from local peers.
    pub loaded_bytes: u64,
}

/// A part, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bottleneck {
    /// Which.
    pub part: Resource,
    /// In ns.
    pub ns: u64,
}

/// A phase of a call, and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseTime {
    /// Which.
    pub phase: Phase,
    /// In ns.
    pub ns: u64,
}

impl Bottleneck {
    /// The roofline of ranks with this work, each at a NIC: each part moves its bytes at its rate,
    /// all at once, at no fixed cost. No executor could be faster.
    pub(super) fn roofline(works: &[RankWork], nics: &[usize], hardware: &Hardware) -> Self {
        let Hardware { engines, link, nic, compute, host, executor, .. } = hardware;
        let of = |place, bytes| at_rate(bytes, engines.best_rate(place));
        let copying = |work: &RankWork| {
            let peer = of(Place::Peer, work.intra_node_bytes);
            match engines.switched {
                true => peer + of(Place::Own, work.self_bytes) + of(Place::Host, work.host_bytes),
                // Engines of several peers share the link of the rank.
                false => at_rate(work.intra_node_bytes, link.rate),
            }
        };
        let kernels = |work: &RankWork| at_rate(work.kernel_bytes, compute.rate);
        let loads = |work: &RankWork| at_rate(work.loaded_bytes, link.load_rate);
        let most = |of: &dyn Fn(&RankWork) -> u64| works.iter().map(of).max().unwrap_or(0);
        if *executor == Executor::Host {
            // Crossing bytes are copied twice: by a core of the sender, and by one of the receiver.
            let once = |work: &RankWork| at_rate(work.inter_node_bytes, nic.rate);
            let sends = |work: &RankWork| copying(work) + kernels(work) + loads(work) + once(work);
            let all = works.iter().map(|work| sends(work) + once(work)).sum::<u64>();
            let ns = match host.cores {
                0 => most(&sends).max(all / works.len().max(1) as u64),
                cores => all / u64::from(cores),
            };
            return Bottleneck { part: Resource::Host, ns };
        }
        let mut far = vec![0; works.len()];
        nics.iter().zip(works).for_each(|(&nic, work)| far[nic] += work.inter_node_bytes);
        let far = far.into_iter().map(|bytes| at_rate(bytes, nic.rate)).max().unwrap_or(0);
        let parts = [
            (most(&copying), Resource::Engines),
            (far, Resource::NicOut),
            (most(&|work| kernels(work).max(loads(work))), Resource::Compute),
        ];
        let (ns, part) = parts.into_iter().rev().max_by_key(|&(ns, _)| ns).expect("three parts");
        Bottleneck { part, ns }
    }
}

/// How long a call takes, by the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Timing {
    /// Until the slowest rank is done, in ns.
    pub ns: u64,
    /// Phases of that rank: they add up to `ns`.
    pub phases: Vec<PhaseTime>,
    /// The part that was busy longest at any rank.
    pub bottleneck: Bottleneck,
    /// By bytes alone.
    pub roofline: Bottleneck,
    /// Of the rank that has most, each figure by itself.
    pub max: RankWork,
    /// Of all ranks simulated, added up.
    pub total: RankWork,
    /// Ranks simulated.
    pub simulated_ranks: u32,
}

impl RankWork {
    /// Counts copies at a place.
    pub(super) fn count(&mut self, place: Place, copies: u64, bytes: u64) {
        self.copies += copies;
        let of = match place {
            Place::Peer => &mut self.intra_node_bytes,
            Place::Own => &mut self.self_bytes,
            Place::Host => &mut self.host_bytes,
        };
        *of += bytes;
    }

    pub(super) fn each(self, other: RankWork, by: impl Fn(u64, u64) -> u64) -> RankWork {
        RankWork {
            copies: by(self.copies, other.copies),
            batches: by(self.batches, other.batches),
            intra_node_bytes: by(self.intra_node_bytes, other.intra_node_bytes),
            self_bytes: by(self.self_bytes, other.self_bytes),
            host_bytes: by(self.host_bytes, other.host_bytes),
            memory_ops: by(self.memory_ops, other.memory_ops),
            kernels: by(self.kernels, other.kernels),
            messages: by(self.messages, other.messages),
            inter_node_bytes: by(self.inter_node_bytes, other.inter_node_bytes),
            kernel_bytes: by(self.kernel_bytes, other.kernel_bytes),
            loaded_bytes: by(self.loaded_bytes, other.loaded_bytes),
        }
    }
}
