//! `sidelane bench`: dispatch and combine between real processes, checked bit by bit and compared
//! with a floor.
//!
//! A figure means nothing without its conditions, so all conditions are resolved once
//! ([`run_settings::RunSettings`]), handed to every rank, and printed with the result
//! ([`report::Report`]). The floor is measured round by round in turn with the real calls, so that
//! both see the same state of the machine ([`stats`](sidelane_testkit::timing::stats)).
//!
//! ```text
//!   bench --> Task --launch--> rank 0 .. n-1:  dispatch, check | combine, check | rounds: real, floor, real, ... | check | chains, check
//!                                  |
//!                                rank 0: table, JSON, trace
//! ```
//!
//! The ranks of `sidelane trace` are started in the same way and make the same calls, on the same
//! [`Layer`].

mod call_baselines;
mod chain;
mod checked_layer;
mod collectivex;
mod rank;
mod report;
mod run_settings;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::baselines::Folder;
use crate::command_frame::Command;
use crate::commands::launch::MachineArgs;
use crate::error::CliError;
use crate::options::JsonFile;
use crate::ranks::{self, Assignment, Files, Sizes};

pub use checked_layer::{CALLS, EVENTS, Layer, Verdict, record, share, write_trace};
pub use run_settings::{ConditionArgs, RunSettings};

#[cfg(test)]
pub use report::tests::sample;

const EXAMPLES: &str = "\
Examples:
  sidelane bench                                # two emulated nodes of 4 ranks
  sidelane bench --ranks-per-node 8 --baselines # one node; Open MPI, gloo, too
  sidelane bench --layout rank-major --dtype fp8 --backward
  sidelane bench --rounds 20 --chained          # pairs back to back";

/// Time dispatch and combine between processes of one machine or several, verified and compared
/// with a floor
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    #[command(flatten)]
    pub conditions: ConditionArgs,

    /// Time the backward passes as well
    #[arg(long)]
    pub backward: bool,

    /// Rounds to time; from 1000 on p99 is reported [default: what fits into half a minute]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Time chains of pairs as well: dispatch, combine, dispatch of what it returned, and so on, as
    /// CollectiveX does
    #[arg(long)]
    pub chained: bool,

    /// Take turns with baselines, over MPI and over torch's gloo, if they are installed: rows by
    /// expert, bf16, on one machine
    #[arg(long, conflicts_with = "master")]
    pub baselines: bool,

    #[command(flatten)]
    pub report: JsonFile<true>,

    /// Write the chains as a case of CollectiveX, on the machine of rank 0
    #[arg(long, value_name = "FILE", requires = "chained")]
    pub collectivex: Option<PathBuf>,

    /// Write one round as a Chrome trace, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub trace_out: Option<PathBuf>,
}

impl Command for BenchArgs {
    const NAME: &'static str = "bench";

    fn run(self) -> Result<ExitCode, CliError> {
        let config = RunSettings::resolve(&self.conditions, self.backward, self.rounds)?;
        let config = RunSettings { chained: self.chained, ..config };
        if self.baselines {
            config.check_baselines()?;
        }
        if self.chained {
            config.check_chained()?;
        }
        if self.collectivex.is_some() {
            config.check_collectivex()?;
        }
        // Ranks may be killed: the folder is held here, where Ctrl-C is waited for.
        let folder = self.baselines.then(Folder::make).transpose()?;
        let baselines = folder.as_ref().map(|folder| folder.path().to_owned());
        let (json, collectivex, trace) = (self.report.json, self.collectivex, self.trace_out);
        let files = Files { json, collectivex, trace, baselines, ..Files::default() };
        start(Self::NAME, config, files, &self.conditions.machines)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}

/// Starts the ranks of a command that makes these calls; rounds are recorded for a trace.
pub fn start(
    command: &str,
    config: RunSettings,
    files: Files,
    machines: &MachineArgs,
) -> Result<ExitCode, CliError> {
    let (files, nodes) = (files.claimed(machines)?, config.ranks_per_node.clone());
    let task = Task::new(config, files.trace.is_some())?;
    let memory = task.config.memory(task.sizes.heap);
    ranks::start(command, &nodes, machines, &Assignment { task, files }, Vec::new(), &memory)
}

/// Task of every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub config: RunSettings,
    /// Of the content of the routing file, if there is one.
    routing_file: Option<String>,
    pub sizes: Sizes,
    /// Whether rounds are recorded for rank 0.
    pub records: bool,
}

impl Task {
    fn new(config: RunSettings, records: bool) -> Result<Self, CliError> {
        let (routing_file, sizes) = (config.routing.digest()?, rank::sizes(&config)?);
        Ok(Task { config, routing_file, sizes, records })
    }
}
