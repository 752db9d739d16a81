//! The planner's process: it is given two descriptors over a socket, and serves until the socket ends.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use sidelane::device::{Allocation, Driver};
use sidelane::memory::SharedPinned;

use super::super::parts::spawn;
use super::super::task::{Part, Task};
use super::serve::Planner;
use crate::error::{CliError, failed};

/// What comes with the descriptors: bytes of the device's memory, and bells that were served.
const WORDS: usize = 12;

/// The process, seen by who asked for it.
pub struct Helper {
    process: Child,
    socket: UnixStream,
}

impl Helper {
    /// Starts one, and waits until it listens.
    pub fn start(
        task: &Task,
        rows: &Allocation,
        shared: &SharedPinned,
        served: u32,
    ) -> Result<Self, CliError> {
        let task = Task { part: Part::Helper, ..*task };
        let (socket, its) = UnixStream::pair().map_err(CliError::prepare("make a socket"))?;
        // Its other end is in the process alone.
        let process = spawn(&task, |command| {
            command.stdin(OwnedFd::from(its)).stdout(Stdio::null());
        })?;
        let mut helper = Helper { process, socket };
        let descriptor = rows.export()?;
        let mut words = [0; WORDS];
        words[..8].copy_from_slice(&rows.bytes().to_le_bytes());
        words[8..].copy_from_slice(&served.to_le_bytes());
        send(&helper.socket, &words, &[descriptor.as_fd(), shared.as_fd()])?;
        helper.socket.set_read_timeout(Some(task.patience())).map_err(CliError::prepare("bound a wait"))?;
        match helper.socket.read(&mut [0]) {
            Ok(1) => Ok(helper),
            _ => {
                let _ = helper.process.kill();
                Err(helper.end().err().unwrap_or_else(|| failed!("the helper said nothing")))
            }
        }
    }

    /// Has it end, and says how it did.
    pub fn end(mut self) -> Result<(), CliError> {
        drop(self.socket);
        let ended = self.process.wait().map_err(CliError::prepare("wait for the helper"))?;
        if ended.success() { Ok(()) } else { Err(failed!("the helper process: {ended}")) }
    }
}

/// The process itself. Its socket is its standard input.
pub fn main(task: &Task) -> Result<(), CliError> {
    let input =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(CliError::prepare("keep the socket"))?;
    let mut socket = UnixStream::from(input);
    let mut words = [0; WORDS];
    let [rows, shared] = receive(&socket, &mut words)?;
    let [bytes, served] = [&words[..8], &words[8..]];
    let context = Driver::open()?.context(task.device)?;
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let rows = Allocation::import(&context, rows.as_fd(), number(bytes))?;
    let shared = SharedPinned::adopt(&context, shared)?;
    let mut planner = Planner::new(&context, &rows, shared.memory(), number(served) as u32)?;
    socket.write_all(&[1]).map_err(CliError::prepare("answer"))?;
    socket.set_nonblocking(true).map_err(CliError::prepare("look at the socket"))?;
    // Nothing is ever sent: the socket ends.
    Ok(planner.serve(|| matches!(socket.read(&mut [0]), Ok(0)))?)
}

fn send(socket: &UnixStream, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), CliError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(descriptors));
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(words)], &mut control, SendFlags::NOSIGNAL);
    sent.map(drop).map_err(|errno| CliError::prepare("hand over memory")(errno.into()))
}

fn receive(socket: &UnixStream, words: &mut [u8]) -> Result<[OwnedFd; 2], CliError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(words)], &mut control, flags)
        .map_err(|errno| CliError::prepare("take memory over")(errno.into()))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    <[OwnedFd; 2]>::try_from(descriptors)
        .map_err(|seen| failed!("the helper was given {} descriptors, not 2", seen.len()))
}
