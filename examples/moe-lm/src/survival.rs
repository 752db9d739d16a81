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
use crate::parallel::{Groups, Parallel};
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

    fn is_at(&self, step: usize) -> bool {
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
/// nobody has some expert; [`Error::NotMultiple`] for sizes that do not go with fewer ranks;
/// [`Error::WorldsDiffer`]; those of the rebuild.
pub fn recover(trainer: &mut Trainer<Parallel>, mut error: Error) -> Result<()> {
    // Each try but the last loses a rank at least, or what fails is no loss.
    for _ in 0..trainer.ranks.groups.world.size() {
        if trainer.ranks.backup.is_none() || !is_loss(&error) {
            break;
        }
        // After an error the trainer still has its failed world, and the survivors meet again.
        match regroup(trainer) {
            Ok(true) => return Ok(()),
            Ok(false) => break,
            Err(next) => error = next,
        }
    }
    Err(error)
}

/// One try: whether there are fewer ranks than before.
fn regroup(trainer: &mut Trainer<Parallel>) -> Result<bool> {
    let old = &trainer.ranks.groups.world;
    let world = old.rebuild(DEADLINE, old.size() / 2 + 1)?;
    if world.size() == old.size() {
        return Ok(false);
    }
    let settings = trainer.settings.on(world.size() as usize);
    settings.check()?;
    let survivors = Survivors::meet(trainer, world.previous_ranks(), &world.all()?)?;
    go_back(trainer, survivors.steps);
    let mut groups = Groups::new(world, &settings)?;
    let copy = trainer.ranks.backup.as_ref().and_then(|backup| backup.copy.as_ref()).map(|(_, copy)| copy);
    let experts = survivors.spread(&mut groups.sums, &settings, (&trainer.state.experts, copy))?;
    let mut ranks = trainer.ranks.rebuilt(groups, &settings, &experts)?;
    // At once: a rank that is lost before the next step takes no experts along.
    if let Some(backup) = &mut ranks.backup {
        backup.renew(&mut ranks.groups.sums, &settings, (&experts, survivors.steps))?;
    }
    // A rank that is lost before all are here costs another try, by the state of before.
    ranks.groups.all.gather(&[])?;
    trainer.ranks = ranks;
    trainer.state.experts = experts;
    trainer.settings = settings;
    Ok(true)
}

/// Goes back by a step that another rank has not made.
fn go_back(trainer: &mut Trainer<Parallel>, steps: usize) {
    if trainer.steps() == steps {
        return;
    }
    let Some(backup) = &mut trainer.ranks.backup else { return };
    if let Some((state, copy)) = backup.before.take() {
        trainer.state = state;
        backup.copy = Some((steps, copy));
        trainer.history.losses.truncate(steps);
        trainer.history.held.retain(|&(seen, _)| seen <= steps);
    }
}

/// The ranks that are left of a world, and what they have.
struct Survivors {
    /// Settings in that world.
    settings: Settings,
    /// Ranks in that world.
    ranks: Vec<usize>,
    /// Whether each has its copy.
    copies: Vec<bool>,
    /// Steps that all have made.
    steps: usize,
}

impl Survivors {
    /// What all of them say. Collective.
    fn meet(trainer: &Trainer<Parallel>, ranks: &[u32], all: &sidelane::Group) -> Result<Survivors> {
        let (epoch, steps) = (trainer.ranks.groups.world.epoch(), trainer.steps());
        let has_copy = trainer.ranks.backup.as_ref().is_some_and(|backup| backup.is_at(steps));
        let own = [u64::from(epoch), steps as u64, u64::from(has_copy)];
        let said = all.gather(&own.map(u64::to_le_bytes).concat())?;
        let words = |bytes: &Vec<u8>| -> [u64; 3] {
            let (words, _) = bytes.as_chunks::<8>();
            std::array::from_fn(|nth| words.get(nth).map_or(0, |&word| u64::from_le_bytes(word)))
        };
        let said: Vec<[u64; 3]> = said.iter().map(words).collect();
        if said.iter().any(|&[from, ..]| from != u64::from(epoch)) {
            return Err(Error::WorldsDiffer);
        }
        Ok(Survivors {
            settings: trainer.settings,
            ranks: ranks.iter().map(|&rank| rank as usize).collect(),
            copies: said.iter().map(|&[.., has_copy]| has_copy == 1).collect(),
            steps: said.iter().map(|&[_, steps, _]| steps as usize).min().unwrap_or_default(),
        })
    }

    /// The first survivor that has an expert, and whether it has a copy.
    fn place(&self, expert: usize) -> Result<(usize, bool)> {
        let (all, has) = (self.settings.ranks, |rank| self.settings.experts_of(rank).contains(&expert));
        let own = self.ranks.iter().position(|&rank| has(rank));
        let copy = || {
            let mut copies = self.ranks.iter().zip(&self.copies);
            copies.position(|(&rank, &is_there)| is_there && has((rank + all - 1) % all))
        };
        let place = own.map(|place| (place, false)).or_else(|| Some((copy()?, true)));
        place.ok_or(Error::NoCopy { expert })
    }

    /// Spreads the experts as the new settings have it: gives those of this rank. Collective.
    fn spread(
        &self,
        sums: &mut Communicator,
        settings: &Settings,
        (own, copy): (&Learned, Option<&Learned>),
    ) -> Result<Learned> {
        let (ranks, me) = (sums.size() as usize, sums.rank() as usize);
        let (mut send, mut counts) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let before = send.len();
            for expert in settings.experts_of(rank) {
                let (place, is_copy) = self.place(expert)?;
                if place == me {
                    let from = if is_copy { copy.ok_or(Error::NoCopy { expert })? } else { own };
                    send.extend(from.of_expert(expert));
                }
            }
            counts.push(send.len() - before);
        }
        let mut came = Vec::new();
        let from = sums.all_to_all_v(&send, &counts, &mut came)?;
        let mut next: Vec<usize> = (0..ranks).map(|rank| from[..rank].iter().sum()).collect();
        let mut experts = Learned::new(Weights::no_experts(settings, settings.experts_of(me)));
        for expert in settings.experts_of(me) {
            let first = &mut next[self.place(expert)?.0];
            *first += experts.set_expert(expert, &came[*first..]);
        }
        Ok(experts)
    }
}

/// Whether the error may be that of a lost rank.
fn is_loss(error: &Error) -> bool {
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
