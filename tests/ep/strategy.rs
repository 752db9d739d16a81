//! Dispatch by all-gather gives the same rows, handles, sums and gradients, to the bit.

use std::sync::LazyLock;

use crate::support::layer::{bits, play};
use crate::support::reference::Case;
use crate::support::{medium, on_ranks};
use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::error::{CallError, Error, MemoryError, PlanError};
use sidelane::gate::{Recorded, Routing};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, Group};

const SHAPES: [&[u32]; 4] = [&[0; 4], &[0, 0, 1, 1], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 0, 1, 2]];

/// Uneven numbers of tokens, none at some ranks; one choice in eight is dropped.
fn case(nodes: &[u32]) -> Case {
    let counts: Vec<u32> = (0..nodes.len() as u32).map(|rank| [5, 0, 7, 1][rank as usize % 4]).collect();
    Case { strategy: Strategy::AllGather, ..Case::new(nodes, &counts, 2 * nodes.len() as u32 + 1, 3) }
}

#[test]
fn every_order_layout_and_route_sees_what_everybody_must_see() {
    for nodes in SHAPES {
        for (route, order) in Route::ALL.into_iter().flat_map(|r| SumOrder::ALL.map(|order| (r, order))) {
            for layout in RowLayout::ALL {
                play::<bf16>(&Case { route, order, layout, align: 4, ..case(nodes) });
            }
            play::<f32>(&Case { route, order, weighted: true, ..case(nodes) });
            play::<bf16>(&Case { route, order, wire: PartialDtype::Bf16, ..case(nodes) });
        }
    }
}

#[test]
fn replicas_are_chosen_by_the_rank_that_asks() {
    let map = ExpertMap::from_slots(4, &[vec![3, 0], vec![1, 0], vec![2, 0], vec![1]]).unwrap();
    for (route, layout) in Route::ALL.into_iter().flat_map(|r| RowLayout::ALL.map(|layout| (r, layout))) {
        play::<bf16>(&Case { map: map.clone(), route, layout, ..case(&[0, 0, 1, 1]) });
    }
}

#[test]
fn all_gather_drops_rows_beyond_budget_like_exchange() {
    for (rows, layout) in [(6, RowLayout::ExpertMajor), (4, RowLayout::RankMajor), (0, RowLayout::RankMajor)]
    {
        for route in Route::ALL {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
            play::<bf16>(&Case { mode, layout, route, order: SumOrder::Node, ..case(&[0, 0, 1, 1]) });
        }
    }
}

#[test]
fn all_gather_works_without_any_token() {
    play::<bf16>(&Case { counts: vec![0; 4], ..case(&[0, 0, 1, 1]) });
}

const HIDDEN: usize = 16;

/// The recorded decisions of a medium trained model: 64 experts, top-8.
fn recorded(rank: u32) -> Routing<'static> {
    const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/routing.jsonl"));
    static ALL: LazyLock<Recorded> = LazyLock::new(|| Recorded::parse(TEXT).unwrap());
    ALL.routing(u64::from(rank) * 64, 64).unwrap()
}

fn layer(group: &Group, strategy: Strategy, route: Route, order: SumOrder) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(64).top_k(8).hidden(HIDDEN);
    builder
        .dtype(Dtype::Bf16)
        .strategy(strategy)
        .route(route)
        .sum_order(order)
        .max_tokens(64)
        .build()
        .unwrap()
}

#[test]
fn on_recorded_routing_both_strategies_give_the_same_bits() {
    for nodes in SHAPES {
        on_ranks(nodes, &medium(), |world| {
            let group = world.all().unwrap();
            let routing = recorded(world.rank());
            let x: Vec<bf16> = (0..64 * HIDDEN)
                .map(|at| bf16::from_f32(((at * 31 + world.rank() as usize * 977) % 509) as f32 / 64.0 - 4.0))
                .collect();
            for (route, order) in Route::ALL.into_iter().flat_map(|r| SumOrder::ALL.map(|order| (r, order))) {
                let [exchange, gather] = Strategy::ALL.map(|strategy| {
                    let mut ep = layer(&group, strategy, route, order);
                    let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
                    let y = rows.to_vec::<bf16>().unwrap();
                    let out: Vec<bf16> = ep.combine(&y, &handle).unwrap();
                    let (returned, of_weights) =
                        ep.dispatch_backward::<bf16>(&y, Some(handle.row_weights()), &handle).unwrap();
                    let (gradients, _) = ep.combine_backward(&x, &handle).unwrap();
                    let gradients = gradients.to_vec::<bf16>().unwrap();
                    let facts = (handle.tokens_per_expert().to_vec(), handle.row_weights().to_vec());
                    ([y, out, returned, gradients].map(|t| bits(&t).to_vec()), of_weights, facts)
                });
                assert!(exchange == gather, "rank {} of {nodes:?}, {route:?} {order:?}", world.rank());
            }
        });
    }
}

#[test]
fn all_gather_moves_exactly_planned_traffic() {
    for (nodes, route) in SHAPES.into_iter().flat_map(|n| Route::ALL.map(|route| (n, route))) {
        on_ranks(nodes, &medium(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group, Strategy::AllGather, route, SumOrder::Expert);
            let routing = recorded(world.rank());
            let (rows, handle) = ep.dispatch(&vec![bf16::ONE; 64 * HIDDEN], &routing).unwrap();
            let (moved, plan) = (handle.report().unwrap().moved, handle.report().unwrap().traffic);
            let (members, ranks) = (group.nodes(), u64::from(world.size()));
            let near = members.members(members.node_of(world.rank())).len() as u64;
            assert_eq!((plan.sent.own, plan.sent.local), (64, 64 * (near - 1)));
            let crosses = if route == Route::Pxn { u64::from(members.nodes()) - 1 } else { ranks - near };
            assert_eq!(plan.sent.remote, 64 * crosses, "each token to every node, or to every rank");
            assert_eq!(plan.regrouped, u64::from(rows.len()));
            assert_eq!(moved.inter_node_bytes, plan.sent.remote * 32);
            let local = plan.sent.own + plan.sent.local + plan.relayed + plan.regrouped;
            assert_eq!(moved.intra_node_bytes, local * 32);
        });
    }
}

#[test]
fn wrong_input_is_refused_everywhere_and_the_next_call_works() {
    for (nodes, route) in [(&[0, 0, 1, 1][..], Route::Pxn), (&[0; 3], Route::Direct)] {
        on_ranks(nodes, &medium(), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).experts(8).top_k(1).hidden(8);
            let mut ep = builder.route(route).strategy(Strategy::AllGather).build().unwrap();
            let x = vec![bf16::ONE; 2 * 8];
            let wrong = if world.rank() == 1 { 8 } else { 0 };
            let error = ep.dispatch(&x, &Routing::new(1, vec![0, wrong], vec![1.0; 2]).unwrap()).unwrap_err();
            match world.rank() {
                1 => assert!(matches!(error, Error::Plan(PlanError::ExpertOutOfRange { expert: 8, .. }))),
                _ => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}"),
            }
            let routing = Routing::new(1, vec![0, 7], vec![1.0; 2]).unwrap();
            let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
            let y = rows.to_vec::<bf16>().unwrap();
            assert_eq!(ep.combine::<bf16>(&y, &handle).unwrap(), x);
        });
    }
}

#[test]
fn all_gather_over_budget_fails_alike_and_next_call_works() {
    on_ranks(&[0, 0, 1, 1], &medium(), |world| {
        let group = world.all().unwrap();
        let build = |rows| {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Error };
            let builder = ExpertParallel::builder(&group).experts(4).top_k(1).hidden(8).mode(mode);
            builder.route(Route::Pxn).strategy(Strategy::AllGather).build().unwrap()
        };
        let mut ep = build(7);
        let to_one = |tokens: usize| Routing::new(1, vec![2; tokens], vec![1.0; tokens]).unwrap();
        let error = ep.dispatch(&[bf16::ONE; 2 * 8], &to_one(2)).unwrap_err();
        let Error::Call(CallError::OverBudget { rank: 2, required: 8, budget: 7, .. }) = error else {
            panic!("{error}");
        };
        let tokens = if world.rank() == 0 { 1 } else { 2 };
        let (rows, _) = ep.dispatch(&vec![bf16::ONE; tokens * 8], &to_one(tokens)).unwrap();
        assert_eq!(rows.len(), if world.rank() == 2 { 7 } else { 0 });
    });
}

#[test]
fn a_pool_without_room_for_the_rows_is_named_everywhere() {
    on_ranks(&[0, 0, 1], &medium(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(3).top_k(1).hidden(8);
        let mut ep = builder.route(Route::Pxn).strategy(Strategy::AllGather).build().unwrap();
        let total = world.pool().report().total;
        // What all gather has room: 3 x 64 tokens. Their rows at rank 1 behind it have none.
        let held = (world.rank() == 1).then(|| ep.token_buffer(((total - (6 << 10)) / 16) as u32).unwrap());
        let x = vec![bf16::ONE; 64 * 8];
        let routing = Routing::new(1, vec![1; 64], vec![1.0; 64]).unwrap();
        let error = ep.dispatch(&x, &routing).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: 1, .. })), "{error}");
        drop(held);
        let (rows, _) = ep.dispatch(&x, &routing).unwrap();
        assert_eq!(rows.len(), if world.rank() == 1 { 192 } else { 0 });
    });
}

#[test]
fn all_gather_build_refuses_features_only_exchange_has() {
    on_ranks(&[0, 1], &medium(), |world| {
        let group = world.all().unwrap();
        let builder = || ExpertParallel::builder(&group).experts(2).hidden(8).strategy(Strategy::AllGather);
        let slots = ReceiveMode::Slots { rows: 4, overflow: Overflow::Error };
        let spans = builder().coalesce_relays(true).layout(RowLayout::RankMajor).route(Route::Pxn);
        for builder in [builder().mode(slots), spans] {
            let Err(Error::Plan(PlanError::BadParameter { parameter: "strategy", .. })) = builder.build()
            else {
                panic!("built");
            };
        }
        let one =
            builder().strategy(if world.rank() == 0 { Strategy::AllGather } else { Strategy::AllToAll });
        let Err(Error::Call(CallError::ConfigsDiffer { what: "strategy", .. })) = one.build() else {
            panic!("ranks want different things");
        };
    });
}

#[test]
fn all_gather_dispatch_dropped_after_start_names_its_rank() {
    let errors = on_ranks(&[0, 0, 1, 1], &medium(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(4).top_k(1).hidden(8);
        let mut ep = builder.route(Route::Pxn).strategy(Strategy::AllGather).build().unwrap();
        let (x, routing) = (vec![bf16::ONE; 8], Routing::new(1, vec![3], vec![1.0]).unwrap());
        if world.rank() == 2 {
            drop(ep.start_dispatch(&x, &routing).unwrap());
        }
        ep.dispatch(&x, &routing).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::World(sidelane::error::Cause::Cancelled { by: 2 })), "{error}");
    }
}
