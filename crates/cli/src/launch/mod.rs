//! `sidelane launch`: ranks as processes of this machine, which may be one of several ([`machines`]).
//!
//! Programs find each other through torchrun's variable names, so what runs here runs under torchrun as well.
//! The launcher stays only to pass signals on, to say which rank failed and how, and to leave nobody behind. It
//! can die, too: every rank holds the read end of a pipe ([`lifeline`]) that ends with the launcher, and reports
//! that itself. A parent-death signal would take a rank's chance to say why it ended.

mod args;
mod bind;
mod environment;
mod job;
mod lifeline;
mod machines;
mod ranks;
mod shape;
mod signals;
mod tag;

use std::process::ExitCode;

use crate::command::Command;
use crate::error::CliError;

pub use args::LaunchArgs;
pub use bind::Bind;
pub use job::Job;
pub use machines::MachineArgs;
pub use shape::{node_labels, node_sizes, shape_words};

impl Command for LaunchArgs {
    const NAME: &'static str = "launch";

    /// Ends as the first failing rank did.
    fn run(self) -> Result<ExitCode, CliError> {
        self.job()?.run().map(|outcome| ExitCode::from(outcome.exit_code()))
    }
}
