//! Timelines: what an executor did and when, as Chrome trace JSON (opens in Perfetto or `chrome://tracing`).

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::schedule::{Item, Op};

/// One operation as it ran.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Event {
    /// Index into [`Event::NAMES`].
    pub kind: u8,
    /// The track.
    pub track: u32,
    /// The peer; the rank itself for sums.
    pub peer: u32,
    /// Begin, in nanoseconds of the machine's monotonic clock, which all its processes share.
    pub start_ns: u64,
    /// Duration, in nanoseconds.
    pub nanos: u64,
    /// Bytes moved or read.
    pub bytes: u64,
}

impl Event {
    /// Names of operations, by kind.
    pub const NAMES: [&'static str; 5] = ["put", "put rows", "signal", "wait", "reduce"];

    /// The event of an operation that began at `start` and has just ended.
    pub fn new(item: &Item, bytes: u64, start: Instant) -> Self {
        let (kind, peer) = match item.op {
            Op::Put { to, .. } => (0, to),
            Op::PutRows { to, .. } => (1, to),
            Op::Signal { to, .. } => (2, to),
            Op::Wait { from, .. } => (3, from),
            Op::Reduce { .. } => (4, item.track),
        };
        let nanos = start.elapsed().as_nanos() as u64;
        Event { kind, track: item.track, peer, start_ns: monotonic_ns() - nanos, nanos, bytes }
    }
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Collects the events of one rank, up to a bound: what comes later is not kept, so that a long run costs no memory.
#[derive(Debug)]
pub struct Recorder {
    events: Mutex<Vec<Event>>,
    bound: usize,
}

impl Recorder {
    /// Room for `bound` events, reserved now.
    pub fn new(bound: usize) -> Self {
        Recorder { events: Mutex::new(Vec::with_capacity(bound)), bound }
    }

    /// Keeps an event, if there is room.
    pub fn record(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < self.bound {
            events.push(event);
        }
    }

    /// All events so far; the recorder is empty afterwards.
    pub fn take(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = events.clone();
        events.clear();
        taken
    }
}

/// Writes the events of all ranks (`ranks[r]`) as one Chrome trace: a process per rank, a thread per track.
///
/// # Errors
/// Whatever the writer reports.
pub fn write_chrome_trace(out: &mut dyn Write, ranks: &[Vec<Event>]) -> std::io::Result<()> {
    let origin = ranks.iter().flatten().map(|e| e.start_ns).min().unwrap_or(0);
    write!(out, "[")?;
    for (rank, events) in ranks.iter().enumerate() {
        let comma = if rank == 0 { "" } else { "," };
        let name = serde_json::json!({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": format!("rank {rank}")}});
        write!(out, "{comma}\n{name}")?;
        for event in events {
            let name = Event::NAMES.get(usize::from(event.kind)).copied().unwrap_or("?");
            let line = serde_json::json!({
                "ph": "X", "pid": rank, "tid": event.track, "name": format!("{name} {}", event.peer),
                "ts": (event.start_ns - origin) as f64 / 1e3, "dur": event.nanos as f64 / 1e3,
                "args": {"peer": event.peer, "bytes": event.bytes},
            });
            write!(out, ",\n{line}")?;
        }
    }
    writeln!(out, "\n]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_json_with_every_event_of_every_rank() {
        let recorder = Recorder::new(2);
        let item = Item { track: 3, op: Op::PutRows { to: 3, slot: crate::schedule::Slot(0) } };
        for bytes in [10, 20, 30] {
            recorder.record(Event::new(&item, bytes, Instant::now()));
        }
        let events = recorder.take();
        assert_eq!(events.len(), 2, "the bound holds");
        assert!(recorder.take().is_empty());
        let mut text = Vec::new();
        write_chrome_trace(&mut text, &[events, Vec::new()]).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let rows: Vec<_> = trace.as_array().unwrap().iter().filter(|e| e["name"] == "put rows 3").collect();
        assert_eq!(rows.iter().map(|e| e["args"]["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), [10, 20]);
    }
}
