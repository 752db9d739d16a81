//! Transfers overlap with experts, and groups of experts with each other: the tests wait for events
//! that otherwise could not happen.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sidelane::Dtype;
use sidelane::error::ExpertPass;
use sidelane::layer::{ExpertError, Input, MoeLayer};

use super::case::{Case, Cut, HIDDEN, Seen, WHOLE, gate, step, swiglu, tensors};
use super::meddled::{Meddled, Meddler};
use crate::support::{on_ranks, small};

const SOON: Duration = Duration::from_secs(30);
/// The rank that waits for the other.
const WAITS: u32 = 0;

/// Forward, rank 0 does not come back from its first chunk until rank 1 has got its second: so rank
/// 0 has dispatched both. Backward, rank 0 does not come back from the gradient of its weights
/// until rank 1 has all gradients: so rank 0 has sent them.
struct Waiting {
    rank: u32,
    calls: AtomicU32,
    /// How far rank 1 is: 1 with its second chunk, 2 with all.
    other: Arc<AtomicU32>,
}

impl Waiting {
    fn wait_for(&self, step: u32) -> Result<(), ExpertError> {
        let since = std::time::Instant::now();
        while self.rank == WAITS && self.other.load(Ordering::Acquire) < step {
            if since.elapsed() > SOON {
                return Err("nothing moves beside the experts".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Meddler for Waiting {
    fn before(&self, pass: ExpertPass) -> Result<(), ExpertError> {
        match pass {
            ExpertPass::Forward if self.calls.fetch_add(1, Ordering::Relaxed) == 0 => self.wait_for(1)?,
            ExpertPass::Forward if self.rank != WAITS => _ = self.other.fetch_max(1, Ordering::Release),
            ExpertPass::WeightsBackward => self.wait_for(2)?,
            ExpertPass::Forward | ExpertPass::RowsBackward | ExpertPass::WithWeights => {}
            other => unreachable!("{other:?}"),
        }
        Ok(())
    }
}

#[test]
fn the_next_dispatch_goes_on_under_experts_and_gradients_go_home_under_those_of_weights() {
    let case = Case::new(&[0, 0], &[10, 7], Cut { chunks: 2, overlap: true, ..WHOLE });
    let expected = Case { cut: WHOLE, ..case.clone() }.step::<f32>();
    let other = Arc::new(AtomicU32::new(0));
    let seen = on_ranks(&case.nodes, &small(), |world| {
        let (group, rank) = (world.all().unwrap(), world.rank());
        let (inner, other) = (swiglu(case.held(rank)), Arc::clone(&other));
        let by = Waiting { rank, calls: AtomicU32::new(0), other: Arc::clone(&other) };
        let builder = MoeLayer::builder(&group, gate(), HIDDEN, Meddled { inner, by }).dtype(Dtype::F32);
        let mut layer = case.cut(builder).build().unwrap();
        let [x, residual, of_out] = tensors::<f32>(rank as usize, case.tokens[rank as usize]);
        let (out, tape) = layer.forward(&Input::new(&x[..]).with_residual(Some(&residual))).unwrap();
        let losses = [tape.balance_loss(), tape.z_loss()];
        let gradients = layer.backward(tape, &of_out).unwrap();
        if rank != WAITS {
            other.store(2, Ordering::Release);
        }
        Seen { out, gradients, losses }
    });
    assert_eq!(seen, expected);
}

/// No odd call returns before the next one has begun.
struct InPairs {
    calls: AtomicU32,
}

impl Meddler for InPairs {
    fn before(&self, pass: ExpertPass) -> Result<(), ExpertError> {
        if pass == ExpertPass::WeightsBackward {
            return Ok(());
        }
        let both = (self.calls.fetch_add(1, Ordering::AcqRel) | 1) + 1;
        let since = std::time::Instant::now();
        while self.calls.load(Ordering::Acquire) < both {
            if since.elapsed() > SOON {
                return Err("no other group computes".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[test]
fn groups_of_a_chunk_compute_beside_each_other() {
    let two = Cut { groups: 2, overlap: true, streams: 2, at_once: 2, ..WHOLE };
    let case = Case::new(&[0], &[40], two);
    let expected = Case { cut: WHOLE, ..case.clone() }.step::<f32>();
    let seen = on_ranks(&case.nodes, &small(), |world| {
        let inner = swiglu(case.held(0));
        let experts = Meddled { inner, by: InPairs { calls: AtomicU32::new(0) } };
        let group = world.all().unwrap();
        let builder = MoeLayer::builder(&group, gate(), HIDDEN, experts).dtype(Dtype::F32);
        let mut layer = case.cut(builder).build().unwrap();
        let [x, residual, of_out] = tensors::<f32>(0, case.tokens[0]);
        step(&mut layer, &x, &residual, &of_out)
    });
    assert_eq!(seen, expected);
}
