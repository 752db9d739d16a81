//! Worlds: joining, asking, rebuilding, leaving.

use std::ffi::c_char;
use std::time::Duration;

use sidelane::Options;
use sidelane::bootstrap::{Identity, Secret};

use super::memory::{Out, short_name, slice_mut};
use super::objects::World;
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give};
use crate::Status;
use crate::fault::{ArgumentError, Fault};

/// Options of joining a world. A 0 is replaced by the environment's value or the default. heap and
/// symmetric must be equal on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WorldOptions {
    /// sizeof(sidelane_world_options_t).
    pub size: usize,
    /// Bytes of each rank's heap (SIDELANE_HEAP).
    pub heap: u64,
    /// Of these, for control and windows (SIDELANE_SYMMETRIC).
    pub symmetric: u64,
    /// How long a live but silent rank is waited for (SIDELANE_DEADLINE_MS), at most a day.
    pub deadline_ms: u64,
    /// How long ranks are waited for at start (SIDELANE_RENDEZVOUS_MS), at most a day.
    pub rendezvous_ms: u64,
}
versioned!(WorldOptions, "sidelane_world_options_t", rendezvous_ms: u64);

/// Description of a world.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WorldInfo {
    /// sizeof(sidelane_world_info_t).
    pub size: usize,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of this world of the job: 0 at first, higher after each rebuild.
    pub epoch: u32,
    /// Number of nodes: ranks of one share memory.
    pub nodes: u32,
    /// The node of this rank.
    pub node: u32,
    /// Ranks of that node.
    pub ranks_of_node: u32,
    /// The lane that joins the nodes, "loopback", "verbs" or "tcp"; empty where there is one node.
    pub net: [c_char; 16],
    /// The instruction set in use.
    pub simd: [c_char; 16],
}
versioned!(WorldInfo, "sidelane_world_info_t", simd: [c_char; 16]);

const DAY_MS: u64 = 24 * 3600 * 1000;

/// A deadline that must be said.
fn deadline(deadline_ms: u64) -> Result<Duration, ArgumentError> {
    match deadline_ms {
        1..=DAY_MS => Ok(Duration::from_millis(deadline_ms)),
        _ => {
            let (what, expected) = ("deadline_ms", "1 to 86400000");
            Err(ArgumentError::Value { what, seen: deadline_ms, expected })
        }
    }
}

/// Options of the environment, with those of the caller.
///
/// # Safety
/// `options` is NULL, or as large as its size says.
unsafe fn with_environment(options: *const WorldOptions) -> Result<Options, Fault> {
    let mut all = Options::from_env().map_err(sidelane::Error::from)?;
    if !options.is_null() {
        // SAFETY: as the caller promised.
        unsafe { read(options) }?.apply(&mut all)?;
    }
    Ok(all)
}

impl WorldOptions {
    fn apply(&self, options: &mut Options) -> Result<(), ArgumentError> {
        let timeouts = &mut options.timeouts;
        for (what, asked, clock) in [
            ("deadline_ms", self.deadline_ms, &mut timeouts.deadline),
            ("rendezvous_ms", self.rendezvous_ms, &mut timeouts.rendezvous),
        ] {
            match asked {
                0 => {}
                1..=DAY_MS => *clock = Duration::from_millis(asked),
                _ => {
                    let expected = "1 to 86400000, or 0 for the default";
                    return Err(ArgumentError::Value { what, seen: asked, expected });
                }
            }
        }
        let config = &mut options.config;
        config.heap = if self.heap == 0 { config.heap } else { self.heap };
        config.symmetric = if self.symmetric == 0 { config.symmetric } else { self.symmetric };
        if config.symmetric >= config.heap {
            let (what, expected) = ("symmetric", "less than the heap, which holds rows, too");
            return Err(ArgumentError::Value { what, seen: config.symmetric, expected });
        }
        Ok(())
    }
}

/// Joins the job that the environment describes (sidelane launch, torchrun, SLURM, Open MPI).
/// Collective over the job.
///
/// `options` may be NULL. Each rank needs its own process: a child that was forked afterwards is
/// refused.
///
/// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_from_env(
    options: *const WorldOptions,
    world: *mut *mut World,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("world", world) }?;
        // SAFETY: as the caller promised.
        let options = unsafe { with_environment(options) }?;
        give(sidelane::World::from_env_with(options)?, out)
    })
}

/// Waits as a spare until a world of the job that the environment describes takes this process in
/// (sidelane_world_grow), at most for `deadline_ms`. The environment names any rank of the job.
/// Options must be those of the ranks, or this fails with SIDELANE_ERROR_SETTINGS_DIFFER. After an
/// error of a growth that failed, call it again.
///
/// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_spare(
    options: *const WorldOptions,
    deadline_ms: u64,
    world: *mut *mut World,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("world", world) }?;
        let deadline = deadline(deadline_ms)?;
        // SAFETY: as the caller promised.
        let options = unsafe { with_environment(options) }?;
        let identity = Identity::from_env().map_err(sidelane::Error::from)?;
        let secret = Secret::from_env().map_err(sidelane::Error::from)?;
        give(sidelane::World::spare(&identity, secret, options, deadline)?, out)
    })
}

/// Describes a world.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_info(world: *mut World, info: *mut WorldInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let world = get(world)?;
        let nodes = world.nodes();
        let node = nodes.node_of(world.rank());
        out.write(WorldInfo {
            size: 0,
            rank: world.rank(),
            ranks: world.size(),
            epoch: world.epoch().into(),
            nodes: nodes.nodes(),
            node,
            ranks_of_node: nodes.members(node).len() as u32,
            net: short_name(world.net().map_or("", |net| net.lane)),
            simd: short_name(world.simd()),
        });
        Ok(())
    })
}

/// Whether the world is alive: SIDELANE_OK, or SIDELANE_ERROR_WORLD and the cause.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_world_check(world: *mut World) -> Status {
    border(|| Ok(get(world)?.health().check().map_err(sidelane::Error::from)?))
}

/// Ends the world on every rank: all waits and calls end with an error that names this rank.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_world_cancel(world: *mut World) -> Status {
    border(|| {
        get(world)?.cancel();
        Ok(())
    })
}

/// The survivors' next world, after this one has failed. Collective among the survivors. A world of
/// fewer than `at_least` ranks does not begin: 1 takes any survivors, and with more than half of
/// the ranks no network failure makes two worlds. Should another rank be lost before the new world
/// is built, this fails, and the survivors call it again. The old world and its objects stay
/// readable until they are closed.
///
/// The caller guarantees: `rebuilt` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_rebuild(
    world: *mut World,
    deadline_ms: u64,
    at_least: u32,
    rebuilt: *mut *mut World,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("rebuilt", rebuilt) }?;
        let deadline = deadline(deadline_ms)?;
        give(get(world)?.rebuild(deadline, at_least)?, out)
    })
}

/// A larger world, with the spares that ask for it, behind the ranks of this one. Collective among
/// all ranks, between two steps. Rank 0 waits for a first spare at most for `deadline_ms`. The
/// larger world begins with all ranks and all spares, and ends this one, or it does not begin: this
/// one lives on after SIDELANE_ERROR_NO_SPARE, SIDELANE_ERROR_SPARE_LOST, SIDELANE_ERROR_NOT_GROWN,
/// and the error of a rank that could not build its part. The old world and its objects stay
/// readable until they are closed.
///
/// The caller guarantees: `grown` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_grow(
    world: *mut World,
    deadline_ms: u64,
    grown: *mut *mut World,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("grown", grown) }?;
        let deadline = deadline(deadline_ms)?;
        give(get(world)?.grow(deadline)?, out)
    })
}

/// For each of `ranks` ranks, its rank in the world before, and UINT32_MAX for a spare that joined
/// this world.
///
/// The caller guarantees: `previous` is NULL, or `ranks` numbers may be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_world_previous_ranks(
    world: *mut World,
    previous: *mut u32,
    ranks: u32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { slice_mut("previous", previous, ranks.into()) }?;
        let world = get(world)?;
        if ranks != world.size() {
            let (what, expected) = ("ranks", "the number of ranks of the world");
            return Err(ArgumentError::Value { what, seen: ranks.into(), expected }.into());
        }
        let previous = world.previous_ranks().iter().copied();
        out.iter_mut().zip(previous.chain(std::iter::repeat(u32::MAX))).for_each(|(out, rank)| *out = rank);
        Ok(())
    })
}

/// Closes the handle. This rank leaves the world when every object made from it is closed, too.
/// NULL is a no-op.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_world_close(world: *mut World) -> Status {
    close(world)
}
