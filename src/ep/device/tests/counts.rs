//! Counts of the time model against those of what the fake driver carries out: all copies, batches,
//! words and kernels of a call, of every stream, and messages of the net.

use std::sync::Mutex;

use fake_cuda::{Counters, FakeDriver};
use half::bf16;
use sidelane_model::time::{Case as Timed, Hardware, Placed, RankWork, Timing};

use super::rank::{Case, Input, Rank, call, target};
use super::support::{on_ranks, small, tokens};
use super::{on_devices, on_nics_in_group};
use crate::dtype::PartialDtype;
use crate::ep::{Report, Tensor};
use crate::exec::EnqueueCounts;
use crate::gate::Routing;
use crate::lane::SignalMode;
use crate::plan::{RowLayout, SumOrder};
use crate::topology::Route;
use crate::{Dtype, Group, World};

const SEED: u64 = 0x51de_1a7e;

/// Input of a rank: no two have as many tokens.
fn input(case: &Case, rank: u64) -> Input<bf16> {
    let tokens_of_rank = case.max_tokens - rank as u32;
    tokens(SEED + rank, tokens_of_rank, case.hidden, case.top_k, case.map.experts())
}

/// The same calls in the model.
fn modeled(case: &Case) -> [Timing; 3] {
    let ranks = case.nodes.len() as u64;
    let routing = |rank| {
        let Input { ids, weights, .. } = input(case, rank);
        Routing::new(case.top_k, ids, weights).unwrap()
    };
    let routings: Vec<Routing<'_>> = (0..ranks).map(routing).collect();
    let row_bytes = (case.hidden * Dtype::Bf16.size()) as u64;
    let timed = Timed {
        nodes: case.nodes.iter().max().unwrap() + 1,
        map: &case.map,
        routings: &routings,
        layout: case.layout,
        route: case.route,
        order: case.order,
        chunks: None,
        row_bytes,
        return_bytes: row_bytes,
        partial_bytes: (case.hidden * case.wire.size()) as u64,
        metadata: true,
    };
    let hardware: Hardware = "h100-cx7".parse().unwrap();
    let placed = Placed::new(&timed, &hardware).unwrap();
    [placed.dispatch(), placed.combine(), placed.combine_backward()]
}

/// Messages and their bytes that all ranks have sent: in their dispatch, and in their combine.
type Sent = Mutex<[[u64; 2]; 2]>;

/// Waits for all ranks. Fails once one has panicked: its world ends with its thread.
fn meet(group: &Group) {
    group.gather(&[]).unwrap();
}

/// Work of the fake driver in a call.
#[derive(Debug, PartialEq, Eq)]
struct Work {
    copies: u64,
    copied_bytes: u64,
    batches: u64,
    memory_ops: u64,
    kernels: u64,
}

impl Work {
    fn between(before: Counters, after: Counters) -> Work {
        Work {
            copies: after.copies - before.copies,
            copied_bytes: after.copied_bytes - before.copied_bytes,
            batches: after.copy_batches - before.copy_batches,
            memory_ops: after.memory_operations - before.memory_operations,
            kernels: after.kernels - before.kernels,
        }
    }

    fn modeled(work: &RankWork) -> Work {
        Work {
            copies: work.copies,
            copied_bytes: work.intra_node_bytes + work.self_bytes + work.host_bytes,
            batches: work.batches,
            memory_ops: work.memory_ops,
            kernels: work.kernels,
        }
    }
}

/// Makes a call at all ranks; what the fake driver did meanwhile.
fn counted<T>(group: &Group, rank: &mut Rank<bf16>, body: impl FnOnce(&mut Rank<bf16>) -> T) -> (T, Work) {
    let settled = |rank: &Rank<bf16>| {
        rank.stream.synchronize().unwrap();
        meet(group);
        let counters = FakeDriver::loaded().unwrap().counters();
        meet(group);
        counters
    };
    let before = settled(rank);
    let made = body(rank);
    (made, Work::between(before, settled(rank)))
}

/// Puts and signals of a call to other nodes, and the bytes of the puts.
fn messages(report: &Report) -> [u64; 2] {
    let EnqueueCounts { inter_node_puts, inter_node_signals, inter_node_bytes, .. } = report.enqueued;
    [inter_node_puts + inter_node_signals, inter_node_bytes]
}

/// Compares a dispatch, its combine, and the gradient of that.
fn compare(case: &Case, sent: &Sent, group: &Group, rank: &mut Rank<bf16>) {
    let Case { nodes, layout, route, order, .. } = case;
    let title = format!("{nodes:?} {layout:?} {route:?} {order:?} seed {SEED:#x}");
    let [dispatch, combine, gradient] = modeled(case);
    let tensors = rank.put(&input(case, group.rank().into()));
    let ((rows, handle), seen) = counted(group, rank, |rank| {
        let (x, choices) = call::<bf16>(&tensors);
        rank.planned.dispatch(x, choices).unwrap()
    });
    assert_eq!(seen, Work::modeled(&dispatch.total), "dispatch, {title}");
    let y = handle.output().unwrap();
    let out = rank.out.part(tensors[0].len());
    let ((), seen) = counted(group, rank, |rank| {
        rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
    });
    assert_eq!(seen, Work::modeled(&combine.total), "combine, {title}");
    let (back, seen) = counted(group, rank, |rank| {
        let gradients = Tensor::device(&tensors[0], Dtype::Bf16);
        rank.planned.combine_backward_into(gradients, &handle, None).unwrap()
    });
    assert_eq!(seen, Work::modeled(&gradient.total), "gradient of combine, {title}");
    let reports = [handle.report().unwrap(), handle.return_report().unwrap()];
    for (sum, report) in sent.lock().unwrap().iter_mut().zip(&reports) {
        let [count, bytes] = messages(report);
        (sum[0], sum[1]) = (sum[0] + count, sum[1] + bytes);
    }
    meet(group);
    let modeled = [dispatch.total, combine.total].map(|work| [work.messages, work.inter_node_bytes]);
    assert_eq!(*sent.lock().unwrap(), modeled, "messages of dispatch and combine, {title}");
    drop((rows, back));
    meet(group);
}

#[test]
fn on_one_node_the_model_counts_what_the_driver_carries_out() {
    on_devices("counts::on_one_node_the_model_counts_what_the_driver_carries_out", 21, "ordered", |_| {
        for layout in RowLayout::ALL {
            let case = Case { layout, ..Case::new(4, 8, 3) };
            let sent = Sent::default();
            on_ranks(&case.nodes, &small(), |world: World| {
                let group = world.all().unwrap();
                compare(&case, &sent, &group, &mut Rank::new(&group, &case));
            });
        }
    });
}

#[test]
fn on_one_node_no_choice_is_copied_to_the_host() {
    on_devices("counts::on_one_node_no_choice_is_copied_to_the_host", 23, "ordered", |_| {
        let case = Case { max_tokens: 64, ..Case::new(4, 8, 3) };
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, tokens) = (world.all().unwrap(), case.max_tokens);
            let mut rank = Rank::<bf16>::new(&group, &case);
            // No choice has a row, so counts of each expert are all that is left to copy.
            let input = Input { ids: vec![-1; (tokens * case.top_k) as usize], ..input(&case, 0) };
            let tensors = rank.put(&input);
            let copied = |rank: &mut Rank<bf16>| {
                let (_, seen) = counted(&group, rank, |rank| {
                    let (x, choices) = call::<bf16>(&tensors);
                    drop(rank.planned.dispatch(x, choices).unwrap());
                });
                seen.copied_bytes
            };
            let counts = u64::from(case.map.experts()) * 16;
            assert_eq!(copied(&mut rank), counts);
            // The host plans where tokens may lie in place: ids, weights, rows and places cross.
            let buffer = rank.planned.token_buffer(1).unwrap();
            let lists = 4 * 4 * u64::from(tokens * case.top_k * group.size());
            assert_eq!(copied(&mut rank), counts + lists);
            drop(buffer);
        });
    });
}

#[test]
fn between_nodes_the_model_counts_what_driver_and_net_carry_out() {
    on_devices("counts::between_nodes_the_model_counts_what_driver_and_net_carry_out", 22, "ordered", |_| {
        for (layout, route) in RowLayout::ALL.into_iter().flat_map(|l| Route::ALL.map(|r| (l, r))) {
            for nodes in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1]] {
                let case = Case { layout, route, ..Case::across(nodes, 12, 3) };
                let sent = Sent::default();
                on_nics_in_group(&case, SignalMode::Write, |group, rank| compare(&case, &sent, group, rank));
            }
        }
        // Blocks of up to 10 MB go in more parts.
        let case =
            Case { max_tokens: 320, hidden: 16_384, route: Route::Pxn, ..Case::across(&[0, 0, 1, 1], 12, 3) };
        let sent = Sent::default();
        on_nics_in_group(&case, SignalMode::Write, |group, rank| compare(&case, &sent, group, rank));
    });
}

#[test]
fn model_with_rank_sums_counts_operations_of_driver_and_net() {
    let test = "counts::model_with_rank_sums_counts_operations_of_driver_and_net";
    on_devices(test, 23, "ordered", |_| {
        let (order, wire) = (SumOrder::Rank, PartialDtype::Bf16);
        for layout in RowLayout::ALL {
            // Two experts of a rank are often chosen together.
            let case = Case { layout, order, wire, ..Case::new(4, 12, 5) };
            let sent = Sent::default();
            on_ranks(&case.nodes, &small(), |world: World| {
                let group = world.all().unwrap();
                compare(&case, &sent, &group, &mut Rank::new(&group, &case));
            });
            for (route, nodes) in
                Route::ALL.into_iter().flat_map(|r| [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1]].map(|n| (r, n)))
            {
                let case = Case { layout, route, order, wire, ..Case::across(nodes, 12, 5) };
                let sent = Sent::default();
                on_nics_in_group(&case, SignalMode::Write, |group, rank| compare(&case, &sent, group, rank));
            }
        }
    });
}

#[test]
fn model_with_node_sums_counts_operations_of_driver_and_net() {
    let test = "counts::model_with_node_sums_counts_operations_of_driver_and_net";
    on_devices(test, 24, "ordered", |_| {
        let order = SumOrder::Node;
        // Partials in f32 are longer than rows, so relays return these.
        for (wire, layout) in
            [PartialDtype::Bf16, PartialDtype::F32].into_iter().flat_map(|w| RowLayout::ALL.map(|l| (w, l)))
        {
            for (route, nodes) in
                Route::ALL.into_iter().flat_map(|r| [&[0, 0, 1, 1][..], &[0, 0, 1, 1, 2, 2]].map(|n| (r, n)))
            {
                let case = Case { layout, route, order, wire, ..Case::across(nodes, 12, 5) };
                let sent = Sent::default();
                on_nics_in_group(&case, SignalMode::Write, |group, rank| compare(&case, &sent, group, rank));
            }
        }
    });
}
