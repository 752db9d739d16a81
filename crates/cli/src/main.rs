//! The `sidelane` program: `bench` measures dispatch and combine, `layer` a whole layer with its transfers beside its experts,
//! `collectives` all-reduce and its kind, `perf` what they are made of, `trace` shows what ranks do and when, `route` what a
//! router asks of them, `engines` what they would ask of copy engines, `simulate` how long
//! they would take on a machine that is described, `planning` what operands cost, `launch` starts ranks,
//! `doctor` says what the machine offers, `gpu-check` what a GPU does.

mod bench;
mod chart;
mod collectives;
mod conditions;
mod doctor;
mod engines;
mod error;
mod gpu_check;
#[cfg(test)]
mod json_keys;
mod launch;
mod layer;
mod machines;
mod output;
mod peers;
mod perf;
mod planning;
mod progress;
mod rail;
mod ranks;
mod route;
mod routing;
mod simulate;
mod stats;
mod svg;
mod table;
mod timeline;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// MoE expert-parallel dispatch and combine that run beside the compute.
#[derive(Parser)]
#[command(name = "sidelane", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    BenchRank(ranks::RankArgs),
    Collectives(collectives::CollectivesArgs),
    #[command(hide = true)]
    CollectivesRank(ranks::RankArgs),
    Trace(trace::TraceArgs),
    #[command(hide = true)]
    TraceRank(ranks::RankArgs),
    Route(route::RouteArgs),
    Engines(engines::EnginesArgs),
    Simulate(simulate::SimulateArgs),
    Planning(planning::PlanningArgs),
    Layer(layer::LayerArgs),
    #[command(hide = true)]
    LayerRank(ranks::RankArgs),
    Perf(perf::PerfArgs),
    #[command(hide = true)]
    PerfRank(ranks::RankArgs),
    Launch(launch::LaunchArgs),
    Doctor(doctor::DoctorArgs),
    GpuCheck(gpu_check::GpuCheckArgs),
    #[command(hide = true)]
    GpuCheckPart(ranks::RankArgs),
}

impl Command {
    /// Whether this process is one of the ranks that another command has started.
    fn is_rank(&self) -> bool {
        use Command::{BenchRank, CollectivesRank, LayerRank, PerfRank, TraceRank};
        matches!(self, BenchRank(_) | CollectivesRank(_) | TraceRank(_) | LayerRank(_) | PerfRank(_))
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let tag = if command.is_rank() { ranks::tag() } else { String::new() };
    let done = match command {
        Command::Bench(args) => bench::main(&args),
        Command::BenchRank(args) => bench::rank(&args),
        Command::Collectives(args) => collectives::main(&args),
        Command::CollectivesRank(args) => collectives::rank(&args),
        Command::Trace(args) => trace::main(&args),
        Command::TraceRank(args) => trace::rank(&args),
        Command::Route(args) => route::main(&args),
        Command::Engines(args) => engines::main(&args),
        Command::Simulate(args) => simulate::main(&args),
        Command::Planning(args) => planning::main(&args),
        Command::Layer(args) => layer::main(&args),
        Command::LayerRank(args) => layer::rank(&args),
        Command::Perf(args) => perf::main(&args),
        Command::PerfRank(args) => perf::rank(&args),
        Command::Launch(args) => launch::main(args),
        Command::Doctor(args) => doctor::main(&args),
        Command::GpuCheck(args) => gpu_check::main(&args),
        Command::GpuCheckPart(args) => gpu_check::part(&args),
    };
    done.unwrap_or_else(|error| {
        output::complain(&format!("{tag}sidelane: {error}"));
        error.exit_code()
    })
}
