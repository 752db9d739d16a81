//! Where the rows of a dispatch go, as every rank finds it.

use std::rc::Rc;

use super::tell::{Teller, bad};
use super::{Script, Slip};
use crate::error::PlanError;
use crate::plan::{Counts, Crossing, Forward, Frame, Layout, Notes, Sizes, Sorted, Spans};

/// Where the rows of one dispatch go.
pub(super) struct Placed {
    pub layouts: Vec<Rc<Layout>>,
    pub forwards: Vec<Rc<Forward>>,
}

impl Teller<'_> {
    /// Where everything goes, if all ranks dispatch this set of routings.
    pub(super) fn place(&self, routing: usize) -> Result<Placed, PlanError> {
        let Script { routings, map, align, chunks, layout, mode, spans, .. } = *self.script;
        let set = routings.get(routing).filter(|set| set.len() == self.members.len()).ok_or(bad(
            "set of routings",
            routing,
            "one that exists, with a routing per rank",
        ))?;
        let mut all = vec![(Sorted::default(), Crossing::default(), Vec::new()); set.len()];
        let (mut counts, mut sizes) = (Counts::default(), Sizes::default());
        counts.clear(self.control.words());
        for ((me, routing), (sorted, crossing, words)) in (0..).zip(set).zip(&mut all) {
            let paths = self.paths(me);
            sorted.fill(map, &self.bins, Notes::of(layout, mode, spans), me, routing)?;
            if let Some(slots) = mode.slots() {
                sorted.keep(routing.top_k(), |_| slots);
            }
            crossing.fill(&self.bins, &paths, sorted);
            words.clone_from(&sorted.counts);
            crossing.staged(&paths, words);
            // As the first rank sees it: nobody is below.
            counts.add(0, me, words);
        }
        let max_tokens = routings.iter().flatten().map(|routing| routing.tokens()).max().unwrap_or(0);
        let mut layouts = Vec::new();
        for ((me, routing), (sorted, crossing, words)) in (0..).zip(set).zip(&mut all) {
            let paths = self.paths(me);
            let below = counts.below.clone();
            if let Some(slots) = mode.slots() {
                counts.fix(&self.bins, &paths, slots, max_tokens);
            }
            sizes.fill(&self.bins, align, &counts.total, mode.budget());
            if mode.budget().is_some() {
                sorted.keep(routing.top_k(), |bin| sizes.room(&self.bins, &counts, bin));
                crossing.fill(&self.bins, &paths, sorted);
            }
            if self.script.slip == Some(Slip::ShareStaging) {
                counts.below[self.bins.count() as usize..].fill(0);
            }
            let (bins, sizing) = (&self.bins, self.sizing);
            let frame = Frame { bins, paths, align, chunks, sizing, mode };
            if spans {
                Spans::default().arrange(&frame, (&mut *sorted, &mut *crossing), &counts, &sizes);
            }
            let mut layout = Layout::default();
            layout.fill(&frame, (sorted, crossing), routing.top_k(), &counts, &sizes);
            layouts.push(Rc::new(layout));
            counts.below = below;
            counts.below.iter_mut().zip(words).for_each(|(below, count)| *below += *count);
        }
        let forwards = self.ranks().map(|me| Rc::new(self.forward(me, &layouts))).collect();
        Ok(Placed { layouts, forwards })
    }

    /// What the relay of a rank knows when it has read its headers.
    fn forward(&self, me: u32, layouts: &[Rc<Layout>]) -> Forward {
        let paths = self.paths(me);
        let block = |source: u32| {
            let nth = paths.of(source).relays().position(|relay| relay == me);
            nth.map(|nth| layouts[source as usize].blocks[nth].clone())
        };
        let mut forward = Forward::default();
        forward.spans = self.script.spans;
        forward.blocks.extend(paths.sources().filter_map(block));
        if self.script.route == crate::topology::Route::Direct {
            // Headers list no rows where every entry is one.
            for block in &mut forward.blocks {
                block.index.extend(0..block.entries());
            }
        }
        let sums = self.sizing.partial_bytes.is_some();
        forward.fill(&self.bins, paths.served_by(me), self.script.chunks, sums);
        forward
    }
}
