//! `sidelane collectives`: all-reduce, broadcast and the others, compared with their expected
//! results.

use serde::Deserialize;

use super::{CALM, Nics, command, report};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Less than a round's bytes, and more than two rounds' of two ranks.
const SIZES: &str = "4K,2M";

/// The used part of its report.
#[derive(Debug, Deserialize)]
struct Report {
    config: Config,
    verified: bool,
    runs: Vec<Run>,
}

#[derive(Debug, Deserialize)]
struct Config {
    machines: u32,
}

#[derive(Debug, Deserialize)]
struct Run {
    operation: String,
    bytes: u64,
}

/// Runs all of them between two ranks of each machine, over one NIC. Returns the names of the right
/// ones, with their bytes.
pub fn collectives(bed: &Bed, deadline: Deadline) -> Result<Vec<(String, u64)>> {
    let what = format!("collectives --sizes {SIZES} --rounds 2");
    let seen: Report = report(bed, deadline, |machine| command(machine, 2, &what, Nics::First, CALM))?;
    if !(seen.verified && seen.config.machines == 2 && !seen.runs.is_empty()) {
        return Err(Error::NotVerified { program: "collectives", seen: format!("{seen:?}") });
    }
    Ok(seen.runs.into_iter().map(|Run { operation, bytes }| (operation, bytes)).collect())
}
