//! What a part is told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::args::GpuCheckArgs;
use super::blocking::Case;

/// The parts, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    Driver,
    Kernels,
    Locks,
    Queues,
    /// A process that the two parts before start for each question.
    Case,
    Processes,
    /// A rank that the part before starts.
    Rank,
    Costs,
    Audit,
    Activity,
    Exchange,
    Planner,
    /// A process that the part before starts.
    Helper,
    Interference,
}

impl Part {
    /// Those that are run: first what a short time on a GPU is for, and processes before threads.
    pub const ALL: [Part; 11] = [
        Part::Driver,
        Part::Kernels,
        Part::Locks,
        Part::Queues,
        Part::Processes,
        Part::Costs,
        Part::Audit,
        Part::Activity,
        Part::Exchange,
        Part::Planner,
        Part::Interference,
    ];

    /// The part of a name, if there is one.
    pub fn named(name: &str) -> Option<Part> {
        Part::ALL.into_iter().find(|part| part.name() == name)
    }

    /// The word in the table and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Part::Driver => "driver",
            Part::Kernels => "kernels",
            Part::Locks | Part::Case => "locks",
            Part::Queues => "queues",
            Part::Exchange => "exchange",
            Part::Processes | Part::Rank => "processes",
            Part::Audit => "audit",
            Part::Activity => "activity",
            Part::Interference => "interference",
            Part::Planner | Part::Helper => "planner",
            Part::Costs => "costs",
        }
    }
}

/// One part, and how thorough it is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Task {
    pub part: Part,
    pub device: u32,
    pub quick: bool,
    /// Of the products, if it was said.
    pub size: Option<u32>,
    /// What one case of the lock test or the queue test may take, in seconds.
    #[serde(default = "usual_case_seconds")]
    pub case_seconds: u64,
    /// The question of such a case.
    #[serde(default)]
    pub case: Option<Case>,
}

/// The default of [`Task::case_seconds`].
pub const CASE_SECONDS: u64 = 10;

fn usual_case_seconds() -> u64 {
    CASE_SECONDS
}

impl Task {
    pub fn of(args: &GpuCheckArgs) -> Task {
        let GpuCheckArgs { device, quick, size, case_seconds, .. } = *args;
        Task { part: Part::Driver, device, quick, size, case_seconds, case: None }
    }

    /// What stands still for so long in a case is held up.
    pub fn case_bound(&self) -> Duration {
        Duration::from_secs(self.case_seconds)
    }

    /// So many of something, or fewer.
    pub fn few<T>(&self, all: T, quick: T) -> T {
        if self.quick { quick } else { all }
    }

    /// What a transfer may take before it counts as stuck.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.few(20, 10))
    }
}
