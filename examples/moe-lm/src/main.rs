//! The trainer as a program.

mod args;
mod mesh_run;
mod report;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use moe_lm::batches::Batches;
use moe_lm::error::{Error, Result};
use moe_lm::growth::Spare;
use moe_lm::mesh::MeshTrainer;
use moe_lm::parallel::Parallel;
use moe_lm::record::Decisions;
use moe_lm::reference::Reference;
use moe_lm::trainer::{History, Ranks, Trainer};
use moe_lm::{checkpoint, plot, text, tokens};
use sidelane::bootstrap::{Identity, Secret, Timeouts};
use sidelane::error::BootstrapError::NoEnvironment;
use sidelane::{Options, World};

use crate::args::Arguments;
use crate::report::Report;

fn main() -> ExitCode {
    match run(&Arguments::of_process()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moe-lm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let identity = identity()?;
    let ranks = identity.as_ref().map_or(1, |identity| identity.size as usize);
    let local_rank = identity.as_ref().and_then(|identity| identity.local_rank).unwrap_or(0);
    if arguments.reference.is_some() && ranks > 1 {
        return Err(Error::NotAlone { ranks });
    }
    let strategy = arguments.strategy();
    // Of a mesh, what a run learns does not depend on the number of ranks.
    let played = arguments.reference.as_ref().map(|played| played.ranks);
    let settings = arguments.settings(strategy.map_or(played.unwrap_or(ranks), |_| 1));
    settings.check()?;
    let of_mesh = played.unwrap_or(ranks) as u32;
    strategy.map_or(Ok(()), |strategy| strategy.check(&settings, of_mesh))?;
    let page = arguments.text.clone().map_or_else(text::book, Ok)?;
    let batches = Batches::new(&tokens::tokenize(&text::read(&page)?, settings.shape.vocabulary), &settings)?;
    let options = Options::from_env().map_err(sidelane::Error::from)?;
    let options = options.with_job_fingerprint(arguments.conditions(&settings, &batches));
    if let Some(patience) = arguments.spare {
        let Some(identity) = identity else { return Err(sidelane::Error::from(NoEnvironment).into()) };
        let secret = Secret::from_env().map_err(sidelane::Error::from)?;
        let beside = arguments.beside.as_deref().map(losses_of).transpose()?;
        let spare = Spare { identity, secret, options, patience: Duration::from_secs(patience) };
        let trainer = spare.join(&settings, |rank| arguments.plan(rank as usize, local_rank), &batches)?;
        let report = Report::new(trainer.ranks.writes_dense(), arguments.json, &trainer, None);
        return go_on(arguments, trainer, report, (false, beside));
    }
    let world = world(identity, options)?;
    if let Some(strategy) = strategy {
        let make = if played.is_some() { MeshTrainer::reference } else { MeshTrainer::new };
        return mesh_run::train(arguments, make(&world, &settings, &strategy, batches)?);
    }
    match &arguments.reference {
        Some(played) => {
            let ranks = Reference::new(world, &settings)?.changing(&played.changes)?;
            train(arguments, Trainer::new(settings, ranks, batches))
        }
        None => {
            let plan = arguments.plan(world.rank() as usize, local_rank);
            train(arguments, Trainer::new(settings, Parallel::new(world, &settings, plan)?, batches))
        }
    }
}

/// As a launcher's variables say; none if alone.
fn identity() -> Result<Option<Identity>> {
    match Identity::from_env() {
        Err(NoEnvironment) => Ok(None),
        identity => Ok(Some(identity.map_err(sidelane::Error::from)?)),
    }
}

fn world(identity: Option<Identity>, options: Options) -> Result<World> {
    Ok(match identity {
        Some(identity) => {
            let secret = Secret::from_env().map_err(sidelane::Error::from)?;
            World::join(&identity, secret, options)?
        }
        None => World::threads_with(&[0], &options)?.remove(0),
    })
}

fn train<R: Ranks>(arguments: &Arguments, mut trainer: Trainer<R>) -> Result<()> {
    let out = &arguments.out;
    // Before the first step: what would lose them all if it failed behind the last. The first rank
    // of survivors may be any.
    let compares = trainer.ranks.writes_dense() || arguments.survive;
    let beside = arguments.beside.as_deref().filter(|_| compares);
    let beside = trainer.ranks.agree(beside.map(losses_of).transpose())?;
    let resumed = arguments.resume.then(|| checkpoint::resume(&mut trainer, out)).transpose()?;
    checkpoint::prepare(&trainer, out)?;
    let report = Report::new(trainer.ranks.writes_dense(), arguments.json, &trainer, resumed.as_deref());
    let whole = resumed.is_some() && trainer.steps() == trainer.settings.steps;
    go_on(arguments, trainer, report, (whole, beside))
}

/// All that is left of a run. The last checkpoint may be there already.
fn go_on<R: Ranks>(
    arguments: &Arguments,
    mut trainer: Trainer<R>,
    mut report: Report,
    (whole, beside): (bool, Option<(String, History)>),
) -> Result<()> {
    let out = &arguments.out;
    let decisions = loop {
        match finish(arguments, &mut trainer, &mut report, whole) {
            Ok(decisions) => break decisions,
            Err(error) => {
                let failed = Instant::now();
                R::recover(&mut trainer, error)?;
                report.goes_on(&trainer, Some(failed));
            }
        }
    };
    if trainer.ranks.writes_dense() {
        let path = out.join("routing.jsonl");
        decisions.write(&path, &trainer.settings)?;
        report.wrote(&path);
        let path = out.join("losses.json");
        let text = serde_json::to_string(&trainer.history).map_err(Error::malformed(&path))?;
        std::fs::write(&path, text).map_err(Error::file(&path))?;
        report.wrote(&path);
        draw(arguments, &trainer, beside, &report)?;
    }
    Ok(())
}

/// Steps up to the last, and the last look at held-out tokens. Spares come between two steps, until
/// no rank is missing or no spare asks.
fn finish<R: Ranks>(
    arguments: &Arguments,
    trainer: &mut Trainer<R>,
    report: &mut Report,
    whole: bool,
) -> Result<Decisions> {
    let (out, all, first) = (&arguments.out, trainer.settings.steps, trainer.steps());
    while trainer.steps() < all {
        let grows = arguments.grow_every.is_some_and(|every| trainer.steps().is_multiple_of(every.get()));
        if grows && R::grow(trainer)? {
            report.goes_on(trainer, None);
            continue;
        }
        if trainer.steps().is_multiple_of((all / 6).max(1)) {
            trainer.judge()?;
            report.held(&trainer.history);
        }
        let began = Instant::now();
        trainer.step()?;
        if arguments.survive && trainer.steps() == first + 1 {
            check_pace(began.elapsed())?;
        }
        report.step(&trainer.history);
        let steps = trainer.steps();
        let due = arguments.checkpoint_every.is_some_and(|every| steps.is_multiple_of(every.get()));
        if due && steps < all {
            report.wrote(&checkpoint::save(trainer, out)?);
        }
    }
    let decisions = trainer.judge()?;
    report.held(&trainer.history);
    if !whole {
        report.wrote(&checkpoint::save(trainer, out)?);
    }
    Ok(decisions)
}

/// Says so if a rank may hear of a loss too late to go on with the others, by the first step of the
/// ranks that are there.
fn check_pace(step: Duration) -> Result<()> {
    let longest = 2 * Timeouts::from_env().map_err(sidelane::Error::from)?.liveness;
    if step > longest {
        eprintln!(
            "moe-lm: the first step of these ranks took {} ms. A survivor that computes for more than {} ms while the \
             others meet is left out: set SIDELANE_LIVENESS_MS to more than {}",
            step.as_millis(),
            longest.as_millis(),
            step.as_millis() / 2
        );
    }
    Ok(())
}

/// The loss curve, with that of another run if there is one.
fn draw<R: Ranks>(
    arguments: &Arguments,
    trainer: &Trainer<R>,
    beside: Option<(String, History)>,
    report: &Report,
) -> Result<()> {
    if let Some((_, other)) = &beside {
        report.compared(&trainer.history, other);
    }
    let (ranks, spread) = (trainer.settings.ranks, trainer.settings.expert_parallel);
    let name = match arguments.reference {
        Some(_) => format!("{ranks} ranks in turn"),
        None => format!("{ranks} ranks, experts over {spread}"),
    };
    let beside = beside.as_ref().map(|(name, run)| (&name[..], run));
    let picture = plot::losses("Loss of each step, nats per token", (&name, &trainer.history), beside);
    let path = arguments.out.join("losses.svg");
    std::fs::write(&path, picture).map_err(Error::file(&path))?;
    report.wrote(&path);
    Ok(())
}

/// Another run, and its name, which is that of its folder.
fn losses_of(path: &Path) -> Result<(String, History)> {
    let text = std::fs::read_to_string(path).map_err(Error::file(path))?;
    let folder = path.parent().and_then(Path::file_name).unwrap_or(path.as_os_str());
    Ok((folder.to_string_lossy().into_owned(), serde_json::from_str(&text).map_err(Error::malformed(path))?))
}
