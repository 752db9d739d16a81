//! Messages between two ranks.

use super::Communicator;
use crate::dtype::{Dtype, Element};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::lane::Io;
use crate::rows::Stores;
use crate::schedule::collective::{MessageChannel, MessagePart};
use crate::schedule::{Calls, Flag, Operand, Operands, SpanCopy, Tag, TrackOp};

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
