//! Steps of several microbatches, against one process that sums them in the same order.

use sidelane::Error;
use sidelane::error::{CallError, PlanError};
use sidelane::overlap::HostExecutor;
use sidelane_parallel::data::{DataError, DataParallel, FullySharded, Layout};

use crate::data::{ADAM, Model, Reference, SHARDINGS, Sample, WORLDS, is_refused_by, sample};
use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{bits, communicator, counting_communicator};

const STEPS: usize = 2;

/// The `nth` of some microbatches of a rank in a step.
fn microbatch(seed: u64, rank: usize, (step, nth, microbatches): (usize, usize, usize)) -> Sample {
    sample(seed, rank, step * microbatches + nth)
}

/// Whether microbatches are summed over the ranks one by one: ZeRO-3 alone.
fn reduces_each(way: usize) -> bool {
    way == SHARDINGS.len()
}

/// One process that takes some steps, in the order of sums of a strategy.
fn reference(seed: u64, ranks: usize, microbatches: usize, way: usize) -> Vec<f32> {
    let mut reference = Reference::new(seed);
    for step in 0..STEPS {
        let of = |rank, nth| microbatch(seed, rank, (step, nth, microbatches));
        reference.step_by(match reduces_each(way) {
            true => (0..microbatches).map(|nth| (0..ranks).map(|rank| of(rank, nth)).collect()).collect(),
            false => (0..ranks).map(|rank| (0..microbatches).map(|nth| of(rank, nth)).collect()).collect(),
        });
    }
    reference.parameters
}

#[test]
fn microbatches_are_summed_in_the_order_that_the_page_states() {
    let seed = random_seed();
    for nodes in WORLDS {
        for microbatches in 1..=3 {
            for way in 0..4 {
                let right = reference(seed, nodes.len(), microbatches, way);
                for overlap in [false, true] {
                    let executor = HostExecutor::new().overlap(overlap);
                    on_ranks(nodes, &tiny(), |world| {
                        let mut group = communicator(&world);
                        let mut model = Model::new(&mut group, way, seed);
                        for step in 0..STEPS {
                            for nth in 0..microbatches {
                                let is_last = nth + 1 == microbatches;
                                let of_rank = (step, nth, microbatches);
                                let sample = microbatch(seed, world.rank() as usize, of_rank);
                                model.microbatch(&mut group, &executor, sample, is_last).unwrap();
                            }
                            model.step(&mut group).unwrap();
                        }
                        let case = format!("{nodes:?}, {microbatches} microbatches, way {way}");
                        assert_eq!(bits(&model.parameters(&mut group)), bits(&right), "{case}");
                    });
                }
            }
        }
    }
}

#[test]
fn microbatches_move_and_hold_what_the_page_states() {
    const LAYER: usize = 1536;
    let (of_layer, whole) = (4 * LAYER as u64, 12 * LAYER as u64);
    let executor = HostExecutor::new().overlap(false);
    let (before, behind) = (vec![1.0; 3 * LAYER], [1.0; LAYER]);
    for nodes in [&[0, 1][..], &[0, 1, 2, 3]] {
        let ranks = nodes.len() as u64;
        let share = whole / ranks * (ranks - 1);
        for (sharding, of_last) in SHARDINGS.into_iter().zip([2 * share, 2 * share, share]) {
            on_ranks(nodes, &tiny(), |world| {
                let mut group = counting_communicator(&world);
                let layout = Layout::buckets(&[LAYER; 3], of_layer as usize).unwrap();
                let mut model =
                    DataParallel::new(&mut group, layout, sharding, before.clone(), ADAM).unwrap();
                group.take_counts();
                for _ in 0..2 {
                    model
                        .accumulate(|pass| (0..3).rev().try_for_each(|nth| pass.gradient(nth, &behind)))
                        .unwrap();
                    assert_eq!(group.take_counts().inter_node_bytes, 0);
                    assert_eq!(model.memory_usage().gradients_bytes, whole);
                }
                model
                    .backward(&mut group, &executor, |pass| {
                        (0..3).rev().try_for_each(|nth| pass.gradient(nth, &behind))
                    })
                    .unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, of_last, "{sharding:?} {ranks}");
                assert_eq!(model.memory_usage().buffers_peak_bytes, whole);
            });
        }
        on_ranks(nodes, &tiny(), |world| {
            let mut group = counting_communicator(&world);
            let layout = Layout::layers(&[[LAYER]; 3]).unwrap();
            let mut model = FullySharded::new(&mut group, layout, 0, &before, ADAM).unwrap();
            for nth in 0..3 {
                group.take_counts();
                model.forward(&mut group, &executor, |_, _| Ok(())).unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, share);
                let body = |_: usize, _: &[f32], gradient: &mut [f32]| {
                    gradient.copy_from_slice(&behind);
                    Ok(())
                };
                match nth {
                    2 => model.backward(&mut group, &executor, body).unwrap(),
                    _ => model.accumulate(&mut group, &executor, body).unwrap(),
                }
                assert_eq!(group.take_counts().inter_node_bytes, 2 * share);
                let held = model.memory_usage();
                assert_eq!(held.gradients_bytes, whole / ranks);
                // Later sums over the ranks come when the layer is dropped.
                assert_eq!(held.buffers_peak_bytes, 2 * of_layer);
            }
        });
    }
}

#[test]
fn microbatch_that_fails_is_forgotten_with_those_before_it() {
    let seed = random_seed();
    let stop = || DataError::Call(PlanError::RefusedHere.into());
    let executor = HostExecutor::new();
    for way in 0..4 {
        let mut reference = Reference::new(seed);
        reference.step_by((0..3).map(|rank| vec![sample(seed, rank, 0)]).collect());
        on_ranks(&[0, 0, 1], &tiny(), |world| {
            let mut group = communicator(&world);
            let mut model = Model::new(&mut group, way, seed);
            let mine = || sample(seed, world.rank() as usize, 0);
            model.microbatch(&mut group, &executor, mine(), false).unwrap();
            let failed = match &mut model {
                Model::Whole(model, _) => model.accumulate(|_| Err(stop())),
                Model::Sharded(model) => {
                    model.accumulate(&mut group, &executor, |_, _, _| match world.rank() {
                        1 => Err(stop()),
                        _ => Ok(()),
                    })
                }
            };
            match (reduces_each(way), world.rank()) {
                (true, 0 | 2) => assert!(is_refused_by(&failed.unwrap_err(), 1)),
                _ => assert_eq!(failed, Err(stop())),
            }
            assert_eq!(model.step(&mut group), Err(DataError::NoGradients));
            model.microbatch(&mut group, &executor, mine(), true).unwrap();
            model.step(&mut group).unwrap();
            assert_eq!(bits(&model.parameters(&mut group)), bits(&reference.parameters), "way {way}");
        });
    }
}

#[test]
fn ranks_with_other_microbatch_count_are_told_at_step() {
    let seed = random_seed();
    let executor = HostExecutor::new();
    for way in 0..SHARDINGS.len() {
        on_ranks(&[0, 1], &tiny(), |world| {
            let mut group = communicator(&world);
            let (rank, peer) = (world.rank(), 1 - world.rank());
            let mut model = Model::new(&mut group, way, seed);
            let before = (bits(&model.parameters(&mut group)), model.save());
            let mine = || sample(seed, rank as usize, 0);
            if rank == 1 {
                model.microbatch(&mut group, &executor, mine(), false).unwrap();
            }
            model.microbatch(&mut group, &executor, mine(), true).unwrap();
            let (mine, theirs) = (1 + u64::from(rank), 1 + u64::from(peer));
            let differ = CallError::ConfigsDiffer { what: "microbatches", rank, peer, mine, theirs };
            assert_eq!(model.step(&mut group), Err(DataError::Call(Error::Call(differ))));
            assert_eq!((bits(&model.parameters(&mut group)), model.save()), before);
        });
    }
}
