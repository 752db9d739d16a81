//! A dispatch of ranks that are streams of one context, from packed to landed: the program of an
//! exchange ([`StreamProgram`]) as the library lowers it, with its kernels left out. What it packs
//! lies there before.
//!
//! Ranks share a context since of several processes the GPU would take turns: what is done to one
//! would not touch the others.

use sidelane::device::{DeviceRange, PinnedMemory, Stream, Version};
use sidelane::error::DeviceError;
use sidelane::exec::{Lowered, PeerWindows};
use sidelane_core::schedule::call_program::{Part, SlotCall};
use sidelane_core::schedule::stream_program::{Slots, StreamProgram};

use super::gpu::{Gpu, content, same, write};
use crate::TestError;
use crate::values::Random;

/// Ranks of a dispatch.
pub const RANKS: u32 = 4;

/// Where ranks write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Pinned memory of the host: an engine does these by construction.
    Host,
    /// The same GPU, in batches that prefer engines: SMs make these copies before CUDA 13.1.
    SameGpu,
}

impl Peers {
    /// Both.
    pub const ALL: [Peers; 2] = [Peers::Host, Peers::SameGpu];

    /// In words.
    pub fn place(self) -> &'static str {
        match self {
            Peers::Host => "pinned windows of the host",
            Peers::SameGpu => "the same GPU, in batches",
        }
    }

    /// The feature that it needs of a driver, and the version that has it.
    pub fn needs(self) -> (&'static str, Version) {
        match self {
            Peers::Host => ("a signal beside mapped memory", Version::MAPPED_FLAGS),
            Peers::SameGpu => ("the overlap hint of a batch", Version::OVERLAP_HINT),
        }
    }
}

/// Whether all streams are done.
pub fn all_done(streams: &[Stream]) -> Result<bool, DeviceError> {
    streams.iter().try_fold(true, |all, stream| Ok(all && stream.is_done()?))
}

/// One dispatch of all ranks, to be done once.
pub struct Dispatch {
    slots: Slots,
    bytes: u64,
    windows: Windows,
    programs: Vec<Lowered>,
}

impl Dispatch {
    /// Packed: slots of so many bytes are full, and nothing has moved.
    pub fn packed(gpu: &Gpu, staging: &Stream, peers: Peers, bytes: u64) -> Result<Self, TestError> {
        let slots = Slots::new(RANKS, bytes, bytes)?;
        let windows = Windows::new(gpu, &slots, peers)?;
        let mut programs = Vec::new();
        for rank in 0..RANKS {
            for to in (0..RANKS).filter(|&to| to != rank) {
                let slot = windows.own[rank as usize].part(slots.send(to), bytes)?;
                write(staging, &slot, &content_of(rank, to, bytes))?;
            }
            let program = StreamProgram::new(SlotCall::Dispatch, slots, rank)?;
            programs.push(Lowered::lower(&gpu.context, &program, rank, &windows.seen_by(rank))?);
        }
        Ok(Dispatch { slots, bytes, windows, programs })
    }

    /// Enqueues all of it, a stream for each rank.
    pub fn enqueue(&mut self, streams: &[Stream]) -> Result<(), DeviceError> {
        for (program, stream) in self.programs.iter_mut().zip(streams) {
            program.enqueue(Part::Start, stream)?;
        }
        for (program, stream) in self.programs.iter_mut().zip(streams) {
            program.enqueue(Part::Finish, stream)?;
        }
        Ok(())
    }

    /// Compares what landed with what was packed.
    pub fn check(&self, gpu: &Gpu, staging: &Stream) -> Result<(), TestError> {
        for rank in 0..RANKS {
            for from in (0..RANKS).filter(|&from| from != rank) {
                let place = (self.slots.receive(from), self.bytes);
                let seen = self.windows.landed(gpu, rank, place, staging)?;
                let expected = content_of(from, rank, self.bytes);
                same(format!("the slot of rank {from} at rank {rank}"), &seen, &expected)?;
            }
        }
        Ok(())
    }

    /// Copies and memory operations of all ranks.
    pub fn counts(&self) -> (u64, u64) {
        let counts = self.programs.iter().map(Lowered::counts);
        counts.fold((0, 0), |(a, b), counts| (a + counts.copies, b + counts.memory_operations))
    }
}

fn content_of(from: u32, to: u32, bytes: u64) -> Vec<u8> {
    Random(u64::from(from * RANKS + to) + bytes).bytes(bytes)
}

struct Windows {
    /// Memory that each sends from.
    own: Vec<DeviceRange>,
    /// Where others write, if that is memory of the host.
    host: Option<Vec<PinnedMemory>>,
    words: Vec<PinnedMemory>,
}

impl Windows {
    fn new(gpu: &Gpu, slots: &Slots, peers: Peers) -> Result<Self, DeviceError> {
        let pinned = |bytes| (0..RANKS).map(|_| gpu.pinned(bytes)).collect::<Result<Vec<_>, _>>();
        Ok(Windows {
            own: (0..RANKS).map(|_| gpu.memory(slots.bytes())).collect::<Result<_, _>>()?,
            host: if peers == Peers::Host { Some(pinned(slots.bytes())?) } else { None },
            words: pinned(slots.flag_bytes())?,
        })
    }

    fn seen_by(&self, me: u32) -> ReachedWindows<'_> {
        ReachedWindows { windows: self, me }
    }

    fn landed(
        &self,
        gpu: &Gpu,
        rank: u32,
        (offset, len): (u64, u64),
        stream: &Stream,
    ) -> Result<Vec<u8>, TestError> {
        match &self.host {
            None => gpu.read(stream, &self.own[rank as usize].part(offset, len)?),
            Some(host) => Ok(content(&host[rank as usize])?[offset as usize..][..len as usize].to_vec()),
        }
    }
}

/// The windows as one rank reaches them: its own on the GPU, those of the others where they are.
struct ReachedWindows<'a> {
    windows: &'a Windows,
    me: u32,
}

impl PeerWindows for ReachedWindows<'_> {
    fn slots(&self, rank: u32) -> Option<&DeviceRange> {
        Some(match &self.windows.host {
            Some(host) if rank != self.me => host[rank as usize].range(),
            _ => &self.windows.own[rank as usize],
        })
    }

    fn flags(&self, rank: u32) -> Option<&DeviceRange> {
        Some(self.windows.words[rank as usize].range())
    }

    fn same_device(&self, _rank: u32) -> bool {
        self.windows.host.is_none()
    }
}
