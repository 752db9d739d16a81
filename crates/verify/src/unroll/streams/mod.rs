//! Unrolls slots on streams, by the [programs](SlotCall::program) of their calls.
//!
//! ```text
//!   dispatch   pack: write send, own receive  |  puts, signals, waits, words set back
//!   combine    experts read receive  |  partials: write partial  |  puts, signals, waits, words set back
//!              |  sum: read own partial, home
//!   release    the caller has read receive           |        signals, waits, words set back
//! ```
//!
//! Kernels may run [aside](Streams::Aside). Then two events join the streams, modeled as words that
//! grow:
//!
//! ```text
//!   kernels      pack | ready            arrived | experts | ready            arrived | sum
//!   transfers           ready | dispatch | arrived           ready | combine | arrived
//! ```

//!
//! Between nodes there are proxies, too: for each microbatch of a rank one that puts over the net
//! and, on the host-staged path, one for each peer of another node that signals arrivals. Each
//! takes the calls in their order, at the stream's requests, as a real proxy does. A real proxy is
//! one thread for all of these; as separate actors they have no order that the thread would not
//! keep.

mod act;
mod filled;
mod fold;
mod kernels;
mod turns;

use std::rc::Rc;

use sidelane_core::error::PlanError;
use sidelane_core::schedule::call::{CallProgram, SlotCall};
use sidelane_core::schedule::stream::{RowPath, Slots};
use sidelane_core::topology::NodeMap;
use turns::Turns;

use super::UnrolledProgram;

/// The calls of a group on streams, all ranks in the same order.
#[derive(Clone, Debug)]
pub struct StreamScenario<'a> {
    /// Geometry of each microbatch's windows.
    pub slots: Slots,
    /// Which streams there are.
    pub streams: Streams,
    /// Which ranks share memory, if not all, and how rows cross.
    pub across: Option<(&'a NodeMap, RowPath)>,
    /// The calls.
    pub calls: &'a [StreamCall],
    /// A rule that the caller breaks: `None`, except to see that `prove` notices.
    pub slip: Option<StreamBug>,
    /// The program of these calls, in place of [theirs](SlotCall::program): `None`, except to see
    /// that `prove` notices bugs of a driver.
    pub planted: Option<(SlotCall, &'a CallProgram)>,
}

/// One call. Microbatches are numbered from 0, and each has windows and flags of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamCall {
    /// Packed slots to their ranks.
    Dispatch(u32),
    /// Partial rows return: the turn after a dispatch.
    Combine(u32),
    /// In place of a combine.
    Release(u32),
}

impl StreamCall {
    /// The microbatch.
    pub fn microbatch(self) -> u32 {
        let (StreamCall::Dispatch(of) | StreamCall::Combine(of) | StreamCall::Release(of)) = self;
        of
    }

    /// The call of its microbatch.
    fn call(self) -> SlotCall {
        match self {
            StreamCall::Dispatch(_) => SlotCall::Dispatch,
            StreamCall::Combine(_) => SlotCall::Combine,
            StreamCall::Release(_) => SlotCall::Release,
        }
    }
}

/// Which streams a rank has. Each is an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// One for all that it does.
    One,
    /// One for each microbatch: actors are those of the first, then those of the next.
    Each,
    /// One for kernels and one for transfers: actors are the first of all ranks, then the second.
    Aside,
}

impl Streams {
    /// All of them.
    pub const ALL: [Streams; 3] = [Streams::One, Streams::Each, Streams::Aside];
}

/// Rules that a caller of streams could break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamBug {
    /// Words that were awaited are not set back.
    NeverBack,
    /// Words are set back when their next call begins.
    BackFirst,
    /// Words are set back behind the signals of the call after theirs.
    BackLate,
    /// A dispatch follows a dispatch, without a combine or release between them.
    Unreleased,
    /// The caller still reads its slots when the combine is over.
    KeepSlots,
    /// The returned rows are summed after the next dispatch.
    SumLate,
    /// All microbatches have the same windows and flags.
    Share,
    /// Kernels aside: the next slots are packed without waiting for the copies of the last ones.
    PackAhead,
    /// Kernels aside: transfers do not wait for kernels.
    NotReady,
    /// Kernels aside: kernels do not wait for transfers.
    NotArrived,
}

impl StreamBug {
    /// All slips.
    pub const ALL: [StreamBug; 10] = [
        StreamBug::NeverBack,
        StreamBug::BackFirst,
        StreamBug::BackLate,
        StreamBug::Unreleased,
        StreamBug::KeepSlots,
        StreamBug::SumLate,
        StreamBug::Share,
        StreamBug::PackAhead,
        StreamBug::NotReady,
        StreamBug::NotArrived,
    ];
}

pub(super) use fold::fold;

pub(super) fn tell(script: &StreamScenario) -> Result<UnrolledProgram, PlanError> {
    let turns = Rc::new(Turns::of(script)?);
    let (ranks, sets) = (script.slots.ranks(), turns.sets);
    let teller = Teller { script, actors: Actor::all(script, sets), turns };
    let calls = (0..script.calls.len()).map(|call| teller.parts(call)).collect::<Result<_, _>>()?;
    Ok(UnrolledProgram {
        ranks,
        actors: teller.actors.len() as u32,
        control_bytes: u64::from(sets) * script.slots.flag_bytes(),
        pool_bytes: u64::from(sets) * script.slots.bytes(),
        calls,
        assumed: Vec::new(),
    })
}

/// What runs by itself.
#[derive(Clone, Copy, Debug)]
enum Actor {
    /// The `nth` stream of a rank.
    Stream { rank: u32, nth: u32 },
    /// The proxy of a microbatch: hears the stream, and puts on rails.
    Out { rank: u32, of: u32 },
    /// On the host-staged path: signals the stream that a rank's rows have come.
    Back { rank: u32, of: u32, from: u32 },
}

impl Actor {
    fn all(script: &StreamScenario, sets: u32) -> Vec<Actor> {
        let ranks = script.slots.ranks();
        let streams = match script.streams {
            Streams::One => 1,
            Streams::Each => sets,
            Streams::Aside => 2,
        };
        let of_all = |count| (0..count).flat_map(move |nth| (0..ranks).map(move |rank| (rank, nth)));
        let mut all: Vec<Actor> = of_all(streams).map(|(rank, nth)| Actor::Stream { rank, nth }).collect();
        let Some((nodes, way)) = script.across else { return all };
        all.extend(of_all(sets).map(|(rank, of)| Actor::Out { rank, of }));
        for (rank, of) in of_all(sets).filter(|_| way == RowPath::HostStaged) {
            let far = (0..ranks).filter(|&from| from < nodes.ranks() && !nodes.same_node(rank, from));
            all.extend(far.map(|from| Actor::Back { rank, of, from }));
        }
        all
    }

    fn rank(self) -> u32 {
        let (Actor::Stream { rank, .. } | Actor::Out { rank, .. } | Actor::Back { rank, .. }) = self;
        rank
    }
}

struct Teller<'a> {
    script: &'a StreamScenario<'a>,
    actors: Vec<Actor>,
    turns: Rc<Turns>,
}
