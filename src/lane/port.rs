//! A port is an executor's view of its peers: windows, and a lane to every rank.
//!
//! It turns (window, offset, length) into memory of this node or into a call of a connection. All
//! ranges are checked here, before anything is posted. The pointers of the vector loops come from
//! those checks.
//!
//! ```text
//!   put     window of this rank, or a tensor --> same node: one copy | other node: NetConnection::put
//!   signal  behind all earlier puts          --> same node: a store  | other node: NetConnection::signal
//!   wait    a flag of this rank's window     <-- polled; connections are served meanwhile
//!   settle  sources of puts may be changed       quiet   everything has landed
//! ```
//!
//! The path of a put to a local peer is inlined whole, and the path to another node is kept out of
//! it. A put of a few bytes takes less time than a cache line from core to core. So
//! [`LocalWindows`] has the addresses of all local windows, computed once, in place of three
//! tables.
//!
//! **Offers of peers** are pulled: on a node the reader adds up the rows in place, in the owners'
//! pools, in one pass over the bytes. (Pushing them and summing at the target moves every byte
//! three times.)

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::flag::{SLEEP_INTERVAL, WaitLimits, WaitProgress, Waiter};
use super::net::{DeviceAddress, DeviceConnection, NetConnection, RemoteAddress, SendBlocked};
use super::{FlagLine, Lanes, PeerLane, flag};
use crate::bootstrap::Health;
use crate::bootstrap::wait::nap;
use crate::dtype::PartialDtype;
use crate::error::{Error, LaneError, MemoryError};
use crate::memory::PeerMapping;
use crate::plan::RowRun;
use crate::rows::{Arithmetic, GroupedSum, RowKernels, Stores, SumOutput};
use crate::schedule::{
    ControlLayout, Flag, Index, LINE, Operands, PutSource, SpanCopy, SumOperands, SumTarget, Tag, WindowId,
};

/// The windows of one owner, and the lanes to reach them.
#[derive(Debug)]
pub struct Port {
    lanes: Arc<Lanes>,
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
    fn window(&self, window: WindowId) -> Result<&MappedWindow, MemoryError> {
        let missing = || MemoryError::OutOfBounds { peer: self.lanes.rank, offset: 0, len: 0, size: 0 };
        self.windows.get(window.0 as usize).ok_or_else(missing)
    }

    #[inline]
    fn reach(&self, to: u32) -> Result<&PeerLane, LaneError> {
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
            PutSource::Metadata => io.metadata,
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
        // A size beyond 64 bits fits into no window either.
        let size = |rows: u32| u64::from(rows).saturating_mul(row_bytes);
        let offset = base.saturating_add(size(run.to_row));
        let (len, pad) = (size(run.count), size(run.pad));
        let behind = offset.saturating_add(len);
        // All of it fits, or nothing is posted.
        self.window(window)?.part(to, offset, len.saturating_add(pad))?;
        match source.checked(run)? {
            Checked::Contiguous(bytes) => self.put_bytes(to, (window, offset), bytes, stores)?,
            Checked::Listed(index) => match self.near.at(window, to, offset, len) {
                // SAFETY: the target was checked for all rows, each source row by `checked`.
                Some(at) => unsafe {
                    let (at, from) = (at.as_ptr(), bytes.as_ptr());
                    self.lanes.rows.gather(at, from, row_bytes as usize, index, stores);
                },
                None => {
                    let (connection, target) = self.connection(to, (window, offset, len))?;
                    let put = connection.put_rows(target, index, source, self.lanes.limits_of(to));
                    put.map_err(|e| self.stuck(connection, to, e))?;
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
                let (connection, target) = self.connection(to, (window, behind, pad))?;
                connection
                    .zero(target, pad, self.lanes.limits_of(to))
                    .map_err(|e| self.stuck(connection, to, e))?;
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
        let (connection, devices) = self.devices(to)?;
        let put = devices.put_device(target, from, len, self.lanes.limits_of(to));
        put.map_err(|e| self.stuck(connection, to, e))
    }

    /// Writes the word of a flag in memory of a device of another node, in the window that begins
    /// with such words, behind all earlier puts to that rank.
    ///
    /// # Errors
    /// As [`Port::put`].
    pub fn write_word(
        &self,
        to: u32,
        (window, of, flag): (WindowId, u32, Flag),
        value: u64,
    ) -> Result<(), Error> {
        let offset = ControlLayout::flag(of, flag, self.near.ranks());
        let target = self.window(window)?.target(to, offset, size_of_val(&value) as u64)?;
        let (connection, devices) = self.devices(to)?;
        let written = devices.write_word(target, value, self.lanes.limits_of(to));
        written.map_err(|e| self.stuck(connection, to, e))
    }

    /// The connection to a rank of another node, and its operations on memory of devices.
    fn devices(&self, to: u32) -> Result<(&dyn NetConnection, &dyn DeviceConnection), LaneError> {
        let missing = "one that reaches memory of devices";
        let none = LaneError::NoLane { rank: self.lanes.rank, peer: to, missing };
        let PeerLane::Net(connection) = self.reach(to)? else { return Err(none) };
        Ok((connection.as_ref(), connection.devices().ok_or(none)?))
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
        let (connection, target) = self.connection(to, (window, offset, bytes.len() as u64))?;
        connection.put(target, bytes, self.lanes.limits_of(to)).map_err(|e| self.stuck(connection, to, e))
    }

    /// The connection to bytes that are not near, and where they lie for it.
    ///
    /// # Errors
    /// Why there is none: they are out of bounds, or their rank is reached by a relay.
    fn connection(
        &self,
        to: u32,
        (window, offset, len): (WindowId, u64, u64),
    ) -> Result<(&dyn NetConnection, RemoteAddress), Error> {
        match self.reach(to)? {
            PeerLane::Net(connection) => {
                Ok((connection.as_ref(), self.window(window)?.target(to, offset, len)?))
            }
            PeerLane::Own | PeerLane::Load => Err(self.outside(window, to, offset, len).into()),
            PeerLane::Relayed => Err(self.no_connection(to).into()),
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
        let (connection, target) = self.connection(to, (self.flags, offset, LINE))?;
        connection
            .signal(target, value, tag.copied(), self.lanes.limits_of(to))
            .map_err(|e| self.stuck(connection, to, e))
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

    /// Reads elements of a window of this node. Its writer must have signaled.
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

    /// Copies bytes of a window of this node to a caller's. Their writer must have signaled.
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

    fn no_connection(&self, to: u32) -> LaneError {
        LaneError::NoLane {
            rank: self.lanes.rank,
            peer: to,
            missing: "a connection: its node is reached by a relay",
        }
    }

    /// Waits until the flag here that speaks of `from` has at least `value`. Receives from the
    /// connections meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Deadline`], or the world's [`Cause`](crate::error::Cause).
    #[inline(always)]
    pub fn wait(&self, from: u32, flag: Flag, value: u64) -> Result<(), Error> {
        let reach = self.reach(from)?;
        let line = self.flag(from, flag)?;
        match flag::poll_once(line, value, self.lanes.oversubscribed) {
            true => Ok(()),
            false => self.wait_beyond_poll(line, (from, flag), value, reach.name()),
        }
    }

    #[cold]
    fn wait_beyond_poll(
        &self,
        line: FlagLine<'_>,
        (from, flag): (u32, Flag),
        value: u64,
        lane: &'static str,
    ) -> Result<(), Error> {
        let limits = self.lanes.limits_for(from, flag);
        flag::wait_slow(line, value, limits, || self.lanes.progress()).map_err(|(seen, why)| {
            let (rank, peer) = (self.lanes.rank, self.lanes.writer_of(from));
            let progress = WaitProgress { rank, peer, lane, flag: flag as u32, awaited: value, seen };
            progress.error(why, || self.lanes.fault())
        })
    }

    /// Returns when everything put or signaled so far has landed. On a node it has when the put
    /// returns.
    ///
    /// # Errors
    /// [`LaneError::Deadline`] if a peer takes nothing, or the world's cause.
    pub fn quiet(&self) -> Result<(), Error> {
        // Puts within the node may have used streaming stores, which the next store may pass.
        RowKernels::fence();
        for (to, connection) in self.lanes.connections() {
            connection.flush(self.lanes.limits_of(to)).map_err(|e| self.stuck(connection, to, e))?;
        }
        Ok(())
    }

    /// Returns when nothing that was put so far is read here any more: its sources may be changed.
    ///
    /// # Errors
    /// As [`Port::quiet`].
    pub fn settle(&self) -> Result<(), Error> {
        self.serve_until_settled();
        for (to, connection) in self.lanes.connections() {
            connection.settle(self.lanes.limits_of(to)).map_err(|e| self.stuck(connection, to, e))?;
        }
        Ok(())
    }

    /// [`Port::settle`], if all puts went to this rank alone: stores have read their sources when
    /// they return. No other connection is touched, however many there are.
    ///
    /// # Errors
    /// As [`Port::quiet`].
    #[inline]
    pub fn settle_with(&self, to: u32) -> Result<(), Error> {
        let Some(connection) = self.reach(to)?.connection() else { return Ok(()) };
        connection.settle(self.lanes.limits_of(to)).map_err(|e| self.stuck(connection, to, e))
    }

    /// Serves all connections in turn until all have settled, so that none stands still while
    /// another is waited for; or until one is late, which its own wait then reports.
    fn serve_until_settled(&self) {
        let mut waiter = None;
        loop {
            let (mut open, mut moved) = (None, false);
            for (to, connection) in self.lanes.connections().filter(|(_, connection)| !connection.settled()) {
                open = open.or(Some(to));
                moved |= connection.progress(&self.lanes.health);
            }
            let Some(to) = open else { return };
            if moved {
                waiter = None;
                continue;
            }
            let waiter = waiter.get_or_insert_with(|| Waiter::new(self.lanes.limits_of(to)));
            if waiter.turn(|slice| nap(slice.min(SLEEP_INTERVAL))).is_err() {
                return;
            }
        }
    }

    fn stuck(&self, connection: &dyn NetConnection, to: u32, stuck: SendBlocked) -> Error {
        explain(connection, (self.lanes.rank, to), stuck)
    }
}

/// Returns when everything that was sent over a connection has landed.
///
/// # Errors
/// As [`Port::quiet`].
pub fn flush(
    connection: &dyn NetConnection,
    health: &Health,
    deadline: Duration,
    rank: u32,
) -> Result<(), Error> {
    let limits = WaitLimits {
        health,
        oversubscribed: true,
        awaited: connection.peer(),
        deadline,
        silent: !connection.wakes(),
    };
    connection.flush(limits).map_err(|stuck| explain(connection, (rank, connection.peer()), stuck))
}

fn explain(connection: &dyn NetConnection, (rank, peer): (u32, u32), stuck: SendBlocked) -> Error {
    let SendBlocked { awaited, seen, why } = stuck;
    let progress = WaitProgress { rank, peer, lane: connection.lane(), flag: u32::MAX, awaited, seen };
    progress.error(why, || connection.fault())
}

/// A window: one range of bytes at each rank of the group.
#[derive(Clone, Debug)]
pub struct MappedWindow {
    /// The mapping of this node's windows; an empty one for memory of devices.
    pub mapped: Arc<PeerMapping>,
    /// Per rank of the group: where its part is.
    pub parts: Vec<WindowPart>,
    /// It is device memory: NICs access it, the processor does not.
    pub of_devices: bool,
}

/// One rank's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPart {
    /// Its member of the mapping.
    pub member: u32,
    /// Number of the region at its owner, for peers that have it not mapped.
    pub region: u32,
    /// First byte in the member or region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl MappedWindow {
    /// Address of bytes in the part of a rank whose memory is mapped here.
    fn at(&self, rank: u32, offset: u64, len: u64) -> Result<NonNull<u8>, MemoryError> {
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

    /// Facts that a connection needs to reach bytes in the part of a rank.
    pub(super) fn target(&self, rank: u32, offset: u64, len: u64) -> Result<RemoteAddress, MemoryError> {
        let part = self.part(rank, offset, len)?;
        Ok(RemoteAddress { region: part.region, offset: part.offset + offset })
    }

    /// The part of a rank, if the bytes lie inside it.
    #[inline]
    fn part(&self, rank: u32, offset: u64, len: u64) -> Result<&WindowPart, MemoryError> {
        let part = self.parts.get(rank as usize);
        let size = part.map_or(0, |p| p.len);
        match part {
            Some(part) if offset.checked_add(len).is_some_and(|end| end <= size) => Ok(part),
            _ => Err(MemoryError::OutOfBounds { peer: rank, offset, len, size }),
        }
    }
}

/// The parts of windows that this rank reads and writes by loads and stores: its own, and its local
/// peers'.
#[derive(Debug)]
struct LocalWindows {
    ranks: u32,
    /// Per window and rank: its part, unless that is out of reach.
    parts: Vec<Option<MappedBytes>>,
}

/// Bytes that are mapped here.
#[derive(Clone, Copy, Debug)]
struct MappedBytes {
    first: NonNull<u8>,
    len: u64,
}

// SAFETY: addresses of plain shared memory, which belongs to no thread; its readers and writers
// guarantee the order.
unsafe impl Send for LocalWindows {}
// SAFETY: as above: a shared reference only hands out addresses.
unsafe impl Sync for LocalWindows {}

impl LocalWindows {
    /// Addresses in the mappings of these windows, good for as long as those live.
    fn new(lanes: &Lanes, windows: &[MappedWindow]) -> Self {
        let mut parts = Vec::new();
        for window in windows {
            parts.extend((0..).zip(&lanes.reach).map(|(rank, reach)| match reach {
                PeerLane::Own | PeerLane::Load => {
                    let len = window.parts.get(rank as usize)?.len;
                    Some(MappedBytes { first: window.at(rank, 0, len).ok()?, len })
                }
                PeerLane::Net(_) | PeerLane::Relayed => None,
            }));
        }
        LocalWindows { ranks: lanes.ranks(), parts }
    }

    /// Number of ranks.
    #[inline(always)]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Address of bytes in a rank's part of a window, if they lie inside it and it is reached by
    /// loads and stores.
    #[inline(always)]
    fn at(&self, window: WindowId, rank: u32, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let nth = window.0 as usize * self.ranks as usize + rank as usize;
        let part = (*self.parts.get(nth)?).filter(|_| rank < self.ranks)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= part.len);
        // SAFETY: within the part, whose bytes the mapping has.
        inside.then(|| unsafe { part.first.add(offset as usize) })
    }

    /// Owner, window and offset of bytes at an address, if they lie in a part that is reached by
    /// loads and stores.
    #[cfg(test)]
    fn locate(&self, at: usize, len: u64) -> Option<(u32, WindowId, u64)> {
        self.parts.iter().enumerate().find_map(|(nth, part)| {
            let offset = at.checked_sub((*part)?.first.as_ptr() as usize)? as u64;
            let (window, owner) = (nth as u32 / self.ranks, nth as u32 % self.ranks);
            (offset + len <= (*part)?.len).then_some((owner, WindowId(window), offset))
        })
    }
}

/// The caller's tensors of one run: where [`PutSource::Input`]
/// and [`PutSource::Metadata`] read and a sum writes.
#[derive(Debug, Default)]
pub struct Io<'a> {
    /// Rows that are dispatched.
    pub input: &'a [u8],
    /// Metadata of each entry.
    pub metadata: &'a [u8],
    /// Rows that are summed.
    pub output: &'a mut [u8],
    /// One `f32` per (token, choice) that returns.
    pub weights: &'a mut [f32],
}

/// Where the rows of a run come from.
#[derive(Clone, Copy, Debug)]
pub struct RowSource<'a> {
    /// The rows.
    pub bytes: &'a [u8],
    /// Bytes of one row.
    pub row_bytes: u64,
    /// Which rows, for all runs of a call.
    pub rows: &'a [u32],
    /// Whether runs use an index, or count consecutive rows.
    pub index: Index,
}

/// The rows of one run, known to lie in their source.
#[derive(Clone, Copy, Debug)]
enum Checked<'a> {
    /// Scattered.
    Listed(&'a [u32]),
    /// One after another.
    Contiguous(&'a [u8]),
}

impl<'a> RowSource<'a> {
    /// The bytes of a row that [`RowSource::checked`] has seen.
    pub(super) fn row(&self, row: u32) -> &'a [u8] {
        let row_bytes = self.row_bytes as usize;
        &self.bytes[row as usize * row_bytes..][..row_bytes]
    }

    /// The rows of one run, all inside the source.
    fn checked(&self, run: RowRun) -> Result<Checked<'a>, LaneError> {
        let (row_bytes, size) = (self.row_bytes, self.bytes.len() as u64);
        let bad = |row: u64| LaneError::SourceBounds {
            offset: row.saturating_mul(row_bytes),
            len: row_bytes,
            size,
        };
        let (first, count) = (run.first as usize, run.count as usize);
        if self.index == Index::Contiguous {
            let (start, len) =
                (first.saturating_mul(row_bytes as usize), count.saturating_mul(row_bytes as usize));
            let bytes = self.bytes.get(start..start.saturating_add(len));
            return Ok(Checked::Contiguous(bytes.ok_or_else(|| bad(first as u64))?));
        }
        let index =
            self.rows.get(first..first.saturating_add(count)).ok_or_else(|| bad(self.rows.len() as u64))?;
        match index.iter().max() {
            Some(&last) if (u64::from(last) + 1).saturating_mul(row_bytes) > size => Err(bad(last.into())),
            _ => Ok(Checked::Listed(index)),
        }
    }
}

/// Pointers to the rows of a sum. Kept from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    chunks: Vec<*const u8>,
    rows: Vec<*const u8>,
    weights: Vec<f32>,
}

// SAFETY: the pointers are rebuilt by every call and mean nothing between calls.
unsafe impl Send for Scratch {}

impl Port {
    /// Sums output rows `outputs` of the operands' sum into `to`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError::OutOfBounds) if a chunk or the
    /// target lies outside its pool, [`LaneError::SourceBounds`] if a term or the output does not
    /// fit the tables.
    pub fn sum_rows(
        &self,
        operands: &Operands<'_>,
        (outputs, to): (Range<u32>, SumTarget),
        dtype: Arithmetic,
        io: &mut Io<'_>,
        scratch: &mut Scratch,
        stores: Stores,
    ) -> Result<(), Error> {
        let (sum, row_bytes) = (&operands.sum, operands.row_bytes as usize);
        self.chunks(sum, scratch)?;
        let columns = row_bytes / dtype.size();
        let rows = outputs.len();
        let (first, stride) = match to {
            SumTarget::Output if rows * row_bytes != io.output.len() => {
                return Err(bounds(0, rows * row_bytes, io.output.len()).into());
            }
            SumTarget::Output => (io.output.as_mut_ptr(), row_bytes),
            SumTarget::Partials { window, offset } => {
                let stride = columns * sum.wire.size();
                let at = self.range(self.lanes().rank, window, offset, (rows * stride) as u64)?;
                (at.cast_mut(), stride)
            }
        };
        let all = sum.starts[outputs.start as usize] as usize..sum.starts[outputs.end as usize] as usize;
        self.point(sum, all.clone(), scratch)?;
        for (nth, output) in outputs.enumerate() {
            let terms = sum.starts[output as usize] as usize..sum.starts[output as usize + 1] as usize;
            // The next output's rows are fetched meanwhile.
            let next =
                sum.starts.get(output as usize + 2).map_or(terms.end, |&next| next as usize).min(all.end);
            let rows = &scratch.rows[terms.start - all.start..next.max(terms.end) - all.start];
            scratch.weights.clear();
            if !sum.weights.is_empty() {
                let choices = sum.choices[terms.clone()].iter();
                scratch.weights.extend(choices.map(|&choice| sum.weights[choice as usize]));
            }
            let weights = (!sum.weights.is_empty()).then_some(scratch.weights.as_slice());
            let plain = [terms.len() as u32];
            let (groups, wire) = match sum.groups {
                [] => (&plain[..], PartialDtype::F32),
                groups => {
                    let of = |at: usize| sum.group_starts[at] as usize;
                    (&groups[of(output as usize)..of(output as usize + 1)], sum.wire)
                }
            };
            // SAFETY: `rows` rows of `stride` bytes were checked or borrowed.
            let at = unsafe { first.add(nth * stride) };
            let (out, wire) = match to {
                SumTarget::Output => (SumOutput::Total(at), wire),
                SumTarget::Partials { .. } => (SumOutput::Partial(at), sum.wire),
            };
            // SAFETY: every row was checked, and so was the target; owners offered the rows in this
            // call and do not write them before they have this rank's word that it has read them.
            unsafe {
                self.lanes().rows.grouped_sum(GroupedSum {
                    dtype,
                    wire,
                    out,
                    rows,
                    weights,
                    groups,
                    columns,
                    stores,
                });
            }
        }
        Ok(())
    }

    /// Fetches one `f32` per fetched term into `io.weights`, at the term's place among the caller's
    /// choices.
    ///
    /// # Errors
    /// As [`Port::sum_rows`].
    pub fn fetch_weights(
        &self,
        operands: &Operands<'_>,
        io: &mut Io<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let sum = &operands.sum;
        self.chunks(sum, scratch)?;
        for (term, &place) in sum.fetched.iter().zip(sum.places) {
            let owner = term.owner as usize;
            let (chunk, places) = (&sum.chunks[owner], io.weights.len());
            let Some(to) =
                io.weights.get_mut(place as usize).filter(|_| u64::from(term.row) < chunk.metadata)
            else {
                return Err(bounds(place as usize, 1, places).into());
            };
            let at = chunk.metadata_at() as usize + term.row as usize * 4;
            // SAFETY: the words lie behind the rows inside the chunk that `chunks` checked; `row`
            // is below their number; unaligned reads need no more.
            *to = unsafe { scratch.chunks[owner].add(at).cast::<f32>().read_unaligned() };
        }
        Ok(())
    }

    /// Points at the rows of some terms.
    fn point(&self, sum: &SumOperands<'_>, terms: Range<usize>, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.rows.clear();
        for term in &sum.terms[terms] {
            let chunk = &sum.chunks[term.owner as usize];
            if term.row >= chunk.rows {
                return Err(bounds(term.row as usize, 1, chunk.rows as usize).into());
            }
            let at = term.row as usize * chunk.row_bytes as usize;
            // SAFETY: inside the owner's chunk, which `chunks` checked as a whole.
            scratch.rows.push(unsafe { scratch.chunks[term.owner as usize].add(at) });
        }
        Ok(())
    }

    fn chunks(&self, sum: &SumOperands<'_>, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.chunks.clear();
        for (owner, chunk) in sum.chunks.iter().enumerate() {
            let at = match chunk.bytes() {
                0 => std::ptr::null(),
                len => self.range(sum.held_by[owner], WindowId::POOL, sum.bases[owner], len)?,
            };
            scratch.chunks.push(at);
        }
        Ok(())
    }
}

fn bounds(offset: usize, len: usize, size: usize) -> LaneError {
    LaneError::SourceBounds { offset: offset as u64, len: len as u64, size: size as u64 }
}
