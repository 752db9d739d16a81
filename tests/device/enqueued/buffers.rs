//! Tokens in memory of the instance's: read in place where they go in runs, packed elsewhere; the
//! rows are the host's.

use half::bf16;
use sidelane::Error;
use sidelane::error::MemoryError;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;

use super::calls::{on_each_of, some};
use super::on_devices;
use super::rank::Case;
use crate::support::tokens;

const SHAPES: [(&[u32], Route); 5] = [
    (&[0; 3], Route::Direct),
    (&[0, 0, 1, 1], Route::Direct),
    (&[0, 1, 2], Route::Direct),
    (&[0, 0, 1, 1], Route::Pxn),
    (&[0, 1, 1], Route::Pxn),
];

#[test]
fn tokens_in_runs_go_as_they_lie() {
    on_devices("enqueued::buffers::tokens_in_runs_go_as_they_lie", 8, 71, || {
        for (nodes, route) in SHAPES {
            let sequence = Case { route, align: 2, max_in_flight: 3, ..Case::across(nodes, 6, 1) };
            let everywhere = Case { layout: RowLayout::RankMajor, top_k: 6, ..sequence.clone() };
            for case in [sequence, everywhere] {
                on_each_of::<bf16>(&case, |rank, me| {
                    for seed in (0..3).map(|round| round * 64 + me) {
                        let input = rank.in_runs(seed, 1 + (seed % 11) as u32);
                        rank.go_from_a_buffer(&input, true);
                    }
                });
            }
        }
    });
}

#[test]
fn scattered_tokens_in_a_buffer_are_packed() {
    on_devices("enqueued::buffers::scattered_tokens_in_a_buffer_are_packed", 8, 72, || {
        for (nodes, route) in SHAPES {
            for layout in RowLayout::ALL {
                let case = Case { route, layout, max_in_flight: 3, ..Case::across(nodes, 6, 3) };
                for case in [case.clone(), case.dropping(10)] {
                    on_each_of::<bf16>(&case, |rank, me| {
                        for seed in (0..3).map(|round| round * 64 + me) {
                            let count = some(&case, seed).max(9);
                            let input = tokens(seed, count, case.hidden, case.top_k, 6);
                            rank.go_from_a_buffer(&input, false);
                        }
                    });
                }
            }
        }
    });
}

#[test]
fn tokens_in_runs_are_packed_at_ranks_that_lose_some() {
    on_devices("enqueued::buffers::tokens_in_runs_are_packed_at_ranks_that_lose_some", 8, 74, || {
        for (nodes, route) in SHAPES {
            let sequence = Case { route, align: 2, max_in_flight: 3, ..Case::across(nodes, 6, 1) };
            let everywhere = Case { layout: RowLayout::RankMajor, top_k: 6, ..sequence.clone() };
            for case in [sequence.dropping(5), everywhere.dropping(9)] {
                on_each_of::<bf16>(&case, |rank, me| {
                    for seed in (0..3).map(|round| round * 64 + me) {
                        let input = rank.in_runs(seed, 1 + (seed % 11) as u32);
                        rank.go_from_a_buffer(&input, true);
                    }
                });
            }
        }
    });
}

#[test]
fn a_buffer_for_which_there_is_no_room_is_refused_here() {
    let test = "enqueued::buffers::a_buffer_for_which_there_is_no_room_is_refused_here";
    on_devices(test, 8, 73, || {
        on_each_of::<bf16>(&Case::new(2, 4, 2), |rank, me| {
            let refused = rank.planned.token_buffer(1 << 24).unwrap_err();
            assert!(matches!(refused, Error::Memory(MemoryError::OutOfSpace { .. })), "{refused}");
            let mut buffer = rank.planned.token_buffer(3).unwrap();
            assert_eq!((buffer.len(), buffer.range().unwrap().len()), (3, 3 * 32));
            assert!(buffer.rows::<bf16>().is_err() && buffer.rows_mut::<bf16>().is_err());
            assert!(rank.host.token_buffer(3).unwrap().range().is_err());
            rank.round(&tokens(me, 5, 16, 2, 4));
        });
    });
}
