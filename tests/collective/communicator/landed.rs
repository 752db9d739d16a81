//! What lands in place is what an all-to-all copies there, and is the caller's until its next call.

use std::sync::atomic::{AtomicU32, Ordering};

use half::{bf16, f16};
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::error::{CallError, CallKind, Error, MemoryError, PlanError};
use sidelane::{Element, Options, World};

use super::case::{LANDING, SHAPES, bits, communicator, element, reduces, tensor};
use crate::support::{To, on_ranks, tiny};

/// Elements of a part: none, one, no whole lines, and more than a slot.
const PARTS: [usize; 5] = [0, 1, 37, 700, 1009];

/// The parts of all ranks that are for this one.
fn parts<E>(me: usize, ranks: usize, part: usize, seed: usize) -> Vec<E>
where
    f32: To<E>,
{
    (0..ranks * part).map(|at| element(at / part, me * part + at % part, seed)).collect()
}

fn lands<E: Element>(world: &World, communicator: &mut Communicator, part: usize, seed: usize)
where
    f32: To<E>,
{
    let (me, ranks) = (world.rank() as usize, world.size() as usize);
    let mine = tensor::<E>(me, ranks * part, seed);
    let mut copied = vec![E::zeroed(); mine.len()];
    communicator.all_to_all(&mine, &mut copied).unwrap();
    let landed = communicator.all_to_all_zero_copy(&mine).unwrap();
    assert!(bits(landed) == bits(&parts::<E>(me, ranks, part, seed)), "{part} {:?} at rank {me}", E::DTYPE);
    assert!(bits(landed) == bits(&copied), "{part} {:?} at rank {me}", E::DTYPE);
    assert!(bits(landed).as_ptr().addr().is_multiple_of(64) || landed.is_empty());
}

fn all_land(nodes: &[u32], options: &Options) {
    on_ranks(nodes, options, |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        for (seed, part) in PARTS.into_iter().enumerate() {
            lands::<u8>(&world, &mut communicator, part, seed);
            lands::<bf16>(&world, &mut communicator, part, seed + 1);
            lands::<f16>(&world, &mut communicator, part, seed + 2);
            lands::<f32>(&world, &mut communicator, part, seed + 3);
        }
    });
}

#[test]
fn parts_of_any_type_and_length_land_in_place() {
    for nodes in SHAPES {
        all_land(nodes, &tiny());
    }
}

/// Without a cache all is written past it.
#[test]
fn landed_results_written_past_cache_have_same_bits() {
    let mut options: Options = tiny();
    options.config.cache = 0;
    for nodes in SHAPES {
        all_land(nodes, &options);
    }
}

#[test]
fn calls_and_messages_in_between_leave_landed_results_intact() {
    for nodes in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 2, 2]] {
        on_ranks(nodes, &tiny(), |world| {
            let (me, pair) = (world.rank() as usize, world.rank() ^ 1);
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for seed in 0..8 {
                let mine = tensor::<f32>(me, 4 * 500, seed);
                // Messages that lie unread while results land.
                communicator.send(pair, &mine[..3]).unwrap();
                let landed = communicator.all_to_all_zero_copy(&mine).unwrap();
                assert!(bits(landed) == bits(&parts::<f32>(me, 4, 500, seed)), "{seed}");
                match seed % 4 {
                    0 => {}
                    1 => reduces::<bf16>(&world, &mut communicator, 3000),
                    2 => communicator.broadcast(3, &mut tensor::<u8>(me, 9000, seed)).unwrap(),
                    _ => communicator.all_gather(&mine, &mut [0.0; 8000]).unwrap(),
                }
                let mut came = [0.0f32; 3];
                communicator.receive(pair, &mut came).unwrap();
                assert!(came[..] == tensor::<f32>(pair as usize, 3, seed));
            }
        });
    }
}

/// All others are in the next call, or about to be, while rank 0 still reads.
#[test]
fn no_rank_overwrites_result_that_is_still_read() {
    for nodes in [&[0; 4][..], &[0, 0, 1, 1]] {
        let about_to_land = AtomicU32::new(0);
        on_ranks(nodes, &tiny(), |world| {
            let me = world.rank() as usize;
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            let mut tensors = [0, 1].map(|seed| tensor::<f32>(me, 4 * 2000, seed)).into_iter();
            let landed = communicator.all_to_all_zero_copy(&tensors.next().unwrap()).unwrap();
            if me > 0 {
                about_to_land.fetch_add(1, Ordering::Relaxed);
            } else {
                while about_to_land.load(Ordering::Relaxed) < 3 {
                    std::thread::yield_now();
                }
                for _ in 0..300 {
                    assert!(bits(landed) == bits(&parts::<f32>(me, 4, 2000, 0)), "{nodes:?}");
                    std::thread::yield_now();
                }
            }
            let landed = communicator.all_to_all_zero_copy(&tensors.next().unwrap()).unwrap();
            assert!(bits(landed) == bits(&parts::<f32>(me, 4, 2000, 1)), "{nodes:?}");
        });
    }
}

#[test]
fn oversized_result_is_refused_on_all_ranks_and_next_call_works() {
    for nodes in [&[0][..], &[0; 4], &[0, 0, 1, 1]] {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            let most = LANDING as usize;
            for bytes in [most + world.size() as usize, 3 * most] {
                let error = communicator.all_to_all_zero_copy(&vec![1u8; bytes]).unwrap_err();
                let Error::Memory(MemoryError::OutOfSpace { rank, asked, free, space: "landing", .. }) =
                    error
                else {
                    panic!("{error}")
                };
                assert_eq!((rank, asked, free), (world.rank(), bytes as u64, LANDING));
            }
            let landed = communicator.all_to_all_zero_copy(&vec![world.rank() as u8; most]).unwrap();
            let part = most / world.size() as usize;
            assert!(landed.iter().enumerate().all(|(at, &from)| from as usize == at / part));
        });
    }
}

#[test]
fn without_room_only_nothing_lands() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut communicator = Communicator::builder(&world.all().unwrap()).chunk(1024).build().unwrap();
        assert_eq!(communicator.all_to_all_zero_copy::<f32>(&[]).unwrap(), [0.0; 0]);
        let error = communicator.all_to_all_zero_copy(&[1.0f32; 2]).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { total: 0, .. })), "{error}");
        reduces::<f32>(&world, &mut communicator, 77);
    });
}

/// The call of rank 2, and the errors of all; no earlier result has changed.
fn odd_one_out(odd: impl Fn(&mut Communicator) -> Error + Sync, right: impl Fn(bool, Error) + Sync) {
    for nodes in [&[0; 4][..], &[0, 0, 1, 1]] {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            lands::<f32>(&world, &mut communicator, 300, 1);
            let is_odd = world.rank() == 2;
            let error = match is_odd {
                true => odd(&mut communicator),
                false => communicator.all_to_all_zero_copy(&[7.0f32; 400]).unwrap_err(),
            };
            right(is_odd, error);
            lands::<f32>(&world, &mut communicator, 300, 2);
        });
    }
}

#[test]
fn ranks_that_differ_are_told_before_anything_lands() {
    odd_one_out(
        |c| c.all_to_all_zero_copy(&[7.0f32; 800]).unwrap_err(),
        |odd, error| {
            let Error::Call(CallError::Disagree {
                kind: CallKind::AllToAll,
                what: "bytes",
                mine,
                theirs,
                ..
            }) = error
            else {
                panic!("{error}")
            };
            assert_eq!((mine, theirs), if odd { (3200, 1600) } else { (1600, 3200) });
        },
    );
    odd_one_out(
        |c| c.all_to_all(&[7.0f32; 400], &mut [0.0; 400]).unwrap_err(),
        |_, error| {
            assert!(matches!(error, Error::Call(CallError::Disagree { what: "options", .. })), "{error}");
        },
    );
    odd_one_out(
        |c| c.all_reduce(&mut [7.0f32; 400]).unwrap_err(),
        |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
    );
    odd_one_out(
        |c| c.all_to_all_zero_copy(&[7.0f32; 401]).unwrap_err(),
        |odd, error| match error {
            Error::Plan(PlanError::WrongShape { what: "elements to send", seen: 401, .. }) if odd => {}
            error => {
                assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 2, .. })), "{error}");
            }
        },
    );
    odd_one_out(
        |c| c.all_to_all_zero_copy(&vec![7.0f32; LANDING as usize]).unwrap_err(),
        |odd, error| match error {
            Error::Memory(MemoryError::OutOfSpace { .. }) if odd => {}
            error => {
                assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 2, .. })), "{error}");
            }
        },
    );
}
