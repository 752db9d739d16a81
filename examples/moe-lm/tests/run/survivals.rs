//! Ranks that are lost, and the others that go on: with the bits of a run that changes its ranks at
//! the same steps.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use moe_lm::error::Error;
use moe_lm::parallel::{Parallel, Plan};
use moe_lm::reference::Reference;
use moe_lm::settings::{Settings, Shape};
use moe_lm::trainer::{Ranks, Trainer};
use serde_json::Value;
use sidelane::World;
use sidelane::error::Cause;

use crate::case::{OVERLAPPED, Outcome, TEXT, assert_same_bits, batches, finish, on_each_rank};
use crate::program::{lines, ranks_of, said};

pub const SURVIVING: Plan = Plan { survives: true, ..OVERLAPPED };

/// A run whose windows and experts go with 5, 4, 3 and 2 ranks where they must.
pub fn settings(ranks: usize, expert_parallel: usize) -> Settings {
    let small = crate::case::settings(ranks, expert_parallel);
    let each = if ranks == 5 { 15 } else { 12 };
    let shape = Shape { experts: each, ..small.shape };
    Settings { shape, batch: each, steps: 7, ..small }
}

/// One process that plays so many ranks from these steps on.
pub fn changing(settings: &Settings, changes: &[(usize, usize)]) -> Outcome {
    let world = World::threads(1).unwrap().remove(0);
    let ranks = Reference::new(world, settings).unwrap().changing(changes).unwrap();
    finish(Trainer::new(*settings, ranks, batches(settings)))
}

/// Steps up to this one, without ranks that are lost. Ranks leave after some of them. All meet
/// before: a step that has ended on one rank may still go on at another.
pub fn go_on(trainer: &mut Trainer<Parallel>, last: usize, leaves: &[Option<usize>]) {
    while trainer.steps() < last {
        match trainer.step() {
            Ok(_) if leaves.contains(&Some(trainer.steps())) => drop(trainer.ranks.gather(&[]).unwrap()),
            Ok(_) => {}
            Err(error) => Parallel::recover(trainer, error).unwrap(),
        }
    }
}

#[test]
fn survivors_learn_bits_of_run_with_same_planned_rank_changes() {
    for expert_parallel in [4, 2] {
        let settings = settings(4, expert_parallel);
        // Rank 2 is lost, and then the first: of those that are left, that had a copy of no rank's.
        let leaves = [Some(5), None, Some(2), None];
        let expected = changing(&settings, &[(2, 3), (5, 2)]);
        let outcomes = on_each_rank(&settings, SURVIVING, |rank, mut trainer| {
            go_on(&mut trainer, leaves[rank].unwrap_or(settings.steps), &leaves);
            leaves[rank].is_none().then(|| finish(trainer))
        });
        let survivors: Vec<Outcome> = outcomes.into_iter().flatten().collect();
        assert_eq!(survivors.len(), 2);
        survivors.iter().for_each(|rank| assert_same_bits(rank, &expected));
    }
}

#[test]
fn second_loss_before_the_next_step_costs_no_expert() {
    let settings = settings(4, 4);
    let expected = changing(&settings, &[(2, 2)]);
    let outcomes = on_each_rank(&settings, SURVIVING, |rank, mut trainer| {
        go_on(&mut trainer, 2, &[Some(2)]);
        for lost in [3, 1] {
            if rank == lost {
                return None;
            }
            let error = trainer.ranks.gather(&[]).unwrap_err();
            Parallel::recover(&mut trainer, error).unwrap();
        }
        Some(finish(trainer))
    });
    assert_eq!(outcomes.iter().flatten().count(), 2);
    outcomes.iter().flatten().for_each(|rank| assert_same_bits(rank, &expected));
}

#[test]
fn ranks_that_are_a_step_ahead_of_another_survivor_go_back() {
    let settings = settings(4, 4);
    let expected = changing(&settings, &[(3, 3)]);
    let outcomes = on_each_rank(&settings, SURVIVING, |rank, mut trainer| {
        let mut before = None;
        while trainer.steps() < 4 {
            before = Some((trainer.state.clone(), trainer.history.clone()));
            trainer.step().unwrap();
        }
        trainer.judge().unwrap();
        trainer.ranks.gather(&[]).unwrap();
        if rank == 3 {
            return None;
        }
        // As if the loss had reached rank 1 in its fourth step.
        if let (1, Some((state, history))) = (rank, before) {
            (trainer.state, trainer.history) = (state, history);
        }
        let error = trainer.ranks.gather(&[]).unwrap_err();
        Parallel::recover(&mut trainer, error).unwrap();
        assert_eq!((trainer.steps(), trainer.history.held.len()), (3, 0));
        Some(finish(trainer))
    });
    outcomes.iter().flatten().for_each(|rank| assert_same_bits(rank, &expected));
}

#[test]
fn experts_that_are_lost_with_their_copy_are_named_on_all_ranks() {
    let refused = on_each_rank(&settings(5, 5), SURVIVING, |rank, mut trainer| {
        trainer.step().unwrap();
        trainer.ranks.gather(&[]).unwrap();
        if [1, 2].contains(&rank) {
            return None;
        }
        let error = trainer.step().unwrap_err();
        Some(Parallel::recover(&mut trainer, error).unwrap_err())
    });
    let refused: Vec<Error> = refused.into_iter().flatten().collect();
    assert_eq!(refused.len(), 3);
    assert!(refused.iter().all(|error| matches!(error, Error::NoCopy { expert: 3 })), "{refused:?}");
}

#[test]
fn error_that_is_no_loss_stays_the_error() {
    on_each_rank(&settings(2, 2), SURVIVING, |_, mut trainer| {
        let not_finite = Error::NotFinite { what: "a loss", loss: f32::NAN, steps: 0 };
        let error = Parallel::recover(&mut trainer, not_finite).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }), "{error}");
        trainer.step().unwrap();
        // The world fails, and all ranks are there.
        let cause = Cause::Cancelled { by: 1 };
        let error = Parallel::recover(&mut trainer, sidelane::Error::from(cause.clone()).into()).unwrap_err();
        assert!(matches!(&error, Error::Sidelane(sidelane::Error::World(seen)) if *seen == cause), "{error}");
    });
}

/// The command of a run that goes with 4, 3 and 2 ranks.
pub fn program(steps: u32, out: &Path, text: &Path) -> Command {
    let sizes = "--vocabulary 256 --window 16 --layers 2 --width 32 --heads 2 --experts 12 --top-k 2 --expert-width 16";
    let run = "--batch 12 --warm-up 2 --checkpoint-every 2 --json";
    let mut command = Command::new(env!("CARGO_BIN_EXE_moe-lm"));
    command.args(sizes.split(' ')).args(run.split(' ')).args(["--steps", &steps.to_string()]);
    command.arg("--out").args([out, text]);
    // A rank that a busy machine leaves without a core for long is not lost.
    command.env("SIDELANE_LIVENESS_MS", "20000").env("SIDELANE_HEAP", "96M");
    command.env("RAYON_NUM_THREADS", "1").stdout(Stdio::piped());
    command
}

#[test]
fn killed_ranks_leave_processes_that_learn_bits_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.md");
    std::fs::write(&text, TEXT).unwrap();
    let one: &[(usize, usize)] = &[(2, 3)];
    let two: &[(usize, usize)] = &[(0, 1), (3, 4)];
    let runs = [("--expert-parallel 4", one, "4,3@3"), ("--expert-parallel 2", two, "4,3@1,2@4")];
    for (spread, killed, schedule) in runs {
        let [out, beside] = ["out", "beside"].map(|name| folder.path().join(format!("{schedule}-{name}")));
        let kills = killed.iter().flat_map(|(rank, step)| ["--kill".to_owned(), format!("{rank}@{step}")]);
        let options: Vec<String> =
            spread.split(' ').map(str::to_owned).chain(["--survive".to_owned()]).chain(kills).collect();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let mut spoken = Vec::new();
        let job = format!("{}-killed", killed.len());
        let ranks = ranks_of(|| program(6, &out, &text), &job, |_| &options[..]);
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            match killed.iter().any(|&(victim, _)| victim == rank) {
                true => assert_eq!(output.status.signal(), Some(9), "rank {rank}: {errors}"),
                false => assert!(output.status.success(), "rank {rank}: {errors}"),
            }
            spoken.extend(lines(output.stdout));
        }
        for &(_, step) in killed {
            let at = |key: &str, value: usize| {
                let line = spoken.iter().find(|line| line[key] == value);
                line.and_then(|line| line["at"].as_f64())
                    .unwrap_or_else(|| panic!("{key} {value}: {spoken:?}"))
            };
            let seconds = at("recovered", step + 1) - at("killed_in_step", step);
            println!("{seconds:.3} s from SIGKILL in step {step} to the end of that step on fewer ranks");
        }
        let mut alone = program(6, &beside, &text);
        alone.args(spread.split(' ')).args(["--reference", schedule]);
        said(vec![alone.spawn().unwrap()]);
        for name in ["losses.json", "routing.jsonl"] {
            let [survivors, reference] = [&out, &beside].map(|out| std::fs::read(out.join(name)).unwrap());
            assert!(survivors == reference, "{name} of {schedule}");
        }
        let losses: Value = serde_json::from_slice(&std::fs::read(out.join("losses.json")).unwrap()).unwrap();
        assert_eq!(losses["losses"].as_array().unwrap().len(), 6);
    }
}
