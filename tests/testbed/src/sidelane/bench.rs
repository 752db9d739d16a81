//! `sidelane bench`: dispatch and combine, verified bit by bit.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::{ALERT, CALM, LANE, Nics, command, report};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::machine::Job;

/// Two on each machine: relays have a local peer to copy to.
const RANKS_PER_NODE: u32 = 2;

/// The way of rows to other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Once per node, to a relay.
    Pxn,
    /// Once per expert.
    Direct,
}

impl Route {
    /// As the program names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pxn => "pxn",
            Self::Direct => "direct",
        }
    }
}

/// A `sidelane bench` over both machines.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// The way of rows to the other machine.
    pub route: Route,
    /// How many rounds are timed.
    pub rounds: u32,
}

/// The used part of its report.
#[derive(Debug, Deserialize)]
struct Seen {
    config: Config,
    verified: bool,
    rows_verified: u64,
    lanes: Lanes,
    nics: OfNics,
}

/// The lane's report of its requests to the NICs.
#[derive(Debug, Deserialize)]
struct OfNics {
    /// Per node.
    measured: [Asked; 2],
    /// Whether that is what its calls should come to.
    exact: bool,
}

#[derive(Debug, Deserialize)]
struct Asked {
    requests: u64,
    packets: u64,
}

/// Results of a bench.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// Rows that were verified, all of them.
    pub rows: u64,
    /// Work requests of both machines.
    pub requests: u64,
    /// Packets of both machines, as the NICs counted them: those of the requests, and an
    /// acknowledgement of each.
    pub packets: u64,
}

#[derive(Debug, Deserialize)]
struct Config {
    route: String,
}

#[derive(Debug, Deserialize)]
struct Lanes {
    inter_node: Option<String>,
}

impl Bench {
    fn command(&self, machine: usize, nics: Nics, patience: &str) -> String {
        let what = format!("bench --tokens 64 --rounds {} --route {}", self.rounds, self.route.name());
        command(machine, RANKS_PER_NODE, &what, nics, patience)
    }

    /// Runs it to its end, over one NIC: two at once overrun the wires now and then. Rows must be
    /// right to the bit, and NICs must have sent exactly the requested packets.
    pub fn run(&self, bed: &Bed, deadline: Deadline) -> Result<Counted> {
        let before = [bed.counters(0)?, bed.counters(1)?];
        let seen: Seen = report(bed, deadline, |machine| self.command(machine, Nics::First, CALM))?;
        let asked = seen.config.route == self.route.name() && seen.lanes.inter_node.as_deref() == Some(LANE);
        if !(asked && seen.verified && seen.rows_verified > 0 && seen.nics.exact) {
            return Err(Error::NotVerified { program: "bench", seen: format!("{seen:?}") });
        }
        let mut counted = Counted { rows: seen.rows_verified, requests: 0, packets: 0 };
        for (machine, before) in before.iter().enumerate() {
            let nic = bed.counters(machine)?.since(before);
            let [own, other] = [machine, 1 - machine].map(|machine| &seen.nics.measured[machine]);
            // Soft-RoCE acknowledges each request once, and nothing in between: a chunk is 64
            // packets at most.
            let expected = own.packets + other.requests;
            if nic.sent() != expected || nic.again() > 0 {
                return Err(Error::Miscounted { machine, expected, sent: nic.sent(), again: nic.again() });
            }
            counted.requests += own.requests;
            counted.packets += nic.sent();
        }
        Ok(counted)
    }

    /// Starts it over both NICs, to be disturbed.
    pub fn start(&self, bed: &Bed) -> Result<[Job; 2]> {
        bed.start_both(|machine| self.command(machine, Nics::Both, ALERT))
    }
}

/// Every rank of a machine has to say itself that it lost a rank of the other one or, if the
/// machine has no carrier, that a port of its own is down.
pub fn names_the_lost(machine: usize, carrier: bool, output: &str) -> bool {
    let node = machine as u32;
    let lost: BTreeSet<_> = ranks(1 - node).collect();
    let own_port = |line: &str| line.starts_with("sidelane: NIC ") && line.contains(" is down ");
    let names = |line: &str| {
        numbers_after("rank ", line).any(|rank| lost.contains(&rank)) || !carrier && own_port(line)
    };
    ranks(node).all(|rank| {
        let own = format!("[{rank}] ");
        output.lines().filter_map(|line| line.strip_prefix(&own)).any(names)
    })
}

fn ranks(node: u32) -> std::ops::Range<u32> {
    node * RANKS_PER_NODE..(node + 1) * RANKS_PER_NODE
}

/// 2 and 3 in "rank 2 and rank 3".
fn numbers_after<'a>(word: &'a str, line: &'a str) -> impl Iterator<Item = u32> + 'a {
    line.match_indices(word).filter_map(move |(at, _)| {
        let rest = &line[at + word.len()..];
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "\
[0] sidelane: rank 2 is lost: its process ended, or left the world
sidelane: rank 0 (node 0) exited with status 1
[1] sidelane: rank 3 is lost: its process ended, or left the world
sidelane: rank 1 (node 0) exited with status 1
";

    #[test]
    fn every_rank_has_to_name_one_of_the_other_machine() {
        assert!(names_the_lost(0, true, BOTH));
        assert!(names_the_lost(0, true, &BOTH.replace("rank 3", "rank 2")), "both may name the same");
        assert!(!names_the_lost(0, true, &BOTH.replace("rank 3", "somebody")), "only one of two ranks");
        assert!(
            !names_the_lost(0, true, &BOTH.replace("rank 3", "rank 1").replace("rank 2", "rank 0")),
            "their own"
        );
    }

    #[test]
    fn a_machine_without_carrier_may_name_its_own_port() {
        let port = "[1] sidelane: NIC rxe1, port 1 is down (check the cable)";
        let output = BOTH.replace("[1] sidelane: rank 3 is lost", port);
        assert!(names_the_lost(0, false, &output));
        assert!(!names_the_lost(0, true, &output));
    }

    #[test]
    fn a_rank_speaks_for_itself_alone() {
        assert!(!names_the_lost(0, true, &BOTH.replace("[1]", "[0]")), "one rank said it twice");
        assert!(!names_the_lost(0, true, &BOTH.replace("[1] ", "")), "who said it?");
        assert!(!names_the_lost(0, true, "[0] [1] rank 2\n"));
    }

    #[test]
    fn rank_20_is_not_rank_2() {
        assert!(!names_the_lost(0, true, "[0] rank 20\n[1] rank 30\n"));
        assert_eq!(numbers_after("rank ", "rank 2 of rank 31, rank x").collect::<Vec<_>>(), [2, 31]);
    }
}
