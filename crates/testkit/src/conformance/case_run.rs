//! Runs of the suite: a case and a way in which it runs, and what comes of it at one rank and at
//! all.

use serde::{Deserialize, Serialize};
use sidelane::dtype::with_element;
use sidelane::ep::{CallExecutor, Feature};
use sidelane::error::PlanError;
use sidelane::{Error, World};
use sidelane_verify::reference::Real;

use crate::TestError;
use crate::conformance::case::{Call, Case, Way};
use crate::conformance::rank_calls::RankCalls;
use crate::conformance::suite::SUITE;
use crate::conformance::tensors::{Device, Memory};
use crate::difference::Difference;

/// Memory of a device that every run of the suite fits in.
pub const MEMORY: Memory = Memory { tensors: 8 << 20, staging: 1 << 20, heap: 4 << 20 };

/// A case of the suite, and a way in which it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Number of the case in [`SUITE`].
    pub case: usize,
    /// Place and mode.
    pub way: Way,
}

/// A run, as one rank or all of them have seen it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The run.
    pub run: Run,
    /// Name of the executor that served it, or refused it; empty if no rank came so far.
    pub executor: String,
    /// How it came out.
    pub outcome: Outcome,
}

/// How a run came out.
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

impl Run {
    /// All cases of the suite that go this way.
    pub fn all(way: Way) -> impl Iterator<Item = Run> {
        let cases = SUITE.iter().enumerate().filter(move |(_, case)| case.goes(way));
        cases.map(move |(case, _)| Run { case, way })
    }

    /// The first case of each feature that goes this way.
    pub fn few(way: Way) -> Vec<Run> {
        let first = |feature| Run::all(way).find(|run| run.case().feature == feature);
        Feature::ALL.into_iter().filter_map(first).collect()
    }

    /// The case.
    pub fn case(&self) -> &'static Case {
        &SUITE[self.case]
    }

    /// Plays it at this rank, which is one of its group.
    pub fn carry_out(self, seed: u64, world: &World, device: Option<&Device>) -> Line {
        let device = device.filter(|_| self.way.is_on_device());
        carry_out(self, seed, world, device)
    }

    /// The runs that a job of these ranks has finished, by the lines of each rank, and the one that
    /// ended it.
    pub fn finished(runs: &[Run], lines: &[Vec<Line>]) -> Vec<Line> {
        let mut done: Vec<Line> = Vec::new();
        for &run in runs {
            let of_rank = |&rank: &u32| lines[rank as usize].iter().find(|line| line.run == run).cloned();
            let said: Vec<Option<Line>> = run.case().group.iter().map(of_rank).collect();
            // The run that was wrong has ended the job, and not one that no rank has begun.
            let unbegun = said.iter().all(Option::is_none);
            if unbegun && matches!(done.last(), Some(Line { outcome: Outcome::Wrong(_), .. })) {
                break;
            }
            let ended = said.iter().any(Option::is_none);
            done.push(together(run, &said));
            if ended {
                break;
            }
        }
        done
    }
}

fn carry_out(run: Run, seed: u64, world: &World, device: Option<&Device>) -> Line {
    let (case, mut executor) = (run.case(), None);
    let mut found = Vec::new();
    let played =
        with_element!(case.dtype, E => calls::<E>(&run, seed, world, device, &mut executor, &mut found));
    let me = case.group.iter().position(|&rank| rank == world.rank()).unwrap_or(0) as u32;
    let refused = match &played {
        Err(TestError::Library(Error::Plan(PlanError::NotAvailable { feature, executor: name, .. }))) => {
            executor = CallExecutor::ALL.into_iter().find(|known| known.name() == *name).or(executor);
            Some(*feature)
        }
        Err(error) => {
            found.push(Difference::outcome(me, "calls", "no error", error.to_string()));
            None
        }
        Ok(()) => None,
    };
    let lacks = executor.and_then(|executor| lacked(&run, world, executor));
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
    let executor = executor.map_or(String::new(), |executor| executor.name().to_owned());
    Line { run, executor, outcome }
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
) -> Result<(), TestError> {
    let case = run.case();
    let mut groups = vec![case.group];
    groups.extend(Some(case.second).filter(|second| second.contains(&world.rank())));
    let settings = groups
        .iter()
        .map(|group| case.settings(run.way, &nodes(world, group)))
        .collect::<Result<Vec<_>, _>>()?;
    let groups = groups.iter().map(|group| world.group(group)).collect::<Result<Vec<_>, _>>()?;
    let mut instances = Vec::new();
    for ((group, settings), part) in groups.iter().zip(&settings).zip(0..) {
        instances.push(RankCalls::<E>::build(settings, group, device, (seed, part))?);
    }
    *executor = instances.first().map(|instance| instance.ep.executor());
    let played = case.calls.iter().try_for_each(|&call| match (call, instances.as_mut_slice()) {
        (Call::Interleaved, [first, second]) => first.around(second),
        (_, all) => all.iter_mut().try_for_each(|instance| instance.carry_out(call)),
    });
    let ended = instances.iter().try_for_each(RankCalls::end);
    for instance in &mut instances {
        found.append(&mut instance.found);
    }
    // Memory is given back when no rank waits for this one.
    groups[0].gather(&[])?;
    played.and(ended)
}

/// Lines of all ranks about a run, together.
fn together(run: Run, lines: &[Option<Line>]) -> Line {
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
    let outcome = match lines.first() {
        Some(line) if differences.is_empty() => line.outcome.clone(),
        _ => Outcome::Wrong(differences),
    };
    Line { run, executor, outcome }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::suite::RANKS_PER_NODE;

    const RUNS: [Run; 3] = [run(0), run(2), run(3)];

    const fn run(case: usize) -> Run {
        Run { case, way: Way::Host }
    }

    fn line(run: Run, outcome: &Outcome) -> Line {
        Line { run, executor: "host-stepper".to_owned(), outcome: outcome.clone() }
    }

    fn outcome_of(all: &[Option<Outcome>]) -> Outcome {
        let lines: Vec<_> = all.iter().map(|outcome| Some(line(RUNS[0], outcome.as_ref()?))).collect();
        together(RUNS[0], &lines).outcome
    }

    #[test]
    fn one_rank_that_is_wrong_makes_the_run_wrong() {
        let wrong = Outcome::Wrong(vec![Difference::outcome(1, "sums", "1", "2")]);
        assert_eq!(outcome_of(&[Some(Outcome::Equal), Some(wrong.clone())]), wrong);
        assert_eq!(outcome_of(&[Some(Outcome::Equal), Some(Outcome::Equal)]), Outcome::Equal);
    }

    #[test]
    fn ranks_that_disagree_or_end_early_make_the_run_wrong() {
        let refused = Outcome::Refused("gradients".to_owned());
        for all in [[Some(Outcome::Equal), Some(refused.clone())], [Some(Outcome::Equal), None], [None, None]]
        {
            let Outcome::Wrong(found) = outcome_of(&all) else { panic!("{all:?}") };
            assert!(!found.is_empty());
        }
        assert_eq!(outcome_of(&[Some(refused.clone()), Some(refused.clone())]), refused);
    }

    /// The lines of all ranks of the job: the outcomes of the first runs.
    fn lines(outcomes: &[Outcome], silent: Option<u32>) -> Vec<Vec<Line>> {
        let of_rank = |rank: u32| {
            let took_part = RUNS.iter().zip(outcomes).filter(|(run, _)| run.case().group.contains(&rank));
            let last = RUNS[outcomes.len() - 1];
            let said = took_part.filter(|(run, _)| silent != Some(rank) || **run != last);
            said.map(|(&run, outcome)| line(run, outcome)).collect()
        };
        (0..RANKS_PER_NODE.iter().sum()).map(of_rank).collect()
    }

    #[test]
    fn run_that_ends_a_job_is_wrong_and_the_next_is_left() {
        let said = |outcomes: &[Outcome], silent| {
            let done = Run::finished(&RUNS, &lines(outcomes, silent));
            done.iter().map(|line| line.outcome == Outcome::Equal).collect::<Vec<_>>()
        };
        let equal = [Outcome::Equal, Outcome::Equal, Outcome::Equal];
        assert_eq!(said(&equal, None), [true; 3]);
        assert_eq!(said(&equal[..2], Some(1)), [true, false], "rank 1 has ended");
        assert_eq!(said(&equal[..1], None), [true, false], "all ranks have ended in the second");
        let wrong = [Outcome::Equal, Outcome::Wrong(Vec::new())];
        assert_eq!(said(&wrong, None), [true, false], "no rank has begun the third");
    }
}
