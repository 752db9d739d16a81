//! Where routing comes from: the recording that the program carries, a pattern that every rank can draw, or a file
//! that every rank can read.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sidelane::error::PlanError;
use sidelane::gate::{Pattern, PatternError, Recorded, Routing, synthetic};

use super::trained;
use crate::error::{CliError, usage};

/// What `--routing` names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    Recorded,
    Pattern(Pattern),
    File(PathBuf),
}

impl Source {
    /// What is meant where `--routing` is not given: the recording, or a pattern if the recording has not as many
    /// experts or choices as the options say.
    pub fn default_for(experts: Option<u32>, top_k: Option<u32>) -> Self {
        let fits = experts.is_none_or(|experts| experts == trained::EXPERTS)
            && top_k.is_none_or(|top_k| top_k == trained::TOP_K);
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

    /// Whatever is neither the recording nor looks like a pattern is a file.
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

/// What each rank takes of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub experts: u32,
    pub top_k: u32,
    /// Of one rank.
    pub tokens: u32,
    pub seed: u64,
}

/// A source that is ready to answer.
pub enum Router {
    Drawn(Pattern),
    Recorded(Recorded),
}

impl Router {
    /// Reads the recording or the file, if it is one of them.
    pub fn open(routing: &Source) -> Result<Self, CliError> {
        let text = match routing {
            Source::Pattern(pattern) => return Ok(Router::Drawn(*pattern)),
            Source::Recorded => Cow::Borrowed(trained::TEXT),
            Source::File(path) => Cow::Owned(read(path)?),
        };
        let recorded = Recorded::parse(&text)
            .map_err(|source| usage!("routing {routing}: {source}", routing = routing.clone()))?;
        Ok(Router::Recorded(recorded))
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
    std::fs::read_to_string(path).map_err(|source| usage!("cannot read the routing file {path:?}: {source} (other than files: recorded, uniform, zipf:S, incast)", path = path.to_owned()))
}

#[cfg(test)]
mod tests {
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
}
