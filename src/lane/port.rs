//! What an executor holds: windows, and a lane to every rank.
//!
//! All addresses are (window, offset, length) and are checked here, before anything is posted; the pointers that the
//! vector loops get come from those checks. What a window's put to a neighbour goes through is inlined whole, and what goes
//! over a rail kept out of it: there a call takes longer than a cache line from core to core.

use std::sync::Arc;

use super::rail::{Local, Rail, Target};
use super::source::Checked;
use super::{FlagLine, Io, Lanes, Reach, RowSource};
use crate::error::{Error, LaneError, MemoryError};
use crate::memory::Mapped;
use crate::plan::RowRun;
use crate::rows::Stores;
use crate::schedule::{Control, Flag, Place, SpanCopy, Tag, WindowId};

/// A window: one range of bytes at each rank of the group.
#[derive(Clone, Debug)]
pub struct Window {
    /// The mapping in which the windows of this node lie; one of nobody's, where they are memory of devices.
    pub mapped: Arc<Mapped>,
    /// Per rank of the group: where its part is.
    pub parts: Vec<Part>,
    /// It is memory of devices: cards read and write it, the processor does not.
    pub of_devices: bool,
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
    #[inline]
    fn at(&self, rank: u32, offset: u64, len: u64) -> Result<std::ptr::NonNull<u8>, MemoryError> {
        let part = self.part(rank, offset, len)?;
        self.mapped.at(part.member, part.offset + offset, len)
    }

    /// All bytes of the part of a rank of this node.
    pub(super) fn bytes(&self, rank: u32) -> Result<&[u8], MemoryError> {
        let len = self.part(rank, 0, 0)?.len;
        let at = self.at(rank, 0, len)?;
        // SAFETY: mapped and checked; as of `Port::source`.
        Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), len as usize) })
    }

    /// What a rail needs to know to reach bytes in the part of a rank.
    pub(super) fn target(&self, rank: u32, offset: u64, len: u64) -> Result<Target, MemoryError> {
        let part = self.part(rank, offset, len)?;
        Ok(Target { region: part.region, offset: part.offset + offset })
    }

    /// The part of a rank, if the bytes lie inside it.
    #[inline]
    fn part(&self, rank: u32, offset: u64, len: u64) -> Result<&Part, MemoryError> {
        let part = self.parts.get(rank as usize);
        let size = part.map_or(0, |p| p.len);
        match part {
            Some(part) if offset.checked_add(len).is_some_and(|end| end <= size) => Ok(part),
            _ => Err(MemoryError::OutOfBounds { peer: rank, offset, len, size }),
        }
    }
}

/// The windows of one owner, and the lanes to reach them.
#[derive(Debug)]
pub struct Port {
    pub(super) lanes: Arc<Lanes>,
    windows: Vec<Window>,
    /// The window whose first bytes are the owner's flags.
    flags: WindowId,
}

impl Port {
    /// A port to `windows`; `flags` names the one that begins with the flag lines.
    pub fn new(lanes: Arc<Lanes>, windows: Vec<Window>, flags: WindowId) -> Self {
        Port { lanes, windows, flags }
    }

    pub(super) fn shared_lanes(&self) -> Arc<Lanes> {
        Arc::clone(&self.lanes)
    }

    /// The lanes.
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    #[inline]
    pub(super) fn window(&self, window: WindowId) -> Result<&Window, MemoryError> {
        let missing = || MemoryError::OutOfBounds { peer: self.lanes.rank, offset: 0, len: 0, size: 0 };
        self.windows.get(window.0 as usize).ok_or_else(missing)
    }

    #[inline]
    pub(super) fn reach(&self, to: u32) -> Result<&Reach, LaneError> {
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
        place: Place,
        offset: u64,
        len: Option<u64>,
        io: &Io<'a>,
    ) -> Result<&'a [u8], Error> {
        let tensor = match place {
            Place::Input => io.input,
            Place::Notes => io.notes,
            Place::Window { owner, window } => {
                let window = self.window(window)?;
                let size = window.part(owner, 0, 0)?.len;
                let len = len.unwrap_or(size.saturating_sub(offset));
                let at = window.at(owner, offset, len)?;
                // SAFETY: mapped and checked; whoever writes here has signalled, and writes again only with a licence
                // that this rank gives after it has read.
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
    /// [`MemoryError::OutOfBounds`], [`LaneError::SourceBounds`], and whatever ends a wait for credit.
    #[inline(always)]
    pub fn put(&self, to: u32, span: &SpanCopy, io: &Io<'_>, stores: Stores) -> Result<(), Error> {
        if let Place::Window { owner, window } = span.from
            && self.window(window)?.of_devices
        {
            return self.put_device(to, owner, window, span);
        }
        let bytes = self.source(span.from, span.from_offset, Some(span.len), io)?;
        self.put_bytes(to, (span.to, span.to_offset), bytes, stores)
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
            Checked::Listed(index) => match self.reach(to)? {
                Reach::Own | Reach::Load => {
                    let at = self.window(window)?.at(to, offset, len)?.as_ptr();
                    // SAFETY: the target was checked for all rows, each source row by `checked`.
                    unsafe { self.lanes.rows.gather(at, bytes.as_ptr(), row_bytes as usize, index, stores) };
                }
                Reach::Rail(rail) => {
                    let target = self.window(window)?.target(to, offset, len)?;
                    rail.put_rows(target, index, source, self.lanes.patience(to))
                        .map_err(|e| self.stuck(rail.as_ref(), to, e))?;
                }
                Reach::Relayed => return Err(self.no_wire(to).into()),
            },
        }
        if pad == 0 {
            return Ok(());
        }
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                let at = self.window(window)?.at(to, behind, pad)?.as_ptr();
                // SAFETY: the target was checked for all zeros.
                unsafe { self.lanes.rows.zero(at, pad as usize, stores) };
                Ok(())
            }
            Reach::Rail(rail) => {
                let target = self.window(window)?.target(to, behind, pad)?;
                rail.zero(target, pad, self.lanes.patience(to)).map_err(|e| self.stuck(rail.as_ref(), to, e))
            }
            Reach::Relayed => Err(self.no_wire(to).into()),
        }
    }

    /// From memory of a device of this node to another node.
    fn put_device(&self, to: u32, owner: u32, window: WindowId, span: &SpanCopy) -> Result<(), Error> {
        let SpanCopy { from_offset, to_offset, len, .. } = *span;
        let source = self.window(window)?;
        source.part(owner, from_offset, len)?;
        let own = source.part(self.lanes.rank, 0, 0)?;
        let from = Local { region: own.region, member: owner, offset: from_offset };
        let target = self.window(span.to)?.target(to, to_offset, len)?;
        let missing = "one that reads memory of devices";
        let none = LaneError::NoLane { rank: self.lanes.rank, peer: to, missing };
        let Reach::Rail(rail) = self.reach(to)? else { return Err(none.into()) };
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
        let len = bytes.len() as u64;
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                let at = self.window(window)?.at(to, offset, len)?;
                // SAFETY: both ends were checked; the schedule's licences keep others away from them.
                unsafe { self.lanes.rows.copy(at.as_ptr(), bytes.as_ptr(), bytes.len(), stores) };
                Ok(())
            }
            Reach::Rail(rail) => self.send(rail.as_ref(), to, (window, offset), bytes),
            Reach::Relayed => Err(self.no_wire(to).into()),
        }
    }

    fn send(
        &self,
        rail: &dyn Rail,
        to: u32,
        (window, offset): (WindowId, u64),
        bytes: &[u8],
    ) -> Result<(), Error> {
        let target = self.window(window)?.target(to, offset, bytes.len() as u64)?;
        rail.put(target, bytes, self.lanes.patience(to)).map_err(|e| self.stuck(rail, to, e))
    }

    /// Raises the flag at `to` that speaks of rank `of`, after all earlier puts and reads of this rank. Puts with streaming
    /// stores need [`Rows::fence`](crate::rows::Rows::fence) first: no store orders them, and where there are none a fence would
    /// only cost time.
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
        let offset = Control::flag(of, flag, self.lanes.ranks());
        let window = self.window(self.flags)?;
        match self.reach(to)? {
            Reach::Own | Reach::Load => {
                // SAFETY: a flag line of the owner's window, checked; windows are aligned to cache lines.
                unsafe { FlagLine::new(window.at(to, offset, 64)?) }.raise(value, tag);
                Ok(())
            }
            Reach::Rail(rail) => self.send_signal(rail.as_ref(), to, offset, (value, tag)),
            Reach::Relayed => Err(self.no_wire(to).into()),
        }
    }

    fn send_signal(
        &self,
        rail: &dyn Rail,
        to: u32,
        offset: u64,
        (value, tag): (u64, Option<&Tag>),
    ) -> Result<(), Error> {
        let target = self.window(self.flags)?.target(to, offset, 64)?;
        rail.signal(target, value, tag.copied(), self.lanes.patience(to)).map_err(|e| self.stuck(rail, to, e))
    }

    /// The flag here that speaks of `from`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if there is no such rank.
    #[inline]
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
        let at = self.window(window)?.at(owner, offset, out.len() as u64)?;
        // SAFETY: the source was checked; the destination is an exclusive slice of the same length.
        unsafe { self.lanes.rows.copy(out.as_mut_ptr(), at.as_ptr(), out.len(), stores) };
        Ok(())
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

    fn no_wire(&self, to: u32) -> LaneError {
        LaneError::NoLane {
            rank: self.lanes.rank,
            peer: to,
            missing: "a wire: its node is reached by a relay",
        }
    }
}
