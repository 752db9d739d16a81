//! A port, an executor's view: windows, and a lane to every rank.
//!
//! All addresses are (window, offset, length) and are checked here, before anything is posted. The
//! pointers of the vector loops come from those checks. The path of a window's put to a local peer
//! is inlined whole, and the path to another node is kept out of it: a function call takes longer
//! there than a cache line from core to core.

use std::sync::Arc;

use super::near::LocalWindows;
use super::net::{DeviceAddress, NetConnection, RemoteAddress};
use super::source::Checked;
use super::{FlagLine, Io, Lanes, MappedWindow, PeerLane, RowSource, WindowPart};
use crate::error::{Error, LaneError, MemoryError};
use crate::plan::RowRun;
use crate::rows::Stores;
use crate::schedule::{ControlLayout, Flag, LINE, PutSource, SpanCopy, Tag, WindowId};

/// The windows of one owner, and the lanes to reach them.
#[derive(Debug)]
pub struct Port {
    pub(super) lanes: Arc<Lanes>,
    windows: Vec<MappedWindow>,
    near: LocalWindows,
    /// The window whose first bytes are the owner's flags.
    flags: WindowId,
}

impl Port {
    /// A port to `windows`; `flags` names the one that begins with the flag lines.
    pub fn new(lanes: Arc<Lanes>, windows: Vec<MappedWindow>, flags: WindowId) -> Self {
        let near = LocalWindows::new(&lanes, &windows);
        Port { lanes, windows, near, flags }
    }

    pub(super) fn shared_lanes(&self) -> Arc<Lanes> {
        Arc::clone(&self.lanes)
    }

    /// The lanes.
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    #[inline]
    pub(super) fn window(&self, window: WindowId) -> Result<&MappedWindow, MemoryError> {
        let missing = || MemoryError::OutOfBounds { peer: self.lanes.rank, offset: 0, len: 0, size: 0 };
        self.windows.get(window.0 as usize).ok_or_else(missing)
    }

    #[inline]
    pub(super) fn reach(&self, to: u32) -> Result<&PeerLane, LaneError> {
        let rank = self.lanes.rank;
        let missing = || LaneError::NoLane { rank, peer: to, missing: "no such rank in the group" };
        self.lanes.reach.get(to as usize).ok_or_else(missing)
    }

    /// The bytes of a place from `offset` on: `len` of them, or all there are.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`LaneError::SourceBounds`].
    #[inline]
    pub fn source<'a>(
        &'a self,
        place: PutSource,
        offset: u64,
        len: Option<u64>,
        io: &Io<'a>,
    ) -> Result<&'a [u8], Error> {
        let tensor = match place {
            PutSource::Input => io.input,
            PutSource::Notes => io.notes,
            PutSource::Window { owner, window } => {
                let rest = |part: &WindowPart| part.len.saturating_sub(offset);
                let len = len.map_or_else(|| self.window(window)?.part(owner, 0, 0).map(rest), Ok)?;
                let at = self.at(window, owner, offset, len)?;
                // SAFETY: mapped and checked; the writer has signaled, and writes again only with a
                // grant that this rank gives after it has read.
                return Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), len as usize) });
            }
        };
        let size = tensor.len() as u64;
        let len = len.unwrap_or(size.saturating_sub(offset));
        let Some(end) = offset.checked_add(len).filter(|&end| end <= size) else {
            return Err(LaneError::SourceBounds { offset, len, size }.into());
        };
        Ok(&tensor[offset as usize..end as usize])
    }

    /// Moves one span. The source may be changed after [`Port::settle`].
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`LaneError::SourceBounds`], and errors that end a wait for
    /// credit.
    #[inline(always)]
    pub fn put(&self, to: u32, span: &SpanCopy, io: &Io<'_>, stores: Stores) -> Result<(), Error> {
        if let PutSource::Window { owner, window } = span.from
            && self.window(window)?.of_devices
        {
            return self.put_device(to, owner, window, span);
        }
        let bytes = self.source(span.from, span.from_offset, Some(span.len), io)?;
        self.put_bytes(to, (span.to, span.to_offset), bytes, stores)
    }

    /// Moves one run of rows, and its rows of zeros, to `window` at
    /// `base + run.to_row * row_bytes`.
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
        let RowSource { row_bytes, bytes, .. } = source;
        // What does not fit into 64 bits fits into no window either.
        let size = |rows: u32| u64::from(rows).saturating_mul(row_bytes);
        let offset = base.saturating_add(size(run.to_row));
        let (len, pad) = (size(run.count), size(run.pad));
        let behind = offset.saturating_add(len);
        // All of it fits, or nothing is posted.
        self.window(window)?.part(to, offset, len.saturating_add(pad))?;
        match source.checked(run)? {
            Checked::Straight(bytes) => self.put_bytes(to, (window, offset), bytes, stores)?,
            Checked::Listed(index) => match self.near.at(window, to, offset, len) {
                // SAFETY: the target was checked for all rows, each source row by `checked`.
                Some(at) => unsafe {
                    let (at, from) = (at.as_ptr(), bytes.as_ptr());
                    self.lanes.rows.gather(at, from, row_bytes as usize, index, stores);
                },
                None => {
                    let (rail, target) = self.rail(to, (window, offset, len))?;
                    let put = rail.put_rows(target, index, source, self.lanes.patience(to));
                    put.map_err(|e| self.stuck(rail, to, e))?;
                }
            },
        }
        if pad == 0 {
            return Ok(());
        }
        match self.near.at(window, to, behind, pad) {
            // SAFETY: the target was checked for all zeros.
            Some(at) => unsafe { self.lanes.rows.zero(at.as_ptr(), pad as usize, stores) },
            None => {
                let (rail, target) = self.rail(to, (window, behind, pad))?;
                rail.zero(target, pad, self.lanes.patience(to)).map_err(|e| self.stuck(rail, to, e))?;
            }
        }
        Ok(())
    }

    /// From memory of a device of this node to another node.
    fn put_device(&self, to: u32, owner: u32, window: WindowId, span: &SpanCopy) -> Result<(), Error> {
        let SpanCopy { from_offset, to_offset, len, .. } = *span;
        let source = self.window(window)?;
        source.part(owner, from_offset, len)?;
        let own = source.part(self.lanes.rank, 0, 0)?;
        let from = DeviceAddress { region: own.region, member: owner, offset: from_offset };
        let target = self.window(span.to)?.target(to, to_offset, len)?;
        let missing = "one that reads memory of devices";
        let none = LaneError::NoLane { rank: self.lanes.rank, peer: to, missing };
        let PeerLane::Rail(rail) = self.reach(to)? else { return Err(none.into()) };
        let put = rail.devices().ok_or(none)?.put_device(target, from, len, self.lanes.patience(to));
        put.map_err(|e| self.stuck(rail.as_ref(), to, e))
    }

    #[inline(always)]
    fn put_bytes(
        &self,
        to: u32,
        (window, offset): (WindowId, u64),
        bytes: &[u8],
        stores: Stores,
    ) -> Result<(), Error> {
        let Some(at) = self.near.at(window, to, offset, bytes.len() as u64) else {
            return self.send(to, (window, offset), bytes);
        };
        // SAFETY: both ends were checked; the schedule's write grants keep others away from them.
        unsafe { self.lanes.rows.copy(at.as_ptr(), bytes.as_ptr(), bytes.len(), stores) };
        Ok(())
    }

    fn send(&self, to: u32, (window, offset): (WindowId, u64), bytes: &[u8]) -> Result<(), Error> {
        let (rail, target) = self.rail(to, (window, offset, bytes.len() as u64))?;
        rail.put(target, bytes, self.lanes.patience(to)).map_err(|e| self.stuck(rail, to, e))
    }

    /// The rail to bytes that are not near, and where they lie for it.
    ///
    /// # Errors
    /// Why there is none: they are out of bounds, or their rank is reached by a relay.
    fn rail(
        &self,
        to: u32,
        (window, offset, len): (WindowId, u64, u64),
    ) -> Result<(&dyn NetConnection, RemoteAddress), Error> {
        match self.reach(to)? {
            PeerLane::Rail(rail) => Ok((rail.as_ref(), self.window(window)?.target(to, offset, len)?)),
            PeerLane::Own | PeerLane::Load => Err(self.outside(window, to, offset, len).into()),
            PeerLane::Relayed => Err(self.no_wire(to).into()),
        }
    }

    /// Raises the flag at `to` that speaks of rank `of`, after all earlier puts and reads of this
    /// rank. Puts with streaming stores need [`RowKernels::fence`](crate::rows::RowKernels::fence)
    /// first: no ordinary store orders them. Without streaming stores the fence would only cost
    /// time.
    ///
    /// # Errors
    /// As [`Port::put`].
    #[inline(always)]
    pub fn signal(
        &self,
        to: u32,
        (of, flag): (u32, Flag),
        value: u64,
        tag: Option<&Tag>,
    ) -> Result<(), Error> {
        let offset = ControlLayout::flag(of, flag, self.near.ranks());
        let Some(at) = self.near.at(self.flags, to, offset, LINE) else {
            return self.send_signal(to, offset, (value, tag));
        };
        // SAFETY: a flag line of the owner's window, checked; windows are aligned to cache lines.
        unsafe { FlagLine::new(at) }.raise(value, tag);
        Ok(())
    }

    fn send_signal(&self, to: u32, offset: u64, (value, tag): (u64, Option<&Tag>)) -> Result<(), Error> {
        let (rail, target) = self.rail(to, (self.flags, offset, LINE))?;
        rail.signal(target, value, tag.copied(), self.lanes.patience(to)).map_err(|e| self.stuck(rail, to, e))
    }

    /// The flag here that speaks of `from`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if there is no such rank.
    #[inline]
    pub fn flag(&self, from: u32, flag: Flag) -> Result<FlagLine<'_>, MemoryError> {
        if from >= self.near.ranks() {
            return Err(MemoryError::OutOfBounds { peer: from, offset: 0, len: LINE, size: 0 });
        }
        let offset = ControlLayout::flag(from, flag, self.near.ranks());
        // SAFETY: a flag line of this rank's window, checked; the window keeps its mapping alive.
        Ok(unsafe { FlagLine::new(self.at(self.flags, self.lanes.rank, offset, LINE)?) })
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

    /// Copies bytes of a window of this node to a caller's. Their writer must have signalled.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn fetch(
        &self,
        owner: u32,
        window: WindowId,
        offset: u64,
        out: &mut [u8],
        stores: Stores,
    ) -> Result<(), MemoryError> {
        let at = self.at(window, owner, offset, out.len() as u64)?;
        // SAFETY: the source was checked; the destination is an exclusive slice of the same length.
        unsafe { self.lanes.rows.copy(out.as_mut_ptr(), at.as_ptr(), out.len(), stores) };
        Ok(())
    }

    /// Writes elements to this rank's own window, when the schedule permits it.
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

    /// Owner, window and offset of bytes at an address of this node's windows.
    #[cfg(test)]
    pub(crate) fn locate(&self, at: usize, len: u64) -> Option<(u32, WindowId, u64)> {
        self.near.locate(at, len)
    }

    /// Start of a range of a window of this node, for the vector loops.
    pub(super) fn range(
        &self,
        owner: u32,
        window: WindowId,
        offset: u64,
        len: u64,
    ) -> Result<*const u8, MemoryError> {
        Ok(self.at(window, owner, offset, len)?.as_ptr().cast_const())
    }

    /// Address of bytes that this rank reads and writes itself.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    #[inline]
    fn at(
        &self,
        window: WindowId,
        rank: u32,
        offset: u64,
        len: u64,
    ) -> Result<std::ptr::NonNull<u8>, MemoryError> {
        self.near.at(window, rank, offset, len).ok_or_else(|| self.outside(window, rank, offset, len))
    }

    #[cold]
    fn outside(&self, window: WindowId, peer: u32, offset: u64, len: u64) -> MemoryError {
        let part = |window: &MappedWindow| window.parts.get(peer as usize).map_or(0, |part| part.len);
        let size = self.window(window).map_or(0, part);
        MemoryError::OutOfBounds { peer, offset, len, size }
    }

    fn no_wire(&self, to: u32) -> LaneError {
        LaneError::NoLane {
            rank: self.lanes.rank,
            peer: to,
            missing: "a wire: its node is reached by a relay",
        }
    }
}
