//! Every row of the backward table, bit for bit against its formula.

mod support;

use half::{bf16, f16};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Order};
use sidelane::{Dtype, Element, ExpertParallel};
use support::{To, Tokens, on_ranks, placement, small, tokens};

const HIDDEN: usize = 40;
const TOP_K: usize = 3;
const EXPERTS: u32 = 5;
const COUNTS: [u32; 4] = [6, 0, 9, 2];

#[derive(Clone, Debug)]
struct Case {
    nodes: [u32; 4],
    order: Order,
    align: u32,
    map: ExpertMap,
}

fn cases() -> Vec<Case> {
    let plain = ExpertMap::contiguous(EXPERTS, 4).unwrap();
    let replicated = ExpertMap::from_slots(EXPERTS, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    let mut cases = Vec::new();
    for nodes in [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3]] {
        cases.push(Case { nodes, order: Order::Expert, align: 1, map: plain.clone() });
        cases.push(Case { nodes, order: Order::Rank, align: 8, map: replicated.clone() });
    }
    cases
}

/// Which type a test runs with.
trait Real: Element + Into<f32> + PartialEq + std::fmt::Debug {}
impl<E: Element + Into<f32> + PartialEq + std::fmt::Debug> Real for E {}

/// `<a, b>` as documented: 16 lanes of rounded products, folded by halves.
fn dot<E: Real>(a: &[E], b: &[E]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (column, (&a, &b)) in a.iter().zip(b).enumerate() {
        lanes[column % 16] += a.into() * b.into();
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// What stands in row `row` of rank `rank`: any function of the two, the same for whoever computes it.
fn row_of<E: Real>(rank: usize, row: usize) -> Vec<E>
where
    f32: To<E>,
{
    tokens::<E>((rank * 1000 + row + 7) as u64, 1, HIDDEN, 1, 1).x
}

fn weight_of(rank: usize, row: usize) -> f32 {
    (rank * 100 + row) as f32 * 0.37 - 1.0
}

/// The choices of a token that were not dropped, in summation order: (rank, row there, choice), grouped as they are
/// summed.
fn terms(
    case: &Case,
    rows: &[Vec<support::Origin>],
    ids: &[i32],
    me: usize,
    token: usize,
) -> Vec<Vec<(usize, usize, usize)>> {
    let mut found: Vec<(u32, i32, usize, usize, usize)> = Vec::new();
    for (rank, origins) in rows.iter().enumerate() {
        for (row, origin) in origins.iter().enumerate() {
            if let Some((source, of, choice)) = *origin
                && (source, of) == (me, token)
            {
                let group = if case.order == Order::Rank { rank as u32 } else { 0 };
                found.push((group, ids[choice], rank, row, choice));
            }
        }
    }
    found.sort_unstable();
    let groups = found.chunk_by(|a, b| a.0 == b.0);
    groups.map(|group| group.iter().map(|&(.., rank, row, choice)| (rank, row, choice)).collect()).collect()
}

/// Sums rows in that order from +0, one rounding at the end.
fn sum<E: Real>(groups: &[Vec<(usize, usize, usize)>]) -> Vec<E>
where
    f32: To<E>,
{
    let column = |column: usize| {
        let partial = |group: &Vec<(usize, usize, usize)>| -> f32 {
            group.iter().fold(0.0, |sum, &(rank, row, _)| sum + row_of::<E>(rank, row)[column].into())
        };
        groups.iter().fold(0.0, |sum, group| sum + partial(group)).to()
    };
    (0..HIDDEN).map(column).collect()
}

/// All four rows of the table, in one case.
fn gradients<E: Real>(dtype: Dtype, case: &Case, weighted: bool)
where
    f32: To<E>,
{
    let all: Vec<Tokens<E>> =
        (0..4).map(|rank| tokens(rank as u64 + 40, COUNTS[rank], HIDDEN, TOP_K as u32, EXPERTS)).collect();
    let rows = placement(&all, TOP_K as u32, &case.map, case.align);
    on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).unwrap().expert_map(case.map.clone());
        let builder = builder.top_k(TOP_K as u32).hidden(HIDDEN).dtype(dtype).order(case.order);
        let mut ep = builder.align(case.align).weighted(weighted).build().unwrap();
        let mine = &all[me];
        let routing = Routing::new(TOP_K as u32, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        world.pool().poison(0xff);
        let (_, handle) = ep.dispatch(&mine.x, &routing).unwrap();
        let of_rows: Vec<E> = (0..rows[me].len()).flat_map(|row| row_of::<E>(me, row)).collect();
        let of_weights: Vec<f32> = (0..rows[me].len()).map(|row| weight_of(me, row)).collect();

        world.pool().poison(0xff);
        let (x, weights) = ep.dispatch_backward::<E>(&of_rows, Some(&of_weights), &handle).unwrap();
        let weights = weights.unwrap();
        let mut expected = vec![0.0; mine.ids.len()];
        for token in 0..COUNTS[me] as usize {
            let groups = terms(case, &rows, &mine.ids, me, token);
            assert_eq!(x[token * HIDDEN..][..HIDDEN], sum::<E>(&groups), "token {token}, {case:?}");
            for &(rank, row, choice) in groups.iter().flatten() {
                expected[choice] = weight_of(rank, row);
            }
        }
        assert_eq!(weights, expected, "dropped choices have no gradient");
        let (same, none) = ep.dispatch_backward::<E>(&of_rows, None, &handle).unwrap();
        assert_eq!((same, none), (x, None));

        // Twice: the outputs that weight gradients need are kept for as long as the handle lives.
        let mut y = handle.output().unwrap();
        y.rows_mut::<E>().unwrap().copy_from_slice(&of_rows);
        ep.combine::<E>(y, &handle).unwrap();
        for round in 0..2 {
            world.pool().poison(0xff);
            let sent = |rank: usize, token: usize| row_of::<E>(rank + 10 + round, token);
            let g: Vec<E> = (0..COUNTS[me] as usize).flat_map(|token| sent(me, token)).collect();
            let (landed, weights) = ep.combine_backward(&g, &handle).unwrap();
            let landed = landed.rows::<E>().unwrap();
            assert_eq!(landed.len(), rows[me].len() * HIDDEN);
            for (row, (got, origin)) in landed.chunks_exact(HIDDEN).zip(&rows[me]).enumerate() {
                let Some((source, token, choice)) = *origin else {
                    assert!(
                        got.iter().all(|&g| Into::<f32>::into(g) == 0.0),
                        "pad row {row} has no gradient"
                    );
                    continue;
                };
                let weight = if weighted { all[source].weights[choice] } else { 1.0 };
                let expected: Vec<E> =
                    sent(source, token).iter().map(|&g| (weight * Into::<f32>::into(g)).to()).collect();
                assert_eq!(got, expected, "row {row}, {case:?}");
            }
            assert_eq!(weights.is_some(), weighted);
            let mut expected = vec![0.0; mine.ids.len()];
            for token in 0..COUNTS[me] as usize {
                for (rank, row, choice) in terms(case, &rows, &mine.ids, me, token).concat() {
                    expected[choice] = dot(&row_of::<E>(rank, row), &sent(me, token));
                }
            }
            assert!(weights.is_none_or(|weights| weights == expected), "{case:?}");
        }
        drop(handle);
        group.gather(&[]).unwrap();
        assert_eq!(world.pool().report().used, 0, "what was kept is given back");
    });
}

#[test]
fn gradients_follow_their_formulas_in_f32() {
    for case in cases() {
        gradients::<f32>(Dtype::F32, &case, false);
        gradients::<f32>(Dtype::F32, &case, true);
    }
}

#[test]
fn gradients_follow_their_formulas_in_bf16() {
    for case in cases() {
        gradients::<bf16>(Dtype::Bf16, &case, false);
        gradients::<bf16>(Dtype::Bf16, &case, true);
    }
}

#[test]
fn gradients_follow_their_formulas_in_f16() {
    for case in cases() {
        gradients::<f16>(Dtype::F16, &case, false);
        gradients::<f16>(Dtype::F16, &case, true);
    }
}
