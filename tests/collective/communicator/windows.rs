//! Windows of a communicator that is gone are used again, when all are done with them.

use sidelane::collective::Communicator;
use sidelane::error::{Error, MemoryError};

use super::case::{bits, summed, tensor};
use crate::support::{on_ranks, tiny};

/// Windows of a dropped communicator are reused, and only when all others are done with them.
#[test]
fn communicators_come_and_go_without_waiting_for_each_other() {
    on_ranks(&[0, 0, 1, 0], &tiny(), |world| {
        let (me, ranks) = (world.rank() as usize, world.size() as usize);
        let group = world.all().unwrap();
        for seed in 0..12 {
            let mut communicator =
                Communicator::builder(&group).chunk(16 << 10).one_shot_bytes(0).build().unwrap();
            let mut data = tensor::<f32>(me, 40_000, seed);
            communicator.all_reduce(&mut data).unwrap();
            drop(communicator);
            assert!(bits(&data) == bits(&summed::<f32>(ranks, 40_000, seed)), "{seed}");
        }
    });
}

/// Rank 0 has sent and left when rank 2 receives: the answer, which no rank waits for, must not
/// reach memory that others use.
#[test]
fn windows_are_held_until_ranks_of_other_nodes_finish() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let all = world.all().unwrap();
        let build = || Communicator::builder(&all).chunk(16 << 10).build().unwrap();
        let mut communicator = build();
        if world.rank() == 2 {
            all.gather(&[]).unwrap();
            let mut came = [0.0f32; 5];
            communicator.receive(0, &mut came).unwrap();
            assert_eq!(came, [1.0; 5]);
            drop(communicator);
        } else {
            if world.rank() == 0 {
                communicator.send(2, &[1.0f32; 5]).unwrap();
            }
            drop(communicator);
            // More than remains next to the window.
            let error = world.group(&[0, 1]).unwrap().window(150_000).unwrap_err();
            assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { .. })), "{error}");
            all.gather(&[]).unwrap();
        }
        // All are done: there is room again.
        drop(build());
        assert_eq!(all.window(150_000).unwrap().len(), 150_000);
    });
}
