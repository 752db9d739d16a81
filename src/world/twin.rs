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

use std::sync::Arc;

use super::Group;
use super::region::Registered;
use crate::device::{Context, DeviceRange};
use crate::error::{Error, MemoryError};
use crate::lane::{self, Lanes, WindowPart};
use crate::memory::{PeerMapping, Segment, pin};

/// This rank's staging.
#[derive(Debug)]
pub(crate) struct HostStaging {
    /// The staging as this rank's device reaches it, its outbox behind the rest.
    pub memory: DeviceRange,
    /// Memory as the lane reaches it, and that of the other ranks; of a desk, its owner's port
    /// only.
    pub window: lane::MappedWindow,
    _region: Option<Registered>,
}

impl HostStaging {
    /// Staging of `len` bytes for every member, outboxes included. Collective.
    ///
    /// # Errors
    /// [`MemoryError`], [`DeviceError`](crate::error::DeviceError), or
    /// the lane's error, if it cannot be allocated, pinned or registered.
    pub fn new(group: &Group, context: &Arc<Context>, lanes: &Lanes, len: u64) -> Result<Self, Error> {
        let (memory, mapped) = Self::pinned(group, context, len)?;
        let (region, window) = Registered::new(group, lanes, mapped)?;
        Ok(HostStaging { memory, window, _region: Some(region) })
    }

    /// A desk of `len` bytes, for this rank only. Collective: if one rank cannot have it, no rank
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
        let own = Segment::create("sidelane-twin", len.next_multiple_of(rustix::param::page_size() as u64))?;
        let mut segments = vec![None; group.size() as usize];
        segments[group.rank() as usize] = Some(&own);
        let mapped = Arc::new(PeerMapping::new(&segments)?);
        mapped.populate(group.rank(), 0, own.len())?;
        Ok((pin(context, &mapped, group.rank())?.range().clone(), mapped))
    }
}
