//! The matrix: each fault, in each phase of a world, over each lane.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sidelane::config::NetChoice;

use crate::error::{Error, Result};
use crate::inject::Machine;

/// A fault: of one rank, the victim, or of the wire between two machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The process is killed.
    Sigkill,
    /// All its threads stand still.
    Sigstop,
    /// It gets no further descriptor.
    Emfile,
    /// It gets no further thread.
    NoThread,
    /// It gets no further memory: the kernel kills it at the next page.
    Memory,
    /// Signals interrupt all system calls of all its threads.
    Eintr,
    /// Packets are lost at random.
    Loss,
    /// Packets come late.
    Delay,
    /// Packets come twice.
    Duplicate,
    /// No packet arrives.
    Partition,
}

/// A phase of a world: what its ranks do while the fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Ranks meet and build a world.
    Bootstrap,
    /// They build an instance and a communicator.
    Build,
    /// Dispatch, straight to the ranks of other nodes.
    Dispatch,
    /// Dispatch and combine in halves, over relays.
    Relay,
    /// Combine along one handle.
    Combine,
    /// The gradients of dispatch and combine.
    Gradients,
    /// All-reduce, all-to-all and the like.
    Collectives,
    /// One rebuild after another.
    Rebuild,
}

/// The lane between ranks of different nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// One node.
    Shm,
    /// Two nodes that this machine plays.
    Loopback,
    /// Two nodes with a connection for each pair of ranks.
    Tcp,
    /// Two nodes with NICs.
    Verbs,
}

impl Fault {
    /// All faults, in the order of the table.
    pub const ALL: [Fault; 10] = [
        Fault::Sigkill,
        Fault::Sigstop,
        Fault::Emfile,
        Fault::NoThread,
        Fault::Memory,
        Fault::Eintr,
        Fault::Loss,
        Fault::Delay,
        Fault::Duplicate,
        Fault::Partition,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::Sigkill => "sigkill",
            Fault::Sigstop => "sigstop",
            Fault::Emfile => "emfile",
            Fault::NoThread => "no-thread",
            Fault::Memory => "memory",
            Fault::Eintr => "eintr",
            Fault::Loss => "loss",
            Fault::Delay => "delay",
            Fault::Duplicate => "duplicate",
            Fault::Partition => "partition",
        }
    }

    /// Whether all ranks must go on, with the right bits: the kernel hides such faults from a right
    /// program, at the cost of time.
    pub const fn is_survived(self) -> bool {
        matches!(self, Fault::Eintr | Fault::Loss | Fault::Delay | Fault::Duplicate)
    }

    /// Whether the others must lose a rank that is in their world.
    pub const fn is_fatal(self) -> bool {
        matches!(self, Fault::Sigkill | Fault::Sigstop | Fault::Partition)
    }

    /// Whether it strikes the wire, not a rank.
    pub const fn is_of_wire(self) -> bool {
        matches!(self, Fault::Loss | Fault::Delay | Fault::Duplicate | Fault::Partition)
    }
}

impl Phase {
    /// All phases, in the order of the table.
    pub const ALL: [Phase; 8] = [
        Phase::Bootstrap,
        Phase::Build,
        Phase::Dispatch,
        Phase::Relay,
        Phase::Combine,
        Phase::Gradients,
        Phase::Collectives,
        Phase::Rebuild,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Bootstrap => "bootstrap",
            Phase::Build => "build",
            Phase::Dispatch => "dispatch",
            Phase::Relay => "relay",
            Phase::Combine => "combine",
            Phase::Gradients => "gradients",
            Phase::Collectives => "collectives",
            Phase::Rebuild => "rebuild",
        }
    }

    /// Steps that ranks take under a fault before they are taken to survive it. A step of the slow
    /// phases is a world or an instance.
    pub const fn steps(self) -> u64 {
        match self {
            Phase::Bootstrap | Phase::Rebuild => 2,
            Phase::Build => 4,
            _ => 24,
        }
    }
}

impl Lane {
    /// All lanes, in the order of the table.
    pub const ALL: [Lane; 4] = [Lane::Shm, Lane::Loopback, Lane::Tcp, Lane::Verbs];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Shm => "shm",
            Lane::Loopback => "loopback",
            Lane::Tcp => "tcp",
            Lane::Verbs => "verbs",
        }
    }

    /// What the library is asked for.
    pub const fn net(self) -> NetChoice {
        match self {
            Lane::Shm => NetChoice::Auto,
            Lane::Loopback => NetChoice::Loopback,
            Lane::Tcp => NetChoice::Tcp,
            Lane::Verbs => NetChoice::Verbs,
        }
    }
}

/// One cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Cell {
    /// The fault that strikes.
    pub fault: Fault,
    /// What ranks do meanwhile.
    pub phase: Phase,
    /// What joins them.
    pub lane: Lane,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} over {}", self.fault.name(), self.phase.name(), self.lane.name())
    }
}

impl Cell {
    /// All cells, in the order of the table.
    pub fn all() -> Vec<Cell> {
        let lanes = |fault, phase| Lane::ALL.map(|lane| Cell { fault, phase, lane });
        let phases = |fault| Phase::ALL.into_iter().flat_map(move |phase| lanes(fault, phase));
        Fault::ALL.into_iter().flat_map(phases).collect()
    }

    /// Those that the caller names: in each of the three dimensions any that a word names, or all.
    ///
    /// # Errors
    /// [`Error::NoCell`] for words that together name none.
    pub fn chosen(words: &[String]) -> Result<Vec<Cell>> {
        let named = |names: &[&str]| words.iter().any(|word| names.contains(&word.as_str()));
        let [by_fault, by_phase, by_lane] = [
            named(&Fault::ALL.map(Fault::name)),
            named(&Phase::ALL.map(Phase::name)),
            named(&Lane::ALL.map(Lane::name)),
        ];
        let is_chosen = |cell: &Cell| {
            (!by_fault || named(&[cell.fault.name()]))
                && (!by_phase || named(&[cell.phase.name()]))
                && (!by_lane || named(&[cell.lane.name()]))
        };
        let cells: Vec<Cell> = Cell::all().into_iter().filter(is_chosen).collect();
        if cells.is_empty() { Err(Error::NoCell { words: words.join(" ") }) } else { Ok(cells) }
    }

    /// Why this cell means nothing, or not on this machine.
    pub fn why_not(&self, machine: &Machine) -> Option<String> {
        match (self.fault, self.lane) {
            (_, Lane::Shm) if self.phase == Phase::Relay => Some("one node has no relays".to_owned()),
            (fault, Lane::Shm | Lane::Loopback) if fault.is_of_wire() => {
                Some("no packets between ranks of one machine".to_owned())
            }
            (fault, Lane::Verbs) if fault.is_of_wire() => {
                Some("the wire of NICs is the test bed's: its steps cut, rebuilt and killed".to_owned())
            }
            (_, Lane::Verbs) if !machine.has_nic => {
                Some("no RDMA NIC on this machine; tests/testbed has some".to_owned())
            }
            (fault, _) => machine.why_not(fault),
        }
    }

    /// Random choices of this cell in a run with this seed.
    pub fn rng(&self, seed: u64) -> ChaCha8Rng {
        let place = Cell::all().iter().position(|cell| cell == self).unwrap_or_default();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(place as u64);
        rng
    }
}

/// So many of these cells, drawn by a seed, in random order.
pub fn sample(mut cells: Vec<Cell>, count: usize, seed: u64) -> Vec<Cell> {
    cells.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    cells.truncate(count);
    cells
}

/// A seed that no run had before.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one("seed") >> 32
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;

    #[test]
    fn words_of_two_dimensions_name_their_common_cells() {
        let words = ["sigkill", "sigstop", "tcp"].map(str::to_owned);
        let cells = Cell::chosen(&words).unwrap();
        assert_eq!(cells.len(), 2 * Phase::ALL.len());
        assert!(cells.iter().all(|cell| cell.lane == Lane::Tcp));
        assert_eq!(Cell::chosen(&[]).unwrap().len(), 10 * 8 * 4);
    }

    #[test]
    fn sample_of_a_seed_is_the_same_and_another_seed_has_another() {
        let drawn = |seed| sample(Cell::all(), 5, seed);
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        assert_ne!(Cell::all()[0].rng(7).next_u64(), Cell::all()[1].rng(7).next_u64());
    }
}
