//! Ranks that make different calls, with handles and buffers that are not theirs.

use half::bf16;
use sidelane::error::{CallError, CallKind, Cause, Error, PlanError};

use super::{BAD, HIDDEN, ROOMY, Rank, TOP_K, combine, dispatch, everywhere, repeated, told};
use crate::support::failed;

/// A buffer of outputs with distinguishable contents.
fn fill(handle: &sidelane::ep::Handle) -> (sidelane::ep::ExpertOutput, Vec<bf16>) {
    let mut y = handle.output().unwrap();
    let rows = y.rows_mut::<bf16>().unwrap();
    rows.iter_mut().zip(1u16..).for_each(|(y, i)| *y = bf16::from_bits(0x3f80 + i));
    let copy = rows.to_vec();
    (y, copy)
}

/// After a refusal the handle gives the same buffer out again, as it was.
fn nothing_is_lost(handle: &sidelane::ep::Handle, copy: &[bf16], address: *const bf16) {
    let mut y = handle.output().unwrap();
    let rows = y.rows_mut::<bf16>().unwrap();
    assert_eq!((&*rows, rows.as_ptr()), (copy, address));
}

#[test]
fn one_rank_in_combine_while_the_others_dispatch() {
    everywhere(ROOMY, |rank| {
        for in_halves in [false, true] {
            let mine = rank.mine();
            let (rows, handle) = rank.dispatch();
            let (mut y, copy) = fill(&handle);
            let address = y.rows_mut::<bf16>().unwrap().as_ptr();
            let mut out = mine.x.clone();
            rank.arm();
            let error = match rank.is_bad() {
                true => combine(&mut rank.ep, y, &handle, &mut out, in_halves).unwrap_err(),
                false => dispatch(&mut rank.ep, &mine.x, &super::routing(&mine), in_halves).unwrap_err(),
            };
            assert_eq!(out, mine.x, "a refused call writes nothing");
            let Error::Call(CallError::KindsDiffer { rank: here, peer, mine, theirs, .. }) = error else {
                panic!("{error:?}");
            };
            let (kinds, other) = match rank.is_bad() {
                true => ([CallKind::Combine, CallKind::Dispatch], 0),
                false => ([CallKind::Dispatch, CallKind::Combine], BAD),
            };
            assert_eq!((here, peer, [mine, theirs]), (rank.world.rank(), other, kinds));
            if rank.is_bad() {
                rank.untouched();
                nothing_is_lost(&handle, &copy, address);
            } else {
                rank.group.gather(&[]).unwrap();
                rank.group.gather(&[]).unwrap();
            }
            drop((rows, handle));
            rank.works();
        }
    });
}

#[test]
fn cached_dispatch_along_different_handles() {
    everywhere(ROOMY, |rank| {
        let mine = rank.mine();
        let (_, first) = rank.dispatch();
        let (_, second) = rank.dispatch();
        rank.arm();
        let error =
            rank.ep.dispatch_cached(&mine.x, if rank.is_bad() { &first } else { &second }).unwrap_err();
        let Error::Call(CallError::Disagree { kind, what, peer, mine: here, theirs, .. }) = error else {
            panic!("{error:?}");
        };
        let (other, numbers) = if rank.is_bad() { (0, [1, 2]) } else { (BAD, [2, 1]) };
        assert_eq!((kind, what, peer, [here, theirs]), (CallKind::CachedDispatch, "handle", other, numbers));
        rank.untouched();
        rank.works();
        rank.ep.dispatch_cached(&mine.x, &first).unwrap();
    });
}

#[test]
fn a_handle_of_another_layer() {
    everywhere(ROOMY, |rank| {
        let mut other = rank.settings().build().unwrap();
        let mine = rank.mine();
        let (_, handle) = rank.dispatch();
        let (_, foreign) = other.dispatch(&mine.x, &super::routing(&mine)).unwrap();
        let is_foreign = |error: &Error| matches!(error, Error::Call(CallError::ForeignHandle { .. }));
        let used = if rank.is_bad() { &foreign } else { &handle };
        let (mut y, copy) = fill(used);
        let address = y.rows_mut::<bf16>().unwrap().as_ptr();
        rank.arm();
        let cached = rank.ep.dispatch_cached(&mine.x, used).unwrap_err();
        let combined = rank.ep.combine::<bf16>(y, used).unwrap_err();
        let (y, mut out) = (used.output().unwrap(), mine.x.clone());
        let halved = combine(&mut rank.ep, y, used, &mut out, true).unwrap_err();
        assert_eq!(out, mine.x, "a refused call writes nothing");
        for error in [cached, combined, halved] {
            let refused = matches!(error, Error::Call(CallError::PeerRefused { peer: BAD, .. }));
            assert!(if rank.is_bad() { is_foreign(&error) } else { refused }, "{error:?}");
        }
        rank.untouched();
        nothing_is_lost(used, &copy, address);
        rank.works();
    });
}

#[test]
fn an_output_of_another_handle() {
    everywhere(ROOMY, |rank| {
        let (_, first) = rank.dispatch();
        let (_, second) = rank.dispatch();
        for in_halves in [false, true] {
            let y = if rank.is_bad() { first.output() } else { second.output() };
            let mut out = rank.mine().x;
            let error = combine(&mut rank.ep, y.unwrap(), &second, &mut out, in_halves).unwrap_err();
            told(rank, error, CallError::WrongOutput { seen: 1, expected: 2 });
        }
        rank.works();
    });
}

#[test]
fn a_wrong_number_of_rows_or_tokens_loses_nothing() {
    everywhere(ROOMY, |rank| {
        let (rows, handle) = rank.dispatch();
        let given: Vec<bf16> = rows.to_vec().unwrap();
        let mut out = vec![bf16::MAX; handle.tokens() as usize * HIDDEN];
        let (mut y, copy) = fill(&handle);
        let address = y.rows_mut::<bf16>().unwrap().as_ptr();
        rank.arm();
        for (in_halves, y) in [(false, Some(y)), (true, None)] {
            let error = match rank.is_bad() {
                true => combine(&mut rank.ep, &given[HIDDEN..], &handle, &mut out, in_halves).unwrap_err(),
                false => {
                    let y = y.unwrap_or_else(|| handle.output().unwrap());
                    combine(&mut rank.ep, y, &handle, &mut out, in_halves).unwrap_err()
                }
            };
            let (seen, rows) = (given.len() - HIDDEN * usize::from(rank.is_bad()), handle.rows() as usize);
            told(rank, error, PlanError::WrongShape { what: "expert outputs", seen, rows, columns: HIDDEN });
            if !rank.is_bad() {
                nothing_is_lost(&handle, &copy, address);
            }
        }

        let mut y = handle.output().unwrap();
        y.rows_mut::<bf16>().unwrap().copy_from_slice(&copy);
        let address = y.rows_mut::<bf16>().unwrap().as_ptr();
        let tokens = if rank.is_bad() { &mut out[HIDDEN..] } else { &mut out[..] };
        let error = rank.ep.combine_into(y, &handle, tokens).unwrap_err();
        let (seen, rows) = (6 * HIDDEN, 7);
        told(rank, error, PlanError::WrongShape { what: "combined tokens", seen, rows, columns: HIDDEN });
        nothing_is_lost(&handle, &copy, address);
        assert!(out.iter().all(|&x| x == bf16::MAX), "a refused call writes nothing");
        rank.works();
    });
}

#[test]
fn a_refused_gradient_writes_to_neither_of_its_outputs() {
    everywhere(ROOMY, |rank| {
        let (rows, handle) = rank.dispatch();
        let given: Vec<bf16> = rows.to_vec().unwrap();
        let mut tokens = vec![bf16::MAX; handle.tokens() as usize * HIDDEN];
        let mut weights = vec![f32::MAX; handle.tokens() as usize * TOP_K as usize];
        let landed = handle.rows() as usize;
        let of_rows = vec![1.0; landed + usize::from(rank.is_bad())];
        let error = rank
            .ep
            .dispatch_backward_into(
                &given,
                Some((&of_rows).into()),
                &handle,
                &mut tokens,
                Some((&mut weights).into()),
            )
            .unwrap_err();
        let (what, seen) = ("row weight gradients", landed + 1);
        told(rank, error, PlanError::WrongShape { what, seen, rows: landed, columns: 1 });
        assert!(tokens.iter().all(|&x| x == bf16::MAX) && weights.iter().all(|&w| w == f32::MAX));
        rank.works();
    });
}

#[test]
fn the_gradient_of_a_weighted_combine_that_was_never_made() {
    everywhere(ROOMY, |rank| {
        let mut ep = rank.settings().weighted(true).build().unwrap();
        let mine = rank.mine();
        let (_, handle) = ep.dispatch(&mine.x, &super::routing(&mine)).unwrap();
        let error = ep.combine_backward(&mine.x, &handle).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::NotKept { .. })), "{error:?}");
        drop(handle);
        rank.works();
    });
}

/// Waits until the bad rank has ended the world.
fn ended(rank: &Rank) -> Error {
    let cause = Cause::Cancelled { by: BAD };
    assert_eq!(failed(&rank.world), cause);
    Error::World(cause)
}

#[test]
fn started_dispatch_that_is_dropped_ends_world_for_all() {
    everywhere(ROOMY, |rank| {
        let (mine, bad) = (rank.mine(), rank.is_bad());
        let routing = super::routing(&mine);
        // A rank that is late may find the world dead before it has started.
        if let Ok(started) = rank.ep.start_dispatch(&mine.x, &routing)
            && !bad
        {
            assert!(started.finish().is_err());
        }
        let cancelled = ended(rank);
        assert_eq!(rank.ep.dispatch(&mine.x, &routing).unwrap_err(), cancelled);
    });
}

#[test]
fn a_combine_that_is_started_and_dropped_ends_the_world_for_all() {
    everywhere(ROOMY, |rank| {
        let (rows, handle) = rank.dispatch();
        let (rows, mut out) = (rows.rows::<bf16>().unwrap(), repeated(&rank.mine()));
        rank.group.gather(&[]).unwrap();
        let bad = rank.is_bad();
        // On one node, a rank that has heard all others may read all its rows and finish.
        if let Ok(started) = rank.ep.start_combine(rows, &handle)
            && !bad
        {
            let _ = started.finish(&mut out);
        }
        let cancelled = ended(rank);
        assert_eq!(rank.ep.combine::<bf16>(rows, &handle).unwrap_err(), cancelled);
    });
}

#[test]
fn a_wrong_tensor_for_what_returns_costs_only_its_own_rank() {
    everywhere(ROOMY, |rank| {
        for weighted in [false, true] {
            let mut ep = rank.settings().weighted(weighted).build().unwrap();
            let mut mine = rank.mine();
            mine.weights.fill(1.0);
            let (rows, handle) = ep.dispatch(&mine.x, &super::routing(&mine)).unwrap();
            let mut out = vec![bf16::MAX; mine.x.len()];
            let started = ep.start_combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
            if rank.is_bad() {
                let error = started.finish(&mut out[HIDDEN..]).unwrap_err();
                let (what, seen) = ("combined tokens", 6 * HIDDEN);
                assert_eq!(error, PlanError::WrongShape { what, seen, rows: 7, columns: HIDDEN }.into());
                assert!(out.iter().all(|&x| x == bf16::MAX), "nothing is written to it");
            } else {
                started.finish(&mut out).unwrap();
                assert_eq!(out, repeated(&mine));
            }
            out = ep.combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
            assert_eq!(out, repeated(&mine), "the same layer and handle go on");
            drop((rows, handle, ep));
            rank.works();
        }
    });
}
