//! What an executor holds: windows, and a lane to every rank.
//!
//! All addresses are (window, offset, length) and are checked here, before anything is posted; the pointers that the
//! vector loops get come from those checks.

use std::sync::Arc;

use super::wait::{self, Interrupted};
use super::{FlagLine, Lanes, Reach};
use crate::error::{Error, LaneError, MemoryError};
use crate::memory::Mapped;
use crate::plan::RowRun;
use crate::rows::{Rows, Stores};
use crate::schedule::{Control, Flag, Place, SpanCopy, Tag, WindowId};

/// A window: one range of bytes at each rank of the group.
#[derive(Clone, Debug)]
pub struct Window {
    /// The mapping in which the windows of this node lie.
    pub mapped: Arc<Mapped>,
    /// Per rank of the group: where its part is.
    pub parts: Vec<Part>,
}

/// One rank's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its member of the mapping.
    pub member: u32,
    /// Number of the region at its owner, for partners that have it not mapped.
    pub region: u32,
    /// First byte in the member or region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Window {
    /// Address of bytes in the part of a rank whose memory is mapped here.
    fn at(&self, rank: u32, offset: u64, len: u64) -> Result<std::ptr::NonNull<u8>, MemoryError> {
        let part = self.part(rank, offset, len)?;
        self.mapped.at(part.member, part.offset + offset, len)
    }

    /// The part of a rank, if the bytes lie inside it.
    fn part(&self, rank: u32, offset: u64, len: u64) -> Result<&Part, MemoryError> {
        let part = self.parts.get(rank as usize);
        let size = part.map_or(0, |p| p.len);
        match part {
            Some(part) if offset.checked_add(len).is_some_and(|end| end <= size) => Ok(part),
            _ => Err(MemoryError::OutOfBounds { peer: rank, offset, len, size }),
        }
    }
}

/// The caller's tensors of one run: where [`Place::Input`] reads and a sum writes.
#[derive(Debug, Default)]
pub struct Io<'a> {
    /// Rows that are dispatched.
    pub input: &'a [u8],
    /// Rows that are summed.
    pub output: &'a mut [u8],
    /// One `f32` per (token, choice) that comes home.
    pub weights: &'a mut [f32],
}

/// Where the rows of a run come from.
#[derive(Clone, Copy, Debug)]
pub struct RowSource<'a> {
    /// The caller's rows.
    pub input: &'a [u8],
    /// Bytes of one row.
    pub row_bytes: u64,
    /// Which rows, for all runs of a call.
    pub rows: &'a [u32],
}

impl<'a> RowSource<'a> {
    /// The rows of one run, all inside the input.
    pub(super) fn checked(&self, run: RowRun) -> Result<&'a [u32], LaneError> {
        let (row_bytes, size) = (self.row_bytes, self.input.len() as u64);
        let bad = |row: u64| LaneError::SourceBounds {
            offset: row.saturating_mul(row_bytes),
            len: row_bytes,
            size,
        };
        let (first, count) = (run.first as usize, run.count as usize);
        let index =
            self.rows.get(first..first.saturating_add(count)).ok_or_else(|| bad(self.rows.len() as u64))?;
        match index.iter().max() {
            Some(&last) if (u64::from(last) + 1).saturating_mul(row_bytes) > size => Err(bad(last.into())),
            _ => Ok(index),
        }
    }
}

/// The windows of one owner, and the lanes to reach them.
#[derive(Debug)]
pub struct Port {
    lanes: Arc<Lanes>,
    windows: Vec<Window>,
    /// The window whose first bytes are the owner's flags.
    flags: WindowId,
}

impl Port {
    /// A port to `windows`; `flags` names the one that begins with the flag lines.
    pub fn new(lanes: Arc<Lanes>, windows: Vec<Window>, flags: WindowId) -> Self {
        Port { lanes, windows, flags }
    }

    /// The lanes.
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(super) fn window(&self, window: WindowId) -> Result<&Window, MemoryError> {
        let missing = MemoryError::OutOfBounds { peer: self.lanes.rank, offset: 0, len: 0, size: 0 };
        self.windows.get(window.0 as usize).ok_or(missing)
    }

    pub(super) fn reach(&self, to: u32) -> Result<&Reach, LaneError> {
        let missing =
            LaneError::NoLane { rank: self.lanes.rank, peer: to, missing: "no such rank in the group" };
        self.lanes.reach.get(to as usize).ok_or(missing)
    }

    /// Moves one span. Returns when the source may be changed.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`LaneError::SourceBounds`], and whatever ends a wait for credit.
    pub fn put(&self, to: u32, span: &SpanCopy, input: &[u8], stores: Stores) -> Result<(), Error> {
        let from = match span.from {
            Place::Input => {
                let size = input.len() as u64;
                if span.from_offset.checked_add(span.len).is_none_or(|end| end > size) {
                    return Err(
                        LaneError::SourceBounds { offset: span.from_offset, len: span.len, size }.into()
                    );
                }
                input[span.from_offset as usize..].as_ptr()
            }
            Place::Own(window) => {
                self.window(window)?.at(self.lanes.rank, span.from_offset, span.len)?.as_ptr().cast_const()
            }
        };
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                let at = self.window(span.to)?.at(to, span.to_offset, span.len)?;
                // SAFETY: both ends were checked just now; the schedule's licences keep others away from them.
                unsafe { self.lanes.rows.copy(at.as_ptr(), from, span.len as usize, stores) };
                Ok(())
            }
            Reach::Rail(link) => {
                let part = self.window(span.to)?.part(to, span.to_offset, span.len)?;
                // SAFETY: `len` readable bytes, checked above, that nobody writes while they are offered.
                let bytes = unsafe { std::slice::from_raw_parts(from, span.len as usize) };
                link.put(part.region, part.offset + span.to_offset, bytes, self.lanes.patience(to))
                    .map_err(|e| self.no_credit(to, e))
            }
        }
    }

    /// Moves one run of rows, and its rows of zeros, to `window` at `base + run.to_row * row_bytes`.
    ///
    /// # Errors
    /// As [`Port::put`].
    pub fn put_run(
        &self,
        to: u32,
        (window, base): (WindowId, u64),
        run: RowRun,
        source: RowSource<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        let index = source.checked(run)?;
        let RowSource { row_bytes, input, .. } = source;
        // What does not fit into 64 bits fits into no window either.
        let bytes = |rows: u32| u64::from(rows).saturating_mul(row_bytes);
        let offset = base.saturating_add(bytes(run.to_row));
        let (len, pad) = (bytes(run.count), bytes(run.pad));
        let all = len.saturating_add(pad);
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                let at = self.window(window)?.at(to, offset, all)?.as_ptr();
                let kernels = self.lanes.rows;
                // SAFETY: the target was checked for all rows and zeros, each source row by `checked`.
                unsafe {
                    kernels.gather(at, input.as_ptr(), row_bytes as usize, index, stores);
                    if pad > 0 {
                        kernels.zero(at.add(len as usize), pad as usize, stores);
                    }
                }
                Ok(())
            }
            Reach::Rail(link) => {
                let part = self.window(window)?.part(to, offset, all)?;
                link.put_run((part.region, part.offset + offset), run, source, self.lanes.patience(to))
                    .map_err(|e| self.no_credit(to, e))
            }
        }
    }

    /// Raises this rank's flag at `to`, after all its earlier puts and reads.
    ///
    /// # Errors
    /// As [`Port::put`].
    pub fn signal(&self, to: u32, flag: Flag, value: u64, tag: Option<&Tag>) -> Result<(), Error> {
        let offset = Control::flag(self.lanes.rank, flag, self.lanes.ranks());
        let window = self.window(self.flags)?;
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                // Streaming stores are not ordered by a release store.
                Rows::fence();
                // SAFETY: a flag line of the owner's window, checked; windows are aligned to cache lines.
                unsafe { FlagLine::new(window.at(to, offset, 64)?) }.raise(value, tag);
                Ok(())
            }
            Reach::Rail(link) => {
                let part = window.part(to, offset, 64)?;
                link.signal(part.region, part.offset + offset, value, tag.copied(), self.lanes.patience(to))
                    .map_err(|e| self.no_credit(to, e))
            }
        }
    }

    /// Waits until `from`'s flag here has at least `value`. Receives from the rails meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Deadline`], or the world's [`Cause`](crate::error::Cause) of death.
    pub fn wait(&self, from: u32, flag: Flag, value: u64) -> Result<(), Error> {
        let lane = self.reach(from)?.name();
        let line = self.flag(from, flag)?;
        wait::until(line, value, self.lanes.patience(from), || self.lanes.progress()).map_err(
            |(seen, why)| match why {
                Interrupted::Dead(cause) => cause.into(),
                Interrupted::Late { waited } => LaneError::Deadline {
                    rank: self.lanes.rank,
                    peer: from,
                    lane,
                    flag: flag as u32,
                    awaited: value,
                    seen,
                    waited,
                }
                .into(),
            },
        )
    }

    /// Returns when everything put or signalled so far has landed. On a node it has when the put returns.
    ///
    /// # Errors
    /// [`LaneError::Deadline`] if a partner takes nothing, or the world's cause of death.
    pub fn quiet(&self) -> Result<(), Error> {
        Rows::fence();
        for (reach, to) in self.lanes.reach.iter().zip(0..) {
            if let Reach::Rail(link) = reach {
                link.flush(self.lanes.patience(to)).map_err(|e| self.no_credit(to, e))?;
            }
        }
        Ok(())
    }

    /// The flag that `from` raises here.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if there is no such rank.
    pub fn flag(&self, from: u32, flag: Flag) -> Result<FlagLine<'_>, MemoryError> {
        if from >= self.lanes.ranks() {
            return Err(MemoryError::OutOfBounds { peer: from, offset: 0, len: 64, size: 0 });
        }
        let offset = Control::flag(from, flag, self.lanes.ranks());
        // SAFETY: a flag line of this rank's window, checked; the window keeps its mapping alive.
        Ok(unsafe { FlagLine::new(self.window(self.flags)?.at(self.lanes.rank, offset, 64)?) })
    }

    /// Reads elements of a window of this node. Its writer must have signalled.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn read<T: bytemuck::Pod>(
        &self,
        owner: u32,
        window: WindowId,
        offset: u64,
        out: &mut [T],
    ) -> Result<(), MemoryError> {
        let window = self.window(window)?;
        let part = window.part(owner, offset, size_of_val(out) as u64)?;
        window.mapped.read(part.member, part.offset + offset, out)
    }

    /// Writes elements to this rank's own window, under the schedule's licence.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn write<T: bytemuck::Pod>(
        &self,
        window: WindowId,
        offset: u64,
        from: &[T],
    ) -> Result<(), MemoryError> {
        let window = self.window(window)?;
        let part = window.part(self.lanes.rank, offset, size_of_val(from) as u64)?;
        window.mapped.write(part.member, part.offset + offset, from)
    }

    /// Start of a range of a window of this node, for the vector loops.
    pub(super) fn range(
        &self,
        owner: u32,
        window: WindowId,
        offset: u64,
        len: u64,
    ) -> Result<*const u8, MemoryError> {
        Ok(self.window(window)?.at(owner, offset, len)?.as_ptr().cast_const())
    }

    fn no_credit(&self, to: u32, e: super::rail::NoCredit) -> Error {
        match e.why {
            Interrupted::Dead(cause) => cause.into(),
            Interrupted::Late { waited } => LaneError::Deadline {
                rank: self.lanes.rank,
                peer: to,
                lane: "loop",
                flag: u32::MAX,
                awaited: e.awaited,
                seen: e.seen,
                waited,
            }
            .into(),
        }
    }
}
