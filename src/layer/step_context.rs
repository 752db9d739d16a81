//! Context of the nodes of a pass, for both passes.

use std::sync::Arc;

use super::MoeLayer;
use super::checked_experts::CheckedExperts;
use crate::ep::{ExpertParallel, RowCollective, RowPartition};
use crate::error::{Error, ExpertKind};
use crate::overlap::{Handoff, Run};
use crate::rows::RowKernels;
use crate::world::WorldState;

/// The objects that move rows, and those that compute.
pub(super) struct StepContext<'m> {
    exchanges: Vec<Handoff<&'m mut ExpertParallel>>,
    sources: Handoff<&'m mut RowCollective>,
    pub one_each: &'m RowPartition,
    pub experts: CheckedExperts<'m>,
    pub shared: Option<CheckedExperts<'m>>,
    pub hidden: usize,
    pub rows: RowKernels,
}

impl<'m> StepContext<'m> {
    /// The object that moves rows of a chunk.
    pub fn mover(&self, chunk: usize) -> &Handoff<&'m mut ExpertParallel> {
        &self.exchanges[chunk % self.exchanges.len()]
    }

    /// A transfer of a chunk, by a node that is halfway when all ranks have agreed on it.
    pub fn moves<R>(
        &self,
        chunk: usize,
        run: &Run,
        call: impl FnOnce(&mut ExpertParallel) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let run = run.clone();
        self.mover(chunk).with(|ep| ep.on_agreed(move || run.halfway(), |ep| call(ep)))
    }

    /// The same, of what each rank has for all.
    pub fn gathers<R>(
        &self,
        run: &Run,
        call: impl FnOnce(&mut RowCollective) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let run = run.clone();
        self.sources.with(|sources| sources.on_agreed(move || run.halfway(), |sources| call(sources)))
    }
}

impl MoeLayer {
    /// All participants, and the world that ends with them.
    pub(super) fn context(&mut self) -> (StepContext<'_>, Arc<WorldState>) {
        let called = |whose, experts| CheckedExperts { whose, experts };
        let context = StepContext {
            exchanges: self.movers.iter_mut().map(Handoff::new).collect(),
            sources: Handoff::new(&mut self.sources),
            one_each: &self.one_each,
            experts: called(ExpertKind::Routed, &*self.experts),
            shared: self.shared.as_deref().map(|expert| called(ExpertKind::Shared, expert)),
            hidden: self.hidden,
            rows: self.rows,
        };
        (context, Arc::clone(&self.world))
    }
}
