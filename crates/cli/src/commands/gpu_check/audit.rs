//! The audit: does anything between packed and landed need a multiprocessor?
//!
//! ```text
//!   hold   |== every thread of every multiprocessor ==================================|  until the host's word
//!   ranks         copies, flags, waits of an exchange        must end in here ---------^
//!   controls      the smallest kernel; a copy by a kernel    must not end in here
//!   questions     copies on the GPU, which the driver makes as it likes: do they end in here?
//! ```
//!
//! Everything is allocated before the hold and freed behind it, since calls that wait for the
//! context would wait for the hold.
//!
//! The audit looks at a [dispatch](sidelane_testkit::device::copied_dispatch) of ranks that are
//! streams of one context.

use std::time::{Duration, Instant};

use sidelane::device::{AuditKernels, CopyBatch, CudaGraph, PinnedMemory, Stream, Version};
use sidelane_testkit::device::copied_dispatch::{Dispatch, Peers, RANKS, all_done};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::hold::Held;
use sidelane_testkit::device::lock_and_queue::Answer;
use sidelane_testkit::device::timer::Transfer;
use sidelane_testkit::device::whole;

use super::Task;
use super::report::{About, Checks, State};
use crate::error::CliError;

/// Bytes of a slot: one of a small batch, and one that is hardly more than its flags.
const SLOTS: [(u64, &str); 2] = [(921_600, "0.9 MB"), (16 << 10, "16 KiB")];

const WITHIN: [(u64, &str); 4] =
    [(4 << 10, "4 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")];

/// Work that has not ended by then needs an SM.
const CONTROL: Duration = Duration::from_millis(500);

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let audit = Audit::new(task.gpu()?)?;
    let mut controls = true;
    let about = About::new(
        "control: a kernel of one block",
        "no multiprocessor has room for anything: it must not run while they are held",
    );
    controls &= audit
        .control(checks, about, |stream| Ok(audit.kernels.touch(stream, audit.word.range().word(0)?)?))?;
    let (from, to) = (audit.gpu.memory(1 << 20)?, audit.gpu.memory(1 << 20)?);
    let about = About::new(
        "control: copy by a kernel on the GPU",
        "SMs do these, and so it must not end while they are held: the audit sees what it looks for",
    );
    controls &= audit.control(checks, about, |stream| {
        Ok(audit.kernels.copy(stream, whole(&to)?, whole(&from)?, None)?)
    })?;
    audit.within(checks, controls)?;
    audit.latency(checks)?;
    for peers in Peers::ALL {
        for (bytes, size) in SLOTS {
            let (shows, open) = words(peers);
            let what = format!("{RANKS} ranks, {size} to {}", peers.place());
            audit.exchange(checks, controls, About::new(&what, shows).open(open), peers, bytes)?;
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

struct Audit {
    gpu: Gpu,
    kernels: AuditKernels,
    held: Held,
    word: PinnedMemory,
    control: Stream,
    ranks: Vec<Stream>,
}

impl Audit {
    fn new(gpu: Gpu) -> Result<Self, CliError> {
        let kernels = AuditKernels::load(&gpu.context)?;
        Ok(Audit {
            held: Held::new(&gpu, &kernels)?,
            kernels,
            word: gpu.pinned(8)?,
            control: gpu.stream()?,
            ranks: gpu.streams(RANKS as usize)?,
            gpu,
        })
    }

    /// When work ended while every multiprocessor was held, if it did. It must end afterwards.
    fn ends_in_hold(
        &self,
        enqueue: impl FnOnce(&Stream) -> Result<(), CliError>,
    ) -> Result<Option<Duration>, CliError> {
        let ended = self.held.during(&self.gpu, || {
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
        self.gpu.finish(&self.control, "work that was let go")?;
        ended
    }

    /// Work that must not end while every multiprocessor is held. Gives whether that held.
    fn control(
        &self,
        checks: &mut Checks,
        about: About<'_>,
        enqueue: impl FnOnce(&Stream) -> Result<(), CliError>,
    ) -> Result<bool, CliError> {
        let judged = self.ends_in_hold(enqueue).map(|ended| match ended.map(|after| after.as_micros()) {
            None => {
                let waited = CONTROL.as_millis();
                (State::Right, format!("waited {waited} ms, and ended when the hold did"))
            }
            Some(us) => (State::Void, format!("ENDED AFTER {us} us: the control does not hold here")),
        });
        checks.judged(about, judged)
    }

    fn latency(&self, checks: &mut Checks) -> Result<(), CliError> {
        let mut transfer = Transfer::new(&self.gpu, &self.control)?;
        let samples = self.held.during(&self.gpu, || {
            (0..self.gpu.few(20, 3))
                .map(|_| Ok(transfer.send(&self.gpu, &self.control)?.as_secs_f64() * 1e6))
                .collect::<Result<Vec<f64>, CliError>>()
        })?;
        let what = format!("copy of {} to the host and its word, while every SM is held", Transfer::SIZE.1);
        let shows = "how long one transfer takes then: the part interference has the same beside products";
        checks.measured(About::new(&what, shows), &samples, "")
    }

    /// Asks which copies on the GPU the driver gives to SMs: of some sizes, enqueued in each way.
    fn within(&self, checks: &mut Checks, controls: bool) -> Result<(), CliError> {
        let shows = "who makes a copy on one GPU: an engine, if it ends while every SM is held";
        for (bytes, size) in WITHIN {
            let (from, to) = (self.gpu.memory(bytes)?, self.gpu.memory(bytes)?);
            let (to, from) = (whole(&to)?, whole(&from)?);
            let graph = CudaGraph::capture(&self.control, || self.control.copy(to, from))?;
            let mut batch = CopyBatch::with_capacity(&self.gpu.context, 1);
            batch.push(to, from)?;
            // Once before the hold: a call that has something to load would wait for it.
            self.control.copy(to, from)?;
            graph.launch(&self.control)?;
            if self.control.takes_batches() {
                self.control.copy_batch(&mut batch)?;
            }
            self.gpu.finish(&self.control, "copies on the GPU")?;
            for way in ["alone", "in a batch", "in a graph"] {
                let what = format!("copy of {size} on the GPU, {way}");
                let about = About::new(&what, shows);
                if way == "in a batch" && !self.control.takes_batches() {
                    checks.has(about, self.gpu.version(), ("a batch of copies", Version::BATCHED_COPIES))?;
                    continue;
                }
                let ended = self.ends_in_hold(|stream| {
                    let enqueued = match way {
                        "in a batch" => stream.copy_batch(&mut batch),
                        "in a graph" => graph.launch(stream),
                        _ => stream.copy(to, from),
                    };
                    Ok(enqueued?)
                });
                match ended {
                    Err(error) => checks.judged(about, Err(error)).map(drop)?,
                    Ok(_) if !controls => {
                        let found = "a control does not hold, so this shows nothing".to_owned();
                        checks.tell(about, State::Void, found)?;
                    }
                    Ok(None) => {
                        let waited = CONTROL.as_millis();
                        let found = format!("SMs: it waited {waited} ms, until they were let go");
                        checks.answered(about, Answer::Blocks, found)?;
                    }
                    Ok(Some(after)) => {
                        let found = format!("an engine: it ended after {} us", after.as_micros());
                        checks.answered(about, Answer::Passes, found)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn exchange(
        &self,
        checks: &mut Checks,
        controls: bool,
        about: About<'_>,
        peers: Peers,
        bytes: u64,
    ) -> Result<(), CliError> {
        if !checks.has(about, self.gpu.version(), peers.needs())? {
            return Ok(());
        }
        let found = self.dispatch(peers, bytes).map(|found| match controls {
            true => (State::Right, found),
            false => (State::Void, format!("{found}; a control does not hold, so this shows nothing")),
        });
        checks.judged(about, found).map(drop)
    }

    fn dispatch(&self, peers: Peers, bytes: u64) -> Result<String, CliError> {
        let mut dispatch = Dispatch::packed(&self.gpu, &self.control, peers, bytes)?;
        let landed = self.held.during(&self.gpu, || {
            let start = Instant::now();
            dispatch.enqueue(&self.ranks)?;
            let what = "a dispatch while every multiprocessor is held";
            self.gpu.until(what, || all_done(&self.ranks))?;
            Ok::<_, CliError>(start.elapsed())
        });
        // Work that waited for a multiprocessor ends now, and releases its memory.
        self.gpu.until("a dispatch that was let go", || all_done(&self.ranks))?;
        let landed = landed?;
        dispatch.check(&self.gpu, &self.control)?;
        let (copies, operations) = dispatch.counts();
        Ok(format!(
            "{copies} copies and {operations} operations landed in {} us while {} blocks held {} SMs",
            landed.as_micros(),
            self.held.blocks(),
            self.gpu.context.facts().multiprocessors
        ))
    }
}
