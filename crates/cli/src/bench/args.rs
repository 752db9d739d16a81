//! The command line of `bench`; its conditions are those of `trace` as well.

use std::path::PathBuf;

use clap::Args;
use sidelane::dtype::Wire;
use sidelane::plan::{Order, Overflow, RowLayout, Strategy};
use sidelane::topology::Route;

use super::room::RoomMode;
use super::row_type::RowType;
use crate::launch::MachineArgs;
use crate::options::{NodeArgs, RouterArgs, one_of};
use crate::routing::Source;

/// What dispatches and combines are made of.
#[derive(Args)]
pub struct ConditionArgs {
    #[command(flatten)]
    pub nodes: NodeArgs<2, 4>,

    #[command(flatten)]
    pub router: RouterArgs<512>,

    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 2048)]
    pub hidden: u32,

    /// Type of an element
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,

    /// Order of addition in combine: by expert, or partial sums per rank or per node first, which cross in place of rows
    #[arg(long, default_value = "expert", value_parser = one_of(Order::ALL, Order::name))]
    pub order: Order,

    /// Type of partial sums; there are none with --order expert
    #[arg(long, default_value = "f32", value_parser = one_of(Wire::ALL, Wire::name))]
    pub wire: Wire,

    /// Order of the received rows: a row for each expert, by expert; or one for all experts of a rank, by source
    #[arg(long, default_value = "expert-major", value_parser = one_of(RowLayout::ALL, RowLayout::name))]
    pub layout: RowLayout,

    /// How receive memory is sized
    #[arg(long, value_enum, default_value_t)]
    pub mode: RoomMode,

    /// Rows that a rank may receive: this factor of tokens x top-k or, rank-major, of the (token, rank) rows that a rank
    /// receives on average
    #[arg(long, value_name = "FACTOR", required_if_eq("mode", "budget"), allow_negative_numbers = true)]
    pub budget: Option<f64>,

    /// Slots of each source for each expert or, rank-major, for each rank [default: what the routing needs at most]
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,

    /// What becomes of rows beyond budget or slots [default: error]
    #[arg(long, value_parser = one_of(OVERFLOWS, overflow))]
    pub on_overflow: Option<Overflow>,

    /// Way of rows to other nodes: a row for each expert, or one for each node, which a rank there hands on
    #[arg(long, default_value = "pxn", value_parser = one_of(Route::ALL, Route::name))]
    pub route: Route,

    /// Let relays copy spans of rows, not rows one by one, as a copy engine would: for --layout rank-major --route pxn
    #[arg(long)]
    pub spans: bool,

    /// Way of rows to the ranks of their experts: each to those that its token chose, or every token to every rank, which
    /// copies what is for its experts
    #[arg(long, default_value = "exchange", value_parser = one_of(Strategy::ALL, Strategy::name))]
    pub strategy: Strategy,

    /// Start and pad the rows of each expert to a multiple of this many rows
    #[arg(long, value_name = "ROWS", default_value_t = 1)]
    pub align: u32,

    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a file of JSON lines
    /// with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts or --top-k differ from it]
    #[arg(long, value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

/// Time dispatch and combine between processes of one machine or several, verified and against a floor
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

    /// Take turns with others that do the same the usual way, over MPI and over torch's gloo, if they are installed: rows
    /// by expert, bf16, on one machine
    #[arg(long, conflicts_with = "master")]
    pub peers: bool,

    /// Write the report as JSON, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write one round as a Chrome trace, on the machine of rank 0
    #[arg(long, value_name = "FILE")]
    pub trace_out: Option<PathBuf>,
}

/// All that can become of rows for which there is no room.
const OVERFLOWS: [Overflow; 2] = [Overflow::Drop, Overflow::Error];

fn overflow(what: Overflow) -> &'static str {
    match what {
        Overflow::Drop => "drop",
        Overflow::Error => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::parsed;

    #[test]
    fn the_main_job_needs_no_options() {
        let args = parsed::<BenchArgs>("").unwrap().conditions;
        assert_eq!((args.nodes.nodes, args.nodes.ranks_per_node.len(), args.router.tokens), (None, 0, None));
        assert_eq!((args.route, args.order, args.wire), (Route::Pxn, Order::Expert, Wire::F32));
        assert_eq!((args.hidden, args.dtype, args.routing), (2048, RowType::Bf16, None));
    }

    #[test]
    fn a_wrong_value_is_answered_with_the_valid_ones() {
        for (words, valid) in [
            ("--route relay", &["direct", "pxn"][..]),
            ("--layout token-major", &["expert-major", "rank-major"]),
            ("--mode static", &["eager", "budget", "slots"]),
            ("--on-overflow wait", &["drop", "error"]),
            ("--order token", &["expert", "rank", "node"]),
            ("--wire f16", &["f32", "bf16"]),
            ("--dtype bytes", &["bf16", "f16", "f32", "fp8"]),
            ("--routing zipf:x", &["uniform", "incast", "zipf:S"]),
        ] {
            let error = parsed::<BenchArgs>(words).err().expect("a wrong value").to_string();
            assert!(valid.iter().all(|value| error.contains(value)), "{words:?}: {error}");
        }
    }
}
