//! The host's end of the channel to a machine: several jobs at once over one port.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::protocol::{Event, JobId, Request, Stream, send};
use crate::tool::tail;

/// Lines of a job's output that an error shows.
const SHOWN: usize = 15;

/// Everything said on a channel, with the seconds since the start of the run.
#[derive(Clone)]
pub struct Log {
    file: Arc<Mutex<File>>,
    start: Instant,
}

impl Log {
    /// Into this file.
    pub fn new(file: File, start: Instant) -> Self {
        Self { file: Arc::new(Mutex::new(file)), start }
    }

    /// The log is a help, not a duty: a full disk must not fail a test.
    fn note(&self, line: &str) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(file, "{:8.3} {line}", self.start.elapsed().as_secs_f64());
    }
}

/// Where the lines of each running job go. Empty and closed when the machine is gone.
type Inboxes = Arc<Mutex<Option<HashMap<JobId, Sender<Event>>>>>;

/// The host's end of the channel to a machine.
pub struct Channel {
    machine: usize,
    port: Arc<Mutex<UnixStream>>,
    inboxes: Inboxes,
    next: AtomicU64,
    log: Log,
}

impl Channel {
    /// Takes a connection to an agent, and waits for its greeting.
    pub fn open(machine: usize, port: UnixStream, log: Log, deadline: Deadline) -> Result<Self> {
        let failed = |source| Error::Channel { machine, source };
        let (greeting, greeted) = mpsc::channel();
        let inboxes: Inboxes = Arc::new(Mutex::new(Some(HashMap::new())));
        let reader = BufReader::new(port.try_clone().map_err(failed)?);
        let (to, notes) = (Arc::clone(&inboxes), log.clone());
        thread::spawn(move || {
            let end = deliver(reader, &greeting, &to, &notes);
            notes.note(&format!("-- channel closed: {end:?}"));
            *to.lock().unwrap_or_else(PoisonError::into_inner) = None;
        });
        let left = deadline.left().unwrap_or_default();
        greeted.recv_timeout(left).map_err(|_| Error::Gone { machine })?;
        Ok(Self { machine, port: Arc::new(Mutex::new(port)), inboxes, next: AtomicU64::new(1), log })
    }

    /// Starts a line of shell.
    pub fn start(&self, command: impl Into<String>) -> Result<Job> {
        let (command, job) = (command.into(), self.next.fetch_add(1, Ordering::Relaxed));
        let (to, events) = mpsc::channel();
        match &mut *self.inboxes.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(inboxes) => inboxes.insert(job, to),
            None => return Err(Error::Gone { machine: self.machine }),
        };
        self.log.note(&format!("{job} $ {command}"));
        let port = Arc::clone(&self.port);
        let job = Job { machine: self.machine, job, command, events, port, output: Vec::new(), status: None };
        job.say(&Request::Run { job: job.job, command: job.command.clone() })?;
        Ok(job)
    }
}

/// Gives every event to the job it is about, until the machine hangs up.
fn deliver(reader: impl BufRead, greeting: &Sender<()>, inboxes: &Inboxes, log: &Log) -> io::Result<()> {
    for line in reader.lines() {
        let event: Event = serde_json::from_str(&line?)?;
        let (job, last) = match &event {
            Event::Hello => {
                let _ = greeting.send(());
                continue;
            }
            Event::Line { job, text, .. } => {
                log.note(&format!("{job} | {text}"));
                (*job, false)
            }
            Event::Exit { job, status } => {
                log.note(&format!("{job} = {status}"));
                (*job, true)
            }
        };
        if let Some(inboxes) = &mut *inboxes.lock().unwrap_or_else(PoisonError::into_inner) {
            let inbox = if last { inboxes.remove(&job) } else { inboxes.get(&job).cloned() };
            // A job without a handle has been killed; its later output is only logged.
            let _ = inbox.map(|inbox| inbox.send(event));
        }
    }
    Ok(())
}

/// A command in a machine. Dropped before its end, it is killed.
pub struct Job {
    machine: usize,
    job: JobId,
    command: String,
    events: Receiver<Event>,
    port: Arc<Mutex<UnixStream>>,
    output: Vec<(Stream, String)>,
    status: Option<i32>,
}

/// How a command ended.
pub struct Finished {
    machine: usize,
    command: String,
    /// Its status, as a shell gives it.
    pub status: i32,
    /// Its standard output.
    pub stdout: String,
    /// Both outputs, in the order of arrival.
    pub output: String,
}

impl Job {
    fn say(&self, request: &Request) -> Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut *port, request).map_err(|source| Error::Channel { machine: self.machine, source })
    }

    /// Waits for its end, however it ends.
    pub fn finish(mut self, deadline: Deadline) -> Result<Finished> {
        loop {
            if let Some(status) = self.status {
                return Ok(self.finished(status));
            }
            let event = self.event(deadline)?;
            self.take(event);
        }
    }

    /// Waits until it has written so many lines in which these words are.
    pub fn says(&mut self, words: &str, times: usize, deadline: Deadline) -> Result<()> {
        while self.output.iter().filter(|(_, line)| line.contains(words)).count() < times {
            if let Some(status) = self.status {
                return Err(self.finished(status).failure());
            }
            let event = self.event(deadline)?;
            self.take(event);
        }
        Ok(())
    }

    /// An error if it has ended.
    pub fn still_runs(&mut self) -> Result<()> {
        while let Ok(event) = self.events.try_recv() {
            self.take(event);
        }
        self.status.map_or(Ok(()), |status| Err(self.finished(status).failure()))
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Exit { status, .. } => self.status = Some(status),
            Event::Line { stream, text, .. } => self.output.push((stream, text)),
            Event::Hello => {}
        }
    }

    fn finished(&self, status: i32) -> Finished {
        let text = |wanted: &dyn Fn(Stream) -> bool| {
            self.output.iter().filter(|(stream, _)| wanted(*stream)).fold(
                String::new(),
                |mut all, (_, line)| {
                    all += line;
                    all.push('\n');
                    all
                },
            )
        };
        Finished {
            machine: self.machine,
            command: self.command.clone(),
            status,
            stdout: text(&|stream| stream == Stream::Stdout),
            output: text(&|_| true),
        }
    }

    /// Waits for its good end.
    pub fn succeed(self, deadline: Deadline) -> Result<Finished> {
        let finished = self.finish(deadline)?;
        if finished.status == 0 { Ok(finished) } else { Err(finished.failure()) }
    }

    /// Waits for it to fail.
    pub fn fail(self, deadline: Deadline) -> Result<Finished> {
        let finished = self.finish(deadline)?;
        if finished.status != 0 {
            return Ok(finished);
        }
        Err(Error::Survived { machine: finished.machine, command: finished.command })
    }

    fn event(&mut self, deadline: Deadline) -> Result<Event> {
        let left = deadline.left().unwrap_or_default();
        self.events.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Disconnected => Error::Gone { machine: self.machine },
            RecvTimeoutError::Timeout => Error::Late {
                machine: self.machine,
                command: self.command.clone(),
                output: tail(
                    &self.output.iter().map(|(_, line)| line.as_str()).collect::<Vec<_>>().join("\n"),
                    SHOWN,
                ),
            },
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.status.is_none() {
            // A machine that is gone took its jobs along.
            let _ = self.say(&Request::Kill { job: self.job });
        }
    }
}

impl Finished {
    /// The error it is when it should have succeeded.
    pub fn failure(self) -> Error {
        let Self { machine, command, status, output, .. } = self;
        Error::Command { machine, command, status, output: tail(&output, SHOWN) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A channel to an agent that is played by the test.
    fn pair() -> (Channel, BufReader<UnixStream>, UnixStream) {
        let (host, guest) = UnixStream::pair().unwrap();
        send(&guest, &Event::Hello).unwrap();
        let log = Log::new(File::create("/dev/null").unwrap(), Instant::now());
        let channel = Channel::open(1, host, log, soon()).unwrap();
        (channel, BufReader::new(guest.try_clone().unwrap()), guest)
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    fn line(job: JobId, text: &str) -> Event {
        Event::Line { job, stream: Stream::Stdout, text: text.into() }
    }

    fn request(from: &mut impl BufRead) -> Request {
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn jobs_that_run_at_once_get_their_own_lines() {
        let (channel, _requests, guest) = pair();
        let (a, b) = (channel.start("a").unwrap(), channel.start("b").unwrap());
        for event in [line(b.job, "of b"), line(a.job, "of a"), Event::Exit { job: b.job, status: 3 }] {
            send(&guest, &event).unwrap();
        }
        send(&guest, &Event::Exit { job: a.job, status: 0 }).unwrap();
        assert_eq!(a.succeed(soon()).unwrap().stdout, "of a\n");
        let b = b.finish(soon()).unwrap();
        assert_eq!((b.status, b.stdout.as_str()), (3, "of b\n"));
    }

    #[test]
    fn a_job_that_is_late_says_what_it_wrote_and_is_killed() {
        let (channel, mut requests, guest) = pair();
        let job = channel.start("sleep 9").unwrap();
        send(&guest, &line(job.job, "nearly")).unwrap();
        let id = job.job;
        let error = job.finish(Deadline::after(Duration::from_millis(200))).map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Late { machine: 1, output, .. } if output == "nearly"), "{error}");
        assert!(matches!(request(&mut requests), Request::Run { job, .. } if job == id));
        assert!(matches!(request(&mut requests), Request::Kill { job } if job == id));
    }

    #[test]
    fn wait_for_words_ends_when_they_came_or_job_has_ended() {
        let (channel, _requests, guest) = pair();
        let mut job = channel.start("two").unwrap();
        for event in [line(job.job, "[0] here"), line(job.job, "noise"), line(job.job, "[1] here")] {
            send(&guest, &event).unwrap();
        }
        job.says("here", 2, soon()).unwrap();
        send(&guest, &Event::Exit { job: job.job, status: 0 }).unwrap();
        assert!(matches!(job.says("here", 3, soon()), Err(Error::Command { status: 0, .. })));
        assert_eq!(job.succeed(soon()).unwrap().stdout.lines().count(), 3);
    }

    #[test]
    fn a_job_that_ended_too_early_is_found_out() {
        let (channel, _requests, guest) = pair();
        let (mut early, mut other) = (channel.start("early").unwrap(), channel.start("other").unwrap());
        early.still_runs().unwrap();
        send(&guest, &line(early.job, "no such option")).unwrap();
        send(&guest, &Event::Exit { job: early.job, status: 2 }).unwrap();
        send(&guest, &Event::Exit { job: other.job, status: 0 }).unwrap();
        // Events come in order: once one job has its, the other has, too.
        let error = other.event(soon()).and_then(|_| early.still_runs()).unwrap_err();
        assert!(matches!(&error, Error::Command { status: 2, output, .. } if output == "no such option"));
    }

    #[test]
    fn a_machine_that_dies_ends_its_jobs_and_takes_no_new_ones() {
        let (channel, requests, guest) = pair();
        let job = channel.start("forever").unwrap();
        drop((requests, guest));
        let gone = |result: Result<()>| matches!(result, Err(Error::Gone { machine: 1 }));
        assert!(gone(job.finish(soon()).map(|_| ())));
        assert!(gone(channel.start("more").map(|_| ())));
    }

    #[test]
    fn success_and_failure_are_told_apart() {
        let (channel, _requests, guest) = pair();
        let (good, bad) = (channel.start("true").unwrap(), channel.start("false").unwrap());
        send(&guest, &Event::Exit { job: good.job, status: 0 }).unwrap();
        send(&guest, &Event::Exit { job: bad.job, status: 137 }).unwrap();
        assert!(matches!(good.fail(soon()), Err(Error::Survived { machine: 1, .. })));
        assert!(matches!(bad.succeed(soon()), Err(Error::Command { machine: 1, status: 137, .. })));
    }
}
