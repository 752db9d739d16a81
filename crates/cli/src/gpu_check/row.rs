//! One row of the report.

use serde::{Deserialize, Serialize};

use super::task::Part;
use crate::stats::{self, Summary};

/// How a row came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it must be.
    Right,
    /// Not as it must be.
    Wrong,
    /// It ran, and shows nothing here: its own control does not hold.
    Void,
    /// A figure, which nobody judges.
    Measured,
    /// An answer, which nobody judges either.
    Answered,
    /// It was not done, for the reason given.
    Skipped,
}

/// Whether something goes on while a stream waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    Passes,
    Blocks,
}

impl State {
    /// The word in the table and in JSON.
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

/// What was asked, what was found, what it shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub part: Part,
    pub what: String,
    pub state: State,
    pub found: String,
    pub shows: String,
    /// What only several GPUs could show.
    pub open: Option<String>,
    pub time: Option<Time>,
    /// Of the lock test and of the queue test.
    #[serde(default)]
    pub answer: Option<Answer>,
}

/// Times of one thing, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Time {
    pub p50_us: f64,
    pub min_us: f64,
    pub max_us: f64,
    pub samples: usize,
}

impl Time {
    /// Of at least one sample.
    pub fn of(samples: &[f64]) -> Self {
        let Summary { min, p50, max, .. } = stats::summary(samples);
        Time { p50_us: p50, min_us: min, max_us: max, samples: samples.len() }
    }
}
