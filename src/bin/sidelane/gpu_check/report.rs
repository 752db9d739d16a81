//! The whole report, and its JSON. Keys are described in `docs/gpu-check.md`.

use serde::{Deserialize, Serialize};
use sidelane::device::Probe;

use super::args::GpuCheckArgs;
use super::row::{Row, State};
use super::task::Part;

/// Everything that is known afterwards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub version: String,
    pub commit: String,
    pub target: String,
    pub driver: String,
    pub library: String,
    /// Whether there was no GPU at all.
    pub stand_in: bool,
    pub device: u32,
    pub name: String,
    pub multiprocessors: u32,
    pub memory: u64,
    pub quick: bool,
    /// Whether all that was checked is right.
    pub correct: bool,
    /// Whether transfers completed while every multiprocessor was held, and the controls did not.
    pub audited: bool,
    /// Both, on a GPU.
    pub holds: bool,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn new(args: &GpuCheckArgs, probe: &Probe, rows: Vec<Row>) -> Self {
        let facts = probe.devices.iter().find(|facts| facts.device == args.device);
        let correct = rows.iter().all(|row| row.state != State::Wrong);
        let mut audit = rows.iter().filter(|row| row.part == Part::Audit).peekable();
        let some = audit.peek().is_some();
        // What is not done in it is named there, and asks no question of its own.
        let audited = some && audit.all(|row| [State::Right, State::Skipped].contains(&row.state));
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: env!("SIDELANE_COMMIT").to_owned(),
            target: env!("SIDELANE_TARGET").to_owned(),
            driver: probe.version.to_string(),
            library: probe.library.clone(),
            stand_in: probe.stand_in,
            device: args.device,
            name: facts.map_or_else(String::new, |facts| facts.name.clone()),
            multiprocessors: facts.map_or(0, |facts| facts.multiprocessors),
            memory: facts.map_or(0, |facts| facts.memory),
            quick: args.quick,
            correct,
            audited,
            holds: correct && audited && !probe.stand_in,
            rows,
        }
    }

    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("texts and numbers are always JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::Time;
    use super::super::table;
    use super::*;
    use crate::json_keys::{documented, written};

    fn report() -> Report {
        let row = |part, state| Row {
            part,
            what: "a copy".to_owned(),
            state,
            found: "found".to_owned(),
            shows: "shown".to_owned(),
            open: Some("more GPUs".to_owned()),
            time: Some(Time { p50_us: 2.5, min_us: 2.0, max_us: 3.0, samples: 9 }),
        };
        Report {
            version: "0.1.0".to_owned(),
            commit: "abc".to_owned(),
            target: "x86_64".to_owned(),
            driver: "12.8".to_owned(),
            library: "libcuda.so.1".to_owned(),
            stand_in: false,
            device: 0,
            name: "GPU".to_owned(),
            multiprocessors: 132,
            memory: 1 << 37,
            quick: false,
            correct: true,
            audited: true,
            holds: true,
            rows: vec![row(Part::Driver, State::Right), row(Part::Audit, State::Void)],
        }
    }

    #[test]
    fn the_page_names_the_keys_that_are_written() {
        let page = include_str!("../../../../docs/gpu-check.md");
        assert_eq!(written(&report().json()), documented(page));
    }

    #[test]
    fn the_text_holds_rows_and_a_verdict_that_cannot_be_overlooked() {
        let mut report = report();
        let good = table::text(&report);
        for words in [
            "132 SMs",
            "right",
            "void",
            "2.50 us (2.00 us to 3.00 us, 9 samples)",
            "open: more GPUs",
            "All right",
        ] {
            assert!(good.contains(words), "{words:?} in\n{good}");
        }
        report.audited = false;
        assert!(table::text(&report).contains("the audit does not hold"));
        report.stand_in = true;
        assert!(table::text(&report).contains("THE STAND-IN DRIVER"));
        report.correct = false;
        assert!(table::text(&report).ends_with("NOT RIGHT: see the rows that say WRONG."));
    }
}
