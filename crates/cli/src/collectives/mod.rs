//! `sidelane collectives`: all-reduce, broadcast, all-to-all, all-gather and reduce-scatter between real processes, checked, and
//! beside others who do the same. An all-to-all is measured twice: copied to the caller, and read where it lands.
//!
//! Elements are small whole numbers in f32, so sums are exact in any order, and whoever is right has the same bits.
//!
//! ```text
//!   for each size and operation:  check ours | w: theirs, compared by each rank | rounds: ours, MPI's, gloo's, ours, ...
//! ```

mod args;
mod operation;
mod rank;
mod report;
mod rivals;
mod task;

use std::process::ExitCode;

use task::Task;

use crate::bench::peers::Folder;
use crate::command::Command;
use crate::error::CliError;
use crate::ranks;

pub use args::CollectivesArgs;

impl Command for CollectivesArgs {
    const NAME: &'static str = "collectives";

    fn run(self) -> Result<ExitCode, CliError> {
        let mut task = Task::resolve(&self)?;
        self.machines.claim(&self.json)?;
        // Ranks may be killed: the folder is held here, where Ctrl-C is waited for.
        let folder = self.peers.then(Folder::make).transpose()?;
        task.peers = folder.as_ref().map(|folder| folder.path().to_owned());
        ranks::start(Self::NAME, &task.ranks_per_node, &self.machines, &task, Vec::new())
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}
