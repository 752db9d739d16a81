//! Budgets that graphs hold: expert-major rows from slots against the same calls on the host, bit
//! for bit.

use std::sync::Arc;

use half::{bf16, f16};
use sidelane::device::{CudaGraph, DeviceRange};
use sidelane::dtype::PartialDtype;
use sidelane::ep::{ExpertRows, Graphs, Handle, Tensor};
use sidelane::error::{CallError, DeviceError, KernelFault, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, Element, Error, World};

use super::on_stand_in;
use crate::enqueued::blocks::with_each_limit;
use crate::enqueued::rank::{Case, Input, Rank, call, target};
use crate::support::layer::bits;
use crate::support::{To, on_ranks, small, tokens};

/// A budget that graphs may hold.
fn budget(rows: u32, overflow: Overflow, case: Case) -> Case {
    let mode = ReceiveMode::Budget { rows, overflow };
    Case { mode, graphs: Graphs::Slots, order: SumOrder::Rank, ..case }
}

/// What the host makes of an input.
struct Expected<E> {
    rows: Vec<E>,
    weights: Vec<f32>,
    counts: Vec<i64>,
    dropped: Vec<bool>,
    /// What experts make of the rows, and the sums of that.
    made: Vec<E>,
    sums: Vec<E>,
}

/// The calls of an input on the host, or the rank that they find over its budget.
fn on_host<E: Element + Into<f32>>(rank: &mut Rank<E>, input: &Input<E>) -> Result<Expected<E>, u32>
where
    f32: To<E>,
{
    let Case { top_k, hidden, .. } = rank.case;
    let routing = Routing::new(top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
    let (rows, handle) = match rank.host.dispatch(&input.x, &routing) {
        Err(Error::Call(CallError::OverBudget { rank, .. })) => return Err(rank),
        dispatched => dispatched.unwrap(),
    };
    let rows: Vec<E> = rows.to_vec().unwrap();
    let made: Vec<E> = rows.iter().enumerate().map(|(at, &value)| rank.expert(at / hidden, value)).collect();
    let sums = rank.host.combine(&made, &handle).unwrap();
    let counts = [handle.tokens_per_expert(), handle.padded_tokens_per_expert()].concat();
    let (weights, dropped) = (handle.row_weights().to_vec(), handle.dropped().to_vec());
    Ok(Expected { rows, weights, counts, dropped, made, sums })
}

fn seen<T: bytemuck::Pod, E: Element>(rank: &Rank<E>, range: &DeviceRange, count: usize) -> Vec<T> {
    let len = (count * size_of::<T>()) as u64;
    if len == 0 {
        return Vec::new();
    }
    rank.rows.read(&rank.stream, &range.part(0, len).unwrap())
}

/// A dispatch and a combine of an input, compared in everything that a stream sees of them.
fn round<E: Element + Into<f32>>(rank: &mut Rank<E>, input: &Input<E>)
where
    f32: To<E>,
{
    let expected = on_host(rank, input);
    let tensors = rank.put(input);
    let (x, choices) = call::<E>(&tensors);
    let (rows, handle) = rank.planned.start_dispatch(x, choices).unwrap().unfinished().unwrap();
    let out = rank.out.part(tensors[0].len());
    match expected {
        Ok(expected) => {
            landed(rank, &rows, &handle, &expected);
            let y = handle.output().unwrap();
            rank.rows.send(&rank.stream, y.range().unwrap(), bits(&expected.made));
            rank.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
            assert_eq!(bits(&seen::<E, E>(rank, &out, expected.sums.len())), bits(&expected.sums), "sums");
        }
        Err(over) => {
            let status = seen::<u32, E>(rank, &handle.status().unwrap(), 1)[0];
            assert_eq!(KernelFault::of(status), Some(KernelFault::OverBudget { rank: over }));
            let counts = rows.counts().unwrap();
            assert!(seen::<i64, E>(rank, &counts, (counts.len() / 8) as usize).iter().all(|&rows| rows == 0));
            rank.planned.combine_into(handle.output().unwrap(), &handle, target::<E>(&out)).unwrap();
            let sums = seen::<u8, E>(rank, &out, out.len() as usize);
            assert!(sums.iter().all(|&byte| byte == 0), "sums of a refused call");
            let (device, fault) = (rank.stream.device(), KernelFault::OverBudget { rank: over });
            assert_eq!(rank.planned.synchronize(), Err(DeviceError::Fault { device, fault }.into()));
            return;
        }
    }
    rank.planned.synchronize().unwrap();
}

/// Rows, weights, counts and drops are those of the host.
fn landed<E: Element>(rank: &Rank<E>, rows: &ExpertRows, handle: &Handle, expected: &Expected<E>) {
    let range = rows.range().unwrap();
    assert_eq!(bits(&seen::<E, E>(rank, &range, expected.rows.len())), bits(&expected.rows), "rows");
    let weights = seen::<f32, E>(rank, &rows.weights().unwrap(), expected.weights.len());
    assert_eq!(bits(&weights), bits(&expected.weights), "weights");
    assert_eq!(seen::<i64, E>(rank, &rows.counts().unwrap(), expected.counts.len()), expected.counts);
    let dropped = seen::<u8, E>(rank, handle.dropped_mask().unwrap(), expected.dropped.len());
    assert_eq!(dropped, expected.dropped.iter().map(|&is| u8::from(is)).collect::<Vec<_>>(), "dropped");
    assert_eq!(seen::<u32, E>(rank, &handle.status().unwrap(), 1), [0]);
    assert!(handle.tokens_per_expert().is_empty() && handle.dropped().is_empty(), "the host does not know");
}

fn on_each<E: Element + Into<f32>>(case: &Case, body: impl Fn(&mut Rank<E>, u64) + Sync)
where
    f32: To<E>,
{
    on_ranks(&case.nodes, &small(), |world: World| {
        let group = world.all().unwrap();
        body(&mut rank(&group, case), group.rank().into());
    });
}

fn rank<E: Element + Into<f32>>(group: &sidelane::Group, case: &Case) -> Rank<E>
where
    f32: To<E>,
{
    Rank::new(group, case)
}

fn some(case: &Case, seed: u64) -> u32 {
    (seed.wrapping_mul(0x9e37_79b9) >> 7) as u32 % (case.max_tokens + 1)
}

/// Rounds of random tokens, each rank with a number of its own.
fn rounds<E: Element + Into<f32>>(case: &Case, rounds: u64, seed: u64)
where
    f32: To<E>,
{
    on_each::<E>(case, |rank, me| {
        for seed in (seed * 1000..).take(rounds as usize).map(|round| round * 64 + me) {
            round(rank, &tokens(seed, some(case, seed), case.hidden, case.top_k, case.map.experts()));
        }
    });
}

#[test]
fn rows_and_sums_within_a_budget_are_those_of_the_host() {
    on_stand_in("slots::budget::rows_and_sums_within_a_budget_are_those_of_the_host", || {
        let mixed = ExpertMap::from_slots(6, &[vec![5, 0], vec![1, 4, 3], vec![], vec![2, 3]]).unwrap();
        for (rows, overflow, align) in [
            (200, Overflow::Error, 1),
            (11, Overflow::Drop, 1),
            (24, Overflow::Drop, 8),
            (0, Overflow::Drop, 1),
        ] {
            let case = Case { align, ..Case::new(4, 6, 3) };
            let case = budget(rows, overflow, case);
            rounds::<bf16>(&case, 4, rows.into());
            rounds::<bf16>(&Case { map: mixed.clone(), wire: PartialDtype::Bf16, ..case }, 3, 7);
        }
        let case = budget(13, Overflow::Drop, Case { align: 4, ..Case::new(3, 5, 4) });
        rounds::<f32>(&case, 2, 3);
        rounds::<f16>(&case, 2, 4);
    });
}

/// Kernels look at 1024 choices at a time, and these are more.
#[test]
fn rows_and_sums_of_many_choices_are_those_of_the_host() {
    on_stand_in("slots::budget::rows_and_sums_of_many_choices_are_those_of_the_host", || {
        for (rows, overflow, align) in [(4900, Overflow::Error, 1), (900, Overflow::Drop, 8)] {
            let case = Case { max_tokens: 600, hidden: 8, align, ..Case::new(2, 6, 4) };
            on_each::<bf16>(&budget(rows, overflow, case), |rank, me| {
                for count in [600, 257] {
                    round(rank, &tokens(64 * u64::from(count) + me, count, 8, 4, 6));
                }
            });
        }
    });
}

#[test]
fn rows_and_sums_have_the_bits_of_the_host_with_any_limit() {
    on_stand_in("slots::budget::rows_and_sums_have_the_bits_of_the_host_with_any_limit", || {
        with_each_limit(|max_blocks| {
            for (rows, overflow) in [(400, Overflow::Error), (20, Overflow::Drop)] {
                let case = Case { max_tokens: 40, align: 8, max_blocks, ..Case::new(4, 6, 3) };
                rounds::<bf16>(&budget(rows, overflow, case), 3, 11);
            }
        });
    });
}

#[test]
fn rows_and_sums_across_nodes_are_those_of_the_host() {
    on_stand_in("slots::budget::rows_and_sums_across_nodes_are_those_of_the_host", || {
        for (nodes, rows, overflow) in [
            (&[0, 0, 1, 1][..], 9, Overflow::Drop),
            (&[0, 1, 2, 0, 1], 30, Overflow::Drop),
            (&[0, 1, 1], 200, Overflow::Error),
        ] {
            rounds::<bf16>(&budget(rows, overflow, Case { align: 2, ..Case::across(nodes, 7, 3) }), 4, 5);
        }
    });
}

#[test]
fn refused_call_leaves_zeros_at_all_ranks_and_the_next_one_goes_well() {
    on_stand_in("slots::budget::refused_call_leaves_zeros_at_all_ranks_and_the_next_one_goes_well", || {
        for nodes in [&[0, 0, 0][..], &[0, 1, 1]] {
            let case = budget(14, Overflow::Error, Case::across(nodes, 5, 3));
            on_each::<bf16>(&case, |rank, me| {
                let (mut refused, mut good) = (0, 0);
                for seed in 0..16 {
                    let count = if seed % 2 == 0 { 12 } else { 2 };
                    let input = tokens(64 * seed + me, count, 16, 3, 5);
                    match on_host(rank, &input) {
                        Ok(_) => good += 1,
                        Err(_) => refused += 1,
                    }
                    round(rank, &input);
                }
                assert!(refused > 0 && good > 0, "{refused} refused, {good} good");
            });
        }
    });
}

/// A layer, captured and replayed with other tokens: all of as many tokens. Experts change nothing.
/// Masks come before the replays of their numbers.
fn replayed(rank: &mut Rank<bf16>, inputs: &[Input<bf16>], masks: &[&[bool]]) {
    let stream = Arc::clone(&rank.stream);
    let tensors = rank.put(&inputs[0]);
    let out = rank.out.part(tensors[0].len());
    let mut kept = None;
    let graph = CudaGraph::capture(&stream, || {
        let (x, choices) = call::<bf16>(&tensors);
        let (rows, handle) = rank.planned.start_dispatch(x, choices)?.unfinished()?;
        let (y, landed) = (handle.output()?, rows.range()?);
        stream.copy(y.range()?.span(0, landed.len())?, landed.span(0, landed.len())?)?;
        rank.planned.combine_into(y, &handle, target::<bf16>(&out))?;
        kept = Some((rows, handle));
        Ok::<(), Error>(())
    })
    .unwrap();
    let (rows, handle) = kept.unwrap();
    for (nth, input) in inputs.iter().enumerate() {
        if let Some(active) = masks.get(nth) {
            for ep in [&mut rank.host, &mut rank.planned] {
                ep.mask(active).unwrap();
            }
        }
        let routing = Routing::new(rank.case.top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let expected = rank.host.dispatch(&input.x, &routing);
        rank.put(input);
        graph.launch(&stream).unwrap();
        let sums = rank.out.read::<bf16>(&stream, &out);
        let Ok((landed, on_host)) = expected else {
            assert!(rank.planned.synchronize().is_err(), "until the next replay");
            assert!(sums.iter().all(|sum| sum.to_bits() == 0), "sums of a refused replay");
            assert_ne!(seen::<u32, _>(rank, &handle.status().unwrap(), 1), [0]);
            continue;
        };
        let expected: Vec<bf16> = rank.host.combine(landed.rows::<bf16>().unwrap(), &on_host).unwrap();
        assert_eq!(bits(&sums), bits(&expected), "sums");
        let mask = seen::<u8, _>(rank, handle.dropped_mask().unwrap(), on_host.dropped().len());
        assert_eq!(mask, on_host.dropped().iter().map(|&is| u8::from(is)).collect::<Vec<_>>());
        let counts = [on_host.tokens_per_expert(), on_host.padded_tokens_per_expert()].concat();
        assert_eq!(seen::<i64, _>(rank, &rows.counts().unwrap(), counts.len()), counts);
        rank.planned.synchronize().unwrap();
    }
}

#[test]
fn graph_of_a_whole_layer_is_replayed_with_other_tokens() {
    on_stand_in("slots::budget::graph_of_a_whole_layer_is_replayed_with_other_tokens", || {
        for nodes in [&[0; 3][..], &[0, 0, 1, 1]] {
            for (rows, overflow) in [(160, Overflow::Error), (24, Overflow::Error), (9, Overflow::Drop)] {
                let case = budget(rows, overflow, Case { align: 2, ..Case::across(nodes, 5, 3) });
                on_each::<bf16>(&case, |rank, me| {
                    let input = |nth: u64| tokens(10 * nth + me, 4 + me as u32, 16, 3, 5);
                    let inputs: Vec<_> = (0..6).map(input).collect();
                    round(rank, &inputs[5]);
                    replayed(rank, &inputs, &[]);
                    // A call beside the graph, and another graph.
                    round(rank, &inputs[0]);
                    replayed(rank, &inputs[1..4], &[]);
                });
            }
        }
    });
}

#[test]
fn graph_that_was_captured_goes_by_each_new_mask() {
    on_stand_in("slots::budget::graph_that_was_captured_goes_by_each_new_mask", || {
        for nodes in [[0; 3], [0, 0, 1]] {
            let map = ExpertMap::from_slots(4, &[vec![0, 1], vec![2, 0], vec![3, 1]]).unwrap();
            for (rows, overflow) in [(160, Overflow::Error), (6, Overflow::Drop)] {
                let case = Case { map: map.clone(), ..Case::across(&nodes, 4, 3) };
                on_each::<bf16>(&budget(rows, overflow, case), |rank, me| {
                    let inputs: Vec<_> =
                        (0..5).map(|nth| tokens(10 * nth + me, 4 + me as u32, 16, 3, 4)).collect();
                    let masks: [&[bool]; 5] = [
                        &[true; 3],
                        &[true, false, true],
                        &[false, true, true],
                        &[false, false, true],
                        &[true; 3],
                    ];
                    replayed(rank, &inputs, &masks);
                    round(rank, &inputs[1]);
                });
            }
        }
    });
}

#[test]
fn bad_input_of_one_rank_is_refused_on_all_ranks() {
    on_stand_in("slots::budget::bad_input_of_one_rank_is_refused_on_all_ranks", || {
        for nodes in [[0; 3], [0, 0, 1]] {
            on_each::<bf16>(&budget(60, Overflow::Error, Case::across(&nodes, 6, 2)), |rank, me| {
                let good: Input<bf16> = tokens(me, 5, 16, 2, 6);
                for missing in [true, false, true] {
                    refused(rank, (me, missing), &good);
                    round(rank, &good);
                }
            });
        }
    });
}

/// A layer for which rank 1 names an expert that does not exist, or brings rows that are too short.
fn refused(rank: &mut Rank<bf16>, (me, missing): (u64, bool), good: &Input<bf16>) {
    let (mut input, bad) = (good.clone(), me == 1);
    if bad && missing {
        input.ids[3] = 6;
    }
    let tensors = rank.put(&input);
    let (mut x, choices) = call::<bf16>(&tensors);
    let short = tensors[0].part(0, 64).unwrap();
    if bad && !missing {
        x = Tensor::device(&short, Dtype::Bf16);
    }
    let started = rank.planned.start_dispatch(x, choices).and_then(|started| started.unfinished());
    let by_bad = KernelFault::Refused { rank: 1 };
    let expected = if bad && missing { KernelFault::ExpertOutOfRange { token: 1 } } else { by_bad };
    if let Ok((rows, handle)) = started {
        let status = seen::<u32, bf16>(rank, &handle.status().unwrap(), 1)[0];
        assert_eq!(KernelFault::of(status), Some(expected));
        let counts = rows.counts().unwrap();
        assert!(seen::<i64, bf16>(rank, &counts, (counts.len() / 8) as usize).iter().all(|&rows| rows == 0));
        let out = rank.out.part(tensors[0].len());
        rank.planned.combine_into(handle.output().unwrap(), &handle, target::<bf16>(&out)).unwrap();
        let sums = seen::<u8, bf16>(rank, &out, out.len() as usize);
        assert!(sums.iter().all(|&byte| byte == 0), "sums of a refused call");
        assert_eq!(KernelFault::of(handle.status_now().0), Some(expected));
    } else {
        assert!(bad && !missing);
    }
    match rank.planned.synchronize().unwrap_err() {
        Error::Device(DeviceError::Fault { fault, .. }) => assert!(bad && missing && fault == expected),
        Error::Plan(PlanError::RefusedHere) => assert!(bad && !missing),
        Error::Call(CallError::PeerRefused { peer: 1, .. }) => assert!(!bad),
        other => panic!("rank {me}: {other}"),
    }
}

#[test]
fn settings_that_graphs_cannot_hold_are_refused_by_name() {
    on_stand_in("slots::budget::settings_that_graphs_cannot_hold_are_refused_by_name", || {
        let within = |case| budget(40, Overflow::Drop, case);
        let case = Case::new(2, 4, 2);
        let on_device = "constant-program";
        for (case, feature, executor) in [
            (Case { order: SumOrder::Expert, ..within(case.clone()) }, "sums by expert", on_device),
            (Case { order: SumOrder::Node, ..within(case.clone()) }, "sums by node", on_device),
            (Case { route: Route::Pxn, ..within(case.clone()) }, "relays (route pxn)", on_device),
            (Case { weighted: true, ..within(case.clone()) }, "weighted combine", on_device),
            (Case { graphs: Graphs::Slots, ..case.clone() }, "sizes on the device, and capture", "enqueuer"),
        ] {
            on_ranks(&case.nodes, &small(), |world: World| {
                let (group, stream) = (world.all().unwrap(), crate::devices::stream(world.rank()));
                let builder = case.settings::<bf16>(&group).graphs(case.graphs);
                let refused = builder.on(&stream).build().map(drop).unwrap_err();
                let expected = PlanError::NotAvailable { feature, place: "a device", executor };
                assert_eq!(refused, expected.into());
            });
        }
        on_ranks(&case.nodes, &small(), |world: World| {
            let group = world.all().unwrap();
            let refused = case.settings::<bf16>(&group).graphs(Graphs::Slots).build().map(drop).unwrap_err();
            let feature = "sizes on the device, and capture";
            let expected = PlanError::NotAvailable { feature, place: "the host", executor: "host-stepper" };
            assert_eq!(refused, expected.into());
        });
    });
}

#[test]
fn a_report_names_the_kernels_of_a_budget() {
    on_stand_in("slots::budget::a_report_names_the_kernels_of_a_budget", || {
        on_each::<bf16>(&budget(40, Overflow::Drop, Case::new(2, 4, 2)), |rank, me| {
            let tensors = rank.put(&tokens(me, 5, 16, 2, 4));
            let (x, choices) = call::<bf16>(&tensors);
            let (rows, handle) = rank.planned.dispatch(x, choices).unwrap();
            assert_eq!((rows.len(), rows.slots()), (40, None));
            let kernels = ["pack", "tally", "check", "admit", "expand", "regroup"];
            assert_eq!(handle.report().unwrap().kernels, kernels);
            let out = rank.out.part(tensors[0].len());
            rank.planned.combine_into(handle.output().unwrap(), &handle, target::<bf16>(&out)).unwrap();
            assert_eq!(handle.returned().unwrap().kernels, ["sum_choices_bf16_to_f32", "sum"]);
            rank.planned.synchronize().unwrap();
        });
    });
}
