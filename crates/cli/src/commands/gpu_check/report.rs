//! The whole report, and its JSON. Keys are described in `docs/gpu-check.md`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sidelane::device::{Driver, Probe, Version};
use sidelane_testkit::device::lock_and_queue::Answer;
use sidelane_testkit::timing::stats::{Summary, summary};

use super::{GpuCheckArgs, Part};
use crate::command_frame::{self, Program};
use crate::commands::doctor::DriverReport;
use crate::error::CliError;
use crate::options::word;
use crate::table;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub program: Program,
    #[serde(flatten)]
    pub driver: DriverReport,
    pub device: u32,
    pub multiprocessors: u32,
    pub memory: u64,
    pub quick: bool,
    pub minutes: Option<f64>,
    correct: bool,
    /// Whether transfers completed while every multiprocessor was held, and the controls did not.
    audited: bool,
    /// Nothing is wrong, and no row of the audit shows nothing, on a GPU.
    pub holds: bool,
    /// Meaning of the answers of locks, queues and the audit.
    pub conclusions: Vec<String>,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn new(args: &GpuCheckArgs, probe: &Probe, rows: Vec<Row>) -> Self {
        let facts = probe.devices.iter().find(|facts| facts.device == args.device);
        let correct = rows.iter().all(|row| row.state != State::Wrong);
        // Skipped rows ask no question of their own. Answers and figures are neither right nor
        // wrong.
        let judged = |row: &&Row| matches!(row.state, State::Right | State::Wrong | State::Void);
        let audit = || rows.iter().filter(|row| row.part == Part::Audit).filter(judged);
        let void = audit().any(|row| row.state != State::Right);
        let audited = audit().next().is_some() && !void;
        Report {
            program: Program::HERE,
            driver: DriverReport::new(probe, args.device),
            device: args.device,
            multiprocessors: facts.map_or(0, |facts| facts.multiprocessors),
            memory: facts.map_or(0, |facts| facts.memory),
            quick: args.quick,
            minutes: args.minutes,
            correct,
            audited,
            holds: correct && !void && !probe.fake_driver,
            conclusions: conclusions(&rows),
            rows,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Right,
    Wrong,
    /// It ran, and shows nothing here: its own control does not hold.
    Void,
    Measured,
    Answered,
    Skipped,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Right => "right",
            State::Wrong => "WRONG",
            State::Void => "void",
            State::Measured | State::Answered => "",
            State::Skipped => "not done",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub part: Part,
    pub what: String,
    pub state: State,
    pub found: String,
    pub shows: String,
    /// Open question that only several GPUs could answer.
    pub open: Option<String>,
    pub time: Option<Time>,
    /// Of the lock test and the queue test, and of copies that the driver makes as it likes.
    pub answer: Option<Answer>,
    pub limited: Option<Limited>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limited {
    pub blocks: Option<u32>,
    pub slowdown: f64,
}

impl Row {
    /// One without a figure.
    pub fn new(part: Part, state: State, what: &str, found: String, shows: &str) -> Self {
        let (what, shows) = (what.to_owned(), shows.to_owned());
        Row { part, what, state, found, shows, open: None, time: None, answer: None, limited: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Time {
    #[serde(flatten)]
    pub of: Summary,
    pub samples: usize,
}

impl Time {
    pub fn of(samples: &[f64]) -> Self {
        Time { of: summary(samples), samples: samples.len() }
    }
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let Report { program, driver, device, multiprocessors, .. } = self;
        let DriverReport { library, driver, fake_driver, name } = driver;
        let mut text = format!(
            "{}\ndevice {device}: {name}, {multiprocessors} SMs; driver for CUDA {driver} ({library})\n",
            program.text()
        );
        if *fake_driver {
            text += "THE FAKE DRIVER: no GPU is here. Times mean nothing, and the audit shows nothing.\n";
        }
        for &part in Part::value_variants() {
            let rows: Vec<&Row> = self.rows.iter().filter(|row| row.part == part).collect();
            if !rows.is_empty() {
                text += &format!("\n{}\n{}\n", word(&part), of(&rows));
            }
        }
        if !self.conclusions.is_empty() {
            text += &format!("\n{}\n", self.conclusions.join("\n"));
        }
        text + "\n" + verdict(self)
    }

    fn is_right(&self) -> bool {
        self.holds
    }
}

fn of(rows: &[&Row]) -> String {
    let mut table = table::new(["", "what", "found", "what it shows"]);
    for row in rows {
        let time = row.time.map(|Time { of, samples }| {
            let [p50, min, max] = [of.p50_us, of.min_us, of.max_us].map(table::time);
            format!("{p50} ({min} to {max}, {samples} samples)")
        });
        let found: Vec<&str> = time
            .iter()
            .map(String::as_str)
            .chain([row.found.as_str()])
            .filter(|text| !text.is_empty())
            .collect();
        let open = row.open.as_ref().map_or(String::new(), |open| format!("\nopen: {open}"));
        table.add_row([row.state.name(), &row.what, &found.join("\n"), &format!("{}{open}", row.shows)]);
    }
    table::lines(&table)
}

fn verdict(report: &Report) -> &'static str {
    match (report.correct, report.holds, report.driver.fake_driver) {
        (false, ..) => "NOT RIGHT: see the rows that say WRONG.",
        (true, _, true) => {
            "All that was checked is right on the fake driver. No GPU was here: nothing is shown about one."
        }
        (true, false, false) => {
            "All that was checked is right, but the audit does not hold: it is open whether transfers need SMs."
        }
        (true, true, false) if !report.audited => {
            "All right: every check that was run. The audit was not run, or not seen."
        }
        (true, true, false) => "All right: every check, and transfers that complete while every SM is held.",
    }
}

pub struct Checks {
    part: Part,
    pub wrong: bool,
    fake_driver: bool,
}

const FAKE_DRIVER: &str = "nothing: the fake driver's times are not a GPU's";

/// Question of a row, and the meaning of its answer.
#[derive(Clone, Copy)]
pub struct About<'a> {
    what: &'a str,
    shows: &'a str,
    /// Open question that only several GPUs could answer.
    open: Option<&'a str>,
}

impl<'a> About<'a> {
    pub fn new(what: &'a str, shows: &'a str) -> Self {
        About { what, shows, open: None }
    }

    /// Open question that only several GPUs could answer.
    pub fn open(self, open: impl Into<Option<&'a str>>) -> Self {
        About { open: open.into(), ..self }
    }
}

impl Checks {
    pub fn new(part: Part) -> Self {
        let fake_driver = Driver::open().is_ok_and(|driver| driver.is_fake());
        Checks { part, wrong: false, fake_driver }
    }

    /// Runs a check, and tells what it found. What is wrong ends nothing.
    pub fn check(
        &mut self,
        about: About<'_>,
        check: impl FnOnce() -> Result<String, CliError>,
    ) -> Result<bool, CliError> {
        self.judged(about, check().map(|found| (State::Right, found)))
    }

    /// Tells what was found, and how it came out: an error is wrong. Gives whether it is right.
    pub fn judged(
        &mut self,
        about: About<'_>,
        found: Result<(State, String), CliError>,
    ) -> Result<bool, CliError> {
        let (state, found) = found.unwrap_or_else(|error| (State::Wrong, error.to_string()));
        self.tell(about, state, found)?;
        Ok(state == State::Right)
    }

    /// Whether the driver is for the version that a feature needs. Where it is not, that is told,
    /// and nothing is wrong.
    pub fn has(
        &mut self,
        about: About<'_>,
        seen: Version,
        (feature, needed): (&str, Version),
    ) -> Result<bool, CliError> {
        if seen >= needed {
            return Ok(true);
        }
        let found = format!("skipped: {feature} needs CUDA {needed}, and the driver is for CUDA {seen}");
        self.tell(about, State::Skipped, found)?;
        Ok(false)
    }

    pub fn answered(&mut self, about: About<'_>, answer: Answer, found: String) -> Result<(), CliError> {
        emit(&Row { answer: Some(answer), ..self.row(about, State::Answered, found) })
    }

    pub fn measured(
        &mut self,
        about: About<'_>,
        samples: &[f64],
        found: impl Into<String>,
    ) -> Result<(), CliError> {
        emit(&self.figure(about, samples, found.into()))
    }

    pub fn limited(
        &mut self,
        about: About<'_>,
        samples: &[f64],
        found: String,
        limited: Limited,
    ) -> Result<(), CliError> {
        emit(&Row { limited: Some(limited), ..self.figure(about, samples, found) })
    }

    fn figure(&mut self, about: About<'_>, samples: &[f64], found: String) -> Row {
        let shows = if self.fake_driver { FAKE_DRIVER } else { about.shows };
        let row = self.row(About { shows, ..about }, State::Measured, found);
        Row { time: Some(Time::of(samples)), ..row }
    }

    pub fn tell(&mut self, about: About<'_>, state: State, found: String) -> Result<(), CliError> {
        emit(&self.row(about, state, found))
    }

    fn row(&mut self, about: About<'_>, state: State, found: String) -> Row {
        self.wrong |= state == State::Wrong;
        // A rank speaks for the part that started it.
        let part = if self.part == Part::Rank { Part::Processes } else { self.part };
        Row { open: about.open.map(str::to_owned), ..Row::new(part, state, about.what, found, about.shows) }
    }
}

fn emit(row: &Row) -> Result<(), CliError> {
    command_frame::print(&serde_json::to_string(row).expect("texts and numbers are always JSON"))
}

fn conclusions(rows: &[Row]) -> Vec<String> {
    let of = |part: Part| rows.iter().filter(move |row| row.part == part && row.answer.is_some());
    let blocked = |part: Part| -> Vec<&str> {
        of(part).filter(|row| row.answer == Some(Answer::Blocks)).map(|row| row.what.as_str()).collect()
    };
    let words = [
        (
            Part::Locks,
            "Locks: all pass. Threads may call the driver while a stream of their process waits.",
            "Locks: a driver call blocks other threads while a stream waits",
            "A thread of the same process cannot end such a wait by calls of the driver: what a stream waits for must be enqueued before.",
        ),
        (
            Part::Queues,
            "Queues: all pass. A stream that waits holds up no copies of other streams.",
            "Queues: a stream that waits holds up copies of other streams",
            "There every cause must be enqueued before its wait.",
        ),
        (
            Part::Audit,
            "Copies on one GPU: engines make all of them.",
            "Copies on one GPU: SMs make some",
            "Engines make the others.",
        ),
    ];
    let asked = words.into_iter().filter(|&(part, ..)| of(part).next().is_some());
    asked
        .map(|(part, pass, block, so)| match &blocked(part)[..] {
            [] => pass.to_owned(),
            all if part == Part::Audit && all.len() == of(part).count() => {
                "Copies on one GPU: SMs make all of them.".to_owned()
            }
            calls => format!("{block} ({}). {so}", calls.join("; ")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page, assert_words};

    /// A report in which every key is present.
    fn report() -> Report {
        let row = |part, state| Row {
            open: Some("more GPUs".to_owned()),
            limited: Some(Limited { blocks: Some(33), slowdown: 1.25 }),
            time: Some(Time::of(&[2.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 3.0])),
            ..row(part, state, Some(Answer::Blocks))
        };
        let rows = vec![row(Part::Driver, State::Right), row(Part::Audit, State::Void)];
        let conclusions = vec!["so it is".to_owned()];
        Report { minutes: Some(10.0), audited: true, holds: true, conclusions, ..of(rows) }
    }

    #[test]
    fn the_page_names_the_keys_that_are_written() {
        assert_page("gpu-check.md", &[report()]);
    }

    #[test]
    fn the_text_holds_rows_and_a_verdict_that_cannot_be_overlooked() {
        let mut report = report();
        let good = report.text();
        assert_words(
            &good,
            &[
                "132 SMs",
                "right",
                "void",
                "2.50 us (2.00 us to 3.00 us, 9 samples)",
                "open: more GPUs",
                "so it is",
                "All right",
            ],
        );
        report.audited = false;
        assert!(report.text().ends_with("The audit was not run, or not seen."));
        report.holds = false;
        assert!(report.text().contains("the audit does not hold"));
        report.driver.fake_driver = true;
        assert!(report.text().contains("THE FAKE DRIVER"));
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
            report: Default::default(),
            calibrate: None,
        };
        let probe = Probe {
            version: sidelane::device::Version(13000),
            library: "libcuda.so.1".to_owned(),
            fake_driver: false,
            ..crate::commands::doctor::tests::probe(1)
        };
        Report::new(&args, &probe, rows)
    }

    fn row(part: Part, state: State, answer: Option<Answer>) -> Row {
        Row { answer, ..Row::new(part, state, "text", "text".to_owned(), "text") }
    }

    #[test]
    fn report_holds_when_rows_are_only_skipped() {
        let skipped =
            of(Part::value_variants().iter().map(|&part| row(part, State::Skipped, None)).collect());
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
        let parts = [Part::Locks, Part::Queues, Part::Audit];
        let pass = of(parts[..2].iter().map(|&part| answered(part, Answer::Passes)).collect());
        assert!(pass.holds && pass.conclusions.iter().all(|said| said.contains("all pass")));
        let block = of(parts.map(|part| answered(part, Answer::Blocks)).to_vec());
        assert!(block.holds, "answers are findings");
        assert!(block.conclusions[0].contains("(text)"), "{:?}", block.conclusions);
        assert!(block.conclusions[0].ends_with("must be enqueued before."));
        assert!(block.conclusions[1].contains("holds up copies of other streams (text)"));
        assert_eq!(block.conclusions[2], "Copies on one GPU: SMs make all of them.");
        let some = of(vec![answered(parts[2], Answer::Blocks), answered(parts[2], Answer::Passes)]);
        assert!(some.conclusions[0].contains("SMs make some (text)"));
        assert!(of(Vec::new()).conclusions.is_empty());
    }
}
