//! The table of features by executor, as it was found.

use serde::Serialize;
use sidelane::device::Probe;
use sidelane::ep::{CallExecutor, Feature};
use sidelane_testkit::conformance::case_run::Line;
use sidelane_testkit::conformance::outcomes::{Cell, Wrong};
use sidelane_testkit::conformance::suite::RANKS_PER_NODE;

use super::{ConformanceArgs, PlaceArg};
use crate::command_frame::{self, Program};
use crate::commands::doctor::DriverReport;
use crate::table;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceReport {
    #[serde(flatten)]
    driver: DriverReport,
    devices: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    program: Program,
    seed: u64,
    ranks_per_node: Vec<u32>,
    device: Option<DeviceReport>,
    /// Why nothing ran on a device, if it was to.
    device_reason: Option<String>,
    correct: bool,
    cells: Vec<Cell>,
    wrong: Vec<Wrong>,
}

impl Report {
    pub fn new(args: &ConformanceArgs, device: Option<Result<Probe, String>>, lines: &[Line]) -> Self {
        let (device, device_reason) = match device {
            Some(Ok(probe)) => {
                let (driver, devices) = (DriverReport::new(&probe, 0), probe.devices.len());
                (Some(DeviceReport { driver, devices }), None)
            }
            Some(Err(reason)) => (None, Some(reason)),
            None => (None, None),
        };
        let shown = |executor: &CallExecutor| match args.place {
            None => true,
            Some(place) => (*executor == CallExecutor::HostStepper) == (place == PlaceArg::Host),
        };
        let asked = |feature: &Feature| args.only.is_empty() || args.only.contains(feature);
        let mut cells = Vec::new();
        for feature in Feature::ALL.into_iter().filter(asked) {
            let executors = CallExecutor::ALL.into_iter().filter(shown);
            cells.extend(executors.map(|executor| Cell::new(feature, executor, lines, &device_reason)));
        }
        let wrong: Vec<Wrong> = lines.iter().filter_map(Wrong::of).collect();
        Report {
            program: Program::HERE,
            seed: args.seed,
            ranks_per_node: RANKS_PER_NODE.to_vec(),
            device,
            device_reason,
            correct: wrong.is_empty(),
            cells,
            wrong,
        }
    }

    fn head(&self) -> String {
        let nodes = self.ranks_per_node.iter().map(u32::to_string).collect::<Vec<_>>().join(" and ");
        let ranks: u32 = self.ranks_per_node.iter().sum();
        let mut lines = vec![("ranks", format!("{ranks} processes, on emulated nodes of {nodes}"))];
        if let Some(DeviceReport { driver: DriverReport { library, driver, fake_driver, name }, devices }) =
            &self.device
        {
            let here = if *fake_driver { "; the fake driver: no GPU is here" } else { "" };
            lines.push(("device", format!("{devices} x {name}, CUDA {driver} ({library}){here}")));
        }
        if let Some(reason) = &self.device_reason {
            lines.push(("device", format!("not run: {reason}")));
        }
        lines.push(("seed", self.seed.to_string()));
        table::head(&lines)
    }
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let mut executors: Vec<&str> = Vec::new();
        for cell in &self.cells {
            if !executors.contains(&cell.executor) {
                executors.push(cell.executor);
            }
        }
        let mut table = table::new(["feature"].into_iter().chain(executors.iter().copied()));
        for row in self.cells.chunks(executors.len().max(1)) {
            let name = row.first().map_or(String::new(), |cell| cell.feature.to_owned());
            table.add_row([name].into_iter().chain(row.iter().map(Cell::text)));
        }
        let wrong: String = self.wrong.iter().map(Wrong::text).collect();
        let verdict = match self.correct {
            true => "All bits are the reference's, and what the table lacks is refused by name.",
            false => "NOT RIGHT: see the lines that say WRONG.",
        };
        format!("{}\n{}\n\n{wrong}{verdict}", self.head(), table::lines(&table))
    }

    fn is_right(&self) -> bool {
        self.correct
    }
}

#[cfg(test)]
mod tests {
    use sidelane_testkit::conformance::case::Way;
    use sidelane_testkit::conformance::case_run::{Outcome, Run};
    use sidelane_testkit::conformance::outcomes::{Finding, State};
    use sidelane_testkit::difference::Difference;

    use super::*;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::assert_page;

    fn args(place: Option<PlaceArg>, only: &[Feature]) -> ConformanceArgs {
        ConformanceArgs { place, only: only.to_vec(), seed: 7, report: Default::default() }
    }

    /// Runs of this feature on the host, all with this outcome.
    fn of(feature: Feature, outcome: &Outcome) -> Vec<Line> {
        let runs = Run::all(Way::Host).filter(|run| run.case().feature == feature);
        runs.map(|run| Line { run, executor: "host-stepper".to_owned(), outcome: outcome.clone() }).collect()
    }

    fn wrong() -> Outcome {
        Outcome::Wrong(vec![Difference {
            rank: 1,
            what: "sums of dispatch 0".to_owned(),
            row: 3,
            column: 5,
            expected: "1 (0x3f80)".to_owned(),
            seen: "2 (0x4000)".to_owned(),
        }])
    }

    #[test]
    fn the_page_names_the_keys_that_are_written() {
        let probe = Probe { fake_driver: true, ..crate::commands::doctor::tests::probe(1) };
        let judged = of(Feature::Gradients, &wrong());
        assert_page("conformance.md", &[Report::new(&args(None, &[]), Some(Ok(probe)), &judged)]);
    }

    #[test]
    fn flipped_bit_is_reported_as_wrong_with_its_place() {
        let mut judged = of(Feature::Gradients, &Outcome::Equal);
        let right = Report::new(&args(Some(PlaceArg::Host), &[Feature::Gradients]), None, &judged);
        assert!(right.is_right() && right.text().contains(&format!("equal ({} cases)", judged.len())));
        judged[1].outcome = wrong();
        let report = Report::new(&args(Some(PlaceArg::Host), &[Feature::Gradients]), None, &judged);
        let text = report.text();
        assert!(!report.is_right() && text.contains("WRONG (1 case)"), "{text}");
        let first = "rank 1: sums of dispatch 0, row 3, column 5: 2 (0x4000) is seen, expected 1 (0x3f80)";
        assert!(text.contains(first) && text.ends_with("NOT RIGHT: see the lines that say WRONG."), "{text}");
    }

    #[test]
    fn unserved_cell_is_refused_and_cell_without_cases_is_not_run() {
        let refused = Outcome::Refused("release without combine".to_owned());
        let judged = of(Feature::Release, &refused);
        let report =
            Report::new(&args(None, &[Feature::Release]), Some(Err("no driver".to_owned())), &judged);
        let states: Vec<_> = report.cells.iter().map(|cell| (cell.served, cell.state)).collect();
        let released = |executor| Feature::Release.is_served_by(executor);
        let expected = CallExecutor::ALL.map(|executor| {
            let state = if executor == CallExecutor::HostStepper { State::Refused } else { State::NotRun };
            (released(executor), state)
        });
        assert_eq!(states, expected);
        let text = report.text();
        assert!(text.contains("not run: no driver") && text.contains("not run: no device"), "{text}");
        // A case that also asks for something else shows nothing about its own feature.
        let judged = of(Feature::Gradients, &Outcome::Refused("rank-major rows".to_owned()));
        let report = Report::new(&args(Some(PlaceArg::Host), &[Feature::Gradients]), None, &judged);
        assert_eq!(report.cells[0].state, State::NotRun);
        assert!(report.text().contains("its cases also ask for"));
    }

    #[test]
    fn finding_of_a_feature_is_wrong_with_one_wrong_case() {
        let find = |outcome: Outcome| {
            let run = Run::all(Way::Slots).find(|run| run.case().feature == Feature::Release).unwrap();
            let all = Finding::of(&[Line { run, executor: "constant-program".to_owned(), outcome }]);
            assert_eq!(all.len(), Feature::ALL.len());
            all.into_iter().find(|finding| finding.feature == Feature::Release.name()).unwrap()
        };
        let right = find(Outcome::Equal);
        assert_eq!(right.correct, Some(true));
        assert!(right.text.ends_with("constant-program: equal (1 case)"), "{}", right.text);
        let found = find(wrong());
        assert_eq!(found.correct, Some(false));
        assert!(found.text.contains("row 3, column 5"), "{}", found.text);
        assert_eq!(Finding::of(&[])[0].correct, None);
    }
}
