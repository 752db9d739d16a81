//! Collectives between the machines, verified.

use super::{Asked, Findings};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sidelane::collectives;

pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let right = collectives(bed, deadline)?;
    let told: Vec<String> = right.iter().map(|(name, bytes)| format!("{name} of {bytes} bytes")).collect();
    Ok(Findings::from(told.join(", ")))
}
