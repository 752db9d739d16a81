//! The `sidelane` program. A command is a folder and a line of the table below.

mod baselines;
mod bench;
mod chart;
mod collectives;
mod command;
mod conformance;
mod copy_engines;
mod doctor;
mod error;
mod gpu_check;
mod launch;
mod layer;
mod machines;
mod options;
mod plan_bench;
mod put_bench;
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

/// MoE expert-parallel dispatch and combine that run concurrently with the compute.
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
    // Measurements: dispatch and combine between processes, a whole layer, collectives, and their
    // parts.
    Bench: bench::BenchArgs,
    Layer: layer::LayerArgs,
    Collectives: collectives::CollectivesArgs,
    PutBench: put_bench::PutBenchArgs,
    // Operations of ranks, and their times.
    Trace: trace::TraceArgs,
    // Models: load of ranks and copy engines by routers, predicted times, cost of operands.
    Routing: route::RoutingArgs,
    CopyEngines: copy_engines::CopyEnginesArgs,
    Simulate: simulate::SimulateArgs,
    PlanBench: plan_bench::PlanBenchArgs,
    // Tools: ranks, the machine, the features, a GPU.
    Launch: launch::LaunchArgs,
    Doctor: doctor::DoctorArgs,
    Conformance: conformance::ConformanceArgs,
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Help of each command that a user sees, by name.
    fn help() -> Vec<(String, String)> {
        let program = Cli::command();
        let commands = program.get_subcommands().filter(|command| !command.is_hide_set());
        let text = |command: &clap::Command| command.get_after_help().map(ToString::to_string);
        commands.map(|command| (command.get_name().to_owned(), text(command).unwrap_or_default())).collect()
    }

    #[test]
    fn help_of_every_command_has_an_example_that_parses() {
        for (name, text) in help() {
            let examples = text.lines().filter_map(|line| line.split('#').next());
            let examples: Vec<_> =
                examples.filter(|line| line.contains(&format!("sidelane {name}"))).collect();
            assert!(!examples.is_empty(), "{name}");
            for example in examples {
                let words = example.split_whitespace().skip_while(|word| !word.ends_with("sidelane"));
                assert!(Cli::try_parse_from(words).is_ok(), "{example}");
            }
        }
    }
}
