//! Calls that are refused, and that ranks disagree about.

use sidelane_verify::prove::{ProofFailure, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::{Call, Relays, SeededBug};

use super::proved;
use crate::groups::{Group, ROWS, dispatch, ret, rounds, ways};

#[test]
fn tags_counts_and_messages_are_doubled_for_refused_calls() {
    let moves =
        |call: &Call| matches!(call, Call::Dispatch { .. } | Call::Cached { .. } | Call::Return { .. });
    let calls: Vec<Call> = rounds().into_iter().filter(moves).collect();
    for way in ways() {
        let group = Group::new(&[0, 0, 1, 1], 1, 3).run(way);
        for seeded in [SeededBug::OneTag, SeededBug::OnePublication, SeededBug::OneMessage] {
            // An absent rank's relay continues with the next call while its rank still reads the
            // messages of the last.
            let ahead = seeded == SeededBug::OneMessage && way.1 == Relays::Thread;
            let seen = prove(&group.unroll(&calls, Some(seeded)));
            assert_eq!(seen.is_err(), ahead, "whoever moves rows has read tags and counts: {seen:?}");
            let fault = prove(&group.unroll(&rounds(), Some(seeded))).unwrap_err();
            assert!(matches!(fault, ProofFailure::Race { .. }), "{fault}");
        }
    }
}

#[test]
fn calls_that_ranks_disagree_about_are_counted_by_all() {
    let mixed = Call::Mixed { routing: 1, handle: 0 };
    let calls = [dispatch(0), mixed, dispatch(1), ret(1, ROWS), mixed, mixed, ret(0, ROWS), dispatch(0)];
    let alike: Vec<Call> = calls.into_iter().filter(|&call| call != mixed).collect();
    for (labels, way) in [[0, 0, 1, 1], [0; 4]].iter().flat_map(|l| ways().map(move |way| (l, way))) {
        let group = Group::new(labels, 1, 3).run(way);
        let unrolled = group.unroll(&calls, None);
        proved("mixed", &unrolled);
        check(&unrolled, 0..30).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));

        // Formerly, publications alternated by the number of dispatches: right as long as all ranks
        // make the same calls.
        let seeded = Some(SeededBug::CountDispatches);
        prove(&group.unroll(&alike, seeded)).expect("all count the same dispatches");
        let fault = prove(&group.unroll(&calls, seeded)).unwrap_err();
        println!("{labels:?} {way:?}: {fault}");
        assert!(matches!(fault, ProofFailure::Unwritten { of: 2 | 7, .. }), "{fault}");
    }
}
