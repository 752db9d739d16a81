//! `sidelane collectives`: all-reduce, broadcast, all-to-all, all-gather and reduce-scatter between
//! real processes, checked, and compared with baselines. An all-to-all is measured twice: copied to
//! the caller, and read where it lands.
//!
//! Elements are small whole numbers in f32, so sums are exact in any order, and all right results
//! have the same bits.
//!
//! ```text
//!   for each size and operation:  check ours | w: theirs, compared by each rank | rounds: ours, MPI's, gloo's, ours, ...
//! ```

mod operation;

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use operation::{Operation, Test};
use serde::{Deserialize, Serialize};
use sidelane::{Group, Window};
use sidelane_testkit::machines::{Hosts, Machines};
use sidelane_testkit::timing::stats::{Laps, Summary, summary};

use crate::baselines::{BaselinePass, BaselineReport, Field, Folder, Programs, Unavailable, compared};
use crate::command_frame::{self, Command};
use crate::commands::launch::MachineArgs;
use crate::commands::put_bench::Sizes;
use crate::error::{CliError, usage};
use crate::options::{JsonFile, NodeArgs, Scaled, at_least_one};
use crate::ranks::{self, Assignment, Files, RankMemory};
use crate::table::{self, Column, time};

const EXAMPLES: &str = "\
Examples:
  sidelane collectives --sizes 4K..16M  # every operation, 8 ranks of one node
  sidelane collectives --operations all-reduce --ranks-per-node 4 --baselines";

/// Time all-reduce, broadcast, all-to-all, all-gather and reduce-scatter between processes,
/// verified
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct CollectivesArgs {
    /// Operations to measure: a list [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "OPERATION,..")]
    pub operations: Vec<Operation>,

    /// Bytes of the larger tensor of a rank: a list, or all powers of two in a range; suffixes K,
    /// M, G [default: 4K,16M, or the next that all ranks share evenly]
    #[arg(long, value_name = "SIZE,..|FROM..TO")]
    pub sizes: Option<Sizes>,

    #[command(flatten)]
    pub nodes: NodeArgs<1, 8>,

    /// Rounds to time [default: by size, 15 to 200]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Take turns with Open MPI and torch's gloo, if they are installed, on one machine
    #[arg(long, conflicts_with = "master")]
    pub baselines: bool,

    #[command(flatten)]
    pub report: JsonFile<true>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

impl Command for CollectivesArgs {
    const NAME: &'static str = "collectives";

    fn run(self) -> Result<ExitCode, CliError> {
        let task = Task::resolve(&self)?;
        // Ranks may be killed: the folder is held here, where Ctrl-C is waited for.
        let folder = self.baselines.then(Folder::make).transpose()?;
        let baselines = folder.as_ref().map(|folder| folder.path().to_owned());
        let files =
            Files { json: self.report.json, baselines, ..Files::default() }.claimed(&self.machines)?;
        let (nodes, memory) = (task.ranks_per_node.clone(), task.memory());
        ranks::start(Self::NAME, &nodes, &self.machines, &Assignment { task, files }, Vec::new(), &memory)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        main(&ranks::task(task)?)
    }
}

/// Number of runs that file names can distinguish.
const MOST_BESIDE: usize = 128;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub ranks_per_node: Vec<u32>,
    pub runs: Vec<Run>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub operation: Operation,
    /// Of the larger tensor of a rank.
    pub bytes: u64,
    pub rounds: u32,
}

impl Task {
    pub fn resolve(args: &CollectivesArgs) -> Result<Self, CliError> {
        let ranks_per_node = args.nodes.sizes()?;
        let ranks: u32 = ranks_per_node.iter().sum();
        let parts = 16 * u64::from(ranks);
        let usual = || [4 << 10, 16 << 20].map(|bytes: u64| bytes.next_multiple_of(parts)).to_vec();
        let sizes = args.sizes.as_ref().map_or_else(usual, |sizes| sizes.0.clone());
        if let Some(&bytes) = sizes.iter().find(|&&bytes| !bytes.is_multiple_of(parts)) {
            let next = bytes.next_multiple_of(parts);
            return Err(usage!(
                "--sizes: {bytes} bytes do not make equal parts of whole 16 bytes for {ranks} ranks: take multiples of {parts}, such as {next}"
            ));
        }
        at_least_one(&[("--rounds", args.rounds.unwrap_or(1))])?;
        let operations =
            if args.operations.is_empty() { Operation::value_variants() } else { &args.operations };
        let rounds = |bytes: u64| args.rounds.unwrap_or((64 << 20 >> bytes.ilog2()).clamp(15, 200));
        let runs = sizes.iter().flat_map(|&bytes| {
            operations.iter().map(move |&operation| Run { operation, bytes, rounds: rounds(bytes) })
        });
        let runs: Vec<Run> = runs.collect();
        let count = runs.len();
        if args.baselines && count > MOST_BESIDE {
            return Err(usage!(
                "--baselines: {count} operations and sizes are more than the {MOST_BESIDE} that others can be told"
            ));
        }
        Ok(Task { ranks_per_node, runs })
    }

    /// Room, twice, for gathered or summed bytes, for the windows, and for results that land in
    /// place, those of the run before included.
    pub fn sizes(&self) -> ranks::Sizes {
        let most = self.runs.iter().map(|run| run.bytes).max().unwrap_or(0);
        let symmetric = ((32 << 20) + 2 * most).next_multiple_of(2 << 20);
        ranks::Sizes { heap: (symmetric + 3 * most + (16 << 20)).next_multiple_of(2 << 20), symmetric }
    }

    fn memory(&self) -> RankMemory {
        // The larger tensor.
        let other = self.runs.iter().map(|run| run.bytes).max().unwrap_or(0);
        RankMemory { heap: self.sizes().heap, other, options: "--sizes or the number of ranks" }
    }
}

fn main(Assignment { task, files }: &Assignment<Task>) -> Result<ExitCode, CliError> {
    let world = ranks::join(CollectivesArgs::NAME, task, task.sizes(), 0)?;
    let group = world.all()?;
    let machines = Machines::of(&group)?;
    let folder = files.baselines.as_deref().map(Folder::at);
    let mut others =
        folder.as_ref().map(|folder| others(&group, task, folder)).transpose()?.unwrap_or_default();
    let mut barrier = group.window(0)?;
    let bar = command_frame::progress(world.rank(), task.runs.len() as u64);
    let (mut verified, mut runs) = (true, Vec::new());
    for (nth, &run) in (0u8..).zip(&task.runs) {
        let mut test = Test::new(run.operation, (run.bytes / 4) as usize, &group)?;
        test.check()?;
        verified &= ranks::all_say(&group, test.is_right())?;
        if let Some(folder) = &folder {
            let out = bytemuck::cast_slice(test.output());
            others.compare(&group, folder, WRITE | nth, &[("out", out)])?;
        }
        let laps = take_turns(&mut test, &mut barrier, (nth, run), &mut others)?;
        test.check()?;
        verified &= ranks::all_say(&group, test.is_right())?;
        let ours = laps.rounds(&group, &machines)?;
        let baselines = others.running.iter().map(|other| other.report(other.pass(nth, &ours))).collect();
        runs.push(RunReport { run, timing: summary(&ours), baselines });
        bar.inc(1);
    }
    bar.finish_and_clear();
    if world.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let ranks_per_node = task.ranks_per_node.clone();
    let config = RunSettings { ranks_per_node, hosts: machines.hosts() };
    command_frame::finish(&Report { config, verified, runs, unavailable: others.absent.clone() }, &files.json)
}

fn take_turns(
    test: &mut Test,
    barrier: &mut Window,
    (nth, run): (u8, Run),
    others: &mut Field,
) -> Result<Laps, CliError> {
    let mut laps = Laps::default();
    for _ in 0..run.rounds {
        test.reset();
        test.call()?;
        test.reset();
        barrier.barrier()?;
        laps.time(|| test.call())?;
        // A rank that is done must not take a core from the others. Baselines sleep then, too.
        barrier.barrier()?;
        others.lap(nth)?;
    }
    Ok(laps)
}

const PROGRAMS: Programs = Programs {
    c: ("collectives.c", include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/collectives.c"))),
    python: (
        "collectives.py",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/collectives.py")),
    ),
};

/// Added to the number of a run: write what comes out.
const WRITE: u8 = MOST_BESIDE as u8;

/// Runs the baselines in turn with our calls, by the protocol of `benches/baselines`.
/// Collective.
fn others(group: &Group, task: &Task, folder: &Folder) -> Result<Field, CliError> {
    if group.rank() == 0 {
        let words = task.runs.iter().flat_map(|run| [run.operation.number(), run.bytes as u32]);
        let shape: Vec<u32> = [group.size(), task.runs.len() as u32].into_iter().chain(words).collect();
        folder.put("shape", bytemuck::cast_slice(&shape))?;
    }
    Field::open(group, &PROGRAMS, folder, |_| Ok(()), || Ok(false))
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub verified: bool,
    pub runs: Vec<RunReport>,
    pub unavailable: Vec<Unavailable>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    pub ranks_per_node: Vec<u32>,
    #[serde(flatten)]
    pub hosts: Hosts,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    #[serde(flatten)]
    pub run: Run,
    #[serde(flatten)]
    pub timing: Summary,
    /// Others, in the same rounds.
    pub baselines: Vec<BaselineReport<BaselinePass>>,
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let RunSettings { ranks_per_node, hosts } = &self.config;
        let ranks: u32 = ranks_per_node.iter().sum();
        let verified = if self.verified { "results verified" } else { "RESULTS ARE WRONG" };
        let of = ranks_per_node.iter().map(u32::to_string).collect::<Vec<_>>().join("+");
        let hosts = hosts.text("");
        let mut text = format!("{ranks} ranks ({of} by node), f32, {hosts}; {verified}\n\n");
        // A line for each baseline, or one without.
        let rows = self.runs.iter().flat_map(|run| match &run.baselines[..] {
            [] => vec![(run, None)],
            baselines => baselines.iter().map(|baseline| (run, Some(baseline))).collect(),
        });
        let of = |baseline: &Option<_>, cell: fn(&BaselineReport<BaselinePass>) -> String| {
            baseline.map_or(String::new(), cell)
        };
        let columns: [Column<'_, (&RunReport, Option<&BaselineReport<_>>)>; 9] = [
            ("operation", &|(ours, _)| ours.run.operation.name()),
            ("size", &|(ours, _)| Scaled(ours.run.bytes).to_string()),
            ("p50", &|(ours, _)| time(ours.timing.p50_us)),
            ("max", &|(ours, _)| time(ours.timing.max_us)),
            ("baseline", &|(_, theirs)| of(theirs, |theirs| theirs.version.clone())),
            ("p50", &|(_, theirs)| of(theirs, |theirs| time(theirs.calls.timing.p50_us))),
            ("max", &|(_, theirs)| of(theirs, |theirs| time(theirs.calls.timing.max_us))),
            ("x ours (95%)", &|(_, theirs)| of(theirs, |theirs| theirs.calls.speedup.text(2))),
            ("result", &|(_, theirs)| of(theirs, |theirs| compared(theirs.bitwise_equal))),
        ];
        let alone = self.runs.iter().all(|run| run.baselines.is_empty());
        text += &table::of(rows, if alone { &columns[..4] } else { &columns });
        text += "\n";
        self.unavailable.iter().fold(text, |text, one| text + &one.text() + "\n")
    }

    fn is_right(&self) -> bool {
        self.verified
            && self.runs.iter().flat_map(|run| &run.baselines).all(|baseline| baseline.bitwise_equal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page, assert_words};
    use crate::error::failed;

    fn sample() -> Report {
        let run = Run { operation: Operation::AllReduce, bytes: 4096, rounds: 3 };
        let calls = BaselinePass::new(&[30.0, 10.0, 20.0], &[6.0, 2.0, 4.0]);
        let (name, version) = ("mpi".to_owned(), "Open MPI v4".to_owned());
        let baseline = BaselineReport { name, version, bitwise_equal: true, calls };
        let timing = summary(&[6.0, 2.0, 4.0]);
        Report {
            config: RunSettings { ranks_per_node: vec![2, 1], hosts: Hosts { machines: 1, cores: 2 } },
            verified: true,
            runs: vec![RunReport { run, timing, baselines: vec![baseline] }],
            unavailable: vec![Unavailable::new("gloo", &failed!("there is no python3"), "pip install torch")],
        }
    }

    #[test]
    fn default_sizes_are_shared_evenly_by_any_number_of_ranks() {
        for (ranks, bytes) in [(3, [4128, 16_777_248]), (8, [4096, 16_777_216])] {
            let line = format!("--ranks-per-node {ranks} --operations all-reduce");
            let task = Task::resolve(&crate::command_frame::tests::parsed(&line).unwrap()).unwrap();
            assert_eq!(task.runs.iter().map(|run| run.bytes).collect::<Vec<_>>(), bytes);
        }
    }

    #[test]
    fn the_page_names_exactly_the_keys_that_are_written() {
        assert_page("collectives-json.md", &[sample()]);
    }

    #[test]
    fn the_text_says_who_ran_beside_and_who_did_not() {
        let text = sample().text();
        assert_words(
            &text,
            &[
                "3 ranks (2+1 by node)",
                "all-reduce",
                "4K",
                "4.00 us",
                "5.00 (5.00-5.00)",
                "same bits",
                "no python3",
            ],
        );
        let mut wrong = sample();
        wrong.runs[0].baselines[0].bitwise_equal = false;
        assert!(sample().is_right() && !wrong.is_right() && wrong.text().contains("NOT THE SAME"));
    }
}
