//! Stripes in every order that queues allow, and planted bugs that the search finds.

use sidelane_verify::striped::{Bug, Operation, explore};

/// All sequences of so many operations over so many queues.
fn sequences(queues: usize, len: usize) -> Vec<Vec<Operation>> {
    let all: Vec<Operation> = (0..queues).map(Operation::Data).chain([Operation::Signal]).collect();
    (0..len).fold(vec![Vec::new()], |shorter, _| {
        let longer = |sequence: &Vec<Operation>| {
            all.iter().map(|&last| [&sequence[..], &[last]].concat()).collect::<Vec<_>>()
        };
        shorter.iter().flat_map(longer).collect()
    })
}

/// Lanes, and the longest sequences over so many.
const SIZES: [(usize, usize); 2] = [(2, 5), (3, 4)];

#[test]
fn signals_are_applied_behind_all_stripes_in_order_and_to_the_last() {
    for (queues, longest) in SIZES {
        for operations in (1..=longest).flat_map(|len| sequences(queues, len)) {
            let states = explore(&operations, queues, None);
            assert!(states.is_ok_and(|states| states > operations.len()), "{operations:?}: {states:?}");
        }
    }
}

#[test]
fn each_planted_bug_of_stripes_is_found() {
    for bug in Bug::ALL {
        let mut found =
            sequences(3, 4).into_iter().filter(|operations| explore(operations, 3, Some(bug)).is_err());
        assert!(found.next().is_some(), "{bug:?}");
    }
}
