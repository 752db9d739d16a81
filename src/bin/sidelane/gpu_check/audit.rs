//! The audit: does anything between packed and landed need a multiprocessor?
//!
//! ```text
//!   hold   |== every multiprocessor: one block each, all shared memory ==============|  until the host's word
//!   ranks         copies, flags, waits of an exchange       must end in here ---------^
//!   controls      the smallest kernel; a plain copy on the GPU    must not end in here
//! ```
//!
//! Ranks are streams of one process and one context: of several processes the GPU would take turns, and a hold in one would
//! hold nothing in the others. They run the program of an exchange ([`StreamProgram`]) as the library lowers it, with its
//! kernels left out: what it packs lies there before the hold.
//!
//! Everything is allocated before the hold and freed behind it, since calls that wait for the context would wait for the hold.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{AuditKernels, Context, Driver, Hold, PinnedMemory, Range, Stream, Version};
use sidelane::error::DeviceError;
use sidelane::exec::{Lowered, PeerWindows};
use sidelane::schedule::stream::{Slots, StreamProgram};

use super::check::{About, Checks};
use super::driver::stream;
use super::error::{CheckError, equal, same};
use super::memory::{self, Random, content, device, finish, until, whole};
use super::row::State;
use super::task::Task;

const RANKS: u32 = 4;

/// Bytes of a slot: one of a small batch, and one that is hardly more than its flags.
const SLOTS: [(u64, &str); 2] = [(921_600, "0.9 MB"), (16 << 10, "16 KiB")];

/// A control that has not ended in so long needed what is held.
const CONTROL: Duration = Duration::from_millis(500);

/// Where rows go.
#[derive(Clone, Copy, PartialEq)]
enum Peers {
    /// Pinned memory of the host: an engine does these by construction.
    Host,
    /// The same GPU, in batches that prefer engines.
    SameGpu,
}

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CheckError> {
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
    for peers in [Peers::Host, Peers::SameGpu] {
        for (bytes, size) in SLOTS {
            let (to, shows, open) = peers.words();
            let what = format!("{RANKS} ranks, {size} to {to}");
            audit.exchange(checks, controls, About { what: &what, shows, open: Some(open) }, peers, bytes)?;
        }
    }
    let about = About {
        what: "list of kernels by CUPTI",
        shows: "nothing that the hold does not: its records name a copy memcpy also where SMs do it",
        open: None,
    };
    let found =
        "libcupti's activity records have another layout in each version, and come in buffers by callbacks"
            .into();
    checks.tell(about, State::Skipped, found, None)
}

impl Peers {
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Peers::Host => (
                "pinned windows of the host",
                "copies, signals and waits of an exchange end while every multiprocessor is held",
                "that NVLink's engines do as PCIe's do",
            ),
            Peers::SameGpu => (
                "the same GPU, in batches",
                "as above: the wish for overlap is heeded, and an engine moves what SMs could",
                "peers at other GPUs need no such wish, and a graph may hold their copies",
            ),
        }
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
    /// One of each rank. Made one after the other, like those above: on hardware queues of their own.
    ranks: Vec<Stream>,
}

impl<'a> Audit<'a> {
    fn new(task: &'a Task, context: &'a Arc<Context>) -> Result<Self, CheckError> {
        let kernels = AuditKernels::load(context)?;
        Ok(Audit {
            task,
            context,
            hold: kernels.hold()?,
            kernels,
            word: PinnedMemory::new(context, 8)?,
            holder: stream(context)?,
            control: stream(context)?,
            ranks: (0..RANKS).map(|_| stream(context)).collect::<Result<_, _>>()?,
        })
    }

    /// Has `work` done while every multiprocessor is held. Whatever comes of it, the hold ends.
    fn held<T>(&self, work: impl FnOnce() -> Result<T, CheckError>) -> Result<T, CheckError> {
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
        enqueue: impl FnOnce(&Stream) -> Result<(), CheckError>,
    ) -> Result<bool, CheckError> {
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
    ) -> Result<(), CheckError> {
        if peers == Peers::SameGpu && self.context.driver().version() < Version::BATCHED_COPIES {
            let found = format!("batches of copies need a driver for CUDA {}", Version::BATCHED_COPIES);
            return checks.tell(about, State::Wrong, found, None);
        }
        let found = self.dispatch(peers, bytes);
        let (state, found) = match found {
            Ok(found) if controls => (State::Right, found),
            Ok(found) => (State::Void, format!("{found}; a control does not hold, so this shows nothing")),
            Err(error) => (State::Wrong, error.to_string()),
        };
        checks.tell(about, state, found, None)
    }

    fn dispatch(&self, peers: Peers, bytes: u64) -> Result<String, CheckError> {
        let slots = Slots::new(RANKS, bytes, bytes)?;
        let windows = Windows::new(self.context, &slots, peers)?;
        let packed = |from: u32, to: u32| Random(u64::from(from * RANKS + to) + bytes).bytes(bytes as usize);
        let mut programs = Vec::new();
        for rank in 0..RANKS {
            for to in (0..RANKS).filter(|&to| to != rank) {
                let slot = windows.own[rank as usize].part(slots.send(to), bytes)?;
                memory::write(&self.control, &slot, &packed(rank, to))?;
            }
            let program = StreamProgram::dispatch(slots, rank)?;
            programs.push(Lowered::lower(self.context, &program, rank, &windows.seen_by(rank))?);
        }
        let landed = self.held(|| {
            let start = Instant::now();
            for (program, stream) in programs.iter_mut().zip(&self.ranks) {
                program.send(stream)?;
            }
            for (program, stream) in programs.iter_mut().zip(&self.ranks) {
                program.receive(stream)?;
            }
            until("a dispatch while every multiprocessor is held", self.task.patience(), || {
                self.all_landed()
            })?;
            Ok(start.elapsed())
        });
        // What waited for a multiprocessor ends now, and lets go of its memory.
        until("a dispatch that was let go", self.task.patience(), || self.all_landed())?;
        let landed = landed?;
        for rank in 0..RANKS {
            for from in (0..RANKS).filter(|&from| from != rank) {
                let seen = windows.landed(
                    rank,
                    (slots.receive(from), bytes),
                    &self.control,
                    self.task.patience(),
                )?;
                same(format!("the slot of rank {from} at rank {rank}"), &seen, &packed(from, rank))?;
            }
        }
        let counts = programs.iter().map(Lowered::counts);
        let (copies, operations) =
            counts.fold((0, 0), |(a, b), counts| (a + counts.copies, b + counts.memory_operations));
        Ok(format!(
            "{copies} copies and {operations} operations landed in {} us while {} blocks held {} SMs",
            landed.as_micros(),
            self.hold.blocks(),
            self.context.facts().multiprocessors
        ))
    }

    fn all_landed(&self) -> Result<bool, DeviceError> {
        self.ranks.iter().try_fold(true, |all, stream| Ok(all && stream.is_done()?))
    }
}

/// Windows of all ranks.
struct Windows {
    /// What each sends from.
    own: Vec<Range>,
    /// Where others write, if that is memory of the host.
    host: Option<Vec<PinnedMemory>>,
    words: Vec<PinnedMemory>,
}

impl Windows {
    fn new(context: &Arc<Context>, slots: &Slots, peers: Peers) -> Result<Self, DeviceError> {
        let pinned = |bytes: u64| -> Result<Vec<_>, DeviceError> {
            (0..RANKS).map(|_| PinnedMemory::new(context, bytes as usize)).collect()
        };
        Ok(Windows {
            own: (0..RANKS).map(|_| device(context, slots.bytes())).collect::<Result<_, _>>()?,
            host: if peers == Peers::Host { Some(pinned(slots.bytes())?) } else { None },
            words: pinned(slots.flag_bytes())?,
        })
    }

    fn seen_by(&self, me: u32) -> Seen<'_> {
        Seen { windows: self, me }
    }

    /// Bytes that a rank received.
    fn landed(
        &self,
        rank: u32,
        (offset, len): (u64, u64),
        stream: &Stream,
        patience: Duration,
    ) -> Result<Vec<u8>, CheckError> {
        match &self.host {
            None => memory::read(stream, &self.own[rank as usize].part(offset, len)?, patience),
            Some(host) => Ok(content(&host[rank as usize])?[offset as usize..][..len as usize].to_vec()),
        }
    }
}

/// The windows as one rank reaches them: its own on the GPU, those of the others where they are.
struct Seen<'a> {
    windows: &'a Windows,
    me: u32,
}

impl PeerWindows for Seen<'_> {
    fn slots(&self, rank: u32) -> &Range {
        match &self.windows.host {
            Some(host) if rank != self.me => host[rank as usize].range(),
            _ => &self.windows.own[rank as usize],
        }
    }

    fn flags(&self, rank: u32) -> &Range {
        self.windows.words[rank as usize].range()
    }

    fn same_device(&self, _rank: u32) -> bool {
        self.windows.host.is_none()
    }
}
