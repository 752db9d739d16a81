//! Messages between two ranks come in order, or are refused on both sides.

use half::bf16;
use sidelane::collective::AllReduceAlgorithm;
use sidelane::error::{CallError, CallKind, Error, PlanError};

use super::case::{communicator, reduces, tensor};
use crate::support::{on_ranks, tiny};

#[test]
fn messages_keep_order_and_pass_crosswise_beyond_slot_size() {
    for nodes in [&[0, 0, 0][..], &[0, 1, 1]] {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            let (me, next, from) = (world.rank(), (world.rank() + 1) % 3, (world.rank() + 2) % 3);
            // Short ones lie unread; no rank waits.
            communicator.send(next, &tensor::<f32>(me as usize, 5, 0)).unwrap();
            communicator.send::<f32>(next, &[]).unwrap();
            let mut first = vec![0.0f32; 5];
            communicator.receive(from, &mut first).unwrap();
            communicator.receive::<f32>(from, &mut []).unwrap();
            assert_eq!(first, tensor::<f32>(from as usize, 5, 0));
            // A long one and a short one between two ranks, at once; the third stays out of it.
            if me < 2 {
                let lens = [4000, 7];
                let mut came = vec![bf16::ZERO; lens[1 - me as usize]];
                communicator
                    .send_receive(1 - me, &tensor(me as usize, lens[me as usize], 3), &mut came)
                    .unwrap();
                assert!(came == tensor::<bf16>(1 - me as usize, lens[1 - me as usize], 3));
                communicator.flush(1 - me).unwrap();
            }
            reduces::<f32>(&world, &mut communicator, 40);
        });
    }
}

#[test]
fn message_of_other_length_is_refused_by_both_and_next_arrives() {
    for len in [3, 3000] {
        on_ranks(&[0, 1], &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            if world.rank() == 0 {
                let sent = communicator.send(1, &vec![1.0f32; len]);
                let heard = sent.and_then(|()| communicator.flush(1));
                let Err(Error::Call(CallError::MessageRefused { rank: 0, peer: 1, count: 1 })) = heard else {
                    panic!("{heard:?}");
                };
                communicator.send(1, &[2.0f32; 4]).unwrap();
                communicator.flush(1).unwrap();
            } else {
                let mut data = [0.5f32; 4];
                let error = communicator.receive(0, &mut data).unwrap_err();
                let Error::Call(CallError::Disagree {
                    kind: CallKind::Receive,
                    what: "bytes",
                    mine: 16,
                    theirs,
                    ..
                }) = error
                else {
                    panic!("{error}");
                };
                assert_eq!(theirs, 4 * len as u64);
                assert_eq!(data, [0.5; 4]);
                communicator.receive(0, &mut data).unwrap();
                assert_eq!(data, [2.0; 4]);
            }
            let itself = communicator.send(world.rank(), &[1.0f32]).unwrap_err();
            assert!(
                matches!(itself, Error::Plan(PlanError::BadParameter { parameter: "peer", .. })),
                "{itself}"
            );
        });
    }
}

#[test]
fn refusal_that_crosses_wrong_message_is_told_by_next_call() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        let (me, peer) = (world.rank(), 1 - world.rank());
        // So long that each hears of the refusal before all has passed.
        let error = communicator.send_receive(peer, &[1.0f32; 3000], &mut [0.0; 2000]).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::Disagree { what: "bytes", .. })), "{error}");
        let heard = communicator.flush(peer).unwrap_err();
        let Error::Call(CallError::MessageRefused { rank, peer: by, count: 1 }) = heard else {
            panic!("{heard}")
        };
        assert_eq!((rank, by), (me, peer));
        communicator.flush(peer).unwrap();
    });
}

#[test]
fn all_of_more_refusals_than_a_byte_counts_are_told() {
    const MESSAGES: u32 = 600;
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        let told = |result| match result {
            Ok(()) => 0,
            Err(Error::Call(CallError::MessageRefused { count, .. })) => count,
            Err(error) => panic!("{error}"),
        };
        let mut refused = 0;
        for _ in 0..MESSAGES {
            match world.rank() {
                0 => refused += told(communicator.send(1, &[1.0f32])),
                _ => drop(communicator.receive(0, &mut [0.0f32; 2]).unwrap_err()),
            }
        }
        if world.rank() == 0 {
            refused += told(communicator.flush(1));
            assert_eq!(refused, MESSAGES);
        }
    });
}
