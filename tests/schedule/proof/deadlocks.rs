//! Orders of launching that look natural, and stand still.

use sidelane_core::schedule::Op;
use sidelane_verify::prove::{ProofFailure, prove};
use sidelane_verify::unroll::UnrolledProgram;

use crate::groups::{self, Group};

/// Each track in turn, peers rotated: a natural order, which hardware queues turn into a deadlock.
fn track_after_track(unrolled: &mut UnrolledProgram) {
    let ranks = unrolled.ranks;
    for part in unrolled.parts_mut() {
        let rank = part.rank;
        for scene in &mut part.scenes {
            scene.steps.sort_by_key(|step| (step.track + ranks - rank - 1) % ranks);
        }
    }
}

#[test]
fn launching_track_after_track_deadlocks_on_one_queue() {
    let group = Group::new(&[0; 8], 1, 3);
    let mut unrolled = group.unroll(&groups::pairs(2), None);
    track_after_track(&mut unrolled);
    let fault = prove(&unrolled).unwrap_err();
    println!("{fault}");
    assert!(matches!(fault, ProofFailure::Deadlock { queues: 1, .. }), "{fault}");
}

#[test]
fn waiting_first_deadlocks_when_every_rank_does() {
    let group = Group::new(&[0, 0, 1, 1], 1, 3);
    let mut unrolled = group.unroll(&groups::pairs(2), None);
    for scene in unrolled.parts_mut().flat_map(|part| &mut part.scenes) {
        scene.steps.sort_by_key(|step| !matches!(step.op, Op::Wait { .. }));
    }
    assert!(matches!(prove(&unrolled), Err(ProofFailure::Deadlock { .. })));
}
