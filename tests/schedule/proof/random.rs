//! Runs in random order, against the run in order.

use std::time::Instant;

use sidelane_core::schedule::{Flag, FlagValue, Op};
use sidelane_core::topology::Route;
use sidelane_verify::prove::ProofFailure;
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::Relays;

use super::titled;
use crate::cases::cases;
use crate::groups::{Group, rounds, ways};

#[test]
fn random_runs_see_what_the_run_in_order_sees() {
    for (name, labels, seeds) in [
        ("2 x 2", &[0, 0, 1, 1][..], 100),
        ("3 + 1", &[0, 0, 0, 1], 100),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1], 5),
    ] {
        for way in cases(ways(), 3) {
            let (group, name) = (Group::new(labels, 2, 4).run(way), titled(name, way));
            let start = Instant::now();
            let checked = check(&group.unroll(&rounds(), None), 0..seeds)
                .unwrap_or_else(|fault| panic!("{name}: {fault}"));
            println!(
                "{name:>27}: {} seeds, {} late deliveries, {:.0?}",
                checked.seeds,
                checked.deliveries,
                start.elapsed()
            );
            assert_eq!(checked.seeds, seeds);
            assert!(checked.deliveries > 1000 * seeds);
        }
    }
}

#[test]
fn random_runs_see_the_difference_when_a_wait_is_missing() {
    let missing: [(Route, Relays, u32, Op); 3] = [
        (Route::Direct, Relays::Inline, 0, wait(2, Flag::Landed, FlagValue::Call)),
        (Route::Pxn, Relays::Thread, 1, wait(2, Flag::Landed, FlagValue::Call)),
        (Route::Pxn, Relays::Thread, 4, wait(2, Flag::Block, FlagValue::Part(2))),
    ];
    for (route, relays, actor, wait) in missing {
        let group = Group::new(&[0, 0, 1, 1], 2, 4).run((route, relays));
        let mut unrolled = group.unroll(&rounds(), None);
        for call in 0..unrolled.calls.len() {
            let scenes = &mut unrolled.part_mut(call, actor).scenes;
            scenes.iter_mut().for_each(|scene| scene.steps.retain(|step| step.op != wait));
        }
        let fault = check(&unrolled, 0..200).unwrap_err();
        println!("{} {relays:?}: {fault}", route.name());
        assert!(matches!(fault, ProofFailure::Differs { .. }), "{fault}");
    }
}

fn wait(from: u32, flag: Flag, level: FlagValue) -> Op {
    Op::Wait { from, flag, level }
}
