//! Output of `judge.py`: one JSON object a line, the first about the run, the others one case
//! each.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::{Deserialize, Deserializer, de::Error};

/// A run of the oracles.
pub struct Run {
    pub head: Head,
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    pub seed: u64,
    /// Names and versions.
    pub judges: Vec<String>,
    /// Tokens, experts, factor; Megatron's capacity, DeepSpeed's.
    pub capacities: Vec<(u32, u32, f64, u32, u32)>,
}

/// Questions and answers. Absent settings are those of the preset.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub preset: String,
    pub number: u32,
    pub seed: u64,
    pub tokens: u32,
    pub experts: u32,
    pub top_k: u32,
    pub spread: f32,
    pub tilt: f32,
    pub training: bool,
    pub score: Option<Scored>,
    pub scaling: Option<f32>,
    pub bias: Option<f32>,
    /// Groups, kept groups, how many of a group's best are added up.
    pub groups: Option<(u32, u32, u32)>,
    #[serde(default)]
    pub sinkhorn: bool,
    #[serde(default)]
    pub replay: bool,
    #[serde(default)]
    pub used: bool,
    pub noise: Option<Noised>,
    pub capacity: Option<Room>,
    pub judge: String,
    pub exact: Exact,
    pub theirs: Option<Answer>,
    pub loss: Option<Loss>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Scored {
    Softmax,
    #[serde(rename = "softmax_of_chosen")]
    SoftmaxOfChosen,
    Sigmoid,
    SqrtSoftplus,
}

/// Which choices are sampled.
#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Noised {
    First,
    AfterFirst,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    pub factor: f64,
    #[serde(default)]
    pub minimum: u32,
    pub align: Option<u32>,
    pub keep: sidelane::gate::DropPolicy,
    pub local_groups: Option<u32>,
    #[serde(default)]
    pub pad: bool,
    /// Nothing is dropped: as many rows as are needed.
    #[serde(default)]
    pub needed: bool,
}

#[derive(Deserialize)]
pub struct Exact {
    #[serde(flatten)]
    pub answer: Answer,
    /// Tokens whose choices or drops a rounding could change.
    pub near: Vec<u32>,
}

/// Arrays are `[tokens, top_k]`.
#[derive(Deserialize)]
pub struct Answer {
    /// Choices before any is dropped, -1 for none.
    #[serde(deserialize_with = "shorts")]
    pub ids: Vec<i32>,
    /// Places of those that are kept, -1 for the others.
    #[serde(deserialize_with = "shorts")]
    pub slots: Vec<i32>,
    /// 0 where nothing is kept.
    #[serde(deserialize_with = "floats")]
    pub weights: Vec<f32>,
    /// Scores that decided where the best are kept.
    #[serde(deserialize_with = "floats")]
    pub decide: Vec<f32>,
    pub capacity: Option<u32>,
    /// The bias after an update by the counts of the kept choices.
    #[serde(default, deserialize_with = "some_floats")]
    pub bias: Option<Vec<f32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loss {
    pub kind: Lost,
    #[serde(default = "one")]
    pub coefficient: f64,
    #[serde(default = "one")]
    pub sequences: u32,
    pub exact: f64,
    pub theirs: Option<f64>,
    /// To the logits, `[tokens, experts]`, where it is small enough to be written.
    #[serde(default, deserialize_with = "some_floats")]
    pub gradient: Option<Vec<f32>>,
    #[serde(default, deserialize_with = "some_floats")]
    pub their_gradient: Option<Vec<f32>>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Lost {
    Balance,
    Aux,
    SeqAux,
    GlobalAux,
    Z,
}

impl Case {
    pub fn name(&self) -> String {
        format!("{} {}", self.preset, self.number)
    }

    /// Tokens times experts.
    pub fn elements(&self) -> usize {
        self.tokens as usize * self.experts as usize
    }

    /// The answers, with the names of their oracles.
    pub fn answers(&self) -> impl Iterator<Item = (&str, &Answer)> {
        let theirs = self.theirs.as_ref().map(|answer| (self.judge.as_str(), answer));
        std::iter::once(("formula", &self.exact.answer)).chain(theirs)
    }
}

fn one<T: From<u8>>() -> T {
    T::from(1)
}

fn bytes<'de, D: Deserializer<'de>, const N: usize>(from: D) -> Result<Vec<[u8; N]>, D::Error> {
    let text = String::deserialize(from)?;
    let digit = |c: u8| (c as char).to_digit(16).ok_or_else(|| D::Error::custom("not a hex digit"));
    let byte = |pair: &[u8]| Ok((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    let bytes = text.as_bytes().chunks_exact(2).map(byte).collect::<Result<Vec<u8>, D::Error>>()?;
    if text.len() % (2 * N) != 0 {
        return Err(D::Error::custom("half a number"));
    }
    Ok(bytes.chunks_exact(N).map(|word| word.try_into().expect("N bytes")).collect())
}

fn shorts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<i32>, D::Error> {
    Ok(bytes(from)?.into_iter().map(|word| i16::from_le_bytes(word).into()).collect())
}

fn floats<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f32>, D::Error> {
    Ok(bytes(from)?.into_iter().map(f32::from_le_bytes).collect())
}

fn some_floats<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<f32>>, D::Error> {
    floats(from).map(Some)
}

/// Reads a run.
pub fn read(path: &Path) -> Run {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut lines = BufReader::new(file).lines().map(|line| line.expect("a line of text"));
    let head = serde_json::from_str(&lines.next().expect("a first line")).expect("a head");
    let case =
        |line: String| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {:.200}", line));
    Run { head, cases: lines.map(case).collect() }
}
