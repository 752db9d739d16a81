//! Common parts of these tests: communicators of short rounds, tensors, and expected results.

use half::{bf16, f16};
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::{Element, World};

use crate::support::To;

/// Ranks by node: alone, on one, two and three nodes, even and not.
pub const SHAPES: [&[u32]; 6] =
    [&[0], &[0; 3], &[0, 1], &[0, 1, 0, 2, 1], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 2]];
/// Elements: none, fewer than ranks, a line and a bit, more than a round, and an odd number.
pub const LENGTHS: [usize; 5] = [0, 1, 37, 1000, 4321];

/// Bytes of results that land in place.
pub const LANDING: u64 = 32 << 10;

/// Rounds of a kilobyte or two, so that small tensors take many.
pub fn communicator(world: &World, sums: AllReduceAlgorithm) -> Communicator {
    let group = world.all().unwrap();
    let chunk = 1024.max(128 * u64::from(world.size()));
    Communicator::builder(&group)
        .chunk(chunk)
        .one_shot_bytes(96)
        .zero_copy_bytes(LANDING)
        .algorithm(sums)
        .build()
        .unwrap()
}

/// Of different sizes, so that the order of a sum shows.
pub fn element<E>(rank: usize, at: usize, seed: usize) -> E
where
    f32: To<E>,
{
    let mixed = (rank * 7919 + at * 104_729 + seed * 1_299_709) % 65_521;
    ((mixed as f32 - 32_760.0) * [1.0, 0.01, 37.0][mixed % 3] / 512.0).to()
}

pub fn tensor<E>(rank: usize, len: usize, seed: usize) -> Vec<E>
where
    f32: To<E>,
{
    (0..len).map(|at| element(rank, at, seed)).collect()
}

pub trait Wide: Element + PartialEq + std::fmt::Debug {
    fn wide(self) -> f32;
}
impl Wide for f32 {
    fn wide(self) -> f32 {
        self
    }
}
impl Wide for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
}
impl Wide for f16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

pub fn bits<E: Element>(of: &[E]) -> &[u8] {
    bytemuck::cast_slice(of)
}

/// By ascending rank from +0, rounded once.
pub fn summed<E: Wide>(ranks: usize, len: usize, seed: usize) -> Vec<E>
where
    f32: To<E>,
{
    (0..len)
        .map(|at| (0..ranks).fold(0.0, |sum, rank| sum + element::<E>(rank, at, seed).wide()).to())
        .collect()
}

pub fn reduces<E: Wide>(world: &World, communicator: &mut Communicator, len: usize)
where
    f32: To<E>,
{
    let (me, ranks) = (world.rank() as usize, world.size() as usize);
    for seed in 0..2 {
        let mut data = tensor::<E>(me, len, seed);
        communicator.all_reduce(&mut data).unwrap();
        assert!(bits(&data) == bits(&summed::<E>(ranks, len, seed)), "{len} {:?} of rank {me}", E::DTYPE);
    }
}
