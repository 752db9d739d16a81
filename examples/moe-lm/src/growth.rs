//! Spares that take the places of ranks that were lost.
//!
//! ```text
//!   3 of 4 ranks    step 5, step 6 │ World::grow ──► 4 ranks, experts over 4 again │ step 7 ..
//!   spare           World::spare ──────────────────► weights, losses, experts ─────► step 7 ..
//! ```
//!
//! Ranks look for spares between two steps alone, while some are missing. So the state is that of a
//! run which changed its ranks before that step, and so are all further bits.

use std::time::{Duration, Instant};

use sidelane::bootstrap::{Identity, Secret};
use sidelane::{Options, World};

use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::members;
use crate::parallel::{Parallel, Plan};
use crate::settings::Settings;
use crate::survival::{is_loss, recover_from};
use crate::trainer::Trainer;

/// How long ranks wait for a spare that asks. One that waits asks many times a second.
const WAIT: Duration = Duration::from_secs(2);

/// Takes spares into a run that lacks ranks: whether its ranks are others now. Collective, between
/// two steps.
///
/// # Errors
/// Those of [`World::grow`] that end the world; those of the run in the larger world, and of going
/// on without a rank that was lost on the way.
pub fn grow(trainer: &mut Trainer<Parallel>) -> Result<bool> {
    if trainer.settings.ranks >= trainer.ranks.full {
        return Ok(false);
    }
    let old = &trainer.ranks.groups.world;
    let world = match old.grow(WAIT) {
        Ok(world) => world,
        // No larger world was built, for any reason: the old one goes on.
        Err(_) if old.health().check().is_ok() => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let ranks = world.size();
    members::move_to(trainer, world).or_else(|error| recover_from(trainer, error, ranks))?;
    Ok(true)
}

/// A process that waits for a place in a run.
pub struct Spare {
    /// The job, and where its ranks meet.
    pub identity: Identity,
    /// The job's secret.
    pub secret: Option<Secret>,
    /// Those of the ranks.
    pub options: Options,
    /// How long it waits.
    pub patience: Duration,
}

impl Spare {
    /// Waits until the run takes this process in, and has its state. `settings` are those that the
    /// run began with. The plan goes by the rank that the process has then.
    ///
    /// # Errors
    /// Those of [`World::spare`] and of the run in the larger world.
    pub fn join(
        &self,
        settings: &Settings,
        plan: impl Fn(u32) -> Plan,
        batches: &Batches,
    ) -> Result<Trainer<Parallel>> {
        let until = Instant::now() + self.patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let joined = World::spare(&self.identity, self.secret.clone(), self.options.clone(), left)
                .map_err(Error::from)
                .and_then(|world| {
                    let plan = plan(world.rank());
                    members::join(world, settings, plan, batches.clone())
                });
            match joined {
                // The others go on without a rank that was lost, and without this one.
                Err(error) if is_loss(&error) && Instant::now() < until => {}
                joined => return joined,
            }
        }
    }
}
