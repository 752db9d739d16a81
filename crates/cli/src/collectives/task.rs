//! What the ranks of a measurement do, resolved.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::args::CollectivesArgs;
use super::operation::Operation;
use crate::error::{CliError, usage};
use crate::options::at_least_one;
use crate::ranks;

/// Runs that others can be told apart.
pub const MOST_BESIDE: usize = 128;

/// Everything a rank needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub ranks_per_node: Vec<u32>,
    pub runs: Vec<Run>,
    /// The folder by which others are told what to do.
    pub peers: Option<PathBuf>,
    pub json: Option<PathBuf>,
}

/// One operation and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub operation: Operation,
    pub bytes: u64,
    pub rounds: u32,
}

impl Task {
    /// From the command line.
    pub fn resolve(args: &CollectivesArgs) -> Result<Self, CliError> {
        let ranks_per_node = args.nodes.sizes()?;
        let ranks: u32 = ranks_per_node.iter().sum();
        let sizes = args.sizes.as_ref().map_or(vec![4 << 10, 16 << 20], |sizes| sizes.0.clone());
        if let Some(&bytes) = sizes.iter().find(|&&bytes| !bytes.is_multiple_of(16 * u64::from(ranks))) {
            return Err(usage!(
                "--sizes: {bytes} bytes do not make equal parts of whole 16 bytes for {ranks} ranks"
            ));
        }
        at_least_one(&[("--rounds", args.rounds.unwrap_or(1))])?;
        let operations = if args.operations.is_empty() { &Operation::ALL[..] } else { &args.operations };
        let rounds = |bytes: u64| args.rounds.unwrap_or((64 << 20 >> bytes.ilog2()).clamp(15, 200));
        let runs = sizes.iter().flat_map(|&bytes| {
            operations.iter().map(move |&operation| Run { operation, bytes, rounds: rounds(bytes) })
        });
        let runs: Vec<Run> = runs.collect();
        if args.peers && runs.len() > MOST_BESIDE {
            return Err(usage!(
                "--peers: {runs} operations and sizes are more than the {most} that others can be told",
                runs = runs.len(),
                most = MOST_BESIDE
            ));
        }
        Ok(Task { runs, peers: None, json: args.json.clone(), ranks_per_node })
    }

    /// What all ranks must have in common. Only rank 0 writes files.
    pub fn conditions(&self) -> String {
        let conditions = json!({ "ranks_per_node": self.ranks_per_node, "runs": self.runs });
        ranks::conditions("collectives", &conditions)
    }

    /// Room for what is gathered or given to be summed, twice, for the windows, and for what lands in one and in that of the run before.
    pub fn sizes(&self) -> ranks::Sizes {
        let most = self.runs.iter().map(|run| run.bytes).max().unwrap_or(0);
        let symmetric = ((32 << 20) + 2 * most).next_multiple_of(2 << 20);
        ranks::Sizes { heap: (symmetric + 3 * most + (16 << 20)).next_multiple_of(2 << 20), symmetric }
    }
}
