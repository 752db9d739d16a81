//! Elements of all ranks for all.

use super::Communicator;
use super::call::{CallSpec, Tensors};
use crate::dtype::Element;
use crate::error::{CallKind, Error, PlanError};
use crate::schedule::collective::{Program, Round};

impl Communicator {
    /// `send` of rank `s` becomes part `s` of `receive`, `[ranks, n]`, on all ranks. Collective,
    /// with the same number of elements on all ranks.
    ///
    /// Within a node all ranks read it where its rank has staged it. Large results are written past
    /// the cache: memory sees one read and one write of each byte.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`PlanError::WrongShape`] if `receive` does not hold one
    /// part of each rank.
    pub fn all_gather<E: Element>(&mut self, send: &[E], receive: &mut [E]) -> Result<(), Error> {
        let (part, program) = (size_of_val(send) as u64, Program::AllGather);
        let call = CallSpec { kind: CallKind::AllGather, dtype: E::DTYPE, option: 0, bytes: Some(part) };
        let (ranks, seen) = (self.size() as usize, receive.len());
        if send.len().checked_mul(ranks) != Some(seen) {
            let (what, rows, columns) = ("elements to receive", ranks, send.len());
            let error = PlanError::WrongShape { what, seen, rows, columns };
            return Err(self.enter_refused(call, Program::AllToAll, error.into()));
        }
        let (most, stores) = (self.seat.most(program), self.stores(size_of_val(receive) as u64));
        let (input, output): (&[u8], &mut [u8]) =
            (bytemuck::cast_slice(send), bytemuck::cast_slice_mut(receive));
        let first = |rank: u32| part * u64::from(rank);
        let mut at = 0;
        loop {
            let len = most.min(part - at);
            let round = Round { program, at, len, ..Self::empty(E::DTYPE) };
            self.rounds.tags.fill(call.tag(false));
            let machine = self.enter(call, &round, (input, stores))?;
            for from in 0..self.size() {
                let bytes = first(from) + at..first(from) + at + len;
                self.rounds.gathered(&self.seat, self.calls.parity(), from, bytes);
            }
            self.carry(machine, program, &mut Tensors { input: Some(input), output: &mut *output, stores })?;
            at += len;
            if at == part {
                return Ok(());
            }
        }
    }
}
