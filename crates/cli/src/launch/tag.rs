//! Output of many ranks on one screen, each line with the rank that wrote it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The threads that copy lines.
pub struct Taggers {
    running: Sender<()>,
    ended: Receiver<()>,
}

impl Taggers {
    /// None yet.
    pub fn new() -> Self {
        let (running, ended) = channel();
        Taggers { running, ended }
    }

    /// Copies both outputs of a child that was spawned with pipes.
    pub fn follow(&self, rank: u32, child: &mut Child) {
        if let Some(out) = child.stdout.take() {
            self.copy(rank, out, io::stdout());
        }
        if let Some(err) = child.stderr.take() {
            self.copy(rank, err, io::stderr());
        }
    }

    fn copy(&self, rank: u32, from: impl Read + Send + 'static, to: impl Write + Send + 'static) {
        let running = self.running.clone();
        std::thread::spawn(move || {
            // The screen may be gone; the ranks still have to be read, or they would block.
            let mut to = Some(to);
            copy_lines(rank, BufReader::new(from), |line| {
                if to.as_mut().is_some_and(|to| to.write_all(line).and_then(|()| to.flush()).is_err()) {
                    to = None;
                }
            });
            drop(running);
        });
    }

    /// Waits until all that the ranks wrote is copied. A process that a rank left behind may keep its output open:
    /// it is not waited for longer than `patience`.
    pub fn finish(self, patience: Duration) {
        drop(self.running);
        let deadline = Instant::now() + patience;
        while self.ended.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok() {}
    }
}

/// Hands on whole lines, tagged; a last line without its newline gets one.
fn copy_lines(rank: u32, mut from: impl BufRead, mut emit: impl FnMut(&[u8])) {
    let tag = format!("[{rank}] ").into_bytes();
    let mut line = tag.clone();
    while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        emit(&line);
        line.truncate(tag.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_tagged_and_the_last_one_is_closed() {
        let mut seen = Vec::new();
        copy_lines(3, &b"one\n\n\xfftwo"[..], |line| seen.push(line.to_vec()));
        assert_eq!(seen, [&b"[3] one\n"[..], b"[3] \n", b"[3] \xfftwo\n"]);
    }
}
