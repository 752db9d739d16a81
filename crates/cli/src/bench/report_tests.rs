use sidelane::dtype::Wire;
use sidelane::plan::{Order, Overflow, RowLayout};
use sidelane::topology::Route;
use sidelane::world::RailCounters;

use super::super::peers::{PeerPass, PeerReport};
use super::super::room::{Room, RoomMode};
use super::super::row_type::RowType;
use super::*;
use crate::command::Report as _;
use crate::command::tests::assert_page;
use crate::peers::Unavailable;

const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/bench-json.md"));

/// A report in which every key is present.
pub fn sample() -> Report {
    let pass = Pass::of_rounds(
        &[6200.0, 6000.0, 6400.0],
        &[5580.0, 5400.0, 5760.0],
        Volume { landed: 134_217_728, rail: 33_554_432, rail_logical: 67_108_864 },
    );
    let config = Config {
        nodes: 2,
        ranks_per_node: vec![4, 4],
        tokens: 512,
        hidden: 2048,
        dtype: RowType::Bf16,
        top_k: 8,
        experts: 64,
        order: Order::Node,
        wire: Wire::Bf16,
        layout: RowLayout::ExpertMajor,
        room: Room {
            mode: RoomMode::Budget,
            budget: Some(1.25),
            rows: Some(5120),
            overflow: Some(Overflow::Drop),
        },
        route: Route::Pxn,
        spans: false,
        strategy: sidelane::plan::Strategy::Exchange,
        align: 1,
        backward: true,
        routing: "zipf:1.0".parse().unwrap(),
        rounds: 3,
        seed: 0,
    };
    Report {
        crossing: Crossing::new(&config, [8192, 16384, 12288, 8192, 16384, 16384, 16384]),
        config: Conditions { config, machines: 1, cores: 2, huge_pages_granted: false },
        verified: true,
        rows_verified: 32768,
        required_rows: 6000,
        dropped_choices: 880,
        memcpy_gbps: 9.1,
        first: First { dispatch_us: 7300.0, combine_us: 7400.0 },
        lanes: Lanes {
            local: Some("shm".into()),
            rail: Some("loop".into()),
            rail_reason: Some("all nodes are on one machine".into()),
        },
        cards: Some(Cards {
            done: vec![RailCounters { requests: 12, doorbells: 3, packets: 40, ..RailCounters::default() }],
            forecast: vec![RailCounters::default()],
            exact: true,
        }),
        dispatch: pass,
        combine: pass,
        dispatch_backward: Some(pass),
        combine_backward: Some(pass),
        peers: Some(peers()),
    }
}

/// Somebody who ran, and somebody who did not.
fn peers() -> Peers {
    let pass = PeerPass::new(&[34_000.0, 30_000.0, 36_000.0], &[6200.0, 6000.0, 6400.0]);
    let (name, version) = ("mpi".to_owned(), "Open MPI v4".to_owned());
    let ran = vec![PeerReport { name, version, same: true, dispatch: pass, combine: pass }];
    let [name, why, install] = ["gloo", "there is no python3", "pip install torch"].map(str::to_owned);
    Peers { ran, absent: vec![Unavailable { name, why, install }] }
}

#[test]
fn the_document_names_exactly_the_keys_of_the_json() {
    const PASSES: [&str; 4] = ["dispatch", "combine", "dispatch_backward", "combine_backward"];
    assert_page(DOCUMENT, &[sample()], |key| {
        Some(match key.split_once('.') {
            Some((pass, below)) if PASSES.contains(&pass) => format!("PASS.{below}"),
            _ => key.to_owned(),
        })
    });
}

#[test]
fn without_backward_its_keys_are_absent() {
    let report = Report { dispatch_backward: None, combine_backward: None, ..sample() };
    assert!(!report.json().contains("_backward\":"));
    assert_eq!(report.passes().iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["dispatch", "combine"]);
}

#[test]
fn speed_and_share_follow_from_times_and_bytes() {
    let pass =
        Pass::of_rounds(&[200.0; 5], &[100.0; 5], Volume { landed: 2_000_000, rail: 0, rail_logical: 0 });
    assert_eq!((pass.gbps, pass.floor_gbps()), (10.0, 20.0));
    assert_eq!((pass.share_low, pass.share_of_floor, pass.share_high), (0.5, 0.5, 0.5));
    assert_eq!(pass.p99_us, None);
}
