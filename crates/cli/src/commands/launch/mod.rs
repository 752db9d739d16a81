//! `sidelane launch`: ranks as processes of this machine, which may be one of several.
//!
//! Programs find each other through torchrun's variable names, so every program that runs here runs
//! under torchrun as well. The launcher stays only to forward signals, to report which rank failed
//! and how, and to leave no process behind. It can die, too: every rank holds the read end of a
//! pipe ([`job`]) that ends with the launcher, and reports that itself. A parent-death signal would
//! end a rank before it could report why. So ranks that do not end are killed later, by a process
//! that stays ([`guard`]).
//!
//! One command per machine starts one job; each describes the whole job, and names this machine's
//! node.
//!
//! ```text
//!   machine a   sidelane bench --nodes 2 --ranks-per-node 4 --master a --node-rank 0     ranks 0 to 3; rank 0 is met
//!   machine b   sidelane bench --nodes 2 --ranks-per-node 4 --master a --node-rank 1     ranks 4 to 7
//! ```
//!
//! No launcher knows another. So the user gives the values that one launcher would draw for all
//! ranks, the meeting point and the secret, through the environment.

mod guard;
mod job;

use std::ffi::OsString;
use std::net::{IpAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::fd::RawFd;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, io};

use clap::{Args, ValueEnum};
use sidelane::Error;
use sidelane::bootstrap::{Identity, Secret};

use crate::command_frame::Command;
use crate::error::{CliError, failed, usage};

pub use job::{Bind, Job};

const EXAMPLES: &str = "\
Every rank sees torchrun's variables:
  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK
  MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
and Sidelane's own; on one machine NODE, PORT and SECRET of your environment are
not taken:
  SIDELANE_NODE          node of this rank: splits one machine into load domains
  SIDELANE_PORT          where the ranks meet
  SIDELANE_SECRET        proves membership, drawn anew for each job
  SIDELANE_JOB           name of a job across machines
  SIDELANE_NET           the lane of --net
  SIDELANE_LAUNCHER_FD   read end of a pipe that ends when the launcher does
  SIDELANE_LAUNCHER_PID  process id of the launcher

Across machines (--node-rank, --master) you may set SIDELANE_PORT and
SIDELANE_JOB, and must set the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on
each machine, or SIDELANE_INSECURE=1 on a trusted network.

Examples:
  sidelane launch --nodes 2 --ranks-per-node 4 -- ./train --steps 100
  sidelane launch --ranks-per-node 3,5 --tag-output -- python train.py
  # On the second of two machines; the first one has --node-rank 0.
  sidelane launch --ranks-per-node 4,4 --master node0 --node-rank 1 -- ./train";

/// Start ranks as processes of this machine, or of one machine of several
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LaunchArgs {
    /// Number of nodes [default: as many as --ranks-per-node lists, so one number is one node]
    #[arg(long, value_name = "N")]
    nodes: Option<u32>,

    /// Ranks of each node; a list gives nodes of different size
    #[arg(long, value_name = "M[,M..]", value_delimiter = ',', required = true)]
    ranks_per_node: Vec<u32>,

    /// Once a rank has failed: seconds until the others are killed
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    grace: Duration,

    /// Begin each line of a rank's output with its number
    #[arg(long)]
    tag_output: bool,

    #[command(flatten)]
    machines: MachineArgs,

    /// Program and arguments of each rank
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Command for LaunchArgs {
    const NAME: &'static str = "launch";

    /// Ends as the first failing rank did.
    fn run(self) -> Result<ExitCode, CliError> {
        Ok(self.job()?.run()?.into())
    }

    /// The process that ends ranks when their launcher is gone.
    fn rank(task: &str) -> Result<ExitCode, CliError> {
        guard::watch(task)
    }
}

impl LaunchArgs {
    pub fn job(self) -> Result<Job, CliError> {
        let nodes = node_sizes(self.nodes, &self.ranks_per_node)?;
        let (part, env) = (self.machines.part(&nodes)?, self.machines.variables());
        let (bind, grace, tag_output) = (self.machines.bind, self.grace, self.tag_output);
        let grace_option = " (--grace)";
        Ok(Job { nodes, part, command: self.command, env, bind, grace, grace_option, tag_output })
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    const DAY: f64 = 86_400.0;
    let seconds = text.parse().ok().filter(|s| (0.0..=DAY).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("a number of seconds between 0 and {DAY}"))
}

/// Where torchrun's rendezvous is by default, too.
const PORT: u16 = 29500;

/// Where ranks are started, and how those of different nodes reach each other.
#[derive(Args, Clone, Debug, Default)]
pub struct MachineArgs {
    /// Start only the ranks of this node of the job: run one command on each machine
    #[arg(long, value_name = "I", requires = "master", help_heading = "Machines")]
    pub node_rank: Option<u32>,

    /// Address of rank 0: the machine of node 0. The ranks take the first of the 16 ports after
    /// this one that is free there, or SIDELANE_PORT [default port: 29500]
    #[arg(long, value_name = "HOST[:PORT]", requires = "node_rank", help_heading = "Machines")]
    pub master: Option<Master>,

    /// The lane between nodes: sets SIDELANE_NET [default: from the environment]
    #[arg(long, value_enum, help_heading = "Machines")]
    pub net: Option<Net>,

    /// Processors of each rank
    #[arg(long, value_enum, default_value_t, help_heading = "Machines")]
    pub bind: Bind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Net {
    /// loopback on one machine; otherwise verbs if there are NICs, and tcp if not
    Auto,
    /// RDMA NICs
    Verbs,
    /// Sockets
    Tcp,
    /// Rings in memory: emulates nodes on one machine
    Loopback,
}

/// The node of a job that this machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub node: u32,
    pub master: Master,
}

/// A host, by name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    pub host: String,
    pub port: u16,
}

impl MachineArgs {
    /// The part of a job with nodes of these sizes that this machine runs; none if it runs the
    /// whole job.
    pub fn part(&self, nodes: &[u32]) -> Result<Option<Part>, CliError> {
        let (Some(node), Some(master)) = (self.node_rank, &self.master) else { return Ok(None) };
        let count = nodes.len();
        if node as usize >= count {
            return Err(usage!("--node-rank is {node}, but the job has {count} nodes, counted from 0"));
        }
        if node == 0 {
            master.on_this_machine()?;
        }
        Ok(Some(Part { node, master: master.clone() }))
    }

    /// Whether nodes are emulated: on one machine, over no lane of several machines.
    pub fn is_loopback(&self) -> bool {
        let named = self.variables().pop().map(|(_, net)| net);
        let net = named.or(std::env::var_os("SIDELANE_NET")).unwrap_or_default();
        self.node_rank.is_none() && net != "tcp" && net != "verbs"
    }

    pub fn variables(&self) -> Vec<(String, OsString)> {
        let net = self.net.and_then(|net| net.to_possible_value());
        net.map(|net| ("SIDELANE_NET".to_owned(), net.get_name().into())).into_iter().collect()
    }
}

impl Master {
    /// Whether rank 0 can be met here, if this machine starts it. Without this check two machines
    /// that both claim node 0 wait for each other. A name that does not resolve here passes.
    fn on_this_machine(&self) -> Result<(), CliError> {
        let found = (self.host.as_str(), 0).to_socket_addrs();
        let found: Vec<IpAddr> = found.into_iter().flatten().map(|address| address.ip()).collect();
        if found.is_empty() || found.iter().any(|&ip| UdpSocket::bind((ip, 0)).is_ok()) {
            return Ok(());
        }
        let ips: Vec<String> = found.iter().map(IpAddr::to_string).collect();
        Err(usage!(
            "--node-rank 0 starts rank 0 on this machine, but --master {} ({}) is no address of this machine: give each machine its own --node-rank, and behind an address translator give this one's own address here",
            self.host,
            ips.join(", ")
        ))
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
        let port = match port.map(str::parse) {
            None => PORT,
            Some(Ok(port @ 1..)) => port,
            Some(_) => return Err("HOST:PORT has a port from 1 to 65535"),
        };
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

pub fn node_sizes(nodes: Option<u32>, ranks_per_node: &[u32]) -> Result<Vec<u32>, CliError> {
    let sizes = match (nodes, ranks_per_node) {
        (Some(0), _) => return Err(usage!("--nodes must be at least 1")),
        (Some(nodes), [each]) => {
            within_rank_numbers(u64::from(nodes) * u64::from(*each))?;
            vec![*each; nodes as usize]
        }
        (Some(nodes), list) if nodes as usize != list.len() => {
            return Err(usage!("--ranks-per-node lists {} nodes, but --nodes is {nodes}", list.len()));
        }
        (_, list) => list.to_vec(),
    };
    if sizes.contains(&0) {
        return Err(usage!("--ranks-per-node must be at least 1"));
    }
    within_rank_numbers(sizes.iter().map(|&size| u64::from(size)).sum())?;
    Ok(sizes)
}

/// For each rank the number of its node.
pub fn node_labels(sizes: &[u32]) -> Vec<usize> {
    let sizes = sizes.iter().enumerate();
    sizes.flat_map(|(node, &ranks)| std::iter::repeat_n(node, ranks as usize)).collect()
}

/// "4 on one node", "8 on 2 nodes (3 + 5)".
pub fn shape_words(nodes: &[u32]) -> String {
    let sizes: Vec<String> = nodes.iter().map(u32::to_string).collect();
    match nodes {
        [ranks] => format!("{ranks} on one node"),
        _ => format!("{} on {} nodes ({})", nodes.iter().sum::<u32>(), nodes.len(), sizes.join(" + ")),
    }
}

fn within_rank_numbers(ranks: u64) -> Result<(), CliError> {
    const MAX: u32 = 1 << 16;
    if ranks > MAX.into() { Err(usage!("{ranks} ranks are too many: at most {MAX}")) } else { Ok(()) }
}

const LOOPBACK: &str = "127.0.0.1";

/// The part of the environment that all ranks share.
pub struct RendezvousVars(Vec<(&'static str, String)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub world: u32,
    pub node: u32,
    pub local: u32,
    local_world: u32,
}

impl RendezvousVars {
    /// All ranks on this machine. Draws a name and a secret, and finds two free ports.
    ///
    /// The ports are free now; the handshake of the ranks detects if another process took one
    /// meanwhile.
    pub fn here(lifeline: RawFd) -> Result<Self, CliError> {
        let (master_port, port) = free_ports().map_err(CliError::prepare("find a free port"))?;
        let job = format!("sidelane-{}", random_hex::<4>()?);
        let master = Master { host: LOOPBACK.to_owned(), port: master_port };
        let mut meeting = RendezvousVars::shared(&master, job, lifeline);
        meeting.0.push(("SIDELANE_PORT", port.to_string()));
        meeting.0.push(("SIDELANE_SECRET", random_hex::<32>()?));
        Ok(meeting)
    }

    /// Ranks on several machines, and those of this one. Values that all machines must share are
    /// given, or follow from the port; the secret is in the environment.
    ///
    /// # Errors
    /// Where the ranks would refuse to meet without one.
    pub fn at(master: &Master, here: &[Place], lifeline: RawFd) -> Result<Self, CliError> {
        let variable = |name: &str| std::env::var(name).ok();
        let named = variable("SIDELANE_JOB").filter(|name| !name.trim().is_empty());
        let job = named.unwrap_or_else(|| format!("sidelane-{}", master.port));
        let mut meeting = RendezvousVars::shared(master, job.clone(), lifeline);
        meeting.0.push(("SIDELANE_JOB", job));
        for &place in here {
            let own = meeting.variables(place);
            let lookup = |name: &str| {
                own.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone()).or(variable(name))
            };
            let identity = Identity::from_vars(&lookup).map_err(Error::from)?;
            let secret = Secret::from_vars(&lookup).map_err(Error::from)?;
            if secret.is_none() && !identity.is_local() && !identity.insecure {
                let ports = match identity.ports[..] {
                    [first, .., last] => format!("ports {first} to {last}"),
                    _ => format!("port {}", identity.ports.first().unwrap_or(&master.port)),
                };
                let host = &master.host;
                return Err(usage!(
                    "ranks of other machines join at {host}, {ports}: set the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on each machine (or SIDELANE_INSECURE=1 on a trusted network)"
                ));
            }
        }
        Ok(meeting)
    }

    fn shared(master: &Master, job: String, lifeline: RawFd) -> Self {
        RendezvousVars(vec![
            ("MASTER_ADDR", master.host.clone()),
            ("MASTER_PORT", master.port.to_string()),
            ("TORCHELASTIC_RUN_ID", job),
            ("SIDELANE_LAUNCHER_FD", lifeline.to_string()),
            ("SIDELANE_LAUNCHER_PID", std::process::id().to_string()),
        ])
    }

    pub fn variables(&self, place: Place) -> Vec<(&'static str, String)> {
        let own = [
            ("RANK", place.rank),
            ("WORLD_SIZE", place.world),
            ("LOCAL_RANK", place.local),
            ("LOCAL_WORLD_SIZE", place.local_world),
            ("GROUP_RANK", place.node),
            ("SIDELANE_NODE", place.node),
        ];
        own.map(|(name, number)| (name, number.to_string())).into_iter().chain(self.0.clone()).collect()
    }
}

pub fn places(nodes: &[u32]) -> Vec<Place> {
    let world = nodes.iter().sum();
    let slots =
        nodes.iter().zip(0..).flat_map(|(&size, node)| (0..size).map(move |local| (node, local, size)));
    slots
        .zip(0..)
        .map(|((node, local, local_world), rank)| Place { rank, world, node, local, local_world })
        .collect()
}

/// Two different ports: both are held until both are known.
fn free_ports() -> io::Result<(u16, u16)> {
    let (first, second) = (TcpListener::bind((LOOPBACK, 0))?, TcpListener::bind((LOOPBACK, 0))?);
    Ok((first.local_addr()?.port(), second.local_addr()?.port()))
}

fn random_hex<const N: usize>() -> Result<String, CliError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(|error| failed!("cannot draw random bytes: {error}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_is_read_in_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["", "-1", "NaN", "soon", "86401"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

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
        assert_eq!(MachineArgs::default().part(&[4]).unwrap(), None);
    }

    #[test]
    fn the_net_goes_to_the_ranks_only_if_it_was_named() {
        assert_eq!(MachineArgs::default().variables(), []);
        let args = MachineArgs { net: Some(Net::Loopback), ..MachineArgs::default() };
        assert_eq!(args.variables(), [("SIDELANE_NET".to_owned(), "loopback".into())]);
    }

    #[test]
    fn one_number_is_the_size_of_every_node() {
        assert_eq!(node_sizes(Some(3), &[2]).unwrap(), [2, 2, 2]);
        assert_eq!(node_sizes(None, &[8]).unwrap(), [8]);
    }

    #[test]
    fn a_list_gives_nodes_of_different_size() {
        assert_eq!(node_sizes(None, &[3, 5]).unwrap(), [3, 5]);
        assert_eq!(node_sizes(Some(2), &[3, 5]).unwrap(), [3, 5]);
    }

    #[test]
    fn ranks_are_numbered_node_by_node() {
        let places = places(&[2, 1]);
        let place = |rank, node, local, local_world| Place { rank, world: 3, node, local, local_world };
        assert_eq!(places, [place(0, 0, 0, 2), place(1, 0, 1, 2), place(2, 1, 0, 1)]);
    }

    #[test]
    fn every_job_has_a_secret_and_ports_of_its_own() {
        let [a, b] = [(); 2].map(|()| RendezvousVars::here(3).unwrap());
        let value = |meeting: &RendezvousVars, name| {
            meeting.0.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!(value(&a, "SIDELANE_SECRET").len(), 64);
        for name in ["SIDELANE_SECRET", "TORCHELASTIC_RUN_ID"] {
            assert_ne!(value(&a, name), value(&b, name));
        }
        assert_ne!(value(&a, "MASTER_PORT"), value(&a, "SIDELANE_PORT"));
    }
}
