//! Wrong tensors and routings.

use half::{bf16, f16};
use sidelane::Dtype;
use sidelane::error::{CallError, Error, PlanError};
use sidelane::gate::Routing;

use super::{BAD, EXPERTS, HIDDEN, ROOMY, TOP_K, dispatch, everywhere, told};
use crate::support::Tokens;

/// A way to spoil the tokens of a rank that has seven, and the error for it.
type Spoil = (fn(&mut Tokens<bf16>), PlanError);

fn spoils() -> Vec<Spoil> {
    vec![
        (
            |t| t.ids[7] = EXPERTS as i32,
            PlanError::ExpertOutOfRange { token: 2, k: 1, expert: EXPERTS as i32, experts: EXPERTS },
        ),
        (|t| t.ids[20] = -2, PlanError::ExpertOutOfRange { token: 6, k: 2, expert: -2, experts: EXPERTS }),
        (|t| t.ids[9..12].copy_from_slice(&[4, 1, 4]), PlanError::ExpertTwice { token: 3, expert: 4 }),
        (
            |t| {
                t.ids[3] = 5;
                t.weights[3] = f32::NAN;
            },
            PlanError::NanWeight { token: 1, k: 0 },
        ),
        (
            |t| t.x.truncate(6 * HIDDEN),
            PlanError::WrongShape { what: "tokens", seen: 6 * HIDDEN, rows: 7, columns: HIDDEN },
        ),
        (
            |t| *t = crate::support::tokens(1, 65, HIDDEN, TOP_K, EXPERTS),
            PlanError::TooManyTokens { tokens: 65, max: 64 },
        ),
    ]
}

#[test]
fn bad_tokens_are_named_where_they_are_and_refused_everywhere() {
    everywhere(ROOMY, |rank| {
        for ((spoil, expected), in_halves) in spoils().into_iter().zip([false, true].into_iter().cycle()) {
            let mut mine = rank.mine();
            if rank.is_bad() {
                spoil(&mut mine);
            }
            rank.arm();
            let error = dispatch(&mut rank.ep, &mine.x, &super::routing(&mine), in_halves).unwrap_err();
            told(rank, error, expected);
            rank.untouched();
            rank.works();
        }
    });
}

#[test]
fn of_several_refusals_that_of_the_lowest_rank_is_told() {
    everywhere(ROOMY, |rank| {
        for in_halves in [false, true] {
            let mut mine = rank.mine();
            // Rank 1 has no tokens of its own: one too many spoils its routing.
            let me = rank.world.rank();
            let own = match me {
                1 => {
                    mine = crate::support::tokens(1, 65, HIDDEN, TOP_K, EXPERTS);
                    Some(PlanError::TooManyTokens { tokens: 65, max: 64 })
                }
                BAD => {
                    mine.ids[20] = -2;
                    Some(PlanError::ExpertOutOfRange { token: 6, k: 2, expert: -2, experts: EXPERTS })
                }
                _ => None,
            };
            rank.arm();
            let error = dispatch(&mut rank.ep, &mine.x, &super::routing(&mine), in_halves).unwrap_err();
            match own {
                Some(own) => assert_eq!(error, own.into()),
                None => assert!(
                    matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })),
                    "rank {me}: {error:?}"
                ),
            }
            rank.untouched();
            rank.works();
        }
    });
}

#[test]
fn a_routing_of_another_top_k_is_refused() {
    everywhere(ROOMY, |rank| {
        for in_halves in [false, true] {
            let mine = rank.mine();
            let routing = match rank.is_bad() {
                true => Routing::new(1, &mine.ids[..7], &mine.weights[..7]).unwrap(),
                false => super::routing(&mine),
            };
            rank.arm();
            let error = dispatch(&mut rank.ep, &mine.x, &routing, in_halves).unwrap_err();
            let columns = TOP_K as usize;
            told(rank, error, PlanError::WrongShape { what: "routing", seen: 7, rows: 7, columns });
            rank.untouched();
            rank.works();
        }
    });
}

#[test]
fn rows_of_another_type_are_refused() {
    everywhere(ROOMY, |rank| {
        for in_halves in [false, true] {
            let mine = rank.mine();
            let routing = super::routing(&mine);
            rank.arm();
            let result = match rank.is_bad() {
                true => {
                    let x = bytemuck::cast_slice::<bf16, f16>(&mine.x);
                    dispatch(&mut rank.ep, x, &routing, in_halves)
                }
                false => dispatch(&mut rank.ep, &mine.x, &routing, in_halves),
            };
            let (seen, expected) = (Dtype::F16, Dtype::Bf16);
            told(rank, result.unwrap_err(), PlanError::WrongDtype { what: "tokens", seen, expected });
            rank.untouched();
            rank.works();
        }
    });
}

#[test]
fn a_weight_of_a_dropped_choice_may_be_anything() {
    everywhere(ROOMY, |rank| {
        let mut mine = rank.mine();
        for (id, weight) in mine.ids.iter_mut().zip(&mut mine.weights) {
            (*id, *weight) = (-1, f32::NAN);
        }
        let routing = super::routing(&mine);
        let (rows, _) = rank.ep.dispatch(&mine.x, &routing).unwrap();
        assert!(rows.is_empty());
    });
}

#[test]
fn opaque_rows_are_dispatched_but_not_summed() {
    everywhere(ROOMY, |rank| {
        let mut ep = rank.settings().dtype(Dtype::Bytes).hidden(2 * HIDDEN).build().unwrap();
        let mine = rank.mine();
        let (rows, handle) =
            ep.dispatch(bytemuck::cast_slice::<bf16, u8>(&mine.x), &super::routing(&mine)).unwrap();
        let (same, _) = rank.dispatch();
        assert_eq!(rows.rows::<u8>().unwrap(), bytemuck::cast_slice::<bf16, u8>(same.rows().unwrap()));
        let mut y = handle.output().unwrap();
        y.rows_mut::<u8>().unwrap().fill(7);
        drop(same);
        rank.arm();
        let mut out = vec![9u8; mine.x.len() * 2];
        let error = ep.combine_into(y, &handle, &mut out).unwrap_err();
        assert_eq!(error, Error::Plan(PlanError::NoArithmetic { dtype: Dtype::Bytes }));
        assert!(out.iter().all(|&byte| byte == 9));
        rank.untouched();
        assert!(handle.output().unwrap().rows_mut::<u8>().unwrap().iter().all(|&byte| byte == 7));
        drop((rows, handle));
        rank.works();
    });
}
