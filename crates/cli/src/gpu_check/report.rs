//! The whole report, and its JSON. Keys are described in `docs/gpu-check.md`.

use serde::{Deserialize, Serialize};
use sidelane::device::Probe;

use super::args::GpuCheckArgs;
use super::blocking;
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
    /// Of the time, if they were given.
    pub minutes: Option<f64>,
    /// Whether all that was checked is right.
    pub correct: bool,
    /// Whether transfers completed while every multiprocessor was held, and the controls did not.
    pub audited: bool,
    /// Nothing is wrong, and no row of the audit shows nothing, on a GPU.
    pub holds: bool,
    /// Meaning of the answers of locks and queues.
    pub conclusions: Vec<String>,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn new(args: &GpuCheckArgs, probe: &Probe, rows: Vec<Row>) -> Self {
        let facts = probe.devices.iter().find(|facts| facts.device == args.device);
        let correct = rows.iter().all(|row| row.state != State::Wrong);
        // What is not done in it is named there, and asks no question of its own.
        let audit = || rows.iter().filter(|row| row.part == Part::Audit && row.state != State::Skipped);
        let void = audit().any(|row| row.state != State::Right);
        let audited = audit().next().is_some() && !void;
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
            minutes: args.minutes,
            correct,
            audited,
            holds: correct && !void && !probe.stand_in,
            conclusions: blocking::conclusions(&rows),
            rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::{Answer, Time};
    use super::*;
    use crate::command::Report as _;
    use crate::command::tests::assert_page;

    fn report() -> Report {
        let row = |part, state| Row {
            part,
            what: "a copy".to_owned(),
            state,
            found: "found".to_owned(),
            shows: "shown".to_owned(),
            open: Some("more GPUs".to_owned()),
            time: Some(Time { p50_us: 2.5, min_us: 2.0, max_us: 3.0, samples: 9 }),
            answer: Some(Answer::Blocks),
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
            minutes: Some(10.0),
            correct: true,
            audited: true,
            holds: true,
            conclusions: vec!["so it is".to_owned()],
            rows: vec![row(Part::Driver, State::Right), row(Part::Audit, State::Void)],
        }
    }

    #[test]
    fn the_page_names_the_keys_that_are_written() {
        let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gpu-check.md"));
        assert_page(page, &[report()], |key| Some(key.to_owned()));
    }

    #[test]
    fn the_text_holds_rows_and_a_verdict_that_cannot_be_overlooked() {
        let mut report = report();
        let good = report.text();
        for words in [
            "132 SMs",
            "right",
            "void",
            "2.50 us (2.00 us to 3.00 us, 9 samples)",
            "open: more GPUs",
            "so it is",
            "All right",
        ] {
            assert!(good.contains(words), "{words:?} in\n{good}");
        }
        report.audited = false;
        assert!(report.text().ends_with("The audit was not run, or not seen."));
        report.holds = false;
        assert!(report.text().contains("the audit does not hold"));
        report.stand_in = true;
        assert!(report.text().contains("THE STAND-IN DRIVER"));
        report.correct = false;
        assert!(report.text().ends_with("NOT RIGHT: see the rows that say WRONG."));
    }

    /// A report of these rows, on a GPU.
    fn of(rows: Vec<Row>) -> Report {
        let args = GpuCheckArgs {
            device: 0,
            quick: false,
            parts: Vec::new(),
            minutes: None,
            case_seconds: 10,
            size: None,
            json: None,
        };
        let probe = Probe {
            version: sidelane::device::Version(13000),
            library: "libcuda.so.1".to_owned(),
            stand_in: false,
            ..crate::doctor::tests::probe(1)
        };
        Report::new(&args, &probe, rows)
    }

    fn row(part: Part, state: State, answer: Option<Answer>) -> Row {
        let text = || "text".to_owned();
        Row { part, what: text(), state, found: text(), shows: text(), open: None, time: None, answer }
    }

    #[test]
    fn report_holds_when_rows_are_only_skipped() {
        let skipped = of(Part::ALL.map(|part| row(part, State::Skipped, None)).to_vec());
        assert_eq!((skipped.correct, skipped.audited, skipped.holds), (true, false, true));
        // Those of the same GPU need CUDA 13.1.
        let audit = [State::Right, State::Skipped].map(|state| row(Part::Audit, state, None));
        let partly = of(audit.to_vec());
        assert_eq!((partly.audited, partly.holds), (true, true));
        let void = of(vec![row(Part::Audit, State::Void, None)]);
        assert_eq!((void.correct, void.audited, void.holds), (true, false, false));
    }

    #[test]
    fn report_says_what_answers_mean() {
        let answered = |part, answer| row(part, State::Answered, Some(answer));
        let pass = of(vec![answered(Part::Locks, Answer::Passes), answered(Part::Queues, Answer::Passes)]);
        assert!(pass.holds && pass.conclusions.iter().all(|said| said.contains("all pass")));
        let block = of(vec![answered(Part::Locks, Answer::Blocks), answered(Part::Queues, Answer::Blocks)]);
        assert!(block.holds, "answers are findings");
        assert!(block.conclusions[0].contains("(text)"), "{:?}", block.conclusions);
        assert!(block.conclusions[0].ends_with("the helper process is needed."));
        assert!(block.conclusions[1].contains("holds up copies of other streams (text)"));
        assert!(of(Vec::new()).conclusions.is_empty());
    }
}
