//! Dispatch and combine between the machines, verified.

use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sidelane::{Bench, Counted, Route};
use crate::steps::{Asked, Findings};

/// By relays and directly.
pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let mut notes = Vec::new();
    for route in [Route::Pxn, Route::Direct] {
        let Counted { rows, requests, packets } = Bench { route, rounds: 3 }.run(bed, deadline)?;
        let route = route.name();
        notes.push(format!(
            "{route} {rows} rows bit-exact, {requests} requests, {packets} packets as planned"
        ));
    }
    Ok(Findings::from(notes.join("; ")))
}

/// Once more, after something was broken and mended.
pub fn again(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let Counted { rows, packets, .. } = Bench { route: Route::Pxn, rounds: 3 }.run(bed, deadline)?;
    Ok(Findings::from(format!("{rows} rows bit-exact, {packets} packets as planned")))
}
