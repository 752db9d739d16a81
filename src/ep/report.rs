//! Reports: which executor carried a call out, how its bytes went, and how it ended.

use crate::error::{CallError, Error, MemoryError};
use crate::exec::{EnqueueCounts, TransferCounts};
use crate::lane::{Lanes, PeerLane};
use crate::plan::Traffic;
use crate::world::{NoGpuDirect, Registration};

/// Executor of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CallExecutor {
    /// The caller's thread: rows in memory of the host.
    #[default]
    HostStepper,
    /// The caller's thread, which has copy engines move rows in memory of a device: exact sizes, or
    /// what a budget holds.
    Enqueuer,
    /// A program of constants on the caller's stream, for fixed slots in memory of a device, and
    /// for a budget where CUDA graphs hold calls.
    ConstantProgram,
}

impl CallExecutor {
    /// All executors.
    pub const ALL: [CallExecutor; 3] =
        [CallExecutor::HostStepper, CallExecutor::Enqueuer, CallExecutor::ConstantProgram];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            CallExecutor::HostStepper => "host-stepper",
            CallExecutor::Enqueuer => "enqueuer",
            CallExecutor::ConstantProgram => "constant-program",
        }
    }
}

/// Kernels of one call, in the order in which they run, with a place for each that a call may have:
/// executors on a device make their list in such an array, and C's report has as many places.
pub(super) type CallKernels = [Option<&'static str>; MAX_KERNELS];

/// Number of kernels that one call has at most.
#[doc(hidden)]
pub const MAX_KERNELS: usize = 6;

/// Those of a call that has none.
pub(super) const NO_KERNELS: CallKernels = [None; MAX_KERNELS];

/// How the bytes of a dispatch or of a return went at this rank.
///
/// The host counts what it moved, a device what its stream was asked to do; the other fields are
/// zero.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Executor of the call.
    pub executor: CallExecutor,
    /// Number of ranks that each lane reaches.
    pub lanes: Vec<LaneUse>,
    /// Host: what this rank moved.
    pub moved: TransferCounts,
    /// Host: the part of it that this rank relayed.
    pub relayed: TransferCounts,
    /// Host: what a dispatch was to move, and what would return: the plan's own count.
    pub traffic: Traffic,
    /// Weight of this rank's choices that a dispatch has dropped
    /// ([`Handle::dropped`](super::Handle::dropped)), added up by ascending choice; 0 where sizes
    /// stay on the device, whose kernels find it by
    /// [`Handle::dropped_mask`](super::Handle::dropped_mask).
    pub dropped_weight: f64,
    /// Device: what the stream was asked to do.
    pub enqueued: EnqueueCounts,
    /// GPU kernels that ran before rows were packed or after they had landed. In between, SMs make
    /// the copies of [`EnqueueCounts::copies_by_sms`] and the [sums](EnqueueCounts::relay_sums)
    /// of relays, and nothing else.
    pub kernels: Vec<&'static str>,
    /// Device: limit on the blocks of each of them, if there is one
    /// ([`ExpertParallelBuilder::max_blocks`](super::ExpertParallelBuilder::max_blocks)).
    pub max_blocks: Option<u32>,
    /// Device: bytes of it that each handle that is alive takes, beside rows and outputs; 0 where
    /// a program of constants serves calls, which share theirs.
    pub handle_bytes: u64,
    /// Device: other ranks on this rank's own device.
    pub same_device: u32,
    /// Device: reason why inter-node rows are staged in memory of the host, if they are.
    #[doc(hidden)]
    #[serde(serialize_with = "reason")]
    pub host_staged: Option<NoGpuDirect>,
    /// Device: how NICs know the device's memory, where they read and write inter-node rows there.
    #[doc(hidden)]
    #[serde(serialize_with = "registration")]
    pub registration: Option<Registration>,
}

impl Report {
    /// Device: reason why inter-node rows are staged in memory of the host, if they are. Then
    /// [`EnqueueCounts::staged_out_bytes`] and [`EnqueueCounts::staged_in_bytes`] count them.
    pub fn host_staged(&self) -> Option<&'static str> {
        self.host_staged.map(NoGpuDirect::name)
    }

    /// Device: how NICs know the device's memory, where they read and write inter-node rows there:
    /// `dma-buf` or `address`. Then [`EnqueueCounts::gpu_direct_bytes`] counts them.
    pub fn registration(&self) -> Option<&'static str> {
        self.registration.map(Registration::name)
    }
}

fn reason<S: serde::Serializer>(host_staged: &Option<NoGpuDirect>, to: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&host_staged.map(NoGpuDirect::name), to)
}

fn registration<S: serde::Serializer>(of: &Option<Registration>, to: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&of.map(Registration::name), to)
}

/// A lane and the number of ranks that it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct LaneUse {
    /// `own`, `shm`, `loopback`, `copy engine`, or `relay`: of ranks that are reached through
    /// others.
    pub lane: &'static str,
    /// Ranks.
    pub ranks: u32,
}

impl LaneUse {
    /// The lanes in use, in the order in which ranks first need them.
    pub(super) fn of(lanes: &Lanes) -> Vec<LaneUse> {
        let mut uses: Vec<LaneUse> = Vec::new();
        for lane in lanes.reach.iter().map(PeerLane::name) {
            match uses.iter_mut().find(|used| used.lane == lane) {
                Some(used) => used.ranks += 1,
                None => uses.push(LaneUse { lane, ranks: 1 }),
            }
        }
        uses
    }

    /// The same for rows in memory of devices: copy engines reach the ranks of this node.
    pub(super) fn of_devices(lanes: &Lanes) -> Vec<LaneUse> {
        let mut uses = LaneUse::of(lanes);
        for used in uses.iter_mut().filter(|used| used.lane == "shm") {
            used.lane = crate::lane::COPY_ENGINE;
        }
        uses.sort_by_key(|used| (used.lane != "own", used.lane != crate::lane::COPY_ENGINE, used.lane));
        uses
    }
}

/// How the last call of a dispatch or its combines ended at this rank. A combine of a dispatch that
/// was refused ends as that did.
///
/// | value | |
/// |---|---|
/// | 0 | well |
/// | 1 | this rank's input was refused |
/// | 2 | another rank's input was refused |
/// | 3 | a rank has no room, or more rows than its budget |
/// | 4 | ranks make different calls |
/// | 65536 | the world has failed |
///
/// From 1 to 4 and of 65536: nothing moved, and sums are zeros. Each other value is a
/// [`KernelFault`](crate::error::KernelFault) that a kernel has found: rows or sums of the call are
/// wrong. In slots that holds for 1 to 4, too: a fault there is also that a rank refuses the call
/// or, with a budget that graphs hold, is over it. The fault of a kernel about token 0 or rank 0
/// may be one of 1 to 4 as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status(pub u32);

impl Status {
    /// All is well.
    pub const OK: Status = Status(0);
    /// This rank's input was refused.
    pub const REFUSED: Status = Status(1);
    /// Another rank's input was refused.
    pub const PEER_REFUSED: Status = Status(2);
    /// A rank has no room, or more rows than its budget.
    pub const NO_ROOM: Status = Status(3);
    /// Ranks make different calls.
    pub const MISMATCH: Status = Status(4);
    /// The world has failed.
    pub const WORLD_FAILED: Status = Status(1 << 16);

    /// That of an error which leaves the world alive.
    pub(super) fn of(error: &Error) -> Self {
        match error {
            Error::Memory(MemoryError::OutOfSpace { .. } | MemoryError::HeapNotGrown { .. })
            | Error::Call(CallError::OverBudget { .. }) => Status::NO_ROOM,
            Error::Call(CallError::PeerRefused { .. }) => Status::PEER_REFUSED,
            Error::Call(CallError::KindsDiffer { .. } | CallError::Disagree { .. }) => Status::MISMATCH,
            _ => Status::REFUSED,
        }
    }
}
