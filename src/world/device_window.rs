//! Windows on GPUs: memory of a device at every member of a group, and words next to it, mapped
//! within nodes.
//!
//! ```text
//!   member 0   | memory: VMM, exported as a descriptor |   | words: a sealed memfd, pinned |
//!   member 1   | ...                                   |   | ...                           |
//!              mapped at equal distances, for my device    mapped, and pinned, by all
//! ```
//!
//! Rows lie in the memory, flags in the words. A GPU writes a word after all earlier work of its
//! stream, wherever the word lies. In host memory the *host* can reach the word as well: it sees
//! missing signals, and can end a wait when a rank is lost. It needs no stream of its own for that,
//! which might queue behind the very wait.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::Group;
use crate::bootstrap::exchange_fds;
use crate::device::{Allocation, Context, DeviceRange, PinnedMemory, Reservation};
use crate::error::{BootstrapError, DeviceError, Error, MemoryError};
use crate::memory::{PeerMapping, Segment, pin};

/// One rank's view of the windows of all members.
#[derive(Debug)]
pub(crate) struct DeviceWindow {
    members: Vec<Option<Member>>,
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
struct PeerInfo {
    said: LocalInfo,
    device: Vec<u8>,
}

impl DeviceWindow {
    /// `len` bytes of memory of each member's device, and `words` bytes of words. Collective.
    /// Memory of other nodes is not mapped. A rank that is not `ready` has an error of its own and
    /// still takes part, so the other ranks learn of it.
    ///
    /// # Errors
    /// [`MemoryError::SizesDiffer`]; [`DeviceError`] at the rank whose device lacks an ability, or
    /// does not reach that of another, and [`MemoryError::NotUsable`] at the others.
    pub(crate) fn new(
        group: &Group,
        context: &Arc<Context>,
        (len, words): (u64, u64),
        ready: Result<(), DeviceError>,
    ) -> Result<Self, Error> {
        let me = group.rank();
        let own = ready.map_err(Error::from).and_then(|()| Own::new(context, len, words));
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
        let members = Self::map(group, context, &own, &heard);
        let verdicts = group.gather(&[u8::from(members.is_ok())])?;
        let members = members?;
        match verdicts.iter().zip(0..).find(|(verdict, _)| verdict[..] != [1]) {
            Some((_, rank)) => Err(MemoryError::NotUsable { rank }.into()),
            None => Ok(DeviceWindow { members }),
        }
    }

    fn map(
        group: &Group,
        context: &Arc<Context>,
        own: &Own,
        heard: &[PeerInfo],
    ) -> Result<Vec<Option<Member>>, Error> {
        let (me, nodes) = (group.rank() as usize, group.nodes());
        let near = |peer: usize| nodes.same_node(group.rank(), peer as u32);
        let offer = |peer: usize| {
            let fds = || vec![own.descriptor.as_fd(), own.words.as_fd()] as Vec<BorrowedFd<'_>>;
            (peer != me && near(peer)).then(fds)
        };
        let (hub, key) = (group.shared.hub.as_ref(), group.step());
        let deadline = group.shared.options.clocks.rendezvous;
        let received = exchange_fds(hub, &key, group.ranks(), me, &offer, deadline)?;
        let stride = heard.iter().map(|heard| heard.said.bytes).max().unwrap_or(0);
        let stride = stride.next_multiple_of(Allocation::granularity(context)?);
        let reservation = Reservation::new(context, heard.len(), stride)?;
        let (device, uuid) = ([context.device()], &context.facts().uuid);
        let mut members = Vec::with_capacity(heard.len());
        for ((fds, PeerInfo { said, device: theirs }), rank) in received.into_iter().zip(heard).zip(0..) {
            if !near(rank as usize) {
                members.push(None);
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
            let memory = reservation.map(rank as usize, memory, &device)?.part(0, said.len)?;
            let mapped = Arc::new(PeerMapping::new(&[Some(words)])?);
            mapped.populate(0, 0, words.len())?;
            let words = pin(context, &mapped, 0)?;
            members.push(Some(Member { memory, words, same_device: theirs == uuid.as_bytes() }));
        }
        Ok(members)
    }

    /// The parts of all members, in the order of the group; none of those of other nodes.
    pub(crate) fn members(self) -> Vec<Option<Member>> {
        self.members
    }
}

impl Own {
    fn new(context: &Arc<Context>, len: u64, words: u64) -> Result<Self, Error> {
        let memory = Allocation::new(context, len)?;
        let descriptor = memory.export()?;
        let page = rustix::param::page_size() as u64;
        let words = Segment::create("sidelane-words", words.next_multiple_of(page))?;
        Ok(Own { memory, words, descriptor })
    }
}

fn tell(group: &Group, context: &Context, said: LocalInfo) -> Result<Vec<PeerInfo>, Error> {
    let mut blob = bytemuck::bytes_of(&said).to_vec();
    blob.extend(context.facts().uuid.as_bytes());
    let blobs = group.gather(&blob)?;
    let read = |(blob, rank): (&Vec<u8>, u32)| {
        let (said, device) = blob
            .split_at_checked(size_of::<LocalInfo>())
            .ok_or_else(|| BootstrapError::Malformed { peer: format!("rank {rank}") })?;
        Ok(PeerInfo { said: bytemuck::pod_read_unaligned(said), device: device.to_vec() })
    };
    blobs.iter().zip(0..).map(read).collect()
}
