//! The test bed: two virtual machines with Soft-RoCE NICs on one Linux machine, in which Sidelane
//! meets a real libibverbs, real queue pairs and a real wire.
//!
//! ```text
//!   fetch      packages by apt, a kernel that is unpacked and never installed
//!   programs   what is under test, by cargo
//!   image      an initramfs of both
//!   machine    QEMU, its monitor, a channel to the agent inside (guest)
//!   bed        two machines and a wire that can be cut
//!   steps      what is seen
//!   report     tables, JSON
//! ```

mod bed;
mod counters;
mod deadline;
mod error;
mod fetch;
mod guest;
mod image;
mod machine;
mod perftest;
mod programs;
mod protocol;
mod report;
mod run;
mod sidelane;
mod stats;
mod steps;
mod tool;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Two virtual machines with Soft-RoCE NICs: fetch, build, boot, and check that every step passes.
#[derive(Parser)]
#[command(name = "testbed", args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Role {
    /// Inside a machine: run the host's commands.
    #[command(hide = true)]
    Agent {
        /// The port to the host.
        port: PathBuf,
    },
}

/// What can be asked of a run.
#[derive(Args)]
struct Options {
    /// Only these steps
    #[arg(long, num_args = 1.., value_name = "STEP", value_parser = step_names())]
    only: Vec<String>,
    /// A figure beyond its limit fails the run
    #[arg(long)]
    strict: bool,
    /// How often to alternate between Sidelane and perftest
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Cargo's profile for the programs under test
    #[arg(long, default_value = "test")]
    profile: String,
    /// Build with all packages but the trainer: where their tests are built, nothing is built again
    #[arg(long)]
    all_packages: bool,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Instead of the steps: run this line of shell on both machines; $machine is 0 or 1
    #[arg(long, value_name = "COMMAND", conflicts_with = "only")]
    run: Option<String>,
}

fn step_names() -> clap::builder::PossibleValuesParser {
    steps::STEPS.iter().map(|step| clap::builder::PossibleValue::new(step.name).help(step.about)).into()
}

fn main() -> ExitCode {
    let Cli { role, options } = Cli::parse();
    if let Some(Role::Agent { port }) = role {
        return match guest::agent(&port) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error),
        };
    }
    match run::run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("testbed: {error}");
    ExitCode::FAILURE
}
