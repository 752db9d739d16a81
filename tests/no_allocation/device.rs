//! Calls on a device. The fake driver is a library of its own with an allocator of its own, so what
//! it allocates for streams and kernels is not counted.

use sidelane::ExpertParallel;
use sidelane::ep::{Graphs, Report};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;

use super::apart::each_with_kernels;
use super::counting::Meeting;
use super::device_rounds::{
    RANKS, Settings, TOKENS, Tensors, along, counted, counted_with, in_halves, over_loopback,
};
use super::support::medium;

#[test]
fn calls_that_the_enqueuer_lays_out_do_not_allocate() {
    each_with_kernels("device::calls_that_the_enqueuer_lays_out_do_not_allocate", &[&[]], || {
        let ways = [([0; 4], Route::Direct), ([0, 1, 0, 1], Route::Direct), ([0, 1, 1, 1], Route::Pxn)];
        for (nodes, route) in ways {
            for (order, weighted, layout) in [
                (SumOrder::Expert, false, RowLayout::ExpertMajor),
                (SumOrder::Rank, true, RowLayout::ExpertMajor),
                (SumOrder::Node, false, RowLayout::ExpertMajor),
                (SumOrder::Rank, false, RowLayout::RankMajor),
            ] {
                let everywhere = Meeting::new(RANKS);
                let round = |ep: &mut ExpertParallel, of: &Tensors, late: bool| {
                    let (rows, handle) = ep.dispatch(of.x(), of.choices()).unwrap();
                    let y = handle.output().unwrap();
                    of.copy(y.range().unwrap(), &rows.range().unwrap());
                    ep.combine_into(y, &handle, of.out()).unwrap();
                    // Between nodes the host waits for the stream.
                    if late && nodes == [0; 4] {
                        of.close_gate();
                        (0..2).for_each(|_| along(ep, of, &handle, (weighted, layout)));
                        everywhere.wait();
                        of.open_gate();
                    } else {
                        along(ep, of, &handle, (weighted, layout));
                    }
                    drop(ep.prepare(of.choices()).unwrap());
                    handle
                };
                let what = format!("{route:?}, {order:?}, {layout:?}");
                let settings: &Settings<'_> = &|builder| {
                    let builder = builder.sum_order(order).weighted(weighted).layout(layout);
                    builder.route(route).device_heap(1 << 20)
                };
                counted(nodes, &what, settings, &round);
            }
        }
    });
}

#[test]
fn calls_in_halves_of_buffers_records_and_budgets_do_not_allocate() {
    let test = "device::calls_in_halves_of_buffers_records_and_budgets_do_not_allocate";
    each_with_kernels(test, &[&[]], || {
        let budget = |overflow| ReceiveMode::Budget { rows: 40, overflow };
        let within = ReceiveMode::Budget { rows: 10, overflow: Overflow::Drop };
        for (nodes, route) in
            [([0; 4], Route::Direct), ([0, 1, 0, 1], Route::Direct), ([0, 0, 1, 1], Route::Pxn)]
        {
            for (what, buffered, fp8, mode) in [
                ("halves", false, false, ReceiveMode::Exact),
                ("a token buffer", true, false, ReceiveMode::Exact),
                ("records", false, true, ReceiveMode::Exact),
                ("a budget", false, false, budget(Overflow::Error)),
                ("a budget that drops rows", false, false, within),
            ] {
                let settings: &Settings<'_> =
                    &|builder| builder.route(route).mode(mode).fp8(fp8).device_heap(1 << 20);
                let what = format!("{what}, {route:?}");
                let check = |report: &Report| assert_eq!(over_loopback(report), nodes != [0; 4], "{what}");
                let round = |ep: &mut ExpertParallel, of: &Tensors, _: bool| in_halves(ep, of);
                counted_with((nodes, &medium()), (&what, buffered), settings, &round, &check);
            }
        }
    });
}

#[test]
fn calls_in_slots_do_not_allocate() {
    each_with_kernels("device::calls_in_slots_do_not_allocate", &[&[]], || {
        for nodes in [[0; 4], [0, 1, 0, 1]] {
            let mode = ReceiveMode::Slots { rows: TOKENS, overflow: Overflow::Error };
            counted(
                nodes,
                "slots",
                &|builder| builder.mode(mode).layout(RowLayout::RankMajor),
                &|ep, of, _| {
                    let (rows, handle) = ep.dispatch(of.x(), of.choices()).unwrap();
                    let y = handle.output().unwrap();
                    of.copy(y.range().unwrap(), &rows.range().unwrap());
                    ep.combine_into(y, &handle, of.out()).unwrap();
                    let (_, handle) = ep.start_dispatch(of.x(), of.choices()).unwrap().finish().unwrap();
                    ep.release(Some(&handle)).unwrap();
                    handle
                },
            );
            let mode = ReceiveMode::Budget { rows: 30, overflow: Overflow::Drop };
            let dispatch = |ep: &mut ExpertParallel, of: &Tensors| {
                let started = ep.start_dispatch(of.x(), of.choices()).unwrap();
                let (rows, handle) = started.finish_async().unwrap();
                let y = handle.output().unwrap();
                of.copy(y.range().unwrap(), &rows.range().unwrap());
                ep.combine_into(y, &handle, of.out()).unwrap();
                handle
            };
            counted(
                nodes,
                "a budget in slots",
                &|builder| builder.mode(mode).sum_order(SumOrder::Rank).graphs(Graphs::Slots),
                &|ep, of, _| dispatch(ep, of),
            );
        }
    });
}
