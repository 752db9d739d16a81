//! Sums over all ranks, on all of them or a part on each.

use super::call::{CallSpec, Tensors};
use super::{AllReduceAlgorithm, Communicator};
use crate::dtype::{Element, PartialDtype};
use crate::error::{CallKind, Error, PlanError};
use crate::rows::{Arithmetic, Stores};
use crate::schedule::collective::{Program, Round};

impl Communicator {
    /// Sums `data` over all ranks, element by element, in place: see [`AllReduceAlgorithm`] for the
    /// order. NaN is canonical. Collective; `data` has the same number of elements on all ranks,
    /// perhaps none.
    ///
    /// # Errors
    /// On every rank, before any rank's `data` changes: [`PlanError`] for wrong input
    /// ([`PeerRefused`](crate::error::CallError::PeerRefused) on the others),
    /// [`CallError`](crate::error::CallError) if ranks make different calls.
    /// [`LaneError`](crate::error::LaneError) and [`Cause`](crate::error::Cause) end the world.
    pub fn all_reduce<E: Element>(&mut self, data: &mut [E]) -> Result<(), Error> {
        let total = size_of_val(data) as u64;
        let (program, wire) = match self.sums {
            AllReduceAlgorithm::Direct if total <= self.whole => (Program::OneShot, PartialDtype::F32),
            AllReduceAlgorithm::Direct => (Program::TwoShot { more: false }, PartialDtype::F32),
            AllReduceAlgorithm::Ring(wire) => (Program::Ring, wire),
        };
        let most = self.seat.most(program);
        let dtype = E::DTYPE;
        let call = CallSpec { kind: CallKind::AllReduce, dtype, option: 0, bytes: Some(total) };
        let carried = Arithmetic::try_from(dtype).and_then(|_| match wire.carries(dtype) {
            true => Ok(()),
            false => {
                let (parameter, expected) = ("sums", "partial sums in f32, unless elements are bf16");
                Err(PlanError::BadParameter { parameter, seen: wire as u64, expected })
            }
        });
        if let Err(error) = carried {
            return Err(self.enter_refused(call, program, error.into()));
        }
        // The written bytes have just been read.
        let stores = Stores::Cached;
        let mut tensors = Tensors { input: None, output: bytemuck::cast_slice_mut(data), stores };
        let mut at = 0;
        loop {
            let len = most.min(total - at);
            let more = at + len < total;
            let program = if self.sums == AllReduceAlgorithm::Direct && more {
                Program::TwoShot { more }
            } else {
                program
            };
            self.round(call, &Round { program, at, len, wire, ..Self::empty(dtype) }, &mut tensors)?;
            at += len;
            if !more {
                return Ok(());
            }
        }
    }

    /// Sums part `r` of `send`, `[ranks, n]`, over all ranks into `receive`, `[n]`, of rank `r`: by
    /// ascending rank, rounded once, with the bits of the same part of an
    /// [`all_reduce`](Self::all_reduce) by [`AllReduceAlgorithm::Direct`]. Collective, with the
    /// same `n` on all ranks, perhaps 0.
    ///
    /// Ranks meet once for each `chunk / ranks` bytes of a part, and each byte is staged.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`PlanError::WrongShape`] if `send` does not hold a part of
    /// `receive`'s length for each rank.
    pub fn reduce_scatter<E: Element>(&mut self, send: &[E], receive: &mut [E]) -> Result<(), Error> {
        let (part, program, dtype) = (size_of_val(receive) as u64, Program::ReduceScatter, E::DTYPE);
        let call = CallSpec { kind: CallKind::ReduceScatter, dtype, option: 0, bytes: Some(part) };
        let (ranks, seen, columns) = (self.size() as usize, send.len(), receive.len());
        let checked = match columns.checked_mul(ranks) == Some(seen) {
            true => Arithmetic::try_from(dtype).map(drop),
            false => Err(PlanError::WrongShape { what: "elements to sum", seen, rows: ranks, columns }),
        };
        if let Err(error) = checked {
            return Err(self.enter_refused(call, program, error.into()));
        }
        let (most, stores) = (self.seat.most(program), Stores::Cached);
        let output = bytemuck::cast_slice_mut(receive);
        let mut tensors = Tensors { input: Some(bytemuck::cast_slice(send)), output, stores };
        let mut at = 0;
        loop {
            let len = most.min(part - at);
            let first = |rank: u64| rank * part + at;
            self.rounds.sends.clear();
            self.rounds.sends.extend((0..ranks as u64).map(|rank| first(rank)..first(rank) + len));
            self.round(call, &Round { program, at, len, ..Self::empty(dtype) }, &mut tensors)?;
            at += len;
            if at == part {
                return Ok(());
            }
        }
    }
}
