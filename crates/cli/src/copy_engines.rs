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

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sidelane::error::PlanError;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane_core::schedule::call::SlotCall;
use sidelane_core::schedule::stream::{Slots, StreamProgram};
use sidelane_model::{CopyEngineWork, RankDispatches};

use crate::bench::RowType;
use crate::command::{self, Command};
use crate::error::CliError;
use crate::launch::shape_words;
use crate::options::{RoutedArgs, at_least_one};
use crate::routing::{self, Decided};
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

    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 7168)]
    pub hidden: u32,

    /// Type of an element
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,

    /// Price of a copy in microseconds, however small; by default the published figure of an H100
    #[arg(long, value_name = "US", default_value_t = 2.3, value_parser = positive)]
    pub copy_us: f64,

    /// Speed of a long copy in GB/s; by default the published figure of NVLink on an H100
    #[arg(long, value_name = "GB/S", default_value_t = 380.0, value_parser = positive)]
    pub copy_gbps: f64,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Command for CopyEnginesArgs {
    const NAME: &'static str = "copy-engines";

    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(&self.json)?;
        command::finish(&Report::new(&Task::resolve(&self)?)?, &self.json)
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        Ok(_) => Err("a number above 0".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub decided: routing::Conditions,
    pub hidden: u32,
    pub dtype: RowType,
    /// Microseconds of a copy, however small, and GB/s of a long one.
    pub copy_us: f64,
    pub copy_gbps: f64,
}

/// Decisions, and the shape of a row.
pub struct Task {
    pub decided: Decided,
    pub conditions: Conditions,
    /// Bytes of a row that is sent, and of a returned one.
    pub row_bytes: u64,
    pub home_bytes: u64,
}

impl Task {
    /// From the command line and the recording or routing file.
    pub fn resolve(args: &CopyEnginesArgs) -> Result<Self, CliError> {
        let &CopyEnginesArgs { hidden, dtype, copy_us, copy_gbps, .. } = args;
        let decided = args.routed.decide(None)?;
        at_least_one(&[("--hidden", hidden)])?;
        let (row_bytes, home_bytes) = dtype.bytes(hidden);
        if let Some(&seen) = [row_bytes, home_bytes].iter().find(|bytes| !bytes.is_multiple_of(16)) {
            let (parameter, expected) = ("row bytes", "a multiple of 16");
            return Err(PlanError::BadParameter { parameter, seen, expected }.into());
        }
        let conditions =
            Conditions { decided: decided.conditions.clone(), hidden, dtype, copy_us, copy_gbps };
        Ok(Task { decided, conditions, row_bytes, home_bytes })
    }

    /// Bytes of a slot for all tokens: their rows and, in as many rows as it needs, a header of
    /// their choices.
    fn slot_bytes(&self) -> u64 {
        let routing::Conditions { tokens, top_k, .. } = self.decided.conditions;
        let header = HEAD + u64::from(tokens) * u64::from(top_k) * CHOICE;
        (header.div_ceil(self.row_bytes) + u64::from(tokens)) * self.row_bytes
    }
}

/// Bytes of an expert id and a weight.
const CHOICE: u64 = 8;
/// Bytes of a slot's description of itself.
const HEAD: u64 = 64;

/// Requests of one variant to the engines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    pub name: String,
    /// Of one rank, on average.
    pub mean: CopyEngineWork,
    /// Of the rank that asks for most, each figure by itself.
    pub max: CopyEngineWork,
    /// Microseconds of the engines of the rank that needs most, one copy after another.
    pub us: f64,
}

impl Variant {
    fn new(name: String, ranks: &[CopyEngineWork], conditions: &Conditions) -> Self {
        let us = |work: &CopyEngineWork| {
            work.copies as f64 * conditions.copy_us + work.bytes as f64 / (conditions.copy_gbps * 1e3)
        };
        let (count, us) = (ranks.len() as u64, ranks.iter().map(us).fold(0.0, f64::max));
        let mean = CopyEngineWork::fold(ranks, |figures| (figures.sum::<u64>() + count / 2) / count);
        Variant { name, mean, max: CopyEngineWork::fold(ranks, |figures| figures.max().unwrap_or(0)), us }
    }
}

/// All variants of this group: slots on one node; planned rows, direct or through relays.
pub fn all(task: &Task) -> Result<Vec<Variant>, CliError> {
    let mut ways = Vec::new();
    let ranks = task.decided.nodes.ranks();
    if task.decided.nodes.nodes() == 1 {
        let slots = Slots::new(
            ranks,
            task.slot_bytes(),
            u64::from(task.decided.conditions.tokens) * task.home_bytes,
        )?;
        for (name, call) in [("dispatch", SlotCall::Dispatch), ("combine", SlotCall::Combine)] {
            let work = |me| Ok(CopyEngineWork::of_stream(&StreamProgram::new(call, slots, me)?, me));
            let work: Vec<CopyEngineWork> = (0..ranks).map(work).collect::<Result<_, CliError>>()?;
            ways.push(Variant::new(format!("slots: {name}"), &work, &task.conditions));
        }
    }
    for layout in RowLayout::ALL {
        let mut planned = vec![(Route::Direct, false, "direct")];
        if task.decided.nodes.nodes() > 1 {
            planned.push((Route::Pxn, false, "pxn, token order"));
        }
        if task.decided.nodes.nodes() > 1 && layout == RowLayout::RankMajor {
            planned.push((Route::Pxn, true, "pxn, relay order"));
        }
        for (route, spans, how) in planned {
            let Decided { map, nodes, routings, .. } = &task.decided;
            let &Task { row_bytes, home_bytes, .. } = task;
            let work = CopyEngineWork::of_ranks(&RankDispatches {
                map,
                nodes,
                routings,
                layout,
                route,
                spans,
                row_bytes,
                home_bytes,
            })?;
            ways.push(Variant::new(format!("{}, {how}", layout.name()), &work, &task.conditions));
        }
    }
    Ok(ways)
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
    /// Bytes of a row that is sent, and of a returned one.
    pub row_bytes: u64,
    pub combine_row_bytes: u64,
    pub variants: Vec<Variant>,
}

impl Report {
    pub fn new(task: &Task) -> Result<Self, CliError> {
        Ok(Report {
            config: task.conditions.clone(),
            row_bytes: task.row_bytes,
            combine_row_bytes: task.home_bytes,
            variants: all(task)?,
        })
    }
}

impl command::Report for Report {
    /// Conditions, and a line for each way.
    fn text(&self) -> String {
        let Conditions { decided, hidden, dtype, copy_us, copy_gbps } = &self.config;
        let routing::Conditions { routing, experts, top_k, ranks_per_node, tokens, .. } = decided;
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
        format!(
            "routing   {routing}, {experts} experts, top-{top_k}, {tokens} tokens a rank\n\
             ranks     {}\n\
             rows      {hidden} x {}\n\
             time      {copy_us} us a copy and {copy_gbps} GB/s, as given: not measured\n\n\
             {table}\n\n\
             Copies, memory operations and batches of either are those of the rank that has most; bytes are\n\
             means. Times are of the engines of one rank alone, one copy after another. Own rows, row metadata and\n\
             tables are left out.",
            shape_words(ranks_per_node),
            dtype.name(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::{assert_page, parsed};

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let report =
            Report::new(&Task::resolve(&parsed("--tokens 8 --hidden 32").unwrap()).unwrap()).unwrap();
        assert_page("copy-engines-json.md", &[report]);
    }
}
