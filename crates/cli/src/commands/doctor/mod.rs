//! `sidelane doctor`: properties of this machine, their effect on Sidelane, and what to do about
//! them.
//!
//! It changes nothing: a report must be safe to run anywhere. It loads the CUDA driver, if there is
//! one, since no other source knows the driver's abilities; it makes no context and allocates no
//! GPU memory. It opens NICs by libibverbs, as a rank does that chooses one, and registers nothing.
//! Detection reads files below a [`Root`] and facts about the process ([`Facts`]), so that tests
//! can lay out a machine of their own.
//!
//! ```text
//!   Root, Facts --host, cuda--> Finding: what, level, meaning, advice --> table, JSON
//! ```

mod cuda;
mod finding;
mod host;
mod machine;
mod nics;

use std::process::ExitCode;

use clap::Args;
use comfy_table::{ColumnConstraint, Width};
use serde::Serialize;
use sidelane::device::Probe;

use crate::command_frame::{self, Command, Program, Report};
use crate::error::CliError;
use crate::options::word;
use crate::table::{self, AS_ROOT};

pub use cuda::of_probe as cuda_findings;
use finding::Finding;
pub use finding::Level;
pub use host::available_memory;
use machine::Facts;
pub use machine::Root;

const EXAMPLES: &str = "\
Examples:
  sidelane doctor
  sidelane doctor --nics
  sidelane doctor --json";

/// Say what this machine offers, what that means, and what to do
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArgs {
    /// Say only which NIC each rank takes and which NICs none takes, and why
    #[arg(long)]
    nics: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Diagnosis {
    #[serde(flatten)]
    program: Program,
    findings: Vec<Finding>,
}

impl Command for DoctorArgs {
    const NAME: &'static str = "doctor";

    /// It is a report, and succeeds with any findings.
    fn run(self) -> Result<ExitCode, CliError> {
        let facts = Facts::of_this_process();
        let findings = if self.nics { nics::choice(&facts) } else { examine(&Root::new("/"), &facts) };
        let diagnosis = Diagnosis { program: Program::HERE, findings };
        command_frame::print(&if self.json { diagnosis.json() } else { table::fitted(&diagnosis.text()) })?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Report for Diagnosis {
    fn text(&self) -> String {
        let Diagnosis { program, findings } = self;
        let advice = findings.iter().filter_map(|finding| finding.advice?.strip_prefix(AS_ROOT));
        let commands: String = advice.map(|command| format!("\n{AS_ROOT}{command}")).collect();
        format!("{}\n\n{}\n\n{}{commands}", program.text(), rows(findings), summary(findings))
    }
}

/// A driver and one of its devices, in reports of what ran there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DriverReport {
    pub library: String,
    pub driver: String,
    /// Whether there was no GPU at all.
    pub fake_driver: bool,
    /// Name of the device.
    pub name: String,
}

impl DriverReport {
    pub fn new(probe: &Probe, device: u32) -> Self {
        let facts = probe.devices.iter().find(|facts| facts.device == device);
        let (library, name) =
            (probe.library.clone(), facts.map_or(String::new(), |facts| facts.name.clone()));
        DriverReport { library, driver: probe.version.to_string(), fake_driver: probe.fake_driver, name }
    }
}

/// Every finding, from what all jobs need to what few have.
fn examine(root: &Root, facts: &Facts) -> Vec<Finding> {
    let ports = nics::ports(root);
    let mut findings = vec![
        host::kernel(root).named("kernel"),
        host::cores(root, facts).named("cores"),
        host::vectors(root).named("vector unit"),
        host::memory(root).named("memory"),
        host::numa(root).named("NUMA nodes"),
        host::huge_pages(root, facts).named("huge pages (shared)"),
        host::dev_shm(root).named("/dev/shm"),
        host::open_files(facts).named("open files"),
        host::locked_memory(facts, !ports.is_empty()).named("locked memory"),
        host::variables(facts).named("environment"),
    ];
    findings.extend(nics::findings(root, facts, &ports));
    findings.extend(cuda::findings(root, facts));
    findings
}

fn rows(findings: &[Finding]) -> String {
    let mut table = table::new(["", "what", "found", "what it means, and what to do"]);
    for finding in findings {
        let advice = finding.advice.map_or(String::new(), |advice| match advice.starts_with(AS_ROOT) {
            true => "\n→ As root: see the last lines.".to_owned(),
            false => format!("\n→ {advice}"),
        });
        table.add_row([
            &word(&finding.level),
            &finding.what,
            &finding.found,
            &format!("{}{advice}", finding.meaning),
        ]);
    }
    table.set_constraints([
        ColumnConstraint::ContentWidth,
        ColumnConstraint::UpperBoundary(Width::Percentage(20)),
        ColumnConstraint::UpperBoundary(Width::Percentage(25)),
    ]);
    table::lines(&table)
}

fn summary(findings: &[Finding]) -> &'static str {
    let any = |level| findings.iter().any(|finding| finding.level == level);
    match (any(Level::Warn), any(Level::Note)) {
        (false, false) => "All as it should be.",
        (false, true) => "No warnings. Notes say what would be faster, and what is optional.",
        (true, _) => "A warning names what fails as soon as it is used.",
    }
}

#[cfg(test)]
pub(crate) mod tests;
