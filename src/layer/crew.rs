//! What the nodes of a pass work with, whichever pass it is.

use std::sync::Arc;

use super::MoeLayer;
use super::call::Called;
use crate::ep::{Collective, ExpertParallel, Shares};
use crate::error::{Error, Whose};
use crate::overlap::{Run, Slot};
use crate::rows::Rows;
use crate::world::Shared;

/// Who moves rows, and who computes.
pub(super) struct Crew<'m> {
    movers: Vec<Slot<&'m mut ExpertParallel>>,
    sources: Slot<&'m mut Collective>,
    pub one_each: &'m Shares,
    pub experts: Called<'m>,
    pub shared: Option<Called<'m>>,
    pub hidden: usize,
    pub rows: Rows,
}

impl<'m> Crew<'m> {
    /// Whoever moves rows of a chunk.
    pub fn mover(&self, chunk: usize) -> &Slot<&'m mut ExpertParallel> {
        &self.movers[chunk % self.movers.len()]
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
        call: impl FnOnce(&mut Collective) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let run = run.clone();
        self.sources.with(|sources| sources.on_agreed(move || run.halfway(), |sources| call(sources)))
    }
}

impl MoeLayer {
    /// All who take part, and the world that ends with them.
    pub(super) fn crew(&mut self) -> (Crew<'_>, Arc<Shared>) {
        let called = |whose, experts| Called { whose, experts };
        let crew = Crew {
            movers: self.movers.iter_mut().map(Slot::new).collect(),
            sources: Slot::new(&mut self.sources),
            one_each: &self.one_each,
            experts: called(Whose::Routed, &*self.experts),
            shared: self.shared.as_deref().map(|expert| called(Whose::Shared, expert)),
            hidden: self.hidden,
            rows: self.rows,
        };
        (crew, Arc::clone(&self.world))
    }
}
