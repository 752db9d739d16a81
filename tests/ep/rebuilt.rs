//! Instances on the survivors' group: the settings that they had, and the bits of the reference.

use std::time::Duration;

use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::error::{CallError, PlanError};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane::{Error, ExpertParallel, World};

use crate::support::layer::{Expected, nothing_is_held};
use crate::support::reference::Case;
use crate::support::{on_ranks, small};

const LONG: Duration = Duration::from_secs(60);
const RANKS: u32 = 3;

/// Each expert but 3 is on two ranks.
fn before() -> ExpertMap {
    ExpertMap::from_slots(4, &[vec![0, 1], vec![1, 2], vec![2, 3, 0]]).unwrap()
}

fn survivors(victim: u32) -> Vec<u32> {
    (0..RANKS).filter(|&rank| rank != victim).collect()
}

/// The slots of the survivors; expert 3 moves if its rank is lost.
fn after(victim: u32) -> ExpertMap {
    before().subset(&survivors(victim)).unwrap_or_else(|error| {
        let problem = "no rank holds the expert";
        assert_eq!((victim, error), (2, PlanError::BadMap { problem, expert: 3, rank: 0 }));
        ExpertMap::from_slots(4, &[vec![0, 1], vec![1, 2, 3]]).unwrap()
    })
}

/// All calls of a round.
fn round(expected: &Expected<bf16>, world: &World, ep: &mut ExpertParallel) {
    let me = ep.rank() as usize;
    let (rows, handle) = expected.dispatch(ep);
    expected.arrived(me, &rows, &handle);
    drop(rows);
    expected.returns(world, ep, &handle, 0);
    expected.again(ep, &handle, 50);
}

/// One rank leaves, and the others go on with the instances that they have.
fn hold(case: &Case, victim: u32) {
    let left = survivors(victim);
    let first = Expected::<bf16>::new(case);
    let nodes = left.iter().map(|&rank| case.nodes[rank as usize]).collect();
    let (map, counts, active) = (after(victim), vec![5, 7], vec![true; 2]);
    let next = Expected::<bf16>::new(&Case { nodes, map, counts, active, ..case.clone() });
    on_ranks(&case.nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut ep = first.layer(&group);
        round(&first, &world, &mut ep);
        ep.mask(&[true, false, true]).unwrap();
        nothing_is_held(&world, &group);
        if world.rank() == victim {
            return;
        }
        let rebuilt = world.rebuild(LONG, 2).unwrap();
        assert_eq!(rebuilt.previous_ranks(), left);
        let group = rebuilt.all().unwrap();
        let mut again = ep.rebuilt(&group, next.case.map.clone()).build().unwrap();
        drop((ep, world));
        assert_eq!((again.active(), again.expert_map()), (&[true; 2][..], &next.case.map));
        round(&next, &rebuilt, &mut again);
        nothing_is_held(&rebuilt, &group);
    });
}

#[test]
fn rebuilt_instance_keeps_settings_and_has_reference_bits() {
    let case = Case { map: before(), ..Case::new(&[0, 1, 1], &[7, 3, 6], 4, 2) };
    let (layout, overflow) = (RowLayout::RankMajor, Overflow::Drop);
    for (victim, case) in [
        Case { weighted: true, align: 4, ..case.clone() },
        Case { layout, route: Route::Pxn, spans: true, ..case.clone() },
        Case { order: SumOrder::Node, wire: PartialDtype::Bf16, route: Route::Pxn, ..case.clone() },
        Case { mode: ReceiveMode::Budget { rows: 9, overflow }, ..case.clone() },
        Case { mode: ReceiveMode::Slots { rows: 3, overflow }, ..case.clone() },
        Case { strategy: Strategy::AllGather, ..case },
    ]
    .iter()
    .enumerate()
    {
        hold(case, victim as u32 % RANKS);
    }
}

#[test]
fn rebuilt_instance_refuses_wrong_expert_map_on_all_ranks() {
    let case = Case { map: before(), ..Case::new(&[0, 0, 0], &[4, 4, 4], 4, 2) };
    let all = Expected::<bf16>::new(&case);
    on_ranks(&case.nodes, &small(), |world| {
        let group = world.all().unwrap();
        let ep = all.layer(&group);
        let bad = [ExpertMap::contiguous(5, 3).unwrap(), ExpertMap::contiguous(4, 2).unwrap()];
        for (bad, named) in bad.into_iter().zip(["experts of the expert map", "ranks of the expert map"]) {
            let map = if world.rank() == 1 { bad } else { before() };
            match (world.rank(), ep.rebuilt(&group, map).build().unwrap_err()) {
                (1, Error::Plan(PlanError::BadParameter { parameter, .. })) => assert_eq!(parameter, named),
                (0 | 2, Error::Call(CallError::ConfigsDiffer { peer: 1, mine: 1, theirs: 0, .. })) => {}
                (rank, error) => panic!("rank {rank}: {error}"),
            }
        }
        round(&all, &world, &mut ep.rebuilt(&group, before()).build().unwrap());
        drop(ep);
        nothing_is_held(&world, &group);
    });
}
