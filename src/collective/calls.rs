//! The calls: sums, elements from every rank to every rank, and messages between two ranks.
//!
//! Those of all ranks check their tensors, choose a program, and go in [`rounds`](super::rounds) of
//! as many bytes as a place of the window has room for:
//!
//! ```text
//!   all_reduce, reduce_scatter, reduce, broadcast, all_gather   | len | len | rest |   at, at + len, ...: one round each
//!   all_to_all                                                  a slot of each part in each round
//!   all_to_all_zero_copy                                        one round: each part to its final place
//! ```
//!
//! Messages go in parts of a slot, and their sender is at most two parts ahead.

use std::ops::Range;

use super::rounds::{CallSpec, Tensors};
use super::{AllReduceAlgorithm, Communicator};
use crate::dtype::{Dtype, Element, PartialDtype};
use crate::error::{CallError, CallKind, Error, MemoryError, PlanError};
use crate::lane::Io;
use crate::rows::{Arithmetic, Stores};
use crate::schedule::call_program::CallMachine;
use crate::schedule::collective::{MessageChannel, MessagePart, Program, Round, Rounds, Shape};
use crate::schedule::{Calls, Flag, Operand, Operands, PutSource, SpanCopy, Tag, TrackOp, WindowId};

impl Communicator {
    /// Sums `data` over all ranks, element by element, in place: see [`AllReduceAlgorithm`] for the
    /// order. NaN is canonical. Collective; `data` has the same number of elements on all ranks,
    /// perhaps none.
    ///
    /// # Errors
    /// On every rank, before any rank's `data` changes: [`PlanError`] for wrong input
    /// ([`PeerRefused`](crate::error::CallError::PeerRefused) on the others),
    /// [`CallError`] if ranks make different calls.
    /// [`LaneError`](crate::error::LaneError) and [`Cause`](crate::error::Cause) end the world.
    pub fn all_reduce<E: Element>(&mut self, data: &mut [E]) -> Result<(), Error> {
        let total = size_of_val(data) as u64;
        let (program, wire) = match self.sums {
            AllReduceAlgorithm::Direct if total <= self.whole => (Program::OneShot, PartialDtype::F32),
            AllReduceAlgorithm::Direct => (Program::TwoShot { more: false }, PartialDtype::F32),
            AllReduceAlgorithm::Ring(wire) => (Program::Ring, wire),
        };
        let most = self.state.view.most(program);
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
        let (most, stores) = (self.state.view.most(program), Stores::Cached);
        let output = bytemuck::cast_slice_mut(receive);
        let mut tensors = Tensors { input: Some(bytemuck::cast_slice(send)), output, stores };
        let mut at = 0;
        loop {
            let len = most.min(part - at);
            let first = |rank: u64| rank * part + at;
            self.state.rounds.sends.clear();
            self.state.rounds.sends.extend((0..ranks as u64).map(|rank| first(rank)..first(rank) + len));
            self.round(call, &Round { program, at, len, ..Self::empty(dtype) }, &mut tensors)?;
            at += len;
            if at == part {
                return Ok(());
            }
        }
    }

    /// Sums `data` over all ranks on rank `root`, in place: by ascending rank, rounded once, with
    /// the bits of an [`all_reduce`](Self::all_reduce) by [`AllReduceAlgorithm::Direct`]. The data
    /// of the other ranks stays. Collective, with the same number of elements on all ranks.
    ///
    /// It is a [`reduce_scatter`](Self::reduce_scatter) with one part: each rank sends its elements
    /// once, and the root adds them. Ranks meet once for each `chunk / ranks` bytes.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`PlanError::BadParameter`] for a root that does not exist.
    pub fn reduce<E: Element>(&mut self, root: u32, data: &mut [E]) -> Result<(), Error> {
        let (total, program, dtype) = (size_of_val(data) as u64, Program::ReduceScatter, E::DTYPE);
        let call = CallSpec { kind: CallKind::Reduce, dtype, option: root, bytes: Some(total) };
        let checked = if root < self.size() {
            Arithmetic::try_from(dtype).map(drop)
        } else {
            let (parameter, expected) = ("root", "a rank of the group");
            Err(PlanError::BadParameter { parameter, seen: root.into(), expected })
        };
        if let Err(error) = checked {
            return Err(self.enter_refused(call, program, error.into()));
        }
        let (ranks, most) = (self.size(), self.state.view.most(program));
        let output = bytemuck::cast_slice_mut(data);
        let mut tensors = Tensors { input: None, output, stores: Stores::Cached };
        let mut at = 0;
        loop {
            let len = most.min(total - at);
            self.state.rounds.sends.clear();
            let part = |rank| if rank == root { at..at + len } else { 0..0 };
            self.state.rounds.sends.extend((0..ranks).map(part));
            self.round(call, &Round { program, at, len, ..Self::empty(dtype) }, &mut tensors)?;
            at += len;
            if at == total {
                return Ok(());
            }
        }
    }

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
        let (most, stores) = (self.state.view.most(program), self.stores(size_of_val(receive) as u64));
        let (input, output): (&[u8], &mut [u8]) =
            (bytemuck::cast_slice(send), bytemuck::cast_slice_mut(receive));
        let first = |rank: u32| part * u64::from(rank);
        let mut at = 0;
        loop {
            let len = most.min(part - at);
            let round = Round { program, at, len, ..Self::empty(E::DTYPE) };
            self.state.rounds.tags.fill(call.tag(false));
            let machine = self.enter(call, &round, (input, stores))?;
            for from in 0..self.size() {
                let bytes = first(from) + at..first(from) + at + len;
                self.state.rounds.gathered(&self.state.view, self.state.calls.parity(), from, bytes);
            }
            self.carry(machine, program, &mut Tensors { input: Some(input), output: &mut *output, stores })?;
            at += len;
            if at == part {
                return Ok(());
            }
        }
    }

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
        let shape =
            if total >= CHAIN && self.state.view.nodes.nodes() > 2 { Shape::Chain } else { Shape::Star };
        let program = Program::Broadcast { root, shape };
        let (most, stores) = (self.state.view.most(program), self.stores(total));
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
        ElementRanges::lay(&mut self.counts.sends, (0..ranks).map(|_| part));
        ElementRanges::lay(&mut self.counts.receives, (0..ranks).map(|_| part));
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
        let (ranks, size, me) = (self.size() as usize, size_of::<E>() as u64, self.state.view.me as usize);
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
        ElementRanges::lay(&mut self.counts.sends, counts.iter().map(|&count| count as u64 * size));
        let to_others =
            counts.iter().enumerate().filter(|&(to, _)| to != me).map(|(_, &count)| count as u64 * size);
        let most = to_others.max().unwrap_or(0);
        let input: &[u8] = bytemuck::cast_slice(send);
        let entered = self.enter_all_to_all(call, 0, input, most)?;
        self.counts.elements[me] = counts[me];
        let mut longest = most;
        for from in self.state.others() {
            let said = self.state.said(from)?;
            self.counts.elements[from as usize] = (said.handle / size) as usize;
            longest = longest.max(said.base);
        }
        let ElementRanges { receives, elements, .. } = &mut self.counts;
        let bytes = ElementRanges::lay(receives, elements.iter().map(|&count| count as u64 * size));
        receive.resize((bytes / size) as usize, E::zeroed());
        self.finish_all_to_all(entered, (call, longest), input, bytemuck::cast_slice_mut(receive))?;
        Ok(&self.counts.elements)
    }

    /// Elements of each part of so many.
    fn equal_parts(&self, sent: usize) -> Result<usize, PlanError> {
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
        let (slot, stores) = (self.state.view.staging.slot(), self.stores(input.len() as u64));
        let Rounds { sends, tags, .. } = &mut self.state.rounds;
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
        let (me, slot) = (self.state.view.me as usize, self.state.view.staging.slot());
        let bytes = |range: &Range<u64>| range.start as usize..range.end as usize;
        let stores = self.stores(output.len() as u64);
        output[bytes(&self.counts.receives[me])].copy_from_slice(&input[bytes(&self.counts.sends[me])]);
        for nth in 0..longest.div_ceil(slot).max(1) {
            if nth > 0 {
                entered = self.enter_all_to_all(call, nth, input, longest)?;
            }
            for from in self.state.others() {
                let part = nth_of(&self.counts.receives[from as usize], slot, nth);
                self.state.rounds.arrived(&self.state.view, self.state.calls.parity(), from, part);
            }
            let mut tensors = Tensors { input: Some(input), output: &mut *output, stores };
            self.carry(entered, Program::AllToAll, &mut tensors)?;
        }
        Ok(())
    }

    /// Part `r` of `send` goes to rank `r`; part `s` of the result came from rank `s`. Both are
    /// `[ranks, n]`, with the same `n` on all ranks. Collective.
    ///
    /// Use it for large tensors: every rank writes its parts directly to the place where they are
    /// read, and each byte is copied once. This needs a second synchronization, so
    /// [`Communicator::all_to_all`] is faster for small ones. On one node of two cores the limit is
    /// 64 KiB with eight ranks, and 256 KiB with two.
    ///
    /// The result lies in this rank's window, which has room for one
    /// ([`CommunicatorBuilder::zero_copy_bytes`](super::CommunicatorBuilder::zero_copy_bytes)). It
    /// borrows the communicator: others may write there again when this rank makes its next call.
    ///
    /// ```
    /// # use sidelane::{World, collective::Communicator};
    /// # let ranks = World::threads(2)?.into_iter().map(|world| {
    /// #     std::thread::spawn(move || -> sidelane::Result<()> {
    /// let mut group = Communicator::builder(&world.all()?).zero_copy_bytes(1 << 10).build()?;
    /// let me = world.rank() as f32;
    /// let came = group.all_to_all_zero_copy(&[10.0 * me, 10.0 * me + 1.0])?;     // a part of one element for each of two ranks
    /// assert_eq!(came, [me, 10.0 + me]);
    /// #         Ok(())
    /// #     })
    /// # });
    /// # for rank in ranks.collect::<Vec<_>>() {
    /// #     rank.join().unwrap()?;
    /// # }
    /// # Ok::<(), sidelane::Error>(())
    /// ```
    ///
    /// So this does not compile:
    ///
    /// ```compile_fail,E0499
    /// # fn step(group: &mut sidelane::collective::Communicator) -> sidelane::Result<()> {
    /// let came = group.all_to_all_zero_copy(&[1.0f32, 2.0])?;
    /// group.all_reduce(&mut [0.0f32])?;
    /// println!("{came:?}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`];
    /// [`PlanError::WrongShape`] for a tensor that does not
    /// make equal parts. A tensor larger than the room gives [`MemoryError::OutOfSpace`] on all
    /// ranks, before anything moves.
    pub fn all_to_all_zero_copy<E: Element>(&mut self, send: &[E]) -> Result<&[E], Error> {
        let (total, ranks) = (size_of_val(send) as u64, u64::from(self.size()));
        let (program, dtype) = (Program::ZeroCopy, E::DTYPE);
        let call = CallSpec { kind: CallKind::AllToAll, dtype, option: 2, bytes: Some(total) };
        let fits = self.equal_parts(send.len()).map_err(Error::from).and_then(|_| self.fits(total));
        if let Err(error) = fits {
            return Err(self.enter_refused(call, program, error));
        }
        let (part, stores) = (total / ranks, self.stores(total));
        let round = Round { program, len: part, ..Self::empty(dtype) };
        self.round(
            call,
            &round,
            &mut Tensors { input: Some(bytemuck::cast_slice(send)), output: &mut [], stores },
        )?;
        let (at, window) = (self.state.view.landed(part).start, WindowId::POOL);
        let own = PutSource::Window { owner: self.state.view.me, window };
        Ok(bytemuck::cast_slice(self.state.port.source(own, at, Some(total), &Io::default())?))
    }

    fn fits(&self, bytes: u64) -> Result<(), Error> {
        let (room, rank) = (self.state.view.staging.room(), self.state.view.me);
        if bytes <= room {
            return Ok(());
        }
        let (space, setting) = ("landing", "landing");
        Err(MemoryError::OutOfSpace { rank, asked: bytes, free: room, total: room, space, setting }.into())
    }
}

/// From this many bytes on, a broadcast to three or more nodes goes from leader to leader.
const CHAIN: u64 = 64 << 10;

/// Which bytes go where, kept from call to call.
#[derive(Debug, Default)]
pub(super) struct ElementRanges {
    /// Per rank: bytes of the input for it.
    sends: Vec<Range<u64>>,
    /// Per rank: where its bytes lie in the output.
    receives: Vec<Range<u64>>,
    /// Per rank: elements that came from it.
    elements: Vec<usize>,
}

impl ElementRanges {
    pub fn new(ranks: u32) -> Self {
        let ranges = || vec![0..0; ranks as usize];
        ElementRanges { sends: ranges(), receives: ranges(), elements: vec![0; ranks as usize] }
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
    /// Sends `data` to a rank, which must [`receive`](Communicator::receive) the same number of
    /// elements. Messages of a pair match in order. The call returns when all of it is in flight,
    /// and `data` may then change. At most two slots lie unread at the receiver, so a longer
    /// message waits for the receiver.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for this rank itself or a rank that does not exist;
    /// [`CallError::MessageRefused`] if the receiver expected another message. A long message
    /// reports that itself; otherwise a later call does ([`Communicator::flush`] for certain).
    /// [`LaneError::Deadline`](crate::error::LaneError) if the receiver does not come, and the
    /// cause if the world has failed.
    pub fn send<E: Element>(&mut self, to: u32, data: &[E]) -> Result<(), Error> {
        self.pass(to, E::DTYPE, Some(bytemuck::cast_slice(data)), None)
    }

    /// Receives the next message from a rank: `data.len()` elements.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`]; [`CallError::Disagree`] if the message has another length or
    /// type. Such a message is dropped, `data` is unchanged, the sender learns of it, and the next
    /// message can be received. [`LaneError::Deadline`](crate::error::LaneError) if none comes, and
    /// the cause if the world has failed.
    pub fn receive<E: Element>(&mut self, from: u32, data: &mut [E]) -> Result<(), Error> {
        self.pass(from, E::DTYPE, None, Some(bytemuck::cast_slice_mut(data)))
    }

    /// Sends to a rank and receives from it at once. If both ranks do so, neither waits for the
    /// other to receive first.
    ///
    /// # Errors
    /// As [`Communicator::send`] and [`Communicator::receive`].
    pub fn send_receive<E: Element>(
        &mut self,
        with: u32,
        send: &[E],
        receive: &mut [E],
    ) -> Result<(), Error> {
        let receive = Some(bytemuck::cast_slice_mut(receive));
        self.pass(with, E::DTYPE, Some(bytemuck::cast_slice(send)), receive)
    }

    /// Returns when a rank has taken all messages that were sent to it.
    ///
    /// # Errors
    /// As [`Communicator::send`].
    pub fn flush(&mut self, to: u32) -> Result<(), Error> {
        self.check_peer(to)?;
        let pair = self.outgoing[to as usize].pair;
        if let Some(value) = pair.last() {
            self.answered(to, value)?;
        }
        self.tell_refusals(to)
    }

    fn check_peer(&self, peer: u32) -> Result<(), PlanError> {
        if peer >= self.size() || peer == self.state.view.me {
            let (parameter, expected) = ("peer", "another rank of the group");
            return Err(PlanError::BadParameter { parameter, seen: peer.into(), expected });
        }
        Ok(())
    }

    /// Moves all parts of a message there and of one back, in turn. Errors of a message are
    /// reported when all of it has passed.
    fn pass(
        &mut self,
        peer: u32,
        dtype: Dtype,
        send: Option<&[u8]>,
        mut receive: Option<&mut [u8]>,
    ) -> Result<(), Error> {
        self.check_peer(peer)?;
        self.state.lanes.check()?;
        let parts = |bytes: usize| MessageChannel::parts(&self.state.view, bytes as u64);
        let sends = send.map_or(0, |data| parts(data.len()));
        let mut receives = receive.as_ref().map_or(0, |data| parts(data.len()));
        let mut wrong = Ok(());
        let mut nth = 0;
        while nth < sends.max(receives) {
            for passing in MessagePart::parts(nth, sends, receives).into_iter().flatten() {
                match (passing.sends, send, receive.as_deref_mut()) {
                    (true, Some(data), _) => self.send_part(peer, dtype, data, nth)?,
                    (false, _, Some(data)) => {
                        let (theirs, taken) = self.receive_part(peer, dtype, data, nth)?;
                        receives = theirs;
                        wrong = wrong.and(taken);
                    }
                    _ => {}
                }
            }
            nth += 1;
        }
        wrong?;
        if send.is_some() { self.tell_refusals(peer) } else { Ok(()) }
    }

    fn send_part(&mut self, to: u32, dtype: Dtype, data: &[u8], nth: u64) -> Result<(), Error> {
        let outgoing = &mut self.outgoing[to as usize];
        outgoing.pair.advance();
        let pair = outgoing.pair;
        if let Some(value) = pair.freed() {
            self.answered(to, value)?;
        }
        let span =
            pair.sent(&self.state.view, MessageChannel::part(&self.state.view, data.len() as u64, nth));
        let tag = Tag {
            kind: CallKind::Send,
            options: dtype as u32,
            handle: data.len() as u64,
            base: nth,
            ..Tag::default()
        };
        let items = pair.send(&self.state.view);
        self.run_parts(&items, &[span], tag, pair.value(), data)
    }

    /// Waits until the receiver has answered a part, and reads how many messages it has refused. A
    /// refusal does not stop the sender, because the receiver counts on the rest.
    fn answered(&mut self, to: u32, value: u64) -> Result<(), Error> {
        let free = [self.outgoing[to as usize].pair.free()];
        self.run_parts(&free, &[], Tag::default(), value, &[])?;
        let refused = (self.state.port.flag(to, Flag::Read)?.value() % Calls::STEP) as u8;
        let outgoing = &mut self.outgoing[to as usize];
        outgoing.unsaid += u32::from(refused.wrapping_sub(outgoing.heard));
        outgoing.heard = refused;
        Ok(())
    }

    /// Reports refusals that the caller does not know yet.
    fn tell_refusals(&mut self, to: u32) -> Result<(), Error> {
        match std::mem::take(&mut self.outgoing[to as usize].unsaid) {
            0 => Ok(()),
            count => Err(CallError::MessageRefused { rank: self.state.view.me, peer: to, count }.into()),
        }
    }

    /// Receives a part: how many the message has, and whether it is the one that is wanted.
    fn receive_part(
        &mut self,
        from: u32,
        dtype: Dtype,
        data: &mut [u8],
        nth: u64,
    ) -> Result<(u64, Result<(), Error>), Error> {
        self.incoming[from as usize].pair.advance();
        let pair = self.incoming[from as usize].pair;
        self.run_parts(&[pair.receive()], &[], Tag::default(), pair.value(), &[])?;
        let tag = self.state.port.flag(from, Flag::Block)?.tag(pair.value());
        let pairs = [
            ("type of the elements", dtype as u64, tag.options.into()),
            ("bytes", data.len() as u64, tag.handle),
        ];
        let differs = pairs.into_iter().find(|(_, mine, theirs)| mine != theirs);
        let taken = match differs {
            None => {
                let part = MessageChannel::part(&self.state.view, data.len() as u64, nth);
                self.state.copy(&pair.received(&self.state.view, part), data, Stores::Cached)
            }
            Some((what, mine, theirs)) => {
                let (kind, rank) = (CallKind::Receive, self.state.view.me);
                let call = pair.value() / Calls::STEP;
                Err(CallError::Disagree { call, kind, what, rank, peer: from, mine, theirs }.into())
            }
        };
        let incoming = &mut self.incoming[from as usize];
        if taken.is_err() && nth == 0 {
            incoming.refused = incoming.refused.wrapping_add(1);
        }
        let answer = [pair.answer(&self.state.view, incoming.refused)];
        self.run_parts(&answer, &[], Tag::default(), pair.value(), &[])?;
        Ok((MessageChannel::parts(&self.state.view, tag.handle), taken))
    }

    fn run_parts(
        &mut self,
        items: &[TrackOp],
        spans: &[SpanCopy],
        tag: Tag,
        call: u64,
        input: &[u8],
    ) -> Result<(), Error> {
        let table = [Operand::Spans { first: 0, count: spans.len() as u32 }];
        self.state.rounds.tags.fill(tag);
        let operands =
            Operands { table: &table, spans, tags: &self.state.rounds.tags, call, ..Operands::default() };
        let mut io = Io { input, ..Io::default() };
        let result = self.state.host.run(&self.state.port, items, &operands, &mut io, Stores::Cached);
        result.map_err(|error| self.state.world.fail(&self.state.lanes.world_ranks, error))
    }
}
