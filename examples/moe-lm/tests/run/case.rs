//! A small run, and its ranks.

use std::sync::OnceLock;

use moe_lm::batches::Batches;
use moe_lm::parallel::{Chunks, Device, Parallel, Plan};
use moe_lm::record::Decisions;
use moe_lm::reference::Reference;
use moe_lm::settings::{Settings, Shape};
use moe_lm::tokens::tokenize;
use moe_lm::trainer::{Ranks, State, Trainer};
use sidelane::World;

/// Text of the tests: pages of this repository.
pub const TEXT: &str = concat!(
    include_str!("../../../../README.md"),
    include_str!("../../../../docs/design.md"),
    include_str!("../../../../docs/results.md"),
);

const VOCABULARY: usize = 256;

/// As programs have it by default.
pub const BY_SIZE: Plan =
    Plan { chunks: Chunks::AUTO, overlap: true, device: Device::Host, survives: false, killed_in: None };
pub const OVERLAPPED: Plan = Plan { chunks: Chunks::Number(3), ..BY_SIZE };
pub const PLAIN: Plan = Plan { chunks: Chunks::Number(1), overlap: false, ..BY_SIZE };

/// A model of which a step takes milliseconds.
pub fn settings(ranks: usize, expert_parallel: usize) -> Settings {
    let shape = Shape {
        vocabulary: VOCABULARY,
        window: 16,
        layers: 2,
        width: 32,
        heads: 2,
        kv_heads: 2,
        experts: 16,
        top_k: 2,
        expert_width: 16,
        tied: false,
    };
    let (batch, steps) = (8, 20);
    Settings { shape, batch, steps, rate: 2e-3, warm_up: 5, balance: 0.001, seed: 7, ranks, expert_parallel }
}

pub fn batches(settings: &Settings) -> Batches {
    static TOKENS: OnceLock<Vec<u32>> = OnceLock::new();
    Batches::new(TOKENS.get_or_init(|| tokenize(TEXT, VOCABULARY)), settings).unwrap()
}

/// Result of a rank.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub state: State,
    pub losses: Vec<f32>,
    /// After the last step, for all held-out tokens.
    pub decisions: Decisions,
    pub held: f32,
}

/// All steps, and an evaluation of the held-out tokens.
pub fn finish<R: Ranks>(mut trainer: Trainer<R>) -> Outcome {
    while trainer.steps() < trainer.settings.steps {
        trainer.step().unwrap();
    }
    let decisions = trainer.judge().unwrap();
    let held = trainer.history.held.last().unwrap().1;
    Outcome { state: trainer.state, losses: trainer.history.losses, decisions, held }
}

/// Does the same on each rank, with its trainer.
pub fn on_ranks<T: Send>(
    settings: &Settings,
    plan: Plan,
    each: impl Fn(Trainer<Parallel>) -> T + Sync,
) -> Vec<T> {
    on_each_rank(settings, plan, |_, trainer| each(trainer))
}

/// Does something on each rank, with its number and its trainer.
pub fn on_each_rank<T: Send>(
    settings: &Settings,
    plan: Plan,
    each: impl Fn(usize, Trainer<Parallel>) -> T + Sync,
) -> Vec<T> {
    let worlds = World::threads(settings.ranks as u32).unwrap();
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let each = &each;
            scope.spawn(move || {
                let rank = world.rank() as usize;
                let ranks = Parallel::new(world, settings, plan).unwrap();
                each(rank, Trainer::new(*settings, ranks, batches(settings)))
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The trainer of one process that plays all ranks.
pub fn in_turn(settings: &Settings) -> Trainer<Reference> {
    let world = World::threads(1).unwrap().remove(0);
    Trainer::new(*settings, Reference::new(world, settings).unwrap(), batches(settings))
}

/// Checks that a rank has the bits of the reference; of experts, it has some.
pub fn assert_same_bits(rank: &Outcome, reference: &Outcome) {
    assert_eq!(bits(&rank.losses), bits(&reference.losses));
    assert_eq!(rank.held.to_bits(), reference.held.to_bits());
    assert_eq!(rank.decisions, reference.decisions);
    assert_eq!(rank.state.dense.weights.entries, reference.state.dense.weights.entries);
    for (part, whole) in
        [(&rank.state.dense, &reference.state.dense), (&rank.state.experts, &reference.state.experts)]
    {
        for entry in &part.weights.entries {
            let range = whole.weights.range(&entry.name);
            let vectors = [
                (&part.weights.values, &whole.weights.values),
                (&part.adam.first, &whole.adam.first),
                (&part.adam.second, &whole.adam.second),
            ];
            for (part, whole) in vectors {
                assert_eq!(bits(&part[entry.range.clone()]), bits(&whole[range.clone()]), "{}", entry.name);
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
