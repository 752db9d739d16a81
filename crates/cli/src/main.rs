//! The `sidelane` program: its [commands], and what they share.

mod baselines;
mod chart;
mod command;
mod commands;
mod error;
mod machines;
mod options;
mod ranks;
mod routing_source;
mod stats;
mod svg;
mod table;

use std::process::ExitCode;

use clap::Parser;

use crate::commands::{Commands, run};

/// MoE expert-parallel dispatch and combine that run concurrently with the compute.
#[derive(Parser)]
#[command(name = "sidelane", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Commands,
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
