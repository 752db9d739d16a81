//! How the ends of a loop wire find each other: the lower rank of a pair makes the segment, and
//! descriptors are passed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::emulator::LinkEmulator;
use super::link::LoopbackConnection;
use super::ring::ring_bytes;
use crate::error::{Error, LaneError};
use crate::lane::net::{
    EMULATED, LOOPBACK, NetConnection, NetTransport, Regions, WireEnd, WireOffer, system,
};
use crate::memory::{PeerMapping, Segment};

/// The loop wires of one rank.
#[derive(Debug)]
pub struct LoopbackTransport {
    rank: u32,
    regions: Arc<Regions>,
    /// Wakes this rank's progress thread.
    bell: OwnedFd,
    /// The emulated link, if any.
    egress: Option<Arc<LinkEmulator>>,
}

impl LoopbackTransport {
    /// The wires of a rank of the world, at the pace of a link if there is one.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no descriptor to be had.
    pub fn new(
        rank: u32,
        regions: Arc<Regions>,
        bell: BorrowedFd<'_>,
        egress: Option<Arc<LinkEmulator>>,
    ) -> Result<Self, LaneError> {
        let bell = rustix::io::fcntl_dupfd_cloexec(bell, 0).map_err(system("fcntl(F_DUPFD_CLOEXEC)"))?;
        Ok(LoopbackTransport { rank, regions, bell, egress })
    }
}

impl NetTransport for LoopbackTransport {
    fn lane(&self) -> &'static str {
        if self.egress.is_some() { EMULATED } else { LOOPBACK }
    }

    fn passes_descriptors(&self) -> bool {
        true
    }

    fn open(&self, peer: u32) -> Result<Box<dyn WireEnd + '_>, Error> {
        let create = || Segment::create("sidelane-wire", ring_bytes());
        let made = (self.rank < peer).then(create).transpose()?;
        Ok(Box::new(LoopbackEnd { wires: self, peer, made }))
    }
}

/// One end of a loop wire.
struct LoopbackEnd<'a> {
    wires: &'a LoopbackTransport,
    peer: u32,
    /// The segment of the wire, at the lower rank of the pair.
    made: Option<Segment>,
}

impl WireEnd for LoopbackEnd<'_> {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let segment = self.made.as_ref().map(AsFd::as_fd);
        [self.wires.bell.as_fd()].into_iter().chain(segment).collect()
    }

    fn connect(self: Box<Self>, offered: WireOffer) -> Result<Arc<dyn NetConnection>, Error> {
        let LoopbackEnd { wires: &LoopbackTransport { rank, ref regions, ref egress, .. }, peer, made } =
            *self;
        let mut theirs = offered.descriptors.into_iter();
        let missing = |missing| LaneError::NoLane { rank, peer, missing };
        let bell = theirs.next().ok_or_else(|| missing("the bell of the peer"))?;
        let segment = match made {
            Some(made) => made,
            None => Segment::adopt(theirs.next().ok_or_else(|| missing("the segment of the wire"))?, peer)?,
        };
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        let (regions, egress) = (Arc::clone(regions), egress.clone());
        Ok(Arc::new(LoopbackConnection::new(peer, rank < peer, mapped, bell, regions, egress)?))
    }
}
