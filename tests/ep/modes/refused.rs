//! Calls without room are refused on every rank, move no rows, and can be made again; and invalid
//! settings.

use half::bf16;
use sidelane::ep::ExpertParallelBuilder;
use sidelane::error::{CallError, Error, PlanError};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout};
use sidelane::{Dtype, ExpertParallel};

use super::{groups, loads};
use crate::support::layer::{Expected, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};

#[test]
fn a_call_over_budget_gets_the_same_error_everywhere_and_works_with_the_rows_required() {
    for group in groups() {
        let (mean, most) = loads(&group);
        let budget = |rows| ReceiveMode::Budget { rows, overflow: Overflow::Error };
        for rows in [0, mean, most - 1] {
            let narrow = Expected::<bf16>::new(&Case { mode: budget(rows), ..group.clone() });
            // The error suffices to make the call again, until the last rank that needs more has
            // been named.
            let Some((rank, required)) = narrow.seen.over_budget(&narrow.case) else { continue };
            let wide = Expected::<bf16>::new(&Case { mode: budget(most), ..group.clone() });
            on_ranks(&group.nodes, &tiny(), |world| {
                let (group, me) = (world.all().unwrap(), world.rank() as usize);
                let mut ep = narrow.layer(&group);
                for call in 1..=3 {
                    let routing = narrow.routing(me);
                    let error = match call {
                        1 => ep.start_dispatch(&narrow.all[me].x, &routing).unwrap().finish().unwrap_err(),
                        _ => ep.dispatch(&narrow.all[me].x, &routing).unwrap_err(),
                    };
                    let expected = CallError::OverBudget { call, rank, required, budget: rows };
                    assert!(matches!(&error, Error::Call(e) if *e == expected), "{error}, not {expected}");
                    nothing_is_held(&world, &group);
                }
                let mut replay = wide.layer(&group);
                let (rows, handle) = wide.dispatch(&mut replay);
                wide.arrived(me, &rows, &handle);
                drop(rows);
                wide.returns(&world, &mut replay, &handle, 0);
                drop(handle);
                // Less fits.
                let none = Case { counts: vec![0; narrow.case.counts.len()], ..narrow.case.clone() };
                let none = Expected::<bf16>::new(&none);
                let (rows, handle) = none.dispatch(&mut ep);
                none.arrived(me, &rows, &handle);
                drop((rows, handle));
                nothing_is_held(&world, &group);
            });
        }
    }
}

#[test]
fn a_rank_whose_slots_are_full_says_so_and_the_others_name_it() {
    for group in groups() {
        let slots = group.max_tokens() / 2;
        let mode = ReceiveMode::Slots { rows: slots, overflow: Overflow::Error };
        let full = Expected::<bf16>::new(&Case { mode, ..group.clone() });
        // A rank with more rows for a bin than slots: both overflow policies count the same excess
        // rows.
        let drops = ReceiveMode::Slots { rows: slots, overflow: Overflow::Drop };
        let drops = Expected::<bf16>::new(&Case { mode: drops, ..group.clone() });
        let bad: Vec<u32> = (0..)
            .zip(&drops.seen.dropped)
            .filter(|(_, dropped)| dropped.contains(&true))
            .map(|(r, _)| r)
            .collect();
        let Some(&first) = bad.first() else { continue };
        on_ranks(&group.nodes, &tiny(), |world| {
            let (group, me) = (world.all().unwrap(), world.rank() as usize);
            let mut ep = full.layer(&group);
            for call in 1..=3 {
                let routing = full.routing(me);
                let error = match call {
                    1 => ep.start_dispatch(&full.all[me].x, &routing).unwrap().finish().unwrap_err(),
                    _ => ep.dispatch(&full.all[me].x, &routing).unwrap_err(),
                };
                match error {
                    Error::Plan(PlanError::SlotsFull { rows, slots: said, .. }) => {
                        assert!(bad.contains(&world.rank()) && rows > slots && said == slots);
                    }
                    Error::Call(CallError::PeerRefused { call: number, peer }) => {
                        assert!(!bad.contains(&world.rank()));
                        assert_eq!((number, peer), (call, first));
                    }
                    other => panic!("{other}"),
                }
                nothing_is_held(&world, &group);
            }
            // As many tokens as there are slots always fit.
            let counts = full.case.counts.iter().map(|&count| count.min(slots)).collect();
            let fewer = Expected::<bf16>::new(&Case { counts, ..full.case.clone() });
            let (rows, handle) = fewer.dispatch(&mut ep);
            fewer.arrived(me, &rows, &handle);
            drop(rows);
            fewer.returns(&world, &mut ep, &handle, 0);
            drop(handle);
            nothing_is_held(&world, &group);
        });
    }
}

/// Choices of one rank of three, and of the others.
fn odd<T>(rank: u32, one: T, other: T) -> T {
    if rank == 1 { one } else { other }
}

/// What building says on each of three ranks.
fn built(
    settings: impl Fn(ExpertParallelBuilder<'_>, u32) -> ExpertParallelBuilder<'_> + Sync,
) -> Vec<Option<Error>> {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(4).top_k(2).hidden(8).max_tokens(16);
        settings(builder.dtype(Dtype::Bf16), world.rank()).build().err()
    })
}

#[test]
fn settings_that_cannot_be_used_are_refused() {
    let refused = |parameter, errors: Vec<Option<Error>>| {
        for error in errors {
            match error {
                Some(Error::Plan(PlanError::BadParameter { parameter: said, .. })) => {
                    assert_eq!(said, parameter)
                }
                other => panic!("{parameter}: {other:?}"),
            }
        }
    };
    let slots = |rows| ReceiveMode::Slots { rows, overflow: Overflow::Drop };
    refused("slots", built(|builder, _| builder.mode(slots(0))));
    refused("slots", built(|builder, _| builder.mode(slots(u32::MAX / 3))));
    refused("slots", built(|builder, _| builder.mode(slots(1 << 20)).align(1 << 31)));
    refused("weighted", built(|builder, _| builder.layout(RowLayout::RankMajor).weighted(true)));
    let budget = |rows| ReceiveMode::Budget { rows, overflow: Overflow::Error };
    assert!(built(|builder, _| builder.mode(budget(0))).iter().all(Option::is_none));
    assert!(built(|builder, _| builder.mode(budget(u32::MAX))).iter().all(Option::is_none));
}

#[test]
fn ranks_that_choose_different_modes_are_told() {
    let differ = |what: &str, errors: Vec<Option<Error>>| {
        for error in errors {
            match error {
                Some(Error::Call(CallError::ConfigsDiffer { what: said, .. })) => assert_eq!(said, what),
                other => panic!("{what}: {other:?}"),
            }
        }
    };
    let (error, drop) = (Overflow::Error, Overflow::Drop);
    let budget = |rows, overflow| ReceiveMode::Budget { rows, overflow };
    let slots = |rows, overflow| ReceiveMode::Slots { rows, overflow };
    differ("mode", built(|b, rank| b.mode(odd(rank, ReceiveMode::Exact, budget(9, drop)))));
    differ("mode", built(|b, rank| b.mode(odd(rank, slots(9, drop), budget(9, drop)))));
    differ("mode", built(|b, rank| b.mode(odd(rank, slots(9, drop), slots(9, error)))));
    differ("mode", built(|b, rank| b.mode(odd(rank, budget(9, drop), budget(9, error)))));
    differ("rows of the mode", built(|b, rank| b.mode(odd(rank, budget(9, drop), budget(8, drop)))));
    differ("layout", built(|b, rank| b.layout(odd(rank, RowLayout::ExpertMajor, RowLayout::RankMajor))));
}
