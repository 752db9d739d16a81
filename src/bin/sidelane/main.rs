//! The `sidelane` program: `launch` starts ranks on this machine, `doctor` says what the machine offers.

#[expect(dead_code, reason = "its ranks call the expert-parallel room, which is still being built")]
mod bench;
mod doctor;
mod error;
mod launch;
mod output;
mod table;

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
    Launch(launch::LaunchArgs),
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Launch(args) => launch::main(args),
        Command::Doctor(args) => doctor::main(&args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("sidelane: {error}");
        error.exit_code()
    })
}
