//! `sidelane doctor`: what this machine offers, what that means for Sidelane, and what to do about it.
//!
//! Nothing is changed: a report must be safe to run anywhere. The one thing it loads is the CUDA driver, if there is
//! one, since nobody else knows what it can do; it makes no context and takes no memory of a GPU. Detection reads files
//! below a [`Root`] and facts about the process ([`Facts`]), so that tests can lay out a machine of their own.

mod cards;
mod cuda;
mod facts;
mod finding;
mod host;
mod loader;
mod root;
mod shared;
mod table;

use std::process::ExitCode;

use clap::Args;
use facts::Facts;
use finding::Finding;
use root::Root;
use serde::Serialize;

use crate::command::{self, Command, Report};
use crate::error::CliError;

pub use cuda::of_probe as cuda_findings;
pub use finding::Level;

/// Say what this machine offers, what that means, and what to do
#[derive(Args)]
pub struct DoctorArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// All findings, and the program that made them.
#[derive(Serialize)]
struct Diagnosis {
    version: &'static str,
    commit: &'static str,
    target: &'static str,
    findings: Vec<Finding>,
}

impl Command for DoctorArgs {
    const NAME: &'static str = "doctor";

    /// It is a report: whatever it finds, it succeeds.
    fn run(self) -> Result<ExitCode, CliError> {
        let diagnosis = Diagnosis {
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("SIDELANE_COMMIT"),
            target: env!("SIDELANE_TARGET"),
            findings: examine(&Root::new("/"), &Facts::of_this_process()),
        };
        command::print(&if self.json { diagnosis.json() } else { diagnosis.text() })?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Report for Diagnosis {
    fn text(&self) -> String {
        let Diagnosis { version, commit, target, findings } = self;
        let head = format!(
            "sidelane {version} ({commit}) for {target}
"
        );
        format!(
            "{head}
{}

{}",
            table::table(findings),
            table::summary(findings)
        )
    }
}

/// Every finding, from what all jobs need to what few have.
fn examine(root: &Root, facts: &Facts) -> Vec<Finding> {
    let cards = cards::ports(root);
    let mut findings = vec![
        host::kernel(root),
        host::cores(root, facts),
        host::vectors(root),
        host::memory(root),
        host::numa(root),
        shared::huge_pages(root, facts),
        shared::dev_shm(root),
        shared::open_files(facts),
        shared::locked_memory(facts, !cards.is_empty()),
    ];
    findings.extend(cards::findings(root, facts, &cards));
    findings.extend(cuda::findings(root, facts));
    findings
}

#[cfg(test)]
pub(crate) mod tests;
