//! Worlds of real processes, directed by a test.
//!
//! ```text
//!   test ── Job ──► spawns its own binary once per rank, with a launcher's variables and a socket as stdin
//!            │ Command ──────────►  rank::serve: World::from_env, then one command after another
//!            │ ◄────────── Report   mostly one per command; the end of the stream is the end of the process
//! ```
//!
//! A test is a script in the parent: it sends commands to ranks, kills or stops them, and waits for
//! their reports. A rank that ends or stays silent instead of reporting fails the test, with its
//! stderr.
#![allow(dead_code, reason = "each test program uses a part of this")]

pub mod job;
pub mod rank;
pub mod reference;
pub mod wires;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sidelane::Error;
use sidelane::error::{BootstrapError, Cause, LaneError, LostReason};

/// Longer than anything takes that works.
pub const LONG: Duration = Duration::from_secs(60);
/// A loss is named within this: five times what the design allows, for machines that do other work.
pub const SOON: Duration = Duration::from_secs(10);

/// A thread of the library, one of which each rank has; the coordinator is rank 0's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Thread {
    Link,
    Coordinator,
    Net,
    Relay,
    Watch,
}

impl Thread {
    /// Its name.
    pub fn of(self, rank: u32) -> String {
        let work = match self {
            Thread::Link => "link",
            Thread::Coordinator => "coordinator",
            Thread::Net => "net",
            Thread::Relay => "relay",
            Thread::Watch => "watch",
        };
        format!("sidelane-{work}-{rank}")
    }
}

/// Command to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Dispatch and combine so often, each row and sum compared with the reference.
    Rounds(u32),
    /// As [`Command::Rounds`], for ever; reports that it runs, and then what ended it.
    Loop,
    /// One all-reduce of many rounds after another, forever, each sum compared; reports as
    /// [`Command::Loop`].
    AllReduceForever,
    /// One all-to-all that lands in place after another, forever, each part compared; reports as
    /// [`Command::Loop`].
    LandForever,
    /// A combine behind work of this rank's stream that never ends; reports that it runs.
    HoldStream,
    /// A combine that waits for such a rank, while another thread frees memory and holds the
    /// driver's lock; reports that it runs, and then what ended it.
    FreeMeanwhile,
    /// The first half of a dispatch.
    StartRound,
    /// The rest of the round that was started: reports that it goes on, and then what came of it.
    FinishRound,
    /// A round, after which the rank leaves the world and ends, with any result: as most programs
    /// do.
    LastRound,
    /// Sleeps until the world is dead.
    AwaitDeath,
    /// Meets the survivors again.
    Rebuild,
    /// Takes spares in.
    Grow,
    /// Says what memory of other ranks is mapped.
    ListMemory,
    /// Says which lane joins the nodes.
    NameRail,
    /// Resets its connections to ranks of other nodes, and lives on.
    ResetWires,
    /// Overwrites every byte of the library's shared memory that this process has mapped.
    Scribble,
    /// Panics.
    Panic,
    /// Has a thread panic at its next turn.
    Doom(Thread),
    /// Leaves the world and ends.
    End,
}

/// Report of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// It is in a world; for each of its ranks, the rank before.
    Joined { rank: u32, size: u32, epoch: u16, previous: Vec<u32> },
    /// All rows of these rounds were right.
    Verified { rounds: u32, rows: u64 },
    /// It loops over rounds.
    Running,
    /// It stands between the halves of a dispatch.
    Halfway,
    /// It goes into the second half.
    Finishing,
    /// It has overwritten so many bytes.
    Scribbled(u64),
    /// Its mapped memory.
    Memory(Memory),
    /// The lane between nodes, and why it is this one.
    Net(String),
    /// So many connections were reset.
    Reset(u32),
    /// A thread is to panic.
    Doomed,
    /// The command ended so.
    Failed(Failure),
}

impl Report {
    /// The same of the epoch behind `old`, where it is of a later one: each connection that a
    /// loaded machine loses in a rebuild costs an epoch.
    pub fn of_the_epoch_behind(mut self, old: u16) -> Report {
        if let Report::Joined { epoch, .. } | Report::Failed(Failure::Evicted { epoch, .. }) = &mut self
            && *epoch > old
        {
            *epoch = old + 1;
        }
        self
    }
}

/// The library's segments in a process: inodes, ascending.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    pub heaps: Vec<u64>,
    pub wires: Vec<u64>,
    /// Segments with another name.
    pub others: Vec<String>,
    /// Descriptors of segments that are still open.
    pub open: Vec<String>,
}

/// An error, as far as tests distinguish them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Failure {
    Lost {
        rank: u32,
        silent: bool,
    },
    LauncherGone {
        pid: u32,
    },
    Evicted {
        rank: u32,
        epoch: u16,
    },
    Stalled {
        rank: u32,
        by: u32,
    },
    Deadline {
        rank: u32,
        peer: u32,
    },
    /// A wire broke: seen by `by` itself (`first`), or heard of.
    Wire {
        rank: u32,
        by: u32,
        first: bool,
    },
    /// A thread of a rank panicked.
    Panicked {
        by: u32,
        thread: String,
    },
    NoRendezvous,
    WrongSecret,
    /// A spare died while a world took it in.
    SpareLost {
        rank: u32,
    },
    /// A spare has another value of this setting.
    SettingsDiffer {
        setting: String,
    },
    Missing(Vec<u32>),
    Other(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::World(cause) => cause.into(),
            Error::Lane(LaneError::Deadline { rank, peer, .. }) => Failure::Deadline { rank, peer },
            Error::Lane(LaneError::Wire { rank, peer, .. }) => {
                Failure::Wire { rank: peer, by: rank, first: true }
            }
            Error::Bootstrap(BootstrapError::NoRendezvous { .. }) => Failure::NoRendezvous,
            Error::Bootstrap(BootstrapError::WrongSecret { .. }) => Failure::WrongSecret,
            Error::Bootstrap(BootstrapError::SpareLost { rank, .. }) => Failure::SpareLost { rank },
            Error::Bootstrap(BootstrapError::SettingsDiffer { setting, .. }) => {
                Failure::SettingsDiffer { setting }
            }
            Error::Bootstrap(BootstrapError::Deadline { missing, .. }) => Failure::Missing(missing),
            other => Failure::Other(other.to_string()),
        }
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Lost { rank, how } => Failure::Lost { rank, silent: matches!(how, LostReason::Silent(_)) },
            Cause::LauncherGone { pid } => Failure::LauncherGone { pid },
            Cause::Evicted { rank, epoch } => Failure::Evicted { rank, epoch },
            Cause::Stalled { rank, by, .. } => Failure::Stalled { rank, by },
            Cause::Connection { rank, by } => Failure::Wire { rank, by, first: false },
            Cause::Panicked { by, thread, .. } => Failure::Panicked { by, thread },
            other => Failure::Other(other.to_string()),
        }
    }
}
