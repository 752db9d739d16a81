//! What the nodes of a pass work with, whichever pass it is.

use std::sync::Arc;

use super::MoeLayer;
use super::call::Called;
use crate::ep::{Collective, ExpertParallel, Shares};
use crate::error::Whose;
use crate::overlap::Slot;
use crate::rows::Rows;
use crate::world::Shared;

/// Who moves rows, and who computes.
pub(super) struct Crew<'m> {
    pub ep: Slot<&'m mut ExpertParallel>,
    pub sources: Slot<&'m mut Collective>,
    pub one_each: &'m Shares,
    pub experts: Called<'m>,
    pub shared: Option<Called<'m>>,
    pub hidden: usize,
    pub rows: Rows,
}

impl MoeLayer {
    /// All who take part, and the world that ends with them.
    pub(super) fn crew(&mut self) -> (Crew<'_>, Arc<Shared>) {
        let called = |whose, experts| Called { whose, experts };
        let crew = Crew {
            ep: Slot::new(&mut self.ep),
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
