//! What each rank did in sum, as a table and as JSON. Keys are described in `docs/trace.md`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use sidelane::exec::{Kind, Timeline};
use sidelane::topology::NodeMap;

use crate::bench::{CALLS, Config, Verdict, Words};
use crate::command;
use crate::machines::{self, Machines};
use crate::table::{self, time, volume};

/// Everything that is known after a round.
#[derive(Debug, Serialize)]
pub struct Report {
    pub config: Config,
    pub machines: usize,
    pub verified: bool,
    pub rows_verified: u64,
    pub ranks: Vec<RankSums>,
    /// Where every operation was written.
    #[serde(skip)]
    pub trace: PathBuf,
}

/// What one rank did.
#[derive(Debug, Serialize)]
pub struct RankSums {
    pub rank: u32,
    pub node: u32,
    /// Length of each call, by its name.
    pub calls_us: BTreeMap<String, f64>,
    /// The operations of each kind.
    pub operations: BTreeMap<Kind, Sum>,
}

/// Operations of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sum {
    pub count: u64,
    pub us: f64,
    pub bytes: u64,
}

impl RankSums {
    fn of(rank: u32, node: u32, timeline: &Timeline) -> Self {
        let calls = timeline.calls.iter().map(|call| (call.name.clone(), call.nanos as f64 / 1e3));
        let mut operations: BTreeMap<Kind, Sum> = Kind::ALL.map(|kind| (kind, Sum::default())).into();
        for event in &timeline.events {
            let sum = operations.entry(event.kind).or_default();
            sum.count += 1;
            sum.us += event.nanos as f64 / 1e3;
            sum.bytes += event.bytes;
        }
        RankSums { rank, node, calls_us: calls.collect(), operations }
    }

    fn bytes(&self, kinds: &[Kind]) -> u64 {
        kinds.iter().map(|kind| self.operations[kind].bytes).sum()
    }
}

impl Report {
    /// Of the round that was recorded on these ranks.
    pub fn new(
        config: &Config,
        machines: &Machines,
        verdict: &Verdict,
        nodes: &NodeMap,
        timelines: &[Timeline],
        trace: &Path,
    ) -> Self {
        let ranks = (0..).zip(timelines);
        Report {
            config: config.clone(),
            machines: machines.count(),
            verified: verdict.verified,
            rows_verified: verdict.right,
            ranks: ranks.map(|(rank, timeline)| RankSums::of(rank, nodes.node_of(rank), timeline)).collect(),
            trace: trace.to_owned(),
        }
    }

    fn sums(&self) -> String {
        let header = ["rank", "node"].into_iter().chain(CALLS).chain(Kind::ALL.map(Kind::name));
        let mut table = table::figures(header.chain(["moved", "summed"]).collect::<Vec<_>>());
        for rank in &self.ranks {
            let mut row = vec![rank.rank.to_string(), rank.node.to_string()];
            row.extend(CALLS.map(|name| time(rank.calls_us.get(name).copied().unwrap_or(0.0))));
            row.extend(Kind::ALL.map(|kind| time(rank.operations[&kind].us)));
            row.push(volume(rank.bytes(&[Kind::Put, Kind::PutRows])));
            row.push(volume(rank.bytes(&[Kind::Reduce])));
            table.add_row(row);
        }
        table.trim_fmt()
    }
}

impl command::Report for Report {
    /// Conditions, sums, and what to do with the trace.
    fn text(&self) -> String {
        let Words { ranks, rows, routing, schedule } = Words::of(&self.config);
        let verdict = match self.verified {
            true => format!("verified: {} rows bit-exact", self.rows_verified),
            false => format!("NOT VERIFIED: only {} rows are bit-exact", self.rows_verified),
        };
        let machines = machines::words(self.machines);
        format!(
            "ranks: {ranks}, {machines}\nrows: {rows}\nrouting: {routing}\nschedule: {schedule}\n{verdict}\n\n{}\n\n\
             {}: open it in https://ui.perfetto.dev",
            self.sums(),
            self.trace.display(),
        )
    }

    fn is_right(&self) -> bool {
        self.verified
    }
}

#[cfg(test)]
pub mod tests {
    use sidelane::exec::{Call, Event};

    use super::*;
    use crate::command::Report as _;
    use crate::command::tests::assert_page;

    const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/trace.md"));

    /// Eight ranks on two nodes.
    pub fn config() -> Config {
        crate::bench::sample().config.config
    }

    fn event(kind: Kind, nanos: u64, bytes: u64) -> Event {
        Event {
            kind,
            flag: None,
            of: 0,
            part: 0,
            licence: false,
            track: 0,
            peer: 0,
            start_ns: 0,
            nanos,
            bytes,
        }
    }

    fn sample() -> Report {
        let calls = CALLS.map(|name| Call { name: name.into(), start_ns: 0, nanos: 1_500_000 });
        let events = vec![
            event(Kind::Put, 1000, 10),
            event(Kind::PutRows, 2000, 2_000_000),
            event(Kind::PutRows, 500, 1_000_000),
        ];
        let timelines =
            [Timeline { calls: calls.into(), events, ..Timeline::default() }, Timeline::default()];
        let verdict = Verdict { verified: true, right: 7 };
        let (config, nodes) = (config(), NodeMap::from_labels(&["b", "a"]));
        let trace = Path::new("some/trace.json");
        Report::new(&config, &vec![0, 0].into(), &verdict, &nodes, &timelines, trace)
    }

    #[test]
    fn operations_are_summed_by_rank_and_kind() {
        let report = sample();
        assert_eq!(report.ranks[0].operations[&Kind::PutRows], Sum { count: 2, us: 2.5, bytes: 3_000_000 });
        assert_eq!(report.ranks[0].operations[&Kind::Wait], Sum::default());
        assert_eq!((report.ranks[1].node, report.ranks[1].operations[&Kind::PutRows]), (1, Sum::default()));
        let text = report.text();
        for words in [
            "8 on 2 nodes (4 + 4), 1 machine\n",
            "1.50 ms",
            "2.50 us",
            "3.0 MB",
            "7 rows bit-exact",
            "some/trace.json",
        ] {
            assert!(text.contains(words), "{words:?} in\n{text}");
        }
    }

    #[test]
    fn a_failed_verification_cannot_be_overlooked() {
        let text = Report { verified: false, ..sample() }.text();
        assert!(text.contains("NOT VERIFIED: only 7 rows"), "{text}");
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json_and_every_kind() {
        assert_page(DOCUMENT, &[sample()], |key| match key.split('.').collect::<Vec<_>>()[..] {
            ["config", _, ..] => None,
            ["ranks", "operations", _, ref below @ ..] => {
                Some([&["ranks", "operations", "KIND"], below].concat().join("."))
            }
            _ => Some(key.to_owned()),
        });
        for kind in Kind::ALL {
            assert!(DOCUMENT.contains(&format!("- `{}`", kind.name())), "{kind:?}");
        }
    }
}
