//! Places a dispatch for all ranks at once, as each would place it, and counts the requests of each
//! to its engines.

use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, DispatchLayout, GroupRouting, PlanContext, RankRouting, ReceiveMode, RelayPlan, RelaySorter,
    RowLayout, RowMetadata, RowSizes, SumOrder,
};
use sidelane::topology::{Paths, Route};
use sidelane_core::schedule::{ControlLayout, FillContext, WindowId};
use sidelane_model::CopyEngineWork;

use super::Task;
use crate::routing::Decided;

/// In how many parts a block goes to its relay: as everywhere in the library.
const CHUNKS: u8 = 4;

/// What every rank asks for if rows go this way; `spans`: blocks lie in relay order.
pub fn dispatch(
    task: &Task,
    layout: RowLayout,
    route: Route,
    spans: bool,
) -> Result<Vec<CopyEngineWork>, PlanError> {
    let Task { decided, row_bytes, home_bytes, .. } = task;
    let Decided { map, nodes, routings, conditions } = decided;
    let (tokens, top_k) = (conditions.tokens, conditions.top_k);
    let bins = Bins::of_layout(layout, map, SumOrder::Expert, nodes);
    let notes = RowMetadata::of(layout, ReceiveMode::Exact, spans);
    let sizing = RowSizes {
        row_bytes: *row_bytes,
        home_bytes: *home_bytes,
        words_out: notes.words(top_k),
        words_home: 1,
        partial_bytes: None,
    };
    let paths = |me| Paths::new(nodes, route, me);
    let frame = PlanContext {
        bins: &bins,
        paths: paths(0),
        align: 1,
        chunks: CHUNKS,
        sizing,
        mode: ReceiveMode::Exact,
    };
    let (mut everyone, mut layouts) = (GroupRouting::default(), Vec::new());
    everyone.sort(&frame, top_k, |me, sorted| {
        let routing: &Routing = &routings[me as usize];
        sorted.fill(map, &bins, notes, me, routing)
    })?;
    everyone.each(&frame, (top_k, tokens), |frame, known, _| {
        let RankRouting { sorted, crossing, counts, sizes } = known;
        if spans {
            RelaySorter::default().arrange(frame, (&mut *sorted, &mut *crossing), counts, sizes);
        }
        let mut layout = DispatchLayout::default();
        layout.fill(frame, (sorted, crossing), top_k, counts, sizes);
        layouts.push(layout);
    });
    let control =
        ControlLayout::new(&paths(0), &bins, u64::from(tokens) * u64::from(top_k), sizing.note_bytes());
    let work = |me: u32| {
        let frame = PlanContext { paths: paths(me), ..frame };
        let mut forward = RelayPlan::default();
        forward.spans = spans;
        forward.know(&frame, false, |source, nth| layouts[source as usize].blocks[nth].clone());
        // NICs reach the devices.
        let (paths, far) = (paths(me), WindowId::POOL);
        let setting =
            FillContext { paths, control: &control, sizing, chunks: CHUNKS, parity: 0, far, notes: None };
        CopyEngineWork::of_dispatch(&setting, &layouts[me as usize], &forward)
    };
    Ok((0..nodes.ranks()).map(work).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::command::tests::parsed;

    fn task(ranks_per_node: &str) -> Task {
        let line = format!(
            "zipf:1.0 --experts 24 --top-k 4 --tokens 50 --seed 3 --hidden 16 --ranks-per-node {ranks_per_node}"
        );
        Task::resolve(&parsed(&line).unwrap()).unwrap()
    }

    /// Where the rows of a token go: a rank for each choice, or each rank once.
    fn ranks_of(task: &Task, layout: RowLayout, source: u32, token: u32) -> Vec<u32> {
        let experts = task.decided.routings[source as usize].experts_of(token).iter();
        let slots = experts.map(|&expert| task.decided.map.slot_for(source, expert as u32));
        let rank = |slot| {
            (0..task.decided.nodes.ranks()).find(|&r| task.decided.map.slots_of(r).contains(&slot)).unwrap()
        };
        let ranks = slots.map(rank);
        match layout {
            RowLayout::ExpertMajor => ranks.collect(),
            RowLayout::RankMajor => ranks.collect::<BTreeSet<u32>>().into_iter().collect(),
        }
    }

    /// Rows of the engines of a rank and of its NIC, counted token by token.
    fn rows(task: &Task, layout: RowLayout, route: Route, me: u32) -> [u64; 2] {
        let (nodes, mut engines, mut cards) = (&task.decided.nodes, 0, 0);
        let tokens = || 0..task.decided.conditions.tokens;
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
        for (shape, (layout, route, spans)) in
            ["4", "2,2", "3,1,2"].into_iter().flat_map(|shape| ways.clone().map(move |w| (shape, w)))
        {
            let task = task(shape);
            for (me, work) in (0..).zip(dispatch(&task, layout, route, spans).unwrap()) {
                let expected = rows(&task, layout, route, me).map(|rows| rows * task.row_bytes);
                let title = format!("{shape:?} {layout:?} {route:?} {spans} {me}");
                assert_eq!([work.bytes, work.nic_bytes], expected, "{title}");
                // A rank that is alone on its node has no work for engines.
                assert!(work.copies * task.row_bytes <= work.bytes, "{title}");
                assert_eq!(work.copies > 0, work.bytes > 0, "{title}");
            }
        }
    }
}
