//! What a part is told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::args::GpuCheckArgs;

/// The parts, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    Driver,
    Kernels,
    Exchange,
    Processes,
    /// A rank that the part before starts.
    Rank,
    Audit,
    Activity,
    Interference,
    Planner,
    /// A process that the part before starts.
    Helper,
    Costs,
}

impl Part {
    /// Those that are run.
    pub const ALL: [Part; 9] = [
        Part::Driver,
        Part::Kernels,
        Part::Exchange,
        Part::Processes,
        Part::Audit,
        Part::Activity,
        Part::Interference,
        Part::Planner,
        Part::Costs,
    ];

    /// The word in the table and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Part::Driver => "driver",
            Part::Kernels => "kernels",
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
}

impl Task {
    pub fn of(args: &GpuCheckArgs) -> Task {
        let GpuCheckArgs { device, quick, size, .. } = *args;
        Task { part: Part::Driver, device, quick, size }
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
