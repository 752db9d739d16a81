//! From puts and signals to requests: bytes that the NIC can read go in place, all others are
//! staged.
//!
//! A put is cut where the write that is being gathered is full, or where the peer's memory ends,
//! and each part travels with that write or begins the next.

use super::block::Staged;
use super::connection::{Connection, Halt, SMALL, State};
use super::device::Source;
use super::gather::PieceSource;
use super::sender::Kind;
use super::{Remote, SignalMode};
use crate::lane::net::RemoteAddress;
use crate::lane::net::regions::Record;
use crate::lane::wait::WaitLimits;
use crate::lane::{FlagLine, RowSource};
use crate::schedule::Tag;

impl Connection {
    fn stage(&self, state: &mut State, len: usize, patience: WaitLimits<'_>) -> Result<Staged, Halt> {
        if let Some(staged) = state.sender.block.stage(len as u32)? {
            return Ok(staged);
        }
        // What fills the staging may still be held back.
        state.sender.post_soon();
        self.until(state, patience, |state| state.sender.block.stage(len as u32))
    }

    pub(super) fn put_bytes(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        bytes: &[u8],
        patience: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        if let Some(source) = self.device.source(bytes).filter(|_| bytes.len() > SMALL) {
            return self.put_in_place(state, to, source, bytes.len());
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let (remote, together) = self.remote(to)?;
            let room = state.sender.room(remote, 1, true);
            let (head, tail) = rest.split_at(rest.len().min(together.min(room.bytes) as usize));
            let staged = self.stage(state, head.len(), patience)?;
            fill(&staged, head);
            state.sender.counters.copied += head.len() as u64;
            state.sender.write(remote, [staged.piece], PieceSource::Staged(staged.until));
            state.sender.post()?;
            (rest, to) = (tail, to.behind(head.len() as u64));
        }
        Ok(())
    }

    /// Bytes that the NIC reads in place.
    pub(super) fn put_in_place(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        source: Source,
        len: usize,
    ) -> Result<(), Halt> {
        let mut done = 0;
        while done < len {
            let (remote, together) = self.remote(to)?;
            let room = state.sender.room(remote, 1, false);
            let part = (len - done).min(together.min(room.bytes) as usize);
            state.sender.write(remote, [source.piece(done, part)], PieceSource::InPlace);
            state.sender.post()?;
            (done, to) = (done + part, to.behind(part as u64));
        }
        Ok(())
    }

    /// Rows in place: as many pieces as a request takes, local peers in one.
    pub(super) fn gather(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        (rows, source): (&[u32], RowSource<'_>),
        place: Source,
        patience: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        let row_bytes = source.row_bytes as usize;
        let mut rest = rows;
        while let Some((&first, others)) = rest.split_first() {
            let (remote, together) = self.remote(to)?;
            let room = state.sender.room(remote, source.row_bytes, false);
            let most = rest.len().min(together.min(room.bytes) as usize / row_bytes);
            if most == 0 {
                // A row that lies in two pieces of the peer's region.
                self.put_bytes(state, to, source.row(first), patience)?;
                (rest, to) = (others, to.behind(source.row_bytes));
                continue;
            }
            let count = runs(&rest[..most]).take(room.pieces).map(<[u32]>::len).sum::<usize>();
            let (head, tail) = rest.split_at(count);
            let piece = |run: &[u32]| place.piece(run[0] as usize * row_bytes, run.len() * row_bytes);
            state.sender.write(remote, runs(head).map(piece), PieceSource::InPlace);
            state.sender.post()?;
            (rest, to) = (tail, to.behind((count * row_bytes) as u64));
        }
        Ok(())
    }

    /// Rows that are not registered: copied one behind the other.
    pub(super) fn pack(
        &self,
        state: &mut State,
        mut to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        patience: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        let row_bytes = source.row_bytes as usize;
        let large = source.row_bytes > state.sender.bounds().room(true).bytes;
        let mut rest = rows;
        while let Some((&first, others)) = rest.split_first() {
            let (remote, together) = self.remote(to)?;
            if large || together < source.row_bytes {
                self.put_bytes(state, to, source.row(first), patience)?;
                (rest, to) = (others, to.behind(source.row_bytes));
                continue;
            }
            let room = state.sender.room(remote, source.row_bytes, true);
            let most = rest.len().min(together.min(room.bytes) as usize / row_bytes);
            let (head, tail) = rest.split_at(most);
            let len = most * row_bytes;
            let staged = self.stage(state, len, patience)?;
            for (nth, &row) in head.iter().enumerate() {
                // SAFETY: the staged bytes hold all these rows, one behind the other.
                let at = unsafe { staged.at.add(nth * row_bytes) };
                let row = source.row(row);
                // SAFETY: as above; staging overlaps no source.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), at, row_bytes) };
            }
            state.sender.counters.copied += len as u64;
            state.sender.write(remote, [staged.piece], PieceSource::Staged(staged.until));
            state.sender.post()?;
            (rest, to) = (tail, to.behind(len as u64));
        }
        Ok(())
    }

    /// Zeros, which are registered once for all.
    pub(super) fn zeros(&self, state: &mut State, mut to: RemoteAddress, len: u64) -> Result<(), Halt> {
        let mut left = len;
        while left > 0 {
            let (remote, together) = self.remote(to)?;
            let room = state.sender.room(remote, 1, false);
            let zeros = self.device.zeros(left.min(together).min(room.bytes), room.pieces);
            let count: u64 = zeros.clone().map(|piece| u64::from(piece.len())).sum();
            state.sender.write(remote, zeros, PieceSource::Always);
            state.sender.post()?;
            (left, to) = (left - count, to.behind(count));
        }
        Ok(())
    }

    /// Raises a word. Returns whether its number sufficed for that.
    pub(super) fn raise(
        &self,
        state: &mut State,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        patience: WaitLimits<'_>,
    ) -> Result<bool, Halt> {
        let (remote, _) = self.remote(to)?;
        if self.signal == SignalMode::Immediate {
            return self.number(state, to, remote, value, tag, patience);
        }
        state.sender.close();
        if let Some(tag) = tag {
            let at = Remote { addr: remote.addr + FlagLine::tag_offset(value), rkey: remote.rkey };
            self.write_words(state, at, &tag.to_words(), patience)?;
        }
        if self.signal == SignalMode::FetchAdd {
            let growth = state.sent.growth(to, value);
            state.sender.ask(Kind::Add(growth), remote);
            return Ok(false);
        }
        self.write_words(state, remote, &[value], patience)?;
        Ok(false)
    }

    /// Words of a flag's line: inside the request if the NIC takes them there, else staged.
    fn write_words(
        &self,
        state: &mut State,
        to: Remote,
        words: &[u64],
        patience: WaitLimits<'_>,
    ) -> Result<(), Halt> {
        if !state.sender.ask_inside(to, words) {
            let staged = self.stage(state, size_of_val(words), patience)?;
            fill(&staged, bytemuck::cast_slice(words));
            state.sender.ask_staged(Kind::Write, to, &staged);
        }
        Ok(())
    }

    /// Signals by a number, which the peer's receive reports. Returns whether the number was
    /// enough.
    fn number(
        &self,
        state: &mut State,
        to: RemoteAddress,
        remote: Remote,
        value: u64,
        tag: Option<Tag>,
        patience: WaitLimits<'_>,
    ) -> Result<bool, Halt> {
        if !state.receiver.may_signal(state.sender.block.granted()) {
            state.sender.post_soon();
            self.until(state, patience, |state| {
                Ok(state.receiver.may_signal(state.sender.block.granted()).then_some(()))
            })?;
        }
        if tag.is_none()
            && state.sent.fits(to, value)
            && let Ok(immediate) = state.sent.immediate(to, value)
        {
            state.receiver.signals();
            if !state.sender.take_along(immediate) {
                state.sender.ask(Kind::Immediate(immediate), remote);
            }
            return Ok(true);
        }
        state.sender.close();
        // Counted only once there is room for it: a sender whose wait failed may signal again.
        let staged = self.stage(state, 64, patience)?;
        state.receiver.signals();
        let record = Record::Signal { region: to.region, offset: to.offset, value, tag };
        let mut words = record.to_words();
        words[7] = state.sent.record(to, value).into();
        fill(&staged, bytemuck::cast_slice(&words));
        state.sender.ask_staged(Kind::Send, Remote { addr: 0, rkey: 0 }, &staged);
        Ok(false)
    }
}

/// Runs of rows that lie one behind the other.
fn runs(rows: &[u32]) -> impl Iterator<Item = &[u32]> {
    rows.chunk_by(|&row, &next| next.checked_sub(1) == Some(row))
}

/// Copies bytes to where they were staged.
fn fill(staged: &Staged, bytes: &[u8]) {
    debug_assert_eq!(staged.piece.len() as usize, bytes.len());
    let len = bytes.len().min(staged.piece.len() as usize);
    // SAFETY: the staged bytes are the caller's until they are sent, and at least `len`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), staged.at, len) };
}
