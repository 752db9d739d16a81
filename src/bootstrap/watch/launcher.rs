//! Noticing that the launcher is gone.
//!
//! A launcher keeps the write end of a pipe, and its ranks inherit the read end. In every kind of
//! death, the kernel closes the write end, and each rank reads the end of the stream at once.
//!
//! The inherited number itself stays as it is: open, and not closed on exec. A change would have to
//! trust the number to be a descriptor without another owner. That is unsafe code, and this module
//! has none; the number is only a claim of the environment. So programs that a rank starts inherit
//! the read end, too. That is harmless: they hold no write end, so the stream still ends with the
//! launcher. A program that inherits the environment can watch the launcher just as its parent
//! does.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use rustix::{
    event::{PollFd, PollFlags},
    fs::OFlags,
    io::Errno,
};

use crate::{
    bootstrap::{identity::LauncherPipe, os::failed},
    error::BootstrapError,
};

/// The read end of the launcher's pipe.
#[derive(Debug)]
pub(in crate::bootstrap) struct LauncherWatch {
    pipe: File,
    pid: u32,
}

impl LauncherWatch {
    /// Opens the inherited end again, through `/proc`: the number alone is a claim of the
    /// environment, and this turns it into a descriptor of our own or an error.
    pub(in crate::bootstrap) fn open(pipe: LauncherPipe) -> Result<Self, BootstrapError> {
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
        let path = format!("/proc/self/fd/{}", pipe.fd);
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let pipe_end = file.map_err(|error| failed("open of SIDELANE_LAUNCHER_FD", &error))?;
        // Another kind of file may never end, or end at once.
        if !pipe_end.metadata().is_ok_and(|facts| facts.file_type().is_fifo()) {
            let (name, expected) = ("SIDELANE_LAUNCHER_FD", "a pipe to the launcher");
            return Err(BootstrapError::BadVariable { name, value: pipe.fd.to_string(), expected });
        }
        Ok(LauncherWatch { pipe: pipe_end, pid: pipe.pid })
    }

    pub(in crate::bootstrap) fn pid(&self) -> u32 {
        self.pid
    }

    pub(in crate::bootstrap) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.pipe, PollFlags::IN)
    }

    /// Whether the stream has ended. Bytes from the launcher are read and ignored.
    pub(in crate::bootstrap) fn is_gone(&self) -> bool {
        let mut buffer = [0; 64];
        loop {
            match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(0) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_end_of_the_pipe_is_the_end_of_the_launcher() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let launcher = LauncherWatch::open(LauncherPipe { fd: reader.as_raw_fd() as u32, pid: 7 }).unwrap();
        assert!(!launcher.is_gone());
        rustix::io::write(&writer, b"hello").unwrap();
        assert!(!launcher.is_gone(), "what it says does not matter");
        drop(writer);
        assert!(launcher.is_gone());
    }

    #[test]
    fn a_number_that_is_no_descriptor_is_an_error() {
        let seen = LauncherWatch::open(LauncherPipe { fd: 999_999, pid: 7 });
        assert!(matches!(seen, Err(BootstrapError::System { .. })), "{seen:?}");
    }
}
