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

use std::sync::Arc;

use super::Group;
use super::region::Registered;
use crate::device::WriteOrder;
use crate::error::{BootstrapError, Error};
use crate::lane::{self, DeviceMemory, Lanes, NoGpuDirect, PeerLane, Registration, WindowPart};
use crate::memory::PeerMapping;

/// This rank's memory, which the NICs of other nodes write to, and theirs.
#[derive(Debug)]
pub(crate) struct GpuDirectMemory {
    /// As rails reach it.
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
        let rails = group.shared.rails.as_ref().ok_or(NoGpuDirect::Lane("none"));
        let registered = match (ordered, several) {
            (true, true) => rails.and_then(|rails| rails.register_device(memory)),
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
        let (Ok((_, _, registration)), Some(region)) = (&registered, region) else {
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
            if let PeerLane::Net(rail) = &lanes.reach[member as usize] {
                rail.import_region(region, key)?;
            }
            parts.push(WindowPart { member, region, offset: 0, len });
        }
        // Not mapped for any rank: the processor never accesses it.
        let mapped = Arc::new(PeerMapping::new(&vec![None; parts.len()])?);
        let window = lane::MappedWindow { mapped, parts, of_devices: true };
        Ok(Ok(GpuDirectMemory { window, registration: *registration, _region: region }))
    }
}
