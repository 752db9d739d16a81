//! Large groups, and samples of larger ones.

use std::time::Instant;

use sidelane_core::topology::Route;
use sidelane_verify::prove::prove;
use sidelane_verify::unroll::{Call, ProofScenario, Relays, SeededBug, UnrolledProgram};

use super::{proved, titled};
use crate::cases::{cases, sample};
use crate::groups::{self, Group, ROWS, copy, dispatch, placements, placements_in_spans, ret, rounds, ways};

#[test]
fn every_rank_of_sixty_four_is_proved() {
    let one: Vec<u32> = vec![0; 64];
    let eight: Vec<u32> = (0..64).map(|rank| rank / 8).collect();
    let three = groups::pairs(3);
    let away = Route::ALL.map(|route| (route, Relays::Thread));
    let mut all = vec![("1 x 64", one, away[0], &three)];
    all.extend(away.map(|way| ("8 x 8", eight.clone(), way, &three)));
    let many = rounds();
    all.push(("8 x 8, all", eight, away[1], &many));
    for (name, labels, way, calls) in cases(all, 3) {
        let group = Group::new(&labels, 1, 3).run(way);
        let name = titled(name, way);
        let start = Instant::now();
        let unrolled = group.unroll(calls, None);
        println!("{name:>27}: unrolled in {:.0?}", start.elapsed());
        let proof = proved(&name, &unrolled);
        assert!(proof.operations > 50_000, "every rank meets every other, three times there and back");
    }
    // Every layout, mode and order, on both routes.
    let labels: Vec<u32> = (0..64).map(|rank| rank / 8).collect();
    let placed = away.into_iter().flat_map(|way| placements().map(move |placed| (way, placed)));
    for (way, placement) in sample(placed, 4) {
        let group = Group::new(&labels, 1, 3).run(way).placed(placement);
        proved(&format!("{} {placement:?}", titled("8 x 8", way)), &group.unroll(&groups::pairs(2), None));
    }
    for placement in sample(placements_in_spans(), 4) {
        let group = Group::new(&labels, 1, 3).in_spans(Relays::Thread, placement);
        proved(&format!("8 x 8 in spans {placement:?}"), &group.unroll(&groups::pairs(2), None));
    }
}

/// Three nodes of 64 or 128: two conflicting accesses lie in the memory of one node, and are made
/// by ranks of two others at most.
#[test]
fn sample_of_hundreds_of_ranks_unrolls_three_nodes() {
    let sample: Vec<u32> = [0, 1, 63].iter().flat_map(|node| 8 * node..8 * node + 8).collect();
    let calls = [dispatch(0), ret(0, ROWS), Call::Cached { handle: 0 }, copy(0, ROWS), dispatch(0)];
    let all = [512, 1024].into_iter().flat_map(|ranks| Route::ALL.map(|route| (ranks, route)));
    for (ranks, route) in cases(all, 1) {
        let (labels, way) = ((0..ranks).map(|rank| rank / 8).collect::<Vec<u32>>(), (route, Relays::Thread));
        let name = titled(&format!("{} x 8", ranks / 8), way);
        let group = Group::sampled(&labels, &sample).run(way);
        let start = Instant::now();
        let unrolled =
            UnrolledProgram::unroll(&ProofScenario { sample: Some(&sample), ..group.scenario(&calls, None) })
                .unwrap();
        println!("{name:>27}: unrolled in {:.0?}", start.elapsed());
        assert_eq!((unrolled.ranks, unrolled.actors), (ranks, 48));
        proved(&name, &unrolled);
    }
}

#[test]
fn a_sample_finds_what_the_whole_finds() {
    let sampled = [0, 1, 2, 3, 6, 7];
    for way in sample(ways(), 2) {
        let group = Group::new(&[0, 0, 1, 1, 2, 2, 3, 3], 2, 3).run(way);
        for seeded in SeededBug::ALL.map(Some).into_iter().chain([None]) {
            let whole = prove(&group.unroll(&rounds(), seeded));
            let unrolled = UnrolledProgram::unroll(&ProofScenario {
                sample: Some(&sampled),
                ..group.scenario(&rounds(), seeded)
            })
            .unwrap();
            assert!(!unrolled.assumed.is_empty());
            let seen = prove(&unrolled);
            assert_eq!(seen.is_err(), whole.is_err(), "{way:?} {seeded:?}: {seen:?} {whole:?}");
        }
    }
}
