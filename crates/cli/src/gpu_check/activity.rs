//! The list: every kernel that the device ran between packed and landed, and which queue took each copy, as CUPTI records it.
//!
//! ```text
//!   ranks     mark |        | copies, signals, waits of a dispatch |        | mark        a mark is a kernel of ours, at each rank
//!   host           | waits  |                                      | waits  |
//!   records   touch .......... no kernel, copies of engines alone ........... touch
//! ```
//!
//! Nothing is held meanwhile, unlike in the audit: a kernel of the driver's own must be able to run, or it would not be seen. Marks
//! are what the list must have; without them it shows nothing. Nor does it if a plain copy on the GPU, which SMs do, looks like
//! one of an engine: that is the control.
//!
//! CUPTI is somebody else's library inside the driver, so this is a part of its own: what it does to this process, it does to
//! nothing else.

use std::sync::Arc;

use sidelane::device::{AuditKernels, Context, Cupti, Driver, PinnedMemory, Range, Stream};
use sidelane::error::DeviceError;

use super::check::{About, Checks};
use super::dispatch::{self, Dispatch, Peers, RANKS};
use super::driver::stream;
use super::listed::Listed;
use super::memory::{device, until, whole};
use super::row::State;
use super::task::Task;
use super::wheels;
use crate::error::CliError;

/// Bytes of a slot.
const SLOT: (u64, &str) = (921_600, "0.9 MB");

const CONTROL: &str = "control: plain copy on the GPU";

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let driver = Driver::open()?;
    let files = wheels::find(&driver, &Cupti::NAMES);
    let cupti = match Cupti::open_with(&driver, &files) {
        Ok(cupti) => cupti,
        Err(error) => {
            let shows = "nothing: the audit by a hold asks the same, and does without CUPTI";
            let about = About { what: "list of kernels by CUPTI", shows, open: None };
            let hint = wheels::hint("SIDELANE_CUPTI", "nvidia/cuda_cupti");
            return checks.tell(about, State::Skipped, format!("not seen: {error}; {hint}"), None);
        }
    };
    let context = driver.context(task.device)?;
    let listing = Listing::new(task, &context, &cupti)?;
    let tells_apart = listing.control(checks)?;
    for peers in Peers::ALL {
        listing.dispatch(checks, peers, tells_apart)?;
    }
    Ok(())
}

/// What every list uses.
struct Listing<'a> {
    task: &'a Task,
    context: &'a Arc<Context>,
    cupti: &'a Cupti,
    kernels: AuditKernels,
    word: PinnedMemory,
    staging: Stream,
    ranks: Vec<Stream>,
    plain: [Range; 2],
}

impl<'a> Listing<'a> {
    fn new(task: &'a Task, context: &'a Arc<Context>, cupti: &'a Cupti) -> Result<Self, CliError> {
        Ok(Listing {
            task,
            context,
            cupti,
            kernels: AuditKernels::load(context)?,
            word: PinnedMemory::new(context, 8)?,
            staging: stream(context)?,
            ranks: dispatch::streams(context)?,
            plain: [device(context, SLOT.0)?, device(context, SLOT.0)?],
        })
    }

    /// Has work done between marks, and gives what was recorded meanwhile.
    fn listed(&self, enqueue: impl FnOnce(&[Stream]) -> Result<(), DeviceError>) -> Result<Listed, CliError> {
        // What went before is another list's.
        let before = self.cupti.recorded();
        self.mark()?;
        enqueue(&self.ranks)?;
        self.all_done("what is listed")?;
        self.mark()?;
        let recorded = before.and_then(|_| self.cupti.recorded());
        Ok(recorded.map_or_else(Listed::No, |all| Listed::of(&all, RANKS as usize)))
    }

    /// A kernel of ours at each rank, and nothing else on the device.
    fn mark(&self) -> Result<(), CliError> {
        for rank in &self.ranks {
            self.kernels.touch(rank, self.word.range().word(0)?)?;
        }
        self.all_done("marks")
    }

    fn all_done(&self, what: &str) -> Result<(), CliError> {
        until(what, self.task.patience(), || dispatch::all_done(&self.ranks))
    }

    /// Whether the list tells a copy by SMs from one by an engine.
    fn control(&self, checks: &mut Checks) -> Result<bool, CliError> {
        let [to, from] = &self.plain;
        let listed = self.listed(|ranks| ranks[0].copy(whole(to)?, whole(from)?))?;
        let shows =
            "SMs do these, and so it must not look like a copy of an engine: the list sees what it looks for";
        let about = About { what: CONTROL, shows, open: None };
        let (state, found) = listed.judge_control();
        checks.tell(about, state, format!("{found}; CUPTI is {}", self.cupti.name()), None)?;
        Ok(state == State::Right)
    }

    fn dispatch(&self, checks: &mut Checks, peers: Peers, tells_apart: bool) -> Result<(), CliError> {
        let what = format!("{RANKS} ranks, {} to {}", SLOT.1, peers.place());
        let shows = "no kernel ran between packed and landed, the driver's own included, and copy engines' queues took the copies";
        let about = About { what: &what, shows, open: Some("the same between GPUs, over NVLink") };
        if !checks.has(about, self.context.driver().version(), peers.needs())? {
            return Ok(());
        }
        let mut dispatch = Dispatch::packed(self.context, &self.staging, peers, SLOT.0)?;
        let listed = self.listed(|ranks| dispatch.enqueue(ranks));
        let checked = listed.and_then(|listed| {
            dispatch.check(&self.staging, self.task.patience())?;
            Ok(listed)
        });
        let (state, found) = match checked {
            Ok(listed) => listed.judge(tells_apart),
            Err(error) => (State::Wrong, error.to_string()),
        };
        checks.tell(about, state, found, None)
    }
}
