//! Steps on the bed. One boot serves them all; each finds the bed intact and may leave it in any
//! state.
//!
//! A new step is a function in a file of its own and a line in [`STEPS`].

mod bench;
mod collectives;
mod compare;
mod conformance;
mod device;
mod loss;
mod nics;
mod rebuilt;

use std::time::Duration;

use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::report::Comparison;

/// One thing to see.
pub struct Step {
    /// To ask for it by.
    pub name: &'static str,
    /// Meaning of its success.
    pub about: &'static str,
    /// How long it may take.
    within: Duration,
    /// And for each round of what alternates.
    each: Duration,
    /// Does it.
    pub run: fn(&mut Bed, &Asked, Deadline) -> Result<Findings>,
}

impl Step {
    const fn each(mut self, seconds: u64) -> Self {
        self.each = Duration::from_secs(seconds);
        self
    }

    /// How long it may take, if so much is asked for.
    pub fn within(&self, asked: &Asked) -> Duration {
        self.within + self.each * asked.rounds
    }
}

/// Requests of the caller.
pub struct Asked {
    /// How often to alternate between ours and the baseline.
    pub rounds: u32,
}

/// Results of a step.
#[derive(Default)]
pub struct Findings {
    /// In a few words.
    pub note: String,
    /// Figures compared with a baseline's.
    pub comparisons: Vec<Comparison>,
}

impl From<String> for Findings {
    fn from(note: String) -> Self {
        Self { note, ..Self::default() }
    }
}

/// In the order in which they are done.
pub const STEPS: [Step; 11] = [
    step("nics", "NICs active, wire and clocks right", 30, nics::run),
    step("conformance", "the contract of a lane, for each way to signal", 120, conformance::run),
    step("bench", "2 x 2 ranks, pxn and direct: every row verified, every packet counted", 500, bench::run),
    step(
        "device",
        "rows from device to device, by a fake driver: bit-exact, no host staging",
        400,
        device::run,
    ),
    step("collectives", "all-reduce, broadcast, all-to-all ..., each right", 240, collectives::run),
    step("compare", "sidelane put-bench beside perftest, interleaved", 120, compare::run).each(90),
    step("cut", "wire cut in mid-dispatch: every rank names a lost one, or its own port", 240, loss::cut),
    step("mended", "wire whole again: verified", 400, bench::again),
    step("rebuilt", "rebuilt in mid-dispatch: old packets come late and touch nothing", 360, rebuilt::run),
    step("killed", "machine off in mid-dispatch: every rank left names a lost one", 300, loss::killed),
    step("booted", "machine on again: verified", 400, bench::again),
];

const fn step(
    name: &'static str,
    about: &'static str,
    seconds: u64,
    run: fn(&mut Bed, &Asked, Deadline) -> Result<Findings>,
) -> Step {
    Step { name, about, within: Duration::from_secs(seconds), each: Duration::ZERO, run }
}
