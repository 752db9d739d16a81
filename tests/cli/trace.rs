//! `sidelane trace` as a user sees it: the operations of every rank, with their times, in a trace
//! that viewers can open.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::program::{assert_words, read, run_with_report, sidelane};

const RANKS: u64 = 3;
const SMALL: &str =
    "trace --ranks-per-node 2,1 --tokens 8 --hidden 64 --experts 6 --top-k 2 --routing uniform";

/// The fields of a slice.
struct Slice {
    name: String,
    rank: u64,
    thread: u64,
    begin: f64,
    end: f64,
    peer: u64,
    /// The rank that a flag speaks of: a relay raises flags of others.
    of: u64,
    bytes: u64,
}

impl Slice {
    fn of(event: &Value) -> Self {
        let (begin, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        Slice {
            name: event["name"].as_str().unwrap().to_owned(),
            rank: event["pid"].as_u64().unwrap() - 1,
            thread: event["tid"].as_u64().unwrap(),
            begin,
            end: begin + length,
            peer: event["args"]["peer"].as_u64().unwrap_or(0),
            of: event["args"]["of"].as_u64().unwrap_or(0),
            bytes: event["args"]["bytes"].as_u64().unwrap_or(0),
        }
    }

    /// In microseconds, as far as they can tell nanoseconds apart.
    fn encloses(&self, other: &Slice) -> bool {
        const ROUNDED: f64 = 1e-6;
        self.rank == other.rank && self.begin <= other.begin + ROUNDED && other.end <= self.end + ROUNDED
    }
}

#[test]
fn trace_holds_both_calls_of_every_rank_on_every_route() {
    for route in ["direct", "pxn"] {
        a_trace_holds_what_every_rank_did(route);
    }
}

fn a_trace_holds_what_every_rank_did(route: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (out, svg) = (folder.path().join("trace.json"), folder.path().join("trace.svg"));
    let mut command = sidelane(&format!("{SMALL} --route {route}"));
    let (ended, sums) = run_with_report(command.arg("--out").arg(&out).arg("--svg").arg(&svg));
    assert_words(&ended.well(), &["bit-exact", "ui.perfetto.dev"]);

    let trace = read(&out);
    let events = trace["traceEvents"].as_array().unwrap();
    let names = |what: &str| -> Vec<&str> {
        events.iter().filter(|e| e["name"] == what).map(|e| e["args"]["name"].as_str().unwrap()).collect()
    };
    assert_eq!(names("process_name"), ["rank 0 (node 0)", "rank 1 (node 0)", "rank 2 (node 1)"]);
    assert_eq!(names("thread_name").iter().filter(|name| **name == "calls").count() as u64, RANKS);

    let of = |calls: bool| events.iter().filter(move |e| e["ph"] == "X" && (e["cat"] == "call") == calls);
    let (calls, operations): (Vec<_>, Vec<_>) =
        (of(true).map(Slice::of).collect(), of(false).map(Slice::of).collect());
    every_call_holds_its_operations(&calls, &operations);
    match route {
        "direct" => every_put_of_rows_and_every_sum_is_there(&operations),
        _ => rows_cross_in_parts_to_the_one_relay_of_the_other_node(&operations),
    }
    arrows_lead_from_signals_to_waits(events, &operations);
    sums_are_those_of_the_slices(&sums, &operations);

    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.trim_end().ends_with("</svg>"));
    assert_words(&picture, &["rank 0", "rank 2", "node 1", "dispatch", "3 on 2 nodes (2 + 1)"]);
}

fn every_call_holds_its_operations(calls: &[Slice], operations: &[Slice]) {
    for rank in 0..RANKS {
        let own: Vec<&Slice> = calls.iter().filter(|call| call.rank == rank).collect();
        let names: Vec<&str> = own.iter().map(|call| call.name.as_str()).collect();
        assert_eq!(names, ["dispatch", "experts", "combine"]);
        assert!(own.windows(2).all(|pair| pair[0].end <= pair[1].begin), "one after another");
    }
    for operation in operations {
        let around: Vec<&str> =
            calls.iter().filter(|call| call.encloses(operation)).map(|call| call.name.as_str()).collect();
        let expected = match operation.name.split(' ').next().unwrap() {
            "reduce" => ["combine"],
            _ if operation.name.starts_with("put rows") => ["dispatch"],
            _ => [*around.first().unwrap_or(&"no call")],
        };
        assert_eq!(around, expected, "{} of rank {}", operation.name, operation.rank);
    }
}

/// How often rows were put, by (from, to).
fn puts_of_rows(operations: &[Slice]) -> BTreeMap<(u64, u64), u32> {
    let mut rows = BTreeMap::new();
    for put in operations.iter().filter(|slice| slice.name.starts_with("put rows ")) {
        assert_eq!(put.name, format!("put rows {}", put.peer));
        *rows.entry((put.rank, put.peer)).or_insert(0) += 1;
    }
    rows
}

fn rows_cross_in_parts_to_the_one_relay_of_the_other_node(operations: &[Slice]) {
    const PARTS: u32 = 4;
    let mut rows = puts_of_rows(operations);
    rows.retain(|&(from, to), _| (from == 2) != (to == 2));
    assert_eq!(rows, BTreeMap::from([((0, 2), PARTS), ((1, 2), PARTS), ((2, 0), PARTS)]));
}

fn every_put_of_rows_and_every_sum_is_there(operations: &[Slice]) {
    let pairs = (0..RANKS).flat_map(|from| (0..RANKS).map(move |to| ((from, to), 2)));
    assert_eq!(
        puts_of_rows(operations),
        pairs.collect(),
        "rows and their weights, from every rank to every rank"
    );
    // 8 tokens of 2 experts and 64 numbers of two bytes each; a weight goes with each row.
    for rank in 0..RANKS {
        let bytes = |name: &str| -> u64 {
            let own = operations.iter().filter(|slice| slice.rank == rank && slice.name.starts_with(name));
            own.map(|slice| slice.bytes).sum()
        };
        assert_eq!((bytes("put rows"), bytes("reduce")), (8 * 2 * (128 + 4), 8 * 2 * 128), "rank {rank}");
    }
}

fn arrows_lead_from_signals_to_waits(events: &[Value], operations: &[Slice]) {
    let mut ends: BTreeMap<u64, Vec<(&str, &Slice)>> = BTreeMap::new();
    for event in events.iter().filter(|e| e["ph"] == "s" || e["ph"] == "f") {
        let (at, thread) = (event["ts"].as_f64().unwrap(), event["tid"].as_u64().unwrap());
        let under = |slice: &&Slice| slice.thread == thread && slice.begin <= at && at <= slice.end;
        let slice = operations.iter().find(under).unwrap_or_else(|| panic!("{event} lies in no slice"));
        ends.entry(event["id"].as_u64().unwrap()).or_default().push((event["name"].as_str().unwrap(), slice));
    }
    let mut waited = BTreeSet::new();
    for arrow in ends.values() {
        let [(flag, signal), (_, wait)] = arrow.as_slice() else { panic!("two ends of an arrow") };
        assert_eq!(signal.name, format!("signal {flag} {}", wait.rank));
        assert_eq!(wait.name, format!("wait {flag} {}", signal.of));
        assert!(signal.begin <= wait.end, "a wait ends after its signal began");
        waited.insert((wait.rank, wait.name.clone(), wait.begin.to_bits()));
    }
    let waits = operations.iter().filter(|slice| slice.name.starts_with("wait "));
    for wait in waits {
        // A relay waits for the rank that it is part of, too.
        assert!(wait.peer < RANKS, "{} of rank {}", wait.name, wait.rank);
        let arrow = waited.contains(&(wait.rank, wait.name.clone(), wait.begin.to_bits()));
        assert_eq!(arrow, !wait.name.starts_with("wait read"), "{} of rank {}", wait.name, wait.rank);
    }
}

fn sums_are_those_of_the_slices(sums: &Value, operations: &[Slice]) {
    assert_eq!(sums["verified"], true);
    assert_eq!(sums["config"]["ranks_per_node"], serde_json::json!([2, 1]));
    for (rank, sum) in (0..).zip(sums["ranks"].as_array().unwrap()) {
        assert_eq!((&sum["rank"], &sum["node"]), (&Value::from(rank), &Value::from(rank / 2)));
        for (kind, name) in
            [("put_rows", "put rows "), ("wait", "wait "), ("signal", "signal "), ("reduce", "reduce")]
        {
            let own = operations.iter().filter(|slice| slice.rank == rank && slice.name.starts_with(name));
            assert_eq!(sum["operations"][kind]["count"], own.count(), "{kind} of rank {rank}");
        }
    }
}
