//! The schedules that run are proved: for groups of every shape, over consecutive calls, with memory reused as soon as
//! the rules allow.

mod groups;

use std::time::Instant;

use groups::{Group, ROWS, dispatch, ret, rounds};
use sidelane::schedule::Op;
use sidelane::schedule::check::check;
use sidelane::schedule::prove::{Fault, Proof, prove};
use sidelane::schedule::story::{Call, Slip, Story};

fn proved(name: &str, story: &Story) -> Proof {
    let start = Instant::now();
    let proof = prove(story).unwrap_or_else(|fault| panic!("{name}: {fault}"));
    println!(
        "{name:>12}: {:>7} operations, {:>7} accesses, {:>7} pairs, {:.0?}",
        proof.operations,
        proof.accesses,
        proof.pairs,
        start.elapsed()
    );
    assert_eq!(proof.operations, story.operations());
    proof
}

#[test]
fn every_shape_of_group_is_proved() {
    let shapes: [(&str, &[u32]); 12] = [
        ("1", &[0]),
        ("1 x 2", &[0, 0]),
        ("2 x 1", &[0, 1]),
        ("1 x 3", &[0, 0, 0]),
        ("1 x 4", &[0; 4]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("interleaved", &[0, 1, 0, 1]),
        ("3 + 1", &[0, 0, 0, 1]),
        ("4 x 1", &[0, 1, 2, 3]),
        ("1 x 8", &[0; 8]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("8, mixed", &[0, 1, 2, 0, 1, 0, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (seed, align) in [(1, 1), (2, 4)] {
            let group = Group::new(labels, align, seed);
            let proof = proved(name, &group.tell(&rounds(), None));
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
        }
    }
}

#[test]
fn sixty_four_ranks_are_proved_in_seconds() {
    let one: Vec<u32> = vec![0; 64];
    let eight: Vec<u32> = (0..64).map(|rank| rank / 8).collect();
    let three = groups::pairs(3);
    for (name, labels, calls) in
        [("1 x 64", one, &three), ("8 x 8", eight.clone(), &three), ("8 x 8, all", eight, &rounds())]
    {
        let group = Group::new(&labels, 1, 3);
        let start = Instant::now();
        let story = group.tell(calls, None);
        println!("{name:>12}: told in {:.0?}", start.elapsed());
        let proof = proved(name, &story);
        assert!(proof.operations > 100_000, "every rank meets every other, three times there and back");
        assert!(start.elapsed().as_secs() < 60);
    }
}

#[test]
fn random_runs_see_what_the_run_in_order_sees() {
    for (name, labels) in [("2 x 2", [0, 0, 1, 1]), ("3 + 1", [0, 0, 0, 1])] {
        let group = Group::new(&labels, 2, 4);
        let start = Instant::now();
        let checked =
            check(&group.tell(&rounds(), None), 0..200).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        println!(
            "{name:>12}: {} seeds, {} late deliveries, {:.0?}",
            checked.seeds,
            checked.deliveries,
            start.elapsed()
        );
        assert_eq!(checked.seeds, 200);
        assert!(checked.deliveries > 200_000);
    }
}

#[test]
fn random_runs_see_the_difference_when_a_wait_is_missing() {
    let group = Group::new(&[0, 0, 1, 1], 2, 4);
    let mut story = group.tell(&rounds(), None);
    let landed = |op: &Op| matches!(op, Op::Wait { from: 2, flag: sidelane::schedule::Flag::Landed, .. });
    let steps = story.calls.iter_mut().flat_map(|call| &mut call[0].scenes).map(|scene| &mut scene.steps);
    steps.for_each(|steps| steps.retain(|step| !landed(&step.op)));
    assert!(matches!(check(&story, 0..200), Err(Fault::Differs { rank: 0, .. })));
}

/// Each track in turn, peers rotated: what looks natural, and what hardware queues turn into a deadlock.
fn track_after_track(story: &mut Story) {
    let ranks = story.ranks;
    for part in story.calls.iter_mut().flatten() {
        let rank = part.rank;
        for scene in &mut part.scenes {
            scene.steps.sort_by_key(|step| (step.track + ranks - rank - 1) % ranks);
        }
    }
}

#[test]
fn launching_track_after_track_deadlocks_on_one_queue() {
    let group = Group::new(&[0; 8], 1, 3);
    let mut story = group.tell(&groups::pairs(2), None);
    track_after_track(&mut story);
    let fault = prove(&story).unwrap_err();
    println!("{fault}");
    assert!(matches!(fault, Fault::Deadlock { queues: 1, .. }), "{fault}");
}

#[test]
fn waiting_first_deadlocks_when_every_rank_does() {
    let group = Group::new(&[0, 0, 1, 1], 1, 3);
    let mut story = group.tell(&groups::pairs(2), None);
    for scene in story.calls.iter_mut().flatten().flat_map(|part| &mut part.scenes) {
        scene.steps.sort_by_key(|step| !matches!(step.op, Op::Wait { .. }));
    }
    assert!(matches!(prove(&story), Err(Fault::Deadlock { .. })));
}

#[test]
fn doubled_tags_and_publications_are_for_refused_calls() {
    let group = Group::new(&[0, 0, 1, 1], 1, 3);
    let moves =
        |call: &Call| matches!(call, Call::Dispatch { .. } | Call::Cached { .. } | Call::Return { .. });
    let calls: Vec<Call> = rounds().into_iter().filter(moves).collect();
    for slip in [Slip::OneTag, Slip::OnePublication] {
        prove(&group.tell(&calls, Some(slip))).expect("whoever moves rows has read tags and counts");
        let fault = prove(&group.tell(&rounds(), Some(slip))).unwrap_err();
        assert!(matches!(fault, Fault::Race { .. }), "{fault}");
    }
}

#[test]
fn calls_that_ranks_disagree_about_are_counted_by_all() {
    for labels in [[0, 0, 1, 1], [0; 4]] {
        let group = Group::new(&labels, 1, 3);
        let mixed = Call::Mixed { routing: 1, handle: 0 };
        let calls = [dispatch(0), mixed, dispatch(1), ret(1, ROWS), mixed, mixed, ret(0, ROWS), dispatch(0)];
        let story = group.tell(&calls, None);
        proved("mixed", &story);
        check(&story, 0..100).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));

        // Once, publications took turns by the number of dispatches: right as long as all make the same calls.
        let slip = Some(Slip::CountDispatches);
        let alike: Vec<Call> = calls.into_iter().filter(|&call| call != mixed).collect();
        prove(&group.tell(&alike, slip)).expect("all count the same dispatches");
        let fault = prove(&group.tell(&calls, slip)).unwrap_err();
        println!("{labels:?}: {fault}");
        assert!(matches!(fault, Fault::Unwritten { of: 2 | 7, .. }), "{fault}");
    }
}
