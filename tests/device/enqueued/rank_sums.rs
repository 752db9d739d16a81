//! Sums by rank: each rank sums a token's rows before they return, with the bits of the host.

use std::collections::BTreeSet;

use half::bf16;
use sidelane::Element;
use sidelane::dtype::PartialDtype;
use sidelane::ep::Report;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;

use super::calls::{on_each_of, rounds};
use super::rank::{Case, Input};
use super::training::steps;
use super::{on_devices, seeds};
use crate::support::{sample, tokens};

/// Nodes and routes: one node, two of them, and nodes whose ranks are anywhere.
const SHAPES: [(&[u32], Route); 5] = [
    (&[0; 4], Route::Direct),
    (&[0, 1, 1, 0], Route::Direct),
    (&[0, 0, 1, 1], Route::Pxn),
    (&[0, 1, 2, 0, 1], Route::Direct),
    (&[0, 1, 2, 0, 1], Route::Pxn),
];

fn by_rank(nodes: &[u32], route: Route, wire: PartialDtype) -> Case {
    Case { order: SumOrder::Rank, wire, route, ..Case::across(nodes, 11, 4) }
}

#[test]
fn rounds_with_sums_by_rank_are_those_of_the_host() {
    on_devices("enqueued::rank_sums::rounds_with_sums_by_rank_are_those_of_the_host", 8, 81, || {
        for (nodes, route) in SHAPES {
            let case = by_rank(nodes, route, PartialDtype::Bf16);
            rounds(&case, 3, 1);
            rounds(&Case { align: 8, hidden: 8, ..case.clone() }, 2, 2);
            rounds(&Case { weighted: true, ..case.clone() }, 2, 3);
            rounds(&case.dropping(9), 2, 4);
        }
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        for (nodes, route) in SHAPES.into_iter().take(3) {
            let case = by_rank(nodes, route, PartialDtype::Bf16);
            rounds(&Case { map: replicated.clone(), align: 2, ..case }, 2, 6);
        }
    });
}

#[test]
fn steps_with_sums_by_rank_are_those_of_the_host() {
    on_devices("enqueued::rank_sums::steps_with_sums_by_rank_are_those_of_the_host", 8, 82, || {
        for (nodes, route) in sample(SHAPES, 2) {
            let case = by_rank(nodes, route, PartialDtype::Bf16);
            steps::<bf16>(&case, 2, 7);
            steps::<bf16>(&Case { weighted: true, align: 2, ..case.clone() }, 1, 8);
            steps::<f32>(&Case { wire: PartialDtype::F32, weighted: true, ..case }, 1, 9);
        }
        // Slots in any order: experts are added up by their ids, whose f32 sums depend on that.
        let unsorted = [vec![5, 1, 3], vec![4, 2, 0], vec![3, 0, 5], vec![2, 4, 1]];
        let unsorted = ExpertMap::from_slots(6, &unsorted).unwrap();
        for (nodes, route) in SHAPES.into_iter().take(3) {
            let case = Case { map: unsorted.clone(), ..by_rank(nodes, route, PartialDtype::F32) };
            steps::<f32>(&case, 1, 10);
            steps::<f32>(&Case { weighted: true, ..case }, 1, 11);
        }
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_in_sums_by_rank() {
    for seed in seeds(6) {
        let test = "enqueued::rank_sums::no_seed_of_the_driver_is_seen_in_sums_by_rank";
        on_devices(test, 3 + seed as u32 % 3, seed, || {
            for (nodes, route) in [(&[0; 3][..], Route::Direct), (&[0, 1, 0], Route::Pxn)] {
                let case = Case { align: 2, weighted: true, ..by_rank(nodes, route, PartialDtype::Bf16) };
                steps::<bf16>(&case, 3, seed);
            }
        });
    }
}

/// Rows that a rank's tokens have at other ranks: of each choice, and of each rank.
fn rows_elsewhere(case: &Case, me: u32, Input { ids, .. }: &Input<bf16>) -> [u64; 2] {
    let rank_of = |&id: &i32| case.map.slot_for(me, id as u32).map(|slot| case.map.rank_of(slot));
    let (mut of_choices, mut of_ranks) = (0, 0);
    for ids in ids.chunks_exact(case.top_k as usize) {
        let chosen = ids.iter().filter(|&&id| id >= 0);
        let ranks: Vec<u32> = chosen.filter_map(rank_of).filter(|&rank| rank != me).collect();
        of_choices += ranks.len() as u64;
        of_ranks += ranks.into_iter().collect::<BTreeSet<u32>>().len() as u64;
    }
    [of_choices, of_ranks]
}

#[test]
fn a_combine_pulls_one_row_for_each_token_and_rank_and_one_copy_for_each_peer() {
    let test =
        "enqueued::rank_sums::a_combine_pulls_one_row_for_each_token_and_rank_and_one_copy_for_each_peer";
    on_devices(test, 8, 83, || {
        let case = |order, wire, layout| {
            let case = Case::new(4, 16, 6);
            Case { order, wire, layout, max_tokens: 40, ..case }
        };
        let (major, bf16s) = (RowLayout::ExpertMajor, PartialDtype::Bf16);
        for (case, sums) in [
            (case(SumOrder::Rank, bf16s, major), true),
            // Partial sums of another type are longer than rows.
            (case(SumOrder::Rank, PartialDtype::F32, major), false),
            (case(SumOrder::Node, bf16s, major), false),
            (case(SumOrder::Expert, PartialDtype::F32, major), false),
        ] {
            let row_bytes = (case.hidden * bf16::DTYPE.size()) as u64;
            on_each_of::<bf16>(&case, |rank, me| {
                let input = tokens(me, 24 + me as u32, case.hidden, case.top_k, case.map.experts());
                rank.round(&input);
                let Report { enqueued, kernels, .. } = rank.reports.pop().unwrap();
                let [of_choices, of_ranks] = rows_elsewhere(&case, me as u32, &input);
                assert!(of_ranks < of_choices, "some token has two experts at a rank");
                let (rows, expected) = match sums {
                    true => (of_ranks, &["rank_sums_bf16", "sum_choices_bf16"][..]),
                    false => (of_choices, &["sum_choices_bf16"][..]),
                };
                assert_eq!((enqueued.bytes, kernels), (rows * row_bytes, expected.to_vec()), "{case:?}");
                assert!(!sums || enqueued.copies == 3, "a copy from each peer: {}", enqueued.copies);
            });
        }
    });
}
