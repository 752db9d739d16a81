//! Embedding and cross-entropy that are cut by vocabulary, against whole ones in one process.

use half::bf16;
use sidelane::error::{CallError, PlanError};
use sidelane::{Error, World};
use sidelane_parallel::tensor::{
    Activations, VocabularyParallelCrossEntropy, VocabularyParallelEmbedding, cut_rows,
};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{
    Elements, WORLDS, bits, bits_of, columns, communicator, counting_communicator,
    cross_entropy as reference, differing, elements, rounded, tensor, values,
};

const VOCABULARY: usize = 48;
const HIDDEN: usize = 20;
const TOKENS: usize = 24;

fn ids(seed: u64) -> Vec<u32> {
    tensor(seed, 9, TOKENS)
        .iter()
        .map(|value| ((value + 1.0) / 2.0 * VOCABULARY as f32) as u32 % 48)
        .collect()
}

fn check_embedding<E: Elements>(seed: u64) {
    let (ids, weight) = (ids(seed), tensor(seed, 0, VOCABULARY * HIDDEN));
    let of_rows = rounded::<E>(&tensor(seed, 1, TOKENS * HIDDEN));
    let rows: Vec<f32> = ids
        .iter()
        .flat_map(|&id| weight[id as usize * HIDDEN..][..HIDDEN].iter().map(|value| 0.0 + value))
        .collect();
    let rows = rounded::<E>(&rows);
    let mut of_weight = vec![0.0; VOCABULARY * HIDDEN];
    for (&id, of_row) in ids.iter().zip(of_rows.chunks_exact(HIDDEN)) {
        let sum = &mut of_weight[id as usize * HIDDEN..][..HIDDEN];
        sum.iter_mut().zip(of_row).for_each(|(sum, of)| *sum += of);
    }
    for way in [Activations::Replicated, Activations::SequenceParallel] {
        for nodes in WORLDS {
            on_ranks(nodes, &tiny(), |world| {
                let part = (world.rank(), world.size());
                let mut group = communicator(&world);
                let own = cut_rows(&weight, HIDDEN, part).unwrap().to_vec();
                let layer =
                    VocabularyParallelEmbedding::new(&mut group, VOCABULARY, HIDDEN, way, own).unwrap();
                let layer = layer.with_rows::<E>();
                let tokens = |whole: &[f32]| match way {
                    Activations::Replicated => whole.to_vec(),
                    Activations::SequenceParallel => cut_rows(whole, HIDDEN, part).unwrap().to_vec(),
                };
                let got = layer.forward(&mut group, &ids).unwrap();
                assert_eq!(bits_of(&got), bits(&tokens(&rows)), "{nodes:?} {}", E::NAME);
                group.take_counts();
                let gradient = layer.backward(&mut group, &ids, &elements::<E>(&tokens(&of_rows))).unwrap();
                assert_eq!(bits(&gradient), bits(cut_rows(&of_weight, HIDDEN, part).unwrap()));
                if way == Activations::SequenceParallel && nodes == [0, 1] {
                    let sent = TOKENS / 2 * HIDDEN * size_of::<E>();
                    assert_eq!(group.take_counts().inter_node_bytes, sent as u64);
                }
            });
        }
    }
}

#[test]
fn embedding_has_the_bits_of_its_rows_and_sums_in_order() {
    let seed = random_seed();
    check_embedding::<f32>(seed);
    check_embedding::<bf16>(seed);
}

#[test]
fn rows_of_other_ranks_are_zeros_before_the_sum() {
    let parts = on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let layer = VocabularyParallelEmbedding::new(
            &mut group,
            50_000,
            1,
            Activations::Replicated,
            vec![1.0; 25_000],
        )
        .unwrap();
        layer.lookup(&[0, 1, 25_000, 25_001]).unwrap()
    });
    assert_eq!(parts, [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]);
}

const IGNORED: u32 = -100i32 as u32;

fn cross_entropy() -> VocabularyParallelCrossEntropy {
    VocabularyParallelCrossEntropy { vocabulary: VOCABULARY, ignore: Some(IGNORED) }
}

/// Every fifth token has no loss.
fn targets(seed: u64) -> Vec<u32> {
    ids(seed).iter().enumerate().map(|(at, &id)| if at % 5 == 2 { IGNORED } else { id }).collect()
}

/// This rank's loss and gradient of its logits, which are the nearest elements.
fn trained<E: Elements>(
    world: &World,
    logits: &[f32],
    targets: &[u32],
    of_losses: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let mut group = communicator(world);
    let own = VOCABULARY / world.size() as usize;
    let logits = columns(logits, VOCABULARY, world.rank() as usize * own, own);
    let logits = elements::<E>(&logits);
    let (losses, tape) = cross_entropy().forward(&mut group, &logits, targets).unwrap();
    (losses, values(&cross_entropy().backward(tape, of_losses).unwrap()))
}

#[test]
fn cross_entropy_has_the_bits_of_sums_by_rank() {
    let seed = random_seed();
    check_cross_entropy::<f32>(seed);
    check_cross_entropy::<bf16>(seed);
}

fn check_cross_entropy<E: Elements>(seed: u64) {
    let (targets, mut of_losses) = (targets(seed), tensor(seed, 4, TOKENS));
    // As of a mean over no token.
    let ignored = of_losses.iter_mut().zip(&targets).filter(|(_, target)| **target == IGNORED);
    ignored.for_each(|(of_loss, _)| *of_loss = f32::INFINITY);
    let logits: Vec<f32> = tensor(seed, 3, TOKENS * VOCABULARY).iter().map(|logit| logit * 30.0).collect();
    let logits = rounded::<E>(&logits);
    for nodes in WORLDS {
        let own = VOCABULARY / nodes.len();
        let results = on_ranks(nodes, &tiny(), |world| trained::<E>(&world, &logits, &targets, &of_losses));
        for (token, row) in logits.chunks_exact(VOCABULARY).enumerate() {
            let target = targets[token];
            let (loss, of_logits) = match target {
                IGNORED => (0.0, vec![0.0; VOCABULARY]),
                target => reference(row, own, target as usize),
            };
            for (rank, (losses, gradient)) in results.iter().enumerate() {
                assert_eq!(losses[token].to_bits(), loss.to_bits(), "token {token} of rank {rank}");
                for column in 0..own {
                    let id = rank * own + column;
                    // An ignored token has no gradient, whatever that of its loss is.
                    let of_loss = if target == IGNORED { 1.0 } else { of_losses[token] };
                    let right = of_logits[id] * of_loss;
                    let got = gradient[token * own + column];
                    assert_eq!(bits(&[got]), bits(&rounded::<E>(&[right])), "{token} {id}");
                }
            }
        }
    }
}

#[test]
fn cross_entropy_sends_a_few_values_of_a_token_and_no_logits() {
    for nodes in [&[0, 1][..], &[0, 1, 2, 3]] {
        let (ranks, own) = (nodes.len(), VOCABULARY / nodes.len());
        let sent = on_ranks(nodes, &tiny(), |world| {
            let mut group = counting_communicator(&world);
            let (logits, targets) = (vec![0.0f32; 64 * own], vec![0; 64]);
            cross_entropy().forward(&mut group, &logits, &targets).unwrap();
            group.take_counts().inter_node_bytes
        });
        let bytes = 4 * 64 * (ranks - 1);
        // Maxima go to all. Of two sums each rank makes a share, and sends it to all.
        assert_eq!(sent, vec![(bytes + 2 * 2 * bytes / ranks) as u64; ranks]);
        // Three all-reduces, and a gather of logits.
        let (three, gather) = (3 * 2 * bytes / ranks, bytes * own);
        assert_eq!(sent[0] as f64 / three as f64, (ranks as f64 + 4.0) / 6.0);
        assert!(sent[0] < gather as u64);
    }
}

#[test]
fn cross_entropy_is_the_formula_within_its_roundings() {
    let seed = random_seed();
    let targets = targets(seed);
    for scale in [1.0, 80.0, 1e4] {
        let logits: Vec<f32> =
            tensor(seed, 5, TOKENS * VOCABULARY).iter().map(|logit| logit * scale).collect();
        let results =
            on_ranks(&[0, 0, 1], &tiny(), |world| trained::<f32>(&world, &logits, &targets, &[1.0; TOKENS]));
        for (token, row) in logits.chunks_exact(VOCABULARY).enumerate() {
            if targets[token] == IGNORED {
                continue;
            }
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&logit| (f64::from(logit) - f64::from(largest)).exp()).sum();
            let of_target = f64::from(row[targets[token] as usize]) - f64::from(largest);
            let loss = sum.ln() - of_target;
            // A rounded difference changes a power by its own size; powers of large differences are
            // too small to matter. Then the roundings of the sum, of two functions and of the loss.
            let bound = (VOCABULARY as f64 + 16.0 + 2.0 * of_target.abs()) * f64::from(f32::EPSILON);
            for (losses, _) in &results {
                assert!((f64::from(losses[token]) - loss).abs() <= bound, "{} is not {loss}", losses[token]);
            }
            let total: f32 = results.iter().flat_map(|(_, of)| &of[token * 16..][..16]).sum();
            assert!(total.abs() < 1e-5, "gradients of a token sum to 0, not {total}");
        }
    }
}

#[test]
fn ids_outside_the_vocabulary_are_refused_on_all_ranks() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let (own, vocabulary) = (vec![1.0; 4], if world.rank() == 0 { 8 } else { 4 });
        let rows = vec![1.0; vocabulary / 2];
        let error =
            VocabularyParallelEmbedding::new(&mut group, vocabulary, 1, Activations::Replicated, rows);
        assert_eq!(differing(error.unwrap_err()), "vocabulary");
        let layer = VocabularyParallelEmbedding::new(&mut group, 8, 1, Activations::Replicated, own).unwrap();
        let wrong = world.rank() == 0;
        let refused = |error: Error| match error {
            Error::Plan(PlanError::BadParameter { seen: 8, .. }) => wrong,
            Error::Call(CallError::PeerRefused { peer: 0, .. }) => !wrong,
            _ => false,
        };
        assert!(refused(layer.forward(&mut group, &[if wrong { 8 } else { 7 }]).unwrap_err()));
        assert_eq!(layer.forward(&mut group, &[7]).unwrap(), [1.0]);

        let loss = VocabularyParallelCrossEntropy { vocabulary: 8, ignore: None };
        let target = [if wrong { 8 } else { 7 }];
        assert!(refused(loss.forward(&mut group, &[0.0; 4], &target).unwrap_err()));
        let (losses, tape) = loss.forward(&mut group, &[0.0f32; 4], &[7]).unwrap();
        assert_eq!(losses, [libm::logf(8.0)]);
        let error = loss.backward(tape, &[1.0; 2]).unwrap_err();
        assert!(matches!(error, PlanError::WrongShape { what: "gradients of losses", .. }));
        let uneven = VocabularyParallelCrossEntropy { vocabulary: 9, ignore: None };
        uneven.forward(&mut group, &[0.0; 4], &[7]).unwrap_err();
    });
}
