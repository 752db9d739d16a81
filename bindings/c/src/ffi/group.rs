//! Groups: ordered ranks of a world.

use super::memory::{Out, slice};
use super::objects::{Group, World};
use super::versioned::{OutStruct, versioned};
use super::{border, close, get, give};
use crate::Status;

/// Description of a group.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GroupInfo {
    /// sizeof(sidelane_group_info_t).
    pub size: usize,
    /// This rank's position.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// The node of this rank.
    pub node: u32,
}
versioned!(GroupInfo, "sidelane_group_info_t", node: u32);

/// A group of `count` ranks of the world, in this order. Collective among them. Without ranks (NULL
/// and 0), of all ranks.
///
/// The caller guarantees: `ranks` is NULL or points to `count` numbers; `group` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_group(
    world: *mut World,
    ranks: *const u32,
    count: u32,
    group: *mut *mut Group,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, ranks) = unsafe { (Out::new("group", group)?, slice("ranks", ranks, count.into())?) };
        let world = get(world)?;
        give(if ranks.is_empty() { world.all() } else { world.group(ranks) }?, out)
    })
}

/// Describes a group.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_group_info(group: *mut Group, info: *mut GroupInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let group = get(group)?;
        let nodes = group.nodes();
        let (rank, ranks) = (group.rank(), group.size());
        out.write(GroupInfo { size: 0, rank, ranks, nodes: nodes.nodes(), node: nodes.node_of(rank) });
        Ok(())
    })
}

/// Closes the handle. Objects built on the group stay valid. NULL is a no-op.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_group_close(group: *mut Group) -> Status {
    close(group)
}
