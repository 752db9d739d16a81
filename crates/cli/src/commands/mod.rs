//! The commands. Each is a folder or a file, and a line of the table below.

mod bench;
mod collectives;
mod conformance;
mod copy_engines;
pub mod doctor;
mod gpu_check;
pub mod launch;
mod layer;
mod plan;
mod plan_bench;
mod put_bench;
mod routing;
mod simulate;
mod trace;

use std::process::ExitCode;

use clap::Subcommand;

use crate::command_frame::Command;
use crate::error::{CliError, usage};
use crate::ranks;

macro_rules! commands {
    ($($name:ident: $arguments:ty,)*) => {
        /// The commands of the program.
        #[derive(Subcommand)]
        pub enum Commands {
            $(#[command(name = <$arguments>::NAME)] $name($arguments),)*
            /// One of the processes that a command has started
            #[command(hide = true)]
            Rank(ranks::RankArgs),
        }

        /// Carries one out.
        pub fn run(command: Commands) -> Result<ExitCode, CliError> {
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
    // Measurements: dispatch and combine between processes, a whole layer, collectives, and their
    // parts.
    Bench: bench::BenchArgs,
    Layer: layer::LayerArgs,
    Collectives: collectives::CollectivesArgs,
    PutBench: put_bench::PutBenchArgs,
    // Operations of ranks, and their times.
    Trace: trace::TraceArgs,
    // Models: load of ranks and copy engines by routers, predicted times, cost of operands, meshes.
    Routing: routing::RoutingArgs,
    CopyEngines: copy_engines::CopyEnginesArgs,
    Simulate: simulate::SimulateArgs,
    PlanBench: plan_bench::PlanBenchArgs,
    Plan: plan::PlanArgs,
    // Tools: ranks, the machine, the features, a GPU.
    Launch: launch::LaunchArgs,
    Doctor: doctor::DoctorArgs,
    Conformance: conformance::ConformanceArgs,
    GpuCheck: gpu_check::GpuCheckArgs,
}
