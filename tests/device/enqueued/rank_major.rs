//! Rows by rank, with their choices beside them: as on the host, to the bit.

use half::{bf16, f16};
use sidelane::dtype::PartialDtype;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;

use super::rank::Case;
use super::training::steps;
use super::{on_devices, seeds};
use crate::support::{sample, tokens};

use super::calls::{on_each_of, rounds, some};

fn across(nodes: &[u32], experts: u32, top_k: u32) -> Case {
    Case { layout: RowLayout::RankMajor, ..Case::across(nodes, experts, top_k) }
}

#[test]
fn rounds_by_rank_are_those_of_the_host() {
    on_devices("enqueued::rank_major::rounds_by_rank_are_those_of_the_host", 8, 51, || {
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        for (nodes, route) in [
            (&[0; 4][..], Route::Direct),
            (&[0, 0, 1, 1], Route::Direct),
            (&[0, 0, 1, 1], Route::Pxn),
            (&[0, 1, 2, 0], Route::Pxn),
        ] {
            let case = Case { route, ..across(nodes, 9, 4) };
            rounds(&case, 3, 1);
            rounds(&Case { align: 8, hidden: 8, ..case.clone() }, 3, 2);
            rounds(&case.clone().dropping(9), 3, 2);
            let case = Case { map: replicated.clone(), align: 2, ..case };
            rounds(&case, 3, 3);
            rounds(&case.dropping(6), 2, 4);
        }
    });
}

#[test]
fn steps_by_rank_are_those_of_the_host() {
    on_devices("enqueued::rank_major::steps_by_rank_are_those_of_the_host", 8, 52, || {
        for (order, wire) in [
            (SumOrder::Expert, PartialDtype::F32),
            (SumOrder::Rank, PartialDtype::F32),
            (SumOrder::Node, PartialDtype::Bf16),
        ] {
            let shapes = [
                (&[0; 3][..], Route::Direct),
                (&[0, 1, 1, 0], Route::Direct),
                (&[0, 0, 1, 1], Route::Pxn),
                (&[0, 1, 2, 0, 1], Route::Pxn),
            ];
            for (nodes, route) in sample(shapes, 2) {
                let case = Case { order, wire, route, align: 2, ..across(nodes, 11, 4) };
                steps::<bf16>(&case, 2, 12);
                steps::<bf16>(&case.dropping(8), 1, 15);
            }
        }
        // Weights of many choices are longer than the rows.
        steps::<f16>(&Case { hidden: 8, ..across(&[0, 1], 12, 10) }, 2, 13);
        steps::<f32>(&across(&[0; 2], 5, 4), 1, 14);
    });
}

#[test]
fn records_go_by_rank_too() {
    on_devices("enqueued::rank_major::records_go_by_rank_too", 8, 53, || {
        for route in Route::ALL {
            let case = Case { route, fp8: true, max_in_flight: 3, ..across(&[0, 0, 1, 1], 8, 3) };
            for case in [case.clone(), case.dropping(9)] {
                on_each_of::<bf16>(&case, |rank, me| rank.step_in_records(me, some(&case, me)));
            }
        }
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_by_rank() {
    for seed in seeds(4) {
        on_devices("enqueued::rank_major::no_seed_of_the_driver_is_seen_by_rank", 3, seed, || {
            for (nodes, route) in [(&[0; 3][..], Route::Direct), (&[0, 1, 0], Route::Pxn)] {
                let case = Case { route, align: 2, ..across(nodes, 6, 3) };
                on_each_of::<bf16>(&case, |rank, me| {
                    for seed in (0..4).map(|round| round * 64 + me) {
                        rank.round(&tokens(seed, some(&case, seed), case.hidden, case.top_k, 6));
                    }
                });
            }
        });
    }
}
