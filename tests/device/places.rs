//! One `ExpertParallel` on the host and on devices: refusals of the other place, and of what an
//! executor does not have.

use half::bf16;
use sidelane::device::{DeviceRange, Priority};
use sidelane::dtype::PartialDtype;
use sidelane::ep::{
    CallExecutor, Choices, ExpertParallelBuilder, ExpertRows, Feature, Graphs, Handle, Place, Tensor,
    TensorMut,
};
use sidelane::error::{CallError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, Group};

use crate::apart::each_with_kernels;
use crate::devices::{Memory, stream};
use crate::enqueued::rank::{Case, Input, Rank, call, target};
use crate::support::{on_ranks, small, tokens};

const NODES: [u32; 3] = [0, 0, 1];
/// The rank that brings what cannot be used.
const BAD: u32 = 1;
const MAX_TOKENS: u32 = 8;

fn input(me: u32) -> Input<bf16> {
    tokens(me.into(), 5, 16, 2, 4)
}

/// On the bad rank, a refusal of a tensor of the other place; on the others, one of that rank.
fn is_refused(me: u32, error: &Error) {
    match error {
        Error::Plan(PlanError::WrongPlace { .. }) if me == BAD => {}
        Error::Call(CallError::PeerRefused { peer: BAD, .. }) if me != BAD => {}
        other => panic!("rank {me}: {other}"),
    }
}

/// A rank on the host and, with exact sizes, on a device.
fn both(test: &str, body: impl Fn(&Group, &mut Rank<bf16>) + Sync) {
    each_with_kernels(&format!("places::{test}"), &[&[]], || {
        on_ranks(&NODES, &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::new(&group, &Case::across(&NODES, 4, 2));
            body(&group, &mut rank);
            rank.round(&input(world.rank()));
        });
    });
}

#[test]
fn host_tensor_on_a_device_is_refused_on_all_ranks() {
    both("host_tensor_on_a_device_is_refused_on_all_ranks", |group, rank| {
        let me = group.rank();
        let (mine, bad) = (input(me), me == BAD);
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let tensors = rank.put(&mine);
        let (x, choices) = call::<bf16>(&tensors);
        let rows = if bad { Tensor::from(&mine.x) } else { x };
        is_refused(me, &rank.planned.dispatch(rows, choices).map(drop).unwrap_err());
        let routed = if bad { Choices::from(&routing) } else { choices };
        is_refused(me, &rank.planned.dispatch(x, routed).map(drop).unwrap_err());
        rank.round(&mine);

        let (rows, handle) = rank.dispatch(&mine).unwrap();
        let on_device = rows.range().unwrap();
        let made = vec![bf16::ONE; rows.len() as usize * 16];
        let out = rank.out.part(tensors[0].len());
        let y = if bad { Tensor::from(&made) } else { Tensor::device(&on_device, Dtype::Bf16) };
        is_refused(me, &rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap_err());
        is_refused(me, &handle.return_report().unwrap_err());
        let mut sums = vec![bf16::ONE; mine.x.len()];
        let into = if bad { TensorMut::from(&mut sums) } else { target::<bf16>(&out) };
        is_refused(me, &rank.planned.combine_into(handle.output().unwrap(), &handle, into).unwrap_err());
        is_refused(me, &handle.return_report().unwrap_err());
        assert_eq!(rank.out.read::<u16>(&rank.stream, &out), [0; 80], "sums of a refused combine are zeros");
    });
}

#[test]
fn device_tensor_on_the_host_is_refused_on_all_ranks() {
    both("device_tensor_on_the_host_is_refused_on_all_ranks", |group, rank| {
        let me = group.rank();
        let (mine, bad) = (input(me), me == BAD);
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let tensors = rank.put(&mine);
        let (x, choices) = call::<bf16>(&tensors);
        let rows = if bad { x } else { Tensor::from(&mine.x) };
        is_refused(me, &rank.host.dispatch(rows, &routing).map(drop).unwrap_err());
        let routed = if bad { choices } else { Choices::from(&routing) };
        is_refused(me, &rank.host.dispatch(&mine.x, routed).map(drop).unwrap_err());
        rank.round(&mine);

        let (rows, handle) = rank.host.dispatch(&mine.x, &routing).unwrap();
        let (landed, on_device) = rank.dispatch(&mine).unwrap();
        let (made, landed) = (rows.to_vec::<bf16>().unwrap(), landed.range().unwrap());
        let y = if bad { Tensor::device(&landed, Dtype::Bf16) } else { Tensor::from(&made) };
        is_refused(me, &rank.host.combine::<bf16>(y, &handle).unwrap_err());
        let mut sums = vec![bf16::ONE; mine.x.len()];
        let into = if bad { target::<bf16>(&tensors[0]) } else { TensorMut::from(&mut sums) };
        is_refused(me, &rank.host.combine_into(&made, &handle, into).unwrap_err());
        let y = if bad { on_device.output().unwrap() } else { handle.output().unwrap() };
        is_refused(me, &rank.host.combine::<bf16>(y, &handle).unwrap_err());
        let along = if bad { &on_device } else { &handle };
        is_refused(me, &rank.host.combine::<bf16>(&made, along).unwrap_err());
        assert_eq!(sums, vec![bf16::ONE; mine.x.len()], "nothing moved");
    });
}

#[test]
fn buffers_answer_for_their_own_place_alone() {
    both("buffers_answer_for_their_own_place_alone", |group, rank| {
        let me = group.rank();
        let mine = input(me);
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let (mut rows, handle) = rank.host.dispatch(&mine.x, &routing).unwrap();
        let (mut landed, on_device) = rank.dispatch(&mine).unwrap();
        let mut made = on_device.output().unwrap();
        let refused = [
            rows.range().map(drop),
            rows.weights().map(drop),
            rows.counts().map(drop),
            handle.output().unwrap().range().map(drop),
            handle.status().map(drop),
            landed.rows::<bf16>().map(drop),
            landed.rows_mut::<bf16>().map(drop),
            made.rows_mut::<bf16>().map(drop),
            made.weights_mut().map(drop),
        ];
        for (nth, refused) in refused.into_iter().enumerate() {
            let refused = refused.unwrap_err();
            assert!(matches!(refused, Error::Plan(PlanError::WrongPlace { .. })), "{nth}: {refused}");
        }
        assert!(rows.rows_mut::<bf16>().is_ok());
    });
}

#[test]
fn handle_of_another_instance_on_a_device_is_refused() {
    both("handle_of_another_instance_on_a_device_is_refused", |group, rank| {
        let me = group.rank();
        let mine = input(me);
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let (_, of_host) = rank.host.dispatch(&mine.x, &routing).unwrap();
        let (_, own) = rank.dispatch(&mine).unwrap();
        let tensors = rank.put(&mine);
        let out = rank.out.part(tensors[0].len());
        let y = own.output().unwrap();
        let refused = rank.planned.combine_into(y, &of_host, target::<bf16>(&out)).unwrap_err();
        assert!(matches!(refused, Error::Plan(PlanError::WrongPlace { .. })), "{refused}");

        let mut slots = builder(group, CallExecutor::ConstantProgram).on(&rank.stream).build().unwrap();
        let (x, choices) = call::<bf16>(&tensors);
        let (_, of_slots) = slots.dispatch(x, choices).unwrap();
        let y = own.output().unwrap();
        let refused = rank.planned.combine_into(y, &of_slots, target::<bf16>(&out)).unwrap_err();
        assert!(matches!(refused, Error::Call(CallError::ForeignHandle { .. })), "{refused}");
        let refused = slots.release(Some(&own)).unwrap_err();
        assert!(matches!(refused, Error::Call(CallError::ForeignHandle { .. })), "{refused}");
        assert_eq!(slots.synchronize(), Err(PlanError::RefusedHere.into()), "on all ranks");

        // The other ranks hear of it, while every dispatch that there is memory for is alive.
        let (_, second) = rank.dispatch(&mine).unwrap();
        let y = second.output().unwrap();
        if me == 1 {
            let refused = rank.planned.combine_into(y, &of_slots, target::<bf16>(&out)).unwrap_err();
            assert!(matches!(refused, Error::Call(CallError::ForeignHandle { .. })), "{refused}");
        } else {
            let refused = rank.planned.combine_into(y, &second, target::<bf16>(&out)).unwrap_err();
            assert_eq!(second.return_report().unwrap_err(), refused);
            assert!(matches!(refused, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{refused}");
        }
        drop((own, second));
        rank.round(&mine);
    });
}

/// What carries calls out on devices.
const DEVICE_EXECUTORS: [CallExecutor; 2] = [CallExecutor::Enqueuer, CallExecutor::ConstantProgram];

/// Settings that an executor serves; on a device once there is a stream.
fn builder(group: &Group, executor: CallExecutor) -> ExpertParallelBuilder<'_> {
    let builder = ExpertParallel::builder(group).experts(4).top_k(2).hidden(16);
    let builder = builder.max_tokens(MAX_TOKENS);
    match executor {
        CallExecutor::ConstantProgram => builder.layout(RowLayout::RankMajor).mode(slots(MAX_TOKENS)),
        _ => builder,
    }
}

fn slots(rows: u32) -> ReceiveMode {
    ReceiveMode::Slots { rows, overflow: Overflow::Error }
}

#[test]
fn ranks_of_different_places_are_told_so_at_build() {
    let test = "places::ranks_of_different_places_are_told_so_at_build";
    each_with_kernels(test, &[&[]], || {
        on_ranks(&NODES, &small(), |world| {
            let group = world.all().unwrap();
            for executor in DEVICE_EXECUTORS {
                let builder = builder(&group, executor);
                let on_device = builder.clone().on(&stream(world.rank()));
                let chosen = if world.rank() == BAD { builder } else { on_device };
                let refused = chosen.build().unwrap_err();
                let what = "whether rows lie on a device (1: yes)";
                assert!(
                    matches!(refused, Error::Call(CallError::ConfigsDiffer { what: seen, .. }) if seen == what),
                    "{refused}"
                );
            }
        });
    });
}

/// Settings that ask for a feature, if settings do.
fn asked<'g>(feature: Feature, builder: ExpertParallelBuilder<'g>) -> Option<ExpertParallelBuilder<'g>> {
    Some(match feature {
        Feature::ExpertMajor => builder.layout(RowLayout::ExpertMajor),
        Feature::RankMajor => builder.layout(RowLayout::RankMajor),
        Feature::ScarceSlots => builder.mode(slots(MAX_TOKENS - 1)),
        Feature::OrderRank => builder.sum_order(SumOrder::Rank),
        Feature::OrderNode => builder.sum_order(SumOrder::Node),
        Feature::RoundedPartials => builder.sum_order(SumOrder::Rank).partial_dtype(PartialDtype::Bf16),
        Feature::Alignment => builder.align(4),
        Feature::Relays => builder.route(Route::Pxn),
        Feature::Spans => builder.layout(RowLayout::RankMajor).route(Route::Pxn).coalesce_relays(true),
        Feature::AllGather => builder.strategy(Strategy::AllGather),
        Feature::Fp8 => builder.fp8(true),
        Feature::Bytes => builder.dtype(Dtype::Bytes),
        Feature::WeightedCombine => builder.weighted(true),
        Feature::MaxInFlight => builder.max_in_flight(2),
        Feature::DeviceHeap => builder.device_heap_limit(1 << 20),
        Feature::Priority => builder.priority(Priority::Normal),
        Feature::MaxBlocks => builder.max_blocks(4),
        Feature::Capture => builder.graphs(Graphs::Slots),
        _ => return None,
    })
}

/// The feature that a refusal of these settings names: the first one that the executor lacks.
/// Nothing where the settings do not go together in any place.
fn named(feature: Feature, mode: ReceiveMode) -> Option<Feature> {
    match (mode, feature) {
        (ReceiveMode::Slots { .. }, Feature::Spans) => Some(Feature::Relays),
        (ReceiveMode::Budget { .. }, Feature::Spans) => Some(Feature::RankMajor),
        (ReceiveMode::Slots { .. }, Feature::AllGather | Feature::WeightedCombine) => None,
        // Another mode serves them.
        (ReceiveMode::Exact | ReceiveMode::Budget { .. }, Feature::ScarceSlots) => None,
        _ => Some(feature),
    }
}

#[test]
fn settings_that_a_place_lacks_are_refused_by_name_on_all_ranks() {
    let test = "places::settings_that_a_place_lacks_are_refused_by_name_on_all_ranks";
    each_with_kernels(test, &[&[]], || {
        on_ranks(&NODES, &small(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let budget = ReceiveMode::Budget { rows: 64, overflow: Overflow::Error };
            for (executor, mode, settings) in [
                (CallExecutor::HostStepper, ReceiveMode::Exact, 5),
                (CallExecutor::Enqueuer, ReceiveMode::Exact, 3),
                (CallExecutor::ConstantProgram, slots(MAX_TOKENS), 12),
                (CallExecutor::ConstantProgram, budget, 11),
            ] {
                let plain = || match (executor, mode.slots()) {
                    (CallExecutor::HostStepper, _) => builder(&group, executor),
                    (CallExecutor::ConstantProgram, None) => {
                        let within = builder(&group, CallExecutor::Enqueuer).on(&stream).mode(budget);
                        within.graphs(Graphs::Slots).sum_order(SumOrder::Rank)
                    }
                    _ => builder(&group, executor).on(&stream),
                };
                assert_eq!(plain().build().unwrap().executor(), executor);
                let place = if executor == CallExecutor::HostStepper { "the host" } else { "a device" };
                let lacks = |feature: &Feature| !feature.is_served_in(executor, mode);
                let mut refusals = 0;
                for feature in Feature::ALL.into_iter().filter(lacks) {
                    let Some(asked) = asked(feature, plain()) else { continue };
                    let Some(named) = named(feature, mode) else { continue };
                    let (feature, executor) = (named.name(), executor.name());
                    let expected = PlanError::NotAvailable { feature, place, executor };
                    assert_eq!(asked.build().map(drop).unwrap_err(), expected.into());
                    refusals += 1;
                }
                assert_eq!(refusals, settings, "{executor:?}, {mode:?}");
            }
        });
    });
}

/// The refusal of the call that a feature stands for, if it is a call.
fn called(
    feature: Feature,
    ep: &mut ExpertParallel,
    group: &Group,
    tensors: &[DeviceRange; 3],
    (rows, handle): (ExpertRows, &Handle),
) -> Option<Error> {
    let (x, routing) = (vec![bf16::ONE; 16], Routing::new(2, vec![0, 1], vec![1.0; 2]).unwrap());
    Some(match feature {
        Feature::CachedDispatch => {
            let error = ep.prepare(&routing).map(drop).unwrap_err();
            assert_eq!(ep.dispatch_cached(&x, handle).map(drop).unwrap_err(), error);
            error
        }
        Feature::Gradients => {
            let error = ep.combine_backward(&x, handle).map(drop).unwrap_err();
            assert_eq!(ep.dispatch_backward::<bf16>(&x, None, handle).map(drop).unwrap_err(), error);
            error
        }
        Feature::ExpertMaps => ep.set_expert_map(ExpertMap::contiguous(4, ep.size()).unwrap()).unwrap_err(),
        Feature::TokenBuffers => ep.token_buffer(1).map(drop).unwrap_err(),
        Feature::DeviceHeap => ep.heap_allocator().map(drop).unwrap_err(),
        Feature::Capture => {
            let started = match ep.place() {
                Place::Host => ep.start_dispatch(&x, &routing),
                _ => {
                    let (x, choices) = call::<bf16>(tensors);
                    ep.start_dispatch(x, choices)
                }
            };
            started.unwrap().finish_async().map(drop).unwrap_err()
        }
        Feature::Release => ep.release(Some(handle)).unwrap_err(),
        Feature::Streams => ep.set_stream(&stream(ep.rank())).unwrap_err(),
        Feature::Floor => {
            ep.floor_bench(group, rows, handle.output().unwrap(), handle).map(drop).unwrap_err()
        }
        _ => return None,
    })
}

#[test]
fn calls_that_an_executor_lacks_are_refused_by_name() {
    each_with_kernels("places::calls_that_an_executor_lacks_are_refused_by_name", &[&[]], || {
        on_ranks(&NODES, &small(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let (mine, memory) = (input(world.rank()), || Memory::new(stream.context(), 1 << 10));
            let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
            let tensors = [
                memory().fill(&stream, &mine.x),
                memory().fill(&stream, &mine.ids),
                memory().fill(&stream, &mine.weights),
            ];
            for (executor, calls) in CallExecutor::ALL.into_iter().zip([4, 3, 6]) {
                let (builder, on_host) = (builder(&group, executor), executor == CallExecutor::HostStepper);
                let builder = if on_host { builder } else { builder.on(&stream) };
                let mut ep = builder.build().unwrap();
                assert_eq!(ep.executor(), executor);
                let mut refusals = 0;
                for feature in Feature::ALL.into_iter().filter(|feature| !feature.is_served_by(executor)) {
                    let (x, choices) = call::<bf16>(&tensors);
                    let dispatched =
                        if on_host { ep.dispatch(&mine.x, &routing) } else { ep.dispatch(x, choices) };
                    let (rows, handle) = dispatched.unwrap();
                    if let Some(refused) = called(feature, &mut ep, &group, &tensors, (rows, &handle)) {
                        let place = if on_host { "the host" } else { "a device" };
                        let (feature, executor) = (feature.name(), executor.name());
                        assert_eq!(refused, PlanError::NotAvailable { feature, place, executor }.into());
                        refusals += 1;
                    }
                    if executor == CallExecutor::ConstantProgram {
                        ep.release(Some(&handle)).unwrap();
                    }
                }
                assert_eq!(refusals, calls, "{executor:?}");
                ep.synchronize().unwrap();
            }
        });
    });
}
