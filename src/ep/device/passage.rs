//! How rows of an exchange on streams cross between nodes: from device to device where the cards of
//! all ranks reach these, else by the host's twin.

use std::sync::Arc;

use crate::device::Context;
use crate::ep::fixed::Ground;
use crate::error::{Error, MemoryError};
use crate::lane::{DeviceMemory, Lanes};
use crate::topology::Route;
use crate::world::{Detour, Group, Member, Registration, Straight, Twin};

/// Path of rows between nodes. It lives as long as the exchange, because other nodes write to it.
#[derive(Debug)]
pub(super) enum Passage {
    /// There is one node.
    None,
    /// Memory of devices, as NICs know it; and the planner's desk, where engines relay.
    Straight(Straight, Option<Twin>),
    /// Memory of the host, and why.
    Detour(Twin, Detour),
}

/// Sizes that an exchange needs, equal at all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Bytes at the start of the device's memory that hold words.
    pub words: u64,
    /// Size of a desk, where a straight passage needs one.
    pub desk: Option<u64>,
    /// Size of a twin, outbox counted.
    pub twin: u64,
}

impl Passage {
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
        needs: Needs,
    ) -> Result<Self, Error> {
        let (paths, rank) = (lanes.paths(), lanes.rank);
        if !paths.rails() {
            return Ok(Passage::None);
        }
        let own = members.get(rank as usize).and_then(Option::as_ref);
        let own = own.ok_or(MemoryError::NotUsable { rank })?.memory.clone();
        // A relay brings home what its neighbours offer.
        let neighbours = paths.locals().filter(|_| lanes.route == Route::Pxn);
        let memory_of = |rank: u32| members[rank as usize].as_ref().map(|member| member.memory.clone());
        let neighbours = neighbours.filter_map(|rank| Some((rank, memory_of(rank)?))).collect();
        let context_of = Arc::clone(context);
        let memory = DeviceMemory { context: context_of, own, neighbours, rank, strict: needs.words };
        match Straight::new(group, lanes, &memory)? {
            Ok(straight) => {
                let desk = needs.desk.map(|len| Twin::desk(group, context, len));
                Ok(Passage::Straight(straight, desk.transpose()?))
            }
            Err(detour) => {
                tracing::info!(rank, ?detour, "rows cross by memory of the host");
                Ok(Passage::Detour(Twin::new(group, context, lanes, needs.twin)?, detour))
            }
        }
    }

    /// As an exchange's windows know it.
    pub fn ground(&self) -> Ground<'_> {
        match self {
            Passage::None => Ground::Near,
            Passage::Straight(straight, desk) => {
                Ground::Devices(&straight.window, desk.as_ref().map(|desk| &desk.window))
            }
            Passage::Detour(twin, _) => Ground::Twin(&twin.window),
        }
    }

    /// The host's memory from which engines bring in.
    pub fn twin(&self) -> Option<&Twin> {
        match self {
            Passage::None => None,
            Passage::Straight(_, desk) => desk.as_ref(),
            Passage::Detour(twin, _) => Some(twin),
        }
    }

    /// Why rows that cross go by memory of the host, if they do.
    pub fn detour(&self) -> Option<Detour> {
        match self {
            Passage::Detour(_, detour) => Some(*detour),
            _ => None,
        }
    }

    /// How cards know the device's memory, if they do.
    pub fn registration(&self) -> Option<Registration> {
        match self {
            Passage::Straight(straight, _) => Some(straight.registration),
            _ => None,
        }
    }
}
