//! Inside a machine: the agent runs the host's commands and reports their progress.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::protocol::{Event, JobId, Request, Stream, send};

/// The first process of a machine.
pub const INIT: &str = include_str!("init.sh");

/// The way back to the host; jobs share it line by line.
#[derive(Clone)]
struct Host(Arc<Mutex<dyn Write + Send>>);

impl Host {
    fn tell(&self, event: &Event) -> io::Result<()> {
        send(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), event)
    }
}

/// Jobs that have not been waited for, with their process groups.
type Running = Arc<Mutex<HashMap<JobId, Pid>>>;

/// Serves the host until it hangs up.
pub fn agent(port: &Path) -> io::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(port)?;
    serve(port.try_clone()?, port)
}

/// Serves a host until it hangs up.
fn serve(requests: impl Read, answers: impl Write + Send + 'static) -> io::Result<()> {
    let host = Host(Arc::new(Mutex::new(answers)));
    let running = Running::default();

    host.tell(&Event::Hello)?;
    for line in BufReader::new(requests).lines() {
        match serde_json::from_str(&line?)? {
            Request::Run { job, command } => run(job, &command, &host, &running)?,
            Request::Kill { job } => kill(job, &running),
        }
    }
    Ok(())
}

/// Starts a job in a process group of its own, and a thread that sees it to its end.
fn run(job: JobId, command: &str, host: &Host, running: &Running) -> io::Result<()> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    running.lock().unwrap_or_else(PoisonError::into_inner).insert(job, Pid::from_child(&child));

    let readers = [
        child.stdout.take().map(|pipe| lines(job, Stream::Stdout, pipe, host.clone())),
        child.stderr.take().map(|pipe| lines(job, Stream::Stderr, pipe, host.clone())),
    ];
    let (host, running) = (host.clone(), Arc::clone(running));
    thread::spawn(move || see_out(job, child, readers.into_iter().flatten(), &host, &running));
    Ok(())
}

/// Forwards a job's output. When the host is gone there is no receiver, and the machine ends with
/// it.
fn lines(
    job: JobId,
    stream: Stream,
    pipe: impl Read + Send + 'static,
    host: Host,
) -> thread::JoinHandle<io::Result<()>> {
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n') {
            let text = String::from_utf8_lossy(&line?).into_owned();
            host.tell(&Event::Line { job, stream, text })?;
        }
        Ok(())
    })
}

/// Waits for a job, then for the last of its lines, then says that it has ended.
fn see_out(
    job: JobId,
    mut child: Child,
    readers: impl Iterator<Item = thread::JoinHandle<io::Result<()>>>,
    host: &Host,
    running: &Running,
) -> io::Result<()> {
    let status = child.wait()?;
    running.lock().unwrap_or_else(PoisonError::into_inner).remove(&job);
    for reader in readers {
        let _ = reader.join();
    }
    host.tell(&Event::Exit { job, status: as_in_a_shell(status) })
}

fn as_in_a_shell(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// A job that has just ended is no error: the host hears of its end anyway.
fn kill(job: JobId, running: &Running) {
    if let Some(&group) = running.lock().unwrap_or_else(PoisonError::into_inner).get(&job) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// An agent that serves the other end of a socket.
    struct Agent {
        host: UnixStream,
        events: io::Lines<BufReader<UnixStream>>,
    }

    impl Agent {
        fn new() -> Self {
            let (host, guest) = UnixStream::pair().unwrap();
            thread::spawn(move || serve(guest.try_clone().unwrap(), guest));
            let events = BufReader::new(host.try_clone().unwrap()).lines();
            let mut agent = Self { host, events };
            assert!(matches!(agent.event(), Event::Hello));
            agent
        }

        fn event(&mut self) -> Event {
            serde_json::from_str(&self.events.next().unwrap().unwrap()).unwrap()
        }

        fn run(&self, job: JobId, command: &str) {
            send(&self.host, &Request::Run { job, command: command.into() }).unwrap();
        }
    }

    #[test]
    fn all_lines_come_before_the_end_and_the_status_is_the_commands() {
        let mut agent = Agent::new();
        agent.run(5, "echo one; echo two >&2; printf three; exit 7");
        let mut lines = Vec::new();
        let status = loop {
            match agent.event() {
                Event::Line { job: 5, stream, text } => lines.push((stream, text)),
                Event::Exit { job: 5, status } => break status,
                other => panic!("{other:?}"),
            }
        };
        lines.sort_by_key(|(stream, _)| *stream == Stream::Stderr);
        let of = |stream, text: &str| (stream, text.to_owned());
        assert_eq!(
            lines,
            [of(Stream::Stdout, "one"), of(Stream::Stdout, "three"), of(Stream::Stderr, "two")]
        );
        assert_eq!(status, 7);
    }

    #[test]
    fn a_killed_job_takes_along_what_it_started_while_others_go_on() {
        let mut agent = Agent::new();
        agent.run(1, "sleep 1000 & echo started; wait");
        assert!(matches!(agent.event(), Event::Line { job: 1, .. }));
        agent.run(2, "echo here");
        assert!(matches!(agent.event(), Event::Line { job: 2, .. }));
        assert!(matches!(agent.event(), Event::Exit { job: 2, status: 0 }));
        send(&agent.host, &Request::Kill { job: 1 }).unwrap();
        // It ends only when the pipe does, which the sleeper holds as well.
        assert!(matches!(agent.event(), Event::Exit { job: 1, status: 137 }));
    }
}
