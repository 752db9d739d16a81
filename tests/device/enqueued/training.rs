//! Steps of training: rows along known layouts, and the gradients, as on the host to the bit.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fake_cuda::FakeDriver;
use half::{bf16, f16};
use sidelane::device::{PinnedMemory, Priority, Stream};
use sidelane::dtype::PartialDtype;
use sidelane::ep::{Choices, Tensor, TensorMut};
use sidelane::error::{CallError, CallKind, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, Element, Error, World};

use super::calls::{on_each_of, some};
use super::disturbed::disturbed;
use super::rank::{Case, Rank, target};
use super::{on_devices, on_settings, seeds};
use crate::devices::stream;
use crate::support::layer::bits;
use crate::support::{To, on_ranks, sample, small};

/// Steps of random tokens, each rank with a number of its own.
pub fn steps<E: Element + Into<f32>>(case: &Case, rounds: u64, seed: u64)
where
    f32: To<E>,
{
    let case = Case { max_in_flight: 3, ..case.clone() };
    on_each_of::<E>(&case, |rank, me| {
        for round in seed * 1000..seed * 1000 + rounds {
            let of = |nth: u64| {
                let seed = round * 64 + nth * 8 + me;
                (seed, some(&case, seed))
            };
            rank.steps([of(0), of(1)]);
        }
    });
}

#[test]
fn steps_on_one_node_are_those_of_the_host() {
    on_devices("enqueued::training::steps_on_one_node_are_those_of_the_host", 8, 31, || {
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        steps::<bf16>(&Case::new(1, 3, 2), 2, 1);
        for case in [
            Case::new(4, 6, 3),
            Case { align: 16, ..Case::new(4, 6, 3) },
            Case { map: replicated, ..Case::new(4, 6, 3) },
        ] {
            steps::<bf16>(&case, 3, 2);
        }
        steps::<f32>(&Case::new(2, 5, 4), 1, 3);
        steps::<f16>(&Case::new(2, 5, 4), 1, 4);
    });
}

#[test]
fn steps_across_nodes_are_those_of_the_host() {
    on_devices("enqueued::training::steps_across_nodes_are_those_of_the_host", 8, 32, || {
        for route in Route::ALL {
            for nodes in [&[0, 0, 1, 1][..], &[0, 1, 2, 0, 1]] {
                let case = Case { route, align: 2, ..Case::across(nodes, 6, 3) };
                steps::<bf16>(&case, 2, 5);
            }
        }
    });
}

#[test]
fn ranks_drop_handles_in_any_order() {
    on_devices("enqueued::training::ranks_drop_handles_in_any_order", 8, 36, || {
        for (nodes, route) in
            [(&[0; 3][..], Route::Direct), (&[0, 1, 0], Route::Direct), (&[0, 1, 0, 1], Route::Pxn)]
        {
            let case = Case { weighted: true, route, max_in_flight: 3, ..Case::across(nodes, 4, 2) };
            on_each_of::<bf16>(&case, |rank, me| {
                let mut kept = Vec::new();
                for round in 0..6 {
                    let seed = round * 64 + me;
                    let step = rank.expected(seed, some(&case, seed));
                    let handle = rank.forward(&step);
                    kept.push((step, handle));
                    if kept.len() == 3 {
                        // Another one at each rank: from now on their contexts differ.
                        kept.remove((me as usize + round as usize) % 3);
                        let (step, handle) = kept.remove(me as usize % 2);
                        rank.planned.synchronize().unwrap();
                        drop((step, handle));
                    }
                }
                let step = rank.expected(me, some(&case, me));
                let handle = rank.forward(&step);
                rank.again(&step, &handle);
                rank.backward(&step, &handle);
            });
        }
    });
}

#[test]
fn steps_go_on_with_one_hardware_queue() {
    on_devices("enqueued::training::steps_go_on_with_one_hardware_queue", 1, 33, || {
        let small = |nodes: &[u32], route| {
            let case = Case::across(nodes, 3, 2);
            Case { hidden: 8, max_tokens: 6, route, ..case }
        };
        steps::<bf16>(&small(&[0; 3], Route::Direct), 20, 6);
        steps::<bf16>(&small(&[0, 0, 1], Route::Pxn), 10, 7);
    });
}

#[test]
fn gradients_of_weighted_combines_are_those_of_the_host() {
    on_devices("enqueued::training::gradients_of_weighted_combines_are_those_of_the_host", 8, 34, || {
        for (nodes, route) in
            [(&[0; 4][..], Route::Direct), (&[0, 0, 1, 1], Route::Direct), (&[0, 1, 0], Route::Pxn)]
        {
            let case = Case { weighted: true, route, ..Case::across(nodes, 6, 3) };
            steps::<bf16>(&case, 2, 8);
            steps::<f32>(&Case { hidden: 12, align: 4, ..case }, 1, 9);
        }
    });
}

#[test]
fn orders_by_rank_and_node_are_those_of_the_host() {
    on_devices("enqueued::training::orders_by_rank_and_node_are_those_of_the_host", 8, 35, || {
        let mixed = ExpertMap::from_slots(6, &[vec![5, 0], vec![1, 4], vec![3], vec![2]]).unwrap();
        for (order, wire) in [
            (SumOrder::Rank, PartialDtype::F32),
            (SumOrder::Rank, PartialDtype::Bf16),
            (SumOrder::Node, PartialDtype::F32),
            (SumOrder::Node, PartialDtype::Bf16),
        ] {
            let shapes =
                [(&[0; 4][..], Route::Direct), (&[0, 1, 1, 0], Route::Direct), (&[0, 0, 1, 1], Route::Pxn)];
            for (nodes, route) in sample(shapes, 2) {
                let case = Case { order, wire, route, ..Case::across(nodes, 6, 4) };
                let weighted = Case { map: mixed.clone(), weighted: true, ..case.clone() };
                steps::<bf16>(&case, 1, 10);
                steps::<bf16>(&weighted, 1, 11);
            }
        }
    });
}

/// Every order and route with a budget that every rank is beyond, and with one that holds all.
#[test]
fn steps_within_a_budget_are_those_of_the_host() {
    on_devices("enqueued::training::steps_within_a_budget_are_those_of_the_host", 8, 40, || {
        let shapes =
            [(&[0; 4][..], Route::Direct), (&[0, 1, 1, 0], Route::Direct), (&[0, 0, 1, 1], Route::Pxn)];
        let budgets = [(Overflow::Drop, 11, 1), (Overflow::Drop, 16, 8), (Overflow::Error, 200, 8)];
        let all = shapes.into_iter().flat_map(|shape| budgets.map(|budget| (shape, budget)));
        for ((nodes, route), (overflow, rows, align)) in sample(all, 2) {
            let mode = ReceiveMode::Budget { rows, overflow };
            let case = Case { mode, route, align, ..Case::across(nodes, 6, 4) };
            for (order, wire, weighted) in [
                (SumOrder::Expert, PartialDtype::F32, true),
                (SumOrder::Rank, PartialDtype::F32, false),
                (SumOrder::Rank, PartialDtype::Bf16, true),
                (SumOrder::Node, PartialDtype::Bf16, true),
            ] {
                steps::<bf16>(&Case { order, wire, weighted, ..case.clone() }, 1, rows.into());
            }
        }
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_in_a_step() {
    for seed in seeds(6) {
        let test = "enqueued::training::no_seed_of_the_driver_is_seen_in_a_step";
        on_devices(test, 3 + seed as u32 % 3, seed, || {
            let seed = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse().unwrap();
            for (nodes, route) in
                [(&[0; 3][..], Route::Direct), (&[0, 1, 0], Route::Direct), (&[0, 1, 0], Route::Pxn)]
            {
                steps::<bf16>(
                    &Case { align: 2, weighted: true, route, ..Case::across(nodes, 4, 2) },
                    3,
                    seed,
                );
            }
        });
    }
}

#[test]
fn steps_go_on_while_other_threads_free_load_and_launch() {
    let test = "enqueued::training::steps_go_on_while_other_threads_free_load_and_launch";
    let (locks, lazy) = (("SIDELANE_FAKE_CUDA_LOCKS", "1"), ("CUDA_MODULE_LOADING", "LAZY"));
    let full = ("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", "24");
    for queues in [1, 32] {
        on_settings(test, &[&[locks, full, lazy]], (queues, 12), &|| {
            let case = Case { hidden: 8, max_tokens: 6, weighted: true, ..Case::new(3, 4, 2) };
            disturbed([0, 1], || steps::<bf16>(&case, 8, 7));
        });
    }
}

/// Each refusal is seen by all ranks, loses nothing, and leaves the world usable.
#[test]
fn training_input_that_one_rank_lacks_is_refused_on_all() {
    on_devices("enqueued::training::training_input_that_one_rank_lacks_is_refused_on_all", 8, 36, || {
        for (nodes, route) in
            [(&[0; 3][..], Route::Direct), (&[0, 0, 1], Route::Direct), (&[0, 1, 0], Route::Pxn)]
        {
            let case = Case { weighted: true, route, max_in_flight: 3, ..Case::across(nodes, 6, 3) };
            on_each_of::<bf16>(&case, |rank, me| {
                let step = rank.expected(40 + me, 5);
                let handle = rank.forward(&step);
                let bad = me == 1;
                let told = |error: Error, own: &str| match bad {
                    true => assert!(error.to_string().contains(own), "{error}"),
                    false => assert!(
                        matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })),
                        "{error}"
                    ),
                };
                let dtype = if bad { Dtype::F16 } else { Dtype::Bf16 };
                let x = rank.lent(&step.again);
                told(rank.planned.dispatch_cached(Tensor::device(&x, dtype), &handle).unwrap_err(), "f16");
                let gradients = Tensor::device(&x, dtype);
                let refused = rank.planned.combine_backward_into(gradients, &handle, None);
                told(refused.map(drop).unwrap_err(), "f16");
                // Refused before the output of the combine is used up: `again` needs it.
                let (few, all) = (rank.room(&[0.0_f32; 3]), rank.room(&step.of_choices));
                let weights = TensorMut::device(if bad { &few } else { &all }, Dtype::F32);
                let gradients = Tensor::device(&x, Dtype::Bf16);
                let refused = rank.planned.combine_backward_into(gradients, &handle, Some(weights));
                told(refused.map(drop).unwrap_err(), "weight gradients");
                let (words, out) = (rank.lent(&step.of_weights), rank.room(&step.of_tokens));
                let short = rank.lent(&[0.0_f32; 3]);
                let given = Some(Tensor::device(if bad { &short } else { &words }, Dtype::F32));
                let (y, returned) = (handle.output().unwrap(), rank.room(&step.of_choices));
                let weights = Some(TensorMut::device(&returned, Dtype::F32));
                let planned = &mut rank.planned;
                let refused =
                    planned.dispatch_backward_into(y, given, &handle, target::<bf16>(&out), weights);
                told(refused.unwrap_err(), "row weight gradients");
                assert!(rank.seen::<u8>(&out).iter().all(|&byte| byte == 0), "sums of a refused gradient");
                let mut ids = step.input.ids.clone();
                ids[4] = if bad { 6 } else { -1 };
                let [ids, weights] = [bits(&ids), bits(&step.input.weights)].map(|bytes| rank.lent(bytes));
                let choices = Choices::Device { experts: &ids, weights: &weights };
                told(rank.planned.prepare(choices).map(drop).unwrap_err(), "expert 6");
                // A rank that has nothing to bring says so in place of each call.
                for kind in [
                    CallKind::Prepare,
                    CallKind::CachedDispatch,
                    CallKind::CombineBackward,
                    CallKind::DispatchBackward,
                ] {
                    if bad {
                        let own: Error = PlanError::TooManyTokens { tokens: 9, max: 8 }.into();
                        let along = (kind != CallKind::CombineBackward).then_some(&handle);
                        assert_eq!(rank.planned.refuse(kind, along, own.clone()), own);
                        continue;
                    }
                    let (g, choices) = (
                        Tensor::device(&x, Dtype::Bf16),
                        Choices::Device { experts: &ids, weights: &weights },
                    );
                    let planned = &mut rank.planned;
                    let refused = match kind {
                        CallKind::Prepare => planned.prepare(choices).map(drop),
                        CallKind::CachedDispatch => planned.dispatch_cached(g, &handle).map(drop),
                        CallKind::CombineBackward => {
                            planned.combine_backward_into(g, &handle, None).map(drop)
                        }
                        _ => {
                            let y = handle.output().unwrap();
                            planned.dispatch_backward_into(y, None, &handle, target::<bf16>(&out), None)
                        }
                    };
                    told(refused.unwrap_err(), "");
                }
                // A host handle is no handle of this instance.
                let host = rank.host.prepare(&Routing::new(3, vec![0, 1, 2], vec![1.0; 3]).unwrap()).unwrap();
                let along = if bad { &host } else { &handle };
                told(
                    rank.planned.dispatch_cached(Tensor::device(&x, Dtype::Bf16), along).unwrap_err(),
                    "handle",
                );
                rank.again(&step, &handle);
                rank.backward(&step, &handle);
            });
        }
    });
}

/// An output that was never made cannot be multiplied with.
#[test]
fn gradient_of_a_weighted_combine_that_was_not_made_is_refused() {
    let test = "enqueued::training::gradient_of_a_weighted_combine_that_was_not_made_is_refused";
    on_devices(test, 8, 37, || {
        on_each_of::<bf16>(&Case { weighted: true, ..Case::new(3, 6, 3) }, |rank, me| {
            let step = rank.expected(70 + me, 4);
            let (_, handle) = rank.dispatch(&step.input).unwrap();
            let g = rank.lent(&step.gradients);
            let gradients = Tensor::device(&g, Dtype::Bf16);
            let refused = rank.planned.combine_backward_into(gradients, &handle, None).unwrap_err();
            assert!(matches!(refused, Error::Call(CallError::NotKept { .. })), "{refused}");
            drop(handle);
            let handle = rank.forward(&step);
            rank.backward(&step, &handle);
        });
    });
}

/// The host runs ahead: a whole step is enqueued while its stream waits for this very thread.
#[test]
fn a_backward_pass_is_enqueued_without_a_wait_for_the_stream() {
    let test = "enqueued::training::a_backward_pass_is_enqueued_without_a_wait_for_the_stream";
    on_devices(test, 1, 38, || {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        let case = Case { weighted: true, ..Case::new(3, 6, 3) };
        on_ranks(&case.nodes, &small(), |world: World| {
            let group = world.all().unwrap();
            let (rank, me) = (&mut Rank::<bf16>::new(&group, &case), u64::from(group.rank()));
            let step = rank.expected(90 + me, 6);
            let handle = rank.forward(&step);
            let (g, of_rows) = (rank.lent(&step.gradients), rank.lent(&step.of_rows));
            let (x, returned) = (rank.room(&step.of_tokens), rank.room(&step.of_choices));
            let of_weights = rank.lent(&step.of_weights);
            let gate = PinnedMemory::new(rank.stream.context(), 8).unwrap();
            rank.stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
            let planned = &mut rank.planned;
            let rows = planned.combine_backward_into(Tensor::device(&g, Dtype::Bf16), &handle, None).unwrap();
            let given = Some(Tensor::device(&of_weights, Dtype::F32));
            let weights = Some(TensorMut::device(&returned, Dtype::F32));
            let y = Tensor::device(&of_rows, Dtype::Bf16);
            planned.dispatch_backward_into(y, given, &handle, target::<bf16>(&x), weights).unwrap();
            assert_eq!(rank.stream.is_done(), Ok(false));
            gate.word(0).unwrap().store(1, Ordering::Release);
            rank.same_rows(&rows, &step.of_sums, &step, "gradients of rows");
            assert_eq!(bits(&rank.seen::<bf16>(&x)), bits(&step.of_tokens), "gradients of tokens");
            assert_eq!(bits(&rank.seen::<f32>(&returned)), bits(&step.of_choices), "gradients of choices");
        });
        let without = FakeDriver::loaded().unwrap().counters().waits_without_cause;
        assert_eq!(without, 3, "this thread's word at each rank, and no other");
    });
}

/// Calls take turns on two streams; each new one comes behind what the other was given.
#[test]
fn calls_change_streams_and_stay_in_order() {
    on_devices("enqueued::training::calls_change_streams_and_stay_in_order", 8, 39, || {
        for (nodes, route) in [(&[0; 3][..], Route::Direct), (&[0, 0, 1], Route::Pxn)] {
            let case = Case { route, ..Case::across(nodes, 6, 3) };
            on_each_of::<bf16>(&case, |rank, me| {
                let other = Arc::new(Stream::new(rank.stream.context(), Priority::Normal).unwrap());
                let streams = [Arc::clone(&rank.stream), other];
                for (seed, next) in (0..6_u64).zip(streams.iter().cycle().skip(1)) {
                    let step = rank.expected(seed * 64 + me, some(&case, seed + me));
                    let handle = rank.forward(&step);
                    rank.planned.set_stream(next).unwrap();
                    rank.stream = Arc::clone(next);
                    rank.again(&step, &handle);
                    rank.backward(&step, &handle);
                }
            });
        }
    });
}
