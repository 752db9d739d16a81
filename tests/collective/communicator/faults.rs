//! A rank that does not come, or gives up, is named.

use sidelane::Options;
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::error::{Cause, Error, LaneError};

use super::case::{communicator, reduces};
use crate::support::{failed, on_ranks, tiny};

/// Rank 2 does not come to this call.
fn is_named_when_late(call: impl Fn(&mut Communicator) -> Error + Sync) {
    let mut options: Options = tiny();
    // It also bounds the rendezvous of new objects, on a machine that may be busy.
    options.timeouts.deadline = std::time::Duration::from_secs(5);
    on_ranks(&[0, 0, 1], &options, |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        if world.rank() == 2 {
            // It stays until the others have given up.
            failed(&world);
            return;
        }
        match call(&mut communicator) {
            Error::Lane(LaneError::Deadline { peer: 2, .. })
            | Error::World(Cause::Stalled { rank: 2, .. }) => {}
            error => panic!("{error}"),
        }
    });
}

#[test]
fn rank_absent_from_sum_is_named_after_deadline() {
    is_named_when_late(|communicator| communicator.all_reduce(&mut [1.0f32; 500]).unwrap_err());
}

#[test]
fn rank_absent_from_exchange_is_named_after_deadline() {
    is_named_when_late(|communicator| communicator.all_to_all_zero_copy(&[1.0f32; 900]).unwrap_err());
}

/// Rank 2 gives up before this call.
fn is_named_when_gone(call: impl Fn(&mut Communicator) -> Error + Sync) {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        reduces::<f32>(&world, &mut communicator, 50);
        // All have their sums before one of them gives up.
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 2 {
            return world.cancel();
        }
        let error = call(&mut communicator);
        assert!(matches!(error, Error::World(Cause::Cancelled { by: 2 })), "{error}");
    });
}

#[test]
fn a_rank_that_gives_up_is_named_by_all_others() {
    is_named_when_gone(|communicator| communicator.all_reduce(&mut [1.0f32; 500]).unwrap_err());
    is_named_when_gone(|communicator| communicator.all_to_all_zero_copy(&[1.0f32; 900]).unwrap_err());
}
