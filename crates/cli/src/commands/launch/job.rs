//! One job from start to end: all ranks succeed, or the first failure ends it.
//!
//! Ranks stay near their memory, each on processors of one NUMA node: memory lies where its first
//! writer runs. A rank that the kernel moves to another node reads and writes its heap, and its
//! local peers read it, through the link between them for the rest of the job.
//!
//! Ranks notice the death of their launcher by a pipe. Only the launcher holds the write end, and
//! it never writes. When the launcher ends, for any reason, the kernel closes the pipe and every
//! reader sees its end. So no rank needs to poll, and no signal can be lost.
//!
//! Signals become a queue of events, so that the launcher has one place where it waits. SIGHUP is
//! left alone: under `nohup` it stays ignored, and otherwise it ends the launcher, which the ranks
//! notice.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sidelane::memory::Numa;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::guard::Guard;
use super::{Part, Place, RendezvousVars, places};
use crate::command_frame::complain;
use crate::error::CliError;

/// Program to run, and how often.
pub struct Job {
    pub nodes: Vec<u32>,
    /// Part of it that this machine runs, if not all.
    pub part: Option<Part>,
    pub command: Vec<OsString>,
    /// Variables besides those that the launcher sets; they take precedence.
    pub env: Vec<(String, OsString)>,
    pub bind: Bind,
    /// How long the others may take to end after a failure or a signal.
    pub grace: Duration,
    /// Names the option that sets it, if the command has one.
    pub grace_option: &'static str,
    pub tag_output: bool,
}

impl Job {
    /// Stays until the last rank has ended. The status is 0 if all ranks exited with 0; otherwise
    /// as a shell would report the signal or the first failure.
    pub fn run(&self) -> Result<u8, CliError> {
        let inbox = Inbox::open().map_err(CliError::prepare("listen for signals"))?;
        // Both ends stay open as long as the job lives.
        let (read, _write) = lifeline().map_err(CliError::prepare("open a pipe to the ranks"))?;
        let (meeting, places) = self.meeting(read.as_raw_fd())?;
        let taggers = self.tag_output.then(Taggers::new);
        let _guard = Guard::start(self.grace)?;
        let ranks = Ranks::start(&places, &meeting, self, taggers.as_ref())?;
        let status = self.watch(ranks, &inbox);
        if let Some(taggers) = taggers {
            taggers.finish(self.grace);
        }
        Ok(status)
    }

    /// Where the ranks meet, and which of them this machine starts.
    fn meeting(&self, lifeline: RawFd) -> Result<(RendezvousVars, Vec<Place>), CliError> {
        let mut places = places(&self.nodes);
        let Some(part) = &self.part else { return Ok((RendezvousVars::here(lifeline)?, places)) };
        places.retain(|place| place.node == part.node);
        Ok((RendezvousVars::at(&part.master, &places, lifeline)?, places))
    }

    fn watch(&self, mut ranks: Ranks, inbox: &Inbox) -> u8 {
        // The status of the rank that failed first, and the signal that asked the job to end.
        let (mut failed, mut stopped, mut deadline) = (None, None, None);
        while ranks.running() > 0 {
            match inbox.next(deadline) {
                Event::Child => {
                    for end in ranks.ended().into_iter().filter(|end| !end.status.success()) {
                        complain(&format!("sidelane: {end}"));
                        failed.get_or_insert(end.code());
                    }
                }
                Event::Stop(signal) if stopped.is_none() => {
                    stopped = Some(signal);
                    ranks.signal(signal);
                }
                // The grace period is over, or the user stops the job a second time.
                Event::Stop(_) | Event::Elapsed => {
                    let killed: Vec<u32> = ranks.kill().iter().map(|place| place.rank).collect();
                    complain(&format!("sidelane: killed {}", list(&killed)));
                }
            }
            if (failed.is_some() || stopped.is_some()) && deadline.is_none() && ranks.running() > 0 {
                let (running, grace, option) = (ranks.running(), self.grace, self.grace_option);
                complain(&format!(
                    "sidelane: ranks still running: {running}, to be killed in {grace:?}{option}"
                ));
                deadline = Some(Instant::now() + self.grace);
            }
        }
        stopped.map_or(failed.unwrap_or(0), |signal| 128 + signal.as_raw() as u8)
    }
}

/// "rank 3", "ranks 0, 2 and 5".
fn list(ranks: &[u32]) -> String {
    let words: Vec<String> = ranks.iter().map(u32::to_string).collect();
    match words.split_last() {
        Some((last, others)) if !others.is_empty() => format!("ranks {} and {last}", others.join(", ")),
        _ => format!("rank {}", words.concat()),
    }
}

#[derive(Clone, Copy, Debug)]
pub struct End {
    pub place: Place,
    pub status: ExitStatus,
}

impl End {
    /// Status that a shell would report: the exit status, or 128 and the signal.
    pub fn code(&self) -> u8 {
        let code = self.status.code().or(self.status.signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (node {}) ", self.place.rank, self.place.node)?;
        match self.status.signal().map(|number| (number, signal_hook::low_level::signal_name(number))) {
            Some((_, Some(name))) => write!(f, "was ended by {name}"),
            Some((number, None)) => write!(f, "was ended by signal {number}"),
            None => write!(f, "exited with status {}", self.status.code().unwrap_or(1)),
        }
    }
}

/// Ranks that were started. Those still alive when this is dropped are killed.
///
/// Each rank leads a process group of its own: its children are signaled with it, and Ctrl-C at a
/// terminal reaches a rank once, through the launcher.
pub struct Ranks {
    running: Vec<(Place, Child)>,
}

impl Ranks {
    pub fn start(
        places: &[Place],
        meeting: &RendezvousVars,
        Job { command, env, bind, .. }: &Job,
        taggers: Option<&Taggers>,
    ) -> Result<Self, CliError> {
        let mut ranks = Ranks { running: Vec::with_capacity(places.len()) };
        let (binder, here) = (bind.binder(), places.len() as u32);
        for (nth, &place) in (0..).zip(places) {
            let mut rank = Command::new(&command[0]);
            rank.args(&command[1..])
                .envs(meeting.variables(place))
                .envs(env.iter().map(|(name, value)| (name, value)))
                .stdin(Stdio::null())
                .stdout(if taggers.is_some() { Stdio::piped() } else { Stdio::inherit() })
                .stderr(if taggers.is_some() { Stdio::piped() } else { Stdio::inherit() })
                .process_group(0);
            let spawned = match &binder {
                Some(binder) => binder.start(nth, here, || rank.spawn()),
                None => rank.spawn(),
            };
            let mut child = spawned.map_err(|source| {
                let program = command[0].clone();
                CliError::Spawn { rank: place.rank, program, source }
            })?;
            if let Some(taggers) = taggers {
                taggers.follow(place.rank, &mut child);
            }
            ranks.running.push((place, child));
        }
        Ok(ranks)
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn ended(&mut self) -> Vec<End> {
        let mut ended = Vec::new();
        self.running.retain_mut(|(place, child)| match child.try_wait() {
            Ok(Some(status)) => {
                ended.push(End { place: *place, status });
                false
            }
            // An error would mean that another reaper took our child; there is none.
            _ => true,
        });
        ended
    }

    /// Sends a signal to each running rank and to its children.
    pub fn signal(&self, signal: Signal) {
        for (_, child) in &self.running {
            // Not yet reaped, so the number is still that of our child. A group that has ended is
            // no error.
            if let Some(leader) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(leader, signal);
            }
        }
    }

    /// Kills the running ranks and waits for them. Returns these ranks.
    pub fn kill(&mut self) -> Vec<Place> {
        self.signal(Signal::KILL);
        self.running
            .drain(..)
            .map(|(place, mut child)| {
                // Fails only for a child that was reaped already.
                let _ = child.wait();
                place
            })
            .collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Bind {
    /// Those of one NUMA node, in blocks of ranks; of several where there are more nodes than ranks
    #[default]
    Numa,
    /// All that this program may use
    None,
}

/// Available processors, for ranks that are started one after another.
struct Binder {
    numa: Numa,
    allowed: CpuSet,
}

impl Bind {
    /// `None` where there is no choice.
    fn binder(self) -> Option<Binder> {
        match self {
            Bind::Numa => Some(Binder { numa: Numa::here(), allowed: sched_getaffinity(None).ok()? }),
            Bind::None => None,
        }
    }
}

impl Binder {
    /// Starts the `nth` of `ranks` on its share: a process inherits the processors of the thread
    /// that starts it. Where the kernel refuses, it runs anywhere.
    pub fn start<T>(&self, nth: u32, ranks: u32, start: impl FnOnce() -> T) -> T {
        let allowed = |cpu: u32| (cpu as usize) < CpuSet::MAX_CPU && self.allowed.is_set(cpu as usize);
        let Some(share) = self.numa.share(allowed, nth, ranks) else { return start() };
        let mut set = CpuSet::new();
        share.iter().for_each(|&cpu| set.set(cpu as usize));
        let _ = sched_setaffinity(None, &set);
        let started = start();
        let _ = sched_setaffinity(None, &self.allowed);
        started
    }
}

/// A pipe: a read end that children inherit by its number, a write end that they do not.
fn lifeline() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::fcntl_setfd(read.as_fd(), FdFlags::empty())?;
    Ok((read, write))
}

pub enum Event {
    /// A child may have ended.
    Child,
    /// A signal asks the job to end.
    Stop(Signal),
    Elapsed,
}

/// The queue. Signals that come before [`Inbox::next`] is called wait in it.
struct Inbox {
    events: Receiver<Event>,
    handle: Handle,
}

impl Inbox {
    pub fn open() -> io::Result<Self> {
        let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM])?;
        let handle = signals.handle();
        let (sender, events) = channel();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for number in signals.forever() {
                let event = match number {
                    SIGCHLD => Event::Child,
                    SIGINT => Event::Stop(Signal::INT),
                    _ => Event::Stop(Signal::TERM),
                };
                if sender.send(event).is_err() {
                    break;
                }
            }
        })?;
        Ok(Inbox { events, handle })
    }

    /// The next event; without a deadline it waits for ever.
    pub fn next(&self, deadline: Option<Instant>) -> Event {
        let event = match deadline {
            Some(at) => self.events.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        event.unwrap_or(Event::Elapsed)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.handle.close();
    }
}

pub struct Taggers {
    running: Sender<()>,
    ended: Receiver<()>,
}

impl Taggers {
    pub fn new() -> Self {
        let (running, ended) = channel();
        Taggers { running, ended }
    }

    /// Copies both outputs of a child that was spawned with pipes.
    fn follow(&self, rank: u32, child: &mut Child) {
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

    /// Waits until all output of the ranks is copied. A process that a rank left behind may keep
    /// its output open: the wait ends after `patience`.
    pub fn finish(self, patience: Duration) {
        drop(self.running);
        let deadline = Instant::now() + patience;
        while self.ended.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok() {}
    }
}

/// Copies whole lines, tagged; a last line without its newline gets one.
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
    fn ranks_are_listed_as_a_reader_would_say_them() {
        assert_eq!(list(&[3]), "rank 3");
        assert_eq!(list(&[0, 2, 5]), "ranks 0, 2 and 5");
    }

    fn processors() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
    }

    /// A machine whose nodes have one processor each, of those that this test may use.
    fn binder() -> Binder {
        let dir = std::env::temp_dir().join(format!("sidelane-bind-{}", std::process::id()));
        for (node, cpu) in processors().iter().enumerate() {
            std::fs::create_dir_all(dir.join(format!("node{node}"))).unwrap();
            std::fs::write(dir.join(format!("node{node}/cpulist")), format!("{cpu}\n")).unwrap();
        }
        let binder = Binder { numa: Numa::below(&dir), ..Bind::Numa.binder().unwrap() };
        std::fs::remove_dir_all(dir).unwrap();
        binder
    }

    #[test]
    fn started_rank_gets_its_cpus_and_launcher_keeps_all() {
        let (binder, all) = (binder(), processors());
        let ranks = all.len() as u32;
        for (nth, &cpu) in (0..).zip(&all) {
            assert_eq!(binder.start(nth, ranks, processors), [cpu]);
            assert_eq!(processors(), all);
        }
        assert_eq!(binder.start(0, 1, processors), all);
        assert!(Bind::None.binder().is_none());
    }

    #[test]
    fn each_line_is_tagged_and_the_last_one_is_closed() {
        let mut seen = Vec::new();
        copy_lines(3, &b"one\n\n\xfftwo"[..], |line| seen.push(line.to_vec()));
        assert_eq!(seen, [&b"[3] one\n"[..], b"[3] \n", b"[3] \xfftwo\n"]);
    }
}
