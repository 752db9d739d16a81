//! Runs that stop and go on.

use std::path::Path;

use moe_lm::checkpoint;
use moe_lm::error::Error;
use moe_lm::trainer::{Ranks, Trainer};

use crate::case::{OVERLAPPED, Outcome, assert_same_bits, finish, in_turn, on_ranks, settings};

/// Files of an earlier run that died while it wrote, on other ranks.
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
fn run_resumed_from_checkpoint_has_bits_of_unbroken_run() {
    let settings = settings(4, 2);
    let whole = finish(in_turn(&settings));
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join("step-000006.part");
    std::fs::create_dir(&part).unwrap();
    std::fs::write(part.join(STALE), "not of this run").unwrap();
    on_ranks(&settings, OVERLAPPED, |trainer| stop(trainer, folder.path()));
    let names = names(&checkpoint::latest(folder.path()).unwrap());
    assert_eq!(names, ["dense.safetensors", "experts-0.safetensors", "experts-8.safetensors", "run.json"]);
    for rank in on_ranks(&settings, OVERLAPPED, |trainer| go_on(trainer, folder.path())) {
        assert_same_bits(&rank, &whole);
    }
    // The reference, which runs all ranks, may continue where they stopped.
    assert_same_bits(&go_on(in_turn(&settings), folder.path()), &whole);
}

/// A whole checkpoint, under this name.
fn make(folder: &Path, name: &str) {
    let made = checkpoint::save(&in_turn(&settings(1, 1)), &folder.join("made")).unwrap();
    std::fs::rename(made, folder.join(name)).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn latest_checkpoint_is_complete_one_with_most_steps() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let latest = || checkpoint::latest(folder.path()).unwrap();
    for name in ["step-000007", "step-999999", "step-1000000", "step-2000000.part", "step-3000000"] {
        make(folder.path(), name);
    }
    assert_eq!(latest(), place("step-3000000"));
    for (file, before) in [("run.json", "step-1000000"), ("experts-0.safetensors", "step-999999")] {
        std::fs::remove_file(latest().join(file)).unwrap();
        assert_eq!(latest(), place(before));
    }
    std::fs::write(latest().join("run.json"), "{").unwrap();
    assert_eq!(latest(), place("step-000007"));
    std::fs::remove_file(place("step-000007/dense.safetensors")).unwrap();
    assert!(matches!(checkpoint::latest(folder.path()), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn run_stopped_in_checkpoint_swap_resumes_from_old_or_new() {
    let settings = settings(2, 2);
    let whole = finish(in_turn(&settings));
    let folder = tempfile::tempdir().unwrap();
    let [place, old] = ["step-000006", "step-000006.old"].map(|name| folder.path().join(name));
    on_ranks(&settings, OVERLAPPED, |trainer| stop(trainer, folder.path()));
    // Stopped when one of the name was out of the way, and the new one had it not yet.
    std::fs::rename(&place, &old).unwrap();
    assert_eq!(checkpoint::latest(folder.path()).unwrap(), old);
    for rank in on_ranks(&settings, OVERLAPPED, |trainer| go_on(trainer, folder.path())) {
        assert_same_bits(&rank, &whole);
    }
    // Written twice again, with one moved aside, and with one in place: one is left, of these
    // files.
    for _ in 0..2 {
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join(STALE), "not of this run").unwrap();
        on_ranks(&settings, OVERLAPPED, |trainer| stop(trainer, folder.path()));
        assert_eq!(names(folder.path()), ["step-000006"]);
        assert_eq!(
            names(&place),
            ["dense.safetensors", "experts-0.safetensors", "experts-8.safetensors", "run.json"]
        );
    }
}

#[test]
fn new_checkpoint_takes_name_before_old_entry_is_deleted() {
    let settings = settings(2, 2);
    let folder = tempfile::tempdir().unwrap();
    // A file is no folder, and so is not deleted as one.
    std::fs::write(folder.path().join("step-000000"), "in the way").unwrap();
    let refused =
        on_ranks(&settings, OVERLAPPED, |trainer| checkpoint::save(&trainer, folder.path()).unwrap_err());
    let [own, other] = &refused[..] else { panic!("{refused:?}") };
    assert!(matches!(own, Error::File { path, .. } if path.ends_with("step-000000.old")), "{own}");
    assert!(
        matches!(other, Error::Elsewhere { rank: 0, said } if said.contains("step-000000.old")),
        "{other}"
    );
    assert_eq!(checkpoint::latest(folder.path()).unwrap(), folder.path().join("step-000000"));
}

#[test]
fn unwritable_folder_is_named_on_all_ranks_before_first_step() {
    let settings = settings(2, 2);
    let folder = tempfile::tempdir().unwrap();
    let [file, good] = ["file", "good"].map(|name| folder.path().join(name));
    std::fs::write(&file, "").unwrap();
    for bad in [0, 1] {
        let refused = on_ranks(&settings, OVERLAPPED, |trainer| {
            let own = usize::from(!trainer.ranks.writes_dense());
            let out = if own == bad { file.join("out") } else { good.clone() };
            (own, checkpoint::prepare(&trainer, &out).unwrap_err())
        });
        for (rank, refused) in refused {
            let named = match &refused {
                Error::File { path, .. } => rank == bad && *path == file.join("out"),
                Error::Elsewhere { rank: other, said } => {
                    *other == bad && rank != bad && said.contains("file/out")
                }
                _ => false,
            };
            assert!(named, "{rank}: {refused}");
        }
    }
    let refused = on_ranks(&settings, OVERLAPPED, |trainer| {
        let own = if trainer.ranks.writes_dense() { "good" } else { "other" };
        checkpoint::prepare(&trainer, &folder.path().join(own)).unwrap_err()
    });
    assert!(refused.iter().all(|refused| matches!(refused, Error::NotShared { .. })), "{refused:?}");
    on_ranks(&settings, OVERLAPPED, |trainer| checkpoint::prepare(&trainer, &good).unwrap());
    assert!(names(&good).is_empty(), "what was tried is taken away");
}

#[test]
fn checkpoint_of_other_run_or_missing_or_doubled_is_refused() {
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
fn loss_that_is_not_finite_stops_run_before_any_update() {
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
