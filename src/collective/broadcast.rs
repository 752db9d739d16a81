//! One rank's elements for all.

use super::Communicator;
use super::call::{CallSpec, Tensors};
use crate::dtype::Element;
use crate::error::{CallKind, Error, PlanError};
use crate::schedule::collective::{Program, Round, Shape};

/// From this many bytes on, a broadcast to three or more nodes goes from leader to leader.
const CHAIN: u64 = 64 << 10;

impl Communicator {
    /// `data` of rank `root` becomes that of all ranks. Collective, with the same number of
    /// elements on all ranks.
    ///
    /// Between nodes it goes from the root to a leader of each node. From 64 KiB on, with three
    /// nodes or more, it goes from leader to leader in parts. Within a node all ranks read it in
    /// place.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast<E: Element>(&mut self, root: u32, data: &mut [E]) -> Result<(), Error> {
        let total = size_of_val(data) as u64;
        let call = CallSpec { kind: CallKind::Broadcast, dtype: E::DTYPE, option: root, bytes: Some(total) };
        if root >= self.size() {
            let (parameter, expected) = ("root", "a rank of the group");
            let error = PlanError::BadParameter { parameter, seen: root.into(), expected };
            return Err(self.enter_refused(call, Program::AllToAll, error.into()));
        }
        let shape = if total >= CHAIN && self.seat.nodes.nodes() > 2 { Shape::Chain } else { Shape::Star };
        let program = Program::Broadcast { root, shape };
        let (most, stores) = (self.seat.most(program), self.stores(total));
        let mut tensors = Tensors { input: None, output: bytemuck::cast_slice_mut(data), stores };
        let mut at = 0;
        loop {
            let len = most.min(total - at);
            self.round(call, &Round { program, at, len, ..Self::empty(E::DTYPE) }, &mut tensors)?;
            at += len;
            if at == total {
                return Ok(());
            }
        }
    }
}
