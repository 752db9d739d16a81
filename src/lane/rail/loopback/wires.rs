//! How the ends of a loop wire find each other: the lower rank of a pair makes the segment, and descriptors are passed.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::link::Link;
use super::pace::Egress;
use super::ring::ring_bytes;
use crate::error::{Error, LaneError};
use crate::lane::rail::{LOOP, PACED, Rail, Regions, WireOffer, Wiring, system};
use crate::memory::{Mapped, Segment};

/// The loop wires of one rank.
#[derive(Debug)]
pub struct LoopWires {
    rank: u32,
    regions: Arc<Regions>,
    /// Wakes this rank's progress thread.
    bell: OwnedFd,
    /// The link whose time is kept, if any.
    egress: Option<Arc<Egress>>,
    /// Segments that were offered.
    made: Mutex<HashMap<u32, Segment>>,
}

impl LoopWires {
    /// The wires of a rank of the world, at the pace of a link if there is one.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no descriptor to be had.
    pub fn new(
        rank: u32,
        regions: Arc<Regions>,
        bell: BorrowedFd<'_>,
        egress: Option<Arc<Egress>>,
    ) -> Result<Self, LaneError> {
        Ok(LoopWires { rank, regions, bell: duplicate(bell)?, egress, made: Mutex::default() })
    }
}

impl Wiring for LoopWires {
    fn lane(&self) -> &'static str {
        if self.egress.is_some() { PACED } else { LOOP }
    }

    fn passes_descriptors(&self) -> bool {
        true
    }

    fn offer(&self, peer: u32) -> Result<WireOffer, Error> {
        let mut descriptors = vec![duplicate(self.bell.as_fd())?];
        if self.rank < peer {
            let segment = Segment::create("sidelane-wire", ring_bytes())?;
            descriptors.push(duplicate(segment.as_fd())?);
            self.made.lock().unwrap_or_else(PoisonError::into_inner).insert(peer, segment);
        }
        Ok(WireOffer { bytes: Vec::new(), descriptors })
    }

    fn join(&self, peer: u32, offered: WireOffer) -> Result<Arc<dyn Rail>, Error> {
        let own = self.made.lock().unwrap_or_else(PoisonError::into_inner).remove(&peer);
        let mut theirs = offered.descriptors.into_iter();
        let missing = |missing| LaneError::NoLane { rank: self.rank, peer, missing };
        let bell = theirs.next().ok_or_else(|| missing("the bell of the peer"))?;
        let wire = match own {
            Some(own) => own,
            None => Segment::adopt(theirs.next().ok_or_else(|| missing("the segment of the wire"))?, peer)?,
        };
        let mapped = Arc::new(Mapped::new(&[Some(&wire)])?);
        mapped.populate(0, 0, wire.len())?;
        let (regions, egress) = (Arc::clone(&self.regions), self.egress.clone());
        Ok(Arc::new(Link::new(peer, self.rank < peer, mapped, bell, regions, egress)?))
    }
}

fn duplicate(descriptor: BorrowedFd<'_>) -> Result<OwnedFd, LaneError> {
    rustix::io::fcntl_dupfd_cloexec(descriptor, 0).map_err(system("fcntl(F_DUPFD_CLOEXEC)"))
}
