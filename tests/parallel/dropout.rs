//! Dropout makes the choices of the whole tensor, however tokens are cut.

use half::bf16;
use sidelane::error::PlanError;
use sidelane_parallel::SettingError;
use sidelane_parallel::context::cut_zig_zag;
use sidelane_parallel::tensor::{Dropout, cut_rows};

use crate::ranks::random_seed;
use crate::tensors::{Elements, bits, bits_of, elements, rounded, tensor, values};

const TOKENS: usize = 24;
/// Four elements share a call of the generator: the last ones are less.
const WIDTH: usize = 18;

/// Numbers of tokens above 2^32, as behind a long training.
fn numbers() -> Vec<u64> {
    (0..TOKENS as u64).map(|token| 5_000_000_000 + token).collect()
}

fn check<E: Elements>(seed: u64) {
    let dropout = Dropout::new(0.3, seed, 7).unwrap();
    let x = rounded::<E>(&tensor(seed, 0, TOKENS * WIDTH));
    let whole = dropout.forward(&numbers(), &elements::<E>(&x)).unwrap();
    for (at, (&x, &y)) in x.iter().zip(&values(&whole)).enumerate() {
        let stays = rounded::<E>(&[x * (1.0 / (1.0 - 0.3f32))])[0];
        assert!(y.to_bits() == 0 || y.to_bits() == stays.to_bits(), "{at}: {y} of {x}");
    }
    let whole = values(&whole);
    for parts in [1, 2, 3, 4] {
        for part in (0..parts).map(|part| (part, parts)) {
            let drop =
                |tokens: &[u64], x: &[f32]| bits_of(&dropout.backward(tokens, &elements::<E>(x)).unwrap());
            let (tokens, rows) = (cut_rows(&numbers(), 1, part).unwrap().to_vec(), cut_rows(&x, WIDTH, part));
            assert_eq!(
                drop(&tokens, rows.unwrap()),
                bits(cut_rows(&whole, WIDTH, part).unwrap()),
                "{part:?}"
            );
            let (tokens, rows) = (cut_zig_zag(&numbers(), 1, part).unwrap(), cut_zig_zag(&x, WIDTH, part));
            assert_eq!(drop(&tokens, &rows.unwrap()), bits(&cut_zig_zag(&whole, WIDTH, part).unwrap()));
        }
    }
}

#[test]
fn every_cut_of_the_tokens_drops_the_same_elements() {
    let seed = random_seed();
    check::<f32>(seed);
    check::<bf16>(seed);
}

/// A row of many elements, by a seed and a layer.
fn dropped(probability: f32, seed: u64, layer: u32, token: u64) -> Vec<bool> {
    let dropout = Dropout::new(probability, seed, layer).unwrap();
    dropout.forward(&[token], &[1.0; 1 << 16]).unwrap().iter().map(|y| *y == 0.0).collect()
}

#[test]
fn dropout_follows_probability_and_differs_by_seed_layer_token() {
    let count = |dropped: &[bool]| dropped.iter().filter(|dropped| **dropped).count();
    assert_eq!(count(&dropped(0.0, 1, 0, 0)), 0);
    for probability in [0.1, 0.5, 0.9f32] {
        let (n, p) = (f64::from(1 << 16), f64::from(probability));
        let seen = count(&dropped(probability, 1, 0, 0)) as f64;
        assert!((seen - n * p).abs() < 4.0 * (n * p * (1.0 - p)).sqrt(), "{seen} of {probability}");
    }
    let first = dropped(0.5, 1, 0, 0);
    let others = [(2, 0, 0), (1 | 1 << 32, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 1 << 32)];
    for (seed, layer, token) in others {
        let other = dropped(0.5, seed, layer, token);
        let alike = first.iter().zip(&other).filter(|(one, other)| one == other).count() as f64;
        // Two independent choices agree in half of the elements.
        assert!((alike - 32_768.0).abs() < 4.0 * 128.0, "{seed} {layer} {token}: {alike} alike");
    }
}

#[test]
fn probabilities_out_of_range_and_uneven_rows_are_refused() {
    for wrong in [1.0, -0.1, f32::NAN] {
        let SettingError::OutOfRange { seen, .. } = Dropout::new(wrong, 0, 0).unwrap_err() else { panic!() };
        assert_eq!(seen.to_bits(), f64::from(wrong).to_bits());
    }
    let dropout = Dropout::new(0.5, 0, 0).unwrap();
    let error = dropout.forward(&[1, 2], &[1.0; 3]).unwrap_err();
    assert_eq!(error, PlanError::WrongShape { what: "rows of dropout", seen: 3, rows: 2, columns: 1 });
    assert!(dropout.forward(&[], &[1.0]).is_err());
    assert!(dropout.forward::<f32>(&[], &[]).unwrap().is_empty());
}
