//! A layout that is made before its rows come, held against a dispatch of the same routing.

use crate::support::{Tokens, on_ranks, small, tokens};
use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{ExpertParallelBuilder, Handle};
use sidelane::error::{CallError, CallKind, Error, MemoryError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane::{ExpertParallel, Group, World};

const HIDDEN: usize = 64;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 7;
const NODES: [&[u32]; 3] = [&[0], &[0, 0, 0], &[0, 0, 1, 1, 1]];

fn builder(group: &Group) -> ExpertParallelBuilder<'_> {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.max_tokens(16)
}

/// Settings that change row metadata, the place of rows, or their receivers.
fn kinds(group: &Group) -> Vec<ExpertParallelBuilder<'_>> {
    let rank_major = || builder(group).layout(RowLayout::RankMajor);
    let summed = || builder(group).weighted(true).sum_order(SumOrder::Node).partial_dtype(PartialDtype::Bf16);
    let budget = ReceiveMode::Budget { rows: 9, overflow: Overflow::Drop };
    let slots = ReceiveMode::Slots { rows: 2, overflow: Overflow::Drop };
    let spans = (group.size() > 3).then(|| rank_major().coalesce_relays(true).route(Route::Pxn));
    let each = Route::ALL.into_iter().flat_map(|route| {
        let all = [
            builder(group).align(4),
            rank_major(),
            summed(),
            summed().strategy(Strategy::AllGather),
            rank_major().strategy(Strategy::AllGather),
            builder(group).mode(budget),
            builder(group).mode(slots),
        ];
        all.map(|builder| builder.route(route))
    });
    each.chain(spans).collect()
}

fn routing(tokens: &Tokens<bf16>) -> Routing<'_> {
    Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap()
}

/// A handle's description of its rows.
fn said(handle: &Handle) -> impl PartialEq + std::fmt::Debug {
    let index = handle.index().map(|index| index.landing().to_vec());
    (
        (handle.rows(), handle.tokens(), handle.dropped().to_vec(), handle.required_rows().to_vec()),
        (handle.tokens_per_expert().to_vec(), handle.padded_tokens_per_expert().to_vec()),
        (handle.row_weights().to_vec(), handle.row_experts().to_vec(), index),
    )
}

#[test]
fn rows_that_follow_a_prepare_are_those_of_a_dispatch() {
    for nodes in NODES {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            for builder in kinds(&group) {
                let mut ep = builder.clone().build().unwrap();
                let mine = tokens::<bf16>(
                    u64::from(world.rank()) + 5,
                    world.rank() * 5 % 11,
                    HIDDEN,
                    TOP_K,
                    EXPERTS,
                );
                let (rows, handle) = ep.dispatch(&mine.x, &routing(&mine)).unwrap();
                world.pool().poison(0xff);
                let prepared = ep.prepare(&routing(&mine)).unwrap();
                assert_eq!(said(&prepared), said(&handle), "{builder:?}");
                let moved = prepared.report().unwrap().moved;
                assert_eq!(
                    (moved.rows, moved.intra_node_bytes, moved.inter_node_bytes),
                    (0, 0, 0),
                    "{builder:?}"
                );

                // Twice: the layout stays.
                for _ in 0..2 {
                    let again = ep.dispatch_cached(&mine.x, &prepared).unwrap();
                    assert_eq!(again.rows::<bf16>().unwrap(), rows.rows::<bf16>().unwrap(), "{builder:?}");
                }
                let y = rows.to_vec::<bf16>().unwrap();
                let out = ep.combine::<bf16>(&y, &prepared).unwrap();
                assert_eq!(out, ep.combine::<bf16>(&y, &handle).unwrap(), "{builder:?}");
                let gradients = vec![0.5; prepared.row_weights().len()];
                let [returned, same] = [&prepared, &handle]
                    .map(|along| ep.dispatch_backward::<bf16>(&y, Some(&gradients), along).unwrap());
                assert_eq!(returned, same, "{builder:?}");
            }
        });
    }
}

#[test]
fn a_prepared_layout_holds_no_memory_for_rows() {
    on_ranks(&[0, 0, 1, 1], &small(), |world| {
        let group = world.all().unwrap();
        let mut ep = builder(&group).route(Route::Pxn).build().unwrap();
        let mine = tokens::<bf16>(world.rank().into(), 8, HIDDEN, TOP_K, EXPERTS);
        let kept: Vec<_> = (0..3).map(|_| ep.prepare(&routing(&mine)).unwrap()).collect();
        group.gather(&[]).unwrap();
        assert_eq!(world.pool().report().used, 0, "rank {}", world.rank());

        // Rows find that there is no room; once there is, the layout is as good as ever.
        let held = (world.rank() == 2).then(|| {
            let free = world.pool().report().largest_free;
            ep.token_buffer((free / (HIDDEN as u64 * 2)) as u32).unwrap()
        });
        let error = ep.dispatch_cached(&mine.x, &kept[1]).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: 2, .. })), "{error}");
        drop(held);
        ep.dispatch_cached(&mine.x, &kept[1]).unwrap();
    });
}

/// Makes a call that is refused, and sees that the next one works.
fn refused(
    nodes: &[u32],
    call: impl Fn(&World, &mut ExpertParallel, &Tokens<bf16>) -> Error + Sync,
) -> Vec<Error> {
    on_ranks(nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut ep = builder(&group).route(Route::Pxn).build().unwrap();
        let mine = tokens::<bf16>(world.rank().into(), 4, HIDDEN, TOP_K, EXPERTS);
        let error = call(&world, &mut ep, &mine);
        let handle = ep.prepare(&routing(&mine)).unwrap();
        ep.dispatch_cached(&mine.x, &handle).unwrap();
        error
    })
}

#[test]
fn an_expert_that_does_not_exist_is_refused_everywhere() {
    let errors = refused(&[0, 0, 1, 1], |world, ep, mine| {
        let mut mine = mine.clone();
        if world.rank() == 1 {
            mine.ids[2] = EXPERTS as i32;
        }
        ep.prepare(&routing(&mine)).unwrap_err()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        match rank {
            1 => assert!(matches!(error, Error::Plan(PlanError::ExpertOutOfRange { .. })), "{error}"),
            _ => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}"),
        }
    }
}

#[test]
fn a_rank_that_prepares_where_others_dispatch_is_named() {
    let errors = refused(&[0, 0, 1, 1], |world, ep, mine| match world.rank() {
        3 => ep.prepare(&routing(mine)).unwrap_err(),
        _ => ep.dispatch(&mine.x, &routing(mine)).unwrap_err(),
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let Error::Call(CallError::KindsDiffer { peer, mine, theirs, .. }) = error else { panic!("{error}") };
        let all = [CallKind::Dispatch, CallKind::Prepare];
        assert_eq!((peer, [mine, theirs]), if rank == 3 { (0, [all[1], all[0]]) } else { (3, all) });
    }
}
