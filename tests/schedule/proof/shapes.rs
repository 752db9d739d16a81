//! Groups of every shape, in every way, layout, mode and order.

use sidelane_core::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane_core::topology::Route;
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::{Call, Relays, TokenPlace};

use super::{proved, titled};
use crate::cases::{cases, sample};
use crate::groups::{
    Group, ROWS, copy, dispatch, enqueued_rounds, gathering_rounds, placements, placements_in_spans, ret,
    rounds, ways,
};

#[test]
fn every_shape_of_group_is_proved() {
    let shapes: [(&str, &[u32]); 12] = [
        ("1", &[0]),
        ("1 x 2", &[0, 0]),
        ("2 x 1", &[0, 1]),
        ("1 x 3", &[0, 0, 0]),
        ("1 x 4", &[0; 4]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("interleaved", &[0, 1, 0, 1]),
        ("3 + 1", &[0, 0, 0, 1]),
        ("4 x 1", &[0, 1, 2, 3]),
        ("1 x 8", &[0; 8]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("8, mixed", &[0, 1, 2, 0, 1, 0, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (seed, way) in (1..).zip(ways()) {
            let group = Group::new(labels, 1 + 3 * (seed as u32 % 2), seed).run(way);
            let name = titled(name, way);
            let proof = proved(&name, &group.unroll(&rounds(), None));
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
        }
    }
}

#[test]
fn every_placement_is_proved_and_run_at_random() {
    let shapes: [(&str, &[u32]); 3] =
        [("2 x 2", &[0, 0, 1, 1]), ("3 + 1", &[0, 0, 1, 0]), ("1 x 3", &[0, 0, 0])];
    for (name, labels) in shapes {
        let all = ways().flat_map(|way| placements().map(move |placement| (way, placement)));
        for (way, placement) in sample(all, 3) {
            let group = Group::new(labels, 2, 5).run(way).placed(placement);
            let unrolled = group.unroll(&rounds(), None);
            let name = format!("{} {placement:?}", titled(name, way));
            proved(&name, &unrolled);
            check(&unrolled, 0..3).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn spans_are_proved_and_run_at_random_in_every_mode_and_order() {
    let shapes: [(&str, &[u32]); 4] = [
        ("2 x 2", &[0, 0, 1, 1]),
        ("3 + 1", &[0, 0, 1, 0]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("3, mixed", &[0, 1, 2, 0, 1]),
    ];
    for (name, labels) in shapes {
        let all = Relays::ALL.iter().flat_map(|r| placements_in_spans().map(move |p| (*r, p)));
        for (relays, placed) in sample(all, 3) {
            let group = Group::new(labels, 2, 5).in_spans(relays, placed);
            let unrolled = group.unroll(&rounds(), None);
            let name = format!("{name} in spans, {relays:?} {placed:?}");
            proved(&name, &unrolled);
            check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn rows_returned_by_copy_engines_are_proved_and_run_at_random() {
    let calls = [
        dispatch(0),
        dispatch(1),
        ret(0, ROWS),
        copy(1, ROWS),
        Call::RefusedDispatch { routing: 1 },
        dispatch(0),
        ret(2, ROWS),
        Call::RefusedReturn { handle: 2 },
        copy(2, ROWS),
        dispatch(1),
        Call::Mixed { routing: 0, handle: 2 },
        ret(3, ROWS),
        dispatch(0),
        ret(4, ROWS),
    ];
    let shapes: [(&str, &[u32]); 8] = [
        ("1", &[0]),
        ("1 x 2", &[0; 2]),
        ("1 x 3", &[0; 3]),
        ("1 x 8", &[0; 8]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("3 x 1", &[0, 1, 2]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("5, mixed", &[0, 1, 2, 0, 1]),
    ];
    let all = shapes.into_iter().flat_map(|shape| Route::ALL.map(|route| (shape, route)));
    for ((name, labels), route) in sample(all, 2) {
        for (align, gpu_direct) in cases([(1, false), (4, false), (1, true), (4, true)], 3) {
            let group = Group::new(labels, align, 5).run((route, Relays::Inline)).pulling();
            let group = if gpu_direct { group.straight() } else { group };
            let unrolled = group.unroll(&calls, None);
            let name = format!("{name} {} by engines, {align}, gpu_direct: {gpu_direct}", route.name());
            let proof = proved(&name, &unrolled);
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
            check(&unrolled, 0..3).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            // The same by callers' threads that run ahead of their streams.
            let group = Group { enqueues: true, ..group };
            let rounds = enqueued_rounds();
            for (calls, read_early) in [(&calls[..], true), (&rounds, true), (&rounds, false)] {
                let group = Group { read_early, ..group.clone() };
                let ahead = format!("{name}, enqueued, peers have read early: {read_early}");
                let unrolled = group.unroll(calls, None);
                proved(&ahead, &unrolled);
                check(&unrolled, 0..3).unwrap_or_else(|fault| panic!("{ahead}: {fault}"));
            }
            // A row stands for several choices: its words go out and return together.
            let by_rank = (RowLayout::RankMajor, ReceiveMode::Exact, SumOrder::Expert);
            let (group_by_rank, ahead) = (group.clone().placed(by_rank), format!("{name}, by rank"));
            let unrolled = group_by_rank.unroll(&enqueued_rounds(), None);
            proved(&ahead, &unrolled);
            check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{ahead}: {fault}"));
            // The host plans, as under a mask, and where tokens may go as they lie.
            for tokens in [TokenPlace::Elsewhere, TokenPlace::InRuns, TokenPlace::Scattered] {
                let group = Group { host_plans: true, tokens, ..group.clone() };
                let name = format!("{name}, planned by the host, tokens {tokens:?}");
                let unrolled = group.unroll(&enqueued_rounds(), None);
                proved(&name, &unrolled);
                check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            }
            let budget = ReceiveMode::Budget { rows: 60, overflow: Overflow::Drop };
            // Each rank sums a token's rows before they return, or each relay those of its node.
            for (mode, order) in [
                (ReceiveMode::Exact, SumOrder::Rank),
                (budget, SumOrder::Rank),
                (ReceiveMode::Exact, SumOrder::Node),
                (budget, SumOrder::Node),
            ] {
                let summed = group.clone().placed((RowLayout::ExpertMajor, mode, order));
                let (unrolled, name) =
                    (summed.unroll(&enqueued_rounds(), None), format!("{name}, sums {order:?}, {mode:?}"));
                proved(&name, &unrolled);
                check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
            }
            let unrolled = group
                .placed((RowLayout::ExpertMajor, budget, SumOrder::Expert))
                .unroll(&enqueued_rounds(), None);
            proved(&format!("{name}, within a budget"), &unrolled);
        }
    }
}

#[test]
fn all_gather_and_reduce_scatter_are_proved_and_run_at_random() {
    let shapes: [(&str, &[u32]); 6] = [
        ("1 x 4", &[0; 4]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("4 x 1", &[0, 1, 2, 3]),
        ("3 + 1", &[0, 0, 1, 0]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("5, mixed", &[0, 1, 2, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (way, order) in
            ways().flat_map(|way| cases(SumOrder::ALL, 2).into_iter().map(move |order| (way, order)))
        {
            let group = Group::new(labels, 1, 5).gathering(way, order);
            let unrolled = group.unroll(&rounds(), None);
            let name = format!("{name} gathered, {order:?}, {}", titled("", way));
            let proof = proved(&name, &unrolled);
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
            check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn dispatches_by_all_gather_are_proved_and_run_at_random() {
    let shapes: [(&str, &[u32]); 4] = [
        ("1 x 3", &[0; 3]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("3 + 1", &[0, 0, 1, 0]),
        ("5, mixed", &[0, 1, 2, 0, 1]),
    ];
    let budget = ReceiveMode::Budget { rows: 9, overflow: Overflow::Drop };
    let placements = [
        (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Expert),
        (RowLayout::RankMajor, budget, SumOrder::Node),
    ];
    for (name, labels) in shapes {
        for (way, &placement) in ways().flat_map(|way| placements.iter().map(move |placed| (way, placed))) {
            let group = Group::new(labels, 4, 5).run(way).placed(placement).by_all_gather();
            let unrolled = group.unroll(&gathering_rounds(), None);
            let name = format!("{name} by all-gather, {placement:?}, {}", titled("", way));
            let proof = proved(&name, &unrolled);
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
            check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}
