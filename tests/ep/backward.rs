//! Every row of the backward table, bit for bit against its formula; and, with sums by expert, the
//! same bits on one node and on many, on every route.

use crate::support::layer::bits;
use crate::support::reference::dot;
use crate::support::{To, Tokens, on_ranks, placement, tiny, tokens};
use half::{bf16, f16};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SumOrder};
use sidelane::topology::{NodeMap, Route};
use sidelane::{Element, ExpertParallel};

const HIDDEN: usize = 40;
const TOP_K: usize = 3;
const EXPERTS: u32 = 5;
const COUNTS: [u32; 5] = [6, 0, 9, 2, 4];
/// One node; two that interleave; a large one and a single rank; each rank alone; uneven ones that
/// interleave.
const NODES: [&[u32]; 5] = [&[0, 0, 0, 0], &[0, 1, 0, 1], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 1, 1, 0, 1]];

#[derive(Clone, Debug)]
struct Case {
    nodes: &'static [u32],
    route: Route,
    order: SumOrder,
    align: u32,
    map: ExpertMap,
    weighted: bool,
}

/// Experts in blocks, and an uneven map with replicas.
fn maps(ranks: usize) -> [ExpertMap; 2] {
    let held = [vec![4, 0], vec![1], vec![2, 4, 3], vec![0], vec![1, 2]];
    let replicated = ExpertMap::from_slots(EXPERTS, &held[..ranks]).unwrap();
    [ExpertMap::contiguous(EXPERTS, ranks as u32).unwrap(), replicated]
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (nodes, route) in NODES.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route))) {
        let [plain, replicated] = maps(nodes.len());
        for weighted in [false, true] {
            let case = Case { nodes, route, order: SumOrder::Expert, align: 1, map: plain.clone(), weighted };
            cases.push(case.clone());
            cases.push(Case { order: SumOrder::Rank, align: 8, map: replicated.clone(), ..case.clone() });
            cases.push(Case { order: SumOrder::Node, align: 3, map: replicated.clone(), ..case });
        }
    }
    cases
}

/// Which type a test runs with.
trait Real: Element + Into<f32> + PartialEq + std::fmt::Debug {}
impl<E: Element + Into<f32> + PartialEq + std::fmt::Debug> Real for E {}

/// Contents of row `row` of rank `rank`: a function of the two, the same on every rank.
fn row_of<E: Real>(rank: usize, row: usize) -> Vec<E>
where
    f32: To<E>,
{
    tokens::<E>((rank * 1000 + row + 7) as u64, 1, HIDDEN, 1, 1).x
}

fn weight_of(rank: usize, row: usize) -> f32 {
    (rank * 100 + row) as f32 * 0.37 - 1.0
}

/// The choices of a token that were not dropped, in summation order: (rank, row there, choice),
/// grouped as they are summed.
fn terms(
    case: &Case,
    rows: &[Vec<crate::support::Origin>],
    ids: &[i32],
    me: usize,
    token: usize,
) -> Vec<Vec<(usize, usize, usize)>> {
    let nodes = NodeMap::from_labels(case.nodes);
    let mut found: Vec<([u32; 2], i32, usize, usize, usize)> = Vec::new();
    for (rank, origins) in rows.iter().enumerate() {
        for (row, origin) in origins.iter().enumerate() {
            if let Some((source, of, choice)) = *origin
                && (source, of) == (me, token)
            {
                let place = match case.order {
                    SumOrder::Expert => [0, 0],
                    SumOrder::Rank => [rank as u32, 0],
                    SumOrder::Node => [nodes.node_of(rank as u32), rank as u32],
                    other => unreachable!("{other:?}"),
                };
                found.push((place, ids[choice], rank, row, choice));
            }
        }
    }
    found.sort_unstable();
    let groups = found.chunk_by(|a, b| a.0[0] == b.0[0]);
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

/// All four rows of the table, in one case. Returns every gradient of every rank, as bits.
fn gradients<E: Real>(case: &Case) -> Vec<Vec<u8>>
where
    f32: To<E>,
{
    let all: Vec<Tokens<E>> = (0u64..)
        .zip(&COUNTS[..case.nodes.len()])
        .map(|(rank, &count)| tokens(rank + 40, count, HIDDEN, TOP_K as u32, EXPERTS))
        .collect();
    let rows = placement(&all, TOP_K as u32, &case.map, case.align);
    on_ranks(case.nodes, &tiny(), |world| {
        let me = world.rank() as usize;
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).expert_map(case.map.clone());
        let builder = builder.top_k(TOP_K as u32).hidden(HIDDEN).dtype(E::DTYPE).sum_order(case.order);
        let builder = builder.align(case.align).weighted(case.weighted).route(case.route).max_tokens(16);
        let mut ep = builder.build().unwrap();
        let mine = &all[me];
        let routing = Routing::new(TOP_K as u32, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let mut seen = Vec::new();
        world.pool().poison(0xff);
        let (_, handle) = ep.dispatch(&mine.x, &routing).unwrap();
        let of_rows: Vec<E> = (0..rows[me].len()).flat_map(|row| row_of::<E>(me, row)).collect();
        let of_weights: Vec<f32> = (0..rows[me].len()).map(|row| weight_of(me, row)).collect();

        world.pool().poison(0xff);
        // What stood in the tensors before is no part of any gradient.
        let mut x = vec![f32::NAN.to(); mine.x.len()];
        let mut weights = vec![f32::NAN; mine.ids.len()];
        let (given, returned) = (Some((&of_weights).into()), Some((&mut weights).into()));
        ep.dispatch_backward_into(&of_rows, given, &handle, &mut x, returned).unwrap();
        let mut expected = vec![0.0; mine.ids.len()];
        for token in 0..COUNTS[me] as usize {
            let groups = terms(case, &rows, &mine.ids, me, token);
            let got = &x[token * HIDDEN..][..HIDDEN];
            assert_eq!(bits(got), bits(&sum::<E>(&groups)), "token {token}, {case:?}");
            for &(rank, row, choice) in groups.iter().flatten() {
                expected[choice] = weight_of(rank, row);
            }
        }
        assert_eq!(bits(&weights), bits(&expected), "dropped choices have no gradient, {case:?}");
        let (same, none) = ep.dispatch_backward::<E>(&of_rows, None, &handle).unwrap();
        assert_eq!((bits(&same), none), (bits(&x), None));
        seen.extend([bits(&x), bits(&weights)].concat());

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
                let weight = if case.weighted { all[source].weights[choice] } else { 1.0 };
                let expected: Vec<E> =
                    sent(source, token).iter().map(|&g| (weight * Into::<f32>::into(g)).to()).collect();
                assert_eq!(bits(got), bits(&expected), "row {row}, {case:?}");
            }
            assert_eq!(weights.is_some(), case.weighted);
            let mut expected = vec![0.0; mine.ids.len()];
            for token in 0..COUNTS[me] as usize {
                for (rank, row, choice) in terms(case, &rows, &mine.ids, me, token).concat() {
                    expected[choice] = dot(&row_of::<E>(rank, row), &sent(me, token));
                }
            }
            seen.extend_from_slice(bits(landed));
            if let Some(weights) = weights {
                assert_eq!(bits(&weights), bits(&expected), "{case:?}");
                seen.extend_from_slice(bits(&weights));
            }
        }
        drop(handle);
        group.gather(&[]).unwrap();
        assert_eq!(world.pool().report().used, 0, "what was kept is given back");
        seen
    })
}

#[test]
fn gradients_follow_their_formulas_in_f32() {
    cases().iter().for_each(|case| drop(gradients::<f32>(case)));
}

#[test]
fn gradients_follow_their_formulas_in_bf16() {
    cases().iter().for_each(|case| drop(gradients::<bf16>(case)));
}

#[test]
fn gradients_follow_their_formulas_in_f16() {
    cases().iter().for_each(|case| drop(gradients::<f16>(case)));
}

#[test]
fn gradient_bits_ignore_nodes_and_routes_in_expert_sum_order() {
    fn compare<E: Real>(nodes: &'static [u32], replicated: bool, weighted: bool)
    where
        f32: To<E>,
    {
        let map = maps(nodes.len())[usize::from(replicated)].clone();
        let many = Case { nodes, route: Route::Direct, order: SumOrder::Expert, align: 4, map, weighted };
        let one = gradients::<E>(&Case { nodes: &[0; 5][..nodes.len()], ..many.clone() });
        assert!(one.iter().any(|seen| !seen.is_empty()));
        for route in Route::ALL {
            assert_eq!(gradients::<E>(&Case { route, ..many.clone() }), one, "{nodes:?}, {route:?}");
        }
    }
    for nodes in &NODES[1..] {
        compare::<f32>(nodes, false, true);
        compare::<bf16>(nodes, true, true);
        compare::<f16>(nodes, true, false);
    }
}
