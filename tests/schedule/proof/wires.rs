//! Traffic between nodes: signals between ranks, and their connections.

use std::collections::BTreeSet;

use sidelane_core::schedule::{Flag, Op};
use sidelane_core::topology::{NodeMap, Paths};
use sidelane_verify::unroll::{Call, UnrolledProgram};

use crate::groups::{Group, ROWS, dispatch, ret, rounds, ways};

/// Traffic from rank to rank: the words that a rank signals to another.
fn signals(unrolled: &UnrolledProgram, call: usize) -> Vec<(u32, u32, Flag)> {
    let mut all = Vec::new();
    for part in &unrolled.calls[call] {
        for step in part.scenes.iter().flat_map(|scene| &scene.steps) {
            if let Op::Signal { to, flag, .. } = step.op
                && to != part.rank
            {
                all.push((part.rank, to, flag));
            }
        }
    }
    all
}

#[test]
fn a_rank_hears_once_of_every_neighbor_and_of_every_other_node() {
    let shapes: [&[u32]; 5] = [
        &[0, 0, 0, 0, 1, 1, 1, 1],
        &[0, 0, 0, 1, 1, 1, 1, 1],
        &[0, 1, 0, 1, 0, 1, 0, 1],
        &[0, 1, 2, 0, 1, 0, 0, 1],
        &[0; 8],
    ];
    for (labels, way) in shapes.iter().flat_map(|&labels| ways().map(move |way| (labels, way))) {
        for nodes in [NodeMap::from_labels(labels), NodeMap::from_labels(labels).subset(&[6, 1, 4, 3, 2])] {
            let group = Group::over(nodes, 1, 3).run(way);
            let unrolled = group.unroll(&[dispatch(0), Call::Cached { handle: 0 }, ret(0, ROWS)], None);
            for (call, rank) in (0..3).flat_map(|call| (0..unrolled.ranks).map(move |rank| (call, rank))) {
                let heard =
                    signals(&unrolled, call).iter().filter(|s| (s.1, s.2) == (rank, Flag::Entry)).count();
                let neighbors = group.nodes.members(group.nodes.node_of(rank)).len() - 1;
                assert_eq!(heard, neighbors + group.nodes.nodes() as usize - 1, "{labels:?} {way:?}");
            }
        }
    }
}

#[test]
fn nothing_crosses_but_on_wires() {
    let mixed = [0, 1, 2, 0, 1, 0, 0, 1];
    for (labels, way) in
        [mixed, [0, 0, 0, 1, 1, 1, 1, 1]].iter().flat_map(|l| ways().map(move |way| (l, way)))
    {
        let group = Group::new(labels, 1, 3).run(way);
        let unrolled = group.unroll(&rounds(), None);
        let (mut used, paths) = (BTreeSet::new(), Paths::new(&group.nodes, way.0, 0));
        for part in unrolled.calls.iter().flatten() {
            for step in part.scenes.iter().flat_map(|scene| &scene.steps) {
                let (Op::Put { to, .. } | Op::PutRows { to, .. } | Op::Signal { to, .. }) = step.op else {
                    continue;
                };
                let from = paths.of(part.rank);
                if !from.same_node(to) {
                    assert!(from.needs_connection(to), "{} {}: {} -> {to}", way.0.name(), part.rank, to);
                    used.insert((part.rank.min(to), part.rank.max(to)));
                }
            }
        }
        let pairs = (0..8).flat_map(|a| (0..a).map(move |b| (b, a)));
        let wires: BTreeSet<(u32, u32)> = pairs.filter(|&(a, b)| paths.of(a).needs_connection(b)).collect();
        assert_eq!(used, wires, "each wire has its use");
    }
}
