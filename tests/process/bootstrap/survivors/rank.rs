//! A rank of a world of processes that rebuilds until it is ended: the child's side.
//!
//! ```text
//!   prints   joined                                then, for each world of survivors
//!            world EPOCH FIRST,FIRST,..            its members by their ranks in the first world
//!            error TEXT                            a rebuild failed, and another follows
//!            evicted                               the others went on without this rank
//!   reads    broken RANK                           reports that its connection to a rank broke
//! ```

use std::io::stdin;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use sidelane::bootstrap::{Hub, Identity, Secret, Timeouts, connect};
use sidelane::error::{BootstrapError, Cause};
use tracing::{Event, Metadata, Subscriber, span};

use crate::bootstrap::common::LONG;

/// The variable that makes this program a rank; its value is read by [`Part::parse`].
pub const PART: &str = "SIDELANE_TEST_SURVIVOR";

/// A fault that a rank does itself: a signal at an event of its rebuild.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    pub stops: bool,
    /// The signal comes with this event of the library, counted from the first loss.
    pub event: u32,
}

/// What a rank of a test is and does.
#[derive(Clone, Debug)]
pub struct Part {
    pub rank: u32,
    pub size: u32,
    pub job: String,
    pub master: String,
    pub port: u16,
    pub at_least: u32,
    pub fault: Option<Fault>,
}

impl Part {
    pub fn text(&self) -> String {
        let Part { rank, size, job, master, port, at_least, fault } = self;
        let fault = fault.map_or("none 0".to_owned(), |fault| {
            format!("{} {}", if fault.stops { "stop" } else { "kill" }, fault.event)
        });
        format!("{rank} {size} {master} {port} {at_least} {fault} {job}")
    }

    fn parse(text: &str) -> Option<Part> {
        let mut words = text.splitn(8, ' ');
        let mut next = || words.next();
        let (rank, size) = (next()?.parse().ok()?, next()?.parse().ok()?);
        let (master, port) = (next()?.to_owned(), next()?.parse().ok()?);
        let at_least = next()?.parse().ok()?;
        let (signal, event) = (next()?, next()?.parse().ok()?);
        let fault = (signal != "none").then_some(Fault { stops: signal == "stop", event });
        Some(Part { rank, size, job: next()?.to_owned(), master, port, at_least, fault })
    }

    fn identity(&self) -> Identity {
        let local = self.master == "127.0.0.1";
        Identity::new(self.rank, self.size)
            .with_local_rank(Some(if local { self.rank } else { 0 }))
            .with_local_size(Some(if local { self.size } else { 1 }))
            .with_job(self.job.clone())
            .with_master_addr(self.master.clone())
            .with_ports(vec![self.port])
    }
}

/// Counts the library's events and does the fault at its event.
struct Events {
    fault: Fault,
}

/// Events since the first loss; none are counted before.
static SEEN: AtomicU32 = AtomicU32::new(0);
static ARMED: AtomicU32 = AtomicU32::new(0);

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("sidelane::bootstrap")
    }

    fn event(&self, _: &Event<'_>) {
        if ARMED.load(Relaxed) == 1 && SEEN.fetch_add(1, Relaxed) + 1 == self.fault.event {
            let signal = if self.fault.stops { Signal::STOP } else { Signal::KILL };
            kill_process(getpid(), signal).expect("a process may signal itself");
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Serves as a rank until the test ends this process. Without a test it does nothing.
pub fn serve() {
    let Ok(text) = std::env::var(PART) else { return };
    let part = Part::parse(&text).expect("a part");
    if let Some(fault) = part.fault {
        tracing::subscriber::set_global_default(Events { fault }).expect("the only subscriber");
    }
    let timeouts = Timeouts::default().with_rendezvous(LONG);
    let secret = Secret::from_env().expect("a secret of the test");
    let mut hub = connect(&part.identity(), secret, timeouts).expect("the first world");
    let mut firsts: Vec<u32> = (0..part.size).collect();
    hub.barrier("start", hub.rank(), hub.size(), LONG).expect("all ranks");
    println!("joined");
    let (tell, broken) = channel();
    thread::spawn(move || {
        for line in stdin().lines().map_while(Result::ok) {
            let rank = line.strip_prefix("broken ").expect("an order");
            tell.send(rank.parse().expect("a rank")).expect("this rank listens");
        }
    });
    loop {
        if matches!(end(&*hub, &broken), Cause::Evicted { .. }) {
            return println!("evicted");
        }
        ARMED.store(1, Relaxed);
        match next(&*hub, &firsts, part.at_least) {
            Ok((next, members)) => (hub, firsts) = (next, members),
            Err(BootstrapError::World(Cause::Evicted { .. })) => return println!("evicted"),
            Err(error) => println!("error {error}"),
        }
    }
}

/// Waits for the end of a world. A connection that breaks is this rank's to report.
fn end(hub: &dyn Hub, broken: &Receiver<u32>) -> Cause {
    loop {
        if let Some(cause) = hub.health().cause() {
            return cause;
        }
        if let Ok(rank) = broken.recv_timeout(Duration::from_millis(5)) {
            hub.cancel(Cause::Connection { rank, by: hub.rank() });
        }
    }
}

/// The next world, whose members have all used it once. A rank that fails to build one goes back to
/// the world that it has.
fn next(hub: &dyn Hub, firsts: &[u32], at_least: u32) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
    let (next, old) = hub.rebuild(LONG, at_least)?;
    let members: Vec<u32> = old.iter().map(|&rank| firsts[rank as usize]).collect();
    let labels: Vec<u8> = members.iter().map(|&rank| rank as u8).collect();
    let own = [labels[next.rank() as usize]];
    let blobs = next.gather("again", next.rank(), next.size(), &own, LONG)?;
    assert_eq!(blobs.concat(), labels, "the members agree on their order");
    let members_text: Vec<String> = members.iter().map(u32::to_string).collect();
    println!("world {} {}", next.epoch(), members_text.join(","));
    Ok((next, members))
}
