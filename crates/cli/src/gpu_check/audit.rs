//! The audit: does anything between packed and landed need a multiprocessor?
//!
//! ```text
//!   hold   |== every multiprocessor: one block each, all shared memory ==============|  until the host's word
//!   ranks         copies, flags, waits of an exchange       must end in here ---------^
//!   controls      the smallest kernel; a plain copy on the GPU    must not end in here
//! ```
//!
//! Everything is allocated before the hold and freed behind it, since calls that wait for the context would wait for the hold.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{AuditKernels, Context, Driver, Hold, PinnedMemory, Stream};

use super::check::{About, Checks};
use super::dispatch::{self, Dispatch, Peers, RANKS};
use super::driver::stream;
use super::memory::{device, equal, finish, until, whole};
use super::row::State;
use super::task::Task;
use crate::error::CliError;

/// Bytes of a slot: one of a small batch, and one that is hardly more than its flags.
const SLOTS: [(u64, &str); 2] = [(921_600, "0.9 MB"), (16 << 10, "16 KiB")];

/// A control that has not ended in so long needed what is held.
const CONTROL: Duration = Duration::from_millis(500);

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let audit = Audit::new(task, &context)?;
    let mut controls = true;
    let about = About {
        what: "control: a kernel of one block",
        shows: "no multiprocessor has room for anything: it must not run while they are held",
        open: None,
    };
    controls &= audit
        .control(checks, about, |stream| Ok(audit.kernels.touch(stream, audit.word.range().word(0)?)?))?;
    let (from, to) = (device(&context, 1 << 20)?, device(&context, 1 << 20)?);
    let about = About {
        what: "control: plain copy on the GPU",
        shows: "SMs do these, and so it must not end while they are held: the audit sees what it looks for",
        open: None,
    };
    controls &= audit.control(checks, about, |stream| Ok(stream.copy(whole(&to)?, whole(&from)?)?))?;
    for peers in Peers::ALL {
        for (bytes, size) in SLOTS {
            let (shows, open) = words(peers);
            let what = format!("{RANKS} ranks, {size} to {}", peers.place());
            audit.exchange(checks, controls, About { what: &what, shows, open: Some(open) }, peers, bytes)?;
        }
    }
    Ok(())
}

fn words(peers: Peers) -> (&'static str, &'static str) {
    match peers {
        Peers::Host => (
            "copies, signals and waits of an exchange end while every multiprocessor is held",
            "that NVLink's engines do as PCIe's do",
        ),
        Peers::SameGpu => (
            "as above: the wish for overlap is heeded, and an engine moves what SMs could",
            "peers at other GPUs need no such wish, and a graph may hold their copies",
        ),
    }
}

/// What every run of it uses.
struct Audit<'a> {
    task: &'a Task,
    context: &'a Arc<Context>,
    kernels: AuditKernels,
    hold: Hold,
    word: PinnedMemory,
    holder: Stream,
    control: Stream,
    /// One of each rank.
    ranks: Vec<Stream>,
}

impl<'a> Audit<'a> {
    fn new(task: &'a Task, context: &'a Arc<Context>) -> Result<Self, CliError> {
        let kernels = AuditKernels::load(context)?;
        Ok(Audit {
            task,
            context,
            hold: kernels.hold()?,
            kernels,
            word: PinnedMemory::new(context, 8)?,
            holder: stream(context)?,
            control: stream(context)?,
            ranks: dispatch::streams(context)?,
        })
    }

    /// Has `work` done while every multiprocessor is held. Whatever comes of it, the hold ends.
    fn held<T>(&self, work: impl FnOnce() -> Result<T, CliError>) -> Result<T, CliError> {
        self.hold.take(&self.holder)?;
        let all = u64::from(self.hold.blocks());
        let running = until("blocks of the hold", self.task.patience(), || Ok(self.all_run()));
        let worked = running.and_then(|()| work());
        let still = self.holder.is_done();
        self.hold.release();
        let ended = finish(&self.holder, "the hold", self.task.patience());
        let worked = worked?;
        ended?;
        equal("multiprocessors that were held to the end", if still? { 0 } else { all }, all)?;
        Ok(worked)
    }

    fn all_run(&self) -> bool {
        self.hold.running() == self.hold.blocks()
    }

    /// Work that must not end while it is held, and must when it no longer is. Gives whether that held.
    fn control(
        &self,
        checks: &mut Checks,
        about: About<'_>,
        enqueue: impl FnOnce(&Stream) -> Result<(), CliError>,
    ) -> Result<bool, CliError> {
        let ended = self.held(|| {
            enqueue(&self.control)?;
            let start = Instant::now();
            while start.elapsed() < CONTROL {
                if self.control.is_done()? {
                    return Ok(Some(start.elapsed()));
                }
                std::thread::yield_now();
            }
            Ok(None)
        });
        let ended = ended.and_then(|ended| {
            finish(&self.control, "a control that was let go", self.task.patience())?;
            Ok(ended)
        });
        let (state, found) = match &ended {
            Ok(None) => {
                (State::Right, format!("waited {} ms, and ended when the hold did", CONTROL.as_millis()))
            }
            Ok(Some(after)) => {
                (State::Void, format!("ENDED AFTER {} us: the control does not hold here", after.as_micros()))
            }
            Err(error) => (State::Wrong, error.to_string()),
        };
        let held = state == State::Right;
        checks.tell(about, state, found, None)?;
        Ok(held)
    }

    /// A dispatch of all ranks while every multiprocessor is held.
    fn exchange(
        &self,
        checks: &mut Checks,
        controls: bool,
        about: About<'_>,
        peers: Peers,
        bytes: u64,
    ) -> Result<(), CliError> {
        if !checks.has(about, self.context.driver().version(), peers.needs())? {
            return Ok(());
        }
        let found = self.dispatch(peers, bytes);
        let (state, found) = match found {
            Ok(found) if controls => (State::Right, found),
            Ok(found) => (State::Void, format!("{found}; a control does not hold, so this shows nothing")),
            Err(error) => (State::Wrong, error.to_string()),
        };
        checks.tell(about, state, found, None)
    }

    fn dispatch(&self, peers: Peers, bytes: u64) -> Result<String, CliError> {
        let mut dispatch = Dispatch::packed(self.context, &self.control, peers, bytes)?;
        let patience = self.task.patience();
        let landed = self.held(|| {
            let start = Instant::now();
            dispatch.enqueue(&self.ranks)?;
            let what = "a dispatch while every multiprocessor is held";
            until(what, patience, || dispatch::all_done(&self.ranks))?;
            Ok(start.elapsed())
        });
        // What waited for a multiprocessor ends now, and lets go of its memory.
        until("a dispatch that was let go", patience, || dispatch::all_done(&self.ranks))?;
        let landed = landed?;
        dispatch.check(&self.control, patience)?;
        let (copies, operations) = dispatch.counts();
        Ok(format!(
            "{copies} copies and {operations} operations landed in {} us while {} blocks held {} SMs",
            landed.as_micros(),
            self.hold.blocks(),
            self.context.facts().multiprocessors
        ))
    }
}
