//! A whole layer, forward and backward, in one mode and in another: the same bits.

use half::bf16;
use sidelane::ep::Handle;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout};
use sidelane::topology::Route;
use sidelane::{ExpertParallel, Options, World};

use super::{groups, loads, weighted_or_not};
use crate::support::layer::{Expected, bits, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};

/// Results of a layer at its rank that do not depend on the place of rows.
#[derive(Debug, PartialEq)]
pub struct Step {
    out: Vec<u8>,
    of_x: Vec<u8>,
    of_choices: Vec<u8>,
    of_weights: Option<Vec<u8>>,
    per_expert: Vec<i64>,
}

/// What expert `id` makes of an element.
fn expert(x: f32, id: u32) -> f32 {
    x * (id as f32 + 0.5)
}

/// Outputs of this rank's experts for its rows: each its own or, rank-major, the sum of those that
/// the row chose.
fn experts(ep: &ExpertParallel, handle: &Handle, rows: &[bf16]) -> Vec<bf16> {
    let (hidden, k) = (ep.hidden(), ep.top_k() as usize);
    let ids: Vec<u32> =
        ep.expert_map().slots_of(ep.rank()).map(|slot| ep.expert_map().expert_of(slot)).collect();
    if handle.row_experts().is_empty() {
        let of_rows = ids.iter().zip(handle.padded_tokens_per_expert());
        let of_rows = of_rows.flat_map(|(&id, &rows)| std::iter::repeat_n(id, rows as usize));
        let rows = rows.chunks_exact(hidden).zip(of_rows);
        return rows
            .flat_map(|(row, id)| row.iter().map(move |x| bf16::from_f32(expert(x.to_f32(), id))))
            .collect();
    }
    let choices = handle.row_experts().chunks_exact(k).zip(handle.row_weights().chunks_exact(k));
    let of_row = |(row, (local, weights)): (&[bf16], (&[i32], &[f32]))| -> Vec<bf16> {
        let sum = |x: &bf16| {
            let chosen = local.iter().zip(weights).filter(|(local, _)| **local >= 0);
            chosen.fold(0.0, |sum, (&local, weight)| sum + weight * expert(x.to_f32(), ids[local as usize]))
        };
        row.iter().map(|x| bf16::from_f32(sum(x))).collect()
    };
    rows.chunks_exact(hidden).zip(choices).flat_map(of_row).collect()
}

/// Forward and backward, through experts that scale.
fn step(world: &World, ep: &mut ExpertParallel, all: &Expected<bf16>) -> Step {
    let (mine, hidden) = (&all.all[ep.rank() as usize], ep.hidden());
    world.pool().poison(0xff);
    let (rows, handle) = all.dispatch(ep);
    let y = experts(ep, &handle, rows.rows().unwrap());
    world.pool().poison(0xff);
    let out: Vec<bf16> = ep.combine(&y, &handle).unwrap();
    let g: Vec<bf16> = mine.x.iter().rev().copied().collect();
    let (of_y, of_weights) = ep.combine_backward(&g, &handle).unwrap();
    let of_rows = experts(ep, &handle, of_y.rows().unwrap());
    let words = if handle.row_experts().is_empty() { 1 } else { ep.top_k() as usize };
    let words = of_rows.chunks_exact(hidden).flat_map(|row| row[..words].iter().map(|x| x.to_f32()));
    let words: Vec<f32> = words.collect();
    let (of_x, of_choices) = ep.dispatch_backward::<bf16>(&of_rows, Some(&words), &handle).unwrap();
    Step {
        out: bits(&out).to_vec(),
        of_x: bits(&of_x).to_vec(),
        of_choices: bits(&of_choices.unwrap()).to_vec(),
        of_weights: of_weights.map(|weights| bits(&weights).to_vec()),
        per_expert: handle.tokens_per_expert().to_vec(),
    }
}

/// The step of every rank, for these tokens.
pub fn steps(case: &Case, all: &Expected<bf16>) -> Vec<Step> {
    steps_in(&tiny(), case, all)
}

/// The same in worlds with other options.
pub fn steps_in(options: &Options, case: &Case, all: &Expected<bf16>) -> Vec<Step> {
    let expected = Expected::of(case, all.all.clone());
    on_ranks(&case.nodes, options, |world| {
        let group = world.all().unwrap();
        let mut ep = expected.layer(&group);
        let step = step(&world, &mut ep, &expected);
        nothing_is_held(&world, &group);
        step
    })
}

#[test]
fn a_choice_without_room_is_as_good_as_not_made() {
    let mut dropping = 0;
    for group in groups() {
        let rows = loads(&group).0;
        let modes = [
            ReceiveMode::Budget { rows, overflow: Overflow::Drop },
            ReceiveMode::Slots { rows: 2, overflow: Overflow::Drop },
        ];
        for case in modes.into_iter().flat_map(|mode| weighted_or_not(Case { mode, ..group.clone() })) {
            let all = Expected::<bf16>::new(&case);
            let mut without = all.all.clone();
            for (tokens, dropped) in without.iter_mut().zip(&all.seen.dropped) {
                for (id, _) in tokens.ids.iter_mut().zip(dropped).filter(|(_, dropped)| **dropped) {
                    *id = -1;
                    dropping += 1;
                }
            }
            let exact = Case { mode: ReceiveMode::Exact, ..case.clone() };
            assert_eq!(steps(&case, &all), steps(&exact, &Expected::of(&exact, without)), "{case:?}");
        }
    }
    assert!(dropping > 500, "choices without room: {dropping}");
}

#[test]
fn expert_order_has_one_node_bits_for_any_mode_nodes_and_route() {
    let replicated =
        ExpertMap::from_slots(7, &[vec![4, 0], vec![1, 6], vec![2, 4, 3], vec![0, 5], vec![6, 2]]).unwrap();
    let plain = Case::new(&[0; 5], &[9, 0, 21, 3, 6], 7, 4);
    for (layout, map) in RowLayout::ALL.into_iter().flat_map(|l| [(l, &plain.map), (l, &replicated)]) {
        for one in weighted_or_not(Case { layout, map: map.clone(), ..plain.clone() }) {
            let all = Expected::<bf16>::new(&one);
            let expected = steps(&one, &all);
            let modes = [
                ReceiveMode::Exact,
                ReceiveMode::Budget { rows: loads(&one).1, overflow: Overflow::Error },
                ReceiveMode::Slots { rows: one.max_tokens(), overflow: Overflow::Error },
            ];
            for nodes in [[0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [0, 1, 2, 3, 4], [1, 1, 1, 1, 0]] {
                for (mode, route) in modes.into_iter().flat_map(|m| Route::ALL.map(|r| (m, r))) {
                    let case = Case { nodes: nodes.to_vec(), mode, route, ..one.clone() };
                    assert_eq!(steps(&case, &all), expected, "{case:?}");
                }
            }
        }
    }
}
