//! Ranks compared with one process that runs them, and with a plain run.

use moe_lm::parallel::{Chunks, Parallel, Plan};
use moe_lm::settings::{Settings, Shape};
use moe_lm::trainer::{Learned, Ranks, State, Trainer};
use sidelane::World;
use sidelane::overlap::ChunkRule;

use crate::case::{BY_SIZE, OVERLAPPED, PLAIN, assert_same_bits, finish, in_turn, on_ranks, settings};

fn assert_learned(losses: &[f32]) {
    let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
    assert!(mean(&losses[15..]) < mean(&losses[..5]) - 0.1, "{losses:?}");
}

#[test]
fn ranks_learn_to_the_last_bit_what_one_process_learns_in_their_place() {
    for (ranks, expert_parallel) in [(4, 4), (4, 2), (8, 4), (2, 1)] {
        let settings = settings(ranks, expert_parallel);
        let reference = finish(in_turn(&settings));
        assert_learned(&reference.losses);
        // As by size, but by figures that cut a small model.
        let rule = ChunkRule::new(512, 4, 8);
        for plan in [OVERLAPPED, PLAIN, Plan { chunks: Chunks::By(rule), ..OVERLAPPED }] {
            let outcomes = on_ranks(&settings, plan, finish);
            assert_eq!(outcomes.len(), ranks);
            outcomes.iter().for_each(|rank| assert_same_bits(rank, &reference));
        }
    }
}

/// Larger, so that its layers are cut by default.
fn larger() -> Settings {
    let small = settings(2, 2);
    let shape = Shape { window: 64, width: 64, top_k: 4, ..small.shape };
    Settings { shape, ..small }
}

/// Whether a rank whose chunks are chosen by size makes as many as the others: otherwise they are
/// refused.
fn are_made(settings: &Settings, chunks: u32) -> bool {
    let number = Plan { chunks: Chunks::Number(chunks), ..BY_SIZE };
    let worlds = World::threads(settings.ranks as u32).unwrap();
    std::thread::scope(|scope| {
        let rank = |world: World| {
            let plan = if world.rank() == 0 { BY_SIZE } else { number };
            scope.spawn(move || Parallel::new(world, settings, plan).is_ok())
        };
        let ranks: Vec<_> = worlds.into_iter().map(rank).collect();
        let built: Vec<bool> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(built.iter().all(|rank| *rank == built[0]), "{built:?}");
        built[0]
    })
}

#[test]
fn by_default_there_are_as_many_chunks_as_sizes_are_worth() {
    let by_default = Settings { shape: Shape::default(), batch: 16, ..settings(4, 4) };
    for (settings, expected) in [(settings(2, 2), 1), (larger(), 2), (by_default, 5)] {
        for chunks in [1, 2, 4, 5, 6] {
            assert_eq!(are_made(&settings, chunks), chunks == expected, "{chunks}, {expected} expected");
        }
    }
}

#[test]
fn chunks_by_size_leave_the_bits_as_they_are() {
    let settings = larger();
    let reference = finish(in_turn(&settings));
    assert_learned(&reference.losses);
    on_ranks(&settings, BY_SIZE, finish).iter().for_each(|rank| assert_same_bits(rank, &reference));
}

/// Logits of the experts from 12 on are zero, and stay so: without a balance loss, experts that no
/// token chooses learn nothing. Of the twelve others half begin as the negative of the other half,
/// so that six are above zero.
fn close_the_last_rank<R: Ranks>(mut trainer: Trainer<R>) -> Trainer<R> {
    let weights = &mut trainer.state.dense.weights;
    for layer in 0..trainer.settings.shape.layers {
        let range = weights.range(&format!("router.{layer}"));
        for of_row in weights.values[range].chunks_exact_mut(16) {
            let (open, closed) = of_row.split_at_mut(12);
            open.as_chunks_mut().0.iter_mut().for_each(|[weight, opposite]| *opposite = -*weight);
            closed.fill(0.0);
        }
    }
    trainer
}

fn finish_closed<R: Ranks>(trainer: Trainer<R>) -> crate::case::Outcome {
    finish(close_the_last_rank(trainer))
}

#[test]
fn a_rank_whose_experts_get_no_row_takes_part_and_bits_are_the_same() {
    let settings = Settings { balance: 0.0, ..settings(4, 4) };
    let reference = finish_closed(in_turn(&settings));
    assert_learned(&reference.losses);
    assert!(reference.decisions.experts.iter().all(|&expert| (0..12).contains(&expert)));
    for plan in [OVERLAPPED, PLAIN] {
        let outcomes = on_ranks(&settings, plan, finish_closed);
        outcomes.iter().for_each(|rank| assert_same_bits(rank, &reference));
        // No row ever came to the last rank, in any step: its experts have never seen a gradient.
        let [seen, none] = [&outcomes[0], &outcomes[3]].map(|rank| &rank.state.experts.adam.second);
        assert!(none.iter().all(|&square| square == 0.0) && seen.iter().any(|&square| square != 0.0));
    }
}

#[test]
fn a_plain_run_comes_to_the_same_losses() {
    // The whole batch at once, by one rank: sums of another order, of which the last digits differ.
    let (ranks, alone) = (settings(4, 4), settings(1, 1));
    let ranks = on_ranks(&ranks, OVERLAPPED, finish).remove(0);
    let plain = on_ranks(&alone, PLAIN, finish).remove(0);
    assert_learned(&plain.losses);
    let apart = ranks.losses.iter().zip(&plain.losses).map(|(a, b)| (a - b).abs());
    let apart = apart.max_by(f32::total_cmp).unwrap();
    assert!(apart < 1e-3 && apart > 0.0, "{apart}");
}

/// Names and gradients of all tensors: after one step the first mean of AdamW is a tenth of the
/// gradient, whereas the weights hardly depend on its length.
fn gradients(learned: &Learned) -> impl Iterator<Item = (&str, &[f32])> {
    let entries = learned.weights.entries.iter();
    entries.map(|entry| (&entry.name[..], &learned.adam.first[entry.range.clone()]))
}

/// How far apart, by the length of the second.
fn apart(own: &[f32], other: &[f32]) -> f64 {
    let length = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt()
    };
    assert_eq!(own.len(), other.len());
    let (difference, whole) = (
        length(&mut own.iter().zip(other).map(|(own, other)| own - other)),
        length(&mut other.iter().copied()),
    );
    if difference == 0.0 { 0.0 } else { difference / whole }
}

#[test]
fn a_plain_run_comes_to_gradients_of_the_same_length() {
    const MOST: f64 = 1e-4;
    fn step<R: Ranks>(mut trainer: Trainer<R>) -> State {
        trainer.step().unwrap();
        trainer.state
    }
    let with = |balance: f32, (ranks, spread): (usize, usize), plan| {
        on_ranks(&Settings { balance, ..settings(ranks, spread) }, plan, step)
    };
    let plain = with(1.0, (1, 1), PLAIN).remove(0);
    assert!(gradients(&plain.dense).all(|(_, gradient)| gradient.iter().any(|&value| value != 0.0)));
    for spread in [4, 2] {
        let ranks = with(1.0, (4, spread), OVERLAPPED);
        let mut experts = 0;
        for rank in &ranks {
            for (own, whole) in [(&rank.dense, &plain.dense), (&rank.experts, &plain.experts)] {
                for (name, gradient) in gradients(own) {
                    let plain = &whole.adam.first[whole.weights.range(name)];
                    let apart = apart(gradient, plain);
                    assert!(apart < MOST, "{name}, experts over {spread}: {apart}");
                }
            }
            experts +=
                gradients(&rank.experts).filter(|(_, gradient)| gradient.iter().any(|&g| g != 0.0)).count();
        }
        // Three matrices of 16 experts in two layers, on as many ranks as have them. How many were
        // chosen depends on the text: most.
        assert!(experts > 48 * 4 / spread, "{experts}");
    }
    // The balance would be missed.
    let without = with(0.0, (1, 1), PLAIN).remove(0);
    let router = plain.dense.weights.range("router.0");
    let missed = apart(&without.dense.adam.first[router.clone()], &plain.dense.adam.first[router]);
    assert!(missed > 1000.0 * MOST, "{missed}");
}
