//! The command line of `simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;
use sidelane::dtype::Wire;
use sidelane::plan::{Order, RowLayout};
use sidelane::topology::Route;

use super::model::Model;
use crate::bench::RowType;
use crate::options::one_of;
use crate::routing::Source;

/// Predict the times of dispatch and combine on a machine that is described, from the schedules that would run there
#[derive(Args, Clone)]
pub struct SimulateArgs {
    /// Model whose experts, choices, row and router are taken
    #[arg(long, value_enum, default_value_t = Model::DeepseekV3)]
    pub preset: Model,

    /// A machine that is known (h100-cx7, h200-cx7, h800-400g), or a file as --calibrate writes it
    #[arg(long, value_name = "NAME|FILE", default_value = "h100-cx7")]
    pub hardware: String,

    /// Number of nodes
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub nodes: u32,

    /// Ranks of each node
    #[arg(long, value_name = "M", default_value_t = 8)]
    pub ranks_per_node: u32,

    /// Tokens of each rank
    #[arg(long, value_name = "T", default_value_t = 4096)]
    pub tokens: u32,

    /// Elements of a row [default: the model's]
    #[arg(long, value_name = "H")]
    pub hidden: Option<u32>,

    /// Number of experts [default: the model's, or what the routing file says]
    #[arg(long, value_name = "E")]
    pub experts: Option<u32>,

    /// Experts that each token chooses [default: the model's, or what the routing file says]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,

    /// Type of an element; fp8 goes out as records with scales, and bf16 comes home
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,

    /// Where decisions come from: recorded, uniform, zipf:S, incast, or a file [default: the model's router, on random logits]
    #[arg(long, value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    /// Exact sizes, or fixed slots on a stream (rank-major, one node; full whatever the routing)
    #[arg(long, value_enum, default_value_t = Room::Eager)]
    pub mode: Room,

    /// Order of received rows [default: both]
    #[arg(long, value_parser = one_of(RowLayout::ALL, RowLayout::name))]
    pub layout: Option<RowLayout>,

    /// Way of rows to other nodes [default: both]
    #[arg(long, value_parser = one_of(Route::ALL, Route::name))]
    pub route: Option<Route>,

    /// Order of sums; partial sums of ranks or nodes are made by relays [default: expert and, over pxn, rank and node]
    #[arg(long, value_parser = one_of(Order::ALL, Order::name))]
    pub order: Option<Order>,

    /// Type in which partial sums cross [default: both]
    #[arg(long, value_parser = one_of(Wire::ALL, Wire::name))]
    pub wire: Option<Wire>,

    /// In how many parts a block goes to its relay; a list compares them [default: 4]
    #[arg(long, value_name = "N[,N..]", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub chunks: Vec<u8>,

    /// How weights and choices go: as copies beside the rows, or with the counts [default: rows]
    #[arg(long, value_enum)]
    pub weights: Option<Beside>,

    /// Time a whole layer, forward and backward, its tokens in so many slices: transfers beside the experts; a list compares them
    #[arg(long, value_name = "N[,N..]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub slices: Vec<u32>,

    /// Width of an expert, with --slices [default: the model's]
    #[arg(long, value_name = "F", requires = "slices", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub ffn: Option<u32>,

    /// TFLOP/s of the experts' products, with --slices: 600 is six tenths of what an H100 is sold with, of bf16
    #[arg(long, value_name = "X", default_value_t = 600, requires = "slices", value_parser = clap::value_parser!(u32).range(1..))]
    pub tflops: u32,

    /// Play every rank of a group of more than 64, not one node that stands for all
    #[arg(long)]
    pub all_ranks: bool,

    /// Draws random logits and synthetic routing [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Draw times by number of ranks, in powers of two of nodes up to --up-to
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Most ranks of the picture
    #[arg(long, value_name = "R", default_value_t = 1024, requires = "svg")]
    pub up_to: u32,

    /// Measure this machine instead, and write its figures
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub calibrate: Option<PathBuf>,
}

/// How receive memory is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Room {
    Eager,
    Slots,
}

/// How what goes with rows moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Beside {
    Rows,
    Counts,
}
