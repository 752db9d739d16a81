//! Runs that stop and go on.

use std::path::Path;

use moe_lm::checkpoint;
use moe_lm::error::Error;
use moe_lm::trainer::{Ranks, Trainer};

use crate::case::{OVERLAPPED, Outcome, assert_same_bits, finish, in_turn, on_ranks, settings};

/// What is left of an earlier run that died while it wrote, on other ranks.
const STALE: &str = "experts-4.safetensors";

/// Six steps, and a checkpoint.
fn stop<R: Ranks>(mut trainer: Trainer<R>, out: &Path) {
    while trainer.steps() < 6 {
        trainer.step().unwrap();
    }
    checkpoint::save(&trainer, out).unwrap();
}

/// From the latest checkpoint to the end.
fn go_on<R: Ranks>(mut trainer: Trainer<R>, out: &Path) -> Outcome {
    checkpoint::resume(&mut trainer, out).unwrap();
    assert_eq!(trainer.steps(), 6);
    finish(trainer)
}

#[test]
fn a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_never_stopped() {
    let settings = settings(4, 2);
    let whole = finish(in_turn(&settings));
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join("step-000006.part");
    std::fs::create_dir(&part).unwrap();
    std::fs::write(part.join(STALE), "not of this run").unwrap();
    on_ranks(&settings, OVERLAPPED, |trainer| stop(trainer, folder.path()));
    let names = std::fs::read_dir(checkpoint::latest(folder.path()).unwrap()).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["dense.safetensors", "experts-0.safetensors", "experts-8.safetensors", "run.json"]);
    for rank in on_ranks(&settings, OVERLAPPED, |trainer| go_on(trainer, folder.path())) {
        assert_same_bits(&rank, &whole);
    }
    // Who plays all ranks may go on where they stopped.
    assert_same_bits(&go_on(in_turn(&settings), folder.path()), &whole);
}

#[test]
fn the_latest_checkpoint_is_the_one_after_most_steps() {
    let folder = tempfile::tempdir().unwrap();
    let steps = ["step-000007", "step-999999", "step-1000000", "step-2000000.part", "step-3000000"];
    for name in steps {
        std::fs::create_dir(folder.path().join(name)).unwrap();
    }
    for name in &steps[..4] {
        std::fs::write(folder.path().join(name).join("run.json"), "{}").unwrap();
    }
    assert_eq!(checkpoint::latest(folder.path()).unwrap(), folder.path().join("step-1000000"));
}

#[test]
fn a_checkpoint_of_another_run_or_with_a_file_missing_or_a_tensor_twice_is_refused() {
    let settings = settings(1, 1);
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(checkpoint::latest(folder.path()), Err(Error::NoCheckpoint { .. })));
    stop(in_turn(&settings), folder.path());
    let place = checkpoint::latest(folder.path()).unwrap();
    let mut other = in_turn(&settings);
    other.settings.seed += 1;
    let refused = checkpoint::load(&mut other, &place).unwrap_err();
    assert!(matches!(refused, Error::OtherRun { what: "a setting", .. }), "{refused}");
    let [dense, experts, stale] =
        ["dense.safetensors", "experts-0.safetensors", STALE].map(|name| place.join(name));
    let refused = || checkpoint::load(&mut in_turn(&settings), &place).unwrap_err();
    std::fs::rename(&experts, &stale).unwrap();
    assert!(matches!(refused(), Error::File { path, .. } if path == experts));
    std::fs::copy(&dense, &experts).unwrap();
    assert!(matches!(refused(), Error::Twice { path, .. } if path == experts));
    // A file that the checkpoint does not name is not read.
    std::fs::copy(&stale, &experts).unwrap();
    checkpoint::load(&mut in_turn(&settings), &place).unwrap();
}

#[test]
fn ranks_with_folders_of_their_own_are_told_that_it_must_be_one() {
    let settings = settings(2, 2);
    let [own, others] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let of = |first: bool| if first { own.path() } else { others.path() };
    let refused = on_ranks(&settings, OVERLAPPED, |trainer| {
        checkpoint::save(&trainer, of(trainer.ranks.writes_dense())).unwrap_err()
    });
    for refused in refused {
        assert!(matches!(&refused, Error::NotShared { path } if path.ends_with("experts-8.safetensors")));
    }
    assert!(matches!(checkpoint::latest(own.path()), Err(Error::NoCheckpoint { .. })));

    // Rank 0 finds a checkpoint of six steps, and the other none.
    on_ranks(&settings, OVERLAPPED, |trainer| stop(trainer, own.path()));
    let refused = on_ranks(&settings, OVERLAPPED, |mut trainer| {
        let out = of(trainer.ranks.writes_dense());
        checkpoint::resume(&mut trainer, out).unwrap_err()
    });
    let [first, second] = &refused[..] else { panic!("{refused:?}") };
    assert!(
        matches!(first, Error::OtherCheckpoint { rank: 1, seen, expected } if seen.is_empty() && expected == "step-000006"),
        "{first}"
    );
    assert!(matches!(second, Error::NoCheckpoint { .. }), "{second}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_before_anything_is_learned_from_it() {
    let settings = settings(2, 2);
    on_ranks(&settings, OVERLAPPED, |mut trainer| {
        let weights = &mut trainer.state.dense.weights;
        let head = weights.range("head");
        weights.values[head].fill(f32::INFINITY);
        let before = trainer.state.clone();
        let refused = trainer.judge().unwrap_err();
        assert!(matches!(refused, Error::NotFinite { loss, steps: 0, .. } if loss.is_nan()), "{refused}");
        let refused = trainer.step().unwrap_err();
        assert!(matches!(refused, Error::NotFinite { loss, steps: 0, .. } if loss.is_nan()), "{refused}");
        assert_eq!((trainer.steps(), trainer.history.held.len()), (0, 0));
        assert_eq!(trainer.state, before);
    });
}
