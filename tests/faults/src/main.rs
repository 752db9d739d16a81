//! Faults at every phase over every lane: each must be named in time, or survived to the bit.
//!
//! ```text
//!   cell      the matrix: fault x phase x lane, what means nothing, samples
//!   judge     one cell, in processes of its own
//!   trial     ranks in a phase, the strike, what must follow
//!   inject    the faults, from outside of the ranks: signals, limits, control groups, the wire
//!   wire      two machines that are network namespaces, and what lies between them
//!   job       ranks as processes; rank: what they do
//!   leftovers of this program in the kernel: removed when a signal ends it, and those of dead runs
//!   soak      random worlds, layers, faults and rebuilds in the same processes, for as long as one wants
//!   report    tables, JSON
//! ```

mod cell;
mod cgroup;
mod error;
mod ffi;
mod inject;
mod job;
mod judge;
mod leftovers;
#[path = "../../support/processes.rs"]
#[allow(dead_code, reason = "tests use the rest of it")]
mod processes;
mod protocol;
mod rank;
mod report;
mod soak;
mod trial;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::builder::PossibleValue;
use clap::{Args, Parser, Subcommand};

use cell::{Cell, Fault, Lane, Phase};
use error::Result;
use inject::Machine;
use judge::Rules;
use protocol::{LIVENESS, LONGEST_LIVENESS};
use report::Report;

/// Strike ranks and wires with faults, and check that each is named in time or survived to the bit.
///
/// Exit status: 0 if all is right, 1 if a cell is wrong, 2 for wrong usage or a machine that lacks
/// a tool.
#[derive(Parser)]
#[command(name = "faults", args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    matrix: Matrix,
}

#[derive(Subcommand)]
enum Command {
    /// Random worlds, layers, faults and rebuilds in the same processes: their memory, descriptors
    /// and threads must not grow
    Soak(soak::Soak),
    /// A rank that obeys its parent.
    #[command(hide = true)]
    Rank,
}

/// Which cells are run.
#[derive(Args)]
struct Matrix {
    /// Only cells of these faults, phases and lanes
    #[arg(long, num_args = 1.., value_name = "NAME", value_parser = names())]
    only: Vec<String>,
    /// Only so many cells, drawn by the seed
    #[arg(long, value_name = "CELLS")]
    sample: Option<usize>,
    /// Begin no further cell after so many seconds
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Seed of victims, moments, lost packets and samples [default: another one in each run]
    #[arg(long)]
    seed: Option<u64>,
    /// Strike this rank [default: drawn by the seed]
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(..judge::SIZE as i64))]
    victim: Option<u32>,
    /// Silence after which a rank counts as lost. On a busy machine, raise it, so that a rank that
    /// only waits for a core is not taken for dead
    #[arg(long, value_name = "MILLISECONDS", default_value_t = LIVENESS.as_millis() as u64,
          value_parser = clap::value_parser!(u64).range(1000..=LONGEST_LIVENESS.as_millis() as u64))]
    liveness_ms: u64,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn names() -> clap::builder::PossibleValuesParser {
    let faults = Fault::ALL.map(Fault::name);
    let names = faults.into_iter().chain(Phase::ALL.map(Phase::name)).chain(Lane::ALL.map(Lane::name));
    names.map(PossibleValue::new).collect::<Vec<_>>().into()
}

fn main() -> ExitCode {
    let Cli { command, matrix } = Cli::parse();
    if !matches!(command, Some(Command::Rank)) {
        leftovers::remove_of_dead_runs();
        if let Err(error) = leftovers::remove_on_signals() {
            eprintln!("faults: {error}");
            return ExitCode::from(2);
        }
    }
    let right = match command {
        Some(Command::Rank) => rank::serve().map(|()| true),
        Some(Command::Soak(soak)) => soak.run(),
        None => run(&matrix),
    };
    // A run that a signal interrupts has no result: the thread that cleans up ends the program.
    let _making = leftovers::making();
    match right {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faults: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs cells, one after another. True if none is wrong.
fn run(matrix: &Matrix) -> Result<bool> {
    let (began, seed) = (Instant::now(), matrix.seed.unwrap_or_else(cell::fresh_seed));
    let rules = Rules { victim: matrix.victim, liveness: Duration::from_millis(matrix.liveness_ms) };
    let machine = Machine::probe();
    let mut cells = Cell::chosen(&matrix.only)?;
    if let Some(count) = matrix.sample {
        cells.retain(|cell| cell.why_not(&machine).is_none());
        cells = cell::sample(cells, count, seed);
    }
    println!("seed {seed}: --seed {seed} repeats victims, moments and samples");
    let (bar, mut outcomes) = (report::progress(cells.len()), Vec::new());
    for cell in cells {
        if matrix.seconds.is_some_and(|limit| began.elapsed() > Duration::from_secs(limit)) {
            break;
        }
        bar.set_message(cell.to_string());
        let outcome = judge::judge(cell, &machine, seed, &rules)?;
        if outcome.verdict != judge::Verdict::NotApplicable {
            bar.suspend(|| println!("{}", report::line(&outcome)));
        }
        outcomes.push(outcome);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let report = Report::new(seed, outcomes, began.elapsed().as_secs_f64());
    report.print();
    if let Some(path) = &matrix.json {
        report.write(path)?;
    }
    Ok(report.is_right())
}
