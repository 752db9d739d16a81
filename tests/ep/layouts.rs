//! Rank-major rows: one per token and rank, with its choices, one sum of all ranks.

use crate::support::layer::{Expected, bits, play};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};
use half::{bf16, f16};
use sidelane::dtype::PartialDtype;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;

fn cases() -> Vec<Case> {
    let rank_major = |nodes: &[u32], counts: &[u32], experts, top_k| Case {
        layout: RowLayout::RankMajor,
        ..Case::new(nodes, counts, experts, top_k)
    };
    let plain = rank_major(&[0, 0, 0, 0], &[5, 0, 17, 3], 6, 3);
    let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    let uneven = rank_major(&[0, 0, 0, 1, 1, 1, 1, 1], &[33, 9, 0, 1, 4, 2, 30, 8], 19, 6);
    let interleaved = rank_major(&[0, 1, 1, 0, 2, 0, 1], &[9, 2, 30, 0, 5, 8, 1], 9, 5);
    let mut cases = vec![
        rank_major(&[0], &[7], 3, 2),
        Case { nodes: vec![0, 1, 2, 3], ..plain.clone() },
        Case { align: 16, ..plain.clone() },
        Case { counts: vec![0; 4], align: 4, ..plain.clone() },
        // Ranks without experts; every token to every expert.
        rank_major(&[0, 0, 0, 1, 1, 1, 1, 1], &[3, 9, 0, 1, 4, 2, 30, 8], 3, 3),
    ];
    for order in SumOrder::ALL {
        cases.push(Case { order, nodes: vec![0, 1, 0, 1], ..plain.clone() });
        cases.push(Case {
            order,
            map: replicated.clone(),
            nodes: vec![0, 0, 1, 1],
            align: 2,
            ..plain.clone()
        });
        cases.push(Case { order, align: 8, ..uneven.clone() });
        cases.push(Case { order, ..interleaved.clone() });
    }
    let narrow = cases.iter().filter(|case| case.order != SumOrder::Expert).cloned();
    let narrow: Vec<Case> = narrow.map(|case| Case { wire: PartialDtype::Bf16, ..case }).collect();
    cases.extend(narrow);
    cases.iter().flat_map(|case| Route::ALL.map(|route| Case { route, ..case.clone() })).collect()
}

#[test]
fn one_row_per_token_and_rank_goes_out_and_returns_in_bf16() {
    cases().iter().for_each(play::<bf16>);
}

#[test]
fn one_row_per_token_and_rank_goes_out_and_returns_in_f32() {
    cases().iter().for_each(play::<f32>);
}

#[test]
fn one_row_per_token_and_rank_goes_out_and_returns_in_f16() {
    cases().iter().for_each(play::<f16>);
}

/// Tokens whose elements and weights are small whole numbers: their sums are exact, in any order.
fn whole(case: &Case) -> Expected<f32> {
    let mut all = Expected::<f32>::new(case).all.clone();
    for tokens in &mut all {
        tokens.x.iter_mut().for_each(|x| *x = (*x * 8.0).round());
        tokens.weights.iter_mut().for_each(|weight| *weight = (*weight * 8.0).round());
    }
    Expected::of(case, all)
}

/// Result of a weighted combine of experts that scale by their number plus one, as bits.
fn weighted_sums(case: &Case) -> Vec<Vec<u8>> {
    let all = whole(case);
    on_ranks(&case.nodes, &tiny(), |world| {
        let mut ep = all.layer(&world.all().unwrap());
        let (rows, handle) = all.dispatch(&mut ep);
        let ids: Vec<u32> = case.map.slots_of(world.rank()).map(|slot| case.map.expert_of(slot)).collect();
        let mut y = rows.to_vec::<f32>().unwrap();
        match case.layout {
            RowLayout::ExpertMajor => {
                let of_rows = ids.iter().zip(handle.padded_tokens_per_expert());
                let of_rows = of_rows.flat_map(|(&id, &rows)| std::iter::repeat_n(id, rows as usize));
                for (row, id) in y.chunks_exact_mut(case.hidden).zip(of_rows) {
                    row.iter_mut().for_each(|x| *x *= id as f32 + 1.0);
                }
            }
            // The rank of the experts weights and sums their rows.
            RowLayout::RankMajor => {
                let k = case.top_k as usize;
                let choices = handle.row_experts().chunks_exact(k).zip(handle.row_weights().chunks_exact(k));
                for (row, (experts, weights)) in y.chunks_exact_mut(case.hidden).zip(choices) {
                    let chosen = experts.iter().zip(weights).filter(|(expert, _)| **expert >= 0);
                    let scale: f32 = chosen.map(|(&e, weight)| weight * (ids[e as usize] as f32 + 1.0)).sum();
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
            other => unreachable!("{other:?}"),
        }
        bits(&ep.combine::<f32>(&y, &handle).unwrap()).to_vec()
    })
}

#[test]
fn a_layer_gives_the_same_in_either_layout_where_sums_are_exact() {
    for rank_major in cases().into_iter().filter(|case| case.wire == PartialDtype::F32) {
        let expert_major = Case { layout: RowLayout::ExpertMajor, weighted: true, ..rank_major.clone() };
        assert_eq!(weighted_sums(&rank_major), weighted_sums(&expert_major), "{rank_major:?}");
    }
}
