//! Variables of the launchers: their meanings, and the format of their values.

use std::net::Ipv4Addr;

use super::{Identity, Launcher, slurm::first_host};
use crate::error::BootstrapError;

/// Ports that are tried one after the other.
const CANDIDATES: u16 = 16;

/// Typed access to variables.
pub(super) struct Vars<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// A variable that is set to nothing is not set.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub(super) fn number(
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

    pub(super) fn torchrun(&self) -> Result<Identity, BootstrapError> {
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
            ..Identity::blank()
        })
    }

    pub(super) fn open_mpi(&self) -> Result<Identity, BootstrapError> {
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

    pub(super) fn slurm(&self) -> Result<Identity, BootstrapError> {
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

    pub(super) fn ports(&self, job: &str) -> Result<Vec<u16>, BootstrapError> {
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

/// A hash that is the same in every build.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
