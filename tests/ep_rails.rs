//! What is moved is what was planned, to the byte.

mod support;

use half::bf16;
use sidelane::dtype::Wire;
use sidelane::gate::Routing;
use sidelane::plan::Order;
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel};
use support::{on_ranks, small, tokens};

const HIDDEN: usize = 24;
const TOP_K: u32 = 4;
const EXPERTS: u32 = 13;

/// Rail bytes of a dispatch and of a combine on all ranks, once every rank has moved what it planned.
fn rail_bytes(nodes: &[u32], route: Route, order: Order, wire: Wire) -> (u64, u64) {
    let ranks = on_ranks(nodes, &small(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).unwrap().experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
        let mut ep =
            builder.dtype(Dtype::Bf16).align(4).route(route).order(order).wire(wire).build().unwrap();
        let mine = tokens::<bf16>(u64::from(world.rank()) + 40, 19, HIDDEN, TOP_K, EXPERTS);
        let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let case = format!("rank {} on {nodes:?}, {route:?}, {order:?}, {wire:?}", world.rank());
        // In halves, relays work while their callers are away.
        let rounds = [false, true].map(|halves| {
            let (rows, handle) = match halves {
                false => ep.dispatch(&mine.x, &routing).unwrap(),
                true => ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap(),
            };
            let (moved, traffic) = (handle.report().moved, handle.report().traffic);
            let near = traffic.put.own + traffic.put.local + traffic.handed_on;
            assert_eq!(moved.rail_bytes, traffic.put.rail * traffic.row_bytes, "{case}");
            assert_eq!(moved.local_bytes, near * traffic.row_bytes, "{case}");
            assert_eq!(moved.rows, near + traffic.put.rail, "{case}");
            assert_eq!(handle.returned().rail_bytes, 0, "nothing came home yet, {case}");
            let y = rows.to_vec::<bf16>().unwrap();
            let mut out = vec![bf16::ZERO; mine.x.len()];
            match halves {
                false => ep.combine_into(&y, &handle, &mut out).unwrap(),
                true => ep.start_combine(&y, &handle).unwrap().finish(&mut out).unwrap(),
            }
            let home = traffic.home_bytes(order, (HIDDEN * wire.size()) as u64);
            [moved.rail_bytes, handle.returned().rail_bytes, home]
        });
        assert_eq!(rounds[0], rounds[1], "{case}");
        rounds[0]
    });
    let [there, back, home] = std::array::from_fn(|nth| ranks.iter().map(|bytes| bytes[nth]).sum::<u64>());
    assert_eq!(back, home, "what is sent comes home: {nodes:?}, {route:?}, {order:?}, {wire:?}");
    (there, back)
}

#[test]
fn rails_carry_what_the_plan_says() {
    for nodes in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 0]] {
        let rails = nodes.contains(&1);
        for (route, order) in Route::ALL.iter().flat_map(|route| Order::ALL.map(|order| (*route, order))) {
            let [(there, wide), (again, narrow)] =
                Wire::ALL.map(|wire| rail_bytes(nodes, route, order, wire));
            assert_eq!((there, there > 0), (again, rails));
            let halves = rails && route == Route::Pxn && order != Order::Expert;
            assert_eq!(wide, narrow * if halves { 2 } else { 1 }, "{nodes:?}, {route:?}, {order:?}");
        }
    }
}
