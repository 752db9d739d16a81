//! From the ranks of one world to those of the next one, which go on with the same run.
//!
//! ```text
//!              meet         steps that all have made, who has which experts, or a copy; a spare has nothing
//!   old rank   go back      by the step that another rank has not made
//!   spare      receive      weights that all have alike, losses so far              from rank 0
//!   all        spread       experts over the new number of ranks                    from ranks that have them
//!              build        layers on the new group, copies of experts
//!              meet         a rank that is lost before costs another try
//! ```

use serde::{Deserialize, Serialize};
use sidelane::World;
use sidelane::collective::Communicator;

use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::parallel::{Groups, Parallel, Plan};
use crate::settings::Settings;
use crate::survival::Backup;
use crate::trainer::{History, Learned, State, Trainer};
use crate::weights::Weights;

/// Has a trainer go on in the next world. Collective among its ranks: those that [join](join) it
/// are spares. After an error the trainer still has its old world.
///
/// # Errors
/// [`Error::NoCopy`] if no rank has some expert; [`Error::NotMultiple`] for sizes that do not go
/// with so many ranks; [`Error::WorldsDiffer`]; those of the layers and of the sums.
pub(crate) fn move_to(trainer: &mut Trainer<Parallel>, world: World) -> Result<()> {
    let settings = trainer.settings.on(world.size() as usize);
    settings.check()?;
    let members = Members::meet(Some(trainer), &world)?;
    go_back(trainer, members.steps);
    let mut groups = Groups::new(world, &settings)?;
    let copy = trainer.ranks.backup.as_ref().and_then(Backup::copy);
    members.share_dense(&mut groups.sums, &mut trainer.state.dense)?;
    let experts = members.spread(&mut groups.sums, &settings, Some((&trainer.state.experts, copy)))?;
    let mut ranks = trainer.ranks.rebuilt(groups, &settings, &experts)?;
    ranks.begin(&settings, (&experts, members.steps))?;
    trainer.ranks = ranks;
    trainer.state.experts = experts;
    trainer.settings = settings;
    Ok(())
}

/// The trainer of a spare that was taken into this world. `settings` are those that the run began
/// with. Collective: the other ranks [move](move_to) to it.
///
/// # Errors
/// As [`move_to`].
pub(crate) fn join(
    world: World,
    settings: &Settings,
    plan: Plan,
    batches: Batches,
) -> Result<Trainer<Parallel>> {
    let members = Members::meet(None, &world)?;
    let Settings { ranks, expert_parallel, .. } = members.settings;
    let full = settings.ranks;
    let settings = Settings { ranks, expert_parallel, ..*settings }.on(world.size() as usize);
    settings.check()?;
    let mut groups = Groups::new(world, &settings)?;
    let mut dense = Learned::new(Weights::dense(&settings));
    members.share_dense(&mut groups.sums, &mut dense)?;
    let experts = members.spread(&mut groups.sums, &settings, None)?;
    let mut ranks = Parallel::of(groups, &settings, plan, full)?;
    ranks.begin(&settings, (&experts, members.steps))?;
    Ok(Trainer { settings, ranks, batches, state: State { dense, experts }, history: members.history })
}

/// Goes back by a step that another rank has not made.
fn go_back(trainer: &mut Trainer<Parallel>, steps: usize) {
    if trainer.steps() == steps {
        return;
    }
    if let Some(state) = trainer.ranks.backup.as_mut().and_then(|backup| backup.go_back(steps)) {
        trainer.state = state;
        trainer.history.losses.truncate(steps);
        trainer.history.held.retain(|&(seen, _)| seen <= steps);
    }
}

/// Report of an old rank about itself.
#[derive(Serialize, Deserialize)]
struct Said {
    /// The world that it comes from, and its settings there.
    epoch: u16,
    settings: Settings,
    steps: usize,
    has_copy: bool,
    /// Of rank 0 alone.
    history: Option<History>,
}

/// The ranks of a world in which a run goes on, and what they have of it.
struct Members {
    /// Settings in the world before.
    settings: Settings,
    /// For each old rank, its rank in the world before.
    ranks: Vec<usize>,
    /// Whether each has its copy.
    copies: Vec<bool>,
    /// Steps that all have made.
    steps: usize,
    history: History,
    has_spares: bool,
}

impl Members {
    /// Reports of all ranks; a spare has none. Collective.
    fn meet(trainer: Option<&Trainer<Parallel>>, world: &World) -> Result<Members> {
        let own = trainer.map(|trainer| Said {
            epoch: trainer.ranks.groups.world.epoch(),
            settings: trainer.settings,
            steps: trainer.steps(),
            has_copy: trainer.ranks.backup.as_ref().is_some_and(|backup| backup.is_at(trainer.steps())),
            history: (world.rank() == 0).then(|| trainer.history.clone()),
        });
        let own = serde_json::to_vec(&own).unwrap_or_default();
        let said = world.all()?.gather(&own)?;
        let said = said.iter().map(|said| serde_json::from_slice::<Option<Said>>(said).ok().flatten());
        let mut said: Vec<Option<Said>> = said.collect();
        let spares = said.split_off(world.previous_ranks().len().min(said.len()));
        let mut old = said.into_iter().collect::<Option<Vec<Said>>>().ok_or(Error::WorldsDiffer)?;
        let (Some(epoch), Some(steps)) =
            (old.first().map(|said| said.epoch), old.iter().map(|said| said.steps).min())
        else {
            return Err(Error::WorldsDiffer);
        };
        if spares.iter().any(Option::is_some) || old.iter().any(|said| said.epoch != epoch) {
            return Err(Error::WorldsDiffer);
        }
        Ok(Members {
            settings: old[0].settings,
            ranks: world.previous_ranks().iter().map(|&rank| rank as usize).collect(),
            copies: old.iter().map(|said| said.has_copy).collect(),
            steps,
            history: old[0].history.take().unwrap_or_default(),
            has_spares: !spares.is_empty(),
        })
    }

    /// Gives spares what all ranks have alike. Collective.
    fn share_dense(&self, sums: &mut Communicator, dense: &mut Learned) -> Result<()> {
        if self.has_spares {
            for vector in dense.vectors_mut() {
                sums.broadcast(0, vector)?;
            }
        }
        Ok(())
    }

    /// The first old rank that has an expert, and whether it has a copy.
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

    /// Spreads the experts as the new settings have it: gives those of this rank. An old rank has
    /// its own, and a copy perhaps. Collective.
    fn spread(
        &self,
        sums: &mut Communicator,
        settings: &Settings,
        held: Option<(&Learned, Option<&Learned>)>,
    ) -> Result<Learned> {
        let (ranks, me) = (sums.size() as usize, sums.rank() as usize);
        let (mut send, mut counts) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let before = send.len();
            for expert in settings.experts_of(rank) {
                let (place, is_copy) = self.place(expert)?;
                if let Some((own, copy)) = held.filter(|_| place == me) {
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
