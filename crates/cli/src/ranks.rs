//! This program as the ranks of a job: what `bench`, `trace`, `perf`, `layer` and `collectives` have in common.
//!
//! ```text
//!   command --> task (JSON) --launch--> the same program, once per rank, as a hidden subcommand --> join the others
//! ```

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sidelane::{Error, Options, World};

use crate::conditions;
use crate::error::{CliError, usage};
use crate::launch::{Job, MachineArgs};

/// Runs this program once per rank of this machine, as the given subcommand with the given task, until the last one has
/// ended.
pub fn start(
    subcommand: &str,
    ranks_per_node: &[u32],
    machines: &MachineArgs,
    task: &impl Serialize,
) -> Result<ExitCode, CliError> {
    start_with(subcommand, ranks_per_node, machines, task, Vec::new())
}

/// The same, with more variables in their environment.
pub fn start_with(
    subcommand: &str,
    ranks_per_node: &[u32],
    machines: &MachineArgs,
    task: &impl Serialize,
    variables: Vec<(String, OsString)>,
) -> Result<ExitCode, CliError> {
    let program = std::env::current_exe().map_err(CliError::prepare("find this program"))?;
    let json = serde_json::to_string(task).expect("numbers, names and paths are always JSON");
    let job = Job {
        nodes: ranks_per_node.to_vec(),
        part: machines.part(ranks_per_node)?,
        command: vec![program.into(), subcommand.into(), json.into()],
        env: [machines.variables(), variables].concat(),
        bind: machines.bind,
        grace: Duration::from_secs(5),
        tag: false,
    };
    Ok(ExitCode::from(job.run()?.exit_code()))
}

/// One rank of a job that this program started.
#[derive(Args)]
pub struct RankArgs {
    /// What to do, as JSON
    task: String,
}

impl RankArgs {
    /// What to do.
    pub fn task<T: DeserializeOwned>(&self) -> Result<T, CliError> {
        serde_json::from_str(&self.task)
            .map_err(|source| usage!("the task of a rank is not what `sidelane` writes: {source}"))
    }
}

/// What a rank's complaint begins with, as the lines of `launch --tag` do: all ranks share one screen.
pub fn tag() -> String {
    std::env::var("RANK").map(|rank| format!("[{rank}] ")).unwrap_or_default()
}

/// Bytes of each rank's heap, and of its symmetric part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    pub heap: u64,
    pub symmetric: u64,
}

/// Joins the ranks that were started under the same conditions, with a heap of at least these sizes. A recorder keeps
/// `record` operations, none if that is 0.
pub fn join(sizes: Sizes, conditions: String, record: usize) -> Result<World, CliError> {
    let mut options = Options::from_env().map_err(Error::from)?;
    options.config.heap = options.config.heap.max(sizes.heap);
    options.config.symmetric = options.config.symmetric.max(sizes.symmetric);
    (options.record, options.conditions, options.forecast) = (record, conditions, true);
    World::from_env_with(options).map_err(conditions::explain)
}
