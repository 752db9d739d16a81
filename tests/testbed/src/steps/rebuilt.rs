//! A world that ends in the middle of dispatches is rebuilt while packets of the old one are still
//! on the wire; these arrive only afterwards.
//!
//! ```text
//!   ranks   dispatch, dispatch .. | one cancels | all rebuild |                    | dispatches, verified
//!   wire 1  ---------------- hold ............................. let go, all arrive ---------------------
//!   wire 0  ------------ the ranks' rendezvous goes on ------------------------------------------------
//! ```
//!
//! Every packet that was held has to arrive, be taken by no connection, and get no answer.

use std::thread;

use crate::bed::Bed;
use crate::counters::{Counters, Late};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::machine::{Job, POLL};
use crate::sidelane::{CANCEL, GO, REBUILT, Seen, rebuilt};
use crate::steps::{Asked, Findings};

/// The NIC whose wire is held.
const NIC: usize = 1;

/// Enough to have left all that comes before the dispatches behind.
const PACKETS: u64 = 5000;

/// Between two tries to catch a dispatch.
const BETWEEN: u64 = 500;

/// Packets to each machine that only the rows of a dispatch can be: all else of one is a few.
const ROWS: u64 = 40;

/// Looks at a wire on which nothing has moved before it is taken to stand still.
const STILL: usize = 3;

pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let idle = look(bed)?;
    let mut jobs = bed.start_both(rebuilt)?;
    for (machine, job) in jobs.iter_mut().enumerate() {
        bed.under_way(machine, job, PACKETS, deadline)?;
    }
    catch(bed, &mut jobs, &idle, deadline)?;
    bed.start(1, CANCEL)?.succeed(deadline)?;
    for job in &mut jobs {
        job.says(REBUILT, 2, deadline)?;
    }

    let before = look(bed)?;
    let held = held(&before, &idle);
    bed.let_go()?;
    let late = arrive(bed, &before, held, deadline)?;
    if held != late.map(|late| late.arrived) || late.iter().any(|late| late.taken + late.answered > 0) {
        return Err(Error::LatePackets { held, late });
    }

    bed.both(|_| GO.to_owned(), deadline)?;
    let mut all = Seen::default();
    for job in jobs {
        let seen = Seen::read(&job.succeed(deadline)?.stdout)?;
        all = Seen { rows: all.rows + seen.rows, failed: all.failed + seen.failed };
    }
    let Seen { rows, failed } = all;
    Ok(Findings::from(format!(
        "{} + {} packets of epoch 0 arrived in epoch 1, none taken; {failed} requests failed; {rows} rows bit-exact",
        held[0], held[1]
    )))
}

fn look(bed: &Bed) -> Result<[Counters; 2]> {
    Ok([bed.counters(0)?, bed.counters(1)?])
}

/// Packets on the wire to each machine: sent by the other, and not yet there.
fn held(now: &[Counters; 2], idle: &[Counters; 2]) -> [u64; 2] {
    let since = [0, 1].map(|machine| now[machine].since(&idle[machine]));
    [0, 1].map(|machine| since[1 - machine].sent().saturating_sub(since[machine].arrived()))
}

/// Holds the wire until rows of a dispatch are on it, in both directions. NICs have long timeouts:
/// briefly held packets have not been repeated.
fn catch(bed: &mut Bed, jobs: &mut [Job; 2], idle: &[Counters; 2], deadline: Deadline) -> Result<()> {
    loop {
        bed.hold(NIC)?;
        let held = held(&stand_still(bed, deadline)?, idle);
        if held.iter().all(|&packets| packets >= ROWS) {
            return Ok(());
        }
        bed.let_go()?;
        for (machine, job) in jobs.iter_mut().enumerate() {
            bed.under_way(machine, job, BETWEEN, deadline)?;
        }
    }
}

/// The counters when no packet moves any more.
fn stand_still(bed: &Bed, deadline: Deadline) -> Result<[Counters; 2]> {
    let (mut last, mut same) = (look(bed)?, 0);
    while same < STILL {
        deadline.left().ok_or(Error::Restless { nic: NIC })?;
        let now = look(bed)?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

/// Waits until as much has arrived as was held; what became of it.
fn arrive(bed: &Bed, before: &[Counters; 2], held: [u64; 2], deadline: Deadline) -> Result<[Late; 2]> {
    loop {
        let now = look(bed)?;
        let late = [0, 1].map(|machine| now[machine].since(&before[machine]).late());
        if (0..2).all(|machine| late[machine].arrived >= held[machine]) {
            return Ok(late);
        }
        deadline.left().ok_or(Error::LatePackets { held, late })?;
        thread::sleep(POLL);
    }
}
