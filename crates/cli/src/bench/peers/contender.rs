//! A peer that runs: its processes, and a socket to each.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::folder::Folder;
use super::way::{Programs, Way};
use crate::bench::passes::Kind;
use crate::error::{CliError, failed};

/// The longest time in which all processes of a peer come: interpreters that load much, more of them than cores.
const ARRIVAL: Duration = Duration::from_secs(180);
/// The longest time of a call.
const CALL: Duration = Duration::from_secs(60);
/// The longest time for processes to end once they were told.
const PARTING: Duration = Duration::from_secs(10);
/// Between two looks at processes that have not come or not gone.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// All processes of one peer.
pub struct Contender {
    pub way: Way,
    /// What it says that it is.
    pub version: String,
    children: Vec<Child>,
    listener: UnixListener,
    socket: PathBuf,
    log: PathBuf,
    since: Instant,
    /// By rank.
    lines: Vec<Option<UnixStream>>,
    /// Length of every round of dispatch, and of combine, in microseconds.
    pub rounds_us: [Vec<f64>; 2],
}

impl Contender {
    /// Starts the processes. They come later.
    pub fn start(way: Way, programs: &Programs, folder: &Folder, ranks: u32) -> Result<Self, CliError> {
        let (socket, log) = (folder.path().join("socket"), folder.path().join(way.log(folder)));
        let failed = |source| failed!("cannot listen at {path:?}: {source}", path = socket.clone());
        let listener = UnixListener::bind(&socket).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let mut contender = Contender {
            way,
            version: String::new(),
            children: Vec::new(),
            listener,
            socket: socket.clone(),
            log,
            since: Instant::now(),
            lines: (0..ranks).map(|_| None).collect(),
            rounds_us: Default::default(),
        };
        way.spawn(programs, folder, ranks, &mut contender.children)?;
        Ok(contender)
    }

    /// Waits a moment; whether all have come.
    ///
    /// # Errors
    /// One that has ended, with its last words; one that is late.
    pub fn come(&mut self, moment: Duration) -> Result<bool, CliError> {
        let until = Instant::now() + moment;
        loop {
            let came = self.lines.iter().flatten().count();
            if came == self.lines.len() {
                // The next peer is met at the same place.
                let _ = std::fs::remove_file(&self.socket);
                return Ok(true);
            }
            match self.listener.accept() {
                Ok((line, _)) => {
                    self.greet(line).map_err(|source| self.answer(came, source))?;
                    continue;
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(self.answer(came, error));
                }
                Err(_) => {}
            }
            let ended = self.children.iter_mut().find_map(|child| child.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(failed!(
                    "{program} ended with {status}: {last}",
                    program = self.program(),
                    last = self.way.complaint(&self.log)
                ));
            }
            if self.since.elapsed() >= ARRIVAL {
                let (ranks, seconds) = (self.lines.len(), ARRIVAL.as_secs());
                return Err(failed!(
                    "{came} of {ranks} processes of {program} have come after {seconds} s",
                    program = self.program()
                ));
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            let mut waiting = [PollFd::new(&self.listener, PollFlags::IN)];
            // Cut short or not, it is looked again.
            let _ = poll(&mut waiting, Some(&LOOK));
        }
    }

    fn greet(&mut self, mut line: UnixStream) -> io::Result<()> {
        const MOST: u32 = 1 << 10;
        line.set_nonblocking(false)?;
        line.set_read_timeout(Some(CALL))?;
        let mut word = [0; 4];
        let mut read = |line: &mut UnixStream| line.read_exact(&mut word).map(|()| u32::from_ne_bytes(word));
        let (rank, length) = (read(&mut line)?, read(&mut line)?);
        let mut version = vec![0; length.min(MOST) as usize];
        line.read_exact(&mut version)?;
        let place = self.lines.get_mut(rank as usize).filter(|place| place.is_none());
        *place.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))? = Some(line);
        self.version = String::from_utf8_lossy(&version).into_owned();
        Ok(())
    }

    /// One call of each kind, and the files that tell what came out.
    pub fn write(&mut self) -> Result<(), CliError> {
        b"dcw".iter().try_for_each(|&command| self.call(command).map(drop))
    }

    /// A round: run twice and timed the second time, as ours are.
    pub fn lap(&mut self, kind: Kind) -> Result<(), CliError> {
        let (nth, command) = match kind {
            Kind::Dispatch => (0, b'd'),
            Kind::Combine => (1, b'c'),
            Kind::DispatchBackward | Kind::CombineBackward => return Ok(()),
        };
        self.call(command)?;
        let us = self.call(command)?;
        self.rounds_us[nth].push(us);
        Ok(())
    }

    /// From the first one's begin to the last one's end, in microseconds.
    pub fn call(&mut self, command: u8) -> Result<f64, CliError> {
        for rank in 0..self.lines.len() {
            self.say(rank, command).map_err(|source| self.answer(rank, source))?;
        }
        let mut span = [u64::MAX, 0];
        for rank in 0..self.lines.len() {
            let [begin, end] = self.hear(rank).map_err(|source| self.answer(rank, source))?;
            span = [span[0].min(begin), span[1].max(end)];
        }
        Ok(span[1].saturating_sub(span[0]) as f64 / 1e3)
    }

    fn say(&mut self, rank: usize, command: u8) -> io::Result<()> {
        self.line(rank)?.write_all(&[command])
    }

    fn hear(&mut self, rank: usize) -> io::Result<[u64; 2]> {
        let mut lap = [0; 16];
        self.line(rank)?.read_exact(&mut lap)?;
        Ok(bytemuck::cast(lap))
    }

    fn line(&mut self, rank: usize) -> io::Result<&mut UnixStream> {
        self.lines[rank].as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn answer(&self, rank: usize, source: io::Error) -> CliError {
        failed!(
            "process {rank} of {program} does not answer as it should: {source}; its last words: {last}",
            program = self.program(),
            last = self.way.complaint(&self.log)
        )
    }

    fn program(&self) -> String {
        self.way.name().to_owned()
    }
}

impl Drop for Contender {
    /// They end as their sockets do; who does not is ended.
    fn drop(&mut self) {
        self.lines.clear();
        let until = Instant::now() + PARTING;
        for child in &mut self.children {
            while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
                let _ = poll(&mut [], Some(&LOOK));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}
