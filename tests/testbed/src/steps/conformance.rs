//! The lane's contract, over a real wire: the library's own suite, run by a process on each
//! machine.

use super::{Asked, Findings};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sidelane::{conformance, demand_passes};

/// The ways to signal.
const SIGNALS: [&str; 4] = ["auto", "write", "fetch-add", "immediate"];

pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    for signal in SIGNALS {
        for output in bed.both(|machine| conformance(machine, signal), deadline)? {
            demand_passes(&output.stdout, 1)?;
        }
    }
    Ok(format!("signals by {}", SIGNALS.join(", ")).into())
}
