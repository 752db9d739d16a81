//! `sidelane doctor`: properties of this machine, their effect on Sidelane, and what to do about
//! them.
//!
//! It changes nothing: a report must be safe to run anywhere. It loads only the CUDA driver, if
//! there is one, since no other source knows the driver's abilities; it makes no context and
//! allocates no GPU memory. Detection reads files below a [`Root`] and facts about the process
//! ([`Facts`]), so that tests can lay out a machine of their own.

mod cuda;
mod host;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use comfy_table::{ColumnConstraint, Width};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use sidelane::device::{Driver, Probe};
use sidelane::error::DeviceError;

use crate::command::{self, Command, Program, Report};
use crate::error::CliError;
use crate::options::word;
use crate::table;

pub use cuda::of_probe as cuda_findings;
pub use host::available_memory;

const EXAMPLES: &str = "\
Examples:
  sidelane doctor
  sidelane doctor --json";

/// Say what this machine offers, what that means, and what to do
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArgs {
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

    /// It is a report: whatever it finds, it succeeds.
    fn run(self) -> Result<ExitCode, CliError> {
        let findings = examine(&Root::new("/"), &Facts::of_this_process());
        let diagnosis = Diagnosis { program: Program::HERE, findings };
        command::print(&if self.json { diagnosis.json() } else { table::fitted(&diagnosis.text()) })?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Report for Diagnosis {
    fn text(&self) -> String {
        let Diagnosis { program, findings } = self;
        format!("{}\n\n{}\n\n{}", program.text(), rows(findings), summary(findings))
    }
}

/// Every finding, from what all jobs need to what few have.
fn examine(root: &Root, facts: &Facts) -> Vec<Finding> {
    let ports = host::ports(root);
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
    ];
    findings.extend(host::nics(root, facts, &ports));
    findings.extend(cuda::findings(root, facts));
    findings
}

/// Facts about this process. A limit of `None` is no limit.
pub struct Facts {
    pub usable_cores: usize,
    pub locked_memory: Option<u64>,
    pub open_files: Option<u64>,
    /// Whether a segment that asked for huge pages got them; `None` if the kernel does not report
    /// it.
    pub huge_pages: Option<bool>,
    pub verbs_signal: Option<String>,
    pub library_path: Vec<PathBuf>,
    pub cuda: Result<Probe, DeviceError>,
}

impl Facts {
    fn of_this_process() -> Self {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Facts {
            usable_cores: crate::machines::cores(),
            locked_memory: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            huge_pages: sidelane::memory::huge_pages_granted(),
            verbs_signal: std::env::var("SIDELANE_VERBS_SIGNAL").ok(),
            library_path: std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()).collect(),
            cuda: Driver::open().and_then(|driver| driver.probe()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but slower, or without something optional.
    Note,
    /// Something will fail.
    Warn,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub what: String,
    pub level: Level,
    pub found: String,
    pub meaning: &'static str,
    pub advice: Option<&'static str>,
}

impl Finding {
    pub fn new(what: impl Into<String>, found: impl Into<String>) -> Self {
        Finding { what: what.into(), level: Level::Ok, found: found.into(), meaning: "", advice: None }
    }

    pub fn named(self, what: &str) -> Self {
        Finding { what: what.to_owned(), ..self }
    }

    pub fn means(self, meaning: &'static str) -> Self {
        Finding { meaning, ..self }
    }

    pub fn note(self, advice: &'static str) -> Self {
        Finding { level: Level::Note, advice: Some(advice), ..self }
    }

    pub fn warn(self, advice: &'static str) -> Self {
        Finding { level: Level::Warn, advice: Some(advice), ..self }
    }
}

pub fn seen(found: impl Into<String>) -> Finding {
    Finding::new("", found)
}

/// A number of bytes, in powers of 1024: `23.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count as f64 / 1024.0, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let number = format!("{value:.1}");
    format!("{} {}", number.strip_suffix(".0").unwrap_or(&number), UNITS[unit])
}

/// Reads small files of /sys, /proc, /etc and /dev. Missing and unreadable files count as absent.
pub struct Root(PathBuf);

impl Root {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Root(path.into())
    }

    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.join(path)).ok().map(|text| text.trim().to_owned())
    }

    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    pub fn numbered(&self, path: impl AsRef<Path>, prefix: &str) -> usize {
        let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
        self.list(path).iter().filter(|name| name.strip_prefix(prefix).is_some_and(is_number)).count()
    }

    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.join(path).exists()
    }
}

const USUAL: [&str; 6] = ["/usr/local/lib", "/usr/local/lib64", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

pub fn find_library(root: &Root, facts: &Facts, names: &[&str]) -> Option<PathBuf> {
    let paths =
        directories(root, facts).into_iter().flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    paths.into_iter().find(|path| root.has(path))
}

/// In the loader's order: the environment, the configuration, the usual places.
fn directories(root: &Root, facts: &Facts) -> Vec<PathBuf> {
    const CONFIGURED: &str = "/etc/ld.so.conf.d";
    let mut texts: Vec<String> = root.read("/etc/ld.so.conf").into_iter().collect();
    texts.extend(root.list(CONFIGURED).iter().filter_map(|name| root.read(format!("{CONFIGURED}/{name}"))));
    let configured = texts.iter().flat_map(|text| text.lines()).map(str::trim).filter(|l| l.starts_with('/'));
    facts.library_path.iter().cloned().chain(configured.chain(USUAL).map(PathBuf::from)).collect()
}

fn rows(findings: &[Finding]) -> String {
    let mut table = table::new(["", "what", "found", "what it means, and what to do"]);
    for finding in findings {
        let advice = finding.advice.map_or(String::new(), |advice| format!("\n→ {advice}"));
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
