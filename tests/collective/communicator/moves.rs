//! Broadcast, all-to-all and all-gather bring every byte to its place.

use half::bf16;
use sidelane::Options;
use sidelane::collective::AllReduceAlgorithm;

use super::case::{LENGTHS, SHAPES, bits, communicator, reduces, summed, tensor};
use crate::support::{on_ranks, tiny};

#[test]
fn everybody_has_what_the_root_has() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for (root, len) in (0..world.size()).flat_map(|root| LENGTHS.map(|len| (root, len))) {
                let mut data = tensor::<f32>(world.rank() as usize, len, 1);
                communicator.broadcast(root, &mut data).unwrap();
                assert!(bits(&data) == bits(&tensor::<f32>(root as usize, len, 1)), "{nodes:?} {root} {len}");
            }
            // From leader to leader, in parts and rounds.
            let mut data = tensor::<u8>(world.rank() as usize, 70_001, 1);
            communicator.broadcast(world.size() - 1, &mut data).unwrap();
            assert!(data == tensor::<u8>(world.size() as usize - 1, 70_001, 1), "{nodes:?}");
        });
    }
}

#[test]
fn parts_go_to_their_ranks_in_equal_and_in_any_lengths() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let (me, ranks) = (world.rank() as usize, world.size() as usize);
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for part in [0, 3, 700] {
                let mine = tensor::<f32>(me, ranks * part, 2);
                let mut came = vec![f32::NAN; ranks * part];
                communicator.all_to_all(&mine, &mut came).unwrap();
                let of = |rank: usize| tensor::<f32>(rank, ranks * part, 2)[me * part..][..part].to_vec();
                assert!(
                    bits(&came) == bits(&(0..ranks).map(of).collect::<Vec<_>>().concat()),
                    "{nodes:?} {part}"
                );
            }
            let mut came = Vec::new();
            for factor in [0, 1, 400] {
                let counts =
                    |rank: usize| (0..ranks).map(|to| (rank * 3 + to * 5) % 4 * factor).collect::<Vec<_>>();
                let all = |rank: usize| tensor::<bf16>(rank, counts(rank).iter().sum(), factor);
                let from = communicator.all_to_all_v(&all(me), &counts(me), &mut came).unwrap();
                assert_eq!(from, (0..ranks).map(|rank| counts(rank)[me]).collect::<Vec<_>>());
                let of = |rank: usize| {
                    let first: usize = counts(rank)[..me].iter().sum();
                    all(rank)[first..][..counts(rank)[me]].to_vec()
                };
                assert!(
                    bits(&came) == bits(&(0..ranks).map(of).collect::<Vec<_>>().concat()),
                    "{nodes:?} {factor}"
                );
            }
        });
    }
}

#[test]
fn everybody_has_the_elements_of_all() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for len in LENGTHS {
                let mut came = vec![f32::NAN; world.size() as usize * len];
                communicator.all_gather(&tensor::<f32>(world.rank() as usize, len, 4), &mut came).unwrap();
                let all = (0..world.size() as usize).map(|rank| tensor::<f32>(rank, len, 4));
                assert!(bits(&came) == bits(&all.collect::<Vec<_>>().concat()), "{nodes:?} {len}");
            }
        });
    }
}

#[test]
fn reduce_scatter_has_the_bits_of_its_part_of_an_all_reduce() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let (me, ranks) = (world.rank() as usize, world.size() as usize);
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for len in LENGTHS {
                let mine = tensor::<bf16>(me, ranks * len, 6);
                let (mut whole, mut part) = (mine.clone(), tensor::<bf16>(me, len, 7));
                communicator.all_reduce(&mut whole).unwrap();
                communicator.reduce_scatter(&mine, &mut part).unwrap();
                assert!(bits(&part) == bits(&whole[me * len..][..len]), "{nodes:?} {len}");
                assert!(bits(&whole) == bits(&summed::<bf16>(ranks, ranks * len, 6)), "{nodes:?} {len}");
            }
        });
    }
}

#[test]
fn reduce_gives_root_all_reduce_bits_and_others_keep_data() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let (me, ranks) = (world.rank() as usize, world.size() as usize);
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for (root, len) in (0..ranks).flat_map(|root| LENGTHS.map(|len| (root, len))) {
                let mut data = tensor::<bf16>(me, len, 8);
                communicator.reduce(root as u32, &mut data).unwrap();
                let right = if me == root { summed::<bf16>(ranks, len, 8) } else { tensor(me, len, 8) };
                assert!(bits(&data) == bits(&right), "{nodes:?} {root} {len}");
            }
        });
    }
}

#[test]
fn each_rank_but_the_root_sends_its_elements_once() {
    on_ranks(&[0, 1, 2, 3], &tiny(), |world| {
        let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
        communicator.take_counts();
        communicator.reduce(2, &mut vec![1.0f32; 4096]).unwrap();
        let sent = if world.rank() == 2 { 0 } else { 4 * 4096 };
        assert_eq!(communicator.take_counts().inter_node_bytes, sent);
    });
}

/// Without a cache all is staged and written past it.
#[test]
fn collectives_staged_past_cache_have_same_bits() {
    let mut options: Options = tiny();
    options.config.cache = 0;
    for nodes in SHAPES {
        on_ranks(nodes, &options, |world| {
            let (me, ranks) = (world.rank() as usize, world.size() as usize);
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            reduces::<f32>(&world, &mut communicator, 4321);
            let mut data = tensor::<u8>(me, 4321, 1);
            communicator.broadcast(0, &mut data).unwrap();
            assert!(data == tensor::<u8>(0, 4321, 1), "{nodes:?}");
            let mut came = vec![bf16::ZERO; ranks * 700];
            communicator.all_gather(&tensor::<bf16>(me, 700, 2), &mut came).unwrap();
            let of = |rank| tensor::<bf16>(rank, 700, 2);
            assert!(came == (0..ranks).map(of).collect::<Vec<_>>().concat(), "{nodes:?}");
            communicator.all_to_all(&tensor::<bf16>(me, ranks * 700, 3), &mut came).unwrap();
            let of = |rank| tensor::<bf16>(rank, ranks * 700, 3)[me * 700..][..700].to_vec();
            assert!(came == (0..ranks).map(of).collect::<Vec<_>>().concat(), "{nodes:?}");
        });
    }
}
