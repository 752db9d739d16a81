//! The command line of `launch`, and the shape of a job.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use super::Job;
use crate::error::CliError;

const EXAMPLES: &str = "\
Every rank sees torchrun's variables:
  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
and Sidelane's own:
  SIDELANE_NODE          node of this rank: splits one machine into load domains
  SIDELANE_PORT          where the ranks meet
  SIDELANE_SECRET        proves membership, drawn anew for each job
  SIDELANE_LAUNCHER_FD   read end of a pipe that ends when the launcher does
  SIDELANE_LAUNCHER_PID  process id of the launcher

Examples:
  sidelane launch --nodes 2 --ranks-per-node 4 -- ./train --steps 100
  sidelane launch --ranks-per-node 3,5 --tag -- python train.py";

/// Start ranks as processes of this machine
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

    /// What each rank runs
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    /// The job that this command line describes.
    pub fn job(self) -> Result<Job, CliError> {
        let nodes = node_sizes(self.nodes, &self.ranks_per_node)?;
        Ok(Job { nodes, command: self.command, env: Vec::new(), grace: self.grace, tag: self.tag })
    }
}

/// Number of ranks of each node.
pub fn node_sizes(nodes: Option<u32>, ranks_per_node: &[u32]) -> Result<Vec<u32>, CliError> {
    let sizes = match (nodes, ranks_per_node) {
        (Some(0), _) => return Err(CliError::Zero { option: "--nodes" }),
        (Some(nodes), [each]) => {
            within_rank_numbers(u64::from(nodes) * u64::from(*each))?;
            vec![*each; nodes as usize]
        }
        (Some(nodes), list) if nodes as usize != list.len() => {
            return Err(CliError::NodesDiffer { listed: list.len(), nodes });
        }
        (_, list) => list.to_vec(),
    };
    if sizes.contains(&0) {
        return Err(CliError::Zero { option: "--ranks-per-node" });
    }
    within_rank_numbers(sizes.iter().map(|&size| u64::from(size)).sum())?;
    Ok(sizes)
}

fn within_rank_numbers(ranks: u64) -> Result<(), CliError> {
    const MAX: u32 = 1 << 16;
    if ranks > MAX.into() { Err(CliError::TooManyRanks { ranks, max: MAX }) } else { Ok(()) }
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
    fn one_number_is_the_size_of_every_node() {
        assert_eq!(node_sizes(Some(3), &[2]).unwrap(), [2, 2, 2]);
        assert_eq!(node_sizes(None, &[8]).unwrap(), [8]);
    }

    #[test]
    fn a_list_gives_nodes_of_different_size() {
        assert_eq!(node_sizes(None, &[3, 5]).unwrap(), [3, 5]);
        assert_eq!(node_sizes(Some(2), &[3, 5]).unwrap(), [3, 5]);
        let error = node_sizes(Some(3), &[3, 5]).unwrap_err();
        assert!(matches!(error, CliError::NodesDiffer { listed: 2, nodes: 3 }), "{error}");
    }

    #[test]
    fn empty_nodes_and_absurd_worlds_are_refused() {
        assert!(matches!(node_sizes(Some(0), &[4]), Err(CliError::Zero { option: "--nodes" })));
        assert!(matches!(node_sizes(None, &[4, 0]), Err(CliError::Zero { option: "--ranks-per-node" })));
        for (nodes, list) in [(Some(u32::MAX), vec![u32::MAX]), (None, vec![u32::MAX; 2])] {
            assert!(matches!(node_sizes(nodes, &list), Err(CliError::TooManyRanks { .. })));
        }
    }

    #[test]
    fn grace_is_read_in_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["", "-1", "NaN", "soon", "86401"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
