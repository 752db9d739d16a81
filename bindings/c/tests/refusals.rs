//! Programs that do wrong: each mistake is a status and a sentence, on every rank.

mod common;

use std::path::Path;

use common::{Linked, PACKAGE, compiled, launch, succeeded, with_devices};

#[test]
fn c_mistakes_are_named_on_both_ranks_and_next_call_works() {
    let source = Path::new(PACKAGE).join("tests/refusals.c");
    let program = compiled(&source, "refusals", Linked::Shared);
    for (nodes, ranks) in [(1, 2), (2, 1)] {
        let out = succeeded(&launch(nodes, ranks).arg(&program).output().expect("it starts"), "refusals");
        assert_eq!(out.matches("refused as it should be").count(), 2, "{out}");
    }
}

#[test]
fn a_lost_rank_is_named_and_the_survivors_go_on() {
    let program = compiled(&Path::new(PACKAGE).join("tests/loss.c"), "loss", Linked::Shared);
    let out = succeeded(&launch(1, 3).arg(program).output().expect("it starts"), "loss");
    assert_eq!(out.matches("of 2 goes on").count(), 2, "{out}");
}

#[test]
fn a_world_takes_a_spare_in_after_growths_that_failed() {
    let program = compiled(&Path::new(PACKAGE).join("tests/growth.c"), "growth", Linked::Shared);
    let out = succeeded(&launch(1, 3).arg(program).output().expect("it starts"), "growth");
    assert_eq!(out.matches("of 3 is in").count(), 3, "{out}");
}

#[test]
fn c_device_mistakes_are_named_on_both_ranks_next_call_works() {
    let source = Path::new(PACKAGE).join("tests/gpu_refusals.c");
    let program = compiled(&source, "gpu_refusals", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(&program).output().expect("it starts"), "gpu_refusals");
    assert_eq!(out.matches("refused as it should be").count(), 2, "{out}");
}
