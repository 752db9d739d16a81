//! Who this process is, as its launcher says.
//!
//! | launcher | recognised by | address | port |
//! |---|---|---|---|
//! | `sidelane launch` | SIDELANE_JOB with RANK | MASTER_ADDR | after MASTER_PORT |
//! | torchrun | RANK and WORLD_SIZE | MASTER_ADDR | after MASTER_PORT, which its own store occupies |
//! | Open MPI | OMPI_COMM_WORLD_RANK | MASTER_ADDR, or loopback if all ranks are local | from the job's name |
//! | SLURM | SLURM_PROCID | MASTER_ADDR, or the first host | from the job's name |
//!
//! The order is that of the table: torchrun runs under srun and mpirun runs inside SLURM allocations, and the inner
//! launcher is right. SIDELANE_PORT and MASTER_PORT overrule a derived port everywhere.

mod secret;
mod slurm;

use std::net::{IpAddr, Ipv4Addr};

pub use secret::Secret;
pub(super) use secret::random;

use crate::error::BootstrapError;
use slurm::first_host;

/// Ports that are tried one after the other.
const CANDIDATES: u16 = 16;

/// Who started this process.
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

/// The pipe whose end says that the launcher is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LauncherPipe {
    /// Number of the inherited read end.
    pub fd: u32,
    /// The launcher.
    pub pid: u32,
}

/// Who this process is among the ranks of its job, and where they meet.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Who says all this.
    pub source: Launcher,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// Ports to try, in order.
    pub ports: Vec<u16>,
    /// The launcher's pipe, if it made one.
    pub launcher_pipe: Option<LauncherPipe>,
    /// Whether to do without a secret beyond loopback (`SIDELANE_INSECURE=1`).
    pub insecure: bool,
}

impl Identity {
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
            insecure: vars.text("SIDELANE_INSECURE").as_deref() == Some("1"),
            ..named
        };
        identity.checked()
    }

    /// [`Identity::from_vars`] with the environment of this process.
    pub fn from_env() -> Result<Self, BootstrapError> {
        Identity::from_vars(&|name| std::env::var(name).ok())
    }

    /// Whether all ranks meet through this machine's loopback interface: all of them run here, or the address is
    /// a loopback address.
    pub fn is_local(&self) -> bool {
        self.local_size == Some(self.size) || self.literal_loopback().is_some()
    }

    /// The loopback address at which a local job meets.
    pub(super) fn loopback(&self) -> IpAddr {
        self.literal_loopback().unwrap_or(Ipv4Addr::LOCALHOST.into())
    }

    /// A name that merely resolves to a loopback address does not count: hosts like to give their own name one,
    /// and the other machines then resolve it to something else.
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
        // The run id is often "none": address and port tell such runs apart.
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
            ..Identity::blank()
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
            ..Identity::blank()
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
            ..Identity::blank()
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
            None => 20_000 + (fnv1a(job) % 12_000) as u16,
        };
        // At the upper end of the range the candidates begin again below it.
        let first = if before > u16::MAX - CANDIDATES { before - 2 * CANDIDATES } else { before + 1 };
        Ok((first..=first + (CANDIDATES - 1)).collect())
    }
}

impl Identity {
    /// What the launchers have in common, before it is filled in.
    fn blank() -> Self {
        Identity {
            rank: 0,
            size: 1,
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
}

/// A hash that is the same in every build.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
