//! The moved bytes equal the planned ones exactly, over every net.

use crate::support::{medium, on_ranks, tokens};
use half::bf16;
use sidelane::config::NetChoice;
use sidelane::dtype::PartialDtype;
use sidelane::gate::Routing;
use sidelane::plan::SumOrder;
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel};

const HIDDEN: usize = 24;
const TOP_K: u32 = 4;
const EXPERTS: u32 = 13;

/// What came of rounds on all ranks.
#[derive(Debug, PartialEq)]
struct Moved {
    /// Bytes between nodes of a dispatch and of a combine.
    bytes: (u64, u64),
    /// Landed rows of each rank, and returned sums.
    bits: Vec<Vec<bf16>>,
}

/// Rounds over the loopback lane and over tcp, which carry the same bytes and bring the same bits.
fn inter_node_bytes(nodes: &[u32], route: Route, order: SumOrder, wire: PartialDtype) -> (u64, u64) {
    let [over_loop, over_tcp] =
        [NetChoice::Loopback, NetChoice::Tcp].map(|net| rounds(net, nodes, route, order, wire));
    assert!(over_loop == over_tcp, "{nodes:?}, {route:?}, {order:?}, {wire:?}");
    over_loop.bytes
}

/// Rounds in which every rank moves the planned bytes.
fn rounds(net: NetChoice, nodes: &[u32], route: Route, order: SumOrder, wire: PartialDtype) -> Moved {
    let ranks = on_ranks(nodes, &medium().with_net(net), |world| {
        assert_eq!(world.net().map(|net| net.lane), nodes.contains(&1).then_some(net.name()));
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
        let mut ep = builder
            .dtype(Dtype::Bf16)
            .align(4)
            .route(route)
            .sum_order(order)
            .partial_dtype(wire)
            .build()
            .unwrap();
        let mine = tokens::<bf16>(u64::from(world.rank()) + 40, 19, HIDDEN, TOP_K, EXPERTS);
        let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let case = format!("rank {} on {nodes:?}, {route:?}, {order:?}, {wire:?}", world.rank());
        // In halves, relays work while their callers are away.
        let rounds = [false, true].map(|halves| {
            let (rows, handle) = match halves {
                false => ep.dispatch(&mine.x, &routing).unwrap(),
                true => ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap(),
            };
            let (moved, traffic) = (handle.report().unwrap().moved, handle.report().unwrap().traffic);
            let near = traffic.sent.own + traffic.sent.local + traffic.relayed;
            assert_eq!(moved.inter_node_bytes, traffic.sent.remote * traffic.row_bytes, "{case}");
            assert_eq!(moved.intra_node_bytes, near * traffic.row_bytes, "{case}");
            assert_eq!(moved.rows, near + traffic.sent.remote, "{case}");
            assert_eq!(
                handle.return_report().unwrap().moved.inter_node_bytes,
                0,
                "nothing returned yet, {case}"
            );
            let y = rows.to_vec::<bf16>().unwrap();
            let mut out = vec![bf16::ZERO; mine.x.len()];
            match halves {
                false => ep.combine_into(&y, &handle, &mut out).unwrap(),
                true => ep.start_combine(&y, &handle).unwrap().finish(&mut out).unwrap(),
            }
            let sums_back = traffic.return_bytes(order, (HIDDEN * wire.size()) as u64);
            (
                [moved.inter_node_bytes, handle.return_report().unwrap().moved.inter_node_bytes, sums_back],
                [y, out].concat(),
            )
        });
        assert!(rounds[0] == rounds[1], "{case}");
        let [first, _] = rounds;
        first
    });
    let [there, back, sums_back] =
        std::array::from_fn(|nth| ranks.iter().map(|(bytes, _)| bytes[nth]).sum::<u64>());
    assert_eq!(back, sums_back, "what is sent returns: {nodes:?}, {route:?}, {order:?}, {wire:?}");
    Moved { bytes: (there, back), bits: ranks.into_iter().map(|(_, bits)| bits).collect() }
}

#[test]
fn nets_carry_what_the_plan_says() {
    for nodes in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 0]] {
        let multi_node = nodes.contains(&1);
        for (route, order) in Route::ALL.iter().flat_map(|route| SumOrder::ALL.map(|order| (*route, order))) {
            let [(there, wide), (again, narrow)] =
                PartialDtype::ALL.map(|wire| inter_node_bytes(nodes, route, order, wire));
            assert_eq!((there, there > 0), (again, multi_node));
            let halves = multi_node && route == Route::Pxn && order != SumOrder::Expert;
            assert_eq!(wide, narrow * if halves { 2 } else { 1 }, "{nodes:?}, {route:?}, {order:?}");
        }
    }
}
