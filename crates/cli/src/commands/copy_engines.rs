//! `sidelane copy-engines`: requests of a dispatch to copy engines, per variant, counted from the
//! schedules that would run.
//!
//! No rank is started and no row is moved. Times are arithmetic: a price per copy and a rate, which
//! the command line names.
//!
//! ```text
//!   decisions of all ranks --> Plan   layouts, blocks in the order of tokens or of relays
//!                                \--> CopyEngineWork of every rank --> mean, max, time
//! ```

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sidelane::error::PlanError;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane_model::{CopyEngineWork, RankDispatches};

use crate::command_frame::{self, Command};
use crate::commands::launch::shape_words;
use crate::error::CliError;
use crate::options::{JsonFile, RoutedArgs, RowArgs, RowType, at_least_one, up_to};
use crate::routing_source::{self, Decided};
use crate::table::{self, time, volume};

const EXAMPLES: &str = "\
Examples:
  sidelane copy-engines --nodes 2 --ranks-per-node 8 --tokens 4096
  sidelane copy-engines --nodes 1 --ranks-per-node 8 --tokens 128 --dtype fp8";

/// Count the requests of a dispatch to copy engines: copies, bytes and memory operations, and a
/// time by arithmetic
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct CopyEnginesArgs {
    #[command(flatten)]
    pub routed: RoutedArgs<2, 8, 4096>,

    #[command(flatten)]
    pub row: RowArgs<7168>,

    /// Price of a copy in microseconds, however small; by default the published figure of an H100
    #[arg(long, value_name = "US", default_value_t = 2.3, value_parser = up_to(1e9))]
    pub copy_us: f64,

    /// Speed of a long copy in GB/s; by default the published figure of NVLink on an H100
    #[arg(long, value_name = "GB/S", default_value_t = 380.0, value_parser = up_to(1e9))]
    pub copy_gbps: f64,

    #[command(flatten)]
    pub report: JsonFile,
}

impl Command for CopyEnginesArgs {
    const NAME: &'static str = "copy-engines";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&self.report.json, [])?;
        command_frame::finish(&Report::new(&self)?, &self.report.json)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    #[serde(flatten)]
    pub decided: routing_source::RunSettings,
    pub hidden: u32,
    pub dtype: RowType,
    /// Microseconds of a copy, however small, and GB/s of a long one.
    pub copy_us: f64,
    pub copy_gbps: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    pub name: String,
    pub mean: CopyEngineWork,
    /// Of the rank that asks for most, each figure by itself.
    pub max: CopyEngineWork,
    /// Microseconds of the engines of the rank that needs most, one copy after another.
    pub us: f64,
}

impl Variant {
    fn new(name: String, ranks: &[CopyEngineWork], conditions: &RunSettings) -> Self {
        let us = |work: &CopyEngineWork| {
            work.copies as f64 * conditions.copy_us + work.bytes as f64 / (conditions.copy_gbps * 1e3)
        };
        let (count, us) = (ranks.len() as u64, ranks.iter().map(us).fold(0.0, f64::max));
        let mean = CopyEngineWork::fold(ranks, |figures| (figures.sum::<u64>() + count / 2) / count);
        Variant { name, mean, max: CopyEngineWork::fold(ranks, |figures| figures.max().unwrap_or(0)), us }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    /// Bytes of a row that is sent, and of a returned one.
    pub row_bytes: u64,
    pub combine_row_bytes: u64,
    pub variants: Vec<Variant>,
}

/// Memory of a choice that is planned.
const PLANNED_BYTES: u64 = 72;

impl Report {
    /// All variants of this group: slots on one node; planned rows, direct or through relays.
    pub fn new(args: &CopyEnginesArgs) -> Result<Self, CliError> {
        let &CopyEnginesArgs { copy_us, copy_gbps, .. } = args;
        let (hidden, dtype) = (args.row.hidden(), args.row.dtype);
        let Decided { conditions, map, nodes, routings } = args.routed.decide(None, PLANNED_BYTES)?;
        at_least_one(&[("--hidden", hidden)])?;
        let (row_bytes, combine_row_bytes) = dtype.bytes(hidden);
        if let Some(&seen) = [row_bytes, combine_row_bytes].iter().find(|bytes| !bytes.is_multiple_of(16)) {
            let (parameter, expected) = ("row bytes", "a multiple of 16");
            return Err(PlanError::BadParameter { parameter, seen, expected }.into());
        }
        let config = RunSettings { decided: conditions, hidden, dtype, copy_us, copy_gbps };
        let mut work = match nodes.nodes() {
            1 => {
                let tokens = (config.decided.tokens, config.decided.top_k);
                CopyEngineWork::of_slots(nodes.ranks(), tokens, (row_bytes, combine_row_bytes))?
            }
            _ => Vec::new(),
        };
        work.extend(CopyEngineWork::of_ways(&RankDispatches {
            map: &map,
            nodes: &nodes,
            routings: &routings,
            layout: RowLayout::ExpertMajor,
            route: Route::Direct,
            spans: false,
            row_bytes,
            return_bytes: combine_row_bytes,
        })?);
        let variants = work.into_iter().map(|(name, ranks)| Variant::new(name, &ranks, &config)).collect();
        Ok(Report { config, row_bytes, combine_row_bytes, variants })
    }
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let RunSettings { decided, hidden, dtype, copy_us, copy_gbps } = &self.config;
        let routing_source::RunSettings { routing, experts, top_k, ranks_per_node, tokens, .. } = decided;
        let table = table::of(
            &self.variants,
            &[
                ("variant", &|variant| variant.name.clone()),
                ("copies", &|variant| variant.max.copies.to_string()),
                ("bytes each", &|variant| volume(variant.mean.bytes / variant.mean.copies.max(1))),
                ("batches", &|variant| variant.max.batches.to_string()),
                ("memory ops", &|variant| variant.max.memory_ops.to_string()),
                ("their batches", &|variant| variant.max.memory_op_batches.to_string()),
                ("engines", &|variant| volume(variant.mean.bytes)),
                ("NICs", &|variant| volume(variant.mean.nic_bytes)),
                ("time", &|variant| time(variant.us)),
            ],
        );
        let head = table::head(&[
            ("routing", format!("{routing}, {experts} experts, top-{top_k}, {tokens} tokens a rank")),
            ("ranks", shape_words(ranks_per_node)),
            ("rows", format!("{hidden} x {}", dtype.name())),
            ("time", format!("{copy_us} us a copy and {copy_gbps} GB/s, as given: not measured")),
        ]);
        format!(
            "{head}\n{table}\n\n\
             Copies, memory operations and batches of either are those of the rank that has most; bytes are\n\
             means. Times are of the engines of one rank alone, one copy after another. Own rows, row metadata and\n\
             tables are left out.",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_frame::tests::{assert_page, parsed};

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let report = Report::new(&parsed("--tokens 8 --hidden 32").unwrap()).unwrap();
        assert_page("copy-engines-json.md", &[report]);
    }
}
