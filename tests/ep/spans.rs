//! Relays that copy rows in spans: the same rows and the same sums, in another order, with few
//! copies.

use std::sync::LazyLock;

use crate::support::layer::{Expected, bits, play};
use crate::support::reference::Case;
use crate::support::{medium, on_ranks, sample, small};
use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::error::{CallError, Error};
use sidelane::gate::{Recorded, Routing};
use sidelane::plan::{ExpertMap, Overflow, RankSets, ReceiveMode, RelayOrder, RowLayout, SumOrder};
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane::{Dtype, ExpertParallel, Group, World};

fn in_spans(case: Case) -> Case {
    Case { layout: RowLayout::RankMajor, route: Route::Pxn, spans: true, ..case }
}

/// Even nodes, uneven ones, such that interleave, one alone, and replicas.
fn shapes() -> Vec<Case> {
    let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    vec![
        Case::new(&[0, 0, 1, 1], &[12, 9, 17, 3], 6, 3),
        Case::new(&[0, 0, 0, 1, 1, 1, 1, 1], &[13, 9, 0, 1, 4, 2, 10, 8], 11, 4),
        Case::new(&[0, 1, 1, 0, 2, 0, 1], &[9, 2, 30, 0, 5, 8, 1], 9, 5),
        Case::new(&[0, 0, 0], &[5, 0, 17], 6, 3),
        Case { map: replicated, ..Case::new(&[0, 1, 0, 1], &[6, 11, 0, 4], 5, 4) },
    ]
}

fn modes(case: &Case) -> [ReceiveMode; 4] {
    let exact = Expected::<f32>::new(case).seen.required.clone();
    let mean = exact.iter().sum::<u32>().div_ceil(exact.len() as u32);
    let overflow = Overflow::Drop;
    [
        ReceiveMode::Exact,
        ReceiveMode::Budget { rows: mean, overflow },
        ReceiveMode::Slots { rows: 3, overflow },
        ReceiveMode::Slots { rows: case.max_tokens(), overflow },
    ]
}

fn partials() -> impl Iterator<Item = (SumOrder, PartialDtype)> {
    let all = SumOrder::ALL.into_iter().flat_map(|order| PartialDtype::ALL.map(|wire| (order, wire)));
    all.filter(|way| *way != (SumOrder::Expert, PartialDtype::Bf16))
}

#[test]
fn span_calls_hold_by_index_in_every_order_wire_type_and_mode() {
    for case in shapes().into_iter().map(in_spans) {
        let all = modes(&case).into_iter().flat_map(|m| partials().map(move |p| (m, p)));
        for (mode, (order, wire)) in sample(all, 3) {
            for align in [1, 8] {
                play::<bf16>(&Case { mode, order, wire, align, ..case.clone() });
            }
            play::<f32>(&Case { mode, order, wire, ..case.clone() });
        }
    }
}

#[test]
fn two_groups_that_interleave_use_spans_at_the_same_time() {
    let nodes = [0, 0, 0, 1, 1, 1, 1, 1];
    let groups: [&[u32]; 2] = [&[0, 2, 4, 5], &[7, 1, 6, 3]];
    for (order, wire) in partials() {
        let of_group = |ranks: &[u32]| {
            let nodes: Vec<u32> = ranks.iter().map(|&rank| nodes[rank as usize]).collect();
            let case = in_spans(Case::new(&nodes, &[12, 7, 19, 3], 9, 4));
            Expected::<bf16>::new(&Case { order, wire, ..case })
        };
        let all = groups.map(of_group);
        on_ranks(&nodes, &small(), |world| {
            let nth = groups.iter().position(|ranks| ranks.contains(&world.rank())).unwrap();
            all[nth].rounds(&world, &world.group(groups[nth]).unwrap());
        });
    }
}

const RANKS: u32 = 8;
const TOKENS: u32 = 512;
const EXPERTS: u32 = 64;
const TOP_K: u32 = 8;
const HIDDEN: usize = 8;
/// Parts of a block.
const CHUNKS: u8 = 4;

/// The recorded decisions of a small trained model.
fn recorded(rank: u32) -> Routing<'static> {
    const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/routing.jsonl"));
    static ALL: LazyLock<Recorded> = LazyLock::new(|| Recorded::parse(TEXT).unwrap());
    ALL.routing(u64::from(rank * TOKENS), TOKENS).unwrap()
}

fn layer(group: &Group, spans: bool, order: SumOrder) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    let builder = builder.dtype(Dtype::Bf16).max_tokens(TOKENS).layout(RowLayout::RankMajor);
    builder.route(Route::Pxn).sum_order(order).coalesce_relays(spans).build().unwrap()
}

/// The blocks that a rank relays, by relay order: copies, rows, and the copies if blocks came in
/// one piece.
fn predicted(nodes: &[u32], me: u32) -> [u64; 3] {
    let (nodes, map) = (NodeMap::from_labels(nodes), ExpertMap::contiguous(EXPERTS, RANKS).unwrap());
    let paths = Paths::new(&nodes, Route::Pxn, me);
    let served = paths.served_by(me);
    let (mut copies, mut rows, mut whole) = (0, 0, 0);
    for source in paths.sources() {
        let (routing, mut sets) = (recorded(source), RankSets::new(served.len() as u32));
        for token in 0..TOKENS {
            let owner = |&id: &i32| map.rank_of(map.slot_for(source, id as u32).unwrap());
            let member = |rank: u32| served.iter().position(|&member| member == rank);
            let ids = routing.experts_of(token).iter().filter(|&&id| id >= 0);
            let mut set: Vec<u32> = ids.filter_map(|id| member(owner(id)).map(|at| at as u32)).collect();
            set.sort_unstable();
            set.dedup();
            rows += set.len() as u64;
            if !set.is_empty() {
                sets.push(set);
            }
        }
        let mut order = RelayOrder::default();
        order.fill(&sets);
        copies += order.copies(CHUNKS);
        whole += order.spans.len() as u64;
    }
    [copies, rows, whole]
}

/// Relay copies and rows of a rank, and the results: rows in visible order, sums, gradients.
fn handed_on(world: &World, spans: bool, order: SumOrder) -> ([u64; 2], Vec<Vec<u8>>) {
    let mut ep = layer(&world.all().unwrap(), spans, order);
    let routing = recorded(world.rank());
    let element = |at: u32| bf16::from_f32(f32::from_bits(at.wrapping_mul(0x9e37_79b9) >> 9 | 0x3f80_0000));
    let x: Vec<bf16> = (0..TOKENS * HIDDEN as u32).map(|at| element(at + 7919 * world.rank())).collect();
    let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
    let visible = |rows: &sidelane::ep::ExpertRows| -> Vec<u8> {
        let all = rows.rows::<bf16>().unwrap().chunks_exact(HIDDEN).collect::<Vec<_>>();
        let order: Vec<u32> = rows.index().map_or((0..rows.len()).collect(), |i| i.landing().to_vec());
        order.iter().flat_map(|&at| bits(all[at as usize]).to_vec()).collect()
    };
    let report = handle.report().unwrap();
    let (relayed, traffic) = (report.relayed, report.traffic);
    assert_eq!((relayed.copies, relayed.rows), (traffic.copies, traffic.relayed), "as planned");
    let y = rows.to_vec::<bf16>().unwrap();
    let sums: Vec<bf16> = ep.combine(&y, &handle).unwrap();
    let (returned, weights) = ep.dispatch_backward::<bf16>(&y, Some(handle.row_weights()), &handle).unwrap();
    let (gradients, _) = ep.combine_backward(&x, &handle).unwrap();
    let all =
        [visible(&rows), bits(&sums).to_vec(), bits(&returned).to_vec(), bits(&weights.unwrap()).to_vec()];
    let all = all.into_iter().chain([visible(&gradients)]).collect();
    ([relayed.copies, relayed.rows], all)
}

#[test]
fn spans_on_recorded_routing_only_cut_copies_to_relay_order() {
    for nodes in [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0, 1]] {
        for order in SumOrder::ALL {
            let [plain, spans] = [false, true]
                .map(|spans| on_ranks(&nodes, &medium(), |world| handed_on(&world, spans, order)));
            let (mut all_copies, mut all_rows, mut all_whole) = (0, 0, 0);
            for (me, (plain, spans)) in (0..).zip(plain.iter().zip(&spans)) {
                let [copies, rows, whole] = predicted(&nodes, me);
                assert_eq!(plain.0, [rows, rows], "a copy per row, at rank {me} of {nodes:?}");
                assert_eq!(spans.0, [copies, rows], "a copy per span, at rank {me} of {nodes:?}");
                assert!(plain.1 == spans.1, "the same bits at rank {me} of {nodes:?}, {order:?}");
                (all_copies, all_rows, all_whole) = (all_copies + copies, all_rows + rows, all_whole + whole);
            }
            println!("{nodes:?}: {all_rows} rows in {all_copies} copies, {all_whole} of whole blocks");
            // At the end of a chunk a span is cut at the most for each rank.
            assert!(all_copies <= all_whole + 8 * u64::from(CHUNKS - 1) * 5);
            assert!(all_copies * 20 < all_rows, "{all_copies} copies of {all_rows} rows");
        }
    }
}

#[test]
fn a_rank_that_wants_no_spans_is_named() {
    on_ranks(&[0, 1], &small(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(2).hidden(HIDDEN);
        let builder =
            builder.layout(RowLayout::RankMajor).route(Route::Pxn).coalesce_relays(world.rank() == 0);
        let Err(Error::Call(CallError::ConfigsDiffer { what, .. })) = builder.build() else {
            panic!("ranks want different things");
        };
        assert_eq!(what, "coalesce_relays");
    });
}
