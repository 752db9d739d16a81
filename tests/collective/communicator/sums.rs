//! All-reduces have the bits that their order says.

use half::{bf16, f16};
use sidelane::collective::AllReduceAlgorithm;
use sidelane::dtype::PartialDtype;

use super::case::{LENGTHS, SHAPES, Wide, bits, communicator, element, reduces, tensor};
use crate::support::{To, on_ranks, tiny};

#[test]
fn sums_are_made_by_ascending_rank_wherever_ranks_are() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, AllReduceAlgorithm::Direct);
            for len in LENGTHS {
                reduces::<f32>(&world, &mut communicator, len);
                reduces::<bf16>(&world, &mut communicator, len);
                reduces::<f16>(&world, &mut communicator, len);
            }
        });
    }
}

/// A round's share `s` in the order s + 1, s + 2, ... s; each partial sum in the wire's type.
fn around<E: Wide>(ranks: usize, len: usize, round: usize, round_to: fn(f32) -> f32) -> Vec<E>
where
    f32: To<E>,
{
    let size = size_of::<E>();
    let of = |at: usize| -> E {
        let (first, within) = (at / round * round, at % round);
        let width = (((len - first).min(round) * size).div_ceil(ranks)).next_multiple_of(64) / size;
        let share = within / width;
        let partial = |sum: Option<f32>, rank: usize| {
            let own = element::<E>(rank, at, 0).wide();
            sum.map_or(own, |sum| round_to(sum) + own)
        };
        let total =
            (1..=ranks).map(|step| (share + step) % ranks).fold(None, |sum, rank| Some(partial(sum, rank)));
        (total.unwrap() + 0.0).to()
    };
    (0..len).map(of).collect()
}

#[test]
fn ring_adds_rank_by_rank_and_rounds_partial_sums_to_wire_type() {
    let wide: fn(f32) -> f32 = |sum| sum;
    let narrow: fn(f32) -> f32 = |sum| bf16::from_f32(sum).to_f32();
    for nodes in SHAPES {
        for (wire, round_to) in [(PartialDtype::F32, wide), (PartialDtype::Bf16, narrow)] {
            on_ranks(nodes, &tiny(), |world| {
                let (me, ranks) = (world.rank() as usize, world.size() as usize);
                let mut communicator = communicator(&world, AllReduceAlgorithm::Ring(wire));
                let bytes = 1024.max(128 * ranks) / ranks / 128 * 64 * ranks;
                for len in LENGTHS {
                    let mut data = tensor::<bf16>(me, len, 0);
                    communicator.all_reduce(&mut data).unwrap();
                    let right = around::<bf16>(ranks, len, bytes / 2, round_to);
                    assert!(bits(&data) == bits(&right), "{nodes:?} {wire:?} {len}");
                }
                if wire == PartialDtype::F32 {
                    let mut data = tensor::<f32>(me, 1000, 0);
                    communicator.all_reduce(&mut data).unwrap();
                    assert!(bits(&data) == bits(&around::<f32>(ranks, 1000, bytes / 4, round_to)));
                }
            });
        }
    }
}
