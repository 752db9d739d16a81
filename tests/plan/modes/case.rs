//! Random groups, routings, layouts and modes.

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;

use crate::support::reference::Case;

/// A case and the expert ids of all its ranks.
#[derive(Clone, Debug)]
pub struct Play {
    pub case: Case,
    pub ids: Vec<Vec<i32>>,
    pub chunks: u8,
}

fn modes() -> impl Strategy<Value = ReceiveMode> {
    let overflow = Overflow::Drop;
    prop_oneof![
        Just(ReceiveMode::Exact),
        (0..50u32).prop_map(move |rows| ReceiveMode::Budget { rows, overflow }),
        (1..10u32).prop_map(move |rows| ReceiveMode::Slots { rows, overflow }),
    ]
}

/// Up to a dozen tokens of a rank, each with its experts, some of them dropped.
fn ids(experts: u32, top_k: u32) -> impl Strategy<Value = Vec<i32>> {
    let all: Vec<i32> = (0..experts as i32).collect();
    let dropped = prop::collection::vec(prop::bool::weighted(0.15), top_k as usize);
    let token = (subsequence(all, top_k as usize).prop_shuffle(), dropped).prop_map(|(mut ids, dropped)| {
        ids.iter_mut().zip(dropped).filter(|(_, dropped)| *dropped).for_each(|(id, _)| *id = -1);
        ids
    });
    prop::collection::vec(token, 0..12).prop_map(|tokens| tokens.concat())
}

/// Every expert somewhere, some of them twice, in any order.
fn maps(experts: u32, ranks: usize) -> impl Strategy<Value = ExpertMap> {
    let owners = prop::collection::vec(0..ranks, experts as usize);
    let order = Just((0..experts).collect::<Vec<u32>>()).prop_shuffle();
    let more = prop::collection::vec((0..ranks, 0..experts), 0..4);
    (owners, order, more).prop_map(move |(owners, order, more)| {
        let mut held: Vec<Vec<u32>> = vec![Vec::new(); ranks];
        for (rank, expert) in order.into_iter().map(|expert| (owners[expert as usize], expert)).chain(more) {
            if !held[rank].contains(&expert) {
                held[rank].push(expert);
            }
        }
        ExpertMap::from_slots(experts, &held).unwrap()
    })
}

/// All ranks or, as often, some of them.
fn masks(ranks: usize) -> impl Strategy<Value = Vec<bool>> {
    let some = (prop::collection::vec(any::<bool>(), ranks), 0..ranks).prop_map(|(mut active, one)| {
        active[one] = true;
        active
    });
    prop_oneof![Just(vec![true; ranks]), some]
}

pub fn plays() -> impl Strategy<Value = Play> {
    let shape = (prop::collection::vec(0..3u32, 1..=7), 1..=9u32, 1..=5u32);
    shape.prop_flat_map(|(nodes, experts, top_k)| {
        let (ranks, top_k) = (nodes.len(), top_k.min(experts));
        let ids = prop::collection::vec(ids(experts, top_k), ranks);
        let how = (modes(), select(vec![1, 2, 7, 16]), 1..=4u8);
        let ways = (select(&RowLayout::ALL[..]), select(&Route::ALL[..]), select(&SumOrder::ALL[..]));
        let places = (maps(experts, ranks), masks(ranks));
        (Just(nodes), places, ids, how, ways).prop_map(
            move |(nodes, (map, active), ids, (mode, align, chunks), (layout, route, order))| {
                let counts: Vec<u32> = ids.iter().map(|ids| ids.len() as u32 / top_k).collect();
                let case = Case::new(&nodes, &counts, experts, top_k);
                let map = map.with_active(&active).unwrap();
                Play { case: Case { map, active, mode, align, layout, route, order, ..case }, ids, chunks }
            },
        )
    })
}

/// The same, in spans.
pub fn plays_in_spans() -> impl Strategy<Value = Play> {
    plays().prop_map(|play| {
        let (layout, route, spans) = (RowLayout::RankMajor, Route::Pxn, true);
        Play { case: Case { layout, route, spans, ..play.case }, ..play }
    })
}

/// The weight of a choice: another for each.
pub fn weight(source: usize, choice: usize) -> f32 {
    (source * 1000 + choice + 1) as f32
}
