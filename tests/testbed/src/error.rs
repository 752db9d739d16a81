//! What can go wrong with the bed, or in it.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use crate::counters::Late;

/// The bed's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with the bed, or in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder.
    #[error("{}: {source}", path.display())]
    File {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A program of this machine did not start.
    #[error("{program} does not start: {source}")]
    Start {
        /// Its name.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A program of this machine failed.
    #[error("{program}: {status}\n{stderr}")]
    Failed {
        /// Its name.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// Its output.
        stderr: String,
    },
    /// A NIC has not sent the requested packets.
    #[error(
        "machine {machine}: {expected} packets and acknowledgements were to be sent, {sent} were, {again} of them again"
    )]
    Miscounted {
        /// Which.
        machine: usize,
        /// Packets of the requests, and acknowledgements of the other's.
        expected: u64,
        /// The NIC's count.
        sent: u64,
        /// Packets sent or seen twice.
        again: u64,
    },
    /// The arrived packets are not the held ones, or a connection took them.
    #[error("{held:?} packets were held on the wire to machines 0 and 1; let go: {late:?}")]
    LatePackets {
        /// Sent to each machine, and kept.
        held: [u64; 2],
        /// What each machine has seen of them.
        late: [Late; 2],
    },
    /// A wire that was held did not come to rest.
    #[error("packets are still sent on the wire of rxe{nic} though it is held")]
    Restless {
        /// The NIC.
        nic: usize,
    },
    /// Only root can install.
    #[error("missing packages; as root: apt-get install {}", packages.join(" "))]
    Packages {
        /// Their names.
        packages: Vec<&'static str>,
    },
    /// No package of a kernel behind the name that always points to one.
    #[error("apt knows no kernel behind {package} (apt-get update?)")]
    Kernel {
        /// The name.
        package: &'static str,
    },
    /// Something the image needs is nowhere on this machine.
    #[error("{name} is not on this machine, though its package is installed")]
    Absent {
        /// What.
        name: String,
    },
    /// Cargo built, but not this.
    #[error("cargo named no program for {target}")]
    NotBuilt {
        /// The target.
        target: &'static str,
    },
    /// A machine did not come up.
    #[error("machine {machine} did not come up within {} s\n{qemu}\n{console}", within.as_secs())]
    Boot {
        /// Which.
        machine: usize,
        /// How long it had.
        within: Duration,
        /// The last lines of its console.
        console: String,
        /// The last lines that QEMU wrote.
        qemu: String,
    },
    /// A machine is not there (any more).
    #[error("machine {machine} is gone")]
    Gone {
        /// Which.
        machine: usize,
    },
    /// The channel to a machine.
    #[error("channel to machine {machine}: {source}")]
    Channel {
        /// Which.
        machine: usize,
        /// Why.
        source: io::Error,
    },
    /// QEMU refused an order.
    #[error("QEMU of machine {machine} answers {order} with {answer}")]
    Monitor {
        /// Which.
        machine: usize,
        /// The order.
        order: &'static str,
        /// Its answer instead.
        answer: String,
    },
    /// A command had not ended, or not printed the expected text, in time.
    #[error("machine {machine}: not in time: {command}\n{output}")]
    Late {
        /// Where it ran.
        machine: usize,
        /// The command.
        command: String,
        /// The last lines it wrote.
        output: String,
    },
    /// A command failed.
    #[error("machine {machine}: status {status}: {command}\n{output}")]
    Command {
        /// Where it ran.
        machine: usize,
        /// The command.
        command: String,
        /// Its status.
        status: i32,
        /// The last lines it wrote.
        output: String,
    },
    /// A command had to fail and did not.
    #[error("machine {machine}: ended well though it had to fail: {command}")]
    Survived {
        /// Where it ran.
        machine: usize,
        /// The command.
        command: String,
    },
    /// A report of another run, or of a failure.
    #[error("sidelane {program}: not verified as asked: {seen}")]
    NotVerified {
        /// Its subcommand.
        program: &'static str,
        /// The reported value.
        seen: String,
    },
    /// Ranks ended without naming the lost rank.
    #[error("machine {machine}: not every rank names one of the lost node:\n{output}")]
    Unnamed {
        /// Where they ran.
        machine: usize,
        /// The last lines they wrote.
        output: String,
    },
    /// No traffic was in flight that could have been disturbed.
    #[error("machine {machine} has not sent {packets} packets in time")]
    Idle {
        /// Which.
        machine: usize,
        /// How many were waited for.
        packets: u64,
    },
    /// A program's output is not what its version used to write.
    #[error("{program}: cannot find {what} in its output:\n{output}")]
    Unreadable {
        /// The program.
        program: &'static str,
        /// The expected text.
        what: &'static str,
        /// The actual text.
        output: String,
    },
}

/// Gives an I/O error the file it is about.
pub trait At<T> {
    /// At this path.
    fn at(self, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File { path: path.into(), source })
    }
}
