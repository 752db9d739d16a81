//! Several dispatches alive in each mode, and layers of different modes on one group.

use half::bf16;
use sidelane::Options;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode};

use super::{groups, loads};
use crate::support::layer::{Expected, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};

/// Every mode, where it drops and where it does not.
fn modes(case: &Case) -> [ReceiveMode; 5] {
    let (mean, most) = loads(case);
    let overflow = Overflow::Drop;
    [
        ReceiveMode::Exact,
        ReceiveMode::Budget { rows: mean, overflow },
        ReceiveMode::Budget { rows: most, overflow },
        ReceiveMode::Slots { rows: 2, overflow },
        ReceiveMode::Slots { rows: case.max_tokens(), overflow },
    ]
}

/// Room for several layers.
fn roomy() -> Options {
    tiny().with_config(tiny().config.with_heap(3 << 20).with_symmetric(2 << 20))
}

/// Four rounds of a case: other tokens in each, with the number that the next rank had in the round
/// before.
fn rounds(case: &Case) -> Vec<Expected<bf16>> {
    let turned = |by: usize| {
        let mut counts = case.counts.clone();
        counts.rotate_left(by % case.counts.len());
        Expected::seeded(&Case { counts, ..case.clone() }, 1000 * by as u64)
    };
    (0..4).map(turned).collect()
}

#[test]
fn handles_are_used_in_any_order_in_every_mode() {
    for case in groups().iter().step_by(3).flat_map(|c| modes(c).map(|mode| Case { mode, ..c.clone() })) {
        let rounds = rounds(&case);
        on_ranks(&case.nodes, &tiny(), |world| {
            let (group, me) = (world.all().unwrap(), world.rank() as usize);
            let mut ep = rounds[0].layer(&group);
            world.pool().poison(0xff);
            let mut held: Vec<_> = rounds.iter().map(|round| round.dispatch(&mut ep)).collect();
            for nth in [2, 0, 3, 1, 2] {
                rounds[nth].returns(&world, &mut ep, &held[nth].1, nth as u32);
                rounds[nth].again(&mut ep, &held[nth].1, 40);
            }
            for (round, (rows, handle)) in rounds.iter().zip(&held) {
                round.arrived(me, rows, handle);
            }
            // Each rank drops in an order of its own.
            (0..4).for_each(|_| drop(held.swap_remove(me % held.len())));
            nothing_is_held(&world, &group);
        });
    }
}

#[test]
fn layers_of_different_modes_take_turns_on_one_group() {
    for case in groups().iter().step_by(5) {
        let modes = modes(case);
        let layers: Vec<_> = modes.iter().map(|&mode| rounds(&Case { mode, ..case.clone() })).collect();
        on_ranks(&case.nodes, &roomy(), |world| {
            let (group, me) = (world.all().unwrap(), world.rank() as usize);
            let mut eps: Vec<_> = layers.iter().map(|rounds| rounds[0].layer(&group)).collect();
            let mut held = Vec::new();
            for nth in 0..4 {
                for (ep, rounds) in eps.iter_mut().zip(&layers) {
                    world.pool().poison(0xff);
                    let (rows, handle) = rounds[nth].dispatch(ep);
                    rounds[nth].arrived(me, &rows, &handle);
                    held.push(handle);
                }
                for (handle, (ep, rounds)) in held.drain(..).zip(eps.iter_mut().zip(&layers)) {
                    rounds[nth].returns(&world, ep, &handle, nth as u32);
                }
            }
            nothing_is_held(&world, &group);
        });
    }
}

#[test]
fn experts_move_to_other_ranks_in_every_mode() {
    let before = ExpertMap::from_slots(4, &[vec![0, 1], vec![2], vec![3], vec![0]]).unwrap();
    let after = ExpertMap::from_slots(4, &[vec![3], vec![], vec![2, 3, 1], vec![0]]).unwrap();
    for case in groups().iter().filter(|case| case.nodes.len() == 4) {
        let case = Case { map: before.clone(), ..case.clone() };
        for mode in modes(&case) {
            let [old, new] = [&before, &after].map(|map| {
                Expected::<bf16>::seeded(&Case { map: map.clone(), mode, top_k: 2, ..case.clone() }, 7)
            });
            on_ranks(&case.nodes, &tiny(), |world| {
                let (group, me) = (world.all().unwrap(), world.rank() as usize);
                let mut ep = old.layer(&group);
                for (round, all) in [&old, &new, &old].into_iter().enumerate() {
                    ep.set_expert_map(all.case.map.clone()).unwrap();
                    world.pool().poison(0xff);
                    let (rows, handle) = all.dispatch(&mut ep);
                    all.arrived(me, &rows, &handle);
                    all.returns(&world, &mut ep, &handle, round as u32);
                    all.again(&mut ep, &handle, 40);
                }
                nothing_is_held(&world, &group);
            });
        }
    }
}
