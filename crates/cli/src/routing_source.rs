//! Source of a command's routing, and its numbers of experts and choices: the recording that the
//! program carries, a pattern that every rank can draw, or a file that every rank can read.
//!
//! A measurement without a source replays the recording: the decisions of a trained router, token
//! by token. A pattern draws every token for itself. A router reads text: adjacent tokens want the
//! same experts, and no formula predicts the load of an expert. `data/README.md` explains how the
//! recording was made, and gives its figures.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sidelane::error::PlanError;
use sidelane::gate::{Pattern, PatternError, Recorded, Routing, synthetic};
use sidelane::plan::ExpertMap;
use sidelane::topology::NodeMap;

use crate::commands::launch::node_labels;
use crate::error::{CliError, usage};
use crate::options::fits_in_memory;

/// A source and the requested numbers.
pub struct Routed {
    pub source: Source,
    pub router: Router,
    pub experts: u32,
    pub top_k: u32,
}

impl Routed {
    /// The requested routing, completed from the source, then from the recording of the program.
    pub fn resolve(
        asked: Option<Source>,
        experts: Option<u32>,
        top_k: Option<u32>,
    ) -> Result<Self, CliError> {
        let source = asked.unwrap_or_else(|| Source::default_for(experts, top_k));
        let router = Router::open(&source)?;
        let (experts, top_k) = match &router {
            Router::Recorded(recorded) => {
                let experts = experts.or(recorded.experts()).unwrap_or(EXPERTS);
                recorded
                    .require(Some(experts), top_k)
                    .map_err(|error| usage!("routing {source}: {error}"))?;
                (experts, recorded.top_k())
            }
            Router::Drawn(_) => (experts.unwrap_or(EXPERTS), top_k.unwrap_or(TOP_K)),
        };
        Ok(Routed { source, router, experts, top_k })
    }

    /// Prints that a recording has fewer tokens than so many ranks take, and begins again.
    pub fn note_repeats(&self, ranks: u32, share: Share) {
        let (source, taken) = (&self.source, u64::from(ranks) * u64::from(share.tokens));
        let Some(recorded) = self.router.tokens().filter(|&recorded| (recorded as u64) < taken) else {
            return;
        };
        eprintln!(
            "sidelane: routing {source}: {taken} tokens of all ranks repeat the {recorded} recorded ones"
        );
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    Recorded,
    Pattern(Pattern),
    File(PathBuf),
}

impl Source {
    /// The default of `--routing`: the recording, or a pattern if the recording has not as many
    /// experts or choices as the options require.
    fn default_for(experts: Option<u32>, top_k: Option<u32>) -> Self {
        let fits =
            experts.is_none_or(|experts| experts == EXPERTS) && top_k.is_none_or(|top_k| top_k == TOP_K);
        if fits { Source::Recorded } else { Source::Pattern(Pattern::Zipf(1.0)) }
    }

    /// Of the file's content, if it is one.
    pub fn digest(&self) -> Result<Option<String>, CliError> {
        let Source::File(path) = self else { return Ok(None) };
        let digest = Sha256::digest(read(path)?);
        Ok(Some(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()))
    }
}

impl FromStr for Source {
    type Err = PatternError;

    /// A text that is neither the recording nor looks like a pattern is a file.
    fn from_str(text: &str) -> Result<Self, PatternError> {
        if text == "recorded" {
            return Ok(Source::Recorded);
        }
        match text.parse() {
            Ok(pattern) => Ok(Source::Pattern(pattern)),
            Err(error) if text.is_empty() || text.starts_with("zipf:") => Err(error),
            Err(_) => Ok(Source::File(text.into())),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Recorded => f.write_str("recorded"),
            Source::Pattern(pattern) => pattern.fmt(f),
            Source::File(path) => path.display().fmt(f),
        }
    }
}

impl TryFrom<String> for Source {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        source.to_string()
    }
}

/// Part of a source that each rank takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub experts: u32,
    pub top_k: u32,
    pub tokens: u32,
    pub seed: u64,
}

impl Share {
    /// Refuses decisions of so many ranks, and counts of their experts, that do not fit in memory.
    fn fits_in_memory(&self, ranks: u32, choice_bytes: u64) -> Result<(), CliError> {
        const COUNT: u64 = 8;
        let Share { experts, top_k, tokens, .. } = *self;
        let choices = (u64::from(tokens) * u64::from(top_k)).saturating_mul(choice_bytes);
        let rank = choices.saturating_add(u64::from(experts) * COUNT);
        let (what, needed) = (format!("the choices of {ranks} ranks"), rank.saturating_mul(ranks.into()));
        fits_in_memory(&what, needed, "--tokens, --top-k, --experts or the number of ranks")
    }
}

pub struct Decided {
    pub conditions: RunSettings,
    pub map: ExpertMap,
    pub nodes: NodeMap,
    pub routings: Vec<Routing<'static>>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    pub routing: Source,
    pub experts: u32,
    pub top_k: u32,
    pub ranks_per_node: Vec<u32>,
    pub tokens: u32,
    pub seed: u64,
}

impl Decided {
    /// By ranks of nodes of these sizes, with experts in equal blocks. The command takes so many
    /// bytes for each choice.
    pub fn new(
        ranks_per_node: Vec<u32>,
        routed: Routed,
        share: Share,
        choice_bytes: u64,
    ) -> Result<Self, CliError> {
        let Share { experts, top_k, tokens, seed } = share;
        let nodes = NodeMap::from_labels(&node_labels(&ranks_per_node));
        let ranks = nodes.ranks();
        share.fits_in_memory(ranks, choice_bytes)?;
        routed.note_repeats(ranks, share);
        let routings = (0..ranks).map(|rank| routed.router.routing(share, rank)).collect::<Result<_, _>>()?;
        let map = ExpertMap::contiguous(experts, ranks)?;
        let conditions = RunSettings { routing: routed.source, experts, top_k, ranks_per_node, tokens, seed };
        Ok(Decided { conditions, map, nodes, routings })
    }
}

pub enum Router {
    Drawn(Pattern),
    Recorded(Recorded),
}

impl Router {
    /// Reads the recording or the file, if it is one of them.
    pub fn open(routing: &Source) -> Result<Self, CliError> {
        let text = match routing {
            Source::Pattern(pattern) => return Ok(Router::Drawn(*pattern)),
            Source::Recorded => Cow::Borrowed(TEXT),
            Source::File(path) => Cow::Owned(read(path)?),
        };
        let recorded = Recorded::parse(&text).map_err(|source| usage!("routing {routing}: {source}"))?;
        Ok(Router::Recorded(recorded))
    }

    /// Tokens of a recording.
    fn tokens(&self) -> Option<usize> {
        if let Router::Recorded(recorded) = self { Some(recorded.tokens()) } else { None }
    }

    /// The decisions of one rank: any rank can ask for those of any other.
    pub fn routing(&self, share: Share, rank: u32) -> Result<Routing<'static>, PlanError> {
        let Share { experts, top_k, tokens, seed } = share;
        match self {
            Router::Drawn(pattern) => synthetic(*pattern, experts, top_k, tokens, seed, rank),
            Router::Recorded(recorded) => recorded.routing(u64::from(rank) * u64::from(tokens), tokens),
        }
    }
}

fn read(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path).map_err(|source| usage!(
            "routing {path:?} is neither recorded, uniform, zipf:S or incast, nor a file that can be read: {source}"
        ))
}

/// The recording, as [`Recorded`] reads it. It is part of the program,
/// which needs no file for it.
const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/routing.jsonl"));

/// Its experts, and the default of all routing.
pub const EXPERTS: u32 = 64;

/// Its choices per token, and the default of all routing.
pub const TOP_K: u32 = 8;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sidelane::gate::{Recorded, Routing};
    use sidelane::plan::ExpertMap;

    use super::*;

    #[test]
    fn a_source_is_the_recording_or_a_pattern_or_else_a_file() {
        assert_eq!("recorded".parse(), Ok(Source::Recorded));
        assert_eq!("./recorded".parse(), Ok(Source::File("./recorded".into())));
        assert_eq!("incast".parse(), Ok(Source::Pattern(Pattern::Incast)));
        assert_eq!("zipf:1.5".parse(), Ok(Source::Pattern(Pattern::Zipf(1.5))));
        assert_eq!("runs/olmoe.jsonl".parse(), Ok(Source::File("runs/olmoe.jsonl".into())));
        assert!("zipf:steep".parse::<Source>().is_err());
    }

    #[test]
    fn a_source_survives_json() {
        for text in ["recorded", "uniform", "zipf:0.5", "a file.jsonl"] {
            let source: Source = text.parse().unwrap();
            let json = serde_json::to_string(&source).unwrap();
            assert_eq!(json, format!("{text:?}"));
            assert_eq!(serde_json::from_str::<Source>(&json).unwrap(), source);
        }
    }

    const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/README.md"));
    const TOKENS: u32 = 4096;
    const RANKS: u32 = 8;
    const NODES: u32 = 2;

    fn all() -> Routing<'static> {
        Recorded::parse(TEXT).unwrap().routing(0, TOKENS).unwrap()
    }

    #[test]
    fn every_rank_of_the_main_job_replays_tokens_of_its_own() {
        let recorded = Recorded::parse(TEXT).unwrap();
        assert_eq!((recorded.experts(), recorded.top_k()), (Some(EXPERTS), TOP_K));
        assert_eq!(recorded.tokens(), TOKENS as usize);
    }

    #[test]
    fn nothing_is_dropped_and_weights_fall_and_sum_to_one() {
        let routing = all();
        assert!(routing.experts().iter().all(|&id| id >= 0));
        for weights in routing.weights().chunks(TOP_K as usize) {
            assert!(weights.iter().all(|&w| w > 0.0) && weights.is_sorted_by(|a, b| a >= b), "{weights:?}");
            // Written with four digits: each of the eight may be half a unit off.
            let sum: i32 = weights.iter().map(|w| (w * 1e4).round() as i32).sum();
            assert!((9996..=10004).contains(&sum), "{weights:?}");
        }
    }

    /// Choices of each of `parts` equal blocks of experts, by their mean; ascending.
    fn loads(routing: &Routing<'_>, parts: u32) -> Vec<f64> {
        let mut choices = vec![0u32; parts as usize];
        for &id in routing.experts() {
            choices[(id as u32 / (EXPERTS / parts)) as usize] += 1;
        }
        choices.sort_unstable();
        let mean = f64::from(TOKENS * TOP_K) / f64::from(parts);
        choices.into_iter().map(|choices| f64::from(choices) / mean).collect()
    }

    /// On how many nodes of `ranks` ranks each the experts of a token lie, on average.
    fn reached(routing: &Routing<'_>, ranks: u32) -> f64 {
        let map = ExpertMap::contiguous(EXPERTS, RANKS).unwrap();
        let node = |&id: &i32| map.rank_of(map.slot_for(0, id as u32).unwrap()) / ranks;
        let nodes = |token| routing.experts_of(token).iter().map(node).collect::<BTreeSet<_>>().len();
        (0..TOKENS).map(nodes).sum::<usize>() as f64 / f64::from(TOKENS)
    }

    /// How many of its experts a token shares with the one before, on average.
    fn kept(routing: &Routing<'_>) -> f64 {
        let shared = |token: u32| {
            let before = routing.experts_of(token - 1);
            routing.experts_of(token).iter().filter(|id| before.contains(id)).count()
        };
        (1..TOKENS).map(shared).sum::<usize>() as f64 / f64::from(TOKENS - 1)
    }

    #[test]
    fn its_page_states_how_uneven_it_is_and_what_a_token_reaches() {
        let routing = all();
        let (experts, ranks) = (loads(&routing, EXPERTS), loads(&routing, RANKS));
        let shares = experts.iter().map(|load| load / f64::from(EXPERTS)).filter(|&share| share > 0.0);
        let entropy = -shares.map(|share| share * share.ln()).sum::<f64>() / f64::from(EXPERTS).ln();
        for (what, figure) in [
            ("busiest expert, of the mean", experts[EXPERTS as usize - 1]),
            ("quietest expert, of the mean", experts[0]),
            ("entropy of the experts' shares, of log 64", entropy),
            ("busiest of 8 ranks, of the mean", ranks[RANKS as usize - 1]),
            ("quietest of 8 ranks, of the mean", ranks[0]),
            ("ranks of 8 that a token reaches", reached(&routing, 1)),
            ("nodes of 2 that a token reaches", reached(&routing, RANKS / NODES)),
            ("experts of 8 that a token shares with the one before", kept(&routing)),
        ] {
            let stated = format!("| {what} | {figure:.2} |");
            assert!(PAGE.contains(&stated), "the page does not say: {stated}");
        }
    }
}
