//! Going on without ranks that were lost in the middle of a step.
//!
//! ```text
//!   each step    rank 1: own experts, copy of rank 0's     rank 2: own, copy of rank 1's     ..
//!                rank 0's gradients go to rank 1, too, which changes its copy by them
//!
//!   rank 1 dies in step 5
//!     world      the survivors meet in the next world
//!     step       some have made 5 steps, others 6, as the loss reached them: those go one step back
//!     experts    spread over fewer ranks, from those that have them or a copy
//!     layers     rebuilt on the survivors' group
//!     copies     of all experts, again on another rank each
//!     go on      with step 5, its windows spread over the ranks that are left
//! ```
//!
//! So the state is that of a run which changed its ranks before that step, and so are all further
//! bits. A rank that is lost at once with the one behind it takes experts along: such a run goes on
//! from its last checkpoint.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;
use sidelane::collective::Communicator;
use sidelane::error::{BootstrapError, Cause, OverlapError};

use crate::error::{Error, Result};
use crate::members;
use crate::parallel::Parallel;
use crate::settings::Settings;
use crate::trainer::{Learned, State, Trainer};
use crate::weights::Weights;

/// How long survivors look for each other.
const DEADLINE: Duration = Duration::from_secs(30);

/// What a rank keeps so that the others can go on without one of them.
#[derive(Debug, Default)]
pub struct Backup {
    /// Experts of the rank before this one, and the number of steps that they have learned from.
    copy: Option<(usize, Learned)>,
    /// State and copy of one step ago: other ranks may be there still.
    before: Option<(State, Learned)>,
}

impl Backup {
    /// Brings the copy to where this rank with its own experts is, if it is not there: before the
    /// first step, and after ranks have changed. Collective.
    ///
    /// # Errors
    /// Those of the exchange.
    pub fn renew(
        &mut self,
        sums: &mut Communicator,
        settings: &Settings,
        (own, step): (&Learned, usize),
    ) -> Result<()> {
        if self.is_at(step) {
            return Ok(());
        }
        let (ranks, rank) = (sums.size() as usize, sums.rank() as usize);
        let experts = settings.experts_of((rank + ranks - 1) % ranks);
        let mut copy = Learned::new(Weights::no_experts(settings, experts));
        let values = shift(sums, &own.vectors().concat())?;
        let each = copy.weights.values.len();
        for (vector, came) in copy.vectors_mut().into_iter().zip(values.chunks_exact(each)) {
            vector.copy_from_slice(came);
        }
        self.copy = Some((step, copy));
        Ok(())
    }

    /// Takes part in a step by the gradients of this rank's experts; `state` is that before it.
    /// Collective.
    ///
    /// # Errors
    /// Those of the exchange. Nothing has changed then.
    pub fn follow(
        &mut self,
        sums: &mut Communicator,
        (state, gradients): (&State, &[f32]),
        (step, rate): (usize, f32),
    ) -> Result<()> {
        let gradients = shift(sums, gradients)?;
        if let Some((steps, copy)) = &mut self.copy {
            self.before = Some((state.clone(), copy.clone()));
            copy.step(&gradients, step, rate);
            *steps = step + 1;
        }
        Ok(())
    }

    /// The copy.
    pub(crate) fn copy(&self) -> Option<&Learned> {
        self.copy.as_ref().map(|(_, copy)| copy)
    }

    /// State of one step ago, after so many steps. The copy goes back to it.
    pub(crate) fn go_back(&mut self, steps: usize) -> Option<State> {
        let (state, copy) = self.before.take()?;
        self.copy = Some((steps, copy));
        Some(state)
    }

    /// Whether the copy has learned from so many steps.
    pub(crate) fn is_at(&self, step: usize) -> bool {
        self.copy.as_ref().is_some_and(|&(steps, _)| steps == step)
    }
}

/// Sends values to the rank behind this one, and gives those of the one before. Collective.
fn shift(sums: &mut Communicator, values: &[f32]) -> Result<Vec<f32>> {
    let (ranks, rank) = (sums.size() as usize, sums.rank() as usize);
    let mut counts = vec![0; ranks];
    counts[(rank + 1) % ranks] = values.len();
    let mut came = Vec::new();
    sums.all_to_all_v(values, &counts, &mut came)?;
    Ok(came)
}

/// Has a trainer go on without the ranks whose loss was the error, from the last step that all
/// others have made. Collective among the survivors.
///
/// # Errors
/// The error itself, if no rank was lost or the run does not survive losses; [`Error::NoCopy`] if
/// no rank has some expert; [`Error::NotMultiple`] for sizes that do not go with fewer ranks;
/// [`Error::WorldsDiffer`]; those of the rebuild.
pub fn recover(trainer: &mut Trainer<Parallel>, error: Error) -> Result<()> {
    let ranks = trainer.ranks.groups.world.size();
    recover_from(trainer, error, ranks)
}

/// The same where the world that failed had so many ranks.
///
/// # Errors
/// As [`recover`].
pub(crate) fn recover_from(trainer: &mut Trainer<Parallel>, mut error: Error, ranks: u32) -> Result<()> {
    // Each try but the last loses a rank at least, or what fails is no loss.
    for _ in 0..ranks {
        if trainer.ranks.backup.is_none() || !is_loss(&error) {
            break;
        }
        // After an error the trainer still has its failed world, and the survivors meet again.
        match regroup(trainer, ranks) {
            Ok(true) => return Ok(()),
            Ok(false) => break,
            Err(next) => error = next,
        }
    }
    Err(error)
}

/// One try: whether there are fewer ranks than before.
fn regroup(trainer: &mut Trainer<Parallel>, ranks: u32) -> Result<bool> {
    let old = &trainer.ranks.groups.world;
    let world = old.rebuild(DEADLINE, old.size() / 2 + 1)?;
    if world.size() == ranks {
        return Ok(false);
    }
    members::move_to(trainer, world).map(|()| true)
}

/// Whether the error may be that of a lost rank.
pub(crate) fn is_loss(error: &Error) -> bool {
    fn of_library(error: &sidelane::Error) -> bool {
        match error {
            sidelane::Error::Overlap(OverlapError::Failed { error, .. }) => of_library(error),
            sidelane::Error::World(Cause::Evicted { .. } | Cause::LauncherGone { .. }) => false,
            sidelane::Error::World(_) | sidelane::Error::Lane(_) => true,
            sidelane::Error::Bootstrap(error) => matches!(error, BootstrapError::Left { .. }),
            _ => false,
        }
    }
    matches!(error, Error::Sidelane(error) if of_library(error))
}

/// Ends this process as the loss of its machine would, and says when.
pub fn die(step: usize) {
    println!("{}", json!({"killed_in_step": step, "at": now()}));
    // Nothing comes after it.
    let _ = kill_process(getpid(), Signal::KILL);
}

/// Seconds since the epoch: by them lines of several processes of a machine are compared.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
