//! Work of every rank of the job: the cases, one after another, each behind a barrier.
//!
//! A rank writes a line about each case that it took part in. What ends the world ends the job; the
//! command then starts another one for the cases that are left.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use sidelane::ep::{CallExecutor, Feature};
use sidelane::error::PlanError;
use sidelane::{Error, World};
use sidelane_verify::reference::Real;

use super::ConformanceArgs;
use super::case::{Case, Way};
use super::difference::Difference;
use super::place::{Device, Memory};
use super::player::Player;
use super::suite::SUITE;
use crate::command::{self, Command};
use crate::error::CliError;
use crate::ranks::{self, Sizes};
use crate::settings::with_element;

/// Of a device.
const MEMORY: Memory = Memory { tensors: 8 << 20, staging: 1 << 20, heap: 4 << 20 };

const SIZES: Sizes = Sizes { heap: 32 << 20, symmetric: 16 << 20 };

/// A case of the suite, and a way in which it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub case: usize,
    pub way: Way,
}

impl Run {
    pub fn case(&self) -> &'static Case {
        &SUITE[self.case]
    }
}

/// Everything that a rank needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub runs: Vec<Run>,
    pub seed: u64,
    /// Device of all ranks; else they take those of the machine in turns.
    pub device: Option<u32>,
    /// Whether rank 0 draws a bar.
    pub has_bar: bool,
    /// Folder of the lines of all ranks.
    pub folder: PathBuf,
}

/// Line of one rank about a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    pub run: Run,
    /// Name of the executor that served it, or refused it.
    pub executor: String,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All that was seen is as the naive reference has it.
    Equal,
    /// Refused with the name of a feature that the table lacks there.
    Refused(String),
    /// Differences from the naive reference.
    Wrong(Vec<Difference>),
}

/// The file of a rank's lines.
pub fn lines_of(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let world = ranks::join(ConformanceArgs::NAME, &(&task.runs, task.seed), SIZES, 0)?;
    let all = world.all()?;
    let on_device = task.runs.iter().any(|run| run.way.is_on_device());
    let device = on_device.then(|| Device::new(task.device, world.rank(), MEMORY)).transpose()?;
    let path = lines_of(&task.folder, world.rank());
    let mut file = File::create(&path).map_err(CliError::prepare("write what a rank has seen"))?;
    let bar = match task.has_bar {
        true => command::progress(world.rank(), task.runs.len() as u64),
        false => ProgressBar::hidden(),
    };
    for run in &task.runs {
        bar.set_message(run.case().feature.name());
        all.gather(&[])?;
        let case = run.case();
        if case.group.contains(&world.rank()) {
            let device = device.as_ref().filter(|_| run.way.is_on_device());
            let (executor, outcome) = with_element!(case.dtype, play(run, task.seed, &world, device));
            let line = Line { run: *run, executor, outcome };
            let text = serde_json::to_string(&line).expect("names and numbers are always JSON");
            file.write_all(format!("{text}\n").as_bytes())
                .map_err(CliError::prepare("write what a rank has seen"))?;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    all.gather(&[])?;
    Ok(ExitCode::SUCCESS)
}

/// One run at this rank: the executor's name, and the outcome.
fn play<E: Real>(run: &Run, seed: u64, world: &World, device: Option<&Device>) -> (String, Outcome) {
    let (case, mut executor) = (run.case(), None);
    let mut found = Vec::new();
    let played = calls::<E>(run, seed, world, device, &mut executor, &mut found);
    let me = case.group.iter().position(|&rank| rank == world.rank()).unwrap_or(0) as u32;
    let refused = match &played {
        Err(CliError::Library(Error::Plan(PlanError::NotAvailable { feature, executor: name, .. }))) => {
            executor = CallExecutor::ALL.into_iter().find(|known| known.name() == *name).or(executor);
            Some(*feature)
        }
        Err(error) => {
            found.push(Difference::outcome(me, "calls", "no error", error.to_string()));
            None
        }
        Ok(()) => None,
    };
    let lacks = executor.and_then(|executor| lacked(run, world, executor));
    if refused != lacks {
        let [expected, seen] = [lacks, refused].map(|feature| match feature {
            Some(feature) => format!("a refusal of {feature}"),
            None => "no refusal".to_owned(),
        });
        found.push(Difference::outcome(me, "refusal by name", expected, seen));
    }
    let outcome = match refused {
        _ if !found.is_empty() => Outcome::Wrong(found),
        Some(feature) => Outcome::Refused(feature.to_owned()),
        None => Outcome::Equal,
    };
    (executor.map_or(String::new(), |executor| executor.name().to_owned()), outcome)
}

/// The feature by whose name an executor must refuse a run.
fn lacked(run: &Run, world: &World, executor: CallExecutor) -> Option<&'static str> {
    let settings = run.case().settings(run.way, &nodes(world, run.case().group)).ok()?;
    run.case().refusal(&settings, executor).map(Feature::name)
}

fn nodes(world: &World, group: &[u32]) -> Vec<u32> {
    group.iter().map(|&rank| world.nodes().node_of(rank)).collect()
}

/// Builds the instances of a run and makes its calls.
fn calls<E: Real>(
    run: &Run,
    seed: u64,
    world: &World,
    device: Option<&Device>,
    executor: &mut Option<CallExecutor>,
    found: &mut Vec<Difference>,
) -> Result<(), CliError> {
    let case = run.case();
    let mut groups = vec![case.group];
    groups.extend(Some(case.second).filter(|second| second.contains(&world.rank())));
    let settings = groups
        .iter()
        .map(|group| case.settings(run.way, &nodes(world, group)))
        .collect::<Result<Vec<_>, _>>()?;
    let groups = groups.iter().map(|group| world.group(group)).collect::<Result<Vec<_>, _>>()?;
    let mut players = Vec::new();
    for ((group, settings), part) in groups.iter().zip(&settings).zip(0..) {
        players.push(Player::<E>::build(settings, group, device, (seed, part))?);
    }
    *executor = players.first().map(|player| player.ep.executor());
    let played =
        case.calls.iter().try_for_each(|&call| players.iter_mut().try_for_each(|player| player.play(call)));
    let ended = players.iter().try_for_each(Player::end);
    for player in &mut players {
        found.append(&mut player.found);
    }
    // Memory is given back when no rank waits for this one.
    groups[0].gather(&[])?;
    played.and(ended)
}

/// Lines of all ranks about a run, together: executor and outcome.
pub fn judged(run: Run, lines: &[Option<Line>]) -> (String, Outcome) {
    let missing = lines.iter().position(Option::is_none);
    let lines: Vec<&Line> = lines.iter().flatten().collect();
    let executor = lines.iter().map(|line| &line.executor).max().cloned().unwrap_or_default();
    let mut differences: Vec<Difference> = Vec::new();
    for line in &lines {
        match &line.outcome {
            Outcome::Wrong(found) => differences.extend(found.iter().cloned()),
            other if *other != lines[0].outcome => {
                let seen = format!("{other:?}");
                differences.push(Difference::outcome(0, "the same outcome at all ranks", "one", seen));
            }
            _ => {}
        }
    }
    if let Some(member) = missing {
        differences.push(Difference::outcome(
            member as u32,
            "calls",
            "their end",
            format!("rank {} of the job ended before", run.case().group[member]),
        ));
    }
    match lines.first() {
        Some(line) if differences.is_empty() => (executor, line.outcome.clone()),
        _ => (executor, Outcome::Wrong(differences)),
    }
}

/// The lines of a rank; nothing where it did not come so far.
pub fn read(folder: &Path, rank: u32) -> Result<Option<Vec<Line>>, CliError> {
    let Ok(text) = std::fs::read_to_string(lines_of(folder, rank)) else { return Ok(None) };
    let lines = text.lines().map(|line| serde_json::from_str(line).map_err(CliError::told));
    lines.collect::<Result<Vec<Line>, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(outcome: Outcome) -> Option<Line> {
        let run = Run { case: 0, way: Way::Host };
        Some(Line { run, executor: "host-stepper".to_owned(), outcome })
    }

    #[test]
    fn one_rank_that_is_wrong_makes_the_run_wrong() {
        let run = Run { case: 0, way: Way::Host };
        let wrong = Difference::outcome(1, "sums", "1", "2");
        let all = [line(Outcome::Equal), line(Outcome::Wrong(vec![wrong.clone()]))];
        assert_eq!(judged(run, &all), ("host-stepper".to_owned(), Outcome::Wrong(vec![wrong])));
        let all = [line(Outcome::Equal), line(Outcome::Equal)];
        assert_eq!(judged(run, &all).1, Outcome::Equal);
    }

    #[test]
    fn ranks_that_disagree_or_end_early_make_the_run_wrong() {
        let run = Run { case: 0, way: Way::Host };
        let refused = line(Outcome::Refused("gradients".to_owned()));
        for all in [[line(Outcome::Equal), refused.clone()], [line(Outcome::Equal), None], [None, None]] {
            let Outcome::Wrong(found) = judged(run, &all).1 else { panic!("{all:?}") };
            assert!(!found.is_empty());
        }
        assert_eq!(judged(run, &[refused.clone(), refused]).1, Outcome::Refused("gradients".to_owned()));
    }
}
