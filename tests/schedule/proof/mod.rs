//! The schedules that run are proved: for groups of every shape, over consecutive calls, with
//! memory reused as soon as the rules allow.

mod calls;
mod deadlocks;
mod large;
mod random;
mod shapes;
mod wires;

use std::time::Instant;

use sidelane_core::topology::Route;
use sidelane_verify::prove::{Proof, prove};
use sidelane_verify::unroll::{Relays, UnrolledProgram};

fn proved(name: &str, unrolled: &UnrolledProgram) -> Proof {
    let start = Instant::now();
    let proof = prove(unrolled).unwrap_or_else(|fault| panic!("{name}: {fault}"));
    println!(
        "{name:>27}: {:>7} operations, {:>7} accesses, {:>7} pairs, {:.0?}",
        proof.operations,
        proof.accesses,
        proof.pairs,
        start.elapsed()
    );
    assert_eq!(proof.operations, unrolled.operations());
    proof
}

fn titled(name: &str, (route, relays): (Route, Relays)) -> String {
    format!("{name}, {} {relays:?}", route.name())
}
