//! The schedules that run are proved: for groups of every shape, over consecutive calls, with memory reused as soon as
//! the rules allow.

mod groups;

use std::time::Instant;

use groups::{Group, rounds};
use sidelane::schedule::prove::{Fault, Proof, prove};
use sidelane::schedule::story::{Story};
use sidelane::schedule::{Op};

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
    for (name, labels) in [("1 x 64", one), ("8 x 8", eight)] {
        let group = Group::new(&labels, 1, 3);
        let start = Instant::now();
        let story = group.tell(&groups::pairs(3), None);
        println!("{name:>12}: told in {:.0?}", start.elapsed());
        let proof = proved(name, &story);
        assert!(proof.operations > 100_000, "every rank meets every other, three times there and back");
        assert!(start.elapsed().as_secs() < 60);
    }
}
