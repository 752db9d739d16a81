//! All-gather, reduce-scatter and token slices, compared with their definitions.

use crate::roomy;
use crate::support::layer::{bits, nothing_is_held};
use crate::support::{medium, on_ranks, small};
use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{RowCollective, TokenSlices};
use sidelane::error::{CallError, Error, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, World};

const COLUMNS: usize = 24;
const SHAPES: [&[u32]; 5] = [&[0], &[0; 4], &[0, 0, 1, 1], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 0, 1, 2]];

/// Any function of these: of different sizes, so that the order of a sum shows.
fn element(rank: usize, row: usize, column: usize, seed: usize) -> bf16 {
    let mixed = (rank * 7919 + row * 104_729 + column * 31 + seed * 1_299_709) % 65_521;
    bf16::from_f32((mixed as f32 - 32_760.0) * [1.0, 0.01, 37.0][mixed % 3] / 512.0)
}

fn tensor(rank: usize, rows: usize, seed: usize) -> Vec<bf16> {
    (0..rows * COLUMNS).map(|at| element(rank, at / COLUMNS, at % COLUMNS, seed)).collect()
}

fn counts(ranks: usize, segments: usize) -> Vec<usize> {
    (0..ranks).map(|rank| segments * [2, 0, 3, 1][rank % 4]).collect()
}

/// (rank, row) of all gathered rows in order.
fn order(counts: &[usize], segments: usize) -> Vec<(usize, usize)> {
    let part = |segment: usize| {
        counts.iter().enumerate().flat_map(move |(rank, count)| {
            let len = count / segments;
            (segment * len..(segment + 1) * len).map(move |row| (rank, row))
        })
    };
    (0..segments).flat_map(part).collect()
}

/// Sums of the gathered rows at `rows`, over ranks or over nodes.
fn summed(nodes: &[u32], rows: &[usize], node_sums: Option<PartialDtype>) -> Vec<bf16> {
    let mut out = Vec::new();
    for &row in rows {
        out.extend((0..COLUMNS).map(|column| {
            let of = |rank: usize| element(rank, row, column, 2).to_f32();
            let ranks = 0..nodes.len();
            let total = match node_sums {
                None => ranks.fold(0.0, |sum, rank| sum + of(rank)),
                Some(wire) => (0..=*nodes.iter().max().unwrap()).fold(0.0, |total, node| {
                    let mine = ranks.clone().filter(|&rank| nodes[rank] == node);
                    let partial: f32 = mine.fold(0.0, |sum, rank| sum + of(rank));
                    total
                        + if wire == PartialDtype::Bf16 { bf16::from_f32(partial).to_f32() } else { partial }
                }),
            };
            bf16::from_f32(total)
        }));
    }
    out
}

fn plays(world: &World, nodes: &[u32], segments: usize, route: Route, node_sums: Option<PartialDtype>) {
    let (group, me) = (world.all().unwrap(), world.rank() as usize);
    let counts = counts(nodes.len(), segments);
    let builder = RowCollective::builder(&group).columns(COLUMNS).segments(segments as u32).route(route);
    let builder = builder.max_rows(16);
    let mut collective = node_sums.into_iter().fold(builder, |b, wire| b.node_sums(wire)).build().unwrap();
    let order = order(&counts, segments);
    let expected = |seed| -> Vec<bf16> {
        let row =
            |&(rank, row): &(usize, usize)| (0..COLUMNS).map(move |column| element(rank, row, column, seed));
        order.iter().flat_map(row).collect()
    };
    let places = (0..order.len()).filter(|&at| order[at].0 == me);
    let mut places: Vec<usize> = places.collect();
    places.sort_by_key(|&at| order[at].1);
    let all: Vec<u32> = counts.iter().map(|&count| count as u32).collect();
    let mine = tensor(me, counts[me], 1);
    world.pool().poison(0xff);
    let (rows, shares) = collective.all_gather(&mine).unwrap();
    assert!(bits(rows.rows::<bf16>().unwrap()) == bits(&expected(1)), "{nodes:?} {segments} {route:?}");
    assert_eq!(shares.counts(), all);
    drop(rows);
    let known = collective.shares(&all).unwrap();
    for shares in [&shares, &known] {
        world.pool().poison(0xff);
        let rows = collective.all_gather_cached(&tensor(me, counts[me], 3), shares).unwrap();
        assert!(bits(rows.rows::<bf16>().unwrap()) == bits(&expected(3)), "{nodes:?} {segments} {route:?}");
        drop(rows);
        let have = tensor(me, order.len(), 2);
        let sums: Vec<bf16> = collective.reduce_scatter(&have, shares).unwrap();
        let right = summed(nodes, &places, node_sums);
        assert!(bits(&sums) == bits(&right), "{nodes:?} {segments} {route:?} {node_sums:?}");
        let mut output = shares.output().unwrap();
        output.rows_mut::<bf16>().unwrap().copy_from_slice(&have);
        assert!(bits(&collective.reduce_scatter::<bf16>(output, shares).unwrap()) == bits(&right));
    }
    drop((shares, known));
    nothing_is_held(world, &group);
}

#[test]
fn rows_come_by_rank_in_each_segment_and_sums_are_made_by_ascending_rank() {
    for (nodes, route) in SHAPES.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route))) {
        on_ranks(nodes, &small(), |world| {
            for segments in [1, 2, 3] {
                for node_sums in [None, Some(PartialDtype::F32), Some(PartialDtype::Bf16)] {
                    plays(&world, nodes, segments, route, node_sums);
                }
            }
        });
    }
}

#[test]
fn each_row_crosses_once_per_node_and_whole_blocks_are_handed_on() {
    on_ranks(&[0, 0, 0, 1, 1, 1, 1, 1], &medium(), |world| {
        let mut collective = RowCollective::builder(&world.all().unwrap()).columns(COLUMNS).build().unwrap();
        let (_, shares) = collective.all_gather(&tensor(0, 8, 0)).unwrap();
        let report = shares.handle().report().unwrap();
        assert_eq!(report.traffic.sent.remote, 8);
        assert_eq!(report.moved.inter_node_bytes, 8 * 48);
        // A copy for each source, rank served and chunk.
        let sources = report.relayed.rows / (8 * if world.rank() < 3 { 3 } else { 5 });
        assert_eq!(report.relayed.copies, sources * 4 * if world.rank() < 3 { 3 } else { 5 });
    });
}

#[test]
fn wrong_rows_are_refused_everywhere_and_the_next_call_works() {
    on_ranks(&[0, 0, 1], &small(), |world| {
        let group = world.all().unwrap();
        let builder = RowCollective::builder(&group).columns(COLUMNS).segments(2).max_rows(4);
        let mut collective = builder.build().unwrap();
        for wrong in [1, 6] {
            let rows = if world.rank() == 2 { wrong } else { 2 };
            let error = collective.all_gather(&tensor(0, rows, 0)).unwrap_err();
            match world.rank() {
                2 => {
                    let Error::Plan(PlanError::BadParameter { parameter: "rows of a rank", seen, .. }) =
                        error
                    else {
                        panic!("{error}");
                    };
                    assert_eq!(seen, wrong as u64);
                }
                _ => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 2, .. })), "{error}"),
            }
        }
        let mine = if world.rank() == 2 { [2, 2, 4] } else { [2, 2, 2] };
        let known = collective.shares(&mine).unwrap();
        let error = collective.all_gather_cached(&tensor(0, mine[world.rank() as usize] as usize, 0), &known);
        assert!(matches!(error, Err(Error::Call(CallError::Disagree { what: "handle", .. }))));
        drop(known);
        let (rows, _) = collective.all_gather(&tensor(0, 4, 0)).unwrap();
        assert_eq!(rows.len(), 12);
    });
}

#[test]
fn bytes_are_gathered_and_not_summed() {
    on_ranks(&[0, 1], &small(), |world| {
        let builder = world.all().unwrap();
        let mut collective =
            RowCollective::builder(&builder).columns(16).dtype(Dtype::Bytes).build().unwrap();
        let (rows, shares) = collective.all_gather(&[world.rank() as u8; 16]).unwrap();
        assert_eq!(rows.rows::<u8>().unwrap(), [[0; 16], [1; 16]].concat());
        let error = collective.reduce_scatter::<u8>(&vec![0u8; 32], &shares).unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::NoArithmetic { .. })), "{error}");
    });
}

/// Rank sums in f32 that are scattered by a reduce-scatter equal the results of combine.
#[test]
fn combine_by_rank_is_reduce_scatter_with_the_zeros_left_out() {
    for nodes in [&[0, 0, 1, 1][..], &[0; 3]] {
        on_ranks(nodes, &roomy(), |world| {
            let (group, me) = (world.all().unwrap(), world.rank() as usize);
            let ranks = nodes.len();
            let (experts, tokens) = (2 * ranks as i32, 5);
            let ids_of = |rank: usize| -> Vec<i32> {
                let first = |token: usize| (rank * 5 + token * 3) as i32 % experts;
                (0..tokens)
                    .flat_map(|token| {
                        [first(token), (first(token) + 1) % experts, (first(token) + 3) % experts]
                    })
                    .collect()
            };
            let builder = ExpertParallel::builder(&group).experts(experts as u32).top_k(3);
            let builder =
                builder.hidden(COLUMNS).dtype(Dtype::F32).sum_order(SumOrder::Rank).route(Route::Pxn);
            let mut ep = builder.strategy(Strategy::AllGather).build().unwrap();
            let routing = Routing::new(3, ids_of(me), vec![1.0; 3 * tokens]).unwrap();
            let (rows, handle) = ep.dispatch(&vec![0.0f32; tokens * COLUMNS], &routing).unwrap();
            let y: Vec<f32> = tensor(me, rows.len() as usize, 5).iter().map(|y| y.to_f32() * 1.1).collect();
            let combined: Vec<f32> = ep.combine(&y, &handle).unwrap();
            // This rank's rows, in visible order, added to the tokens that they are of.
            let mut partials = vec![0.0f32; ranks * tokens * COLUMNS];
            let mut row = y.chunks_exact(COLUMNS);
            for expert in 2 * me as i32..2 * me as i32 + 2 {
                for source in 0..ranks {
                    for (choice, &id) in ids_of(source).iter().enumerate() {
                        if id == expert {
                            let token = source * tokens + choice / 3;
                            let to = &mut partials[token * COLUMNS..][..COLUMNS];
                            to.iter_mut().zip(row.next().unwrap()).for_each(|(sum, y)| *sum += y);
                        }
                    }
                }
            }
            assert!(row.next().is_none());
            let builder = RowCollective::builder(&group).columns(COLUMNS).dtype(Dtype::F32).max_rows(8);
            let mut collective = builder.build().unwrap();
            let shares = collective.shares(&vec![tokens as u32; ranks]).unwrap();
            let scattered: Vec<f32> = collective.reduce_scatter(&partials, &shares).unwrap();
            assert_eq!(bits(&scattered), bits(&combined));
        });
    }
}

/// DeepSpeed's layout: two tensor-parallel ranks have the same buffer `[E, C, M]`, and are of two
/// expert-parallel groups.
#[test]
fn with_token_slices_the_result_is_the_same_and_half_as_much_crosses() {
    const EXPERTS: usize = 4;
    const CAPACITY: usize = 6;
    on_ranks(&[0, 0, 1, 1], &small(), |world| {
        let me = world.rank();
        let tensor_parallel = world.group(&[me / 2 * 2, me / 2 * 2 + 1]).unwrap();
        let expert_parallel = world.group(&[me % 2, me % 2 + 2]).unwrap();
        let mut slices = TokenSlices::new(
            &tensor_parallel,
            [EXPERTS as u32, CAPACITY as u32, COLUMNS as u32],
            Dtype::Bf16,
        )
        .unwrap();
        let buffer = tensor((me / 2) as usize, EXPERTS * CAPACITY, 1);
        let builder = ExpertParallel::builder(&expert_parallel).experts(EXPERTS as u32).top_k(1);
        let mut ep = builder.hidden(COLUMNS).route(Route::Direct).build().unwrap();
        let mut through = |x: &[bf16]| -> (Vec<bf16>, u64) {
            let rows = x.len() / COLUMNS;
            let ids: Vec<i32> = (0..rows).map(|row| (row / (rows / EXPERTS)) as i32).collect();
            let routing = Routing::new(1, ids, vec![1.0; rows]).unwrap();
            let (landed, handle) = ep.dispatch(x, &routing).unwrap();
            let first = 2 * (me / 2) as usize;
            let mut y = landed.to_vec::<bf16>().unwrap();
            let mut at = 0;
            for (expert, &rows) in (first..).zip(handle.tokens_per_expert()) {
                let end = at + rows as usize * COLUMNS;
                y[at..end].iter_mut().for_each(|y| *y = bf16::from_f32(y.to_f32() * (1.5 + expert as f32)));
                at = end;
            }
            let crossed = handle.report().unwrap().moved.inter_node_bytes;
            let out = ep.combine(&y, &handle).unwrap();
            (out, crossed + handle.returned().unwrap().moved.inter_node_bytes)
        };
        let (whole, all) = through(&buffer);
        let slice = slices.drop_tokens(&buffer).unwrap();
        let (part, half) = through(&slice);
        let gathered = slices.gather_tokens(&part).unwrap();
        assert!(bits(gathered.rows::<bf16>().unwrap()) == bits(&whole));
        assert!(all > 0);
        assert_eq!(2 * half, all);
        // Each is the other's gradient: gathered and dropped rows are the slice again.
        assert!(bits(&slices.drop_tokens(gathered.rows::<bf16>().unwrap()).unwrap()) == bits(&part));
    });
}

#[test]
fn a_capacity_that_cannot_be_sliced_is_refused_everywhere() {
    on_ranks(&[0, 0], &small(), |world| {
        let group = world.all().unwrap();
        let Err(Error::Plan(PlanError::BadParameter { parameter: "capacity", seen: 5, .. })) =
            TokenSlices::new(&group, [2, 5, 8], Dtype::Bf16)
        else {
            panic!("sliced");
        };
        let slices = TokenSlices::new(&group, [2, 4, 8], Dtype::Bf16).unwrap();
        let Err(Error::Plan(PlanError::WrongShape { what: "buffer", .. })) =
            slices.drop_tokens(&[bf16::ONE; 8])
        else {
            panic!("sliced");
        };
    });
}
