//! From puts and signals to requests: what lies where the card can read it goes in place, all else is staged.

use super::block::Staged;
use super::connection::{Connection, Halt, SMALL, State};
use super::device::Source;
use super::sender::Kind;
use super::{Remote, SignalMode};
use crate::lane::rail::Target;
use crate::lane::rail::record::Record;
use crate::lane::wait::Patience;
use crate::lane::{FlagLine, RowSource};
use crate::schedule::Tag;

impl Connection {
    fn stage(&self, state: &mut State, len: usize, patience: Patience<'_>) -> Result<Staged, Halt> {
        if let Some(staged) = state.sender.block.stage(len as u32)? {
            return Ok(staged);
        }
        // What fills the staging may still be held back.
        state.sender.hurry();
        self.until(state, patience, |state| state.sender.block.stage(len as u32))
    }

    /// Bytes that can be staged at once.
    fn portion(&self, state: &State) -> usize {
        self.chunk.min(state.sender.block.staging() / 2) as usize
    }

    pub(super) fn put_bytes(
        &self,
        state: &mut State,
        mut to: Target,
        bytes: &[u8],
        patience: Patience<'_>,
    ) -> Result<(), Halt> {
        let source = self.device.source(bytes).filter(|_| bytes.len() > SMALL);
        let most = if source.is_some() { self.chunk as usize } else { self.portion(state) };
        let mut rest = bytes;
        while !rest.is_empty() {
            let (remote, room) = self.remote(to)?;
            let (head, tail) = rest.split_at(rest.len().min(most).min(room as usize));
            match source {
                Some(source) => {
                    let piece = source.piece(bytes.len() - rest.len(), head.len());
                    state.sender.ask(Kind::Write, remote, [piece]);
                }
                None => {
                    let staged = self.stage(state, head.len(), patience)?;
                    fill(&staged, head);
                    state.sender.counters.copied += head.len() as u64;
                    state.sender.ask_staged(Kind::Write, remote, &staged);
                }
            }
            state.sender.post()?;
            (rest, to) = (tail, to.behind(head.len() as u64));
        }
        Ok(())
    }

    /// Rows in place: as many pieces as a request takes, neighbours in one.
    pub(super) fn gather(
        &self,
        state: &mut State,
        mut to: Target,
        (rows, source): (&[u32], RowSource<'_>),
        place: Source,
        patience: Patience<'_>,
    ) -> Result<(), Halt> {
        let per_request = (self.chunk / source.row_bytes).max(1) as usize;
        let row_bytes = source.row_bytes as usize;
        let mut rest = rows;
        while !rest.is_empty() {
            let (remote, room) = self.remote(to)?;
            let most = rest.len().min(per_request).min(room as usize / row_bytes);
            if most == 0 {
                // A row that lies in two pieces of the partner's region.
                self.put_bytes(state, to, source.row(rest[0]), patience)?;
                (rest, to) = (&rest[1..], to.behind(row_bytes as u64));
                continue;
            }
            let count = runs(&rest[..most]).take(self.sges).map(<[u32]>::len).sum::<usize>();
            let (head, tail) = rest.split_at(count);
            let piece = |run: &[u32]| place.piece(run[0] as usize * row_bytes, run.len() * row_bytes);
            state.sender.ask(Kind::Write, remote, runs(head).map(piece));
            state.sender.post()?;
            (rest, to) = (tail, to.behind((count * row_bytes) as u64));
        }
        Ok(())
    }

    /// Rows that are not registered: copied one behind the other.
    pub(super) fn pack(
        &self,
        state: &mut State,
        mut to: Target,
        rows: &[u32],
        source: RowSource<'_>,
        patience: Patience<'_>,
    ) -> Result<(), Halt> {
        let row_bytes = source.row_bytes as usize;
        for group in rows.chunks((self.portion(state) / row_bytes).max(1)) {
            let len = group.len() * row_bytes;
            let (remote, room) = self.remote(to)?;
            if len > self.portion(state) || room < len as u64 {
                for &row in group {
                    self.put_bytes(state, to, source.row(row), patience)?;
                    to = to.behind(row_bytes as u64);
                }
                continue;
            }
            let staged = self.stage(state, len, patience)?;
            for (nth, &row) in group.iter().enumerate() {
                // SAFETY: the staged bytes hold all rows of the group, one behind the other.
                let at = unsafe { staged.at.add(nth * row_bytes) };
                let row = source.row(row);
                // SAFETY: as above; staging overlaps no source.
                unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), at, row_bytes) };
            }
            state.sender.counters.copied += len as u64;
            state.sender.ask_staged(Kind::Write, remote, &staged);
            state.sender.post()?;
            to = to.behind(len as u64);
        }
        Ok(())
    }

    /// Raises a word. Returns whether its number was enough to say so.
    pub(super) fn raise(
        &self,
        state: &mut State,
        to: Target,
        value: u64,
        tag: Option<Tag>,
        patience: Patience<'_>,
    ) -> Result<bool, Halt> {
        let (remote, _) = self.remote(to)?;
        if self.signal == SignalMode::Immediate {
            return self.number(state, to, remote, value, tag, patience);
        }
        if let Some(tag) = tag {
            let at = Remote { addr: remote.addr + FlagLine::tag_offset(value), rkey: remote.rkey };
            self.write_words(state, at, &tag.to_words(), patience)?;
        }
        if self.signal == SignalMode::FetchAdd {
            let growth = state.sent.growth(to, value);
            state.sender.ask_constant(Kind::Add(growth), remote, []);
            return Ok(false);
        }
        self.write_words(state, remote, &[value], patience)?;
        Ok(false)
    }

    /// Words of a flag's line: inside the request if the card takes them there, else staged.
    fn write_words(
        &self,
        state: &mut State,
        to: Remote,
        words: &[u64],
        patience: Patience<'_>,
    ) -> Result<(), Halt> {
        if !state.sender.ask_inside(to, words) {
            let staged = self.stage(state, size_of_val(words), patience)?;
            fill(&staged, bytemuck::cast_slice(words));
            state.sender.ask_staged(Kind::Write, to, &staged);
        }
        Ok(())
    }

    /// Signals by a number, which the partner's receive is told. Returns whether the number was enough.
    fn number(
        &self,
        state: &mut State,
        to: Target,
        remote: Remote,
        value: u64,
        tag: Option<Tag>,
        patience: Patience<'_>,
    ) -> Result<bool, Halt> {
        if !state.receiver.may_signal(state.sender.block.granted()) {
            state.sender.hurry();
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
                state.sender.ask_constant(Kind::Immediate(immediate), remote, []);
            }
            return Ok(true);
        }
        // Only once there is room for it is it counted: who waited in vain may signal again.
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
pub(super) fn fill(staged: &Staged, bytes: &[u8]) {
    debug_assert_eq!(staged.piece.len() as usize, bytes.len());
    let len = bytes.len().min(staged.piece.len() as usize);
    // SAFETY: the staged bytes are the caller's until they are sent, and at least `len`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), staged.at, len) };
}
