//! The host's twin of a device's memory: where rows wait that cross between nodes.
//!
//! ```text
//!   device      | memory, as its peers of the node reach it |
//!                  | out ^ in: copy engines
//!   twin        | the same, at the same offsets             | outbox |      pinned for the device, registered with rails
//!                  ^ rails                                    | rails
//! ```
//!
//! What comes from other nodes lands in the twin where it is to lie on the device, under the licence that was given for
//! that; so nothing is placed twice, and the copy in is one of whatever lies next to each other. What goes out waits in the
//! outbox. A rail that reaches the device needs none of this.

use std::sync::Arc;

use super::Group;
use super::region::Registered;
use crate::device::{Context, Range};
use crate::error::Error;
use crate::lane::{self, Lanes, Reach};
use crate::memory::{Mapped, Segment, pin};
use crate::topology::Route;

/// Why rows that cross go by memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detour {
    /// The driver hands out no descriptors (dma-bufs) of this device's memory.
    NoDmaBuf,
    /// This lane registers memory of the host alone.
    Lane(&'static str),
}

/// This rank's twin.
#[derive(Debug)]
pub(crate) struct Twin {
    /// The twin as this rank's device reaches it, its outbox behind the rest.
    pub memory: Range,
    /// As rails reach it, and those of the other ranks.
    pub window: lane::Window,
    /// Why there is one.
    pub detour: Detour,
    _region: Registered,
}

impl Twin {
    /// A twin of `len` bytes for every member, outboxes counted, if the group has several nodes. Collective.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`DeviceError`](crate::error::DeviceError), or what a lane says, if it
    /// cannot be had, pinned or registered.
    pub fn new(group: &Group, context: &Arc<Context>, route: Route, len: u64) -> Result<Option<Self>, Error> {
        let lanes = group.lanes(route)?;
        let Some(detour) = Detour::find(context, &lanes) else { return Ok(None) };
        let own = Segment::create("sidelane-twin", len.next_multiple_of(rustix::param::page_size() as u64))?;
        let mut segments = vec![None; group.size() as usize];
        segments[group.rank() as usize] = Some(&own);
        let mapped = Arc::new(Mapped::new(&segments)?);
        mapped.populate(group.rank(), 0, own.len())?;
        let memory = pin(context, &mapped, group.rank())?.range().clone();
        let (region, window) = Registered::new(group, &lanes, mapped)?;
        Ok(Some(Twin { memory, window, detour, _region: region }))
    }
}

impl Detour {
    /// How rows reach the devices of other nodes is decided here: by memory of the host, until there is a lane that takes
    /// dma-bufs; none where there is one node.
    fn find(context: &Context, lanes: &Lanes) -> Option<Detour> {
        let rail = lanes.reach.iter().find_map(|reach| match reach {
            Reach::Rail(rail) => Some(rail.lane()),
            _ => None,
        })?;
        Some(if context.facts().dma_buf { Detour::Lane(rail) } else { Detour::NoDmaBuf })
    }
}
