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
//!
//! Timelines as Chrome trace JSON, which opens in <https://ui.perfetto.dev> and in
//! `chrome://tracing`.
//!
//! ```text
//!   process "rank 1 (node 0)"
//!     thread "calls"      |------------ dispatch ------------|  |------ combine ------|
//!     thread "compute 0"                               |- experts 0 -|     a stream of an overlap
//!     thread "track 0"      |signal entry 0||put rows 0|   |wait landed 0|
//!     thread "track 1"                            |put rows 1|       ^
//!   process "rank 0 (node 0)"                                        | an arrow from a signal to the wait that it ends
//!     thread "track 1"           |put rows 1||signal landed 1|-------+
//! ```
//!
//! Readers take an identifier of 0 for the idle process, and one of a thread for the same thread
//! wherever it comes up: processes count from 1, and no two threads of a trace share a number.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;
use std::{fmt, io};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{NodeInfo, NodeLabel};
use crate::lane::now;
use crate::schedule::{Flag, FlagValue, Op, TrackOp};
use crate::topology::NodeMap;

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
    /// Its operation.
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
    /// The caller's name for it.
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

/// Work of an overlap's stream on one chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpan {
    /// The stream: "compute 0".
    pub stream: String,
    /// Name of the work: "experts".
    pub name: String,
    /// To which chunk.
    pub chunk: u32,
    /// Begin, in nanoseconds of the monotonic clock.
    pub start_ns: u64,
    /// Duration, in nanoseconds.
    pub nanos: u64,
}

/// Operations, calls and spans of one rank, to be shown
/// ([`write_chrome_trace`](Timeline::write_chrome_trace)) or serialized.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Calls, in order.
    #[doc(hidden)]
    pub calls: Vec<TimedCall>,
    /// Nodes of overlaps, in the order in which they ended.
    #[serde(default)]
    #[doc(hidden)]
    pub spans: Vec<NodeSpan>,
    /// Operations, in the order in which they ended.
    #[doc(hidden)]
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
    #[doc(hidden)]
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

impl Timeline {
    /// Writes the timelines of all ranks of a group (`ranks[r]`, placed by `nodes`) as one trace: a
    /// process per rank, a thread for its calls, one per stream of its overlaps and one per track,
    /// and arrows from the signals of a call to the waits in it. Tracks are numbered as in the
    /// schedule: those of a rank's own program, then those of its relay.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_chrome_trace(out: &mut dyn Write, nodes: &NodeMap, ranks: &[Timeline]) -> io::Result<()> {
        let ids = Ids::of(ranks);
        write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let mut comma = "";
        let mut line = |value: Value| {
            let written = write!(out, "{comma}\n{value}");
            comma = ",";
            written
        };
        for (rank, timeline) in (0..).zip(ranks) {
            name_rank(&mut line, &ids, rank, nodes.node_of(rank), timeline)?;
            for call in &timeline.calls {
                line(json!({
                    "ph": "X", "cat": "call", "name": call.name, "pid": Ids::process(rank), "tid": ids.calls(rank),
                    "ts": ids.us(call.start_ns), "dur": call.nanos as f64 / 1e3,
                }))?;
            }
            for span in &timeline.spans {
                line(json!({
                    "ph": "X", "cat": "overlap", "name": format!("{} {}", span.name, span.chunk),
                    "pid": Ids::process(rank), "tid": ids.stream(rank, &span.stream),
                    "ts": ids.us(span.start_ns), "dur": span.nanos as f64 / 1e3, "args": {"chunk": span.chunk},
                }))?;
            }
            for event in &timeline.events {
                line(json!({
                    "ph": "X", "cat": event.kind.name(), "name": event.to_string(),
                    "pid": Ids::process(rank), "tid": ids.track(rank, event.track),
                    "ts": ids.us(event.start_ns), "dur": event.nanos as f64 / 1e3,
                    "args": {"peer": event.peer, "of": event.of, "bytes": event.bytes},
                }))?;
            }
        }
        for (id, arrow) in (1..).zip(arrows(ranks)) {
            for (phase, (rank, event)) in [("s", arrow.signal), ("f", arrow.wait)] {
                // An end must not be earlier than its begin, and lies in the slice that it is bound
                // to.
                let ts = ids.us(event.start_ns.max(arrow.signal.1.start_ns));
                line(json!({
                    "ph": phase, "bp": "e", "id": id, "cat": "flag", "name": event.flag.map(Flag::name), "ts": ts,
                    "pid": Ids::process(rank), "tid": ids.track(rank, event.track),
                }))?;
            }
        }
        writeln!(out, "\n]}}")
    }
}

/// Says how a rank and its threads are called, and in which order they are shown.
fn name_rank(
    line: &mut dyn FnMut(Value) -> io::Result<()>,
    ids: &Ids,
    rank: u32,
    node: u32,
    timeline: &Timeline,
) -> io::Result<()> {
    let pid = Ids::process(rank);
    line(
        json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": format!("rank {rank} (node {node})")}}),
    )?;
    line(json!({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank}}))?;
    let mut tracks: Vec<u32> = timeline.events.iter().map(|event| event.track).collect();
    tracks.sort_unstable();
    tracks.dedup();
    // A track per rank, then one for each rank that is relayed.
    let title = |track: u64| match track.checked_sub(ids.ranks) {
        Some(source) => format!("relay {source}"),
        None => format!("track {track}"),
    };
    let tracks = tracks.into_iter().map(|track| (ids.track(rank, track), title(track.into())));
    let own = |stream: &&String| timeline.spans.iter().any(|span| span.stream == **stream);
    let streams = ids.streams.iter().filter(own).map(|stream| (ids.stream(rank, stream), stream.clone()));
    let threads = [(ids.calls(rank), "calls".to_owned())].into_iter().chain(streams).chain(tracks);
    for (index, (tid, name)) in threads.enumerate() {
        line(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}))?;
        line(
            json!({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}),
        )?;
    }
    Ok(())
}

/// Numbers of processes and threads, and the time that counts as zero.
struct Ids {
    ranks: u64,
    tracks: u64,
    /// Names of streams of overlaps, of all ranks, in their order.
    streams: Vec<String>,
    origin_ns: u64,
}

impl Ids {
    fn of(ranks: &[Timeline]) -> Self {
        let events = || ranks.iter().flat_map(|rank| &rank.events);
        let calls = ranks.iter().flat_map(|rank| &rank.calls);
        let spans = || ranks.iter().flat_map(|rank| &rank.spans);
        let starts = calls.map(|call| call.start_ns).chain(events().map(|event| event.start_ns));
        let starts = starts.chain(spans().map(|span| span.start_ns));
        let streams: BTreeSet<&String> = spans().map(|span| &span.stream).collect();
        Ids {
            streams: streams.into_iter().cloned().collect(),
            ranks: ranks.len() as u64,
            tracks: events().map(|event| u64::from(event.track) + 1).max().unwrap_or(0),
            origin_ns: starts.min().unwrap_or(0),
        }
    }

    fn process(rank: u32) -> u64 {
        u64::from(rank) + 1
    }

    /// The main thread of a process has the number of the process; readers show it first.
    fn calls(&self, rank: u32) -> u64 {
        Self::process(rank)
    }

    fn track(&self, rank: u32, track: u32) -> u64 {
        self.ranks + 1 + u64::from(rank) * self.tracks + u64::from(track)
    }

    /// Behind all tracks.
    fn stream(&self, rank: u32, name: &str) -> u64 {
        let at = self.streams.iter().position(|stream| stream == name).unwrap_or_default();
        let streams = self.streams.len() as u64;
        self.ranks * (1 + self.tracks) + 1 + u64::from(rank) * streams + at as u64
    }

    fn us(&self, ns: u64) -> f64 {
        (ns - self.origin_ns) as f64 / 1e3
    }
}

/// A signal and the wait that it ends: rank and event of both.
struct Arrow<'a> {
    signal: (u32, &'a Event),
    wait: (u32, &'a Event),
}

/// All pairs. In one call a word is raised at most once for each part, so call, word and part name
/// the signal; what ran outside calls, or waited for an earlier one, has no arrow.
fn arrows(ranks: &[Timeline]) -> Vec<Arrow<'_>> {
    let signals: HashMap<_, _> = in_calls(ranks, OpKind::Signal)
        .map(|(call, rank, event)| ((call, event.flag, event.part, event.of, event.peer), (rank, event)))
        .collect();
    in_calls(ranks, OpKind::Wait)
        .filter(|(.., event)| !event.licence)
        .filter_map(|(call, rank, event)| {
            let &signal = signals.get(&(call, event.flag, event.part, event.of, rank))?;
            Some(Arrow { signal, wait: (rank, event) })
        })
        .collect()
}

/// The events of a kind that ran in a call: index of the call, rank, event.
fn in_calls(ranks: &[Timeline], kind: OpKind) -> impl Iterator<Item = (usize, u32, &Event)> {
    (0..).zip(ranks).flat_map(move |(rank, timeline)| {
        let events = timeline.events.iter().filter(move |event| event.kind == kind);
        events.filter_map(move |event| {
            Some((timeline.calls.iter().position(|call| call.holds(event))?, rank, event))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StreamId;
    use crate::exec::{NodeSpan, TimedCall};
    use crate::schedule::OperandId;

    fn event(op: Op) -> Event {
        Event::new(&TrackOp { track: 3, op }, 7, Instant::now())
    }

    #[test]
    fn what_is_beyond_the_bound_is_not_kept_until_the_recorder_is_emptied() {
        let recorder = Recorder::new(2);
        let sum = event(Op::Reduce { operand: OperandId(0) });
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
        let (flag, operand) = (Flag::Landed, OperandId(0));
        let names = [
            Op::Put { to: 1, operand },
            Op::PutRows { to: 2, operand },
            Op::Signal { to: 4, of: 1, flag, level: FlagValue::Call },
            Op::Wait { from: 5, flag: Flag::Read, level: FlagValue::LastReturn },
            Op::Reduce { operand },
        ]
        .map(|op| event(op).to_string());
        assert_eq!(names, ["put 1", "put rows 2", "signal landed 4", "wait read 5", "reduce"]);
    }

    #[test]
    fn a_timeline_survives_the_way_to_another_rank() {
        let recorder = Recorder::new(8);
        recorder.call("combine", || {
            recorder.record(event(Op::Wait { from: 5, flag: Flag::Read, level: FlagValue::LastReturn }));
            recorder.record(event(Op::Reduce { operand: OperandId(0) }));
        });
        let timeline = recorder.take();
        assert!(timeline.events[0].licence && !timeline.events[1].licence);
        let json = serde_json::to_string(&timeline).unwrap();
        assert_eq!(serde_json::from_str::<Timeline>(&json).unwrap(), timeline);
        assert!(serde_json::from_str::<Timeline>(&json.replace("\"read\"", "\"red\"")).is_err());
    }

    fn operation(kind: OpKind, flag: Option<Flag>, peer: u32, start_ns: u64, nanos: u64) -> Event {
        let of = if kind == OpKind::Signal { 0 } else { peer };
        Event { kind, flag, of, part: 0, licence: false, track: peer, peer, start_ns, nanos, bytes: 64 }
    }

    fn call(start_ns: u64) -> TimedCall {
        TimedCall { name: "dispatch".into(), start_ns, nanos: 1000 }
    }

    fn span(stream: &str, start_ns: u64) -> NodeSpan {
        NodeSpan { stream: stream.into(), name: "experts".into(), chunk: 2, start_ns, nanos: 100 }
    }

    /// Rank 0 signals rank 1 while it waits already, and a second time outside the call.
    fn two_ranks() -> [Timeline; 2] {
        let landed = Some(Flag::Landed);
        let late = operation(OpKind::Signal, landed, 1, 9000, 10);
        let put = Event { track: 5, ..operation(OpKind::PutRows, None, 1, 1100, 200) };
        let licence = Event { licence: true, ..operation(OpKind::Wait, Some(Flag::Read), 0, 1110, 10) };
        [
            Timeline {
                calls: vec![call(1000)],
                spans: vec![span("transfer 0", 1050), span("compute 0", 1400)],
                events: vec![put, operation(OpKind::Signal, landed, 1, 1300, 10), late],
            },
            Timeline {
                calls: vec![call(1100)],
                spans: vec![span("compute 0", 1500)],
                events: vec![licence, operation(OpKind::Wait, landed, 0, 1200, 150)],
            },
        ]
    }

    fn trace(ranks: &[Timeline]) -> Vec<Value> {
        let mut text = Vec::new();
        Timeline::write_chrome_trace(&mut text, &NodeMap::from_labels(&["a", "b"]), ranks).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        trace["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn every_call_and_event_is_a_slice_of_its_rank_with_time_peer_and_bytes() {
        let ranks = two_ranks();
        let slices: Vec<Value> = trace(&ranks).into_iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(slices.len(), 10);
        let put = slices.iter().find(|e| e["name"] == "put rows 1").unwrap();
        assert_eq!((&put["pid"], &put["ts"], &put["dur"]), (&json!(1), &json!(0.1), &json!(0.2)));
        assert_eq!(put["args"], json!({"peer": 1, "of": 1, "bytes": 64}));
        let computed = slices.iter().filter(|e| e["name"] == "experts 2" && e["pid"] == 1);
        assert_eq!(computed.map(|e| e["ts"].as_f64().unwrap()).collect::<Vec<_>>(), [0.05, 0.4]);
        let called = slices.iter().filter(|e| e["name"] == "dispatch");
        assert_eq!(called.map(|e| e["pid"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn each_rank_and_thread_has_a_name_and_no_two_threads_share_a_number() {
        let events = trace(&two_ranks());
        let names = |what: &str| -> Vec<(Value, Value)> {
            let named = events.iter().filter(|e| e["name"] == what);
            named.map(|e| (e["tid"].clone(), e["args"]["name"].clone())).collect()
        };
        let processes: Vec<Value> = names("process_name").into_iter().map(|(_, name)| name).collect();
        assert_eq!(processes, ["rank 0 (node 0)", "rank 1 (node 1)"]);
        let threads = names("thread_name");
        let called: Vec<&Value> = threads.iter().map(|(_, name)| name).collect();
        assert_eq!(
            called,
            ["calls", "compute 0", "transfer 0", "track 1", "relay 3", "calls", "compute 0", "track 0"]
        );
        let mut numbers: Vec<u64> = threads.iter().map(|(tid, _)| tid.as_u64().unwrap()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!((numbers.len(), numbers[0]), (8, 1), "all different, and none is 0");
        for slice in events.iter().filter(|e| e["ph"] == "X") {
            assert!(threads.iter().any(|(tid, _)| *tid == slice["tid"]), "{slice}");
        }
    }

    #[test]
    fn an_arrow_leads_from_the_signal_of_a_call_into_the_wait_that_it_ends() {
        let events = trace(&two_ranks());
        let arrow: Vec<&Value> = events.iter().filter(|e| e["cat"] == "flag").collect();
        let [from, to] = arrow.as_slice() else { panic!("{arrow:?}") };
        assert_eq!((&from["ph"], &from["pid"], &from["ts"]), (&json!("s"), &json!(1), &json!(0.3)));
        assert_eq!((&to["ph"], &to["pid"], &to["ts"]), (&json!("f"), &json!(2), &json!(0.3)));
        assert_eq!((&from["id"], &from["name"]), (&to["id"], &to["name"]));
    }

    #[test]
    fn nothing_at_all_is_a_trace_too() {
        assert_eq!(trace(&[Timeline::default(), Timeline::default()]).len(), 8);
    }
}
