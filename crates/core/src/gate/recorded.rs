//! Routing of a real model, replayed from JSON lines.
//!
//! Real routers are uneven in ways that no formula draws. One line is one token:
//!
//! ```json
//! {"type":"meta","num_experts":64,"top_k":8}
//! {"topk_ids":[45,57,46,17,42,22,29,47],"topk_weights":[0.25,0.22,0.16,0.13,0.06,0.06,0.06,0.06]}
//! ```
//!
//! The first line may describe the rest; other keys are ignored. The description, the lines and the
//! caller's expectation must agree: a silently truncated or misread file would measure something
//! else.

use serde::Deserialize;

use super::Routing;
use crate::error::PlanError;

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
    use super::*;
    use proptest::prelude::*;

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
