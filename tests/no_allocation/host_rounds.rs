//! Rounds of calls on hosts, whose allocations are counted.

use half::bf16;
use sidelane::ExpertParallel;
use sidelane::ep::{Handle, Report};
use sidelane::gate::Routing;

use super::counting::{Library, allocations};
use super::support::Tokens;

pub const HIDDEN: usize = 16;
pub const TOP_K: u32 = 2;
pub const EXPERTS: u32 = 6;

/// A layer's forward and backward, into tensors that are there already.
fn round(ep: &mut ExpertParallel, mine: &Tokens<bf16>, out: &mut [bf16], weights: &mut [f32]) -> Handle {
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
    let mut y = handle.output().unwrap();
    y.rows_mut::<bf16>().unwrap().copy_from_slice(rows.rows().unwrap());
    ep.combine_into(y, &handle, &mut *out).unwrap();
    ep.combine_into(rows.rows::<bf16>().unwrap(), &handle, &mut *out).unwrap();
    let again = ep.dispatch_cached(&mine.x, &handle).unwrap();
    let gradients = again.rows::<bf16>().unwrap();
    let (of_rows, returned) = (Some(handle.row_weights().into()), Some(weights.into()));
    ep.dispatch_backward_into(gradients, of_rows, &handle, out, returned).unwrap();
    handle
}

/// Rounds that are counted.
pub const ROUNDS: u64 = 40;

/// Allocations of rounds behind the first, of this rank's thread and of those of the library, and
/// the reports of the last dispatches. The library's threads make dispatches in halves, too, of
/// which the relay does its part in its thread.
pub fn allocated_by(
    ep: &mut ExpertParallel,
    mine: &Tokens<bf16>,
    library: &Library,
) -> ((u64, u64), [Report; 2]) {
    let (mut out, mut weights) = (vec![bf16::ZERO; mine.x.len()], vec![0.0; mine.ids.len()]);
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let mut both = |ep: &mut ExpertParallel, before: Option<[Handle; 2]>| {
        let counted = allocations();
        drop(before);
        let whole = round(ep, mine, &mut out, &mut weights);
        let own = allocations() - counted;
        (own, [whole, ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap().1])
    };
    let (mut own, mut last) = (0, Some(both(ep, None).1));
    let of_library = library.during(|| {
        for _ in 0..ROUNDS {
            let (of_round, handles) = both(ep, last.take());
            (own, last) = (own + of_round, Some(handles));
        }
    });
    let reports = last.expect("handles of a round").map(|handle| handle.report().unwrap());
    ((own, of_library), reports)
}

/// Whether a call went over this lane.
pub fn took(report: &Report, lane: &str) -> bool {
    report.lanes.iter().any(|used| used.lane == lane)
}
