//! Identity: this process as its launcher describes it.
//!
//! | launcher | recognized by | address | port |
//! |---|---|---|---|
//! | `sidelane launch` | SIDELANE_JOB with RANK | MASTER_ADDR | after MASTER_PORT |
//! | torchrun | RANK and WORLD_SIZE | MASTER_ADDR | after MASTER_PORT, which its own store occupies |
//! | Open MPI | OMPI_COMM_WORLD_RANK | MASTER_ADDR, or loopback if all ranks are local | from the job's name |
//! | SLURM | SLURM_PROCID | MASTER_ADDR, or the first host of SLURM's list | from the job's name |
//!
//! ```text
//!   variables --which launcher?--> rank, size, local rank and size, job, address
//!                                     |
//!     ports   SIDELANE_PORT alone, else the 16 after MASTER_PORT, else the 16 after 20000 + hash(job) mod 12000
//!                                     |
//!     checks  rank < size, local rank < local size --> Identity --> rendezvous
//! ```
//!
//! The order is that of the table: torchrun runs under srun and mpirun runs inside SLURM
//! allocations, and the inner launcher applies. SIDELANE_PORT and MASTER_PORT overrule a derived
//! port everywhere. SLURM writes lists of hosts: `node[03-05,09],x1` is node03, node04, node05,
//! node09, x1.

use std::net::{IpAddr, Ipv4Addr};

use sidelane_core::with_methods;

use crate::digest::Digest;
use crate::error::BootstrapError;

/// Launcher of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, or anything that sets RANK and WORLD_SIZE.
    Torchrun,
    /// srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
    /// `sidelane launch`.
    Sidelane,
}

/// The pipe whose end signals that the launcher is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LauncherPipe {
    /// Number of the inherited read end.
    pub fd: u32,
    /// The launcher.
    pub pid: u32,
}

/// Identity of this process among the ranks of its job, and their meeting point.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Number of this rank on its machine, where known.
    pub local_rank: Option<u32>,
    /// Number of ranks on this machine, where known.
    pub local_size: Option<u32>,
    /// Name of the job: jobs with different names never join each other.
    pub job: String,
    /// Source of these values.
    #[doc(hidden)]
    pub source: Launcher,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// Ports to try, in order.
    pub ports: Vec<u16>,
    /// The launcher's pipe, if it made one.
    #[doc(hidden)]
    pub launcher_pipe: Option<LauncherPipe>,
    /// Whether to do without a secret beyond loopback (`SIDELANE_INSECURE=1`).
    pub insecure: bool,
}

impl Identity {
    /// A rank of a job that is known otherwise than from a launcher's variables. It needs at least
    /// [`with_master_addr`](Self::with_master_addr) and [`with_ports`](Self::with_ports).
    pub const fn new(rank: u32, size: u32) -> Self {
        Identity {
            rank,
            size,
            local_rank: None,
            local_size: None,
            job: String::new(),
            source: Launcher::Sidelane,
            master_addr: String::new(),
            ports: Vec::new(),
            launcher_pipe: None,
            insecure: false,
        }
    }

    with_methods! {
        with_rank(rank: u32),
        with_size(size: u32),
        with_local_rank(local_rank: Option<u32>),
        with_local_size(local_size: Option<u32>),
        with_job(job: String),
        with_master_addr(master_addr: String),
        with_ports(ports: Vec<u16>),
        with_insecure(insecure: bool),
    }

    /// Reads the launcher's variables through `lookup`.
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, BootstrapError> {
        let vars = Vars(lookup);
        let named = if vars.has("RANK") || vars.has("WORLD_SIZE") {
            vars.torchrun()?
        } else if vars.has("OMPI_COMM_WORLD_RANK") {
            vars.open_mpi()?
        } else if vars.has("SLURM_PROCID") {
            vars.slurm()?
        } else {
            return Err(BootstrapError::NoEnvironment);
        };
        let fd = vars.number("SIDELANE_LAUNCHER_FD", 0, "a descriptor's number")?;
        let pid = vars.number("SIDELANE_LAUNCHER_PID", 0, "a process id")?.unwrap_or(0);
        let ports = vars.ports(&named.job)?;
        let identity = Identity {
            ports,
            launcher_pipe: fd.map(|fd| LauncherPipe { fd, pid }),
            insecure: vars.switch("SIDELANE_INSECURE")?,
            ..named
        };
        identity.checked()
    }

    /// [`Identity::from_vars`] with the environment of this process.
    pub fn from_env() -> Result<Self, BootstrapError> {
        Identity::from_vars(&|name| std::env::var(name).ok())
    }

    /// Whether all ranks meet through this machine's loopback interface: all of them run here, or
    /// the address is a loopback address.
    pub fn is_local(&self) -> bool {
        self.local_size == Some(self.size) || self.literal_loopback().is_some()
    }

    /// The loopback address at which a local job meets.
    pub(super) fn loopback(&self) -> IpAddr {
        self.literal_loopback().unwrap_or(Ipv4Addr::LOCALHOST.into())
    }

    /// A name that merely resolves to a loopback address does not count: hosts often map their own
    /// name to one, and the other machines then resolve it to something else.
    fn literal_loopback(&self) -> Option<IpAddr> {
        if self.master_addr == "localhost" {
            return Some(Ipv4Addr::LOCALHOST.into());
        }
        self.master_addr.parse().ok().filter(IpAddr::is_loopback)
    }

    fn checked(self) -> Result<Self, BootstrapError> {
        let names = match self.source {
            Launcher::Torchrun | Launcher::Sidelane => ["RANK", "LOCAL_RANK"],
            Launcher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"],
            Launcher::Slurm => ["SLURM_PROCID", "SLURM_LOCALID"],
        };
        let local = self.local_rank.zip(self.local_size);
        let pairs = [Some((self.rank, self.size)), local];
        for (name, pair) in names.into_iter().zip(pairs) {
            if let Some((rank, _)) = pair.filter(|(rank, size)| rank >= size) {
                let (value, expected) = (rank.to_string(), "a number below the number of ranks");
                return Err(BootstrapError::BadVariable { name, value, expected });
            }
        }
        Ok(self)
    }
}

/// Ports that are tried one after the other.
const CANDIDATES: u16 = 16;

/// Typed access to variables.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// A variable that is set to nothing is not set.
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number(
        &self,
        name: &'static str,
        least: u32,
        expected: &'static str,
    ) -> Result<Option<u32>, BootstrapError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.parse() {
            Ok(number) if number >= least => Ok(Some(number)),
            _ => Err(BootstrapError::BadVariable { name, value, expected }),
        }
    }

    /// Off unless it is set.
    fn switch(&self, name: &'static str) -> Result<bool, BootstrapError> {
        match self.text(name).as_deref() {
            None | Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(value) => {
                Err(BootstrapError::BadVariable { name, value: value.to_owned(), expected: "0 or 1" })
            }
        }
    }

    fn rank(&self, name: &'static str) -> Result<u32, BootstrapError> {
        let hint = "the number of this process in the job";
        self.number(name, 0, hint)?.ok_or(BootstrapError::MissingVariable { name, hint })
    }

    fn size(&self, name: &'static str) -> Result<Option<u32>, BootstrapError> {
        self.number(name, 1, "a number of processes, at least 1")
    }

    fn needed_size(&self, name: &'static str) -> Result<u32, BootstrapError> {
        let hint = "the number of processes in the job";
        self.size(name)?.ok_or(BootstrapError::MissingVariable { name, hint })
    }

    fn address(&self, hint: &'static str) -> Result<String, BootstrapError> {
        self.text("MASTER_ADDR").ok_or(BootstrapError::MissingVariable { name: "MASTER_ADDR", hint })
    }

    fn torchrun(&self) -> Result<Identity, BootstrapError> {
        let launched = self.text("SIDELANE_JOB");
        let master_addr = self.address("the address of rank 0")?;
        // The run id is often "none": address and port distinguish such runs.
        let (run, port) = (self.text("TORCHELASTIC_RUN_ID"), self.text("MASTER_PORT"));
        let run = format!("{}@{master_addr}:{}", run.unwrap_or_default(), port.unwrap_or_default());
        Ok(Identity {
            rank: self.rank("RANK")?,
            size: self.needed_size("WORLD_SIZE")?,
            local_rank: self.number("LOCAL_RANK", 0, "a rank")?,
            local_size: self.size("LOCAL_WORLD_SIZE")?,
            source: if launched.is_some() { Launcher::Sidelane } else { Launcher::Torchrun },
            job: launched.unwrap_or(run),
            master_addr,
            ..Identity::new(0, 1)
        })
    }

    fn open_mpi(&self) -> Result<Identity, BootstrapError> {
        let size = self.needed_size("OMPI_COMM_WORLD_SIZE")?;
        let local_size = self.size("OMPI_COMM_WORLD_LOCAL_SIZE")?;
        let master_addr = if local_size == Some(size) && !self.has("MASTER_ADDR") {
            Ipv4Addr::LOCALHOST.to_string()
        } else {
            self.address("the address of rank 0: Open MPI does not say it (mpirun -x MASTER_ADDR=...)")?
        };
        let job = self.text("PMIX_NAMESPACE").or_else(|| self.text("OMPI_MCA_ess_base_jobid"));
        Ok(Identity {
            rank: self.rank("OMPI_COMM_WORLD_RANK")?,
            size,
            local_rank: self.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, "a rank")?,
            local_size,
            job: self.text("SIDELANE_JOB").or(job).unwrap_or_else(|| "ompi".to_owned()),
            source: Launcher::OpenMpi,
            master_addr,
            ..Identity::new(0, 1)
        })
    }

    fn slurm(&self) -> Result<Identity, BootstrapError> {
        // The variables of the step are right where the allocation is larger than the step.
        let size = match self.size("SLURM_STEP_NUM_TASKS")? {
            Some(size) => size,
            None => self.needed_size("SLURM_NTASKS")?,
        };
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].into_iter().find_map(|name| self.text(name));
        let list = ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"];
        let list = list.into_iter().find_map(|name| self.text(name));
        let master_addr = match (self.text("MASTER_ADDR"), list) {
            (Some(address), _) => address,
            (None, Some(list)) => first_host(&list).ok_or(BootstrapError::BadVariable {
                name: "SLURM_NODELIST",
                value: list,
                expected: "a list of hosts like node[03-05,09],x1",
            })?,
            (None, None) => self.address("the address of rank 0, since SLURM_NODELIST is missing too")?,
        };
        let id = |name| self.text(name).unwrap_or_default();
        let step = format!("slurm-{}.{}", id("SLURM_JOB_ID"), id("SLURM_STEP_ID"));
        Ok(Identity {
            rank: self.rank("SLURM_PROCID")?,
            size,
            local_rank: self.number("SLURM_LOCALID", 0, "a rank")?,
            local_size: (nodes.as_deref() == Some("1")).then_some(size),
            job: self.text("SIDELANE_JOB").unwrap_or(step),
            source: Launcher::Slurm,
            master_addr,
            ..Identity::new(0, 1)
        })
    }

    fn port(&self, name: &'static str) -> Result<Option<u16>, BootstrapError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.parse() {
            Ok(port @ 1..) => Ok(Some(port)),
            _ => Err(BootstrapError::BadVariable { name, value, expected: "a port, 1 to 65535" }),
        }
    }

    fn ports(&self, job: &str) -> Result<Vec<u16>, BootstrapError> {
        if let Some(port) = self.port("SIDELANE_PORT")? {
            return Ok(vec![port]);
        }
        let before = match self.port("MASTER_PORT")? {
            Some(port) => port,
            // Below the range from which Linux takes ports for outgoing connections.
            None => 20_000 + (Digest::of(job.bytes()) % 12_000) as u16,
        };
        // At the upper end of the range the candidates begin again below it.
        let first = if before > u16::MAX - CANDIDATES { before - 2 * CANDIDATES } else { before + 1 };
        Ok((first..=first + (CANDIDATES - 1)).collect())
    }
}

/// The first host of a list. None if the list is empty or its brackets are broken.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let mut host = String::new();
    let mut rest = list;
    loop {
        match rest.find(['[', ']', ',']) {
            None => host.push_str(rest),
            Some(at) => {
                host.push_str(&rest[..at]);
                match rest.as_bytes()[at] {
                    b'[' => {
                        let (inside, after) = rest[at + 1..].split_once(']')?;
                        let range = inside.split(',').next()?;
                        let first = range.split('-').next()?;
                        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                            return None;
                        }
                        host.push_str(first);
                        rest = after;
                        continue;
                    }
                    b',' => {}
                    _ => return None,
                }
            }
        }
        return (!host.is_empty()).then_some(host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Identity, BootstrapError> {
        Identity::from_vars(&|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "head"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ];
    const SLURM: &[(&str, &str)] = &[
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "6"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODELIST", "node[03-05,09],x1"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
    ];
    const OMPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-1"),
    ];

    #[test]
    fn torchrun_is_met_after_its_own_port() {
        let identity = read(TORCHRUN).unwrap();
        assert_eq!((identity.rank, identity.size), (3, 8));
        assert_eq!((identity.local_rank, identity.local_size), (Some(1), Some(2)));
        assert_eq!((identity.source, identity.job.as_str()), (Launcher::Torchrun, "none@head:29500"));
        assert_eq!(identity.ports, (29501..29517).collect::<Vec<_>>());
        assert_eq!((identity.insecure, identity.launcher_pipe), (false, None));
        assert!(!identity.is_local());
    }

    #[test]
    fn slurm_is_met_at_its_first_host_at_a_port_of_the_job() {
        let identity = read(SLURM).unwrap();
        assert_eq!(
            (identity.rank, identity.size, identity.local_rank, identity.local_size),
            (5, 6, Some(1), None)
        );
        assert_eq!((identity.source, identity.job.as_str()), (Launcher::Slurm, "slurm-77.0"));
        assert_eq!(identity.master_addr, "node03");
        assert_eq!(identity.ports.len(), 16);
        assert!(identity.ports.iter().all(|port| (20_001..32_100).contains(port)), "{:?}", identity.ports);
        assert_eq!(identity, read(SLURM).unwrap(), "the same on every rank");
        let other = read(&[SLURM, &[("SIDELANE_JOB", "mine")]].concat()).unwrap();
        assert_ne!(other.ports, identity.ports);
    }

    #[test]
    fn slurm_step_variables_override_those_of_allocation() {
        let step = [
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_NODELIST", "x9"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_PROCID", "1"),
        ];
        let identity = read(&[&step, SLURM].concat()).unwrap();
        assert_eq!((identity.size, identity.local_size, identity.master_addr.as_str()), (2, Some(2), "x9"));
        assert!(identity.is_local());
    }

    #[test]
    fn open_mpi_meets_on_loopback_or_wants_an_address() {
        let identity = read(OMPI).unwrap();
        assert_eq!((identity.source, identity.job.as_str()), (Launcher::OpenMpi, "prterun-1"));
        assert_eq!(identity.master_addr, "127.0.0.1");
        assert!(identity.is_local());
        let wide = [&[("OMPI_COMM_WORLD_SIZE", "4")], OMPI].concat();
        assert!(matches!(read(&wide), Err(BootstrapError::MissingVariable { name: "MASTER_ADDR", .. })));
        let told = read(&[&wide[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "4000")]].concat()).unwrap();
        assert_eq!((told.master_addr.as_str(), told.ports[0]), ("head", 4001));
    }

    #[test]
    fn the_inner_launcher_is_right() {
        assert_eq!(read(&[TORCHRUN, SLURM].concat()).unwrap().source, Launcher::Torchrun);
        assert_eq!(read(&[OMPI, SLURM].concat()).unwrap().source, Launcher::OpenMpi);
        let ours = [TORCHRUN, SLURM, &[("SIDELANE_JOB", "j1"), ("SIDELANE_PORT", "7000")]].concat();
        let ours = read(&ours).unwrap();
        assert_eq!((ours.source, ours.job.as_str(), ours.ports), (Launcher::Sidelane, "j1", vec![7000]));
    }

    #[test]
    fn unusable_variable_is_named() {
        let bad = |change: (&'static str, &'static str)| read(&[&[change], TORCHRUN].concat());
        assert_eq!(read(&[]), Err(BootstrapError::NoEnvironment));
        for (name, value) in [
            ("RANK", "8"),
            ("RANK", "-1"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "many"),
            ("LOCAL_RANK", "2"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("SIDELANE_PORT", "x"),
            ("SIDELANE_LAUNCHER_FD", "-3"),
        ] {
            let seen = bad((name, value));
            assert!(
                matches!(&seen, Err(BootstrapError::BadVariable { name: n, value: v, .. }) if *n == name && v == value),
                "{name}={value}: {seen:?}"
            );
        }
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR"] {
            let seen = bad((name, ""));
            assert!(
                matches!(&seen, Err(BootstrapError::MissingVariable { name: n, .. }) if *n == name),
                "{name}: {seen:?}"
            );
        }
        let list = read(&[&[("SLURM_NODELIST", "node[")], SLURM].concat());
        assert!(matches!(list, Err(BootstrapError::BadVariable { name: "SLURM_NODELIST", .. })));
    }

    #[test]
    fn ports_stay_in_range_at_its_upper_end() {
        for port in ["65535", "65520", "65519", "65518"] {
            let identity = read(&[&[("MASTER_PORT", port)], TORCHRUN].concat()).unwrap();
            assert_eq!(identity.ports.len(), 16);
            assert!(!identity.ports.contains(&port.parse().unwrap()), "{port}: {:?}", identity.ports);
        }
    }

    #[test]
    fn the_launchers_pipe_and_recklessness_are_read() {
        let vars: &[_] =
            &[("SIDELANE_LAUNCHER_FD", "9"), ("SIDELANE_LAUNCHER_PID", "123"), ("SIDELANE_INSECURE", "1")];
        let identity = read(&[vars, TORCHRUN].concat()).unwrap();
        assert_eq!(
            (identity.launcher_pipe, identity.insecure),
            (Some(LauncherPipe { fd: 9, pid: 123 }), true)
        );
    }

    #[test]
    fn a_world_without_secret_is_asked_for_by_1_and_by_no_other_word() {
        let with = |value| read(&[&[("SIDELANE_INSECURE", value)], TORCHRUN].concat());
        for (value, insecure) in [("1", true), (" 1 ", true), ("0", false), ("", false)] {
            assert_eq!(with(value).unwrap().insecure, insecure, "{value:?}");
        }
        for value in ["yes", "true", "2"] {
            let (name, expected) = ("SIDELANE_INSECURE", "0 or 1");
            let refused = BootstrapError::BadVariable { name, value: value.to_owned(), expected };
            assert_eq!(with(value), Err(refused));
        }
    }

    #[test]
    fn the_first_host_comes_out_of_brackets() {
        for (list, first) in [
            ("node[03-05,09],x1", "node03"),
            ("x1,node[03-05,09]", "x1"),
            ("x1", "x1"),
            ("gpu-a[7]", "gpu-a7"),
            ("rack[1-2]n[001-004].cluster", "rack1n001.cluster"),
            (" head.example.org ", "head.example.org"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in ["", ",a", "node[", "node[]", "node[a-b]", "node]1"] {
            assert_eq!(first_host(broken), None, "{broken:?}");
        }
    }
}
