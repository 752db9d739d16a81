//! `sidelane engines`: what a dispatch asks of copy engines, way by way, counted from the schedules that would run.
//!
//! No rank is started and no row is moved. Times are arithmetic: a price per copy and a speed, which the command line names.
//!
//! ```text
//!   decisions of all ranks --> Plan   layouts, blocks in the order of tokens or of relays
//!                                \--> EngineWork of every rank --> mean, most, time
//! ```

mod plan;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sidelane::error::PlanError;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane_core::schedule::call::SlotCall;
use sidelane_core::schedule::stream::{Slots, StreamProgram};
use sidelane_model::CopyEngineWork;

use crate::bench::RowType;
use crate::command::{self, Command};
use crate::error::CliError;
use crate::launch::shape_words;
use crate::options::{NodeArgs, RouterArgs, at_least_one};
use crate::routing::{self, Decided, Source};
use crate::table::{self, time, volume};

/// Count what a dispatch asks of copy engines: copies, bytes and memory operations, and a time by arithmetic
#[derive(Args)]
pub struct EnginesArgs {
    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a file of JSON lines
    /// with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts or --top-k differ from it]
    #[arg(value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    #[command(flatten)]
    pub nodes: NodeArgs<2, 8>,

    #[command(flatten)]
    pub router: RouterArgs<4096>,

    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 7168)]
    pub hidden: u32,

    /// Type of an element
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,

    /// Price of a copy in microseconds, however small; by default what was published of an H100
    #[arg(long, value_name = "US", default_value_t = 2.3, value_parser = positive)]
    pub per_copy: f64,

    /// Speed of a long copy in GB/s; by default what was published of NVLink on an H100
    #[arg(long, value_name = "GB/S", default_value_t = 380.0, value_parser = positive)]
    pub speed: f64,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Command for EnginesArgs {
    const NAME: &'static str = "engines";

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
    pub per_copy: f64,
    pub speed: f64,
}

/// Decisions, and what a row is.
pub struct Task {
    pub decided: Decided,
    pub conditions: Conditions,
    /// Bytes of a row that goes out, and of one that comes home.
    pub row_bytes: u64,
    pub home_bytes: u64,
}

impl Task {
    /// From the command line and what the recording or the routing file says.
    pub fn resolve(args: &EnginesArgs) -> Result<Self, CliError> {
        let &EnginesArgs { hidden, dtype, per_copy, speed, .. } = args;
        let decided = args.router.decide(args.nodes.sizes()?, &args.routing)?;
        at_least_one(&[("--hidden", hidden)])?;
        let (row_bytes, home_bytes) = dtype.bytes(hidden);
        if let Some(&seen) = [row_bytes, home_bytes].iter().find(|bytes| !bytes.is_multiple_of(16)) {
            let (parameter, expected) = ("row bytes", "a multiple of 16");
            return Err(PlanError::BadParameter { parameter, seen, expected }.into());
        }
        let conditions = Conditions { decided: decided.conditions.clone(), hidden, dtype, per_copy, speed };
        Ok(Task { decided, conditions, row_bytes, home_bytes })
    }

    /// Bytes of a slot for all tokens: their rows and, in as many rows as it needs, a header of their choices.
    fn slot_bytes(&self) -> u64 {
        let routing::Conditions { tokens, top_k, .. } = self.decided.conditions;
        let header = HEAD + u64::from(tokens) * u64::from(top_k) * CHOICE;
        (header.div_ceil(self.row_bytes) + u64::from(tokens)) * self.row_bytes
    }
}

/// Bytes of an expert id and a weight.
const CHOICE: u64 = 8;
/// Bytes of what a slot says of itself.
const HEAD: u64 = 64;

/// What one way asks of engines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Way {
    pub name: String,
    /// Of one rank, on average.
    pub mean: Asked,
    /// Of the rank that asks for most, each by itself.
    pub most: Asked,
    /// Microseconds of the engines of the rank that needs most, one copy after another.
    pub us: f64,
}

/// [`CopyEngineWork`], perhaps of no single rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Asked {
    pub copies: f64,
    pub bytes: f64,
    pub batches: f64,
    pub words: f64,
    pub lists: f64,
    pub card_bytes: f64,
}

impl Way {
    fn new(name: String, ranks: &[CopyEngineWork], conditions: &Conditions) -> Self {
        let mean =
            |of: fn(&CopyEngineWork) -> u64| ranks.iter().map(of).sum::<u64>() as f64 / ranks.len() as f64;
        let most = |of: fn(&CopyEngineWork) -> u64| ranks.iter().map(of).max().unwrap_or(0) as f64;
        let us = |work: &CopyEngineWork| {
            work.copies as f64 * conditions.per_copy + work.bytes as f64 / (conditions.speed * 1e3)
        };
        Way {
            name,
            mean: Asked::of(mean),
            most: Asked::of(most),
            us: ranks.iter().map(us).fold(0.0, f64::max),
        }
    }
}

impl Asked {
    fn of(figure: impl Fn(fn(&CopyEngineWork) -> u64) -> f64) -> Self {
        Asked {
            copies: figure(|work| work.copies),
            bytes: figure(|work| work.bytes),
            batches: figure(|work| work.batches),
            words: figure(|work| work.words),
            lists: figure(|work| work.lists),
            card_bytes: figure(|work| work.card_bytes),
        }
    }
}

/// All ways that this group has: slots on one node; rows that are planned, straight or through relays.
pub fn all(task: &Task) -> Result<Vec<Way>, CliError> {
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
            ways.push(Way::new(format!("slots: {name}"), &work, &task.conditions));
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
            let work = plan::dispatch(task, layout, route, spans)?;
            ways.push(Way::new(format!("{}, {how}", layout.name()), &work, &task.conditions));
        }
    }
    Ok(ways)
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
    /// Bytes of a row that goes out, and of one that comes home.
    pub row_bytes: u64,
    pub home_bytes: u64,
    pub ways: Vec<Way>,
}

impl Report {
    pub fn new(task: &Task) -> Result<Self, CliError> {
        Ok(Report {
            config: task.conditions.clone(),
            row_bytes: task.row_bytes,
            home_bytes: task.home_bytes,
            ways: all(task)?,
        })
    }
}

impl command::Report for Report {
    /// Conditions, and a line for each way.
    fn text(&self) -> String {
        let Conditions { decided, hidden, dtype, per_copy, speed } = &self.config;
        let routing::Conditions { routing, experts, top_k, ranks_per_node, tokens, .. } = decided;
        let mut table =
            table::figures("way|copies|bytes each|batches|words|lists|engines|cards|time".split('|'));
        for Way { name, mean, most, us } in &self.ways {
            let of = if mean.copies > 0.0 { mean.bytes / mean.copies } else { 0.0 };
            let count = |figure: f64| format!("{figure:.0}");
            table.add_row([
                name.clone(),
                count(most.copies),
                volume(of as u64),
                count(most.batches),
                count(most.words),
                count(most.lists),
                volume(mean.bytes as u64),
                volume(mean.card_bytes as u64),
                time(*us),
            ]);
        }
        format!(
            "routing   {routing}, {experts} experts, top-{top_k}, {tokens} tokens a rank\n\
             ranks     {}\n\
             rows      {hidden} x {}\n\
             time      {per_copy} us a copy and {speed} GB/s, as given: not measured\n\n\
             {}\n\n\
             Copies, batches, words (memory operations) and lists (of them) are those of the rank that has most; bytes are\n\
             means. Times are of the engines of one rank alone, one copy after another. Own rows are moved by none.",
            shape_words(ranks_per_node),
            dtype.name(),
            table.trim_fmt(),
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
        assert_page("engines-json.md", &[report]);
    }
}
