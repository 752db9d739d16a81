//! Telling rows: each as soon as it is known, in a line of its own.

use sidelane::device::Version;

use super::row::{Answer, Row, State, Time};
use super::task::Part;
use crate::command;
use crate::error::CliError;

/// The rows of a part.
pub struct Checks {
    part: Part,
    wrong: bool,
}

/// What a row is about.
#[derive(Clone, Copy)]
pub struct About<'a> {
    pub what: &'a str,
    pub shows: &'a str,
    /// What only several GPUs could show.
    pub open: Option<&'a str>,
}

impl Checks {
    pub fn new(part: Part) -> Self {
        Checks { part, wrong: false }
    }

    /// Whether nothing was wrong.
    pub fn all_right(&self) -> bool {
        !self.wrong
    }

    /// Runs a check, and tells what it found. What is wrong ends nothing.
    pub fn check(
        &mut self,
        about: About<'_>,
        check: impl FnOnce() -> Result<String, CliError>,
    ) -> Result<bool, CliError> {
        let (state, found) = match check() {
            Ok(found) => (State::Right, found),
            Err(error) => (State::Wrong, error.to_string()),
        };
        self.tell(about, state, found, None)?;
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
        self.tell(about, State::Skipped, found, None)?;
        Ok(false)
    }

    /// Tells an answer.
    pub fn answered(&mut self, about: About<'_>, answer: Answer, found: String) -> Result<(), CliError> {
        let row = Row { answer: Some(answer), ..self.row(about, State::Answered, found, None) };
        emit(&row)
    }

    /// Tells a figure.
    pub fn measured(
        &mut self,
        about: About<'_>,
        samples: &[f64],
        found: impl Into<String>,
    ) -> Result<(), CliError> {
        self.tell(about, State::Measured, found.into(), Some(Time::of(samples)))
    }

    /// Tells that something is wrong beside what is checked.
    pub fn failed(&mut self, what: &str, error: &CliError) -> Result<(), CliError> {
        let about = About { what, shows: "the rest of this part was not run", open: None };
        let row = self.row(about, State::Wrong, error.to_string(), None);
        emit(&row)
    }

    /// Tells a row.
    pub fn tell(
        &mut self,
        about: About<'_>,
        state: State,
        found: String,
        time: Option<Time>,
    ) -> Result<(), CliError> {
        let row = self.row(about, state, found, time);
        emit(&row)
    }

    fn row(&mut self, about: About<'_>, state: State, found: String, time: Option<Time>) -> Row {
        self.wrong |= state == State::Wrong;
        // A rank speaks for the part that started it.
        let part = if self.part == Part::Rank { Part::Processes } else { self.part };
        let (what, shows) = (about.what.to_owned(), about.shows.to_owned());
        Row { part, what, state, found, shows, open: about.open.map(str::to_owned), time, answer: None }
    }
}

fn emit(row: &Row) -> Result<(), CliError> {
    command::print(&serde_json::to_string(row).expect("texts and numbers are always JSON"))
}
