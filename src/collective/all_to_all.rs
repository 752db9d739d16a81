//! Elements of each rank for each.

use std::ops::Range;

use super::Communicator;
use super::call::{CallSpec, Tensors};
use crate::dtype::Element;
use crate::error::{CallKind, Error, PlanError};
use crate::schedule::call::CallMachine;
use crate::schedule::collective::{Program, Round, Rounds};

/// Which bytes go where, kept from call to call.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Per rank: bytes of the input for it.
    sends: Vec<Range<u64>>,
    /// Per rank: where its bytes lie in the output.
    receives: Vec<Range<u64>>,
    /// Per rank: elements that came from it.
    elements: Vec<usize>,
}

impl Counts {
    pub fn new(ranks: u32) -> Self {
        let ranges = || vec![0..0; ranks as usize];
        Counts { sends: ranges(), receives: ranges(), elements: vec![0; ranks as usize] }
    }

    /// Each range behind the last; these are their lengths.
    fn lay(ranges: &mut [Range<u64>], lengths: impl Iterator<Item = u64>) -> u64 {
        let mut at = 0;
        for (range, len) in ranges.iter_mut().zip(lengths) {
            *range = at..at + len;
            at += len;
        }
        at
    }
}

fn nth_of(all: &Range<u64>, slot: u64, nth: u64) -> Range<u64> {
    (all.start + nth * slot).min(all.end)..(all.start + (nth + 1) * slot).min(all.end)
}

impl Communicator {
    /// Part `r` of `send` goes to rank `r`; part `s` of `receive` comes from rank `s`. Both are
    /// `[ranks, n]`, with the same `n` on all ranks. Collective.
    ///
    /// Use it for small tensors: ranks meet once for each `chunk / ranks` bytes of a part, and each
    /// byte is staged. [`Communicator::all_to_all_zero_copy`] is faster for large ones.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`PlanError::WrongShape`] for tensors of different lengths,
    /// or that do not make equal parts.
    pub fn all_to_all<E: Element>(&mut self, send: &[E], receive: &mut [E]) -> Result<(), Error> {
        let (total, ranks) = (size_of_val(send) as u64, u64::from(self.size()));
        let call = CallSpec { kind: CallKind::AllToAll, dtype: E::DTYPE, option: 0, bytes: Some(total) };
        let wrong = match self.equal_parts(send.len()) {
            Ok(columns) if send.len() != receive.len() => {
                let (what, seen, rows) = ("elements to receive", receive.len(), ranks as usize);
                Some(PlanError::WrongShape { what, seen, rows, columns })
            }
            parts => parts.err(),
        };
        if let Some(error) = wrong {
            return Err(self.enter_refused(call, Program::AllToAll, error.into()));
        }
        let part = total / ranks;
        Counts::lay(&mut self.counts.sends, (0..ranks).map(|_| part));
        Counts::lay(&mut self.counts.receives, (0..ranks).map(|_| part));
        let (input, output): (&[u8], &mut [u8]) =
            (bytemuck::cast_slice(send), bytemuck::cast_slice_mut(receive));
        let entered = self.enter_all_to_all(call, 0, input, part)?;
        self.finish_all_to_all(entered, (call, part), input, output)
    }

    /// The first `counts[0]` elements of `send` go to rank 0, the next `counts[1]` to rank 1, and
    /// so on. `receive` becomes the received elements by ascending rank, and the call returns their
    /// number from each rank. Counts travel with the entry, so no rank must know them before.
    /// Collective.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`PlanError::WrongShape`] if counts are not one per rank or
    /// do not add up to the elements of `send`.
    pub fn all_to_all_v<E: Element>(
        &mut self,
        send: &[E],
        counts: &[usize],
        receive: &mut Vec<E>,
    ) -> Result<&[usize], Error> {
        let call = CallSpec { kind: CallKind::AllToAll, dtype: E::DTYPE, option: 1, bytes: None };
        let (ranks, size, me) = (self.size() as usize, size_of::<E>() as u64, self.seat.me as usize);
        let sum = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        let bad = match counts.len() == ranks {
            false => Some(("counts", counts.len(), ranks, 1)),
            true if sum != Some(send.len()) => {
                Some(("elements to send", send.len(), 1, sum.unwrap_or(usize::MAX)))
            }
            true => None,
        };
        if let Some((what, seen, rows, columns)) = bad {
            let error = PlanError::WrongShape { what, seen, rows, columns };
            return Err(self.enter_refused(call, Program::AllToAll, error.into()));
        }
        Counts::lay(&mut self.counts.sends, counts.iter().map(|&count| count as u64 * size));
        let to_others =
            counts.iter().enumerate().filter(|&(to, _)| to != me).map(|(_, &count)| count as u64 * size);
        let most = to_others.max().unwrap_or(0);
        let input: &[u8] = bytemuck::cast_slice(send);
        let entered = self.enter_all_to_all(call, 0, input, most)?;
        self.counts.elements[me] = counts[me];
        let mut longest = most;
        for from in self.others() {
            let said = self.said(from)?;
            self.counts.elements[from as usize] = (said.handle / size) as usize;
            longest = longest.max(said.base);
        }
        let super::all_to_all::Counts { receives, elements, .. } = &mut self.counts;
        let bytes = Counts::lay(receives, elements.iter().map(|&count| count as u64 * size));
        receive.resize((bytes / size) as usize, E::zeroed());
        self.finish_all_to_all(entered, (call, longest), input, bytemuck::cast_slice_mut(receive))?;
        Ok(&self.counts.elements)
    }

    /// Elements of each part of so many.
    pub(super) fn equal_parts(&self, sent: usize) -> Result<usize, PlanError> {
        let rows = self.size() as usize;
        let columns = sent / rows;
        match sent.is_multiple_of(rows) {
            true => Ok(columns),
            false => Err(PlanError::WrongShape { what: "elements to send", seen: sent, rows, columns }),
        }
    }

    /// Enters the `nth` round, and sends each rank its total bytes, and the length of the longest
    /// part that this rank sends to any other.
    fn enter_all_to_all(
        &mut self,
        call: CallSpec,
        nth: u64,
        input: &[u8],
        most: u64,
    ) -> Result<CallMachine, Error> {
        let (slot, stores) = (self.seat.staging.slot(), self.stores(input.len() as u64));
        let Rounds { sends, tags, .. } = &mut self.rounds;
        sends.clear();
        sends.extend(self.counts.sends.iter().map(|all| nth_of(all, slot, nth)));
        for (tag, all) in tags.iter_mut().zip(&self.counts.sends) {
            *tag = call.tag_with(call.bytes.unwrap_or(all.end - all.start), most);
        }
        let round = Round { program: Program::AllToAll, ..Self::empty(call.dtype) };
        self.enter(call, &round, (input, stores))
    }

    /// Takes the parts of the first round, and runs all further rounds: as many as the longest part
    /// needs.
    fn finish_all_to_all(
        &mut self,
        mut entered: CallMachine,
        (call, longest): (CallSpec, u64),
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), Error> {
        let (me, slot) = (self.seat.me as usize, self.seat.staging.slot());
        let bytes = |range: &Range<u64>| range.start as usize..range.end as usize;
        let stores = self.stores(output.len() as u64);
        output[bytes(&self.counts.receives[me])].copy_from_slice(&input[bytes(&self.counts.sends[me])]);
        for nth in 0..longest.div_ceil(slot).max(1) {
            if nth > 0 {
                entered = self.enter_all_to_all(call, nth, input, longest)?;
            }
            for from in self.others() {
                let part = nth_of(&self.counts.receives[from as usize], slot, nth);
                self.rounds.arrived(&self.seat, self.calls.parity(), from, part);
            }
            let mut tensors = Tensors { input: Some(input), output: &mut *output, stores };
            self.carry(entered, Program::AllToAll, &mut tensors)?;
        }
        Ok(())
    }
}
