//! Path of rows between nodes for a device: by its NICs if those of all ranks reach device memory,
//! else by host staging.
//!
//! ```text
//!   GPUDirect     device --NIC==net==NIC--> device
//!   host staging  device --engine--> outbox --net--> staging --engine--> device
//! ```

use std::sync::Arc;

use crate::device::Context;
use crate::ep::work::RowMemory;
use crate::error::{Error, MemoryError};
use crate::lane::{DeviceMemory, Lanes};
use crate::topology::Route;
use crate::world::{GpuDirectMemory, Group, HostStaging, Member, NoGpuDirect, Registration};

/// Path of rows between nodes. It lives as long as the exchange, because other nodes write to it.
#[derive(Debug)]
pub(super) enum RowTransport {
    /// There is one node.
    None,
    /// Memory of devices, as NICs know it; and the planning desk, where engines relay.
    Straight(GpuDirectMemory, Option<HostStaging>),
    /// Memory of the host, and why.
    Detour(HostStaging, NoGpuDirect),
}

/// Sizes that an exchange needs, equal at all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransportSizes {
    /// Bytes at the start of the device's memory that hold words.
    pub words: u64,
    /// Size of a desk, where a straight passage needs one.
    pub desk: Option<u64>,
    /// Size of a twin, outbox counted.
    pub twin: u64,
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
        if !paths.rails() {
            return Ok(RowTransport::None);
        }
        let own = members.get(rank as usize).and_then(Option::as_ref);
        let own = own.ok_or(MemoryError::NotUsable { rank })?.memory.clone();
        // A relay brings home what its neighbours offer.
        let neighbours = paths.local_peers().filter(|_| lanes.route == Route::Pxn);
        let memory_of = |rank: u32| members[rank as usize].as_ref().map(|member| member.memory.clone());
        let neighbours = neighbours.filter_map(|rank| Some((rank, memory_of(rank)?))).collect();
        let context_of = Arc::clone(context);
        let memory = DeviceMemory { context: context_of, own, neighbours, rank, strict: needs.words };
        match GpuDirectMemory::new(group, lanes, &memory)? {
            Ok(straight) => {
                let desk = needs.desk.map(|len| HostStaging::enqueuer_scratch(group, context, len));
                Ok(RowTransport::Straight(straight, desk.transpose()?))
            }
            Err(detour) => {
                tracing::info!(rank, ?detour, "rows cross by memory of the host");
                Ok(RowTransport::Detour(HostStaging::new(group, context, lanes, needs.twin)?, detour))
            }
        }
    }

    /// As an exchange's windows know it.
    pub fn ground(&self) -> RowMemory<'_> {
        match self {
            RowTransport::None => RowMemory::Near,
            RowTransport::Straight(straight, desk) => {
                RowMemory::Devices(&straight.window, desk.as_ref().map(|desk| &desk.window))
            }
            RowTransport::Detour(twin, _) => RowMemory::Twin(&twin.window),
        }
    }

    /// The host's memory from which engines bring in.
    pub fn twin(&self) -> Option<&HostStaging> {
        match self {
            RowTransport::None => None,
            RowTransport::Straight(_, desk) => desk.as_ref(),
            RowTransport::Detour(twin, _) => Some(twin),
        }
    }

    /// Why rows that cross go by memory of the host, if they do.
    pub fn detour(&self) -> Option<NoGpuDirect> {
        match self {
            RowTransport::Detour(_, detour) => Some(*detour),
            _ => None,
        }
    }

    /// How cards know the device's memory, if they do.
    pub fn registration(&self) -> Option<Registration> {
        match self {
            RowTransport::Straight(straight, _) => Some(straight.registration),
            _ => None,
        }
    }
}
