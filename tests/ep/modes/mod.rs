//! Budgets and fixed slots: landed rows, dropped rows, returned rows, in both layouts and on both
//! routes.

mod equal;
mod floor;
mod gate;
mod live;
mod masks;
mod refused;
mod room;

use crate::support::layer::{Expected, nothing_is_held, play};
use crate::support::reference::Case;
use crate::support::{Tokens, on_ranks, sample, tiny};
use half::{bf16, f16};
use sidelane::dtype::{Fp8RowShape, PartialDtype};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;

/// Groups of all shapes, in both layouts, on both routes, aligned and not. Orders go round.
fn groups() -> Vec<Case> {
    let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    let base = [
        Case::new(&[0], &[7], 3, 2),
        Case::new(&[0, 0, 0, 0], &[5, 0, 17, 3], 6, 3),
        Case { map: replicated, ..Case::new(&[0, 1, 0, 1], &[6, 11, 0, 4], 5, 4) },
        Case::new(&[0, 1, 1, 0, 2, 0, 1], &[9, 2, 30, 0, 5, 8, 1], 9, 5),
        Case::new(&[0, 0, 0, 1, 1, 1, 1, 1], &[13, 9, 0, 1, 4, 2, 10, 8], 3, 3),
    ];
    let mut orders = SumOrder::ALL.into_iter().cycle();
    let mut groups = Vec::new();
    for case in base {
        for (layout, route) in RowLayout::ALL.into_iter().flat_map(|l| Route::ALL.map(|r| (l, r))) {
            for align in [1, 8] {
                let order = orders.next().unwrap();
                let wire = if align == 8 && order != SumOrder::Expert {
                    PartialDtype::Bf16
                } else {
                    PartialDtype::F32
                };
                groups.push(Case { layout, route, align, order, wire, ..case.clone() });
            }
        }
    }
    groups
}

/// The case, and where rows can be weighted, that too.
fn weighted_or_not(case: Case) -> Vec<Case> {
    match case.layout {
        RowLayout::ExpertMajor => vec![Case { weighted: true, ..case.clone() }, case],
        RowLayout::RankMajor => vec![case],
        other => unreachable!("{other:?}"),
    }
}

/// Rows that the ranks of a case receive without a budget: the mean, and the most of one rank.
fn loads(case: &Case) -> (u32, u32) {
    let exact = Expected::<f32>::new(&Case { mode: ReceiveMode::Exact, ..case.clone() });
    let required = &exact.seen.required;
    (required.iter().sum::<u32>().div_ceil(required.len() as u32), *required.iter().max().unwrap())
}

fn any_dropped(case: &Case) -> bool {
    Expected::<f32>::new(case).seen.dropped.concat().contains(&true)
}

#[test]
fn rows_beyond_budget_never_land_and_count_as_not_chosen() {
    let (mut dropping, mut plays) = (0, 0);
    for group in sample(groups(), 2) {
        let (mean, most) = loads(&group);
        for rows in [0, mean, mean + mean / 4, u32::MAX] {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
            for case in weighted_or_not(Case { mode, ..group.clone() }) {
                assert!(rows < most || !any_dropped(&case));
                dropping += u32::from(any_dropped(&case));
                plays += 1;
                if case.align == 1 { play::<f32>(&case) } else { play::<bf16>(&case) }
            }
        }
    }
    assert!(dropping > plays / 3, "budgets that bite: {dropping} of {plays}");
}

#[test]
fn fixed_slots_take_what_fits_and_are_zero_elsewhere() {
    let (mut dropping, mut plays) = (0, 0);
    for group in sample(groups(), 2) {
        for rows in [1, 3, group.max_tokens(), group.max_tokens() + 2] {
            let mode = ReceiveMode::Slots { rows, overflow: Overflow::Drop };
            for case in weighted_or_not(Case { mode, ..group.clone() }) {
                assert!(rows < case.max_tokens() || !any_dropped(&case));
                dropping += u32::from(any_dropped(&case));
                plays += 1;
                if case.align == 1 { play::<f16>(&case) } else { play::<bf16>(&case) }
            }
        }
    }
    assert!(dropping > plays / 8, "slots that are too few: {dropping} of {plays}");
}

#[test]
fn rows_that_are_not_summed_land_in_every_mode() {
    for group in groups() {
        let rows = loads(&group).0;
        for mode in [
            ReceiveMode::Exact,
            ReceiveMode::Budget { rows, overflow: Overflow::Drop },
            ReceiveMode::Slots { rows: 3, overflow: Overflow::Drop },
        ] {
            let all =
                Expected::<u8>::new(&Case { mode, hidden: 48, wire: PartialDtype::F32, ..group.clone() });
            on_ranks(&group.nodes, &tiny(), |world| {
                let mut ep = all.layer(&world.all().unwrap());
                for round in 0..2 {
                    world.pool().poison(0xff);
                    let (rows, handle) = all.dispatch(&mut ep);
                    all.arrived(world.rank() as usize, &rows, &handle);
                    world.pool().poison(0xff);
                    all.again(&mut ep, &handle, round);
                }
            });
        }
    }
}

#[test]
fn records_go_out_and_rows_return_in_every_mode() {
    for group in groups().into_iter().step_by(3) {
        let rows = loads(&group).0;
        for mode in [
            ReceiveMode::Exact,
            ReceiveMode::Budget { rows, overflow: Overflow::Drop },
            ReceiveMode::Slots { rows: 3, overflow: Overflow::Drop },
        ] {
            for case in weighted_or_not(Case { mode, hidden: 128, ..group.clone() }) {
                let rows = Expected::<bf16>::new(&case);
                let record = Fp8RowShape::new(case.hidden as u32).bytes();
                on_ranks(&case.nodes, &tiny(), |world| {
                    let (group, me) = (world.all().unwrap(), world.rank() as usize);
                    let mut ep = rows.builder(&group).fp8(true).build().unwrap();
                    let mut records: Vec<Tokens<u8>> = Vec::new();
                    for Tokens { x, ids, weights } in rows.all.clone() {
                        let mut of_x = Vec::new();
                        ep.quantize(&x, &mut of_x).unwrap();
                        records.push(Tokens { x: of_x, ids, weights });
                    }
                    let records = Expected::of(&Case { hidden: record, ..case.clone() }, records);
                    for round in 0..3 {
                        world.pool().poison(0xff);
                        let (landed, handle) = records.dispatch(&mut ep);
                        records.arrived(me, &landed, &handle);
                        records.again(&mut ep, &handle, round);
                        rows.returns(&world, &mut ep, &handle, round);
                    }
                    nothing_is_held(&world, &group);
                });
            }
        }
    }
}
