//! Refusals while ranks are absent, between the halves of a call: their relays report them.

use half::bf16;
use sidelane::ep::CombineInput;
use sidelane::error::{CallError, Error, PlanError};

use super::{BAD, EXPERTS, HIDDEN, ROOMY, everywhere, repeated, told};

#[test]
fn the_refusal_of_a_dispatch_reaches_all_while_its_rank_is_away() {
    everywhere(ROOMY, |rank| {
        let (mut mine, bad) = (rank.mine(), rank.is_bad());
        if bad {
            mine.ids[7] = EXPERTS as i32;
        }
        let routing = super::routing(&mine);
        rank.arm();
        let started = rank.ep.start_dispatch(&mine.x, &routing).unwrap();
        let error = match bad {
            true => {
                rank.group.gather(b"the others have been told").unwrap();
                started.finish().unwrap_err()
            }
            false => {
                let error = started.finish().unwrap_err();
                rank.group.gather(b"this one, too").unwrap();
                error
            }
        };
        told(
            rank,
            error,
            PlanError::ExpertOutOfRange { token: 2, k: 1, expert: EXPERTS as i32, experts: EXPERTS },
        );
        rank.untouched();
        rank.works();
    });
}

#[test]
fn the_refusal_of_a_combine_reaches_all_while_its_rank_is_away() {
    everywhere(ROOMY, |rank| {
        let (rows, handle) = rank.dispatch();
        let (given, bad): (Vec<bf16>, bool) = (rows.to_vec().unwrap(), rank.is_bad());
        let y = handle.output().unwrap();
        let y: CombineInput = if bad { (&given[HIDDEN..]).into() } else { y.into() };
        let mut out = vec![bf16::MAX; handle.tokens() as usize * HIDDEN];
        rank.arm();
        let started = rank.ep.start_combine(y, &handle).unwrap();
        let error = match bad {
            true => {
                rank.group.gather(b"the others have been told").unwrap();
                started.finish(&mut out).unwrap_err()
            }
            false => {
                let error = started.finish(&mut out).unwrap_err();
                rank.group.gather(b"this one, too").unwrap();
                error
            }
        };
        let (seen, rows) = (given.len() - HIDDEN, handle.rows() as usize);
        told(rank, error, PlanError::WrongShape { what: "expert outputs", seen, rows, columns: HIDDEN });
        assert!(out.iter().all(|&x| x == bf16::MAX), "a refused call writes nothing");
        rank.untouched();
        rank.works();
    });
}

#[test]
fn ranks_that_are_away_hear_of_a_refusal_when_they_come_back() {
    everywhere(ROOMY, |rank| {
        let (mut mine, bad) = (rank.mine(), rank.is_bad());
        if bad {
            mine.ids[7] = -2;
        }
        let routing = super::routing(&mine);
        rank.arm();
        let error = match bad {
            // It has all their words, though none of them is there.
            true => {
                let error = rank.ep.dispatch(&mine.x, &routing).unwrap_err();
                rank.group.gather(b"refused").unwrap();
                error
            }
            false => {
                let started = rank.ep.start_dispatch(&mine.x, &routing).unwrap();
                rank.group.gather(b"away").unwrap();
                started.finish().unwrap_err()
            }
        };
        match bad {
            true => assert!(
                matches!(error, Error::Plan(PlanError::ExpertOutOfRange { expert: -2, .. })),
                "{error:?}"
            ),
            false => {
                assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: BAD, .. })), "{error:?}")
            }
        }
        rank.untouched();
        rank.works();
    });
}

#[test]
fn a_refused_half_costs_no_call_of_another_layer() {
    everywhere(ROOMY, |rank| {
        let mut other = rank.settings().build().unwrap();
        let (mut mine, bad) = (rank.mine(), rank.is_bad());
        let good = rank.mine();
        if bad {
            mine.ids[7] = -2;
        }
        let (of_mine, of_good) = (super::routing(&mine), super::routing(&good));
        let refused = rank.ep.start_dispatch(&mine.x, &of_mine).unwrap();
        let (rows, handle) = other.dispatch(&good.x, &of_good).unwrap();
        let out: Vec<bf16> = other.combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
        assert_eq!(out, repeated(&good));
        assert!(refused.finish().is_err());
        rank.works();
    });
}
