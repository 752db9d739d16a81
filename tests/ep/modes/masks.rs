//! Masks of ranks: in every mode, the rows and sums of the choices that are left.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::error::{CallError, PlanError};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, Strategy};
use sidelane::{Error, ExpertParallel, Options};

use super::{groups, loads};
use crate::support::layer::{Expected, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, random_seed, sample, small, tiny};

/// Some ranks, one at least.
fn mask(rng: &mut ChaCha8Rng, ranks: usize) -> Vec<bool> {
    let one = rng.random_range(0..ranks);
    (0..ranks).map(|rank| rank == one || rng.random()).collect()
}

/// Two random masks in turn, and then none: tokens of all ranks under each.
fn rounds(case: &Case, rng: &mut ChaCha8Rng) -> [Expected<bf16>; 3] {
    let ranks = case.nodes.len();
    let masks = [mask(rng, ranks), mask(rng, ranks), vec![true; ranks]];
    masks.map(|active| Expected::seeded(&Case { active, ..case.clone() }, rng.random()))
}

/// The rounds on one instance, with all calls along the handle of each.
fn hold(rounds: &[Expected<bf16>], options: &Options) {
    on_ranks(&rounds[0].case.nodes, options, |world| {
        let (group, me) = (world.all().unwrap(), world.rank() as usize);
        let mut ep = rounds[0].layer(&group);
        assert!(!ep.active().contains(&false), "a new instance has no mask");
        for (number, round) in (0..).zip(rounds) {
            ep.mask(&round.case.active).unwrap();
            assert_eq!(ep.active(), round.case.active);
            world.pool().poison(0xff);
            let (rows, handle) = round.dispatch(&mut ep);
            round.arrived(me, &rows, &handle);
            let dropped = handle.report().unwrap().dropped_weight;
            assert_eq!(dropped.to_bits(), round.dropped_weight(me).to_bits(), "{:?}", round.case);
            round.returns(&world, &mut ep, &handle, number);
            round.again(&mut ep, &handle, 40 + number);
        }
        nothing_is_held(&world, &group);
    });
}

#[test]
fn sums_under_random_masks_are_those_of_the_choices_that_are_left() {
    let mut rng = ChaCha8Rng::seed_from_u64(random_seed());
    let overflow = Overflow::Drop;
    for case in sample(groups(), 2) {
        let rows = loads(&case).0;
        for mode in [
            ReceiveMode::Slots { rows: case.max_tokens(), overflow: Overflow::Error },
            ReceiveMode::Slots { rows: 3, overflow },
            ReceiveMode::Budget { rows, overflow },
            ReceiveMode::Exact,
        ] {
            hold(&rounds(&Case { mode, ..case.clone() }, &mut rng), &tiny());
        }
        let case = Case { strategy: Strategy::AllGather, ..case };
        hold(&rounds(&case, &mut rng), &small());
    }
}

#[test]
fn slots_of_a_masked_source_are_zero_everywhere() {
    const SLOTS: usize = 4;
    let mode = ReceiveMode::Slots { rows: SLOTS as u32, overflow: Overflow::Error };
    let active = vec![true, false, true];
    let all = Expected::<bf16>::new(&Case { mode, active, ..Case::new(&[0, 0, 1], &[4, 4, 4], 6, 2) });
    on_ranks(&all.case.nodes, &tiny(), |world| {
        let group = world.all().unwrap();
        let mut ep = all.layer(&group);
        ep.mask(&all.case.active).unwrap();
        world.pool().poison(0xff);
        let (rows, handle) = all.dispatch(&mut ep);
        let slots = rows.rows::<u8>().unwrap().chunks_exact(SLOTS * all.case.hidden * 2);
        assert_eq!(slots.len(), 2 * 3, "two experts, three sources");
        for (slots, source) in slots.zip((0..3).cycle()) {
            if source == 1 || world.rank() == 1 {
                assert!(slots.iter().all(|&byte| byte == 0), "source {source}");
            }
        }
        if world.rank() == 1 {
            let sums = ep.combine::<bf16>(handle.output().unwrap(), &handle).unwrap();
            assert_eq!(sums, vec![bf16::ZERO; 4 * all.case.hidden]);
        } else {
            ep.combine::<bf16>(handle.output().unwrap(), &handle).unwrap();
        }
    });
}

#[test]
fn bad_masks_are_refused_on_all_ranks_and_the_old_one_stays() {
    let all = Expected::<bf16>::new(&Case::new(&[0, 1, 1], &[5, 3, 4], 4, 2));
    on_ranks(&all.case.nodes, &tiny(), |world| {
        let (group, me) = (world.all().unwrap(), world.rank() as usize);
        let mut ep = all.layer(&group);
        // One rank brings no mask, and the others hear of it.
        for bad in [&[true, true][..], &[false; 3]] {
            match (world.rank(), ep.mask(if world.rank() == 2 { bad } else { &[true; 3] }).unwrap_err()) {
                (2, Error::Plan(PlanError::BadParameter { parameter, .. })) => {
                    assert!(parameter.ends_with("of the mask"), "{parameter}");
                }
                (0 | 1, Error::Call(CallError::PeerRefused { peer: 2, .. })) => {}
                (rank, error) => panic!("rank {rank}: {error}"),
            }
        }
        let mine = [true, true, world.rank() == 0];
        assert!(matches!(
            ep.mask(&mine).unwrap_err(),
            Error::Call(CallError::Disagree { what: "expert map", .. })
        ));
        let (rows, handle) = all.dispatch(&mut ep);
        all.arrived(me, &rows, &handle);
        let alive = ep.mask(&[true, true, false]).unwrap_err();
        assert!(matches!(alive, Error::Call(CallError::HandlesAlive { count: 1 })), "{alive}");
        assert_eq!(ep.active(), [true; 3]);
        all.returns(&world, &mut ep, &handle, 0);
    });
}

#[test]
fn mask_stays_when_experts_move() {
    let active = vec![true, false, true];
    let case = Case { active: active.clone(), ..Case::new(&[0, 0, 1], &[5, 3, 4], 6, 2) };
    let (before, after) = (case.map.clone(), [vec![5, 2], vec![4, 1], vec![3, 0]]);
    let after = ExpertMap::from_slots(6, &after).unwrap();
    let moved = Expected::<bf16>::new(&Case { map: after.clone(), ..case.clone() });
    let [masked, all] =
        [active.clone(), vec![true; 3]].map(|active| Expected::<bf16>::new(&Case { active, ..case.clone() }));
    on_ranks(&case.nodes, &tiny(), |world| {
        let (group, me) = (world.all().unwrap(), world.rank() as usize);
        let mut ep = masked.layer(&group);
        let lands = |ep: &mut ExpertParallel, expected: &Expected<bf16>| {
            let (rows, handle) = expected.dispatch(ep);
            expected.arrived(me, &rows, &handle);
        };
        ep.mask(&active).unwrap();
        lands(&mut ep, &masked);
        ep.set_expert_map(after.clone()).unwrap();
        assert_eq!(ep.active(), active);
        lands(&mut ep, &moved);
        ep.set_expert_map(before.clone()).unwrap();
        ep.mask(&[true; 3]).unwrap();
        assert_eq!(ep.expert_map(), &before);
        lands(&mut ep, &all);
        // The map of an instance may have a mask: another instance begins without.
        ep.mask(&active).unwrap();
        let fresh = all.builder(&group).expert_map(ep.expert_map().clone()).build().unwrap();
        assert_eq!(fresh.active(), [true; 3]);
    });
}
