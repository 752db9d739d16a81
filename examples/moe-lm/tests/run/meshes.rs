//! Ranks of a mesh learn what one process learns: to the bit where sums have one order, else within
//! the roundings of their orders.

use std::collections::BTreeMap;

use moe_lm::error::Error;
use moe_lm::mesh::{Context, MeshTrainer, Order, Sizes, Strategy, StrategyError, Zero};
use moe_lm::settings::{Settings, Shape};
use moe_lm::trainer::Trainer;
use sidelane::World;

use crate::case::{batches, in_turn, settings};

/// A model whose sizes go with all meshes here. A balance of windows would go with none that cuts
/// them.
fn small() -> Settings {
    let of = settings(1, 1);
    let shape = Shape { layers: 4, heads: 4, ..of.shape };
    Settings { shape, balance: 0.0, steps: 3, ..of }
}

fn strategy(sizes: &str) -> Strategy {
    Strategy::of(sizes.parse().unwrap())
}

/// Whole tensors, by name, with the values that ranks have of them.
type Tensors = BTreeMap<String, Vec<f32>>;

/// Result of a run: losses, and the whole parameters.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    losses: Vec<u32>,
    parameters: Tensors,
}

/// Puts values in their places. Ranks that have the same must have the same bits.
fn put(all: &mut Tensors, named: &[(String, Vec<(usize, f32)>)]) {
    for (name, values) in named {
        let tensor = all.entry(name.clone()).or_default();
        for &(place, value) in values {
            tensor.resize(tensor.len().max(place + 1), f32::NAN);
            let seen = std::mem::replace(&mut tensor[place], value);
            assert!(seen.is_nan() || seen.to_bits() == value.to_bits(), "{name}: copies differ at {place}");
        }
    }
}

fn owned(named: Vec<(&str, Vec<(usize, f32)>)>) -> Vec<(String, Vec<(usize, f32)>)> {
    named.into_iter().map(|(name, values)| (name.to_owned(), values)).collect()
}

/// Does the same on each rank, with its trainer.
fn on_ranks<T: Send>(
    settings: &Settings,
    strategy: &Strategy,
    each: impl Fn(Result<MeshTrainer, Error>) -> T + Sync,
) -> Vec<T> {
    let worlds = World::threads(strategy.sizes.ranks()).unwrap();
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let each = &each;
            scope.spawn(move || each(MeshTrainer::new(&world, settings, strategy, batches(settings))))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// All steps of a run.
fn finish(mut trainer: MeshTrainer) -> (Vec<f32>, Vec<(String, Vec<(usize, f32)>)>) {
    while trainer.steps() < trainer.settings.steps {
        trainer.step().unwrap();
    }
    let parameters = owned(trainer.parameters().unwrap());
    (trainer.history.losses.clone(), parameters)
}

fn outcome(ranks: Vec<(Vec<f32>, Vec<(String, Vec<(usize, f32)>)>)>) -> Outcome {
    let mut parameters = Tensors::new();
    ranks.iter().for_each(|(_, named)| put(&mut parameters, named));
    assert!(parameters.values().flatten().all(|value| !value.is_nan()), "no rank has some value");
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    let losses = bits(&ranks[0].0);
    assert!(ranks.iter().all(|(other, _)| bits(other) == losses), "ranks have other losses");
    Outcome { losses, parameters }
}

fn run(settings: &Settings, strategy: &Strategy) -> Outcome {
    outcome(on_ranks(settings, strategy, |trainer| finish(trainer.unwrap())))
}

/// One process that plays the data parallel ranks.
fn reference(settings: &Settings, strategy: &Strategy) -> Outcome {
    let world = World::threads(1).unwrap().remove(0);
    let trainer = MeshTrainer::reference(&world, settings, strategy, batches(settings)).unwrap();
    outcome(vec![finish(trainer)])
}

/// Gradients of the first step, and its loss; on several ranks, those of a rank's tokens.
fn first_step(mut trainer: MeshTrainer) -> (f32, Vec<(String, Vec<(usize, f32)>)>) {
    let loss = trainer.step().unwrap();
    (loss, owned(trainer.local_gradients()))
}

/// The length of a difference, by that of the second.
fn apart(own: &[f32], other: &[f32]) -> f64 {
    let length = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    assert_eq!(own.len(), other.len());
    let whole = length(&mut other.iter().map(|&value| value.into()));
    let pairs = own.iter().zip(other);
    let difference = length(&mut pairs.map(|(&own, &other)| f64::from(own) - f64::from(other)));
    if difference == 0.0 { 0.0 } else { difference / whole }
}

#[test]
fn layers_of_a_mesh_have_the_loss_and_gradients_of_candles_model() {
    for balance in [0.0, 1.0] {
        let settings = Settings { balance, ..small() };
        let ranks = on_ranks(&settings, &strategy("dp=1"), |trainer| first_step(trainer.unwrap()));
        let (loss, named) = &ranks[0];
        let mut gradients = Tensors::new();
        put(&mut gradients, named);
        let mut plain: Trainer<_> = in_turn(&settings);
        let expected = plain.step().unwrap();
        assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
        let mut seen = 0;
        for learned in [&plain.state.dense, &plain.state.experts] {
            for entry in &learned.weights.entries {
                // After one step the first mean is a tenth of the gradient.
                let tenth: Vec<f32> = gradients[&entry.name].iter().map(|of| of * (1.0 - 0.9f64) as f32).collect();
                let apart = apart(&tenth, &learned.adam.first[entry.range.clone()]);
                assert!(apart < 1e-4, "{}: {apart}", entry.name);
                seen += 1;
            }
        }
        assert_eq!(seen, gradients.len());
    }
}

#[test]
fn data_and_expert_parallel_ranks_have_the_bits_of_one_process_that_plays_them() {
    let small = small();
    for (sizes, batch, experts, microbatches) in [
        ("dp=2", 8, 16, 1),
        ("dp=2,ep=2", 8, 16, 2),
        ("dp=4,ep=2", 8, 16, 2),
        ("dp=4,ep=4", 8, 16, 1),
        ("dp=3,ep=3", 6, 12, 2),
    ] {
        let shape = Shape { experts, ..small.shape };
        let settings = Settings { shape, batch, balance: 0.01, ..small };
        let strategy = Strategy { microbatches, ..strategy(sizes) };
        assert_eq!(run(&settings, &strategy), reference(&settings, &strategy), "{sizes}");
    }
}

#[test]
fn no_schedule_and_no_zero_stage_changes_a_bit() {
    let settings = Settings { balance: 0.01, ..small() };
    let of = |sizes, microbatches| Strategy { microbatches, ..strategy(sizes) };
    let expected = reference(&settings, &of("dp=2,ep=2", 4));
    let orders = [Order::GPipe, Order::OneFOneB, Order::Interleaved(2), Order::ZeroBubbleH1];
    for order in orders {
        let strategy = Strategy { order: Some(order), ..of("pp=2,dp=2,ep=2", 4) };
        assert_eq!(run(&settings, &strategy), expected, "{order}");
    }
    for zero in [Zero::One, Zero::Two, Zero::Three] {
        let strategy = Strategy { zero, ..of("dp=2,ep=2", 4) };
        assert_eq!(run(&settings, &strategy), expected, "{zero:?}");
    }
    let all = Strategy { zero: Zero::Three, order: Some(Order::ZeroBubbleH1), ..of("pp=4,dp=2,ep=2", 4) };
    assert_eq!(run(&settings, &all), expected);
}

#[test]
fn show() {
    let settings = small();
    let one = on_ranks(&settings, &strategy("dp=1"), |trainer| first_step(trainer.unwrap())).remove(0);
    let mut whole = Tensors::new();
    put(&mut whole, &one.1);
    for (sizes, context) in [("cp=2", None), ("cp=4,ep=2", None), ("cp=2", Some(Context::Ring)), ("tp=2",None), ("tp=4,ep=4",None), ("cp=2,tp=2,ep=4",None), ("cp=2,tp=2,ep=4",Some(Context::Ring)), ("pp=2,dp=2,cp=2,tp=2,ep=4",None)] {
        let strategy = Strategy { context, ..strategy(sizes) };
        let ranks = on_ranks(&settings, &strategy, |trainer| {
            let mut trainer = trainer.unwrap();
            let loss = trainer.step().unwrap();
            (loss, owned(trainer.local_gradients()))
        });
        eprintln!("{sizes} {context:?} loss {} {} {}", ranks[0].0, one.0, ranks[0].0.to_bits() == one.0.to_bits());
    }
}
