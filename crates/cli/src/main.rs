//! The `sidelane` program: its [commands], and what they share.

mod baselines;
mod chart;
mod command_frame;
mod commands;
mod error;
mod options;
mod ranks;
mod routing_source;
mod table;

use std::process::ExitCode;

use clap::{Arg, CommandFactory, FromArgMatches, Parser};

use crate::commands::{Commands, run};
use crate::error::CliError;

const AFTER_HELP: &str = "\
Exit status: 0 if all is right, 1 if a result is wrong or something failed, 2
for a command line that is refused. `launch`, and commands that start ranks, end
as the rank that failed first: with its status, 128+n if signal n ended it, 127
if its program does not exist, 126 if it cannot be run.

Example:
  sidelane bench --tokens 64 --json bench.json && echo every row is right";

/// MoE expert-parallel dispatch and combine that run concurrently with the compute.
#[derive(Parser)]
#[command(name = "sidelane", version, arg_required_else_help = true, after_help = AFTER_HELP)]
#[command(max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Commands,
}

/// Takes a number below 0 as the value that it is, which the option then refuses with its range.
fn program() -> clap::Command {
    let with_negative = |arg: Arg| {
        let takes_value = arg.get_action().takes_values();
        arg.allow_negative_numbers(takes_value)
    };
    Cli::command().mut_subcommands(|command| command.mut_args(with_negative))
}

fn main() -> ExitCode {
    let seen = Cli::from_arg_matches(&program().get_matches());
    let command = seen.unwrap_or_else(|error| error.exit()).command;
    let tag = if matches!(command, Commands::Rank(_)) { ranks::tag() } else { String::new() };
    run(command).unwrap_or_else(|error| {
        if !matches!(error, CliError::Said) {
            command_frame::complain(&format!("{tag}sidelane: {error}"));
        }
        error.exit_code()
    })
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    #[test]
    fn help_and_page_list_exit_statuses_and_help_example_parses() {
        let page = crate::command_frame::tests::page("troubleshooting.md");
        let (_, table) = page.split_once("## Exit status").unwrap();
        for status in ["0", "1", "2", "126", "127", "128+n"] {
            assert!(table.contains(&format!("| {status} |")), "{status}");
            assert!(AFTER_HELP.split([' ', ',', '\n']).any(|word| word == status), "{status}");
        }
        let example = AFTER_HELP.lines().find_map(|line| line.strip_prefix("  ")).unwrap();
        let words = example.split_whitespace().take_while(|&word| word != "&&");
        assert!(Cli::try_parse_from(words).is_ok(), "{example}");
    }

    /// Help of each command that a user sees, by name.
    fn help() -> Vec<(String, String)> {
        let program = Cli::command();
        let commands = program.get_subcommands().filter(|command| !command.is_hide_set());
        let text = |command: &clap::Command| command.get_after_help().map(ToString::to_string);
        commands.map(|command| (command.get_name().to_owned(), text(command).unwrap_or_default())).collect()
    }

    #[test]
    fn a_number_below_zero_is_a_value_that_is_refused() {
        for line in
            ["bench --tokens", "bench --seed", "plan --tflops", "copy-engines --copy-us", "launch --grace"]
        {
            let words = format!("sidelane {line} -1");
            let error = program().try_get_matches_from(words.split(' ')).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ValueValidation, "{line}: {error}");
        }
    }

    #[test]
    fn examples_fit_a_terminal_of_80_columns() {
        for (name, text) in help().into_iter().chain([("".to_owned(), AFTER_HELP.to_owned())]) {
            let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "{name}: {wide:#?}");
        }
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
