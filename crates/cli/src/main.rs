//! The `sidelane` program. A command is a folder and a line of the table below.

mod bench;
mod chart;
mod collectives;
mod command;
mod copy_engines;
mod doctor;
mod error;
mod gpu_check;
mod launch;
mod layer;
mod machines;
mod options;
mod peers;
mod perf;
mod plan_bench;
mod ranks;
mod route;
mod routing;
mod simulate;
mod stats;
mod svg;
mod table;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::command::Command;
use crate::error::{CliError, usage};

/// MoE expert-parallel dispatch and combine that run beside the compute.
#[derive(Parser)]
#[command(name = "sidelane", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Commands,
}

macro_rules! commands {
    ($($name:ident: $arguments:ty,)*) => {
        #[derive(Subcommand)]
        enum Commands {
            $(#[command(name = <$arguments>::NAME)] $name($arguments),)*
            /// One of the processes that a command has started
            #[command(hide = true)]
            Rank(ranks::RankArgs),
        }

        fn run(command: Commands) -> Result<ExitCode, CliError> {
            match command {
                $(Commands::$name(args) => args.run(),)*
                Commands::Rank(ranks::RankArgs { command, task }) => match command.as_str() {
                    $(<$arguments>::NAME => <$arguments>::rank(&task),)*
                    other => Err(usage!("there is no command {other}")),
                },
            }
        }
    };
}

commands! {
    // How long dispatch and combine take between processes, and a whole layer, and collectives, and what they are made of.
    Bench: bench::BenchArgs,
    Layer: layer::LayerArgs,
    Collectives: collectives::CollectivesArgs,
    Perf: perf::PerfArgs,
    // What ranks do and when.
    Trace: trace::TraceArgs,
    // What routers ask of ranks and of copy engines, how long a machine would take, what operands cost.
    Routing: route::RoutingArgs,
    CopyEngines: copy_engines::CopyEnginesArgs,
    Simulate: simulate::SimulateArgs,
    PlanBench: plan_bench::PlanBenchArgs,
    // Ranks, what the machine offers, what a GPU does.
    Launch: launch::LaunchArgs,
    Doctor: doctor::DoctorArgs,
    GpuCheck: gpu_check::GpuCheckArgs,
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let tag = if matches!(command, Commands::Rank(_)) { ranks::tag() } else { String::new() };
    run(command).unwrap_or_else(|error| {
        command::complain(&format!("{tag}sidelane: {error}"));
        error.exit_code()
    })
}
