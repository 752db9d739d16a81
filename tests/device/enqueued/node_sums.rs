//! Sums by node over relays: each relay sums the rows of its node before they return, with the bits
//! of the host.

use std::collections::BTreeSet;

use half::bf16;
use sidelane::Element;
use sidelane::dtype::PartialDtype;
use sidelane::ep::Report;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::{NodeMap, Paths, Route};

use super::calls::{on_each_of, rounds};
use super::rank::{Case, Input};
use super::training::steps;
use super::{on_devices, seeds};
use crate::support::{sample, tokens};

/// Two nodes of two and of four ranks, nodes of one rank each, and nodes of unlike size.
const NODES: [&[u32]; 5] =
    [&[0, 0, 1, 1], &[0, 0, 0, 0, 1, 1, 1, 1], &[0, 1, 2], &[0, 1, 2, 0, 1], &[0, 0, 0, 1, 0]];

fn by_node(nodes: &[u32], wire: PartialDtype) -> Case {
    Case { order: SumOrder::Node, wire, route: Route::Pxn, ..Case::across(nodes, 11, 4) }
}

#[test]
fn rounds_with_sums_by_node_are_those_of_the_host() {
    on_devices("enqueued::node_sums::rounds_with_sums_by_node_are_those_of_the_host", 8, 91, || {
        for nodes in NODES {
            let case = by_node(nodes, PartialDtype::Bf16);
            rounds(&case, 3, 1);
            rounds(&Case { align: 8, hidden: 8, ..case.clone() }, 2, 2);
            rounds(&Case { weighted: true, ..case.clone() }, 2, 3);
            rounds(&Case { layout: RowLayout::RankMajor, ..case.clone() }, 2, 4);
            rounds(&case.dropping(9), 2, 6);
        }
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        let case = by_node(&[0, 0, 1, 1], PartialDtype::Bf16);
        rounds(&Case { map: replicated, align: 2, ..case }, 2, 7);
        // Ranks 2 and 3 have no experts, so relays sum nothing on the way from their node.
        let idle = ExpertMap::from_slots(4, &[vec![0, 1], vec![2, 3], vec![], vec![]]).unwrap();
        let case = by_node(&[0, 0, 1, 1], PartialDtype::Bf16);
        rounds(&Case { map: idle, ..case }, 2, 8);
    });
}

#[test]
fn sums_that_return_in_chunks_are_those_of_the_host() {
    let test = "enqueued::node_sums::sums_that_return_in_chunks_are_those_of_the_host";
    on_devices(test, 8, 94, || {
        // Half a MiB of rows for each bin makes a chunk.
        let long = |nodes, experts, top_k| {
            let case = Case { route: Route::Pxn, ..Case::across(nodes, experts, top_k) };
            let case = Case { order: SumOrder::Node, wire: PartialDtype::Bf16, ..case };
            Case { hidden: 1 << 15, max_tokens: 64, ..case }
        };
        let by_rank = Case { layout: RowLayout::RankMajor, ..long(&[0, 0, 1, 1], 8, 4) };
        let replicated = ExpertMap::from_slots(3, &[vec![0], vec![1], vec![2], vec![0]]).unwrap();
        let all = [
            by_rank.clone(),
            by_rank.dropping(200),
            Case { weighted: true, align: 4, ..long(&[0, 1, 1, 2], 4, 2) },
            Case { map: replicated, ..long(&[0, 0, 1, 1], 4, 2) },
        ];
        sample(all, 4).iter().for_each(in_chunks);
    });
}

/// A round of as many tokens as ranks may have, of which relays sum several chunks.
fn in_chunks(case: &Case) {
    let nodes = NodeMap::from_labels(&case.nodes);
    on_each_of::<bf16>(case, |rank, me| {
        rank.round(&tokens(me, case.max_tokens, case.hidden, case.top_k, case.map.experts()));
        let Report { enqueued, .. } = rank.reports.pop().unwrap();
        let sources = Paths::new(&nodes, case.route, me as u32).sources().count() as u64;
        assert!(sources == 0 || enqueued.relay_sums > sources, "{enqueued:?} for {sources} sources");
    });
}

#[test]
fn steps_with_sums_by_node_are_those_of_the_host() {
    on_devices("enqueued::node_sums::steps_with_sums_by_node_are_those_of_the_host", 8, 92, || {
        for nodes in sample(NODES, 2) {
            let case = by_node(nodes, PartialDtype::Bf16);
            steps::<bf16>(&case, 2, 9);
            steps::<bf16>(&Case { weighted: true, align: 2, ..case.clone() }, 1, 10);
            steps::<f32>(&Case { wire: PartialDtype::F32, weighted: true, ..case.clone() }, 1, 11);
            // Partials of another type than rows are made at the source.
            steps::<bf16>(&Case { wire: PartialDtype::F32, weighted: true, ..case }, 1, 12);
        }
        // Slots in any order: experts are added up by their ids, whose f32 sums depend on that.
        let unsorted = [vec![5, 1, 3], vec![4, 2, 0], vec![3, 0, 5], vec![2, 4, 1]];
        let map = ExpertMap::from_slots(6, &unsorted).unwrap();
        let case = Case { map, ..by_node(&[0, 0, 1, 1], PartialDtype::F32) };
        steps::<f32>(&case, 1, 13);
        steps::<f32>(&Case { weighted: true, ..case }, 1, 14);
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_in_sums_by_node() {
    for seed in seeds(6) {
        let test = "enqueued::node_sums::no_seed_of_the_driver_is_seen_in_sums_by_node";
        on_devices(test, 3 + seed as u32 % 3, seed, || {
            let case = by_node(&[0, 1, 0, 1], PartialDtype::Bf16);
            steps::<bf16>(&Case { align: 2, weighted: true, ..case }, 3, seed);
        });
    }
}

/// Rows that return to a rank from other nodes: of each choice, and of each node.
fn rows_elsewhere(case: &Case, me: u32, Input { ids, .. }: &Input<bf16>) -> [u64; 2] {
    let node_of = |rank: u32| case.nodes[rank as usize];
    let slot_of = |&id: &i32| case.map.slot_for(me, id as u32);
    let (mut of_choices, mut of_nodes) = (0, 0);
    for ids in ids.chunks_exact(case.top_k as usize) {
        let slots = ids.iter().filter(|&&id| id >= 0).filter_map(slot_of);
        let nodes = slots.map(|slot| node_of(case.map.rank_of(slot)));
        let nodes: Vec<u32> = nodes.filter(|&node| node != node_of(me)).collect();
        of_choices += nodes.len() as u64;
        of_nodes += nodes.into_iter().collect::<BTreeSet<u32>>().len() as u64;
    }
    [of_choices, of_nodes]
}

#[test]
fn one_row_returns_for_each_token_and_other_node() {
    let test = "enqueued::node_sums::one_row_returns_for_each_token_and_other_node";
    on_devices(test, 8, 93, || {
        let case = |order, wire| {
            let nodes = &[0, 0, 0, 0, 1, 1, 1, 1];
            let case = Case { route: Route::Pxn, ..Case::across(nodes, 16, 6) };
            Case { order, wire, max_tokens: 40, ..case }
        };
        for (case, sums) in [
            (case(SumOrder::Node, PartialDtype::Bf16), true),
            (case(SumOrder::Node, PartialDtype::F32), false),
            (case(SumOrder::Expert, PartialDtype::F32), false),
        ] {
            let row_bytes = (case.hidden * bf16::DTYPE.size()) as u64;
            on_each_of::<bf16>(&case, |rank, me| {
                // Every source has the tokens of its peer in the other node, which returns as much
                // as comes back.
                let input = tokens(me % 4, 24, case.hidden, case.top_k, case.map.experts());
                rank.round(&input);
                let Report { enqueued, kernels, .. } = rank.reports.pop().unwrap();
                let source = (me as u32 + 4) % 8;
                let [of_choices, of_nodes] = rows_elsewhere(&case, source, &input);
                assert!(of_nodes < of_choices, "some token has two experts on a node");
                let rows = if sums { of_nodes } else { of_choices };
                assert_eq!(enqueued.staged_out_bytes, rows * row_bytes, "{case:?}");
                let expected = if sums { 2 } else { 1 };
                assert_eq!(kernels, vec!["sum_choices_bf16"; expected], "{case:?}");
            });
        }
    });
}
