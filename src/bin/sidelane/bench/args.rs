//! The command line of `bench`; its conditions are those of `trace` as well.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use sidelane::dtype::Dtype;

use super::source::Source;

/// In which order combine adds the rows of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Ascending expert, one rounding: the same bits on every lane and topology
    Expert,
    /// Partial sums per rank, then ranks ascending
    Rank,
}

/// In which order a rank sees the rows that it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// By local expert, then source rank, then token
    ExpertMajor,
}

/// Which way rows take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// From the source straight to the rank of the expert
    Direct,
}

/// What dispatches and combines are made of.
#[derive(Args)]
pub struct ConditionArgs {
    /// Number of nodes [default: 1, or as many as --ranks-per-node lists]
    #[arg(long, value_name = "N")]
    pub nodes: Option<u32>,

    /// Ranks of each node; a list gives nodes of different size
    #[arg(long, value_name = "M[,M..]", value_delimiter = ',', default_value = "8")]
    pub ranks_per_node: Vec<u32>,

    /// Tokens of each rank
    #[arg(long, value_name = "T", default_value_t = 512)]
    pub tokens: u32,

    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 2048)]
    pub hidden: u32,

    /// Type of an element
    #[arg(long, default_value = "bf16", value_parser = dtype())]
    pub dtype: Dtype,

    /// Experts that each token chooses [default: 8, or what the routing file says]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,

    /// Number of experts [default: 64, or what the routing file says]
    #[arg(long, value_name = "E")]
    pub experts: Option<u32>,

    /// Order of addition in combine
    #[arg(long, value_enum, default_value_t = Order::Expert)]
    pub order: Order,

    /// Order of the received rows
    #[arg(long, value_enum, default_value_t = Layout::ExpertMajor)]
    pub layout: Layout,

    /// Way of the rows
    #[arg(long, value_enum, default_value_t = Route::Direct)]
    pub route: Route,

    /// Start and pad the rows of each expert to a multiple of this many rows
    #[arg(long, value_name = "ROWS", default_value_t = 1)]
    pub align: u32,

    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a file of JSON lines
    /// with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts or --top-k differ from it]
    #[arg(long, value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    /// Draws rows and synthetic routing
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Time dispatch and combine between processes of this machine, verified and against a floor
#[derive(Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub conditions: ConditionArgs,

    /// Time the backward passes as well
    #[arg(long)]
    pub backward: bool,

    /// Rounds to time; from 1000 on p99 is reported [default: what fits into half a minute]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write one round as a Chrome trace
    #[arg(long, value_name = "FILE")]
    pub trace_out: Option<PathBuf>,
}

/// The types that can be summed.
fn dtype() -> impl TypedValueParser<Value = Dtype> {
    const TYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];
    PossibleValuesParser::new(TYPES.map(Dtype::name))
        .map(|name| TYPES.into_iter().find(|dtype| dtype.name() == name).expect("one of the names above"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn parse(words: &[&str]) -> Result<BenchArgs, String> {
        let line = Line::try_parse_from(std::iter::once(&"bench").chain(words));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn the_main_job_needs_no_options() {
        let args = parse(&[]).unwrap().conditions;
        assert_eq!((args.nodes, args.ranks_per_node.as_slice(), args.tokens), (None, &[8][..], 512));
        assert_eq!((args.hidden, args.dtype, args.routing), (2048, Dtype::Bf16, None));
    }

    #[test]
    fn a_wrong_value_is_answered_with_the_valid_ones() {
        for (words, valid) in [
            (["--route", "pxn"], &["direct"][..]),
            (["--layout", "rank-major"], &["expert-major"]),
            (["--order", "node"], &["expert", "rank"]),
            (["--dtype", "bytes"], &["bf16", "f16", "f32"]),
            (["--routing", "zipf:x"], &["uniform", "incast", "zipf:S"]),
        ] {
            let error = parse(&words).err().expect("a wrong value");
            assert!(valid.iter().all(|value| error.contains(value)), "{words:?}: {error}");
        }
    }
}
