//! NICs that say late that they have read what they were given: calls go on meanwhile, but give
//! nothing back.
//!
//! ```text
//!   rank 0   block -> rank 2 ........................................ completions | returns
//!            relay: block of rank 2 -> rank 1
//!   rank 1                            rows are there | rank 0 is late: now deliver
//! ```

use std::sync::atomic::{AtomicBool, Ordering};

use fake_cuda::FakeDriver;
use half::bf16;

use super::rank::{Case, Rank, call, target};
use super::support::{repeated, tokens};
use super::{on_devices, on_fabric};
use crate::Group;
use crate::dtype::PartialDtype;
use crate::ep::{ExpertOutput, Handle};
use crate::lane::{Fabric, SignalMode};
use crate::plan::SumOrder;
use crate::topology::Route;

/// Two nodes of two ranks, each rank with the NIC of its number. Rows return, or sums of relays:
/// of two equal rows at most, which bf16 holds.
fn across() -> [(Case, std::sync::Arc<Fabric>); 2] {
    let rows = Case { route: Route::Pxn, ..Case::across(&[0, 0, 1, 1], 8, 4) };
    let sums = Case { order: SumOrder::Node, wire: PartialDtype::Bf16, top_k: 2, ..rows.clone() };
    [rows, sums].map(|case| (case, Fabric::new(&["nic0", "nic1", "nic2", "nic3"])))
}

/// All ranks have come here.
fn meet(group: &Group) {
    group.gather(&[]).unwrap();
}

/// Work of rank 0 while its NIC is late, and of the others while rank 0 is. Rank 1 sees what has
/// been done by then, before the NIC is in time again.
fn while_nic_0_is_late<T>(
    (fabric, returned): (&Fabric, &AtomicBool),
    (group, rank): (&Group, &mut Rank<bf16>),
    work: impl FnOnce(&mut Rank<bf16>) -> T,
    see: impl FnOnce(&mut Rank<bf16>),
) -> T {
    rank.stream.synchronize().unwrap();
    meet(group);
    if group.rank() == 0 {
        fabric.delay_completions("nic0");
        returned.store(false, Ordering::Release);
    }
    meet(group);
    let made = work(rank);
    match group.rank() {
        0 => returned.store(true, Ordering::Release),
        1 => {
            see(rank);
            assert!(!returned.load(Ordering::Acquire), "a call has ended whose rows a NIC may still read");
            fabric.deliver_completions("nic0");
        }
        _ => {}
    }
    // Later work of the ranks is not counted.
    meet(group);
    made
}

/// Outputs of experts that change nothing.
fn outputs(rank: &Rank<bf16>, rows: &crate::ep::ExpertRows, handle: &Handle) -> ExpertOutput {
    let (y, rows) = (handle.output().unwrap(), rows.range().unwrap());
    let to = y.range().unwrap().span(0, rows.len()).unwrap();
    rank.stream.copy(to, rows.span(0, rows.len()).unwrap()).unwrap();
    y
}

#[test]
fn a_relay_serves_other_nodes_before_its_own_rows_have_left() {
    let name = "late_nics::a_relay_serves_other_nodes_before_its_own_rows_have_left";
    on_devices(name, 31, "ordered", |_| {
        for (case, fabric) in across() {
            let returned = AtomicBool::new(false);
            on_fabric(&fabric, &case, SignalMode::Write, |group, rank| {
                for round in 0..3 {
                    let input = tokens(64 * round + u64::from(group.rank()), 9, case.hidden, case.top_k, 8);
                    let tensors = rank.put(&input);
                    let (rows, handle) = while_nic_0_is_late(
                        (&fabric, &returned),
                        (group, rank),
                        |rank| {
                            let (x, choices) = call::<bf16>(&tensors);
                            rank.planned.dispatch(x, choices).unwrap()
                        },
                        // Rows of rank 2 come over rank 0.
                        |rank| rank.stream.synchronize().unwrap(),
                    );
                    let y = outputs(rank, &rows, &handle);
                    let out = rank.out.part(tensors[0].len());
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
                    let sums = rank.out.read::<bf16>(&rank.stream, &out);
                    assert_eq!(sums, repeated(&input, case.top_k, case.hidden));
                }
            });
        }
    });
}

#[test]
fn combine_pulls_while_relay_rows_are_late_and_frees_no_output() {
    let name = "late_nics::combine_pulls_while_relay_rows_are_late_and_frees_no_output";
    on_devices(name, 32, "ordered", |_| {
        for (case, fabric) in across() {
            let returned = AtomicBool::new(false);
            on_fabric(&fabric, &case, SignalMode::Write, |group, rank| {
                let input = tokens(group.rank().into(), 9, case.hidden, case.top_k, 8);
                let (rows, handle) = rank.dispatch(&input).unwrap();
                let out = rank.out.part((input.x.len() * size_of::<bf16>()) as u64);
                let copies = || FakeDriver::loaded().unwrap().counters().copies;
                let combine = |rank: &mut Rank<bf16>, y: ExpertOutput| {
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
                };
                // Its copies, when nothing is late.
                let y = outputs(rank, &rows, &handle);
                rank.stream.synchronize().unwrap();
                meet(group);
                let before = copies();
                meet(group);
                combine(rank, y);
                rank.stream.synchronize().unwrap();
                meet(group);
                let all = copies() - before;
                meet(group);
                let y = outputs(rank, &rows, &handle);
                rank.stream.synchronize().unwrap();
                meet(group);
                let before = copies();
                while_nic_0_is_late(
                    (&fabric, &returned),
                    (group, rank),
                    |rank| combine(rank, y),
                    |rank| {
                        let Some(common) = rank.planned.enqueued().map(|ep| ep.common()) else {
                            panic!("exact sizes are the enqueuer's")
                        };
                        while copies() - before < all {
                            common.fixed.shared.hub.health().check().unwrap();
                            std::thread::yield_now();
                        }
                        assert_eq!(
                            common.progress.seen().unwrap(),
                            (None, false),
                            "rank 0 has given outputs back"
                        );
                    },
                );
                let sums = rank.out.read::<bf16>(&rank.stream, &out);
                assert_eq!(sums, repeated(&input, case.top_k, case.hidden));
            });
        }
    });
}
