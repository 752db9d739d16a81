//! The command line of `launch`, read into a job.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use super::{Job, MachineArgs, node_sizes};
use crate::error::CliError;

const EXAMPLES: &str = "\
Every rank sees torchrun's variables:
  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
and Sidelane's own:
  SIDELANE_NODE          node of this rank: splits one machine into load domains
  SIDELANE_PORT          where the ranks meet
  SIDELANE_SECRET        proves membership, drawn anew for each job
  SIDELANE_JOB           name of a job across machines
  SIDELANE_RAIL          what --rail says
  SIDELANE_LAUNCHER_FD   read end of a pipe that ends when the launcher does
  SIDELANE_LAUNCHER_PID  process id of the launcher

Across machines (--node-rank, --master) SIDELANE_PORT and SIDELANE_JOB are yours to set, and the secret has to be:
the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on each machine, or SIDELANE_INSECURE=1 on a trusted network.

Examples:
  sidelane launch --nodes 2 --ranks-per-node 4 -- ./train --steps 100
  sidelane launch --ranks-per-node 3,5 --tag -- python train.py
  sidelane launch --nodes 2 --ranks-per-node 4 --master node0 --node-rank 1 -- ./train    # the other machine: 0";

/// Start ranks as processes of this machine, or of one machine of several
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LaunchArgs {
    /// Number of nodes [default: 1, or as many as --ranks-per-node lists]
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
    tag: bool,

    #[command(flatten)]
    machines: MachineArgs,

    /// What each rank runs
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    /// The job that this command line describes.
    pub fn job(self) -> Result<Job, CliError> {
        let nodes = node_sizes(self.nodes, &self.ranks_per_node)?;
        let (part, env) = (self.machines.part(&nodes)?, self.machines.variables());
        let (bind, grace, tag) = (self.machines.bind, self.grace, self.tag);
        Ok(Job { nodes, part, command: self.command, env, bind, grace, tag })
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    const DAY: f64 = 86_400.0;
    let seconds = text.parse().ok().filter(|s| (0.0..=DAY).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("a number of seconds between 0 and {DAY}"))
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
}
