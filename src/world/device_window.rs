//! Windows on GPUs: memory of a device at every member of a group, and words next to it, mapped
//! within nodes.
//!
//! ```text
//!   member 0   | memory: VMM, exported as a descriptor |   | words: a sealed memfd, pinned |
//!   member 1   | ...                                   |   | ...                           |
//!              mapped at equal distances, for my device    mapped, and pinned, by all
//! ```
//!
//! **Growth.** The memory may grow: one more piece at every member, or at none.
//!
//! ```text
//!   all      bytes that are free on each device
//!   each     create a piece, export it            | all: who has one
//!   each     map its own piece and its peers'     | all: who has mapped them
//!   each     the pieces belong to the windows
//! ```
//!
//! Until the last step nothing is in a window, so a rank that is refused has all of them drop what
//! they have made: no stream knows the addresses. The driver may wait for streams of this process
//! meanwhile. Streams of exact sizes and of budgets drain without another call of the driver: each
//! wait has its cause enqueued before it, as [`ep::device`](crate::ep) says. In slots a stream may
//! wait for a call that a peer has yet to enqueue. So ranks that are threads of one process, and
//! share the driver's lock, end at the deadline where one grows while another's slots wait for it.
//!
//! Rows lie in the memory, flags in the words. A GPU writes a word after all earlier work of its
//! stream, wherever the word lies. In host memory the *host* can reach the word as well: it sees
//! missing signals, and can end a wait when a rank is lost. It needs no stream of its own for that,
//! which might queue behind the very wait.
//!
//! Memory of devices that NICs reach: rows cross from device to device.
//!
//! ```text
//!   device of s   | packed rows |  --NIC==wire==NIC-->    | words | ... final place ... |   device of d
//!                                                           ^ strictly ordered, written behind the rows
//! ```
//!
//! A flag in host memory may become visible before rows in device memory: these are two places on
//! the bus, with no order between them. So a sender of rows also writes a *word* there before it
//! raises the flag. The stream that uses the rows awaits that word, once the host has seen the
//! flag. A device sees the writes of a NIC in order by itself, or the wait makes it so
//! ([`WriteOrder`]). The host does not write such words. When a world fails, a stream writes them,
//! which needs a hardware queue that no waiting stream holds. With a single queue, rows are staged
//! in host memory.
//!
//! Host staging of a device's memory: for rows that cross between nodes where no NIC reaches the
//! device.
//!
//! ```text
//!   device      | memory, as its peers of the node reach it |
//!                  | out ^ in: copy engines
//!   staging     | the same, at the same offsets             | outbox |   pinned, registered with NICs
//!                  ^ net                                      | net
//! ```
//!
//! Rows from other nodes land in the staging at the offset where they belong on the device, under
//! the same write grant. So no row is placed twice, and a copy in covers all adjacent rows.
//! Outgoing rows wait in the outbox. Where NICs reach the device, a small staging is the *scratch*
//! of the enqueuer: memory that it writes for its own device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytemuck::Pod;

use super::Group;
use super::window::Registered;
use crate::bootstrap::exchange_fds;
use crate::device::{
    Allocation, Context, DeviceRange, GrowingRange, MappedBehind, PinnedMemory, Reservation, WriteOrder,
};
use crate::error::{BootstrapError, DeviceError, Error, MemoryError};
use crate::lane::{self, DeviceMemory, Lanes, NoGpuDirect, Registration, WindowPart};
use crate::memory::{PeerMapping, Segment, pin};

/// One rank's view of the windows of all members.
#[derive(Debug)]
pub(crate) struct DeviceWindow {
    members: Vec<Option<Member>>,
    /// The memory of each, as it grows.
    pub(super) ranges: Vec<Option<GrowingRange>>,
    /// Bytes that are mapped of each, in whole granules.
    pub(super) mapped: u64,
    pub(super) sizes: WindowSizes,
}

/// Sizes of a window, equal at all members.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowSizes {
    /// Bytes of memory now.
    pub len: u64,
    /// Bytes to which it may grow.
    pub most: u64,
    /// The common granularity of the members' devices, where the memory may grow: each piece is of
    /// whole ones.
    pub granularity: u64,
    /// Bytes of words.
    pub words: u64,
}

impl WindowSizes {
    /// Of a window that does not grow.
    pub(crate) fn fixed(len: u64, words: u64) -> Self {
        WindowSizes { len, most: len, granularity: 1, words }
    }
}

/// A member's part.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its memory, as this rank's device reaches it.
    pub memory: DeviceRange,
    /// Its words, zero at first.
    pub words: PinnedMemory,
    /// Whether its device is this rank's.
    pub same_device: bool,
}

/// Memory that this rank contributes.
struct Own {
    memory: Arc<Allocation>,
    words: Segment,
    descriptor: OwnedFd,
}

/// What [`DeviceWindow::map`] makes: members, and their memory as it grows.
type Mapped = (Vec<Option<Member>>, Vec<Option<GrowingRange>>);

/// Facts that ranks exchange about their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct LocalInfo {
    usable: u64,
    len: u64,
    words: u64,
    /// Bytes of the allocation, rounded up as the device wants it.
    bytes: u64,
}

/// Facts of one rank, with the identity of its device.
struct PeerInfo<T> {
    said: T,
    device: Vec<u8>,
}

/// Memory that a rank is about to allocate, and memory that its device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct FreeInfo {
    known: u64,
    free: u64,
    needed: u64,
    granularity: u64,
}

impl DeviceWindow {
    /// Whether the devices of all members have as many bytes free as allocations of what each
    /// member `needed` take. Members may share a device. Returns the granularity that all devices
    /// have in common: the largest, since each is a power of two. Collective.
    ///
    /// # Errors
    /// [`MemoryError::DeviceFull`], the same on every rank; [`DeviceError`] at a rank whose driver
    /// does not say, and [`MemoryError::NotUsable`] at the others.
    pub(crate) fn check_free(group: &Group, context: &Context, needed: u64) -> Result<u64, Error> {
        let known = context.free_memory().and_then(|free| Ok((free, Allocation::granularity(context)?)));
        let (free, granularity) = known.as_ref().copied().unwrap_or((0, 1));
        let heard =
            tell(group, context, FreeInfo { known: known.is_ok().into(), free, needed, granularity })?;
        known?;
        if let Some((_, rank)) = heard.iter().zip(0..).find(|(peer, _)| peer.said.known != 1) {
            return Err(MemoryError::NotUsable { rank }.into());
        }
        let granularity = heard.iter().map(|peer| peer.said.granularity).max().unwrap_or(1).max(1);
        for (first, rank) in heard.iter().zip(0..) {
            let sharing = || heard.iter().filter(|peer| peer.device == first.device).map(|peer| peer.said);
            let whole = |said: FreeInfo| Allocation::whole(said.needed, granularity).unwrap_or(u64::MAX);
            let needed = sharing().fold(0_u64, |sum, said| sum.saturating_add(whole(said)));
            let free = sharing().map(|said| said.free).min().unwrap_or(0);
            if needed > free {
                return Err(MemoryError::DeviceFull { rank, needed, free }.into());
            }
        }
        Ok(granularity)
    }

    /// Memory and words of these sizes at each member. Collective. Memory of other nodes is not
    /// mapped. A rank that is not `ready` has an error of its own and
    /// still takes part, so the other ranks learn of it.
    ///
    /// # Errors
    /// [`MemoryError::SizesDiffer`]; [`DeviceError`] at the rank whose device lacks an ability, or
    /// does not reach that of another, and [`MemoryError::NotUsable`] at the others.
    pub(crate) fn new(
        group: &Group,
        context: &Arc<Context>,
        sizes: WindowSizes,
        ready: Result<(), DeviceError>,
    ) -> Result<Self, Error> {
        let (me, WindowSizes { len, words, .. }) = (group.rank(), sizes);
        let own = ready.map_err(Error::from).and_then(|()| Own::new(context, sizes));
        let said = LocalInfo {
            usable: own.is_ok().into(),
            len,
            words,
            bytes: own.as_ref().map_or(0, |own| own.memory.bytes()),
        };
        let heard = tell(group, context, said)?;
        let own = own?;
        for (PeerInfo { said: theirs, .. }, rank) in heard.iter().zip(0..) {
            if theirs.usable != 1 {
                return Err(MemoryError::NotUsable { rank }.into());
            }
            for (seen, expected) in [(theirs.len, len), (theirs.words, words)] {
                if seen != expected {
                    return Err(MemoryError::SizesDiffer { call: 0, me, rank, seen, expected }.into());
                }
            }
        }
        let mapped = Self::map(group, context, &own, &heard, sizes);
        let verdicts = group.gather(&[u8::from(mapped.is_ok())])?;
        let (members, ranges) = mapped?;
        match verdicts.iter().zip(0..).find(|(verdict, _)| verdict[..] != [1]) {
            Some((_, rank)) => Err(MemoryError::NotUsable { rank }.into()),
            None => Ok(DeviceWindow { members, ranges, mapped: own.memory.bytes(), sizes }),
        }
    }

    fn map(
        group: &Group,
        context: &Arc<Context>,
        own: &Own,
        heard: &[PeerInfo<LocalInfo>],
        sizes: WindowSizes,
    ) -> Result<Mapped, Error> {
        let (me, nodes) = (group.rank() as usize, group.nodes());
        let near = |peer: usize| nodes.same_node(group.rank(), peer as u32);
        let offer = |peer: usize| {
            let fds = || vec![own.descriptor.as_fd(), own.words.as_fd()] as Vec<BorrowedFd<'_>>;
            (peer != me && near(peer)).then(fds)
        };
        let (hub, key) = (group.shared.hub.as_ref(), group.step());
        let deadline = group.shared.options.timeouts.rendezvous;
        let received = exchange_fds(hub, &key, group.ranks(), me, &offer, deadline)?;
        let largest = heard.iter().map(|heard| heard.said.bytes).max().unwrap_or(0).max(sizes.most);
        let granularity = Allocation::granularity(context)?.max(sizes.granularity);
        let device = context.device();
        let too_much = DeviceError::OutOfMemory { device, call: "cuMemAddressReserve", bytes: largest };
        let stride = Allocation::whole(largest, granularity).ok_or(too_much)?;
        let reservation = Reservation::new(context, heard.len(), stride)?;
        let (device, uuid) = ([context.device()], &context.facts().uuid);
        let (mut members, mut ranges) = (Vec::with_capacity(heard.len()), Vec::with_capacity(heard.len()));
        for ((fds, PeerInfo { said, device: theirs }), rank) in received.into_iter().zip(heard).zip(0..) {
            if !near(rank as usize) {
                members.push(None);
                ranges.push(None);
                continue;
            }
            let (imported, adopted);
            let (memory, words) = if rank == group.rank() {
                (&own.memory, &own.words)
            } else {
                let [memory, words] = <[OwnedFd; 2]>::try_from(fds)
                    .map_err(|_| BootstrapError::Malformed { peer: format!("rank {rank}") })?;
                imported = Allocation::import(context, memory.as_fd(), said.bytes)?;
                adopted = Segment::adopt(words, rank)?;
                (&imported, &adopted)
            };
            if words.len() != own.words.len() {
                let (seen, expected) = (words.len(), own.words.len());
                return Err(MemoryError::WrongSize { rank, seen, expected }.into());
            }
            let range = reservation.map_growing(rank as usize, memory, &device, said.len)?;
            let memory = range.range().clone();
            ranges.push(Some(range));
            let mapped = Arc::new(PeerMapping::new(&[Some(words)])?);
            mapped.populate(0, 0, words.len())?;
            let words = pin(context, &mapped, 0)?;
            members.push(Some(Member { memory, words, same_device: theirs == uuid.as_bytes() }));
        }
        Ok((members, ranges))
    }

    /// The parts of all members, in the order of the group; none of those of other nodes.
    pub(crate) fn take_members(&mut self) -> Vec<Option<Member>> {
        std::mem::take(&mut self.members)
    }
}

impl Own {
    fn new(context: &Arc<Context>, sizes: WindowSizes) -> Result<Self, Error> {
        let WindowSizes { len, granularity, words, .. } = sizes;
        // The next piece begins behind it, at a place where all devices may map.
        let memory = Allocation::new(context, Allocation::whole(len, granularity).unwrap_or(len))?;
        let descriptor = memory.export()?;
        let page = rustix::param::page_size() as u64;
        let words = Segment::create("sidelane-words", words.next_multiple_of(page))?;
        Ok(Own { memory, words, descriptor })
    }
}

fn tell<T: Pod>(group: &Group, context: &Context, said: T) -> Result<Vec<PeerInfo<T>>, Error> {
    let mut blob = bytemuck::bytes_of(&said).to_vec();
    blob.extend(context.facts().uuid.as_bytes());
    let blobs = group.gather(&blob)?;
    let read = |(blob, rank): (&Vec<u8>, u32)| {
        let (said, device) = blob
            .split_at_checked(size_of::<T>())
            .ok_or_else(|| BootstrapError::Malformed { peer: format!("rank {rank}") })?;
        Ok(PeerInfo { said: bytemuck::pod_read_unaligned(said), device: device.to_vec() })
    };
    blobs.iter().zip(0..).map(read).collect()
}

/// This rank's memory, which the NICs of other nodes write to, and theirs.
#[derive(Debug)]
pub(crate) struct GpuDirectMemory {
    /// As the net reaches it.
    pub window: lane::MappedWindow,
    /// How this rank's NICs address it.
    pub registration: Registration,
    _region: Registered,
}

impl GpuDirectMemory {
    /// Registers `memory` at every member, if the NICs of all take it; otherwise returns the
    /// reason. Collective.
    ///
    /// # Errors
    /// The world's cause; [`BootstrapError::Malformed`], [`LaneError`](crate::error::LaneError) for
    /// what makes no sense.
    pub fn new(
        group: &Group,
        lanes: &Lanes,
        memory: &DeviceMemory,
    ) -> Result<Result<Self, NoGpuDirect>, Error> {
        let (facts, len) = (memory.context.facts(), memory.own.len());
        let ordered = facts.write_order != WriteOrder::None || facts.flush_remote_writes;
        let several = memory.context.driver().hardware_queues() > 1;
        let net = group.shared.net.as_ref().ok_or(NoGpuDirect::Lane("none"));
        let registered = match (ordered, several) {
            (true, true) => net.and_then(|net| net.register_device(memory)),
            (false, _) => Err(NoGpuDirect::Unordered),
            (_, false) => Err(NoGpuDirect::OneQueue),
        };
        let region = registered.as_ref().ok().map(|(number, ..)| Registered::of(group, *number));
        let mut said = vec![u8::from(registered.is_ok())];
        if let Ok((number, key, _)) = &registered {
            said.extend(number.to_le_bytes());
            said.extend(key);
        }
        let heard = group.gather(&said)?;
        let (Ok((_, _, registration)), Some(mut own)) = (&registered, region) else {
            return Ok(Err(registered.err().unwrap_or(NoGpuDirect::Rank(group.rank()))));
        };
        // Before anything is learnt: that may fail at one rank alone, which must not go on as the
        // others do then.
        if let Some((member, _)) = (0..).zip(&heard).find(|(_, blob)| blob[..] == [0]) {
            return Ok(Err(NoGpuDirect::Rank(member)));
        }
        let mut parts = Vec::new();
        for (blob, member) in heard.iter().zip(0..) {
            let Some(([1, number @ ..], key)) = blob.split_first_chunk::<5>() else {
                return Err(BootstrapError::Malformed { peer: format!("rank {member}") }.into());
            };
            let region = u32::from_le_bytes(*number);
            own.import(&lanes.reach[member as usize], (region, key), true)?;
            parts.push(WindowPart { member, region, offset: 0, len });
        }
        // Not mapped for any rank: the processor never accesses it.
        let mapped = Arc::new(PeerMapping::new(&vec![None; parts.len()])?);
        let window = lane::MappedWindow { mapped, parts, of_devices: true };
        Ok(Ok(GpuDirectMemory { window, registration: *registration, _region: own }))
    }
}

/// This rank's staging.
#[derive(Debug)]
pub(crate) struct HostStaging {
    /// The staging as this rank's device reaches it, its outbox behind the rest.
    pub memory: DeviceRange,
    /// Memory as the lane reaches it, and that of the other ranks; of an enqueuer's scratch, its
    /// owner's port
    /// only.
    pub window: lane::MappedWindow,
    _region: Option<Registered>,
}

impl HostStaging {
    /// Staging of `len` bytes for every member, outboxes included. Collective.
    ///
    /// # Errors
    /// [`MemoryError`], [`DeviceError`], or
    /// the lane's error, if it cannot be allocated, pinned or registered.
    pub fn new(group: &Group, context: &Arc<Context>, lanes: &Lanes, len: u64) -> Result<Self, Error> {
        let (memory, mapped) = Self::pinned(group, context, len)?;
        let (region, window) = Registered::new(group, lanes, mapped)?;
        Ok(HostStaging { memory, window, _region: Some(region) })
    }

    /// The enqueuer's scratch of `len` bytes, for this rank only. Collective: if one rank cannot
    /// have it, no rank
    /// continues.
    ///
    /// # Errors
    /// As [`HostStaging::new`].
    pub fn enqueuer_scratch(group: &Group, context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let (memory, mapped) = Self::pinned(group, context, len)?;
        let part = |member| WindowPart { member, region: 0, offset: 0, len: mapped.len_of(member) };
        let parts = (0..group.size()).map(part).collect();
        let window = lane::MappedWindow { mapped, parts, of_devices: false };
        Ok(HostStaging { memory, window, _region: None })
    }

    /// Pinned memory of this rank; an error at all ranks if one has none.
    fn pinned(
        group: &Group,
        context: &Arc<Context>,
        len: u64,
    ) -> Result<(DeviceRange, Arc<PeerMapping>), Error> {
        let own = Self::pin_own(group, context, len);
        let heard = group.gather(&[u8::from(own.is_ok())])?;
        let own = own?;
        match (0..).zip(&heard).find(|(_, said)| said[..] != [1]) {
            Some((rank, _)) => Err(MemoryError::NotUsable { rank }.into()),
            None => Ok(own),
        }
    }

    fn pin_own(
        group: &Group,
        context: &Arc<Context>,
        len: u64,
    ) -> Result<(DeviceRange, Arc<PeerMapping>), Error> {
        let own = Segment::create(
            "sidelane-host-staging",
            len.next_multiple_of(rustix::param::page_size() as u64),
        )?;
        let mut segments = vec![None; group.size() as usize];
        segments[group.rank() as usize] = Some(&own);
        let mapped = Arc::new(PeerMapping::new(&segments)?);
        mapped.populate(group.rank(), 0, own.len())?;
        Ok((pin(context, &mapped, group.rank())?.range().clone(), mapped))
    }
}

/// How a growth ended, at all members alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// Every member's memory has so many bytes now.
    Grown(u64),
    /// The device of this rank has no more memory, or its driver refused it. Nothing has changed.
    Refused(u32),
}

impl DeviceWindow {
    /// The common granularity of its pieces.
    pub(crate) fn granularity(&self) -> u64 {
        self.sizes.granularity
    }

    /// Bytes by which it may still grow.
    pub(crate) fn growth_left(&self) -> u64 {
        self.sizes.most - self.sizes.len
    }

    /// Adds `by` bytes to each member's memory, at most [what is left](DeviceWindow::growth_left),
    /// and maps whole granules for them. Refused, too, where fewer than `spare` bytes for each
    /// member would stay free on a device. Collective.
    ///
    /// # Errors
    /// The world's cause, and [`BootstrapError`]: the members are then of different minds.
    pub(crate) fn grow(
        &mut self,
        group: &Group,
        context: &Arc<Context>,
        by: u64,
        spare: u64,
    ) -> Result<Growth, Error> {
        let len = self.sizes.len.saturating_add(by).min(self.sizes.most);
        let whole = Allocation::whole(len, self.sizes.granularity).unwrap_or(u64::MAX);
        let pieces = match whole.saturating_sub(self.mapped) {
            0 => Ok(Vec::new()),
            more => self.map_more(group, context, (more, spare))?,
        };
        let pieces = match pieces {
            Ok(pieces) => pieces,
            Err(rank) => return Ok(Growth::Refused(rank)),
        };
        (self.mapped, self.sizes.len) = (self.mapped.max(whole), len);
        pieces.into_iter().for_each(MappedBehind::keep);
        self.ranges.iter().flatten().for_each(|range| range.lengthen(len));
        Ok(Growth::Grown(len))
    }

    /// Maps a piece of `bytes` bytes of each member, or gives the rank that was refused.
    fn map_more(
        &self,
        group: &Group,
        context: &Arc<Context>,
        (bytes, spare): (u64, u64),
    ) -> Result<Result<Vec<MappedBehind>, u32>, Error> {
        let me = group.rank();
        match Self::check_free(group, context, bytes.saturating_add(spare)) {
            Ok(_) => {}
            Err(Error::Device(error)) => {
                tracing::warn!(rank = me, %error, "the driver does not say what memory is free");
                return Ok(Err(me));
            }
            Err(Error::Memory(MemoryError::DeviceFull { rank, .. } | MemoryError::NotUsable { rank })) => {
                return Ok(Err(rank));
            }
            Err(error) => return Err(error),
        }
        let made = Allocation::new(context, bytes).and_then(|piece| Ok((piece.export()?, piece)));
        if let Some(rank) = refusing(group, made.as_ref().map(drop))? {
            return Ok(Err(rank));
        }
        let mapped = made.map_err(Error::from).and_then(|made| self.map_pieces(group, context, made));
        if let Some(rank) = refusing(group, mapped.as_ref().map(drop))? {
            return Ok(Err(rank));
        }
        mapped.map(Ok)
    }

    /// Maps this rank's new piece and those of its peers.
    fn map_pieces(
        &self,
        group: &Group,
        context: &Arc<Context>,
        (descriptor, own): (OwnedFd, Arc<Allocation>),
    ) -> Result<Vec<MappedBehind>, Error> {
        let me = group.rank() as usize;
        let offer =
            |peer: usize| (peer != me && self.ranges[peer].is_some()).then(|| vec![descriptor.as_fd()]);
        let (hub, key) = (group.shared.hub.as_ref(), group.step());
        let deadline = group.shared.options.timeouts.rendezvous;
        let received = exchange_fds(hub, &key, group.ranks(), me, &offer, deadline)?;
        let mut pieces = Vec::with_capacity(received.len());
        for ((fds, range), rank) in received.into_iter().zip(&self.ranges).zip(0..) {
            let Some(range) = range else { continue };
            let imported;
            let piece = if rank == me {
                &own
            } else {
                let [piece] = <[OwnedFd; 1]>::try_from(fds)
                    .map_err(|_| BootstrapError::Malformed { peer: format!("rank {rank}") })?;
                imported = Allocation::import(context, piece.as_fd(), own.bytes())?;
                &imported
            };
            pieces.push(range.map_behind(piece)?);
        }
        Ok(pieces)
    }
}

/// Asks all members how their step went: the first that failed.
fn refusing<E: std::fmt::Display>(group: &Group, step: Result<(), E>) -> Result<Option<u32>, Error> {
    if let Err(error) = &step {
        tracing::warn!(rank = group.rank(), %error, "the driver has no more memory for the device heap");
    }
    let heard = group.gather(&[u8::from(step.is_ok())])?;
    Ok(heard.iter().zip(0..).find(|(said, _)| said[..] != [1]).map(|(_, rank)| rank))
}
