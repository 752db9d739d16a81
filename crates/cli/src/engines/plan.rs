//! Places a dispatch for all ranks at once, as each would place it, and counts what each asks of its engines.

use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, Everyone, Forward, Frame, Known, Layout, Mode, Notes, Order, RowLayout, Sizing, Spans,
};
use sidelane::topology::{Paths, Route};
use sidelane_core::schedule::{Control, Setting, WindowId};
use sidelane_model::EngineWork;

use super::{Conditions, Task};

/// In how many parts a block goes to its relay: as everywhere in the library.
const CHUNKS: u8 = 4;

/// What every rank asks for if rows go this way; `spans`: blocks lie in relay order.
pub fn dispatch(
    task: &Task,
    layout: RowLayout,
    route: Route,
    spans: bool,
) -> Result<Vec<EngineWork>, PlanError> {
    let Task { map, nodes, routings, row_bytes, home_bytes, .. } = task;
    let Conditions { tokens, top_k, .. } = task.conditions;
    let bins = Bins::of_layout(layout, map, Order::Expert, nodes);
    let notes = Notes::of(layout, Mode::Eager, spans);
    let sizing = Sizing {
        row_bytes: *row_bytes,
        home_bytes: *home_bytes,
        words_out: notes.words(top_k),
        words_home: 1,
        partial_bytes: None,
    };
    let paths = |me| Paths::new(nodes, route, me);
    let frame = Frame { bins: &bins, paths: paths(0), align: 1, chunks: CHUNKS, sizing, mode: Mode::Eager };
    let (mut everyone, mut layouts) = (Everyone::default(), Vec::new());
    everyone.sort(&frame, top_k, |me, sorted| {
        let routing: &Routing = &routings[me as usize];
        sorted.fill(map, &bins, notes, me, routing)
    })?;
    everyone.each(&frame, (top_k, tokens), |frame, known, _| {
        let Known { sorted, crossing, counts, sizes } = known;
        if spans {
            Spans::default().arrange(frame, (&mut *sorted, &mut *crossing), counts, sizes);
        }
        let mut layout = Layout::default();
        layout.fill(frame, (sorted, crossing), top_k, counts, sizes);
        layouts.push(layout);
    });
    let control = Control::new(&paths(0), &bins, u64::from(tokens) * u64::from(top_k), sizing.note_bytes());
    let work = |me: u32| {
        let frame = Frame { paths: paths(me), ..frame };
        let mut forward = Forward::default();
        forward.spans = spans;
        forward.know(&frame, false, |source, nth| layouts[source as usize].blocks[nth].clone());
        // Cards reach the devices.
        let (paths, far) = (paths(me), WindowId::POOL);
        let setting =
            Setting { paths, control: &control, sizing, chunks: CHUNKS, parity: 0, far, fixed_rows: None };
        EngineWork::of_dispatch(&setting, &layouts[me as usize], &forward)
    };
    Ok((0..nodes.ranks()).map(work).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sidelane::plan::ExpertMap;
    use sidelane::topology::NodeMap;

    use super::*;
    use crate::bench::RowType;
    use crate::routing::{Router, Share, Source};

    fn task(ranks_per_node: &[u32]) -> Task {
        let nodes = NodeMap::from_labels(&crate::launch::node_labels(ranks_per_node));
        let share = Share { experts: 24, top_k: 4, tokens: 50, seed: 3 };
        let routing: Source = "zipf:1.0".parse().unwrap();
        let router = Router::open(&routing).unwrap();
        Task {
            conditions: Conditions {
                routing,
                experts: share.experts,
                top_k: share.top_k,
                ranks_per_node: ranks_per_node.to_vec(),
                tokens: share.tokens,
                hidden: 16,
                dtype: RowType::Bf16,
                seed: share.seed,
                per_copy: 1.0,
                speed: 1.0,
            },
            map: ExpertMap::contiguous(share.experts, nodes.ranks()).unwrap(),
            routings: (0..nodes.ranks()).map(|rank| router.routing(share, rank).unwrap()).collect(),
            nodes,
            row_bytes: 32,
            home_bytes: 32,
        }
    }

    /// Where the rows of a token go: a rank for each choice, or each rank once.
    fn ranks_of(task: &Task, layout: RowLayout, source: u32, token: u32) -> Vec<u32> {
        let experts = task.routings[source as usize].experts_of(token).iter();
        let slots = experts.map(|&expert| task.map.slot_for(source, expert as u32));
        let rank = |slot| (0..task.nodes.ranks()).find(|&r| task.map.slots_of(r).contains(&slot)).unwrap();
        let ranks = slots.map(rank);
        match layout {
            RowLayout::ExpertMajor => ranks.collect(),
            RowLayout::RankMajor => ranks.collect::<BTreeSet<u32>>().into_iter().collect(),
        }
    }

    /// Rows of the engines of a rank and of its card, counted token by token.
    fn rows(task: &Task, layout: RowLayout, route: Route, me: u32) -> [u64; 2] {
        let (nodes, mut engines, mut cards) = (&task.nodes, 0, 0);
        let tokens = || 0..task.conditions.tokens;
        for (source, token) in (0..nodes.ranks()).flat_map(|source| tokens().map(move |t| (source, t))) {
            let (near, far): (Vec<u32>, Vec<u32>) =
                ranks_of(task, layout, source, token).iter().partition(|&&rank| nodes.same_node(rank, me));
            let rail = |source| nodes.rail_peer(source, nodes.node_of(me)) == me;
            if source == me {
                engines += near.iter().filter(|&&rank| rank != me).count();
                cards += match route {
                    Route::Direct => far.len(),
                    Route::Pxn => {
                        far.iter().map(|&rank| nodes.node_of(rank)).collect::<BTreeSet<u32>>().len()
                    }
                };
            } else if route == Route::Pxn && !nodes.same_node(source, me) && rail(source) {
                engines += near.len();
            }
        }
        [engines as u64, cards as u64]
    }

    #[test]
    fn bytes_are_those_of_a_count_token_by_token() {
        let ways = RowLayout::ALL.into_iter().flat_map(|layout| Route::ALL.map(|route| (layout, route)));
        let ways = ways.flat_map(|(layout, route)| {
            let spans = layout == RowLayout::RankMajor && route == Route::Pxn;
            [(layout, route, false), (layout, route, spans)]
        });
        for (shape, (layout, route, spans)) in [&[4][..], &[2, 2], &[3, 1, 2]]
            .into_iter()
            .flat_map(|shape| ways.clone().map(move |w| (shape, w)))
        {
            let task = task(shape);
            for (me, work) in (0..).zip(dispatch(&task, layout, route, spans).unwrap()) {
                let expected = rows(&task, layout, route, me).map(|rows| rows * task.row_bytes);
                let title = format!("{shape:?} {layout:?} {route:?} {spans} {me}");
                assert_eq!([work.bytes, work.card_bytes], expected, "{title}");
                // A rank that is alone on its node has no work for engines.
                assert!(work.copies * task.row_bytes <= work.bytes, "{title}");
                assert_eq!(work.copies > 0, work.bytes > 0, "{title}");
            }
        }
    }
}
