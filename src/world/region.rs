//! Memory next to the heap that peers on other nodes write to.

use std::sync::Arc;

use super::{Group, WorldState};
use crate::error::{Error, MemoryError};
use crate::lane::{self, Lanes, PeerLane, Region, WindowPart};
use crate::memory::PeerMapping;

/// This rank's part. Peers may write to it as long as this value lives.
#[derive(Debug)]
pub(super) struct Registered {
    world: Arc<WorldState>,
    /// None where there are no rails.
    region: Option<u32>,
}

impl Registered {
    /// The memory that is registered under this number.
    pub fn of(group: &Group, number: u32) -> Self {
        Registered { world: Arc::clone(&group.shared), region: Some(number) }
    }

    /// Registers this rank's segment of a mapping: the member of its position in the group. All are
    /// equally long. Collective.
    ///
    /// # Errors
    /// [`MemoryError::NotUsable`] if that of another rank cannot be registered; at that rank, the
    /// lane's error.
    pub fn new(
        group: &Group,
        lanes: &Lanes,
        mapped: Arc<PeerMapping>,
    ) -> Result<(Self, lane::MappedWindow), Error> {
        let len = mapped.len_of(group.rank());
        let region = Region { mapped: Arc::clone(&mapped), member: group.rank() };
        let registered = group.shared.rails.as_ref().map(|rails| rails.register(region)).transpose();
        let (number, key) = registered.as_ref().ok().cloned().flatten().unwrap_or_default();
        let mut said = vec![u8::from(registered.is_ok())];
        said.extend(number.to_le_bytes());
        said.extend(key);
        let heard = group.gather(&said)?;
        let region = registered?.map(|_| number);
        let registered = Registered { world: Arc::clone(&group.shared), region };
        let mut parts = Vec::new();
        for (blob, member) in heard.iter().zip(0..) {
            let Some(([1, number @ ..], key)) = blob.split_first_chunk::<5>() else {
                return Err(MemoryError::NotUsable { rank: member }.into());
            };
            let region = u32::from_le_bytes(*number);
            if let PeerLane::Net(rail) = &lanes.reach[member as usize] {
                rail.import_region(region, key)?;
            }
            parts.push(WindowPart { member, region, offset: 0, len });
        }
        Ok((registered, lane::MappedWindow { parts, mapped, of_devices: false }))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let (Some(number), Some(rails)) = (self.region, &self.world.rails) {
            rails.deregister(number);
        }
    }
}
