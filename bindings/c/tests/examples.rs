//! The examples, and the programs of docs/from-c.md, as ranks of a job.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Linked, PACKAGE, compiled, launch, libraries, succeeded, with_devices};

fn example(name: &str) -> PathBuf {
    Path::new(PACKAGE).join("examples").join(name).with_extension("c")
}

#[test]
fn a_layer_goes_forward_and_backward_between_two_nodes() {
    let program = compiled(&example("layer"), "layer", Linked::Shared);
    let out = succeeded(&launch(2, 2).arg(program).output().expect("it starts"), "layer");
    assert_eq!(out.matches("forward and backward right").count(), 4, "{out}");
}

#[test]
fn a_ring_adds_up_with_one_sided_puts_from_the_static_library() {
    let program = compiled(&example("ring"), "ring", Linked::Static);
    let out = succeeded(&launch(1, 4).arg(program).output().expect("it starts"), "ring");
    assert_eq!(out.matches("the sum is right").count(), 4, "{out}");
}

#[test]
fn c_layer_on_devices_is_right_in_exact_sizes_and_slots() {
    let program = compiled(&example("gpu_layer"), "gpu_layer", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(program).output().expect("it starts"), "gpu_layer");
    assert_eq!(out.matches("exact sizes and fixed slots, all sums right").count(), 2, "{out}");
}

#[test]
fn a_layer_in_a_graph_is_replayed_with_other_tokens() {
    let program = compiled(&Path::new(PACKAGE).join("tests/gpu_graph.c"), "gpu_graph", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(program).output().expect("it starts"), "gpu_graph");
    assert_eq!(out.matches("graphs replayed").count(), 2, "{out}");
}

#[test]
fn heap_allocator_tokens_are_right_and_outlive_world() {
    let program = compiled(&Path::new(PACKAGE).join("tests/gpu_heap.c"), "gpu_heap", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(program).output().expect("it starts"), "gpu_heap");
    assert_eq!(out.matches("tokens of the heap right").count(), 2, "{out}");
}

#[test]
fn c_moe_layer_has_hand_computed_numbers_on_host_and_devices() {
    let program = compiled(&Path::new(PACKAGE).join("tests/moe.c"), "moe", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(program).output().expect("it starts"), "moe");
    assert_eq!(out.matches("layers right on both places").count(), 2, "{out}");
}

#[test]
fn rows_are_gathered_and_summed_and_own_memory_is_a_window() {
    let program = compiled(&Path::new(PACKAGE).join("tests/gathers.c"), "gathers", Linked::Shared);
    for (nodes, ranks) in [(1, 3), (2, 2)] {
        let out = succeeded(&launch(nodes, ranks).arg(&program).output().expect("it starts"), "gathers");
        assert_eq!(out.matches("gathered and summed").count(), (nodes * ranks) as usize, "{out}");
    }
}

#[test]
fn communicator_sums_copies_and_sends_between_ranks() {
    let program = compiled(&Path::new(PACKAGE).join("tests/communicates.c"), "communicates", Linked::Static);
    for (nodes, ranks) in [(1, 3), (2, 2)] {
        let mut job = launch(nodes, ranks);
        // Rounds of the default size take 5 MB.
        job.env("SIDELANE_HEAP", "12M").env("SIDELANE_SYMMETRIC", "8M");
        let out = succeeded(&job.arg(&program).output().expect("it starts"), "communicates");
        assert_eq!(out.matches("summed, copied and sent").count(), (nodes * ranks) as usize, "{out}");
    }
}

#[test]
fn a_router_s_losses_and_gradients_are_what_can_be_told_by_hand() {
    let program = compiled(&Path::new(PACKAGE).join("tests/losses.c"), "losses", Linked::Static);
    let out = succeeded(&Command::new(program).output().expect("it starts"), "losses");
    assert!(out.contains("losses and gradients right"), "{out}");
}

/// A program is each block that begins with `#include`.
#[test]
fn the_programs_of_the_guide_compile_and_run() {
    let guide = std::fs::read_to_string(Path::new(PACKAGE).join("../../docs/from-c.md")).expect("the guide");
    let blocks = guide.split("```c\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let programs: Vec<&str> = blocks.filter(|block| block.starts_with("#include")).collect();
    assert!(!programs.is_empty());
    for (number, text) in programs.into_iter().enumerate() {
        let name = format!("guide-{number}");
        let source = libraries().join(format!("{name}.c"));
        std::fs::write(&source, text).expect("a place for the source");
        let program = compiled(&source, &name, Linked::WithDriver);
        let out =
            succeeded(&with_devices(&mut launch(1, 4)).arg(program).output().expect("it starts"), &name);
        assert_eq!(out.lines().count(), 4, "a line of each rank: {out}");
    }
}

/// Invalid accesses, uninitialized values and leaked memory, in the library or at its boundary. The
/// program that tests errors may leak, since it forks: the child has lost its parent's threads.
#[test]
fn valgrind_finds_nothing() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        assert!(std::env::var_os("SIDELANE_NEED_VALGRIND").is_none(), "valgrind is missing");
        eprintln!("skipped: no valgrind here");
        return;
    }
    let wrong = Path::new(PACKAGE).join("tests/refusals.c");
    for (source, nodes, ranks, leaks) in
        [(example("layer"), 2, 1, "full"), (example("ring"), 1, 2, "full"), (wrong, 1, 2, "no")]
    {
        let name = format!("{}-valgrind", source.file_stem().unwrap_or_default().display());
        let program = compiled(&source, &name, Linked::Shared);
        let mut job = launch(nodes, ranks);
        // Hearts beat slowly there.
        job.env("SIDELANE_LIVENESS_MS", "120000").env("SIDELANE_RENDEZVOUS_MS", "120000");
        job.args(["valgrind", "--quiet", "--error-exitcode=99", "--fair-sched=try"]);
        job.args([&format!("--leak-check={leaks}"), "--errors-for-leak-kinds=definite"]);
        job.arg(format!("--suppressions={PACKAGE}/tests/valgrind.supp"));
        succeeded(&job.arg(program).output().expect("it starts"), &name);
    }
}
