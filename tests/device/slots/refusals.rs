//! Input that cannot be used: refused before anything is enqueued, and the instance goes on.

use std::sync::Arc;

use sidelane::device::{Allocation, Context, CudaGraph, DeviceRange, PinnedMemory, Reservation};
use sidelane::ep::{Choices, Handle, Tensor, TensorMut};
use sidelane::error::{CallError, DeviceError, KernelFault, MemoryError, PlanError};
use sidelane::{Dtype, Error, World};

use super::devices::stream;
use super::packed::Input;
use super::rank::{
    Case, Rank, Tensors, call, combine, content, copied_back, dispatch, experts_copy, on_nodes, on_ranks,
    options,
};
use super::{on_each, on_stand_in};
use crate::apart::Settings;

const CASE: Case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 4 };

const THREE: Case = Case { ranks: 3, ..CASE };

/// A rank with an input of two tokens at least, and their tensors.
fn with_tokens(case: Case, world: World) -> (Rank, Input, Tensors) {
    let rank = Rank::new(case, world);
    let inputs = (3..).map(|round| case.input(round, rank.me()));
    let input = inputs.into_iter().find(|input| input.tokens >= 2).unwrap();
    let tensors = rank.tensors(&input);
    (rank, input, tensors)
}

/// The rank that brings what cannot be used.
const BAD: u32 = 1;

/// What the verdict of a call says on all ranks if the bad one refuses it: on the host and, where
/// there is a handle, on the device.
fn is_refused_everywhere(rank: &Rank, handle: Option<&Handle>) {
    let refused = match rank.ep.synchronize() {
        Err(Error::Plan(PlanError::RefusedHere)) => rank.me() == BAD,
        Err(Error::Call(CallError::PeerRefused { peer: BAD, .. })) => rank.me() != BAD,
        other => panic!("rank {}: {other:?}", rank.me()),
    };
    assert!(refused, "rank {}", rank.me());
    assert_eq!(rank.ep.check(), rank.ep.synchronize());
    if let Some(handle) = handle {
        let by_bad = KernelFault::Refused { rank: BAD };
        assert_eq!(KernelFault::of(handle.status_now().0), Some(by_bad));
        assert_eq!(rank.read_even_if_refused(&handle.status().unwrap()), handle.status_now().0.to_ne_bytes());
    }
}

/// A layer of good tensors, every sum compared.
fn is_well_again(rank: &mut Rank, input: &Input, tensors: &Tensors) {
    rank.layer(tensors).unwrap();
    rank.ep.synchronize().unwrap();
    let expected = copied_back(rank.case, input);
    assert_eq!(content(&tensors.out)[..expected.len()], expected);
}

#[test]
fn bad_tensors_of_a_dispatch_are_refused_on_all_ranks() {
    on_stand_in("slots::refusals::bad_tensors_of_a_dispatch_are_refused_on_all_ranks", || {
        for nodes in [&[0, 0, 0][..], &[0, 0, 1]] {
            on_nodes(nodes, &options(), bad_tensors_of_a_dispatch);
        }
    });
}

fn bad_tensors_of_a_dispatch(world: World) {
    type Right = fn(&PlanError) -> bool;
    let (mut rank, input, tensors) = with_tokens(THREE, world);
    let many = [CASE.bytes(5), 5 * 8, 5 * 8].map(|bytes| {
        Allocation::new(&rank.context, bytes)
            .and_then(|memory| mapped(&rank.context, &memory, bytes))
            .unwrap()
    });
    let good = tensors.ranges();
    let short = good[0].part(0, 32).unwrap();
    let rows = vec![half::bf16::ONE; (input.tokens * CASE.hidden) as usize];
    let (x, choices) = call(&good);
    let bad: [(Tensor<'_>, Choices<'_>, Right); 4] = [
        (call(&many).0, call(&many).1, |error| *error == PlanError::TooManyTokens { tokens: 5, max: 4 }),
        (Tensor::device(&short, Dtype::Bf16), choices, |error| {
            matches!(error, PlanError::WrongShape { what: "tokens", seen: 16, .. })
        }),
        (Tensor::device(&good[0], Dtype::F16), choices, |error| {
            matches!(error, PlanError::WrongDtype { .. })
        }),
        (Tensor::from(&rows), choices, |error| matches!(error, PlanError::WrongPlace { .. })),
    ];
    for (nth, (bad, of_bad, expected)) in bad.into_iter().enumerate() {
        // What was there before is not taken for sums or rows.
        tensors.out.write(0, &vec![0xcb; tensors.out.len()]).unwrap();
        if rank.me() == BAD {
            let refused = rank.ep.dispatch(bad, of_bad).map(drop).unwrap_err();
            assert!(matches!(&refused, Error::Plan(error) if expected(error)), "{nth}: {refused}");
            is_refused_everywhere(&rank, None);
        } else {
            let (rows, handle) = rank.ep.dispatch(x, choices).unwrap();
            is_refused_everywhere(&rank, Some(&handle));
            let (shape, received) =
                (rows.slots().unwrap(), rank.read_even_if_refused(&rows.range().unwrap()));
            for slot in received.chunks_exact(shape.bytes() as usize) {
                assert_eq!(slot[..4], [0; 4], "no rows");
                let experts =
                    &slot[shape.experts_at() as usize..][..(CASE.max_tokens * CASE.top_k * 4) as usize];
                assert!(experts.iter().all(|&byte| byte == 0xff), "no experts");
            }
            // One answers it by a combine, another by a release.
            match rank.me() {
                0 => combine(&mut rank.ep, &handle, &tensors).unwrap(),
                _ => rank.ep.release(Some(&handle)).unwrap(),
            }
            is_refused_everywhere(&rank, Some(&handle));
            if rank.me() == 0 {
                assert_eq!(content(&tensors.out)[..CASE.bytes(tensors.count) as usize], zeros(&tensors));
            }
        }
        if nth % 2 == 1 {
            is_well_again(&mut rank, &input, &tensors);
        }
    }
    let elsewhere = rank.ep.set_stream(&stream(5)).unwrap_err();
    let other = DeviceError::OtherDevice { what: "stream", found: 5, expected: rank.me() };
    assert_eq!(elsewhere, other.into());
    is_well_again(&mut rank, &input, &tensors);
}

fn zeros(tensors: &Tensors) -> Vec<u8> {
    vec![0; CASE.bytes(tensors.count) as usize]
}

#[test]
fn bad_tensors_of_a_combine_are_refused_on_all_ranks() {
    on_stand_in("slots::refusals::bad_tensors_of_a_combine_are_refused_on_all_ranks", || {
        for nodes in [&[0, 0, 0][..], &[0, 0, 1], &[0, 1, 2]] {
            on_nodes(nodes, &options(), bad_tensors_of_a_combine);
        }
    });
}

fn bad_tensors_of_a_combine(world: World) {
    let (mut rank, input, tensors) = with_tokens(THREE, world);
    let old = rank.layer(&tensors).unwrap();
    let mut other = THREE.builder(&rank.group).on(&rank.stream).build().unwrap();
    let (_, foreign) = dispatch(&mut other, &tensors).unwrap();
    other.release(None).unwrap();
    let short = tensors.out.range().part(0, 16).unwrap();
    let on_host = vec![half::bf16::ONE; 8];
    let out = tensors.out();
    for nth in 0..6 {
        tensors.out.write(0, &vec![0xcb; tensors.out.len()]).unwrap();
        let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
        experts_copy(&rank.stream, &rows, &handle).unwrap();
        let to = || TensorMut::device(&out, Dtype::Bf16);
        if rank.me() == BAD {
            let y = handle.output().unwrap();
            let refused = match nth {
                0 => rank.ep.combine_into(y, &handle, TensorMut::device(&short, Dtype::Bf16)),
                1 => rank.ep.combine_into(Tensor::from(&on_host), &handle, to()),
                2 => rank.ep.combine_into(Tensor::device(&out, Dtype::F16), &handle, to()),
                3 => rank.ep.combine_into(old.output().unwrap(), &handle, to()),
                4 => combine(&mut rank.ep, &old, &tensors),
                _ => rank.ep.start_combine(y, &foreign).map(drop),
            };
            let right: fn(&Error) -> bool = match nth {
                0 => |error| matches!(error, Error::Plan(PlanError::WrongShape { .. })),
                1 => |error| matches!(error, Error::Plan(PlanError::WrongPlace { .. })),
                2 => |error| matches!(error, Error::Plan(_)),
                3 | 4 => |error| matches!(error, Error::Call(CallError::WrongOutput { .. })),
                _ => |error| matches!(error, Error::Call(CallError::ForeignHandle { .. })),
            };
            let refused = refused.unwrap_err();
            assert!(right(&refused), "{nth}: {refused}");
        } else {
            combine(&mut rank.ep, &handle, &tensors).unwrap();
        }
        is_refused_everywhere(&rank, Some(&handle));
        if rank.me() != BAD {
            assert_eq!(content(&tensors.out)[..CASE.bytes(tensors.count) as usize], zeros(&tensors), "{nth}");
        }
        if nth % 2 == 1 {
            is_well_again(&mut rank, &input, &tensors);
        }
    }
    is_well_again(&mut rank, &input, &tensors);
}

#[test]
fn refusal_amid_a_capture_is_of_this_rank_alone() {
    on_stand_in("slots::refusals::refusal_amid_a_capture_is_of_this_rank_alone", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(CASE, world);
            let (good, stream) = (tensors.ranges(), rank.stream.clone());
            let short = good[0].part(0, 32).unwrap();
            let graph = CudaGraph::capture(&stream, || {
                if rank.me() == BAD {
                    let (_, choices) = call(&good);
                    let refused = rank.ep.dispatch(Tensor::device(&short, Dtype::Bf16), choices).map(drop);
                    assert!(matches!(refused, Err(Error::Plan(PlanError::WrongShape { .. }))), "{refused:?}");
                }
                // It can be captured again.
                rank.layer(&tensors).map(drop)
            });
            let graph = graph.unwrap();
            for _ in 0..3 {
                graph.launch(&stream).unwrap();
            }
            rank.ep.synchronize().unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

#[test]
fn bad_masks_are_refused_on_all_ranks_and_the_old_one_stays() {
    on_stand_in("slots::refusals::bad_masks_are_refused_on_all_ranks_and_the_old_one_stays", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(CASE, world);
            let me = rank.me();
            let differ = rank.ep.mask(&[true, me == 0]).unwrap_err();
            let what = "the mask";
            assert!(
                matches!(differ, Error::Call(CallError::ConfigsDiffer { what: seen, .. }) if seen == what),
                "{differ}"
            );
            match (me, rank.ep.mask(if me == 1 { &[true] } else { &[true, false] }).unwrap_err()) {
                (1, Error::Plan(PlanError::BadParameter { parameter: "ranks of the mask", .. })) => {}
                (0, Error::Call(CallError::ConfigsDiffer { peer: 1, .. })) => {}
                (_, error) => panic!("rank {me}: {error}"),
            }
            // Between a dispatch and its combine.
            let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            let early = rank.ep.mask(&[true, false]).unwrap_err();
            assert!(matches!(early, Error::Call(CallError::OutOfTurn { call: "mask", .. })), "{early}");
            experts_copy(&rank.stream, &rows, &handle).unwrap();
            combine(&mut rank.ep, &handle, &tensors).unwrap();
            rank.ep.synchronize().unwrap();
            assert_eq!(rank.ep.active(), [true, true]);
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

#[test]
fn stream_of_a_context_before_a_reset_is_refused() {
    on_stand_in("slots::refusals::stream_of_a_context_before_a_reset_is_refused", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let device = world.rank();
            // To drop it would release the context of another, as its own is gone.
            let before = std::mem::ManuallyDrop::new(stream(device));
            end_context(device);
            let mut rank = Rank::new(CASE, world);
            let refused = rank.ep.set_stream(&before).unwrap_err();
            assert_eq!(refused, DeviceError::OtherContext { device }.into());
            // Of the context that the device has now.
            rank.ep.set_stream(&stream(device)).unwrap();
        });
    });
}

/// Releases the context of a device although somebody has it, as a reset does.
fn end_context(device: u32) {
    type Release = unsafe extern "C" fn(i32) -> u32;
    let library = stand_in_cuda::install().unwrap().join("libcuda.so.1");
    // SAFETY: the driver's library, and a function of the driver with this type.
    let driver = unsafe { libloading::Library::new(library) }.unwrap();
    // SAFETY: as above.
    let release = unsafe { driver.get::<Release>("cuDevicePrimaryCtxRelease_v2") }.unwrap();
    // SAFETY: nothing of the context is used from now on.
    assert_eq!(unsafe { release(device as i32) }, 0);
}

#[test]
fn calls_out_of_turn_are_refused_and_nothing_is_lost() {
    on_stand_in("slots::refusals::calls_out_of_turn_are_refused_and_nothing_is_lost", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(CASE, world);
            let turn = |call, expected| Error::Call(CallError::OutOfTurn { call, expected });
            let old = rank.layer(&tensors).unwrap();
            let again = combine(&mut rank.ep, &old, &tensors).unwrap_err();
            assert_eq!(again, turn("start_combine", "start_dispatch"));
            assert_eq!(rank.ep.release(Some(&old)).unwrap_err(), turn("release", "start_dispatch"));

            let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            let second = dispatch(&mut rank.ep, &tensors).unwrap_err();
            assert_eq!(second, turn("start_dispatch", "start_combine or release"));
            let mut other = CASE.builder(&rank.group).on(&rank.stream).build().unwrap();
            let foreign = combine(&mut other, &handle, &tensors).unwrap_err();
            assert!(matches!(foreign, Error::Call(CallError::ForeignHandle { .. })), "{foreign}");

            experts_copy(&rank.stream, &rows, &handle).unwrap();
            combine(&mut rank.ep, &handle, &tensors).unwrap();
            rank.ep.synchronize().unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

#[test]
fn unusable_out_of_a_second_half_uses_the_rows_up() {
    on_stand_in("slots::refusals::unusable_out_of_a_second_half_uses_the_rows_up", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(CASE, world);
            let short = tensors.out.range().part(0, 16).unwrap();
            let unusable = || TensorMut::device(&short, Dtype::Bf16);
            let is_shape = |error: &Error| matches!(error, Error::Plan(PlanError::WrongShape { .. }));
            // Rows have returned: it is too late to refuse them.
            let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            let started = rank.ep.start_combine(handle.output().unwrap(), &handle).unwrap();
            let refused = started.finish(unusable()).unwrap_err();
            assert!(is_shape(&refused), "{refused}");
            let again = combine(&mut rank.ep, &handle, &tensors).unwrap_err();
            assert!(matches!(again, Error::Call(CallError::OutOfTurn { .. })), "{again}");

            tensors.out.write(0, &vec![0xcb; tensors.out.len()]).unwrap();
            rank.layer(&tensors).unwrap();
            rank.ep.synchronize().unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

#[test]
fn outputs_elsewhere_are_copied_and_counted() {
    on_stand_in("slots::refusals::outputs_elsewhere_are_copied_and_counted", || {
        on_ranks(CASE.ranks, &options(), |world| {
            let (mut rank, input, tensors) = with_tokens(CASE, world);
            let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            let bytes = handle.output().unwrap().range().unwrap().len();
            let memory = Allocation::new(&rank.context, bytes).unwrap();
            let elsewhere = mapped(&rank.context, &memory, bytes).unwrap();
            experts_copy(&rank.stream, &rows, &handle).unwrap();
            let (y, whole) = (handle.output().unwrap(), elsewhere.span(0, bytes).unwrap());
            rank.stream.copy(whole, y.range().unwrap().span(0, bytes).unwrap()).unwrap();
            // What peers read is not what was written in place.
            let zeros = vec![0; bytes as usize];
            let staging = PinnedMemory::new(&rank.context, zeros.len()).unwrap();
            staging.write(0, &zeros).unwrap();
            let (to, from) = (y.range().unwrap(), staging.range());
            rank.stream.copy(to.span(0, bytes).unwrap(), from.span(0, bytes).unwrap()).unwrap();
            let out = tensors.out();
            let (rows, out) = (Tensor::device(&elsewhere, Dtype::Bf16), TensorMut::device(&out, Dtype::Bf16));
            rank.ep.combine_into(rows, &handle, out).unwrap();
            assert_eq!(handle.copied_bytes(), bytes);
            rank.ep.synchronize().unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

/// Memory of a device.
fn mapped(context: &Arc<Context>, memory: &Arc<Allocation>, bytes: u64) -> Result<DeviceRange, DeviceError> {
    Reservation::new(context, 1, memory.bytes())?.map(0, memory, &[context.device()])?.part(0, bytes)
}

#[test]
fn missing_expert_of_one_rank_is_refused_on_all_ranks_by_their_streams() {
    on_stand_in(
        "slots::refusals::missing_expert_of_one_rank_is_refused_on_all_ranks_by_their_streams",
        || {
            for nodes in [&[0, 0, 0][..], &[0, 0, 1]] {
                on_nodes(nodes, &options(), |world| {
                    let (mut rank, input, tensors) = with_tokens(THREE, world);
                    let mut wrong = THREE.input(8, 0);
                    wrong.tokens = 3;
                    wrong.x = (0..CASE.bytes(3)).map(|i| i as u8 % 60).collect();
                    wrong.experts = vec![0, 3, 1, -1, 2, 3];
                    wrong.weights = vec![1.0; 6];
                    if rank.me() == BAD {
                        wrong.experts[4] = 4;
                    }
                    let of_wrong = rank.tensors(&wrong);
                    for _ in 0..2 {
                        of_wrong.out.write(0, &vec![0xcb; of_wrong.out.len()]).unwrap();
                        let handle = rank.layer(&of_wrong).unwrap();
                        if rank.me() == BAD {
                            let fault = KernelFault::ExpertOutOfRange { token: 2 };
                            let error = DeviceError::Fault { device: BAD, fault };
                            assert_eq!(rank.ep.synchronize(), Err(error.into()));
                            assert_eq!(KernelFault::of(handle.status_now().0), Some(fault));
                        } else {
                            is_refused_everywhere(&rank, Some(&handle));
                        }
                        assert_eq!(content(&of_wrong.out)[..CASE.bytes(3) as usize], zeros(&of_wrong));
                        is_well_again(&mut rank, &input, &tensors);
                    }
                });
            }
        },
    );
}

#[test]
fn differing_or_unusable_settings_are_refused_on_every_rank() {
    on_stand_in("slots::refusals::differing_or_unusable_settings_are_refused_on_every_rank", || {
        on_ranks(2, &options(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let odd = |yes: u32, no: u32| if world.rank() == 1 { yes } else { no };
            let case = Case { max_tokens: odd(8, 4), ..CASE };
            let differ = case.builder(&group).on(&stream).build();
            assert!(
                matches!(differ, Err(Error::Call(CallError::ConfigsDiffer { what: "max_tokens", .. }))),
                "{differ:?}"
            );
            let case = Case { hidden: odd(15, 16), ..CASE };
            let unusable = case.builder(&group).on(&stream).build().map(drop);
            let expected = match world.rank() {
                1 => matches!(
                    unusable,
                    Err(Error::Plan(PlanError::BadParameter { parameter: "bytes of a row", .. }))
                ),
                _ => matches!(unusable, Err(Error::Call(CallError::ConfigsDiffer { .. }))),
            };
            assert!(expected, "{unusable:?}");
        });
    });
}

/// Builds on two ranks, and compares what comes of it.
fn refused(test: &str, settings: Settings<'_>, max_tokens: u32, expected: impl Fn(&Error) -> bool + Sync) {
    on_each(test, &[settings], || {
        on_ranks(2, &options(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let case = Case { max_tokens, ..CASE };
            let refused = case.builder(&group).on(&stream).build().unwrap_err();
            assert!(expected(&refused), "{refused}");
        });
    });
}

#[test]
fn devices_that_do_not_reach_each_other_are_refused() {
    let test = "slots::refusals::devices_that_do_not_reach_each_other_are_refused";
    refused(test, &[("SIDELANE_FAKE_CUDA_PEERS", "0|1")], 4, |error| {
        matches!(error, Error::Device(DeviceError::Call { call: "cuMemSetAccess", .. }))
    });
}

#[test]
fn a_device_without_so_much_memory_is_refused() {
    let test = "slots::refusals::a_device_without_so_much_memory_is_refused";
    refused(
        test,
        &[("SIDELANE_FAKE_CUDA_MEMORY", "4194304")],
        100_000,
        |error| matches!(error, Error::Device(DeviceError::OutOfMemory { bytes, .. }) if *bytes > 4 << 20),
    );
}

#[test]
fn driver_too_old_for_flags_beside_mapped_memory_is_refused() {
    let test = "slots::refusals::driver_too_old_for_flags_beside_mapped_memory_is_refused";
    refused(test, &[("SIDELANE_FAKE_CUDA_DRIVER", "12040")], 4, |error| matches!(error, Error::Device(_)));
}

#[test]
fn what_one_rank_lacks_the_others_are_told() {
    let test = "slots::refusals::what_one_rank_lacks_the_others_are_told";
    on_each(test, &[&[("SIDELANE_FAKE_CUDA_MEMORY", "67108864")]], || {
        on_ranks(2, &options(), |world| {
            // A device is asked for what it has not, on one rank alone: the other one has nothing
            // against it.
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let _hog = (world.rank() == 1).then(|| hog(stream.context()));
            let case = Case { max_tokens: 30_000, ..CASE };
            let refused = case.builder(&group).on(&stream).build().unwrap_err();
            match world.rank() {
                1 => assert!(matches!(refused, Error::Device(DeviceError::OutOfMemory { .. })), "{refused}"),
                _ => assert_eq!(refused, MemoryError::NotUsable { rank: 1 }.into()),
            }
        });
    });
}

/// Takes nearly all memory of a device.
fn hog(context: &Arc<Context>) -> Arc<Allocation> {
    Allocation::new(context, 60 << 20).unwrap()
}

#[test]
fn without_batches_copies_are_reported_as_single_ones() {
    let test = "slots::refusals::without_batches_copies_are_reported_as_single_ones";
    on_each(test, &[&[("SIDELANE_FAKE_CUDA_DRIVER", "12060")]], || {
        on_ranks(2, &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            for report in rank.rounds(5..6, 1) {
                assert_eq!((report.enqueued.batches, report.enqueued.single_copies), (0, 1));
            }
        });
    });
}
