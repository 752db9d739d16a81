//! Input that cannot be used: refused before anything is enqueued, and the exchange goes on.

use std::sync::Arc;

use sidelane::Error;
use sidelane::device::{Allocation, Context, Stream};
use sidelane::ep::StreamTokens;
use sidelane::error::{CallError, DeviceError, Fault, MemoryError, PlanError};

use super::rank::{Case, Rank, content, context, copied_back, on_ranks, options};
use super::{on_each, on_stand_in};

const CASE: Case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 4 };

#[test]
fn calls_out_of_turn_and_tensors_that_do_not_fit_are_refused_and_nothing_is_lost() {
    let test =
        "stream::refusals::calls_out_of_turn_and_tensors_that_do_not_fit_are_refused_and_nothing_is_lost";
    on_stand_in(test, || {
        on_ranks(CASE.ranks, &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            let mut input = CASE.input(3, rank.me());
            while input.tokens < 2 {
                input = CASE.input(u64::from(input.tokens) + 17, rank.me() + 7);
            }
            let tensors = rank.tensors(&input);
            let good = tensors.tokens();
            let (exchange, stream) = (&mut rank.exchange, &rank.stream);
            let turn = |call, expected| Err(Error::Call(CallError::OutOfTurn { call, expected }));
            assert_eq!(exchange.start_combine(stream), turn("start_combine", "start_dispatch"));
            assert_eq!(exchange.finish_dispatch(stream), turn("finish_dispatch", "start_dispatch"));
            assert_eq!(exchange.release(stream), turn("release", "start_dispatch"));

            let many = exchange.dispatch(stream, &StreamTokens { count: 5, ..good });
            assert_eq!(many, Err(PlanError::TooManyTokens { tokens: 5, max: 4 }.into()));
            let short = tensors.rows.range().span(0, 33).unwrap();
            let small = exchange.dispatch(stream, &StreamTokens { rows: short, count: 2, ..good });
            let too_small = DeviceError::TooSmall { kernel: "pack", what: "x", given: 33, needed: 64 };
            assert_eq!(small, Err(too_small.into()));
            let elsewhere = Stream::new(&context(5), sidelane::device::Priority::Usual).unwrap();
            let foreign = exchange.dispatch(&elsewhere, &good);
            assert!(matches!(foreign, Err(Error::Device(_))), "{foreign:?}");

            exchange.dispatch(stream, &good).unwrap();
            assert_eq!(exchange.dispatch(stream, &good), turn("start_dispatch", "start_combine or release"));
            rank.experts_copy();
            let (exchange, stream) = (&mut rank.exchange, &rank.stream);
            exchange.start_combine(stream).unwrap();
            let refused = exchange.finish_combine(stream, tensors.out.range().span(0, 16).unwrap());
            assert!(matches!(refused, Err(Error::Device(DeviceError::TooSmall { .. }))), "{refused:?}");
            exchange.finish_combine(stream, tensors.out()).unwrap();
            exchange.synchronize(stream).unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}

#[test]
fn an_expert_that_does_not_exist_is_named_and_gives_zeros_at_its_rank_alone() {
    on_stand_in(
        "stream::refusals::an_expert_that_does_not_exist_is_named_and_gives_zeros_at_its_rank_alone",
        || {
            on_ranks(CASE.ranks, &options(), |world| {
                let mut rank = Rank::new(CASE, world);
                let mut input = CASE.input(8, 0);
                input.tokens = 3;
                input.x = (0..CASE.bytes(3)).map(|i| i as u8 % 60).collect();
                input.experts = vec![0, 3, 1, -1, 2, 3];
                input.weights = vec![1.0; 6];
                if rank.me() == 1 {
                    input.experts[4] = 4;
                }
                let tensors = rank.tensors(&input);
                rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
                rank.experts_copy();
                rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
                let done = rank.exchange.synchronize(&rank.stream);
                let out = content(&tensors.out);
                if rank.me() == 1 {
                    let fault = Fault::ExpertOutOfRange { token: 2 };
                    assert_eq!(done, Err(DeviceError::Fault { device: 1, fault }.into()));
                    assert_eq!(out[..CASE.bytes(3) as usize], vec![0; CASE.bytes(3) as usize]);
                } else {
                    assert_eq!(done, Ok(()));
                    assert_eq!(out[..CASE.bytes(3) as usize], copied_back(CASE, &input));
                }
            });
        },
    );
}

#[test]
fn settings_that_differ_or_cannot_be_used_are_refused_on_every_rank() {
    on_stand_in("stream::refusals::settings_that_differ_or_cannot_be_used_are_refused_on_every_rank", || {
        on_ranks(2, &options(), |world| {
            let (group, context) = (world.all().unwrap(), context(world.rank()));
            let odd = |yes: u32, no: u32| if world.rank() == 1 { yes } else { no };
            let differ = CASE.builder(&group, &context).max_tokens(odd(8, 4)).build();
            assert!(
                matches!(differ, Err(Error::Call(CallError::ConfigsDiffer { what: "max_tokens", .. }))),
                "{differ:?}"
            );
            let unusable = CASE.builder(&group, &context).hidden(odd(15, 16)).build().map(drop);
            let expected = match world.rank() {
                1 => matches!(
                    unusable,
                    Err(Error::Plan(PlanError::BadParameter { parameter: "row_bytes", .. }))
                ),
                _ => matches!(unusable, Err(Error::Call(CallError::ConfigsDiffer { .. }))),
            };
            assert!(expected, "{unusable:?}");
            let bytes = CASE.builder(&group, &context).dtype(sidelane::Dtype::Bytes).build().map(drop);
            assert!(matches!(bytes, Err(Error::Plan(PlanError::NoArithmetic { .. }))), "{bytes:?}");
        });
    });
}

/// Builds on two ranks, and compares what comes of it.
fn refused(
    test: &str,
    settings: super::Settings<'_>,
    max_tokens: u32,
    expected: impl Fn(&Error) -> bool + Sync,
) {
    on_each(test, &[settings], || {
        on_ranks(2, &options(), |world| {
            let (group, context) = (world.all().unwrap(), context(world.rank()));
            let refused = CASE.builder(&group, &context).max_tokens(max_tokens).build().unwrap_err();
            assert!(expected(&refused), "{refused}");
        });
    });
}

#[test]
fn devices_that_do_not_reach_each_other_are_refused() {
    let test = "stream::refusals::devices_that_do_not_reach_each_other_are_refused";
    refused(test, &[("SIDELANE_STAND_IN_PEERS", "0|1")], 4, |error| {
        matches!(error, Error::Device(DeviceError::Call { call: "cuMemSetAccess", .. }))
    });
}

#[test]
fn a_device_without_so_much_memory_is_refused() {
    let test = "stream::refusals::a_device_without_so_much_memory_is_refused";
    refused(
        test,
        &[("SIDELANE_STAND_IN_MEMORY", "4194304")],
        100_000,
        |error| matches!(error, Error::Device(DeviceError::OutOfMemory { bytes, .. }) if *bytes > 4 << 20),
    );
}

#[test]
fn a_driver_that_is_too_old_for_flags_beside_mapped_memory_is_refused() {
    let test = "stream::refusals::a_driver_that_is_too_old_for_flags_beside_mapped_memory_is_refused";
    refused(test, &[("SIDELANE_STAND_IN_DRIVER", "12040")], 4, |error| matches!(error, Error::Device(_)));
}

#[test]
fn kernels_that_are_loaded_at_their_first_launch_are_refused() {
    let test = "stream::refusals::kernels_that_are_loaded_at_their_first_launch_are_refused";
    let lazy = Error::from(DeviceError::LazyLoading);
    refused(test, &[("CUDA_MODULE_LOADING", "LAZY")], 4, |error| *error == lazy);
}

#[test]
fn what_one_rank_lacks_the_others_are_told() {
    let test = "stream::refusals::what_one_rank_lacks_the_others_are_told";
    on_each(test, &[&[("SIDELANE_STAND_IN_MEMORY", "67108864")]], || {
        on_ranks(2, &options(), |world| {
            // A device is asked for what it has not, on one rank alone: the other one has nothing against it.
            let (group, context) = (world.all().unwrap(), context(world.rank()));
            let _hog = (world.rank() == 1).then(|| hog(&context));
            let refused = CASE.builder(&group, &context).max_tokens(30_000).build().unwrap_err();
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
fn without_batches_copies_are_single_ones_and_the_report_says_so() {
    let test = "stream::refusals::without_batches_copies_are_single_ones_and_the_report_says_so";
    on_each(test, &[&[("SIDELANE_STAND_IN_DRIVER", "12060")]], || {
        on_ranks(2, &options(), |world| {
            let mut rank = Rank::new(CASE, world);
            let report = rank.exchange.report();
            assert_eq!((report.dispatch.batches, report.dispatch.single_copies), (0, 1));
            let input = CASE.input(5, rank.me());
            let tensors = rank.tensors(&input);
            rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
            rank.experts_copy();
            rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
            rank.exchange.synchronize(&rank.stream).unwrap();
            let expected = copied_back(CASE, &input);
            assert_eq!(content(&tensors.out)[..expected.len()], expected);
        });
    });
}
