//! Every condition of a measurement, resolved: what was given, what the routing file says, what is the default.
//!
//! The program resolves once and hands the result to every rank, so that no two ranks can differ.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sidelane::dtype::Dtype;
use sidelane::error::PlanError;
use sidelane::gate::RecordedError;

use super::args::{ConditionArgs, Layout, Order, Route};
use super::source::{Router, Source};
use super::trained;
use crate::launch::{ShapeError, node_sizes};

/// Conditions that cannot be met.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    Shape(#[from] ShapeError),

    /// An option that must be positive.
    #[error("{option} must be at least 1")]
    Zero { option: &'static str },

    /// Rows move in units of 16 bytes.
    #[error("a row of {hidden} x {dtype} has {bytes} bytes: it must be a multiple of {unit}")]
    RowBytes { hidden: u32, dtype: Dtype, bytes: u64, unit: u64 },

    /// More choices than experts.
    #[error("--top-k is {top_k}, but there are only {experts} experts")]
    TopK { top_k: u32, experts: u32 },

    /// The routing file cannot be read.
    #[error(
        "cannot read the routing file {path:?}: {source} (other than files: recorded, uniform, zipf:S, incast)"
    )]
    Unreadable { path: PathBuf, source: io::Error },

    /// The library cannot use them.
    #[error(transparent)]
    Plan(#[from] PlanError),

    /// A recording is wrong, or is not what the options say.
    #[error("routing {routing}: {source}")]
    Recorded { routing: Source, source: RecordedError },
}

/// The conditions of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Number of nodes.
    pub nodes: u32,
    /// Number of ranks of each node.
    pub ranks_per_node: Vec<u32>,
    pub tokens: u32,
    pub hidden: u32,
    pub dtype: Dtype,
    pub top_k: u32,
    pub experts: u32,
    pub order: Order,
    pub layout: Layout,
    pub route: Route,
    pub align: u32,
    pub backward: bool,
    pub routing: Source,
    pub rounds: u32,
    pub seed: u64,
}

impl Config {
    /// From the command line and what the recording or the routing file says. Without a number of rounds as many as take
    /// half a minute.
    pub fn resolve(args: &ConditionArgs, backward: bool, rounds: Option<u32>) -> Result<Self, ConfigError> {
        let ranks_per_node = node_sizes(args.nodes, &args.ranks_per_node)?;
        let routing = args.routing.clone().unwrap_or_else(|| Source::default_for(args.experts, args.top_k));
        let (experts, top_k) = match Router::open(&routing)? {
            Router::Recorded(recorded) => {
                let experts = args.experts.or(recorded.experts()).unwrap_or(trained::EXPERTS);
                recorded
                    .require(Some(experts), args.top_k)
                    .map_err(|source| ConfigError::Recorded { routing: routing.clone(), source })?;
                (experts, recorded.top_k())
            }
            Router::Drawn(_) => {
                (args.experts.unwrap_or(trained::EXPERTS), args.top_k.unwrap_or(trained::TOP_K))
            }
        };
        let config = Config {
            nodes: ranks_per_node.len() as u32,
            ranks_per_node,
            tokens: args.tokens,
            hidden: args.hidden,
            dtype: args.dtype,
            top_k,
            experts,
            order: args.order,
            layout: args.layout,
            route: args.route,
            align: args.align,
            backward,
            routing,
            rounds: rounds.unwrap_or(0),
            seed: args.seed,
        };
        config.check(rounds)?;
        let rounds = rounds.unwrap_or_else(|| config.rounds_in_budget());
        Ok(Config { rounds, ..config })
    }

    fn check(&self, rounds: Option<u32>) -> Result<(), ConfigError> {
        const UNIT: u64 = 16;
        for (option, value) in [
            ("--tokens", self.tokens),
            ("--hidden", self.hidden),
            ("--experts", self.experts),
            ("--top-k", self.top_k),
            ("--align", self.align),
            ("--rounds", rounds.unwrap_or(1)),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { option });
            }
        }
        let (hidden, dtype, bytes) = (self.hidden, self.dtype, self.row_bytes());
        if !bytes.is_multiple_of(UNIT) {
            return Err(ConfigError::RowBytes { hidden, dtype, bytes, unit: UNIT });
        }
        if self.top_k > self.experts {
            return Err(ConfigError::TopK { top_k: self.top_k, experts: self.experts });
        }
        Ok(())
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks_per_node.iter().sum()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.hidden) * self.dtype.size() as u64
    }

    /// As many rounds as take about half a minute on a slow laptop, at most enough for a p99, rounded down to one
    /// digit. A function of the conditions alone: the same command runs the same rounds everywhere.
    fn rounds_in_budget(&self) -> u32 {
        const BUDGET_BYTES: u64 = 200_000_000_000;
        let passes = if self.backward { 8 } else { 4 };
        let rows = u64::from(self.ranks()) * u64::from(self.tokens) * u64::from(self.top_k);
        let bytes = rows.saturating_mul(self.row_bytes()).saturating_mul(passes);
        let rounds = (BUDGET_BYTES / bytes.max(1)).clamp(10, 1000) as u32;
        let digit = 10u32.pow(rounds.ilog10());
        rounds / digit * digit
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
