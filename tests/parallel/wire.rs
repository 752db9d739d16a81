//! Parameters and gradients that travel in bf16, against one process with the same roundings.

use sidelane::error::CallError;
use sidelane::overlap::HostExecutor;
use sidelane::{Error, World};
use sidelane_parallel::data::{DataError, DataParallel, FullySharded, Layout, Wire, WireDtype};

use crate::data::{ADAM, Model, Reference, SHARDINGS, WORLDS, sample};
use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{bits, communicator, counting_communicator};

const STEPS: usize = 3;
const NARROW: WireDtype = WireDtype::Bf16;
const WIRES: [Wire; 3] = [
    Wire { parameters: NARROW, gradients: WireDtype::F32 },
    Wire { parameters: WireDtype::F32, gradients: NARROW },
    Wire { parameters: NARROW, gradients: NARROW },
];

/// The wire that a strategy uses: plain data parallelism gathers no parameters.
fn of_way(wire: Wire, way: usize) -> Wire {
    if way == 0 { Wire { parameters: WireDtype::F32, ..wire } } else { wire }
}

#[test]
fn every_strategy_rounds_what_travels_and_nothing_else() {
    let seed = random_seed();
    for nodes in WORLDS {
        for (wire, way) in WIRES.into_iter().flat_map(|wire| (0..4).map(move |way| (wire, way))) {
            let mut right = Reference::new(seed).with_wire(of_way(wire, way));
            (0..STEPS).for_each(|_| right.step(seed, nodes.len()));
            for overlap in [false, true] {
                let executor = HostExecutor::new().overlap(overlap);
                let case = format!("{nodes:?}, {wire:?}, way {way}");
                let shards = on_ranks(nodes, &tiny(), |world| {
                    let mut group = communicator(&world);
                    let mut model = Model::new(&mut group, way, seed).with_wire(wire);
                    (0..STEPS).for_each(|step| model.train(&mut group, &executor, seed, step));
                    assert_eq!(bits(&model.parameters(&mut group)), bits(&right.seen()), "{case}");
                    model.save()
                });
                // A checkpoint has the parameters of the optimizer.
                on_ranks(&[0], &tiny(), |world| {
                    let mut group = communicator(&world);
                    let mut model = Model::new(&mut group, 0, seed);
                    model.load(&mut group, &shards).unwrap();
                    assert_eq!(bits(&model.parameters(&mut group)), bits(&right.parameters), "{case}");
                });
            }
        }
    }
}

#[test]
fn microbatches_are_summed_before_they_are_rounded() {
    let seed = random_seed();
    let (nodes, executor) = ([0, 0, 1], HostExecutor::new());
    for way in 0..SHARDINGS.len() {
        let wire = WIRES[2];
        let mut right = Reference::new(seed).with_wire(of_way(wire, way));
        right.step_by((0..3).map(|rank| (0..2).map(|nth| sample(seed, rank, nth)).collect()).collect());
        on_ranks(&nodes, &tiny(), |world| {
            let mut group = communicator(&world);
            let mut model = Model::new(&mut group, way, seed).with_wire(wire);
            for nth in 0..2 {
                let sample = sample(seed, world.rank() as usize, nth);
                model.microbatch(&mut group, &executor, sample, nth == 1).unwrap();
            }
            model.step(&mut group).unwrap();
            assert_eq!(bits(&model.parameters(&mut group)), bits(&right.seen()), "way {way}");
        });
    }
}

#[test]
fn checkpoint_loads_into_rounded_parameters_training_goes_on() {
    let seed = random_seed();
    let (wire, executor) = (WIRES[0], HostExecutor::new());
    for way in 1..4 {
        let shards = on_ranks(&[0, 0], &tiny(), |world| {
            let mut group = communicator(&world);
            let mut model = Model::new(&mut group, way, seed).with_wire(wire);
            model.train(&mut group, &executor, seed, 0);
            model.save()
        });
        let mut right = Reference::new(seed).with_wire(wire);
        right.step(seed, 2);
        right.step(seed, 3);
        on_ranks(&[0, 0, 1], &tiny(), |world| {
            let mut group = communicator(&world);
            let mut model = Model::new(&mut group, way, seed.wrapping_add(1)).with_wire(wire);
            model.load(&mut group, &shards).unwrap();
            model.train(&mut group, &executor, seed, 1);
            assert_eq!(bits(&model.parameters(&mut group)), bits(&right.seen()), "way {way}");
        });
    }
}

/// Bytes that a rank sends forward, backward and in a step.
fn sent(world: &World, way: usize, wire: Wire) -> [u64; 3] {
    const LAYER: usize = 1536;
    let mut group = counting_communicator(world);
    let (executor, before) = (HostExecutor::new().overlap(false), vec![1.0; 3 * LAYER]);
    let mut counted = Vec::new();
    if let Some(&sharding) = SHARDINGS.get(way) {
        let layout = Layout::buckets(&[LAYER; 3], 4 * LAYER).unwrap();
        let model = DataParallel::new(&mut group, layout, sharding, before, ADAM).unwrap();
        let mut model = model.with_wire(wire);
        group.take_counts();
        counted.push(0);
        let gradients = [1.0; LAYER];
        let result = model.backward(&mut group, &executor, |pass| {
            (0..3).try_for_each(|nth| pass.gradient(nth, &gradients))
        });
        result.unwrap();
        counted.push(group.take_counts().inter_node_bytes);
        model.step(&mut group).unwrap();
    } else {
        let layout = Layout::layers(&[[LAYER]; 3]).unwrap();
        let model = FullySharded::new(&mut group, layout, 1, &before, ADAM).unwrap();
        let mut model = model.with_wire(wire);
        group.take_counts();
        model.forward(&mut group, &executor, |_, _| Ok(())).unwrap();
        counted.push(group.take_counts().inter_node_bytes);
        model.backward(&mut group, &executor, |_, _, _| Ok(())).unwrap();
        counted.push(group.take_counts().inter_node_bytes);
        model.step(&mut group).unwrap();
    }
    counted.push(group.take_counts().inter_node_bytes);
    [counted[0], counted[1], counted[2]]
}

#[test]
fn parameters_and_gradients_in_bf16_are_half_the_bytes() {
    for nodes in [&[0, 1][..], &[0, 1, 2, 3]] {
        let others = nodes.len() as u64 - 1;
        let share = 4 * 3 * 1536 / nodes.len() as u64 * others;
        // A step compares 24 bytes.
        let compared = 24 * others;
        let of = |dtype: WireDtype| if dtype == NARROW { share / 2 } else { share };
        for wire in WIRES.into_iter().chain([Wire::default()]) {
            let (parameters, gradients) = (of(wire.parameters), of(wire.gradients));
            for (way, right) in [
                [0, 2 * gradients, compared],
                [0, 2 * gradients, parameters + compared],
                [0, gradients, parameters + compared],
                [parameters, parameters + gradients, compared],
            ]
            .into_iter()
            .enumerate()
            {
                on_ranks(nodes, &tiny(), |world| {
                    assert_eq!(sent(&world, way, wire), right, "{nodes:?}, {wire:?}, way {way}");
                });
            }
        }
    }
}

#[test]
fn ranks_of_different_wires_get_an_error() {
    let seed = random_seed();
    for way in 0..4 {
        on_ranks(&[0, 0], &tiny(), |world| {
            let mut group = communicator(&world);
            let wire = if world.rank() == 0 { Wire::default() } else { WIRES[2] };
            let mut model = Model::new(&mut group, way, seed).with_wire(wire);
            let mine = sample(seed, world.rank() as usize, 0);
            let error = model.microbatch(&mut group, &HostExecutor::new(), mine, true).unwrap_err();
            assert!(matches!(error, DataError::Call(Error::Call(CallError::Disagree { .. }))), "{error}");
        });
    }
}
