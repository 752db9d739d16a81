//! This program as the ranks of a job, and their common parts.
//!
//! ```text
//!   command --> task, files (JSON) --launch--> the same program, once per rank --> join the others
//! ```
//!
//! Each machine reads its own command line and its own routing file. The ranks compare the results
//! when they meet, before any measurement, and name the rank and the options that differ.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sidelane::device::Driver;
use sidelane::error::{BootstrapError, DeviceError};
use sidelane::rows::{SIMD_VARIABLE, Simd};
use sidelane::{Error, Group, Options, World};

use crate::command_frame;
use crate::commands::launch::{Bind, Job, MachineArgs};
use crate::error::{CliError, usage};
use crate::options;

/// One of the processes that a command has started.
#[derive(Args)]
pub struct RankArgs {
    /// The command that has started it
    pub command: String,
    /// What to do, as JSON
    pub task: String,
}

/// Everything that a rank of a measurement needs to know.
#[derive(Serialize, Deserialize)]
pub struct Assignment<T> {
    /// All ranks must have the same one.
    pub task: T,
    pub files: Files,
}

/// Files on the machine of rank 0: others know nothing of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Files {
    pub json: Option<PathBuf>,
    /// The report as CollectiveX writes its own.
    pub collectivex: Option<PathBuf>,
    pub svg: Option<PathBuf>,
    pub trace: Option<PathBuf>,
    /// The folder of baselines, which run on one machine alone.
    pub baselines: Option<PathBuf>,
}

impl Files {
    /// Finds out whether rank 0 can write them, before there are results to lose.
    pub fn claimed(self, machines: &MachineArgs) -> Result<Self, CliError> {
        if machines.node_rank.unwrap_or(0) == 0 {
            command_frame::claim(
                &self.json,
                [&self.collectivex, &self.svg, &self.trace].into_iter().flatten(),
            )?;
        }
        Ok(self)
    }
}

/// Memory that each rank takes, and the options that lower it.
pub struct RankMemory {
    /// Its heap, at least: the environment may ask for more.
    pub heap: u64,
    /// The rest, at least.
    pub other: u64,
    pub options: &'static str,
}

impl RankMemory {
    /// Refuses more of these ranks than fit in the memory of this machine.
    pub fn fits(&self, ranks_per_node: &[u32], machines: &MachineArgs) -> Result<(), CliError> {
        let part = machines.part(ranks_per_node)?;
        let ranks = part.map_or(ranks_per_node.iter().sum(), |part| ranks_per_node[part.node as usize]);
        let heap = environment()?.config.heap.max(self.heap);
        let needed = heap.saturating_add(self.other).saturating_mul(ranks.into());
        let variable = if heap > self.heap.max(self.other) { "SIDELANE_HEAP, " } else { "" };
        let what = format!("the {ranks} ranks of this machine");
        options::fits_in_memory(&what, needed, &format!("{variable}{}", self.options))
    }
}

/// Settings of the ranks from the environment. A variable that they cannot use is refused here,
/// once: each rank would say so.
fn environment() -> Result<Options, CliError> {
    Simd::from_env().map_err(|error| usage!("{SIMD_VARIABLE}: {error}"))?;
    Options::from_env().map_err(|error| usage!("{error}"))
}

/// Runs this program once per rank of this machine, with more variables in its environment, until
/// the last one has ended.
pub fn start(
    command: &str,
    ranks_per_node: &[u32],
    machines: &MachineArgs,
    assignment: &Assignment<impl Serialize>,
    variables: Vec<(String, OsString)>,
    memory: &RankMemory,
) -> Result<ExitCode, CliError> {
    memory.fits(ranks_per_node, machines)?;
    let env = [machines.variables(), variables].concat();
    let job = job(command, ranks_per_node, assignment, env)?;
    let job = Job { part: machines.part(ranks_per_node)?, bind: machines.bind, ..job };
    Ok(job.run()?.into())
}

/// This program once per rank, all of them on this machine and on any of its processors.
pub fn job(
    command: &str,
    ranks_per_node: &[u32],
    task: &impl Serialize,
    env: Vec<(String, OsString)>,
) -> Result<Job, CliError> {
    let (nodes, command) = (ranks_per_node.to_vec(), again(command, task)?);
    let grace = Duration::from_secs(5);
    Ok(Job { nodes, part: None, command, env, bind: Bind::None, grace, grace_option: "", tag_output: false })
}

/// The command line of one process of a command: this program, to be started again.
pub fn again(command: &str, task: &impl Serialize) -> Result<Vec<OsString>, CliError> {
    let program = std::env::current_exe().map_err(CliError::prepare("find this program"))?;
    let json = serde_json::to_string(task).expect("numbers, names and paths are always JSON");
    Ok(vec![program.into(), "rank".into(), command.into(), json.into()])
}

pub fn task<T: DeserializeOwned>(json: &str) -> Result<T, CliError> {
    serde_json::from_str(json)
        .map_err(|source| usage!("the task of a rank is not what `sidelane` writes: {source}"))
}

/// Variables that ranks and checks on a device need unless they are set: queues enough that ranks
/// of one GPU do not wait behind each other.
pub const VARIABLES: [(&str, &str); 1] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Those of some variables that are not set.
pub fn missing<'v>(variables: impl IntoIterator<Item = (&'v str, &'v str)>) -> Vec<(String, OsString)> {
    let missing = variables.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    missing.map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// Why no other process can use the device, if that is so.
pub fn one_process(driver: &Driver, device: u32) -> Result<Option<&'static str>, DeviceError> {
    const REASON: &str = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)";
    Ok((!driver.device(device)?.several_processes).then_some(REASON))
}

/// Prefix of a rank's error, as of lines of `launch --tag-output`: all ranks share one screen.
pub fn tag() -> String {
    std::env::var("RANK").map(|rank| format!("[{rank}] ")).unwrap_or_default()
}

/// Bytes of each rank's heap, and of its symmetric part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    pub heap: u64,
    pub symmetric: u64,
}

/// Joins the ranks that were started with the same task of this command, with a heap of at least
/// these sizes. A recorder keeps `record` operations; 0 means no recorder.
pub fn join(command: &str, task: &impl Serialize, sizes: Sizes, record: usize) -> Result<World, CliError> {
    let mut options = Options::from_env().map_err(Error::from)?;
    options.config.heap = options.config.heap.max(sizes.heap);
    options.config.symmetric = options.config.symmetric.max(sizes.symmetric);
    (options.record, options.forecast) = (record, true);
    options.job_fingerprint = conditions(command, task);
    let is_first = std::env::var("LOCAL_RANK").is_ok_and(|local| local == "0");
    World::from_env_with(options).map_err(|error| match error {
        Error::Bootstrap(BootstrapError::FingerprintsDiffer { .. }) if !is_first => CliError::Said,
        Error::Bootstrap(BootstrapError::FingerprintsDiffer { rank, seen, expected }) => {
            let differences = differences(&seen, &expected);
            usage!("rank {rank} was started with other settings than rank 0: {differences}")
        }
        error @ Error::Bootstrap(BootstrapError::JobSizesDiffer { .. }) => usage!("{error}"),
        error => error.into(),
    })
}

/// Gathers a value of every rank. Collective.
pub fn tell_all<T: Serialize + DeserializeOwned>(group: &Group, own: &T) -> Result<Vec<T>, CliError> {
    let json = serde_json::to_vec(own).expect("names and numbers are always JSON");
    let all = group.gather(&json)?;
    all.iter().map(|told| serde_json::from_slice(told).map_err(CliError::told)).collect()
}

/// Whether the condition holds on all ranks. Collective.
pub fn all_say(group: &Group, so: bool) -> Result<bool, Error> {
    Ok(group.gather(&[u8::from(so)])?.iter().all(|said| said == &[1]))
}

/// A task, as [`sidelane::Options::job_fingerprint`] needs it. The program itself is a part of it:
/// two versions may interpret the same words differently.
fn conditions(command: &str, task: &impl Serialize) -> String {
    let program = format!("{} ({})", env!("CARGO_PKG_VERSION"), env!("SIDELANE_COMMIT"));
    json!({ "sidelane": program, "command": command, "task": task }).to_string()
}

fn differences(seen: &str, expected: &str) -> String {
    let [seen, expected] = [seen, expected].map(|words| serde_json::from_str(words).unwrap_or_default());
    let mut found = Vec::new();
    compare("", &seen, &expected, &mut found);
    found.join(", ")
}

fn objects(value: &Value) -> Option<&Vec<Value>> {
    value.as_array().filter(|list| list.iter().all(Value::is_object))
}

/// Keys whose values differ, the innermost ones, each difference once.
fn compare(path: &str, seen: &Value, expected: &Value, found: &mut Vec<String>) {
    if let (Some(seen), Some(expected)) = (seen.as_object(), expected.as_object()) {
        let keys: std::collections::BTreeSet<&String> = seen.keys().chain(expected.keys()).collect();
        // Sizes follow from the others.
        for key in keys.into_iter().filter(|&key| key != "sizes") {
            let of = |object: &serde_json::Map<String, Value>| object.get(key).cloned().unwrap_or_default();
            compare(key, &of(seen), &of(expected), found);
        }
    } else if let (Some(seen), Some(expected)) = (objects(seen), objects(expected))
        && seen.len() == expected.len()
    {
        seen.iter().zip(expected).for_each(|(seen, expected)| compare(path, seen, expected, found));
    } else if seen != expected {
        let difference = format!("{path} {seen}, not {expected}");
        if !found.contains(&difference) {
            found.push(difference);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_option_is_named_by_no_command_without_it() {
        assert_eq!(job("bench", &[2], &1, Vec::new()).unwrap().grace_option, "");
    }

    #[test]
    fn only_what_differs_is_said() {
        let here =
            conditions("bench", &json!({ "tokens": 16, "receive": { "mode": "exact" }, "hidden": 64 }));
        let there =
            conditions("bench", &json!({ "tokens": 32, "receive": { "mode": "slots" }, "hidden": 64 }));
        assert_eq!(differences(&there, &here), r#"mode "slots", not "exact", tokens 32, not 16"#);
        let runs = |bytes: u64| {
            conditions("put-bench", &json!({ "runs": [{ "bytes": bytes }, { "bytes": bytes }] }))
        };
        assert_eq!(differences(&runs(8), &runs(16)), "bytes 8, not 16");
        let of = |command| conditions(command, &1);
        assert_eq!(differences(&of("trace"), &of("bench")), r#"command "trace", not "bench""#);
    }
}
