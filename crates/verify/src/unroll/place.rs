//! Where the rows of a dispatch go, as every rank finds it.

use std::rc::Rc;

use sidelane_core::error::PlanError;
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    DispatchLayout, GroupRouting, PlanContext, RankRouting, RelayPermutation, RelayPlan, RelaySorter,
};

use super::state::{Placed, Unroller, bad};
use super::{ProofScenario, SeededBug};

impl Unroller<'_> {
    /// Where everything goes, if all ranks dispatch this set of routings.
    pub(super) fn place(&self, routing: usize) -> Result<Placed, PlanError> {
        let ProofScenario { routings, map, align, chunks, mode, spans, gathers, .. } = *self.script;
        let set = routings.get(routing).filter(|set| set.len() == self.members.len()).ok_or(bad(
            "set of routings",
            routing,
            "one that exists, with a routing per rank",
        ))?;
        let (bins, sizing) = (&self.bins, self.sizing);
        let frame = PlanContext { bins, paths: self.paths(0), align, chunks, sizing, mode };
        let top_k = set.iter().map(Routing::top_k).max().unwrap_or(1);
        let mut everyone = GroupRouting::default();
        everyone.sort(&frame, top_k, |me, sorted| {
            let routing = &set[me as usize];
            if gathers {
                sorted.fill_gathered(bins, me, self.gathered(routing), Some(routing));
                return Ok(());
            }
            sorted.fill(map, bins, self.script.notes(), me, routing)
        })?;
        let max_tokens = routings.iter().flatten().map(|routing| routing.tokens()).max().unwrap_or(0);
        let (mut layouts, mut arrivals, mut numbers) = (Vec::new(), Vec::new(), Default::default());
        everyone.each(&frame, (top_k, max_tokens), |frame, known, _| {
            let RankRouting { sorted, crossing, counts, sizes } = known;
            if self.script.slip == Some(SeededBug::ShareStaging) {
                counts.below[bins.count() as usize..].fill(0);
            }
            if spans {
                RelaySorter::default().arrange(frame, (&mut *sorted, &mut *crossing), counts, sizes);
            }
            let top_k = set[frame.paths.me() as usize].top_k();
            let mut layout = DispatchLayout::default();
            let mut own = RelayPermutation::default();
            if self.arrives() {
                own.arrange(frame, sorted, crossing);
                own.pack(frame, sorted, crossing);
            }
            layout.fill(frame, (&*sorted, &*crossing), top_k, counts, sizes);
            if self.arrives() {
                own.add_runs(frame, sorted, &mut layout, (counts, sizes));
            }
            arrivals.push(own.first_run);
            numbers = (counts.clone(), sizes.clone());
            layouts.push(Rc::new(layout));
        });
        let forwards = self.ranks().map(|me| Rc::new(self.forward(me, &layouts))).collect();
        Ok(Placed { layouts, forwards, arrivals, numbers })
    }

    /// Rows that a rank gathers: as many of its tokens as make equal segments.
    fn gathered(&self, routing: &Routing) -> u32 {
        let segments = self.bins.count() / self.bins.ranks();
        routing.tokens() / segments * segments
    }

    /// Which of a source's relays this one is.
    pub(super) fn nth_relay(&self, source: u32, relay: u32) -> usize {
        self.paths(source).relays().take_while(|&other| other != relay).count()
    }

    /// Knowledge of a rank's relay when it has read its headers.
    fn forward(&self, me: u32, layouts: &[Rc<DispatchLayout>]) -> RelayPlan {
        let ProofScenario { align, chunks, mode, spans, gathers, .. } = *self.script;
        let (bins, sizing, paths) = (&self.bins, self.sizing, self.paths(me));
        let frame = PlanContext { bins, paths, align, chunks, sizing, mode };
        let mut forward = RelayPlan::default();
        forward.spans = spans || gathers;
        let sums = self.sizing.partial_bytes.is_some();
        if self.arrives() {
            let of = |source| &layouts[source as usize].blocks[self.nth_relay(source, me)];
            forward.blocks = paths.sources().map(|source| of(source).clone()).collect();
            return forward;
        }
        forward.know(&frame, sums, |source, nth| layouts[source as usize].blocks[nth].clone());
        forward
    }
}
