//! Instances on the survivors' group: on the stream that they had, with their settings.

use std::time::Duration;

use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;

use super::calls::some;
use super::on_devices;
use super::rank::{Case, Rank};
use crate::support::{on_ranks, small, tokens};

const LONG: Duration = Duration::from_secs(60);

fn round(rank: &mut Rank<bf16>, seed: u64) {
    let count = some(&rank.case, seed);
    rank.round(&tokens(seed, count, rank.case.hidden, rank.case.top_k, 4));
}

#[test]
fn rebuilt_instance_sees_what_the_host_sees() {
    on_devices("enqueued::rebuilt::rebuilt_instance_sees_what_the_host_sees", 8, 81, || {
        let map = ExpertMap::from_slots(4, &[vec![0, 1], vec![1, 2], vec![2, 3, 0]]).unwrap();
        let case = Case { map, align: 2, max_in_flight: 3, ..Case::across(&[0, 1, 1], 4, 2) };
        for (victim, case) in [
            (0, Case { weighted: true, ..case.clone() }),
            (1, Case { layout: RowLayout::RankMajor, ..case.clone() }),
            (1, Case { order: SumOrder::Node, wire: PartialDtype::Bf16, route: Route::Pxn, ..case.clone() }),
            (0, case.dropping(6)),
        ] {
            let left: Vec<u32> = (0..3).filter(|&rank| rank != victim).collect();
            let after = case.map.subset(&left).unwrap();
            on_ranks(&case.nodes, &small(), |world| {
                let (group, me) = (world.all().unwrap(), u64::from(world.rank()));
                let mut rank = Rank::<bf16>::new(&group, &case);
                round(&mut rank, me);
                rank.planned.synchronize().unwrap();
                group.gather(&[]).unwrap();
                if world.rank() == victim {
                    return;
                }
                let next = world.rebuild(LONG, 2).unwrap();
                let group = next.all().unwrap();
                for ep in [&mut rank.host, &mut rank.planned] {
                    *ep = ep.rebuilt(&group, after.clone()).build().unwrap();
                }
                drop(world);
                rank.case.map = after.clone();
                round(&mut rank, 64 + me);
                rank.planned.synchronize().unwrap();
                group.gather(&[]).unwrap();
            });
        }
    });
}
