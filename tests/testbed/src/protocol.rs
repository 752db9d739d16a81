//! What host and guest say to each other: one JSON value a line, over a virtio serial port.
//!
//! ```text
//!   host   -- run 7 "ibv_devinfo" ------------>  agent      several jobs may run at once
//!          <- line 7 stdout "hca_id: rxe0" ---
//!          <- exit 7 0 -----------------------
//! ```

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// Names one command for as long as a machine runs.
pub type JobId = u64;

/// From the host to the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Run a line of shell.
    Run {
        /// Names the job in everything said about it.
        job: JobId,
        /// For `sh -c`.
        command: String,
    },
    /// End a job and all it started.
    Kill {
        /// The job.
        job: JobId,
    },
}

/// From the agent to the host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The machine is up, and its NICs exist.
    Hello,
    /// A job wrote a line.
    Line {
        /// The job.
        job: JobId,
        /// Where it wrote to.
        stream: Stream,
        /// Without its end of line.
        text: String,
    },
    /// A job has ended; nothing more is said about it.
    Exit {
        /// The job.
        job: JobId,
        /// As a shell gives it: 128 + number for a signal.
        status: i32,
    },
}

/// Where a line was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Writes one message as one line, in one write.
pub fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}
