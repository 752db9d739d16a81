//! Which part of a job this machine runs.
//!
//! One command per machine starts one job; each says how the whole looks, and which node of it this machine is.
//!
//! ```text
//!   machine a   sidelane bench --nodes 2 --ranks-per-node 4 --master a --node-rank 0     ranks 0 to 3; rank 0 is met
//!   machine b   sidelane bench --nodes 2 --ranks-per-node 4 --master a --node-rank 1     ranks 4 to 7
//! ```
//!
//! No launcher knows another, so what one launcher would draw for all ranks is said by the user: the meeting point, and
//! the secret, through the environment.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::Bind;
use crate::command;
use crate::error::{CliError, usage};

/// Where torchrun's rendezvous is by default, too.
const PORT: u16 = 29500;

/// Where ranks are started, and how those of different nodes reach each other.
#[derive(Args, Clone, Debug, Default)]
pub struct MachineArgs {
    /// Start only the ranks of this node of the job: run one command on each machine
    #[arg(long, value_name = "I", requires = "master", help_heading = "Machines")]
    pub node_rank: Option<u32>,

    /// Where rank 0 is met: the machine of node 0. The ranks take the first of the 16 ports after this one that is free
    /// there, or SIDELANE_PORT [default port: 29500]
    #[arg(long, value_name = "HOST[:PORT]", requires = "node_rank", help_heading = "Machines")]
    pub master: Option<Master>,

    /// The lane between nodes: sets SIDELANE_RAIL [default: what the environment says]
    #[arg(long, value_enum, help_heading = "Machines")]
    pub rail: Option<Rail>,

    /// Processors of each rank
    #[arg(long, value_enum, default_value_t, help_heading = "Machines")]
    pub bind: Bind,
}

/// What `--rail` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rail {
    /// loop on one machine; otherwise verbs where there are cards, and tcp where not
    Auto,
    /// RDMA cards
    Verbs,
    /// Sockets
    Tcp,
    /// Rings in memory: pretends nodes on one machine
    Loop,
}

/// The node of a job that this machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Number of the node.
    pub node: u32,
    /// Where rank 0 is met.
    pub master: Master,
}

/// A host, by name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    pub host: String,
    pub port: u16,
}

impl MachineArgs {
    /// The part of a job with nodes of these sizes that this machine runs; none if it runs the whole job.
    pub fn part(&self, nodes: &[u32]) -> Result<Option<Part>, CliError> {
        let (Some(node), Some(master)) = (self.node_rank, &self.master) else { return Ok(None) };
        if node as usize >= nodes.len() {
            return Err(usage!(
                "--node-rank is {node}, but the job has {nodes} nodes, counted from 0",
                nodes = nodes.len()
            ));
        }
        Ok(Some(Part { node, master: master.clone() }))
    }

    /// Finds out whether rank 0 can write its reports, if this machine runs it.
    pub fn claim<'p>(&self, paths: impl IntoIterator<Item = &'p PathBuf>) -> Result<(), CliError> {
        if self.node_rank.unwrap_or(0) == 0 { command::claim(paths) } else { Ok(()) }
    }

    /// What the ranks find in their environment.
    pub fn variables(&self) -> Vec<(String, OsString)> {
        let rail = self.rail.and_then(|rail| rail.to_possible_value());
        rail.map(|rail| ("SIDELANE_RAIL".to_owned(), rail.get_name().into())).into_iter().collect()
    }
}

impl FromStr for Master {
    type Err = &'static str;

    /// `host`, `host:port`, `::1`, `[::1]:port`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected HOST or HOST:PORT; an IPv6 address with a port as [ADDRESS]:PORT";
        let (host, port) = match (text.strip_prefix('['), text.split_once(':')) {
            (Some(rest), _) => match rest.split_once(']').ok_or(EXPECTED)? {
                (host, "") => (host, None),
                (host, port) => (host, Some(port.strip_prefix(':').ok_or(EXPECTED)?)),
            },
            // More than one colon: an IPv6 address.
            (None, Some((host, port))) if !port.contains(':') => (host, Some(port)),
            _ => (text, None),
        };
        let port = port.map_or(Ok(PORT), str::parse).ok().filter(|&port| port > 0).ok_or(EXPECTED)?;
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(EXPECTED);
        }
        Ok(Master { host: host.to_owned(), port })
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_is_a_host_and_perhaps_a_port() {
        for (text, host, port) in [
            ("node7", "node7", 29500),
            ("10.0.0.1:4000", "10.0.0.1", 4000),
            ("fe80::1", "fe80::1", 29500),
            ("[fe80::1]", "fe80::1", 29500),
            ("[::1]:4000", "::1", 4000),
        ] {
            let master: Master = text.parse().unwrap();
            assert_eq!((master.host.as_str(), master.port), (host, port), "{text}");
            assert_eq!(master.to_string().parse(), Ok(master), "{text}");
        }
        for text in ["", ":4000", "a:", "a:0", "a:65536", "a:b", "[::1", "[::1]4000", "a b"] {
            assert!(text.parse::<Master>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_part_is_a_node_of_the_job() {
        let master: Option<Master> = Some("a".parse().unwrap());
        let args = MachineArgs { node_rank: Some(1), master, ..MachineArgs::default() };
        assert_eq!(args.part(&[4, 4]).unwrap().unwrap().node, 1);
        let refused = args.part(&[4]).unwrap_err().to_string();
        assert_eq!(refused, "--node-rank is 1, but the job has 1 nodes, counted from 0");
        assert_eq!(MachineArgs::default().part(&[4]).unwrap(), None);
    }

    #[test]
    fn the_rail_goes_to_the_ranks_only_if_it_was_named() {
        assert_eq!(MachineArgs::default().variables(), []);
        let args = MachineArgs { rail: Some(Rail::Loop), ..MachineArgs::default() };
        assert_eq!(args.variables(), [("SIDELANE_RAIL".to_owned(), "loop".into())]);
    }
}
