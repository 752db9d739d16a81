//! The recorder: what a rank did and when, for timelines.
//!
//! ```text
//!   streams    |-------- dispatch 1 ------||-- experts 0 --|                      Recorder::span, by an overlap's executor
//!   caller     |-------- dispatch --------|          |------ combine ------|      Recorder::call, around the call
//!   executor      |put rows 1|s| |wait 1|              |wait 1||- reduce -|       Recorder::record, by the executor
//! ```
//!
//! Times are of the machine's monotonic clock, which all its processes share: timelines of its
//! ranks fit together.

use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::{NodeInfo, NodeLabel};
use crate::lane::now;
use crate::schedule::{Flag, FlagValue, Op, TrackOp};

/// Kinds of operations, as timelines tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// Spans copied to a peer.
    Put,
    /// Rows copied to a peer, gathered on the way.
    PutRows,
    /// A flag raised at a peer.
    Signal,
    /// A flag of a peer awaited.
    Wait,
    /// Rows summed, or weights fetched.
    Reduce,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [OpKind; 5] = [OpKind::Put, OpKind::PutRows, OpKind::Signal, OpKind::Wait, OpKind::Reduce];

    /// Name in timelines.
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Put => "put",
            OpKind::PutRows => "put rows",
            OpKind::Signal => "signal",
            OpKind::Wait => "wait",
            OpKind::Reduce => "reduce",
        }
    }
}

/// One operation as it ran. It is shown by its name: "put rows 3", "wait landed 3", "reduce".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// What it did.
    pub kind: OpKind,
    /// The flag that was raised or awaited.
    #[serde(with = "flag_name")]
    pub flag: Option<Flag>,
    /// The rank that the flag speaks of; what has no flag speaks of its peer.
    pub of: u32,
    /// Which part of the call the flag means: 0 for all of it.
    pub part: u8,
    /// A wait for what peers said after the last return (the licence), not in the running call.
    pub licence: bool,
    /// The track.
    pub track: u32,
    /// The other side, as a position in the group; the track for sums.
    pub peer: u32,
    /// Begin, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// Duration, in nanoseconds.
    pub nanos: u64,
    /// Bytes moved or read.
    pub bytes: u64,
}

impl Event {
    /// The event of an operation that began at `start` and has just ended.
    pub fn new(item: &TrackOp, bytes: u64, start: Instant) -> Self {
        let (kind, peer, of, flag, level) = match item.op {
            Op::Put { to, .. } => (OpKind::Put, to, to, None, FlagValue::Call),
            Op::PutRows { to, .. } => (OpKind::PutRows, to, to, None, FlagValue::Call),
            Op::Signal { to, of, flag, level } => (OpKind::Signal, to, of, Some(flag), level),
            Op::Wait { from, flag, level } => (OpKind::Wait, from, from, Some(flag), level),
            Op::Reduce { .. } => (OpKind::Reduce, item.track, item.track, None, FlagValue::Call),
        };
        let (start_ns, nanos) = since(start);
        Event {
            kind,
            flag,
            of,
            part: if let FlagValue::Part(part) = level { part } else { 0 },
            licence: level == FlagValue::LastReturn,
            track: item.track,
            peer,
            start_ns,
            nanos,
            bytes,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some(flag) = self.flag {
            write!(f, " {}", flag.name())?;
        }
        match self.kind {
            OpKind::Reduce => Ok(()),
            _ => write!(f, " {}", self.peer),
        }
    }
}

/// A call that its caller timed: it encloses the operations that ran in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedCall {
    /// What the caller calls it.
    pub name: String,
    /// Begin, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// Duration, in nanoseconds.
    pub nanos: u64,
}

impl TimedCall {
    /// Whether an operation began in this call.
    pub fn holds(&self, event: &Event) -> bool {
        (self.start_ns..self.start_ns + self.nanos).contains(&event.start_ns)
    }
}

/// What a stream of an overlap did to one chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpan {
    /// The stream: "compute 0".
    pub stream: String,
    /// What it did: "experts".
    pub name: String,
    /// To which chunk.
    pub chunk: u32,
    /// Begin, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// Duration, in nanoseconds.
    pub nanos: u64,
}

/// What one rank did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Calls, in order.
    pub calls: Vec<TimedCall>,
    /// Nodes of overlaps, in the order in which they ended.
    #[serde(default)]
    pub spans: Vec<NodeSpan>,
    /// Operations, in the order in which they ended.
    pub events: Vec<Event>,
}

/// Collects the timeline of one rank, up to a bound: what comes later is not kept, so that a long
/// run costs no memory.
#[derive(Debug)]
pub struct Recorder {
    timeline: Mutex<Timeline>,
    bound: usize,
}

impl Recorder {
    /// Room for `bound` events, reserved now, and as many calls and spans.
    pub fn new(bound: usize) -> Self {
        let timeline = Timeline { events: Vec::with_capacity(bound), ..Timeline::default() };
        Recorder { timeline: Mutex::new(timeline), bound }
    }

    /// Keeps an event, if there is room.
    pub fn record(&self, event: Event) {
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if timeline.events.len() < self.bound {
            timeline.events.push(event);
        }
    }

    /// Does a caller's work and keeps how long it took, if there is room.
    pub fn call<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        let (start_ns, nanos) = since(start);
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if timeline.calls.len() < self.bound {
            timeline.calls.push(TimedCall { name: name.to_owned(), start_ns, nanos });
        }
        done
    }

    /// Keeps what a stream has just done since `start`, if there is room.
    pub fn span(&self, place: NodeInfo, start: Instant) {
        let (start_ns, nanos) = since(start);
        let NodeInfo { work: NodeLabel { name, chunk }, stream } = place;
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if timeline.spans.len() < self.bound {
            timeline.spans.push(NodeSpan {
                stream: stream.to_string(),
                name: name.to_owned(),
                chunk,
                start_ns,
                nanos,
            });
        }
    }

    /// Everything so far; the recorder is empty afterwards, and has its room still.
    pub fn take(&self) -> Timeline {
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = timeline.clone();
        timeline.calls.clear();
        timeline.spans.clear();
        timeline.events.clear();
        taken
    }
}

/// Begin and duration of what has just ended, in nanoseconds.
///
/// An `Instant` is of the monotonic clock but does not say which time it is, so both are read
/// together once: the pair that was read most quickly of several, since a thread may lose its core
/// between the two.
fn since(start: Instant) -> (u64, u64) {
    static ANCHOR: LazyLock<(Instant, u64)> = LazyLock::new(|| {
        let pairs = (0..16).map(|_| {
            let before = Instant::now();
            let ns = now();
            (before.elapsed(), before, ns)
        });
        let (_, instant, ns) = pairs.min().expect("several pairs");
        (instant, ns)
    });
    let nanos = start.elapsed().as_nanos() as u64;
    let (instant, ns) = *ANCHOR;
    let after = start.saturating_duration_since(instant).as_nanos() as u64;
    let before = instant.saturating_duration_since(start).as_nanos() as u64;
    (ns + after - before, nanos)
}

/// Flags travel by their names.
mod flag_name {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::schedule::Flag;

    pub fn serialize<S: Serializer>(flag: &Option<Flag>, to: S) -> Result<S::Ok, S::Error> {
        flag.map(Flag::name).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Flag>, D::Error> {
        let name: Option<String> = Option::deserialize(from)?;
        let flag = |name: String| Flag::ALL.into_iter().find(|flag| flag.name() == name);
        name.map(|name| flag(name).ok_or_else(|| D::Error::custom("a flag that does not exist"))).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StreamId;
    use crate::schedule::OperandId;

    fn event(op: Op) -> Event {
        Event::new(&TrackOp { track: 3, op }, 7, Instant::now())
    }

    #[test]
    fn what_is_beyond_the_bound_is_not_kept_until_the_recorder_is_emptied() {
        let recorder = Recorder::new(2);
        let sum = event(Op::Reduce { slot: OperandId(0) });
        let place = NodeInfo { work: NodeLabel { name: "experts", chunk: 3 }, stream: StreamId::Compute(1) };
        for _ in 0..3 {
            recorder.record(sum);
            recorder.call("call", || ());
            recorder.span(place, Instant::now());
        }
        let taken = recorder.take();
        assert_eq!((taken.events.len(), taken.calls.len(), taken.spans.len()), (2, 2, 2));
        let NodeSpan { stream, name, chunk, .. } = &taken.spans[0];
        assert_eq!((stream.as_str(), name.as_str(), *chunk), ("compute 1", "experts", 3));
        assert_eq!(recorder.take(), Timeline::default());
        recorder.record(sum);
        assert_eq!(recorder.take().events, [sum]);
    }

    #[test]
    fn a_call_holds_the_operations_in_it_and_no_others() {
        let recorder = Recorder::new(8);
        let wait = Op::Wait { from: 1, flag: Flag::Landed, level: FlagValue::Call };
        let before = event(wait);
        let during = recorder.call("dispatch", || event(wait));
        let after = event(wait);
        let call = &recorder.take().calls[0];
        assert_eq!(call.name, "dispatch");
        assert_eq!([before, during, after].map(|event| call.holds(&event)), [false, true, false]);
        assert!(during.start_ns + during.nanos <= call.start_ns + call.nanos);
    }

    #[test]
    fn events_are_named_by_operation_flag_and_peer() {
        let (flag, slot) = (Flag::Landed, OperandId(0));
        let names = [
            Op::Put { to: 1, slot },
            Op::PutRows { to: 2, slot },
            Op::Signal { to: 4, of: 1, flag, level: FlagValue::Call },
            Op::Wait { from: 5, flag: Flag::Read, level: FlagValue::LastReturn },
            Op::Reduce { slot },
        ]
        .map(|op| event(op).to_string());
        assert_eq!(names, ["put 1", "put rows 2", "signal landed 4", "wait read 5", "reduce"]);
    }

    #[test]
    fn a_timeline_survives_the_way_to_another_rank() {
        let recorder = Recorder::new(8);
        recorder.call("combine", || {
            recorder.record(event(Op::Wait { from: 5, flag: Flag::Read, level: FlagValue::LastReturn }));
            recorder.record(event(Op::Reduce { slot: OperandId(0) }));
        });
        let timeline = recorder.take();
        assert!(timeline.events[0].licence && !timeline.events[1].licence);
        let json = serde_json::to_string(&timeline).unwrap();
        assert_eq!(serde_json::from_str::<Timeline>(&json).unwrap(), timeline);
        assert!(serde_json::from_str::<Timeline>(&json.replace("\"read\"", "\"red\"")).is_err());
    }
}
