//! Path of rows between nodes for a device: by its NICs if those of all ranks reach device memory,
//! else by host staging.
//!
//! ```text
//!   GPUDirect     device --NIC==net==NIC--> device
//!   host staging  device --engine--> outbox --net--> staging --engine--> device
//! ```

use std::sync::Arc;

use crate::device::Context;
use crate::ep::state::RowMemory;
use crate::error::{Error, MemoryError};
use crate::lane::{DeviceMemory, Lanes};
use crate::topology::Route;
use crate::world::{GpuDirectMemory, Group, HostStaging, Member, NoGpuDirect, Registration};

/// Path of rows between nodes. It lives as long as the exchange, because other nodes write to it.
#[derive(Debug)]
pub(super) enum RowTransport {
    /// There is one node.
    None,
    /// Memory of devices, as NICs know it; and the enqueuer's scratch, where engines relay.
    GpuDirect(GpuDirectMemory, Option<HostStaging>),
    /// Memory of the host, and why.
    HostStaged(HostStaging, NoGpuDirect),
}

/// Sizes that an exchange needs, equal at all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransportSizes {
    /// Bytes at the start of the device's memory that hold words.
    pub words: u64,
    /// Bytes of the enqueuer's scratch, where rows go by GPUDirect and engines relay.
    pub enqueuer_scratch: Option<u64>,
    /// Bytes of host staging, outbox counted.
    pub host_staging: u64,
}

impl RowTransport {
    /// Decides once for all members, and makes it. Collective.
    ///
    /// # Errors
    /// [`MemoryError`], [`DeviceError`](crate::error::DeviceError), or what a lane says, if the
    /// host's part cannot be had, pinned or registered.
    pub fn find(
        group: &Group,
        context: &Arc<Context>,
        lanes: &Lanes,
        members: &[Option<Member>],
        needs: TransportSizes,
    ) -> Result<Self, Error> {
        let (paths, rank) = (lanes.paths(), lanes.rank);
        if !paths.is_multi_node() {
            return Ok(RowTransport::None);
        }
        let own = members.get(rank as usize).and_then(Option::as_ref);
        let own = own.ok_or(MemoryError::NotUsable { rank })?.memory.clone();
        // A relay returns the rows that its local peers offer.
        let local_peers = paths.local_peers().filter(|_| lanes.route == Route::Pxn);
        let memory_of = |rank: u32| members[rank as usize].as_ref().map(|member| member.memory.clone());
        let local_peers = local_peers.filter_map(|rank| Some((rank, memory_of(rank)?))).collect();
        let context_of = Arc::clone(context);
        let memory = DeviceMemory { context: context_of, own, local_peers, rank, strict: needs.words };
        match GpuDirectMemory::new(group, lanes, &memory)? {
            Ok(gpu_direct) => {
                let enqueuer_scratch =
                    needs.enqueuer_scratch.map(|len| HostStaging::enqueuer_scratch(group, context, len));
                Ok(RowTransport::GpuDirect(gpu_direct, enqueuer_scratch.transpose()?))
            }
            Err(reason) => {
                tracing::info!(rank, ?reason, "rows cross by memory of the host");
                Ok(RowTransport::HostStaged(
                    HostStaging::new(group, context, lanes, needs.host_staging)?,
                    reason,
                ))
            }
        }
    }

    /// As an exchange's windows know it.
    pub fn ground(&self) -> RowMemory<'_> {
        match self {
            RowTransport::None => RowMemory::Near,
            RowTransport::GpuDirect(gpu_direct, enqueuer_scratch) => RowMemory::Devices(
                &gpu_direct.window,
                enqueuer_scratch.as_ref().map(|enqueuer_scratch| &enqueuer_scratch.window),
            ),
            RowTransport::HostStaged(host_staging, _) => RowMemory::HostStaging(&host_staging.window),
        }
    }

    /// The host's memory from which engines bring in.
    pub fn host_staging(&self) -> Option<&HostStaging> {
        match self {
            RowTransport::None => None,
            RowTransport::GpuDirect(_, enqueuer_scratch) => enqueuer_scratch.as_ref(),
            RowTransport::HostStaged(host_staging, _) => Some(host_staging),
        }
    }

    /// Why rows that cross go by memory of the host, if they do.
    pub fn no_gpu_direct(&self) -> Option<NoGpuDirect> {
        match self {
            RowTransport::HostStaged(_, reason) => Some(*reason),
            _ => None,
        }
    }

    /// How NICs know the device's memory, if they do.
    pub fn registration(&self) -> Option<Registration> {
        match self {
            RowTransport::GpuDirect(gpu_direct, _) => Some(gpu_direct.registration),
            _ => None,
        }
    }
}
