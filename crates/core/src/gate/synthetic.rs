//! Routing without a router: decisions drawn from a named pattern.
//!
//! A measurement needs routing that every rank can draw again. Each token has a random stream of
//! its own, named by (seed, rank, token): its decisions depend neither on the number of tokens nor
//! on the drawing rank. So every rank can draw the routing of its peers and know the rows that must
//! arrive.

use std::fmt;
use std::str::FromStr;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Routing;
use crate::error::PlanError;

/// How busy the experts are, relative to each other.
///
/// ```
/// use sidelane_core::gate::{Pattern, synthetic};
/// let pattern: Pattern = "zipf:1.0".parse()?;
/// let routing = synthetic(pattern, 64, 8, 512, 42, 3)?;
/// assert_eq!((routing.tokens(), routing.top_k()), (512, 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// All experts alike.
    Uniform,
    /// The n-th most popular expert is chosen in proportion to n^-s. Which expert is the n-th is a
    /// permutation drawn from the seed: busy experts spread over the ranks, as they do in trained
    /// models.
    Zipf(f64),
    /// All tokens of all ranks want the same eighth of the experts, those of the first ranks.
    Incast,
}

/// A pattern that is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{seen}` is no routing pattern: uniform, incast, or zipf:S with S a number from 0 up, as in zipf:1.0"
)]
pub struct PatternError {
    /// The given text.
    pub seen: String,
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let error = || PatternError { seen: text.to_owned() };
        match text {
            "uniform" => Ok(Pattern::Uniform),
            "incast" => Ok(Pattern::Incast),
            _ => text
                .strip_prefix("zipf:")
                .and_then(|s| s.parse().ok())
                .filter(|s: &f64| s.is_finite() && !s.is_sign_negative())
                .map(Pattern::Zipf)
                .ok_or_else(error),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Uniform => f.write_str("uniform"),
            Pattern::Zipf(s) => write!(f, "zipf:{s:?}"),
            Pattern::Incast => f.write_str("incast"),
        }
    }
}

impl Pattern {
    /// Relative popularity per expert.
    fn popularity(self, experts: u32, top_k: u32, seed: u64) -> Vec<f64> {
        match self {
            Pattern::Uniform => vec![1.0; experts as usize],
            Pattern::Incast => {
                let wanted = top_k.max(experts / 8);
                (0..experts).map(|expert| f64::from(u8::from(expert < wanted))).collect()
            }
            Pattern::Zipf(s) => {
                let mut shares: Vec<f64> = (1..=experts).map(|n| f64::from(n).powf(-s)).collect();
                shares.shuffle(&mut stream(seed, u64::MAX));
                shares
            }
        }
    }
}

/// The decisions of one rank's router: `tokens` tokens, each with `top_k` distinct experts out of
/// `experts`, and weights that are positive and sum to exactly 1.
///
/// # Errors
/// [`PlanError::BadParameter`] unless `top_k` lies between 1 and `experts`, and `experts` is a
/// valid number.
pub fn synthetic(
    pattern: Pattern,
    experts: u32,
    top_k: u32,
    tokens: u32,
    seed: u64,
    rank: u32,
) -> Result<Routing<'static>, PlanError> {
    let bad =
        |parameter, seen: u32, expected| PlanError::BadParameter { parameter, seen: seen.into(), expected };
    if experts > i32::MAX as u32 {
        return Err(bad("experts", experts, "at most 2^31 - 1"));
    }
    if top_k == 0 || top_k > experts {
        return Err(bad("top_k", top_k, "between 1 and the number of experts"));
    }
    let popularity = pattern.popularity(experts, top_k, seed);
    let choices = tokens as usize * top_k as usize;
    let (mut ids, mut weights) = (Vec::with_capacity(choices), Vec::with_capacity(choices));
    for token in 0..tokens {
        let mut random = stream(seed, u64::from(rank) << 32 | u64::from(token));
        choose(&popularity, top_k, &mut random, &mut ids);
        split_one(top_k, &mut random, &mut weights);
    }
    Routing::new(top_k, ids, weights)
}

fn stream(seed: u64, number: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(number);
    random
}

/// Draws `count` experts one after another, each in proportion to its popularity among those left.
fn choose(popularity: &[f64], count: u32, random: &mut ChaCha8Rng, ids: &mut Vec<i32>) {
    let mine = ids.len();
    for _ in 0..count {
        let left = || {
            let taken = &ids[mine..];
            popularity.iter().enumerate().filter(|&(id, _)| !taken.contains(&(id as i32)))
        };
        let mut point = random.random::<f64>() * left().map(|(_, share)| share).sum::<f64>();
        let hit = left().find(|&(_, share)| {
            point -= share;
            point < 0.0
        });
        // Rounding may carry the point past the end, and very steep shares underflow to zero.
        let (id, _) = hit.or_else(|| left().max_by(|a, b| a.1.total_cmp(b.1))).expect("count <= experts");
        ids.push(id as i32);
    }
}

/// Cuts 1 at random into `parts` positive pieces, largest first, as a router lists them. Pieces are
/// multiples of 2^-24: their sum is exact in f32, in any order.
fn split_one(parts: u32, random: &mut ChaCha8Rng, weights: &mut Vec<f32>) {
    const GRAINS: u32 = 1 << 24;
    let mine = weights.len();
    let spare = GRAINS.saturating_sub(parts);
    let mut cuts: Vec<u32> = (1..parts).map(|_| random.random_range(0..=spare)).collect();
    cuts.sort_unstable();
    cuts.push(spare);
    let mut from = 0;
    for to in cuts {
        weights.push((to - from + 1) as f32 / GRAINS as f32);
        from = to;
    }
    weights[mine..].sort_unstable_by(|a, b| b.total_cmp(a));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_pattern() -> impl Strategy<Value = Pattern> {
        prop_oneof![Just(Pattern::Uniform), Just(Pattern::Incast), (0.0..40.0f64).prop_map(Pattern::Zipf)]
    }

    /// How often each expert is chosen by the tokens of four ranks.
    fn load(pattern: Pattern) -> Vec<u32> {
        let mut load = vec![0; 64];
        for rank in 0..4 {
            for &id in synthetic(pattern, 64, 8, 256, 7, rank).unwrap().experts() {
                load[id as usize] += 1;
            }
        }
        load
    }

    proptest! {
        #[test]
        fn experts_are_distinct_and_weights_are_positive_and_sum_to_one(
            pattern in any_pattern(), top_k in 1u32..12, more in 0u32..40, seed: u64, rank in 0u32..1000,
        ) {
            let experts = top_k + more;
            let routing = synthetic(pattern, experts, top_k, 9, seed, rank).unwrap();
            for (ids, weights) in
                routing.experts().chunks(top_k as usize).zip(routing.weights().chunks(top_k as usize))
            {
                let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
                prop_assert_eq!(distinct.len(), ids.len());
                prop_assert!(ids.iter().all(|id| (0..experts as i32).contains(id)));
                prop_assert!(weights.iter().all(|&w| w > 0.0) && weights.is_sorted_by(|a, b| a >= b));
                prop_assert_eq!(weights.iter().rev().sum::<f32>(), 1.0);
            }
        }

        #[test]
        fn a_token_is_drawn_alike_whatever_the_number_of_tokens(pattern in any_pattern(), seed: u64) {
            let (few, many) = (synthetic(pattern, 16, 4, 3, seed, 5), synthetic(pattern, 16, 4, 8, seed, 5));
            let (few, many) = (few.unwrap(), many.unwrap());
            prop_assert_eq!(few.experts(), &many.experts()[..12]);
            prop_assert_eq!(few.weights(), &many.weights()[..12]);
        }

        #[test]
        fn a_pattern_reads_what_it_prints(pattern in any_pattern()) {
            prop_assert_eq!(pattern.to_string().parse::<Pattern>().unwrap(), pattern);
        }
    }

    #[test]
    fn seed_rank_and_token_each_change_the_choice() {
        let ids = |seed, rank| synthetic(Pattern::Uniform, 64, 8, 2, seed, rank).unwrap().experts().to_vec();
        assert_ne!(ids(1, 0), ids(2, 0));
        assert_ne!(ids(1, 0), ids(1, 1));
        assert_ne!(ids(1, 0)[..8], ids(1, 0)[8..]);
    }

    #[test]
    fn uniform_is_even_zipf_steep_and_incast_hits_first_experts() {
        let (uniform, zipf, incast) =
            (load(Pattern::Uniform), load(Pattern::Zipf(1.0)), load(Pattern::Incast));
        assert!(uniform.iter().all(|&n| (80..180).contains(&n)), "{uniform:?}");
        let (most, least) = (zipf.iter().max().unwrap(), zipf.iter().min().unwrap());
        assert!(*most > 8 * least, "{zipf:?}");
        let busy: Vec<usize> = (0..64).filter(|&id| zipf[id] > 256).map(|id| id / 8).collect();
        assert!(busy.windows(2).any(|pair| pair[0] != pair[1]), "busy experts on several ranks: {busy:?}");
        assert!(incast[..8].iter().all(|&n| n == 1024) && incast[8..].iter().all(|&n| n == 0), "{incast:?}");
    }

    #[test]
    fn an_unknown_pattern_lists_the_valid_ones() {
        for seen in ["", "zipf", "zipf:", "zipf:-1", "zipf:NaN", "zipf:inf", "Uniform"] {
            let error = seen.parse::<Pattern>().unwrap_err();
            assert_eq!(error.seen, seen);
            assert!(["uniform", "incast", "zipf:S"].iter().all(|form| error.to_string().contains(form)));
        }
    }

    #[test]
    fn more_choices_than_experts_are_refused() {
        for top_k in [0, 5] {
            let error = synthetic(Pattern::Uniform, 4, top_k, 1, 0, 0).unwrap_err();
            assert!(matches!(error, PlanError::BadParameter { parameter: "top_k", .. }), "{error}");
        }
    }
}
