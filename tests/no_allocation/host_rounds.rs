//! Rounds of calls on hosts, whose allocations are counted.

use half::bf16;
use sidelane::ExpertParallel;
use sidelane::gate::Routing;

use super::counting::{Library, allocations};
use super::support::Tokens;

pub const HIDDEN: usize = 16;
pub const TOP_K: u32 = 2;
pub const EXPERTS: u32 = 6;

/// A layer's forward and backward, into tensors that are there already.
fn round(ep: &mut ExpertParallel, mine: &Tokens<bf16>, out: &mut [bf16], weights: &mut [f32]) {
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
}

/// Rounds that are counted.
pub const ROUNDS: u64 = 40;

/// Allocations of rounds behind the first: this rank's thread, and those of the library. These
/// make dispatches in halves, too, of which the relay does its part in its thread.
pub fn allocated_by(ep: &mut ExpertParallel, mine: &Tokens<bf16>, library: &Library) -> (u64, u64) {
    let (mut out, mut weights) = (vec![bf16::ZERO; mine.x.len()], vec![0.0; mine.ids.len()]);
    round(ep, mine, &mut out, &mut weights);
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let in_halves = |ep: &mut ExpertParallel| {
        drop(ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap());
    };
    in_halves(ep);
    let mut own = 0;
    let of_library = library.during(|| {
        for _ in 0..ROUNDS {
            let before = allocations();
            round(ep, mine, &mut out, &mut weights);
            own += allocations() - before;
            in_halves(ep);
        }
    });
    (own, of_library)
}
