//! The list: every kernel that the device ran between packed and landed, and which queue took each
//! copy, as CUPTI records it.
//!
//! ```text
//!   ranks     mark |        | copies, signals, waits of a dispatch |        | mark        a mark is a kernel of ours, at each rank
//!   host           | waits  |                                      | waits  |
//!   records   touch .......... no kernel, copies of engines alone ........... touch
//! ```
//!
//! Nothing is held meanwhile, unlike in the audit: a kernel of the driver's own must be able to
//! run, or it would not be seen. Marks are what the list must have; without them it shows nothing.
//! Nor does it if a plain copy on the GPU, which SMs do, looks like one of an engine: that is the
//! control.
//!
//! CUPTI is NVIDIA's library inside the driver, so this is a part of its own: a failure there costs
//! no other part.
//!
//! ```text
//!   touch touch .. |  kernels, copies  | .. touch touch      marks: as many before as behind
//!               packed              landed
//! ```

use std::collections::BTreeMap;
use std::fmt;

use sidelane::device::{
    Activity, ActivityKind, AuditKernels, Channel, Cupti, DeviceRange, Driver, PinnedMemory, Stream,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::copied_dispatch::{Dispatch, Peers, RANKS, all_done};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::whole;

use super::report::{About, Checks, State};
use super::{Task, packages};
use crate::error::CliError;

const SLOT: (u64, &str) = (921_600, "0.9 MB");

const CONTROL: &str = "control: plain copy on the GPU";

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let driver = Driver::open()?;
    let files = packages::files(&driver, &Cupti::NAMES);
    let cupti = match Cupti::open_with(&driver, &files) {
        Ok(cupti) => cupti,
        Err(error) => {
            let shows = "nothing: the audit by a hold asks the same, and does without CUPTI";
            let about = About::new("list of kernels by CUPTI", shows);
            let hint = packages::hint("SIDELANE_CUPTI_LIBRARY", "nvidia/cuda_cupti");
            return checks.tell(about, State::Skipped, format!("not seen: {error}; {hint}"));
        }
    };
    let listing = Listing::new(task.gpu()?, &cupti)?;
    let tells_apart = listing.control(checks)?;
    for peers in Peers::ALL {
        listing.dispatch(checks, peers, tells_apart)?;
    }
    Ok(())
}

struct Listing<'a> {
    gpu: Gpu,
    cupti: &'a Cupti,
    kernels: AuditKernels,
    word: PinnedMemory,
    staging: Stream,
    ranks: Vec<Stream>,
    plain: [DeviceRange; 2],
}

impl<'a> Listing<'a> {
    fn new(gpu: Gpu, cupti: &'a Cupti) -> Result<Self, CliError> {
        Ok(Listing {
            cupti,
            kernels: AuditKernels::load(&gpu.context)?,
            word: gpu.pinned(8)?,
            staging: gpu.stream()?,
            ranks: gpu.streams(RANKS as usize)?,
            plain: [gpu.memory(SLOT.0)?, gpu.memory(SLOT.0)?],
            gpu,
        })
    }

    /// Has work done between marks, and gives what was recorded meanwhile.
    fn listed(&self, enqueue: impl FnOnce(&[Stream]) -> Result<(), DeviceError>) -> Result<Listed, CliError> {
        // Earlier work is another list's.
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
        Ok(self.gpu.until(what, || all_done(&self.ranks))?)
    }

    /// Whether the list tells a copy by SMs from one by an engine.
    fn control(&self, checks: &mut Checks) -> Result<bool, CliError> {
        let [to, from] = &self.plain;
        let listed = self.listed(|ranks| ranks[0].copy(whole(to)?, whole(from)?))?;
        let shows =
            "SMs do these, and so it must not look like a copy of an engine: the list sees what it looks for";
        let about = About::new(CONTROL, shows);
        let (state, found) = listed.judge_control();
        checks.judged(about, Ok((state, format!("{found}; CUPTI is {}", self.cupti.name()))))
    }

    fn dispatch(&self, checks: &mut Checks, peers: Peers, tells_apart: bool) -> Result<(), CliError> {
        let what = format!("{RANKS} ranks, {} to {}", SLOT.1, peers.place());
        let shows = "no kernel ran between packed and landed, the driver's own included, and copy engines' queues took the copies";
        let about = About::new(&what, shows).open("the same between GPUs, over NVLink");
        if !checks.has(about, self.gpu.version(), peers.needs())? {
            return Ok(());
        }
        let mut dispatch = Dispatch::packed(&self.gpu, &self.staging, peers, SLOT.0)?;
        let listed = self.listed(|ranks| dispatch.enqueue(ranks));
        let checked = listed.and_then(|listed| {
            dispatch.check(&self.gpu, &self.staging)?;
            Ok(listed)
        });
        checks.judged(about, checked.map(|listed| listed.judge(tells_apart))).map(drop)
    }
}

/// The kernel that marks are.
const MARK: &str = "touch";

#[derive(Debug, PartialEq)]
enum Listed {
    No(DeviceError),
    /// It lacks marks that ran, or when.
    Unmarked {
        seen: usize,
        marks: usize,
    },
    Between(Between),
}

/// Work that began before landed and ended after packed, or at a time that CUPTI does not know.
#[derive(Debug, Default, PartialEq)]
struct Between {
    kernels: BTreeMap<String, usize>,
    /// Copies by the queue that took them: of engines, of multiprocessors, other.
    copies: [usize; 3],
}

impl Listed {
    pub fn of(all: &[Activity], marks: usize) -> Self {
        let is_mark = |activity: &&Activity| {
            matches!(&activity.did, ActivityKind::Kernel { name } if name == MARK) && activity.start > 0
        };
        let mut seen: Vec<&Activity> = all.iter().filter(is_mark).collect();
        seen.sort_by_key(|mark| mark.start);
        let (first, last) = seen.split_at(seen.len() / 2);
        let packed = first.iter().map(|mark| mark.end).max().unwrap_or(0);
        let landed = last.iter().map(|mark| mark.start).min().unwrap_or(0);
        if seen.len() != 2 * marks || packed > landed {
            return Listed::Unmarked { seen: seen.len(), marks: 2 * marks };
        }
        let mut between = Between::default();
        for Activity { did, start, end } in all {
            let timed = *start > 0 && *end > 0;
            if timed && (*start >= landed || *end <= packed) {
                continue;
            }
            match did {
                ActivityKind::Kernel { name } => *between.kernels.entry(name.clone()).or_default() += 1,
                ActivityKind::Copy { channel: Channel::CopyEngine, .. } => between.copies[0] += 1,
                ActivityKind::Copy { channel: Channel::Compute, .. } => between.copies[1] += 1,
                ActivityKind::Copy { channel: Channel::Other(_), .. } => between.copies[2] += 1,
            }
        }
        Listed::Between(between)
    }

    /// Of a copy that SMs do: it must look like one.
    fn judge_control(&self) -> (State, String) {
        match self {
            Listed::No(_) => (State::Skipped, format!("not seen: {self}")),
            Listed::Unmarked { .. } => (State::Void, self.to_string()),
            Listed::Between(between) if between.needs_multiprocessors() => (State::Right, self.to_string()),
            Listed::Between(_) => (State::Void, format!("{self}: THE CONTROL DOES NOT HOLD here")),
        }
    }

    /// Of a dispatch. A kernel is wrong regardless of the control; that there is none says
    /// something only where it holds.
    pub fn judge(&self, control: bool) -> (State, String) {
        match self {
            Listed::No(_) => (State::Skipped, format!("not seen: {self}")),
            Listed::Unmarked { .. } => (State::Void, self.to_string()),
            Listed::Between(between) if !between.kernels.is_empty() => (State::Wrong, self.to_string()),
            Listed::Between(between) if !between.by_engines_alone() => {
                (State::Void, format!("{self}: it does not show who moved the bytes"))
            }
            Listed::Between(_) if control => (State::Right, self.to_string()),
            Listed::Between(_) => {
                (State::Void, format!("{self}; the control does not hold, so this shows nothing"))
            }
        }
    }
}

impl Between {
    fn needs_multiprocessors(&self) -> bool {
        !self.kernels.is_empty() || self.copies[1] > 0
    }

    fn by_engines_alone(&self) -> bool {
        let [engines, compute, other] = self.copies;
        engines > 0 && compute == 0 && other == 0
    }
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listed::No(error) => error.fmt(f),
            Listed::Unmarked { seen, marks } => {
                write!(f, "{seen} of {marks} marks are in the list, or not at their time: it shows nothing")
            }
            Listed::Between(Between { kernels, copies: [engines, compute, other] }) => {
                let names: Vec<String> =
                    kernels.iter().map(|(name, count)| format!("{count} of {name}")).collect();
                match &names[..] {
                    [] => f.write_str("no kernel")?,
                    names => write!(f, "KERNELS: {}", names.join(", "))?,
                }
                write!(f, "; copies in queues of engines {engines}, of SMs {compute}, of neither {other}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, start: u64, end: u64) -> Activity {
        Activity { did: ActivityKind::Kernel { name: name.into() }, start, end }
    }

    fn copy(channel: Channel, start: u64, end: u64) -> Activity {
        Activity { did: ActivityKind::Copy { bytes: 8, channel }, start, end }
    }

    /// Two marks on each side: packed at 20, landed at 100.
    fn with(more: &[Activity]) -> Listed {
        let marks = [(1, 9), (5, 20), (100, 110), (101, 120)];
        let marks = marks.into_iter().map(|(start, end)| kernel(MARK, start, end));
        Listed::of(&marks.chain(more.iter().cloned()).collect::<Vec<_>>(), 2)
    }

    fn state(listed: &Listed) -> (State, State) {
        (listed.judge(true).0, listed.judge(false).0)
    }

    #[test]
    fn copies_of_engines_are_right_where_the_control_holds() {
        let listed = with(&[copy(Channel::CopyEngine, 30, 40), copy(Channel::CopyEngine, 30, 99)]);
        assert_eq!(state(&listed), (State::Right, State::Void));
        assert_eq!(listed.to_string(), "no kernel; copies in queues of engines 2, of SMs 0, of neither 0");
    }

    #[test]
    fn a_kernel_between_packed_and_landed_is_wrong_and_named() {
        let engine = copy(Channel::CopyEngine, 30, 40);
        for planted in [
            kernel("hidden", 50, 60),
            kernel("hidden", 5, 21),
            kernel("hidden", 99, 300),
            kernel("hidden", 0, 0),
        ] {
            let listed = with(&[engine.clone(), planted.clone()]);
            assert_eq!(state(&listed), (State::Wrong, State::Wrong), "{planted:?}");
            assert!(listed.to_string().starts_with("KERNELS: 1 of hidden;"), "{listed}");
        }
        for outside in [kernel("pack", 2, 20), kernel("check", 100, 140)] {
            assert_eq!(state(&with(&[engine.clone(), outside])), (State::Right, State::Void));
        }
    }

    #[test]
    fn copies_that_are_not_there_or_not_of_engines_show_nothing() {
        for copies in [&[][..], &[copy(Channel::Compute, 30, 40)], &[copy(Channel::Other(0), 30, 40)]] {
            assert_eq!(state(&with(copies)), (State::Void, State::Void), "{copies:?}");
        }
    }

    #[test]
    fn the_control_holds_where_a_copy_by_sms_looks_like_one() {
        let judged = |activity| with(&[activity]).judge_control().0;
        assert_eq!(judged(copy(Channel::Compute, 30, 40)), State::Right);
        assert_eq!(judged(kernel("driver_copy", 30, 40)), State::Right);
        assert_eq!(judged(copy(Channel::CopyEngine, 30, 40)), State::Void);
        assert_eq!(judged(copy(Channel::Compute, 120, 140)), State::Void, "outside of the marks");
    }

    #[test]
    fn a_list_without_its_marks_shows_nothing() {
        let unmarked = |seen| Listed::Unmarked { seen, marks: 4 };
        assert_eq!(Listed::of(&[], 2), unmarked(0));
        assert_eq!(Listed::of(&[kernel(MARK, 1, 2), kernel(MARK, 3, 4)], 2), unmarked(2));
        let late = [kernel(MARK, 1, 2), kernel(MARK, 3, 50), kernel(MARK, 40, 60), kernel(MARK, 70, 80)];
        assert_eq!(Listed::of(&late, 2), unmarked(4), "packed after landed");
        assert_eq!(state(&unmarked(3)), (State::Void, State::Void));
        let lost = Listed::No(DeviceError::LostRecords { lost: 3 });
        assert_eq!(lost.judge(true), (State::Skipped, "not seen: CUPTI lost 3 records".into()));
    }
}
