//! Routing: the router's decisions for the tokens of one rank; and its two sources without a
//! router.
//!
//! ```text
//!   Routing   experts [tokens, top_k]: 3 7 | 0 3 | -1 5 | ..      -1: a dropped choice
//!             weights [tokens, top_k]: .6 .4 | ..
//!
//!   Gate::decide ---> Routing <--- synthetic(Pattern): drawn
//!                         ^------- Recorded: JSON lines of a real model
//! ```
//!
//! **Synthetic.** A measurement needs routing that every rank can draw again. Each token has a
//! random stream of its own, named by (seed, rank, token): its decisions depend neither on the
//! number of tokens nor on the drawing rank. So every rank can draw the routing of its peers and
//! know the rows that must arrive.
//!
//! **Recorded.** Real routers are uneven in ways that no formula draws. One line is one token:
//!
//! ```json
//! {"type":"meta","num_experts":64,"top_k":8}
//! {"topk_ids":[45,57,46,17,42,22,29,47],"topk_weights":[0.25,0.22,0.16,0.13,0.06,0.06,0.06,0.06]}
//! ```
//!
//! The first line may describe the rest; other keys are ignored. The description, the lines and the
//! caller's expectation must agree: a silently truncated or misread file would measure something
//! else.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use crate::error::PlanError;

/// Per token its chosen experts and their weights: two arrays `[tokens, top_k]`, row-major.
///
/// An id of -1 is a dropped choice: it moves nothing, adds nothing, and its gradient is zero.
///
/// ```
/// let routing = sidelane_core::gate::Routing::new(2, vec![5, 0, 3, -1], vec![0.75, 0.25, 1.0, 0.0])?;
/// assert_eq!(routing.tokens(), 2);
/// assert_eq!(routing.experts_of(1), [3, -1]);
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Routing<'a> {
    top_k: u32,
    experts: Cow<'a, [i32]>,
    weights: Cow<'a, [f32]>,
}

impl<'a> Routing<'a> {
    /// From expert ids and weights, each `[tokens, top_k]`, owned or borrowed.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if the arrays differ in length or are no multiple of `top_k`;
    /// [`PlanError::BadParameter`] if `top_k` is 0. Ids are checked by the call that uses the
    /// routing.
    pub fn new(
        top_k: u32,
        experts: impl Into<Cow<'a, [i32]>>,
        weights: impl Into<Cow<'a, [f32]>>,
    ) -> Result<Self, PlanError> {
        let (experts, weights) = (experts.into(), weights.into());
        if top_k == 0 {
            return Err(PlanError::BadParameter { parameter: "top_k", seen: 0, expected: "at least 1" });
        }
        let columns = top_k as usize;
        let rows = experts.len() / columns;
        for (what, seen) in [("expert ids", experts.len()), ("routing weights", weights.len())] {
            if seen != rows * columns {
                return Err(PlanError::WrongShape { what, seen, rows, columns });
            }
        }
        Ok(Routing { top_k, experts, weights })
    }

    /// From two arrays that are known to fit.
    pub(super) fn borrowed(top_k: u32, experts: &'a [i32], weights: &'a [f32]) -> Self {
        Routing { top_k, experts: experts.into(), weights: weights.into() }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u32 {
        (self.experts.len() / self.top_k as usize) as u32
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Expert ids, `[tokens, top_k]`.
    pub fn experts(&self) -> &[i32] {
        &self.experts
    }

    /// Weights, `[tokens, top_k]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The choices of one token.
    pub fn experts_of(&self, token: u32) -> &[i32] {
        let k = self.top_k as usize;
        &self.experts[token as usize * k..][..k]
    }
}

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

/// The recorded decisions of a router, one after another.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Recorded {
    experts: Option<u32>,
    top_k: u32,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// The largest id, and the line where it stands first.
    largest: (i32, usize),
}

/// A recording that cannot be used. Lines count from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordedError {
    /// Not a valid line.
    #[error("line {line}, column {column}: {problem}")]
    Malformed {
        /// The line.
        line: usize,
        /// Where in the line.
        column: usize,
        /// The reason.
        problem: String,
    },
    /// A line has too few or too many ids or weights.
    #[error("line {line}: {seen} {what}, expected {expected}")]
    WrongLength {
        /// The line.
        line: usize,
        /// Ids or weights.
        what: &'static str,
        /// How many there are.
        seen: usize,
        /// How many the meta line or the first token has.
        expected: usize,
    },
    /// An id that does not exist.
    #[error("line {line}: expert {expert} is out of range (0..{experts}, or -1 for dropped)")]
    OutOfRange {
        /// The line.
        line: usize,
        /// The id.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// An expert stands twice in one line.
    #[error("line {line} names expert {expert} twice")]
    Twice {
        /// The line.
        line: usize,
        /// The expert.
        expert: i32,
    },
    /// The caller and the recording disagree.
    #[error("{what} is {file} in the recording, but {wanted} was asked for")]
    Contradiction {
        /// Experts or top-k.
        what: &'static str,
        /// The value in the recording.
        file: u32,
        /// The value that the caller wants.
        wanted: u32,
    },
    /// No tokens at all.
    #[error("no token in the recording")]
    Empty,
}

#[derive(Deserialize)]
struct Meta {
    num_experts: Option<u32>,
    top_k: Option<u32>,
}

#[derive(Deserialize)]
struct Token {
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Recorded {
    /// Reads a whole recording. Blank lines count as lines and are skipped.
    ///
    /// # Errors
    /// [`RecordedError`], naming the first line that is wrong.
    pub fn parse(text: &str) -> Result<Self, RecordedError> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(i, line)| (i + 1, line))
            .filter(|(_, line)| !line.trim().is_empty());
        let mut ahead = lines.clone();
        let meta = match ahead.next() {
            Some((line, text)) if is_meta(text) => {
                lines = ahead;
                read(line, text)?
            }
            _ => Meta { num_experts: None, top_k: None },
        };
        let mut recorded = Recorded {
            experts: meta.num_experts,
            top_k: meta.top_k.unwrap_or(0),
            ids: Vec::new(),
            weights: Vec::new(),
            largest: (-1, 0),
        };
        for (line, text) in lines {
            recorded.push(line, &read(line, text)?)?;
        }
        if recorded.ids.is_empty() { Err(RecordedError::Empty) } else { Ok(recorded) }
    }

    fn push(&mut self, line: usize, token: &Token) -> Result<(), RecordedError> {
        if self.top_k == 0 {
            self.top_k = token.topk_ids.len().max(1) as u32;
        }
        let expected = self.top_k as usize;
        for (what, seen) in [("ids", token.topk_ids.len()), ("weights", token.topk_weights.len())] {
            if seen != expected {
                return Err(RecordedError::WrongLength { line, what, seen, expected });
            }
        }
        let experts = self.experts.unwrap_or(i32::MAX as u32);
        for (k, &expert) in token.topk_ids.iter().enumerate() {
            if expert < -1 || i64::from(expert) >= i64::from(experts) {
                return Err(RecordedError::OutOfRange { line, expert, experts });
            }
            if expert >= 0 && token.topk_ids[..k].contains(&expert) {
                return Err(RecordedError::Twice { line, expert });
            }
            if expert > self.largest.0 {
                self.largest = (expert, line);
            }
        }
        self.ids.extend(&token.topk_ids);
        self.weights.extend(&token.topk_weights);
        Ok(())
    }

    /// Whether the file matches the caller's request; `None` accepts the file's number.
    ///
    /// # Errors
    /// [`RecordedError::Contradiction`] or [`RecordedError::OutOfRange`].
    pub fn require(&self, experts: Option<u32>, top_k: Option<u32>) -> Result<(), RecordedError> {
        for (what, file, wanted) in
            [("num_experts", self.experts, experts), ("top_k", Some(self.top_k), top_k)]
        {
            match (file, wanted) {
                (Some(file), Some(wanted)) if file != wanted => {
                    return Err(RecordedError::Contradiction { what, file, wanted });
                }
                _ => {}
            }
        }
        match (experts, self.largest) {
            (Some(experts), (expert, line)) if i64::from(expert) >= i64::from(experts) => {
                Err(RecordedError::OutOfRange { line, expert, experts })
            }
            _ => Ok(()),
        }
    }

    /// Number of experts, if the file states it.
    pub fn experts(&self) -> Option<u32> {
        self.experts
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Number of recorded tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.top_k as usize
    }

    /// `tokens` tokens from `first` on; after the last one the recording begins again. With T
    /// tokens per rank, rank r starts at r * T.
    ///
    /// # Errors
    /// None that a parsed recording can cause.
    pub fn routing(&self, first: u64, tokens: u32) -> Result<Routing<'static>, PlanError> {
        let k = self.top_k as usize;
        let start = (first % self.tokens() as u64) as usize;
        let rows = |token: usize| (start + token) % self.tokens() * k;
        let ids: Vec<i32> = (0..tokens as usize).flat_map(|t| &self.ids[rows(t)..][..k]).copied().collect();
        let weights: Vec<f32> =
            (0..tokens as usize).flat_map(|t| &self.weights[rows(t)..][..k]).copied().collect();
        Routing::new(self.top_k, ids, weights)
    }
}

fn is_meta(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Kind {
        #[serde(rename = "type")]
        kind: String,
    }
    serde_json::from_str::<Kind>(text).is_ok_and(|line| line.kind == "meta")
}

fn read<'t, T: Deserialize<'t>>(line: usize, text: &'t str) -> Result<T, RecordedError> {
    serde_json::from_str(text).map_err(|error| {
        let whole = error.to_string();
        // serde_json closes with a position of its own, in which the line is always 1.
        let problem = whole.rsplit_once(" at line ").map_or(whole.as_str(), |(problem, _)| problem);
        RecordedError::Malformed { line, column: error.column(), problem: problem.to_owned() }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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

    const META: &str = r#"{"type": "meta", "model": "small", "num_experts": 8, "top_k": 2}"#;

    fn token(ids: &[i32], weights: &[f32]) -> String {
        format!(r#"{{"token":0,"topk_ids":{ids:?},"topk_weights":{weights:?}}}"#)
    }

    fn parse(lines: &[&str]) -> Result<Recorded, RecordedError> {
        Recorded::parse(&lines.join("\n"))
    }

    fn simple(ids: [i32; 2]) -> String {
        token(&ids, &[0.5, 0.5])
    }

    #[test]
    fn the_meta_line_and_its_tokens_are_read() {
        let recorded =
            parse(&[META, &token(&[7, 0], &[0.75, 0.25]), &token(&[-1, 3], &[0.0, 1.0]), ""]).unwrap();
        assert_eq!((recorded.experts(), recorded.top_k(), recorded.tokens()), (Some(8), 2, 2));
        let routing = recorded.routing(0, 2).unwrap();
        assert_eq!(routing.experts(), [7, 0, -1, 3]);
        assert_eq!(routing.weights(), [0.75, 0.25, 0.0, 1.0]);
    }

    #[test]
    fn without_a_meta_line_the_first_token_decides_top_k() {
        let recorded = parse(&[&simple([70, 1])]).unwrap();
        assert_eq!((recorded.experts(), recorded.top_k()), (None, 2));
    }

    #[test]
    fn a_malformed_line_is_named_by_its_number_and_column() {
        let error = parse(&[META, "", &simple([0, 1]), "{\"topk_ids\":[1,x]"]).unwrap_err();
        let RecordedError::Malformed { line: 4, column: 16, problem } = &error else { panic!("{error:?}") };
        assert!(!problem.contains("line"), "one position only: {problem}");
        assert_eq!(error.to_string(), "line 4, column 16: expected value");
    }

    #[test]
    fn a_missing_key_is_named() {
        let error = parse(&[r#"{"topk_ids":[1,2]}"#]).unwrap_err();
        assert!(
            error.to_string().contains("line 1") && error.to_string().contains("topk_weights"),
            "{error}"
        );
    }

    #[test]
    fn lines_of_different_length_are_refused() {
        let error = parse(&[&simple([0, 1]), &token(&[1], &[1.0])]).unwrap_err();
        assert_eq!(error, RecordedError::WrongLength { line: 2, what: "ids", seen: 1, expected: 2 });
        let error = parse(&[META, &token(&[1, 2], &[1.0])]).unwrap_err();
        assert_eq!(error, RecordedError::WrongLength { line: 2, what: "weights", seen: 1, expected: 2 });
        let error = parse(&[&token(&[], &[])]).unwrap_err();
        assert_eq!(error, RecordedError::WrongLength { line: 1, what: "ids", seen: 0, expected: 1 });
    }

    #[test]
    fn ids_outside_the_experts_and_experts_named_twice_are_refused() {
        let error = parse(&[META, &simple([1, 8])]).unwrap_err();
        assert_eq!(error, RecordedError::OutOfRange { line: 2, expert: 8, experts: 8 });
        let error = parse(&[&simple([1, -2])]).unwrap_err();
        assert!(matches!(error, RecordedError::OutOfRange { line: 1, expert: -2, .. }));
        assert_eq!(parse(&[&simple([3, 3])]).unwrap_err(), RecordedError::Twice { line: 1, expert: 3 });
        assert!(parse(&[&simple([-1, -1])]).is_ok(), "dropped choices may repeat");
    }

    #[test]
    fn a_file_without_tokens_is_refused() {
        for text in ["", "\n\n", META] {
            assert_eq!(Recorded::parse(text).unwrap_err(), RecordedError::Empty);
        }
    }

    #[test]
    fn the_file_and_the_caller_must_agree() {
        let recorded = parse(&[META, &simple([0, 5])]).unwrap();
        assert_eq!(recorded.require(None, None), Ok(()));
        assert_eq!(recorded.require(Some(8), Some(2)), Ok(()));
        let error = recorded.require(Some(64), None).unwrap_err();
        assert_eq!(error, RecordedError::Contradiction { what: "num_experts", file: 8, wanted: 64 });
        let error = recorded.require(None, Some(4)).unwrap_err();
        assert_eq!(error, RecordedError::Contradiction { what: "top_k", file: 2, wanted: 4 });
    }

    #[test]
    fn without_a_meta_line_the_callers_experts_must_hold_every_id() {
        let recorded = parse(&[&simple([0, 5]), &simple([9, 1]), &simple([1, 9])]).unwrap();
        assert_eq!(recorded.require(Some(10), None), Ok(()));
        let error = recorded.require(Some(9), None).unwrap_err();
        assert_eq!(error, RecordedError::OutOfRange { line: 2, expert: 9, experts: 9 });
    }

    proptest! {
        #[test]
        fn a_recording_wraps_around(tokens in 1usize..9, first: u64, wanted in 0u32..30) {
            let lines: Vec<String> = (0..tokens).map(|t| simple([t as i32, 100])).collect();
            let recorded = Recorded::parse(&lines.join("\n")).unwrap();
            let routing = recorded.routing(first, wanted).unwrap();
            prop_assert_eq!(routing.tokens(), wanted);
            for t in 0..wanted {
                let expected = (u128::from(first) + u128::from(t)) % tokens as u128;
                prop_assert_eq!(routing.experts_of(t), [expected as i32, 100]);
            }
        }
    }
}
