//! `sidelane trace`: a dispatch and a combine of all ranks, operation by operation.
//!
//! The ranks are those of `bench`: processes that make the same calls on the same conditions. Each
//! sends its recording, and rank 0 writes it in three forms:
//!
//! ```text
//!   trace --> Task --launch--> rank 0 .. n-1:  dispatch, check | combine, check | record rounds | check
//!                                  |
//!                                rank 0: Chrome trace (every operation), picture (at a glance), table and JSON (sums)
//! ```

mod picture;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sidelane::dtype::with_element;
use sidelane::exec::{OpKind, Timeline};
use sidelane::topology::NodeMap;
use sidelane_testkit::machines::{self, Machines};
use sidelane_verify::reference::Real;

use crate::command_frame::{self, Command};
use crate::commands::bench::{
    self, CALLS, ConditionArgs, Layer, RunSettings, Task, Verdict, record, write_trace,
};
use crate::error::CliError;
use crate::ranks::{self, Assignment, Files};
use crate::table::{self, time, volume};

const EXAMPLES: &str = "\
Examples:
  sidelane trace --out trace.json --svg trace.svg  # open trace.json in Perfetto
  sidelane trace --out trace.json --route direct --tokens 64";

/// Record a dispatch and a combine of all ranks as a timeline that opens in Perfetto
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct TraceArgs {
    #[command(flatten)]
    pub conditions: ConditionArgs,

    /// Write the timeline as a Chrome trace, on the machine of rank 0: open it in
    /// https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,

    /// Draw the timeline as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Write the sums of each rank as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Command for TraceArgs {
    const NAME: &'static str = "trace";

    fn run(self) -> Result<ExitCode, CliError> {
        // One round is recorded.
        let config = RunSettings::resolve(&self.conditions, false, Some(1))?;
        let files = Files { json: self.json, svg: self.svg, trace: Some(self.out), ..Files::default() };
        bench::start(Self::NAME, config, files, &self.conditions.machines)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        let Assignment { task, files } = ranks::task::<Assignment<Task>>(task)?;
        with_element!(task.config.shape.dtype.element(), E => run::<E>(&task, &files))
    }
}

fn run<E: Real>(task: &Task, files: &Files) -> Result<ExitCode, CliError> {
    let mut layer: Layer<'_, E> = Layer::join(TraceArgs::NAME, task)?;
    let (rows, handle) = layer.dispatch_and_check()?;
    let y = layer.expected.outputs();
    drop(rows);
    layer.combine_and_check(&y, &handle)?;
    let timelines = record(&mut layer, &y)?;
    let verdict = layer.verdict()?;
    let (Some(out), 0) = (&files.trace, layer.world.rank()) else { return Ok(ExitCode::SUCCESS) };
    let nodes = layer.world.nodes();
    let report = Report::new(&task.config, &layer.machines, verdict, nodes, &timelines, out);
    write_trace(out, nodes, &timelines)?;
    command_frame::draw(&files.svg, || picture::draw(&task.config, nodes, &timelines))?;
    command_frame::finish(&report, &files.json)
}

#[derive(Debug, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub machines: usize,
    #[serde(flatten)]
    pub verdict: Verdict,
    pub ranks: Vec<RankSums>,
    #[serde(skip)]
    pub trace: PathBuf,
}

#[derive(Debug, Serialize)]
pub struct RankSums {
    pub rank: u32,
    pub node: u32,
    calls_us: BTreeMap<String, f64>,
    pub operations: BTreeMap<OpKind, Sum>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sum {
    pub count: u64,
    pub us: f64,
    pub bytes: u64,
}

impl RankSums {
    fn of(rank: u32, node: u32, timeline: &Timeline) -> Self {
        let calls = timeline.calls.iter().map(|call| (call.name.clone(), call.nanos as f64 / 1e3));
        let mut operations: BTreeMap<OpKind, Sum> = OpKind::ALL.map(|kind| (kind, Sum::default())).into();
        for event in &timeline.events {
            let sum = operations.entry(event.kind).or_default();
            sum.count += 1;
            sum.us += event.nanos as f64 / 1e3;
            sum.bytes += event.bytes;
        }
        RankSums { rank, node, calls_us: calls.collect(), operations }
    }

    fn bytes(&self, kinds: &[OpKind]) -> u64 {
        kinds.iter().map(|kind| self.operations[kind].bytes).sum()
    }
}

impl Report {
    pub fn new(
        config: &RunSettings,
        machines: &Machines,
        verdict: Verdict,
        nodes: &NodeMap,
        timelines: &[Timeline],
        trace: &Path,
    ) -> Self {
        let ranks = (0..).zip(timelines);
        Report {
            config: config.clone(),
            machines: machines.count(),
            verdict,
            ranks: ranks.map(|(rank, timeline)| RankSums::of(rank, nodes.node_of(rank), timeline)).collect(),
            trace: trace.to_owned(),
        }
    }

    fn sums(&self) -> String {
        let header = ["rank", "node"].into_iter().chain(CALLS).chain(OpKind::ALL.map(OpKind::name));
        let mut table = table::figures(header.chain(["moved", "summed"]).collect::<Vec<_>>());
        for rank in &self.ranks {
            let mut row = vec![rank.rank.to_string(), rank.node.to_string()];
            row.extend(CALLS.map(|name| time(rank.calls_us.get(name).copied().unwrap_or(0.0))));
            row.extend(OpKind::ALL.map(|kind| time(rank.operations[&kind].us)));
            row.push(volume(rank.bytes(&[OpKind::Put, OpKind::PutRows])));
            row.push(volume(rank.bytes(&[OpKind::Reduce])));
            table.add_row(row);
        }
        table::lines(&table)
    }
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let mut conditions = self.config.words();
        conditions[0].1 += &format!(", {}", machines::words(self.machines));
        let verdict = self.verdict.text();
        let (head, sums, trace) = (table::head(&conditions), self.sums(), self.trace.display());
        format!("{head}{verdict}\n\n{sums}\n\n{trace}: open it in https://ui.perfetto.dev")
    }

    fn is_right(&self) -> bool {
        self.verdict.verified
    }
}

#[cfg(test)]
pub mod tests {
    use sidelane::exec::{Event, TimedCall};

    use super::*;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page_with, assert_words, page};

    /// Eight ranks on two nodes.
    pub fn config() -> RunSettings {
        crate::commands::bench::sample().config.config
    }

    fn event(kind: OpKind, nanos: u64, bytes: u64) -> Event {
        Event {
            kind,
            flag: None,
            of: 0,
            part: 0,
            release: false,
            track: 0,
            peer: 0,
            start_ns: 0,
            nanos,
            bytes,
        }
    }

    fn sample() -> Report {
        let calls = CALLS.map(|name| TimedCall { name: name.into(), start_ns: 0, nanos: 1_500_000 });
        let events = vec![
            event(OpKind::Put, 1000, 10),
            event(OpKind::PutRows, 2000, 2_000_000),
            event(OpKind::PutRows, 500, 1_000_000),
        ];
        let timelines =
            [Timeline { calls: calls.into(), events, ..Timeline::default() }, Timeline::default()];
        let verdict = Verdict { verified: true, rows_verified: 7 };
        let (config, nodes) = (config(), NodeMap::from_labels(&["b", "a"]));
        let trace = Path::new("some/trace.json");
        Report::new(&config, &vec![0, 0].into(), verdict, &nodes, &timelines, trace)
    }

    #[test]
    fn operations_are_summed_by_rank_and_kind() {
        let report = sample();
        assert_eq!(report.ranks[0].operations[&OpKind::PutRows], Sum { count: 2, us: 2.5, bytes: 3_000_000 });
        assert_eq!(report.ranks[0].operations[&OpKind::Wait], Sum::default());
        assert_eq!((report.ranks[1].node, report.ranks[1].operations[&OpKind::PutRows]), (1, Sum::default()));
        let text = report.text();
        assert_words(
            &text,
            &[
                "8 on 2 nodes (4 + 4), 1 machine\n",
                "1.50 ms",
                "2.50 us",
                "3.0 MB",
                "7 rows bit-exact",
                "some/trace.json",
            ],
        );
    }

    #[test]
    fn a_failed_verification_cannot_be_overlooked() {
        let text = Report { verdict: Verdict { verified: false, rows_verified: 7 }, ..sample() }.text();
        assert!(text.contains("NOT VERIFIED: only 7 rows"), "{text}");
    }

    #[test]
    fn trace_page_names_exactly_json_keys_and_every_kind() {
        assert_page_with("trace.md", &[sample()], |key| match key.split('.').collect::<Vec<_>>()[..] {
            ["config", _, ..] => None,
            ["ranks", "operations", _, ref below @ ..] => {
                Some([&["ranks", "operations", "KIND"], below].concat().join("."))
            }
            _ => Some(key.to_owned()),
        });
        for kind in OpKind::ALL {
            assert!(page("trace.md").contains(&format!("- `{}`", kind.name())), "{kind:?}");
        }
    }
}
