//! Signals as a queue of events, so that the launcher has one place where it waits.
//!
//! SIGHUP is left alone: under `nohup` it stays ignored, and otherwise it ends the launcher, which the ranks notice.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// What the launcher waits for.
pub enum Event {
    /// A child may have ended.
    Child,
    /// Somebody wants the job to end.
    Stop(Signal),
    /// Neither came in time.
    Elapsed,
}

/// The queue. Signals that come before [`Inbox::next`] is called wait in it.
pub struct Inbox {
    events: Receiver<Event>,
    handle: Handle,
}

impl Inbox {
    /// From now on signals become events.
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
