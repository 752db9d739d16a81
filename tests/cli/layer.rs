//! `sidelane layer` as a user sees it: lines, files and refusals. Figures are checked only for
//! consistency.

use serde_json::Value;

use crate::program::{assert_words, read, run, run_with_report, sidelane};

const SMALL: &str =
    "layer --tokens 48 --hidden 64 --ffn 32 --experts 6 --top-k 2 --token-chunks 5 --rounds 2 --backward";

#[test]
fn overlapped_steps_have_bits_of_sequential_ones_on_every_lane() {
    for (shape, lane, emulated) in [
        ("--link 64M/200", "emulated", true),
        ("--link even", "emulated", true),
        ("--link none --ranks-per-node 1,2", "loopback", false),
        ("--nodes 1 --ranks-per-node 2", "shm", false),
        ("--net tcp", "tcp", false),
    ] {
        let (ended, report) = run_with_report(&mut sidelane(&format!("{SMALL} {shape}")));
        let lane = format!("lane      {lane}");
        assert_words(&ended.well(), &[&lane, "the same bits in turn and overlapped"]);
        assert_eq!(report["verified"], true, "{shape}");
        assert_eq!(!report["config"]["emulated_link"].is_null(), emulated, "{shape}");
        for direction in ["forward", "backward"] {
            let of = |key: &str| report[direction][key].as_f64().unwrap();
            let shorter = of("experts_us").min(of("transfers_us"));
            let hidden = (of("sequential_us") - of("overlapped_us")) / shorter;
            assert!((of("hidden_share") - hidden).abs() < 1e-9, "{shape}: {}", report[direction]);
        }
    }
}

/// Rank, begin and end of what bears a name in the trace of a step.
type Spans = Vec<(Value, f64, f64)>;

/// The transfers and the experts of a step.
fn traced(options: &str) -> (Spans, Spans) {
    let trace = tempfile::NamedTempFile::new().unwrap();
    run(sidelane(&format!("{SMALL} {options} --trace-out")).arg(trace.path())).well();
    let events = read(trace.path());
    let events = events["traceEvents"].as_array().unwrap();
    let spans = |name: &str| -> Spans {
        let named = |event: &&Value| {
            event["ph"] == "X" && event["name"].as_str().is_some_and(|seen| seen.starts_with(name))
        };
        let of = |event: &Value, key: &str| event[key].as_f64().unwrap();
        let span =
            |event: &Value| (event["pid"].clone(), of(event, "ts"), of(event, "ts") + of(event, "dur"));
        let spans: Spans = events.iter().filter(named).map(span).collect();
        // Two ranks, five chunks.
        assert!(spans.len() >= 10, "{name}: {} of {}", spans.len(), events.len());
        spans
    };
    ([spans("dispatch"), spans("combine")].concat(), spans("experts"))
}

/// Number of spans that overlap in part with one of the others.
fn beside(spans: &Spans, others: &Spans) -> usize {
    let meets = |(rank, begin, end): &(Value, f64, f64)| {
        let meets = |(other, from, to): &&(Value, f64, f64)| other == rank && from < end && begin < to;
        // Not with itself.
        others.iter().filter(meets).any(|(_, from, to)| (from, to) != (begin, end))
    };
    spans.iter().filter(|span| meets(span)).count()
}

#[test]
fn a_step_is_written_as_a_trace_with_experts_beside_transfers() {
    let (transfers, experts) = traced("--link 64M/200");
    assert!(beside(&experts, &transfers) > 0, "no transfer beside experts");
}

#[test]
fn as_many_transfers_are_under_way_at_once_as_may_be() {
    // Rows of a chunk are on the wire for some 20 ms.
    let (one_by_one, _) = traced("--link 64K/200 --transfers 1");
    assert_eq!(beside(&one_by_one, &one_by_one), 0);
    let (transfers, _) = traced("--link 64K/200 --transfers 2");
    assert!(beside(&transfers, &transfers) > transfers.len() / 2, "{transfers:?}");
}
