//! The floor of every layout and mode: on one node, all that a dispatch and its combine do.

use half::bf16;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout};
use sidelane::rows::{Arithmetic, Stores};

use crate::support::layer::{Expected, bits};
use crate::support::reference::Case;
use crate::support::{on_ranks, tiny};

#[test]
fn floor_moves_and_sums_what_the_calls_do() {
    let case = Case { align: 4, ..Case::new(&[0; 4], &[5, 0, 17, 3], 6, 3) };
    let overflow = Overflow::Drop;
    for mode in [
        ReceiveMode::Exact,
        ReceiveMode::Budget { rows: 13, overflow },
        ReceiveMode::Slots { rows: 3, overflow },
    ] {
        for layout in RowLayout::ALL {
            let all = Expected::<bf16>::new(&Case { mode, layout, ..case.clone() });
            on_ranks(&case.nodes, &tiny(), |world| {
                let (group, me) = (world.all().unwrap(), world.rank() as usize);
                let mut ep = all.layer(&group);
                let (rows, handle) = all.dispatch(&mut ep);
                let mut y = handle.output().unwrap();
                y.rows_mut::<bf16>().unwrap().copy_from_slice(&all.tensor(1, me, handle.rows() as usize));
                let mut floor = ep.floor_bench(&group, rows, y, &handle).unwrap();
                let mut rows = floor.lend_rows().unwrap();
                rows.rows_mut::<u8>().unwrap().fill(0xff);
                floor.keep_rows(rows).unwrap();
                group.gather(&[]).unwrap();
                floor.dispatch(bytemuck::cast_slice(&all.all[me].x), Stores::Cached);
                let mut sums = vec![bf16::NAN; all.all[me].x.len()];
                floor.combine(Arithmetic::Bf16, bytemuck::cast_slice_mut(&mut sums), Stores::Cached);
                group.gather(&[]).unwrap();
                all.arrived(me, &floor.lend_rows().unwrap(), &handle);
                assert!(bits(&sums) == bits(&all.sums(me, 1, false)), "rank {me}, {:?}", all.case);
            });
        }
    }
}
