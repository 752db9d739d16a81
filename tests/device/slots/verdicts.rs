//! Verdicts of refusals: each names its own call and rank, however far the host is ahead.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidelane::device::{CudaGraph, PinnedMemory};
use sidelane::ep::{Tensor, TensorMut};
use sidelane::error::{CallError, DeviceError, KernelFault, PlanError};
use sidelane::{Dtype, Error, World};

use super::devices::stream;
use super::on_fake_driver;
use super::packed::Input;
use super::rank::{
    Case, Rank, Tensors, call, combine, content, copied_back, dispatch, experts_copy, on_nodes, on_ranks,
    options, until,
};
use super::replays::full;

const CASE: Case = Case { ranks: 3, experts: 4, top_k: 2, hidden: 16, max_tokens: 4 };

/// The rank that refuses.
const BAD: u32 = 1;

/// A rank, an input that uses all tokens, and its tensors.
fn with_tokens(world: World) -> (Rank, Input, Tensors) {
    let rank = Rank::new(CASE, world);
    let input = full(CASE, 3, rank.me());
    let tensors = rank.tensors(&input);
    (rank, input, tensors)
}

/// A dispatch of tokens that do not lie where they should, which this rank refuses.
fn refuse_dispatch(rank: &mut Rank, tensors: &Tensors) {
    let good = tensors.ranges();
    let short = good[0].part(0, 32).unwrap();
    let refused = rank.ep.dispatch(Tensor::device(&short, Dtype::Bf16), call(&good).1).map(drop);
    assert!(matches!(refused, Err(Error::Plan(PlanError::WrongShape { .. }))), "{refused:?}");
}

/// A layer of good tensors, every sum compared.
fn is_well(rank: &mut Rank, input: &Input, tensors: &Tensors) {
    rank.layer(tensors).unwrap();
    rank.ep.synchronize().unwrap();
    assert_eq!(content(&tensors.out), copied_back(CASE, input));
}

/// That a call of this number is refused by the bad rank, as far as a rank can know.
fn is_refused(rank: &Rank, number: u64) {
    let expected = match rank.me() {
        BAD => PlanError::RefusedHere.into(),
        _ => Error::from(CallError::PeerRefused { call: number, peer: BAD }),
    };
    assert_eq!(rank.ep.check(), Err(expected));
}

#[test]
fn bad_id_in_one_replay_is_reported_with_its_own_call() {
    on_fake_driver("slots::verdicts::bad_id_in_one_replay_is_reported_with_its_own_call", || {
        for nodes in [[0, 0, 0], [0, 0, 1]] {
            on_nodes(&nodes, &options(), |world| {
                let (mut rank, input, mut tensors) = with_tokens(world);
                is_well(&mut rank, &input, &tensors);
                let (stream, out, me) = (rank.stream.clone(), tensors.out.clone(), rank.me());
                let layer = CudaGraph::capture(&stream, || rank.layer(&tensors).map(drop)).unwrap();
                // The host knows of two calls, and the stream makes more.
                for number in 2..8 {
                    let (mut input, bad) = (full(CASE, number, me), number % 3 == 2);
                    if bad && me == BAD {
                        input.experts[4] = CASE.experts as i32;
                    }
                    tensors = tensors.with(&input);
                    out.write(0, &vec![0xcb; out.len()]).unwrap();
                    layer.launch(&stream).unwrap();
                    let ended = rank.ep.synchronize();
                    if !bad {
                        ended.unwrap();
                        assert_eq!(content(&out), copied_back(CASE, &input), "call {number} at {me}");
                    } else {
                        let fault = KernelFault::ExpertOutOfRange { token: 2 };
                        let expected = match me {
                            BAD => Error::from(DeviceError::Fault { device: BAD, fault }),
                            _ => CallError::PeerRefused { call: number, peer: BAD }.into(),
                        };
                        assert_eq!(ended, Err(expected));
                        assert_eq!(content(&out), vec![0; out.len()], "call {number} at {me}");
                    }
                }
            });
        }
    });
}

#[test]
fn verdict_names_its_call_though_the_host_is_ahead() {
    on_fake_driver("slots::verdicts::verdict_names_its_call_though_the_host_is_ahead", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(world);
            is_well(&mut rank, &input, &tensors);
            if rank.me() == BAD {
                refuse_dispatch(&mut rank, &tensors);
            } else {
                rank.layer(&tensors).unwrap();
            }
            let gate = PinnedMemory::new(&rank.context, 8).unwrap();
            rank.stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
            for _ in 0..3 {
                rank.layer(&tensors).unwrap();
            }
            until(|| rank.ep.check().is_err());
            is_refused(&rank, 2);
            gate.word(0).unwrap().store(1, Ordering::Release);
            rank.ep.synchronize().unwrap();
            assert_eq!(content(&tensors.out), copied_back(CASE, &input));
        });
    });
}

#[test]
fn ranks_that_refuse_one_call_report_their_own_refusals() {
    on_fake_driver("slots::verdicts::ranks_that_refuse_one_call_report_their_own_refusals", || {
        for nodes in [[0, 0, 0], [0, 0, 1]] {
            on_nodes(&nodes, &options(), two_ranks_refuse);
        }
    });
}

fn two_ranks_refuse(world: World) {
    let (mut rank, input, tensors) = with_tokens(world);
    let refuses = rank.me() >= BAD;
    let is_refused = |rank: &Rank, number| match refuses {
        // Each of them by itself, and the lowest one elsewhere.
        true => assert_eq!(rank.ep.synchronize(), Err(PlanError::RefusedHere.into())),
        false => {
            let expected = CallError::PeerRefused { call: number, peer: BAD };
            assert_eq!(rank.ep.synchronize(), Err(expected.into()));
            assert_eq!(content(&tensors.out), vec![0; tensors.out.len()]);
        }
    };
    for first in [1, 4] {
        if refuses {
            refuse_dispatch(&mut rank, &tensors);
        } else {
            rank.layer(&tensors).unwrap();
        }
        is_refused(&rank, first);

        let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
        experts_copy(&rank.stream, &rows, &handle).unwrap();
        if refuses {
            let (y, short) = (handle.output().unwrap(), tensors.out.range().part(0, 16).unwrap());
            let refused = rank.ep.combine_into(y, &handle, TensorMut::device(&short, Dtype::Bf16));
            assert!(matches!(refused, Err(Error::Plan(PlanError::WrongShape { .. }))), "{refused:?}");
        } else {
            combine(&mut rank.ep, &handle, &tensors).unwrap();
        }
        is_refused(&rank, first + 1);
        let own = KernelFault::Refused { rank: rank.me().max(BAD) };
        assert_eq!(KernelFault::of(handle.status_now().0), Some(own));
        is_well(&mut rank, &input, &tensors);
    }
}

#[test]
fn stream_of_a_dropped_instance_awaits_answers_to_its_refusal() {
    on_fake_driver("slots::verdicts::stream_of_a_dropped_instance_awaits_answers_to_its_refusal", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(world);
            let (refused, aside) = (Arc::clone(&rank.stream), stream(rank.me()));
            let other = CASE.builder(&rank.group).on(&aside).build().unwrap();
            let gone_on = PinnedMemory::new(&rank.context, 8).unwrap();
            let handle = match rank.me() {
                BAD => {
                    refuse_dispatch(&mut rank, &tensors);
                    None
                }
                _ => Some(dispatch(&mut rank.ep, &tensors).unwrap().1),
            };
            let mut before = std::mem::replace(&mut rank.ep, other);
            rank.stream = aside;
            if let Some(handle) = &handle {
                is_well(&mut rank, &input, &tensors);
                rank.group.gather(&[]).unwrap();
                combine(&mut before, handle, &tensors).unwrap();
            } else {
                drop(before);
                refused.write(gone_on.range().word::<u32>(0).unwrap(), 1).unwrap();
                // All ranks make a layer of another instance before they answer.
                is_well(&mut rank, &input, &tensors);
                assert_eq!(content(&gone_on)[0], 0, "the stream does not wait for the answers");
                rank.group.gather(&[]).unwrap();
                until(|| content(&gone_on)[0] == 1);
            }
            refused.synchronize().unwrap();
        });
    });
}

#[test]
fn capture_amid_a_refusal_is_refused_until_a_release() {
    on_fake_driver("slots::verdicts::capture_amid_a_refusal_is_refused_until_a_release", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(world);
            let stream = rank.stream.clone();
            if rank.me() == BAD {
                refuse_dispatch(&mut rank, &tensors);
                let early = CudaGraph::capture(&stream, || rank.layer(&tensors).map(drop)).map(drop);
                let expected = "release or start_dispatch outside of a capture, after a refusal";
                assert_eq!(early, Err(CallError::OutOfTurn { call: "start_dispatch", expected }.into()));
                rank.ep.release(None).unwrap();
            } else {
                let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
                rank.ep.release(Some(&handle)).unwrap();
            }
            stream.synchronize().unwrap();
            is_refused(&rank, 1);
            let graph = CudaGraph::capture(&stream, || rank.layer(&tensors).map(drop)).unwrap();
            for _ in 0..3 {
                tensors.out.write(0, &vec![0xcb; tensors.out.len()]).unwrap();
                graph.launch(&stream).unwrap();
                rank.ep.synchronize().unwrap();
                assert_eq!(content(&tensors.out), copied_back(CASE, &input));
            }
        });
    });
}
