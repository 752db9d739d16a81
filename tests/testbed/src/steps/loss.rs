//! A node is lost in the middle of a dispatch: every remaining rank ends with an error that names
//! one of its ranks or, where the machine has lost its carrier, a port of its own.

use std::time::{Duration, Instant};

use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sidelane::{Bench, Route, names_the_lost};
use crate::steps::{Asked, Findings};
use crate::tool::tail;

/// More than can be timed while the step lasts.
const ENDLESS: Bench = Bench { route: Route::Pxn, rounds: 100_000 };

/// Enough to be in the middle of it: checks and floors come before.
const PACKETS: u64 = 3000;

/// Liveness is 2 s, and translated processors are slow.
const IN_TIME: Duration = Duration::from_secs(20);

/// Lines of output that an error shows.
const SHOWN: usize = 15;

/// The wire is cut at machine 0: each machine has lost the other.
pub fn cut(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let took = lose(bed, deadline, &[(0, false), (1, true)], Bed::cut)?;
    Ok(Findings::from(format!(
        "all four ranks name a lost one or their own port, after {} s",
        seconds(&took)
    )))
}

/// A machine is switched off: first the one with rank 0, where all meet; then the other one.
pub fn killed(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let mut took = Vec::new();
    for victim in [0, 1] {
        bed.heal()?;
        took.extend(lose(bed, deadline, &[(1 - victim, true)], |bed| {
            bed.kill(victim);
            Ok(())
        })?);
    }
    Ok(Findings::from(format!("both ranks left name a lost one, after {} s", seconds(&took))))
}

/// Breaks the bed in the middle of a bench; how long the ranks of each survivor took to end. Next
/// to the survivors stands whether they keep their carrier.
fn lose(
    bed: &mut Bed,
    deadline: Deadline,
    survivors: &[(usize, bool)],
    breaks: impl Fn(&mut Bed) -> Result<()>,
) -> Result<Vec<Duration>> {
    let mut jobs = ENDLESS.start(bed)?;
    for (machine, job) in jobs.iter_mut().enumerate() {
        bed.under_way(machine, job, PACKETS, deadline)?;
    }
    let broken = Instant::now();
    breaks(bed)?;
    let mut took = Vec::new();
    for (machine, job) in jobs.into_iter().enumerate() {
        let Some(&(_, carrier)) = survivors.iter().find(|(survivor, _)| *survivor == machine) else {
            continue;
        };
        let ended = job.fail(deadline.within(IN_TIME))?;
        took.push(broken.elapsed());
        if !names_the_lost(machine, carrier, &ended.output) {
            return Err(Error::Unnamed { machine, output: tail(&ended.output, SHOWN) });
        }
    }
    Ok(took)
}

fn seconds(all: &[Duration]) -> String {
    let all: Vec<_> = all.iter().map(|time| format!("{:.1}", time.as_secs_f64())).collect();
    all.join(" and ")
}
