//! Dispatch and combine between ranks that are threads, bit for bit against a naive reference.

use crate::support::{To, Tokens, on_ranks, placement, sample, small, tokens};
use half::{bf16, f16};
use sidelane::config::Config;
use sidelane::dtype::PartialDtype;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SumOrder};
use sidelane::topology::{NodeMap, Route};
use sidelane::{Dtype, Element, ExpertParallel, Options};

/// Elements of rows that are larger than a record of the loopback lane, and so are their pads.
const WIDE: usize = 40_000;

/// Bytes of each rank's symmetric heap: control windows of the default number of tokens are large.
const SYMMETRIC: u64 = 4 << 20;

/// One case of the table below.
#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<u32>,
    counts: Vec<u32>,
    experts: u32,
    top_k: u32,
    hidden: usize,
    align: u32,
    order: SumOrder,
    weighted: bool,
    map: Option<ExpertMap>,
    route: Route,
    wire: PartialDtype,
}

impl Case {
    fn new(nodes: &[u32], counts: &[u32], experts: u32, top_k: u32) -> Case {
        Case {
            nodes: nodes.to_vec(),
            counts: counts.to_vec(),
            experts,
            top_k,
            hidden: 24,
            align: 1,
            order: SumOrder::Expert,
            weighted: false,
            map: None,
            route: Route::Direct,
            wire: PartialDtype::F32,
        }
    }
}

fn cases() -> Vec<Case> {
    let plain = Case::new(&[0, 0, 0, 0], &[5, 0, 17, 3], 6, 3);
    let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    let direct = vec![
        Case::new(&[0], &[7], 3, 2),
        plain.clone(),
        Case { nodes: vec![0, 1, 0, 1], ..plain.clone() },
        Case { nodes: vec![0, 1, 2, 3], ..plain.clone() },
        Case { align: 16, ..plain.clone() },
        Case { align: 4, nodes: vec![0, 0, 1, 1], order: SumOrder::Rank, ..plain.clone() },
        Case { order: SumOrder::Rank, weighted: true, ..plain.clone() },
        Case { weighted: true, nodes: vec![0, 1, 1, 1], ..plain.clone() },
        Case { experts: 5, map: Some(replicated), nodes: vec![0, 0, 1, 1], align: 2, ..plain.clone() },
        Case { counts: vec![0; 4], ..plain.clone() },
        Case::new(&[0, 0, 0, 1, 1, 1, 1, 1], &[3, 9, 0, 1, 4, 2, 30, 8], 3, 1),
        // The smallest row there is, in two-byte elements; every token to every expert.
        Case { hidden: 8, ..Case::new(&[0, 1, 0, 1], &[4, 3, 0, 9], 3, 3) },
        Case { hidden: 8, align: 32, ..Case::new(&[0], &[5], 1, 1) },
        Case { hidden: WIDE, align: 3, ..Case::new(&[0, 1, 1], &[2, 1, 3], 4, 2) },
        Case { order: SumOrder::Node, nodes: vec![0, 1, 0, 1], ..plain.clone() },
        Case {
            order: SumOrder::Node,
            weighted: true,
            ..Case::new(&[0, 1, 1, 0, 2, 0, 1], &[9, 2, 30, 0, 5, 8, 1], 9, 5)
        },
        Case {
            order: SumOrder::Rank,
            align: 8,
            ..Case::new(&[0, 0, 0, 1, 1, 1, 1, 1], &[33, 9, 0, 1, 4, 2, 30, 8], 19, 6)
        },
    ];
    let narrow = direct.iter().filter(|case| case.order != SumOrder::Expert).cloned();
    let direct: Vec<Case> =
        direct.iter().cloned().chain(narrow.map(|case| Case { wire: PartialDtype::Bf16, ..case })).collect();
    let pxn = direct.iter().cloned().map(|case| Case { route: Route::Pxn, ..case });
    direct.iter().cloned().chain(pxn).collect()
}

/// Sums as specified: from +0 in f32, in order of experts (or of ranks or nodes, and their partial
/// sums), one rounding.
fn combined<E: Element + Copy + Into<f32>>(
    case: &Case,
    map: &ExpertMap,
    all: &[Tokens<E>],
    rank: usize,
) -> Vec<E>
where
    f32: To<E>,
{
    let (k, hidden) = (case.top_k as usize, case.hidden);
    let tokens = &all[rank];
    let nodes = NodeMap::from_labels(&case.nodes);
    let mut out = Vec::new();
    for token in 0..case.counts[rank] as usize {
        let mut terms: Vec<(u32, u32, i32, usize)> = (token * k..(token + 1) * k)
            .filter(|&choice| tokens.ids[choice] >= 0)
            .map(|choice| {
                let slot = map.slot_for(rank as u32, tokens.ids[choice] as u32).unwrap();
                let owner = map.rank_of(slot);
                let (group, owner) = match case.order {
                    SumOrder::Expert => (0, 0),
                    SumOrder::Rank => (owner, owner),
                    SumOrder::Node => (nodes.node_of(owner), owner),
                    other => unreachable!("{other:?}"),
                };
                (group, owner, tokens.ids[choice], choice)
            })
            .collect();
        terms.sort_unstable();
        for column in 0..hidden {
            let mut total = 0.0f32;
            for group in terms.chunk_by(|a, b| a.0 == b.0) {
                let mut partial = 0.0f32;
                for &(_, _, expert, choice) in group {
                    let y: f32 = expert_of(tokens.x[token * hidden + column], expert).into();
                    partial += if case.weighted { tokens.weights[choice] * y } else { y };
                }
                total +=
                    if case.wire == PartialDtype::Bf16 { bf16::from_f32(partial).to_f32() } else { partial };
            }
            out.push(total.to());
        }
    }
    out
}

/// What expert `id` does to an element.
fn expert_of<E: Element + Into<f32>>(x: E, id: i32) -> E
where
    f32: To<E>,
{
    (x.into() * (id as f32 + 0.5)).to()
}

fn exchange<E: Element + Copy + PartialEq + std::fmt::Debug + Into<f32>>(dtype: Dtype, case: &Case)
where
    f32: To<E>,
{
    let map = case
        .map
        .clone()
        .unwrap_or_else(|| ExpertMap::contiguous(case.experts, case.nodes.len() as u32).unwrap());
    let all: Vec<Tokens<E>> = (0u64..)
        .zip(&case.counts)
        .map(|(rank, &count)| tokens(rank + 100, count, case.hidden, case.top_k, case.experts))
        .collect();
    let expected = placement(&all, case.top_k, &map, case.align);
    let pool = if case.hidden == WIDE { 8 << 20 } else { 256 << 10 };
    let config = Config::default().with_heap(SYMMETRIC + pool).with_symmetric(SYMMETRIC);
    let options = Options::default().with_config(config);
    on_ranks(&case.nodes, &options, |world| {
        let me = world.rank() as usize;
        let mut ep = ExpertParallel::builder(&world.all().unwrap())
            .expert_map(map.clone())
            .top_k(case.top_k)
            .hidden(case.hidden)
            .dtype(dtype)
            .align(case.align)
            .sum_order(case.order)
            .weighted(case.weighted)
            .route(case.route)
            .partial_dtype(case.wire)
            .build()
            .unwrap();
        let mine = &all[me];
        let routing = Routing::new(case.top_k, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        for round in 0..5 {
            world.pool().poison(0xff);
            // In halves, relays work while their callers are away.
            let (rows, handle) = match round % 3 {
                2 => ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap(),
                _ => ep.dispatch(&mine.x, &routing).unwrap(),
            };
            let seen = rows.rows::<E>().unwrap();
            assert_eq!(rows.len() as usize, expected[me].len(), "rank {me}, {case:?}");
            for (row, origin) in expected[me].iter().enumerate() {
                let got = &seen[row * case.hidden..][..case.hidden];
                match *origin {
                    Some((source, token, choice)) => {
                        assert_eq!(
                            got,
                            &all[source].x[token * case.hidden..][..case.hidden],
                            "row {row} of rank {me}, {case:?}"
                        );
                        assert_eq!(handle.row_weights()[row], all[source].weights[choice]);
                    }
                    None => {
                        assert!(
                            got.iter().all(|&e| Into::<f32>::into(e).to_bits() == 0),
                            "pad row {row} is zero"
                        );
                        assert_eq!(handle.row_weights()[row].to_bits(), 0);
                    }
                }
            }
            let mut y = handle.output().unwrap();
            let out = y.rows_mut::<E>().unwrap();
            let mut row = 0;
            for (slot, &count) in map.slots_of(world.rank()).zip(handle.padded_tokens_per_expert()) {
                for _ in 0..count as usize * case.hidden {
                    out[row] = expert_of(seen[row], map.expert_of(slot) as i32);
                    row += 1;
                }
            }
            let copied = out.to_vec();
            drop(rows);
            let result: Vec<E> = if round == 2 {
                let mut result = vec![E::zeroed(); mine.x.len()];
                ep.start_combine(y, &handle).unwrap().finish(&mut result).unwrap();
                result
            } else if round % 2 == 0 {
                ep.combine(y, &handle).unwrap()
            } else {
                drop(y);
                ep.combine(&copied, &handle).unwrap()
            };
            assert_eq!(result, combined(case, &map, &all, me), "rank {me}, round {round}, {case:?}");
        }
    });
}

#[test]
fn every_row_lands_in_its_place_and_returns_in_bf16() {
    sample(cases(), 2).iter().for_each(exchange_as::<bf16>(Dtype::Bf16));
}

#[test]
fn every_row_lands_in_its_place_and_returns_in_f32() {
    sample(cases(), 2).iter().for_each(exchange_as::<f32>(Dtype::F32));
}

#[test]
fn every_row_lands_in_its_place_and_returns_in_f16() {
    sample(cases(), 2).iter().for_each(exchange_as::<f16>(Dtype::F16));
}

fn exchange_as<E: Element + Copy + PartialEq + std::fmt::Debug + Into<f32>>(dtype: Dtype) -> impl Fn(&Case)
where
    f32: To<E>,
{
    move |case| {
        if case.wire.carries(dtype) {
            exchange::<E>(dtype, case);
        }
    }
}

/// As many tokens as may be passed, each to as many experts as it can choose, all of them on the
/// other node.
#[test]
fn blocks_that_are_as_large_as_they_can_be_arrive_whole() {
    const TOKENS: u32 = 50;
    let map = ExpertMap::from_slots(4, &[vec![], vec![3, 0], vec![1, 2], vec![]]).unwrap();
    let (nodes, hidden, top_k) = ([0, 1, 1, 0], 16, 4);
    let all: Vec<Tokens<bf16>> = (0..4u64)
        .map(|rank| {
            let sends = nodes[rank as usize] == 0;
            let mut tokens = tokens(rank, if sends { TOKENS } else { 0 }, hidden, top_k, 4);
            tokens.ids.chunks_exact_mut(4).for_each(|ids| ids.copy_from_slice(&[2, 0, 3, 1]));
            tokens
        })
        .collect();
    let expected = placement(&all, top_k, &map, 1);
    for route in Route::ALL {
        on_ranks(&nodes, &small(), |world| {
            let me = world.rank() as usize;
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).expert_map(map.clone()).top_k(top_k);
            let builder = builder.hidden(hidden).max_tokens(TOKENS).route(route).weighted(true);
            let mut ep = builder.build().unwrap();
            let mine = &all[me];
            let routing = Routing::new(top_k, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
            let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
            assert_eq!(rows.len(), if nodes[me] == 1 { 2 * 2 * TOKENS } else { 0 });
            for (row, origin) in rows.rows::<bf16>().unwrap().chunks_exact(hidden).zip(&expected[me]) {
                let (source, token, _) = origin.unwrap();
                assert_eq!(row, &all[source].x[token * hidden..][..hidden], "rank {me}, {route:?}");
            }
            let weights: Vec<f32> = expected[me]
                .iter()
                .flatten()
                .map(|&(source, _, choice)| all[source].weights[choice])
                .collect();
            assert_eq!(handle.row_weights(), weights);
            let (x, gradients) =
                ep.dispatch_backward::<bf16>(rows.rows::<bf16>().unwrap(), Some(&weights), &handle).unwrap();
            assert_eq!(x, crate::support::repeated(mine, top_k, hidden));
            assert_eq!(gradients.unwrap(), mine.weights);
        });
    }
}
