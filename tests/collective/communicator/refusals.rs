//! Calls and settings that differ, or are wrong, are refused on all ranks.

use half::{bf16, f16};
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::error::{CallError, CallKind, Error, MemoryError, PlanError};

use super::case::{communicator, reduces};
use crate::support::{on_ranks, tiny};

/// Errors of a rank when rank 2 makes another call.
fn odd_one_out(
    nodes: &[u32],
    odd: impl Fn(&mut Communicator) -> Error + Sync,
    right: impl Fn(u32, Error) + Sync,
) {
    on_ranks(nodes, &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        let error = match world.rank() {
            2 => odd(&mut communicator),
            _ => {
                let mut data = vec![7.0f32; 500];
                let error = communicator.all_reduce(&mut data).unwrap_err();
                assert_eq!(data, vec![7.0; 500], "nothing is visible");
                error
            }
        };
        right(world.rank(), error);
        reduces::<f32>(&world, &mut communicator, 300);
    });
}

#[test]
fn differing_collective_calls_fail_on_all_ranks_next_call_works() {
    for nodes in [&[0; 4][..], &[0, 0, 1, 1]] {
        odd_one_out(
            nodes,
            |c| c.all_reduce(&mut [1.0f32; 400]).unwrap_err(),
            |rank, error| {
                let Error::Call(CallError::Disagree { what: "bytes", mine, theirs, .. }) = error else {
                    panic!("{error}")
                };
                assert_eq!((mine, theirs), if rank == 2 { (1600, 2000) } else { (2000, 1600) });
            },
        );
        odd_one_out(
            nodes,
            |c| c.all_reduce(&mut [bf16::ONE; 1000]).unwrap_err(),
            |_, error| {
                assert!(matches!(error, Error::Call(CallError::Disagree { what: "options", .. })), "{error}")
            },
        );
        odd_one_out(
            nodes,
            |c| c.broadcast(0, &mut [1.0f32; 500]).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
        odd_one_out(
            nodes,
            |c| c.all_gather(&[1.0f32; 500], &mut [0.0; 2000]).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
        odd_one_out(
            nodes,
            |c| c.reduce_scatter(&[1.0f32; 400], &mut [0.0; 100]).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
        odd_one_out(
            nodes,
            |c| c.reduce(1, &mut [1.0f32; 500]).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
        odd_one_out(
            nodes,
            |c| c.all_to_all_v(&[1.0f32; 8], &[2, 2, 2, 2], &mut Vec::new()).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
    }
}

#[test]
fn wrong_input_is_refused_where_it_is_and_told_to_the_others() {
    on_ranks(&[0, 1, 0], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        let wrong = world.rank() == 1;
        let told = |error: Error| {
            assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}");
        };
        let send = vec![1.0f32; if wrong { 4 } else { 6 }];
        match communicator.all_to_all(&send, &mut [0.0; 6]).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to send", seen: 4, .. }) if wrong => {}
            error => told(error),
        }
        let counts: &[usize] = if wrong { &[1, 1, 9] } else { &[2, 2, 2] };
        match communicator.all_to_all_v(&[1.0f32; 6], counts, &mut Vec::new()).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to send", seen: 6, .. }) if wrong => {}
            error => told(error),
        }
        match communicator.broadcast(if wrong { 3 } else { 0 }, &mut [1.0f32; 6]).unwrap_err() {
            Error::Plan(PlanError::BadParameter { parameter: "root", seen: 3, .. }) if wrong => {}
            error => told(error),
        }
        let mut data = [5.0f32; 6];
        match communicator.reduce(if wrong { 3 } else { 0 }, &mut data).unwrap_err() {
            Error::Plan(PlanError::BadParameter { parameter: "root", seen: 3, .. }) if wrong => {}
            error => told(error),
        }
        let error = communicator.reduce(u32::from(wrong), &mut data).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::Disagree { what: "options", .. })), "{error}");
        assert_eq!(data, [5.0; 6], "nothing is visible");
        let mut receive = vec![5.0f32; if wrong { 8 } else { 9 }];
        match communicator.all_gather(&[1.0f32; 3], &mut receive).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to receive", seen: 8, .. }) if wrong => {}
            error => told(error),
        }
        assert!(receive.iter().all(|&element| element == 5.0), "nothing is visible");
        let send = vec![1.0f32; if wrong { 5 } else { 9 }];
        match communicator.reduce_scatter(&send, &mut receive[..3]).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to sum", seen: 5, .. }) if wrong => {}
            error => told(error),
        }
        assert!(receive.iter().all(|&element| element == 5.0), "nothing is visible");
        let error = communicator.all_reduce(&mut [1u8; 6]).unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::NoArithmetic { .. })), "{error}");
        reduces::<f16>(&world, &mut communicator, 77);
    });
}

#[test]
fn settings_that_differ_are_named() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let builder = world.all().unwrap();
        let builder = Communicator::builder(&builder).chunk(if world.rank() == 1 { 2048 } else { 1024 });
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Call(CallError::ConfigsDiffer { what: "chunk", .. })), "{error}");
        let builder = world.all().unwrap();
        let builder =
            Communicator::builder(&builder).zero_copy_bytes(if world.rank() == 1 { 2048 } else { 1024 });
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Call(CallError::ConfigsDiffer { what: "landing", .. })), "{error}");
    });
}

#[test]
fn chunks_and_landings_that_no_window_can_hold_are_refused() {
    on_ranks(&[0], &tiny(), |world| {
        for chunk in [0, 127, u64::MAX / 10 + 1, u64::MAX] {
            let error = Communicator::builder(&world.all().unwrap()).chunk(chunk).build().unwrap_err();
            let Error::Plan(PlanError::BadParameter { parameter: "chunk", seen, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!(seen, chunk);
        }
        let error =
            Communicator::builder(&world.all().unwrap()).zero_copy_bytes(u64::MAX - 64).build().unwrap_err();
        let Error::Plan(PlanError::BadParameter { parameter: "landing", seen, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(seen, u64::MAX - 64);
        // What 64 bits can say, but no heap has.
        let error = Communicator::builder(&world.all().unwrap()).chunk(u64::MAX / 10).build().unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { .. })), "{error}");
    });
}

#[test]
fn rank_without_usable_input_refuses_every_kind_of_call() {
    on_ranks(&[0, 1, 0], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        let (refuses, mut data) = (world.rank() == 2, vec![5.0f32; 999]);
        let refused =
            |communicator: &mut Communicator, kind| communicator.refuse(kind, PlanError::RefusedHere.into());
        for kind in [
            CallKind::AllReduce,
            CallKind::Broadcast,
            CallKind::AllToAll,
            CallKind::AllGather,
            CallKind::ReduceScatter,
            CallKind::Reduce,
        ] {
            let error = match kind {
                _ if refuses => refused(&mut communicator, kind),
                CallKind::AllReduce => communicator.all_reduce(&mut data).unwrap_err(),
                CallKind::Broadcast => communicator.broadcast(1, &mut data).unwrap_err(),
                CallKind::AllToAll => communicator.all_to_all(&[1.0f32; 999], &mut data).unwrap_err(),
                CallKind::AllGather => communicator.all_gather(&[1.0f32; 333], &mut data).unwrap_err(),
                CallKind::Reduce => communicator.reduce(0, &mut data).unwrap_err(),
                _ => communicator.reduce_scatter(&[1.0f32; 999], &mut data[..333]).unwrap_err(),
            };
            match error {
                Error::Plan(PlanError::RefusedHere) if refuses => {}
                Error::Call(CallError::PeerRefused { peer: 2, .. }) if !refuses => {}
                error => panic!("{kind:?}: {error}"),
            }
            assert_eq!(data, [5.0; 999], "nothing is visible");
        }
        reduces::<f16>(&world, &mut communicator, 77);
    });
}
