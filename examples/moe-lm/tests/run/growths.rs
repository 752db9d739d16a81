//! Spares that take the places of lost ranks: with the bits of a run that changes its ranks at the
//! same steps.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use moe_lm::growth::Spare;
use moe_lm::parallel::Parallel;
use moe_lm::settings::Settings;
use moe_lm::trainer::{Ranks, Trainer};
use serde_json::Value;
use sidelane::bootstrap::{Identity, Secret, Timeouts};
use sidelane::config::Config;
use sidelane::{Options, World};

use crate::case::{Outcome, TEXT, assert_same_bits, batches, finish};
use crate::processes::master_port;
use crate::program::{lines, ranks_of, said};
use crate::survivals::{SURVIVING, changing, go_on, program, settings};

/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(120);

/// A job whose ranks and spares meet over sockets, in threads of this process.
struct Place {
    identity: Identity,
    secret: Secret,
    options: Options,
}

impl Place {
    fn of(settings: &Settings) -> Place {
        let first = master_port();
        let size = settings.ranks as u32;
        let identity = Identity::new(0, size)
            .with_local_size(Some(size))
            .with_job(format!("growth at {first}"))
            .with_master_addr("127.0.0.1".into())
            .with_ports((first..first + 3).collect());
        let config = Config::default().with_heap(32 << 20).with_symmetric(8 << 20);
        // A rank that a busy machine leaves without a core for long is not lost.
        let timeouts = Timeouts::default().with_liveness(Duration::from_secs(20));
        let options = Options::default().with_config(config).with_timeouts(timeouts);
        Place { identity, secret: Secret::random().unwrap(), options }
    }

    fn trainer(&self, rank: u32, settings: &Settings) -> Trainer<Parallel> {
        let identity = self.identity.clone().with_rank(rank);
        let world = World::join(&identity, Some(self.secret.clone()), self.options.clone()).unwrap();
        Trainer::new(*settings, Parallel::new(world, settings, SURVIVING).unwrap(), batches(settings))
    }

    fn spare(&self) -> Spare {
        let Place { identity, secret, options } = self;
        let secret = Some(secret.clone());
        Spare { identity: identity.clone(), secret, options: options.clone(), patience: LONG }
    }

    /// Does something on each of four ranks and at a spare (no rank).
    fn on_each<T: Send>(&self, each: impl Fn(Option<u32>) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let each = &each;
            let parts = (0..self.identity.size).map(Some).chain([None]);
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || each(part))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// Takes a spare in, as soon as it asks. Each try waits two seconds.
fn grow(trainer: &mut Trainer<Parallel>) {
    assert!((0..60).any(|_| Parallel::grow(trainer).unwrap()), "no spare came");
}

#[test]
fn spare_learns_what_a_rank_learns_that_was_there_from_the_start_and_survives_the_first_rank() {
    for expert_parallel in [4, 2] {
        let settings = Settings { steps: 9, ..settings(4, expert_parallel) };
        let expected = changing(&settings, &[(2, 3), (4, 4), (6, 3)]);
        // Rank 2 leaves, its place is taken, and then the first rank leaves.
        let leaves = [Some(6), None, Some(2), None];
        let place = Place::of(&settings);
        let outcomes: Vec<Option<Outcome>> = place.on_each(|rank| {
            let Some(rank) = rank else {
                let mut trainer = place.spare().join(&settings, |_| SURVIVING, &batches(&settings)).unwrap();
                assert_eq!((trainer.steps(), trainer.ranks.own_experts().len()), (4, 3));
                go_on(&mut trainer, settings.steps, &leaves);
                return Some(finish(trainer));
            };
            let mut trainer = place.trainer(rank, &settings);
            let last = leaves[rank as usize].unwrap_or(settings.steps);
            go_on(&mut trainer, last.min(4), &leaves);
            if last > 2 {
                grow(&mut trainer);
                go_on(&mut trainer, last, &leaves);
            }
            (last == settings.steps).then(|| finish(trainer))
        });
        let outcomes: Vec<Outcome> = outcomes.into_iter().flatten().collect();
        assert_eq!(outcomes.len(), 3);
        outcomes.iter().for_each(|rank| assert_same_bits(rank, &expected));
    }
}

#[test]
fn spare_that_is_lost_before_it_has_the_state_costs_no_rank() {
    let settings = settings(4, 4);
    let expected = changing(&settings, &[(2, 3)]);
    let leaves = [None, Some(2), None, None];
    let place = Place::of(&settings);
    let outcomes: Vec<Option<Outcome>> = place.on_each(|rank| {
        let Some(rank) = rank else {
            let Spare { identity, secret, options, patience } = place.spare();
            drop(World::spare(&identity, secret, options, patience).unwrap());
            return None;
        };
        let mut trainer = place.trainer(rank, &settings);
        go_on(&mut trainer, leaves[rank as usize].unwrap_or(3), &leaves);
        if leaves[rank as usize].is_some() {
            return None;
        }
        grow(&mut trainer);
        assert_eq!(trainer.settings.ranks, 3);
        Some(finish(trainer))
    });
    assert_eq!(outcomes.iter().flatten().count(), 3);
    outcomes.iter().flatten().for_each(|rank| assert_same_bits(rank, &expected));
}

#[test]
fn process_takes_the_place_of_one_that_was_killed_in_mid_step() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out, beside] = ["text.md", "out", "beside"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    let grows = ["--survive", "--grow-every", "2"];
    // A machine that is busy may let several tries pass without the spare.
    const STEPS: u32 = 16;
    // In an odd step, so that it is made again before ranks look for spares.
    let of_rank = ["--survive", "--grow-every", "2", "--kill", "2@3"];
    let mut spare = program(STEPS, &out, &text);
    spare.args(grows).args(["--spare", "120"]).stderr(Stdio::piped());
    let ranks = ranks_of(|| program(STEPS, &out, &text), "growth", |_| &of_rank);
    spare.envs([("MASTER_ADDR", "127.0.0.1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")]);
    spare.envs([("RANK", "2"), ("LOCAL_RANK", "2")]);
    spare.env("SIDELANE_JOB", format!("moe-lm-growth-{}", std::process::id()));
    let spare = spare.spawn().unwrap();
    let mut spoken: Vec<Value> = Vec::new();
    for (rank, child) in ranks.into_iter().chain([spare]).enumerate() {
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        match rank {
            2 => assert_eq!(output.status.signal(), Some(9), "rank {rank}: {errors}"),
            _ => assert!(output.status.success(), "rank {rank}: {errors}"),
        }
        spoken.extend(lines(output.stdout));
    }
    let changes: Vec<(u64, u64)> = spoken
        .iter()
        .filter_map(|line| Some((line["ranks"].as_u64()?, line["from_step"].as_u64()?)))
        .collect();
    let &[(3, 3), (4, step)] = &changes[..] else { panic!("{changes:?}") };
    let mut alone = program(STEPS, &beside, &text);
    alone.args(["--reference", &format!("4,3@3,4@{step}")]);
    said(vec![alone.spawn().unwrap()]);
    for name in ["losses.json", "routing.jsonl"] {
        let [grown, reference] = [&out, &beside].map(|out| std::fs::read(out.join(name)).unwrap());
        assert!(grown == reference, "{name} of 4,3@3,4@{step}");
    }
}
