//! Identity: this process as its launcher describes it, and its secret.
//!
//! ```text
//!   env      the launchers' variables, read and checked
//!   slurm    the lists of hosts that SLURM writes
//!   secret   what a rank proves to know
//! ```
//!
//! | launcher | recognised by | address | port |
//! |---|---|---|---|
//! | `sidelane launch` | SIDELANE_JOB with RANK | MASTER_ADDR | after MASTER_PORT |
//! | torchrun | RANK and WORLD_SIZE | MASTER_ADDR | after MASTER_PORT, which its own store occupies |
//! | Open MPI | OMPI_COMM_WORLD_RANK | MASTER_ADDR, or loopback if all ranks are local | from the job's name |
//! | SLURM | SLURM_PROCID | MASTER_ADDR, or the first host | from the job's name |
//!
//! The order is that of the table: torchrun runs under srun and mpirun runs inside SLURM
//! allocations, and the inner launcher applies. SIDELANE_PORT and MASTER_PORT overrule a derived
//! port everywhere.

mod env;
mod secret;
mod slurm;

use std::net::{IpAddr, Ipv4Addr};

pub use secret::Secret;
pub(super) use secret::random;

use crate::error::BootstrapError;
use env::Vars;

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

impl Identity {
    /// Common values of all launchers, before any is filled in.
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

#[cfg(test)]
mod tests;
