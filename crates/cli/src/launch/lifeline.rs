//! The pipe by which ranks notice the death of their launcher.
//!
//! Only the launcher holds the write end, and nobody ever writes: when the launcher ends, however it ends, the
//! kernel closes the pipe and every reader sees its end. Nothing has to be polled and no signal can be lost.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};

/// Both ends, as long as the job lives.
pub struct Lifeline {
    read: OwnedFd,
    _write: OwnedFd,
}

impl Lifeline {
    /// A read end that children inherit, a write end that they do not.
    pub fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::fcntl_setfd(read.as_fd(), FdFlags::empty())?;
        Ok(Lifeline { read, _write: write })
    }

    /// The number of the read end, the same in every child.
    pub fn number(&self) -> RawFd {
        self.read.as_raw_fd()
    }
}
