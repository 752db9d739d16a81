//! A layer on a device has the bits of the host's, on a driver that does everything as late and as
//! unordered as the rules allow.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use fake_cuda::FakeDriver;
use half::{bf16, f16};
use sidelane::device::{Allocation, DeviceRange, PinnedMemory, Priority, Stream};
use sidelane::ep::Place;
use sidelane::error::{CallError, Cause, DeviceError, GateError, LayerError, OverlapError, PlanError};
use sidelane::gate::{Preset, ScoreFunction};
use sidelane::layer::{
    DeviceGradients, DeviceMoeLayer, DeviceMoeLayerBuilder, DeviceTape, GroupedSwiGlu, Input, MoeLayer,
};
use sidelane::plan::ExpertMap;
use sidelane::topology::Route;
use sidelane::{Element, Error, World};

use super::case::{Case, Cut, EXPERTS, FFN, HIDDEN, Real, SHARED, Seen, TOP_K, WHOLE, gate, swiglu, tensors};
use crate::apart::each_with_kernels;
use crate::devices::{Memory, break_device, stream};
use crate::support::{To, on_ranks, small};

/// Runs the body with kernels to launch, hardware queues, and a seed for all that the rules leave
/// open. `test` is the test's full name. No stream waits for a call that is yet to come.
fn on_devices(test: &str, queues: u32, seed: u64, body: impl FnOnce()) {
    on_devices_of(test, queues, seed, 8 << 30, || {
        body();
        assert_eq!(FakeDriver::loaded().unwrap().counters().waits_without_cause, 0);
    });
}

/// The same on devices with so many bytes, and with waits for ranks that never come.
fn on_devices_of(test: &str, queues: u32, seed: u64, bytes: u64, body: impl FnOnce()) {
    let [queues, seed, bytes] = [queues.into(), seed, bytes].map(|number: u64| number.to_string());
    let settings: [(&str, &str); 4] = [
        ("CUDA_DEVICE_MAX_CONNECTIONS", &queues),
        ("SIDELANE_FAKE_CUDA_SEED", &seed),
        ("SIDELANE_FAKE_CUDA_DRIVER", "12080"),
        ("SIDELANE_FAKE_CUDA_MEMORY", &bytes),
    ];
    each_with_kernels(test, &[&settings], || {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        body();
    });
}

/// A layer with memory for its tensors.
pub struct Rank {
    pub layer: DeviceMoeLayer,
    pub stream: Arc<Stream>,
    pub kept: Vec<Memory>,
}

/// Tensors of a step: gradients of x, router, experts, shared expert.
pub type Gradients = [DeviceRange; 4];

impl Rank {
    pub fn new<E: Element>(
        case: &Case,
        world: &World,
        settings: impl FnOnce(DeviceMoeLayerBuilder<'_>) -> DeviceMoeLayerBuilder<'_>,
    ) -> Rank {
        let (group, stream) = (world.all().unwrap(), stream(world.rank()));
        let experts = swiglu(case.held(world.rank()));
        let builder = MoeLayer::builder(&group, case.gate.clone(), HIDDEN, experts).dtype(E::DTYPE);
        let builder = case.cut(builder).on(&stream);
        Rank { layer: settings(builder).build().unwrap(), stream, kept: Vec::new() }
    }

    /// These values on the device.
    fn sent<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> DeviceRange {
        let memory = Memory::new(self.stream.context(), size_of_val(values) as u64);
        let range = memory.fill(&self.stream, values);
        self.kept.push(memory);
        range
    }

    /// Room for so many bytes.
    fn room(&mut self, bytes: usize) -> DeviceRange {
        self.sent(&vec![0xcb_u8; bytes])
    }

    pub fn read<T: bytemuck::Pod>(&self, range: &DeviceRange) -> Vec<T> {
        Memory::new(self.stream.context(), range.len()).read(&self.stream, range)
    }

    pub fn forward<E: Element>(
        &mut self,
        x: &[E],
        residual: &[E],
    ) -> Result<(DeviceRange, DeviceTape), Error> {
        let (x, residual) = (self.sent(x), self.sent(residual));
        let out = self.room(x.len() as usize);
        let input = Input::new(&x).with_residual(Some(&residual));
        let tape = self.layer.forward(&input, &out)?;
        Ok((out, tape))
    }

    pub fn backward<E: Element>(&mut self, tape: DeviceTape, of_out: &[E]) -> Result<Gradients, Error> {
        let of_out = self.sent(of_out);
        let words = [self.layer.router(), self.layer.experts(), self.layer.shared().unwrap()];
        let [router, experts, shared] = words.map(|weights| weights.len() as usize);
        let gradients_out = [of_out.len() as usize, router, experts, shared].map(|bytes| self.room(bytes));
        let [x, router, experts, shared] = &gradients_out;
        self.layer.backward(tape, &of_out, DeviceGradients::new(x, router, experts, Some(shared)))?;
        Ok(gradients_out)
    }

    /// A step has the results of the host's.
    pub fn step<E: Real>(&mut self, [x, residual, of_out]: &[Vec<E>; 3], expected: &Seen<E>, what: &str)
    where
        f32: To<E>,
    {
        let (out, tape) = self.forward(x, residual).unwrap();
        assert_eq!([tape.balance_loss(), tape.z_loss()], expected.losses, "losses, {what}");
        let [of_x, router, experts, shared] = self.backward(tape, of_out).unwrap();
        let gradients = &expected.gradients;
        assert!(self.read::<E>(&out) == expected.out, "out, {what}");
        assert!(self.read::<E>(&of_x) == gradients.x, "gradients of tokens, {what}");
        assert!(self.read::<f32>(&router) == gradients.router, "gradients of the router, {what}");
        assert!(self.read::<f32>(&experts) == gradients.experts, "gradients of experts, {what}");
        assert!(self.read::<f32>(&shared) == gradients.shared, "gradients of the shared expert, {what}");
    }
}

/// Two steps of the same layer on devices, with the bits of the host's.
fn same_on_devices<E: Real>(case: &Case, settings: fn(DeviceMoeLayerBuilder<'_>) -> DeviceMoeLayerBuilder<'_>)
where
    f32: To<E>,
{
    let expected: Vec<Seen<E>> = Case { cut: WHOLE, ..case.clone() }.step();
    on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut rank = Rank::new::<E>(case, &world, settings);
        for round in 0..2 {
            let what = format!("rank {me}, round {round}, {case:?}");
            rank.step(&tensors::<E>(me, case.tokens[me]), &expected[me], &what);
        }
        rank.layer.synchronize().unwrap();
    });
}

pub const CHUNKS: Cut = Cut { chunks: 3, overlap: true, align: 4, ..WHOLE };

#[test]
fn step_on_a_device_has_the_bits_of_the_host() {
    on_devices("pipeline::device::step_on_a_device_has_the_bits_of_the_host", 8, 1, || {
        let case = Case::new(&[0, 0, 0], &[17, 0, 30], WHOLE);
        same_on_devices::<bf16>(&case, |builder| builder.max_blocks(1));
        // Kernels of dispatches and combines are limited, too.
        assert_eq!(FakeDriver::loaded().unwrap().counters().most_blocks, 1);
        same_on_devices::<f32>(&case, |builder| builder);
    });
}

#[test]
fn choices_of_a_device_have_the_bits_of_the_host() {
    on_devices("pipeline::device::choices_of_a_device_have_the_bits_of_the_host", 8, 14, || {
        let sigmoid = gate().with_score(ScoreFunction::Sigmoid).with_scaling(2.5);
        for gate in [gate(), Preset::Mixtral.config(EXPERTS, TOP_K).unwrap(), sigmoid] {
            for losses in [false, true] {
                let cut = Case::new(&[0, 0, 0], &[17, 0, 30], CHUNKS);
                let case = Case { gate: gate.clone(), losses, ..cut };
                same_on_devices::<f32>(&case, |builder| builder);
                on_ranks(&[0, 0, 0], &small(), |world| {
                    let me = world.rank();
                    let place = if losses { Place::Host } else { Place::Device(me) };
                    assert_eq!(Rank::new::<f32>(&case, &world, |builder| builder).layer.gate_place(), place);
                });
            }
        }
    });
}

#[test]
fn input_unusable_by_device_gate_is_refused_as_on_host() {
    let test = "pipeline::device::input_unusable_by_device_gate_is_refused_as_on_host";
    on_devices(test, 8, 15, || {
        on_ranks(&[0], &small(), |world| {
            let case = Case { losses: false, ..Case::new(&[0], &[6], WHOLE) };
            let mut rank = Rank::new::<f32>(&case, &world, |builder| builder);
            let [x, residual, _] = tensors::<f32>(0, 6);
            let (bias, used) = ([0.25, -0.5, 0.0, 0.125, 0.5], [true, false, true, true, false, true]);
            let mut host = case.layer::<f32>(&world);
            let input = Input::new(&x[..])
                .with_residual(Some(&residual[..]))
                .with_bias(Some(&bias))
                .with_token_mask(Some(&used));
            let (expected, of_host) = host.forward(&input).unwrap();
            let (there, residual) = (rank.sent(&x), rank.sent(&residual));
            let out = rank.room(x.len() * 4);
            let good = Input::new(&there).with_residual(Some(&residual));
            let chosen = good.with_bias(Some(&bias)).with_token_mask(Some(&used));
            let tape = rank.layer.forward(&chosen, &out).unwrap();
            assert_eq!(rank.read::<f32>(&out), expected);
            assert_eq!(tape.decision().choices(), of_host.decision().choices());
            assert_eq!(tape.decision().counts_before(), of_host.decision().counts_before());
            drop(tape);
            let mut bad = x.clone();
            bad[2 * HIDDEN] = f32::INFINITY;
            let bad = rank.sent(&bad);
            let mut refused = |input: Input<'_, DeviceRange>| match rank.layer.forward(&input, &out).map(drop)
            {
                Err(Error::Gate(error)) => error,
                other => panic!("{other:?}"),
            };
            let wrong = |error| matches!(error, GateError::WrongShape { .. });
            assert!(wrong(refused(good.with_bias(Some(&bias[1..])))));
            assert!(wrong(refused(good.with_token_mask(Some(&used[1..])))));
            let bias = [f32::NAN; 5];
            assert!(matches!(refused(good.with_bias(Some(&bias))), GateError::BadElement { .. }));
            let refused = rank.layer.forward(&good.with_x(&bad), &out).map(drop).unwrap_err();
            assert!(matches!(refused, Error::Gate(GateError::NotFinite { token: 2, .. })), "{refused}");
        });
    });
}

#[test]
fn chunks_of_a_device_change_no_bit() {
    for seed in [2, 3] {
        on_devices("pipeline::device::chunks_of_a_device_change_no_bit", 8, seed, || {
            for cut in [CHUNKS, Cut { overlap: false, ..CHUNKS }, Cut { chunks: 9, align: 1, ..CHUNKS }] {
                same_on_devices::<f32>(&Case::new(&[0, 0, 0], &[17, 0, 30], cut), |builder| builder);
            }
            same_on_devices::<bf16>(&Case::new(&[0, 0], &[9, 21], CHUNKS), |builder| {
                builder.max_blocks(2).priority(Priority::Normal)
            });
        });
    }
}

#[test]
fn a_single_hardware_queue_is_enough() {
    on_devices("pipeline::device::a_single_hardware_queue_is_enough", 1, 4, || {
        same_on_devices::<bf16>(&Case::new(&[0, 0], &[9, 21], CHUNKS), |builder| builder);
    });
}

#[test]
fn relays_and_replicas_change_no_bit() {
    on_devices("pipeline::device::relays_and_replicas_change_no_bit", 8, 5, || {
        let held = [vec![4, 0], vec![1, 2], vec![3, 0], vec![2]];
        let map = ExpertMap::from_slots(EXPERTS, &held).unwrap();
        let case = Case::new(&[0, 1, 0, 1], &[12, 5, 1, 20], CHUNKS);
        same_on_devices::<f32>(&Case { map: map.clone(), ..case.clone() }, |builder| builder);
        same_on_devices::<bf16>(&Case { map, route: Route::Pxn, ..case }, |builder| builder);
    });
}

#[test]
fn tapes_go_backward_in_any_order() {
    on_devices("pipeline::device::tapes_go_backward_in_any_order", 8, 6, || {
        let (first, second) = ([9, 0, 12], [4, 17, 1]);
        let alone = [first, second].map(|tokens| Case::new(&[0, 0, 0], &tokens, WHOLE).step::<f32>());
        let case = Case::new(&[0, 0, 0], &first, CHUNKS);
        on_ranks(&case.nodes, &small(), |world| {
            let me = world.rank() as usize;
            let mut rank = Rank::new::<f32>(&case, &world, |builder| builder.tapes(2));
            let steps = [first, second].map(|tokens| tensors::<f32>(me, tokens[me]));
            let forward: Vec<_> =
                steps.iter().map(|[x, residual, _]| rank.forward(x, residual).unwrap()).collect();
            for (nth, (out, tape)) in forward.into_iter().enumerate().rev() {
                let [of_x, _, experts, _] = rank.backward(tape, &steps[nth][2]).unwrap();
                let expected = &alone[nth][me];
                assert!(rank.read::<f32>(&out) == expected.out);
                assert!(rank.read::<f32>(&of_x) == expected.gradients.x);
                assert!(rank.read::<f32>(&experts) == expected.gradients.experts);
            }
        });
    });
}

#[test]
fn layer_input_missing_on_device_of_one_rank_is_refused_on_all() {
    let test = "pipeline::device::layer_input_missing_on_device_of_one_rank_is_refused_on_all";
    on_devices(test, 8, 7, || {
        let case = Case::new(&[0, 0, 0], &[5, 7, 6], CHUNKS);
        let expected: Vec<Seen<bf16>> = Case { cut: WHOLE, ..case.clone() }.step();
        on_ranks(&case.nodes, &small(), |world| {
            let me = world.rank() as usize;
            let mut rank = Rank::new::<bf16>(&case, &world, |builder| builder);
            let [x, residual, of_out] = tensors::<bf16>(me, case.tokens[me]);
            let told = |error: Error, own: &str| match (me, &error) {
                (1, error) => assert!(error.to_string().contains(own), "{error}"),
                (_, Error::Overlap(OverlapError::Failed { error, .. })) => {
                    let refused = matches!(**error, Error::Call(CallError::PeerRefused { peer: 1, .. }));
                    assert!(refused, "{error}");
                }
                (_, error) => panic!("{error}"),
            };
            let short = &residual[..if me == 1 { HIDDEN } else { residual.len() }];
            told(rank.forward(&x, short).map(drop).unwrap_err(), "residual");
            let (_, tape) = rank.forward(&x, &residual).unwrap();
            let short = &of_out[..if me == 1 { HIDDEN } else { of_out.len() }];
            told(rank.backward(tape, short).map(drop).unwrap_err(), "gradients of the output");
            rank.step(&[x, residual, of_out], &expected[me], "after refusals");
        });
    });
}

#[test]
fn settings_unsupported_on_device_are_refused_at_layer_build() {
    let test = "pipeline::device::settings_unsupported_on_device_are_refused_at_layer_build";
    on_devices(test, 8, 8, || {
        on_ranks(&[0], &small(), |world| {
            let group = world.all().unwrap();
            let on = stream(0);
            let builder = || MoeLayer::builder(&group, gate(), HIDDEN, swiglu(0..EXPERTS));
            for (builder, feature) in [
                (builder().expert_groups(2), "groups of experts"),
                (builder().streams(2, 1), "several compute streams"),
                (builder().deadline(Duration::from_secs(1)), "a deadline of its own"),
            ] {
                let refused = builder.on(&on).build().unwrap_err();
                assert_eq!(refused, LayerError::NotOnDevice { feature }.into());
            }
            let weights = vec![0.0; GroupedSwiGlu::values(EXPERTS as usize, 4, FFN)];
            let narrow = GroupedSwiGlu::new(EXPERTS as usize, 4, FFN, weights).unwrap();
            let refused = MoeLayer::builder(&group, gate(), 4, narrow).on(&on).build().unwrap_err();
            assert_eq!(refused, LayerError::NotOnDevice { feature: "rows of no whole 16 bytes" }.into());
            let refused = builder().on(&on).max_blocks(0).build().map(drop).unwrap_err();
            let bad = matches!(refused, Error::Plan(PlanError::BadParameter { parameter: "max_blocks", .. }));
            assert!(bad, "{refused}");
            builder().shared(swiglu([SHARED])).on(&on).build().unwrap();
        });
    });
}

#[test]
fn f16_on_a_device_has_the_bits_of_the_host() {
    on_devices("pipeline::device::f16_on_a_device_has_the_bits_of_the_host", 8, 9, || {
        same_on_devices::<f16>(&Case::new(&[0, 0], &[9, 21], CHUNKS), |builder| builder);
    });
}

/// Experts whose weights are larger than what goes to a device at once, and how many values.
fn wide(experts: usize, ffn: usize) -> (GroupedSwiGlu, Vec<f32>) {
    let weights: Vec<_> = (0..GroupedSwiGlu::values(experts, HIDDEN, ffn)).map(|nth| nth as f32).collect();
    (GroupedSwiGlu::new(experts, HIDDEN, ffn, weights.clone()).unwrap(), weights)
}

#[test]
fn weights_go_in_pieces_and_memory_grows_by_what_the_device_has() {
    let test = "pipeline::device::weights_go_in_pieces_and_memory_grows_by_what_the_device_has";
    on_devices_of(test, 8, 10, 64 << 20, || {
        on_ranks(&[0], &small(), |world| {
            let (group, on) = (world.all().unwrap(), stream(0));
            let (experts, weights) = wide(EXPERTS as usize, 20_000);
            let builder = MoeLayer::builder(&group, gate(), HIDDEN, experts).max_tokens(64).on(&on);
            let mut layer = builder.device_heap(4 << 20).build().unwrap();
            let on_device = layer.experts().clone();
            assert!(layer.receive::<f32>(&on_device).unwrap() == weights);
            // Twice as much has no room, and is not asked for.
            let large = layer.tensor(28 << 20).unwrap();
            let more: Vec<_> = (0..4).map(|_| layer.tensor(1 << 20).unwrap()).collect();
            let refused = layer.tensor(32 << 20).unwrap_err();
            assert!(matches!(refused, Error::Device(DeviceError::OutOfMemory { .. })), "{refused}");
            drop((large, more));
        });
    });
}

#[test]
fn rank_without_room_for_its_weights_is_heard_of_on_all() {
    let test = "pipeline::device::rank_without_room_for_its_weights_is_heard_of_on_all";
    on_devices_of(test, 8, 11, 32 << 20, || {
        on_ranks(&[0, 0, 0], &small(), |world| {
            let (group, on) = (world.all().unwrap(), stream(world.rank()));
            let held = ExpertMap::contiguous(EXPERTS, 3).unwrap().slots_of(world.rank()).len();
            let (experts, _) = wide(held, 20_000);
            let full = (world.rank() == 1).then(|| Allocation::new(on.context(), 30 << 20).unwrap());
            let builder = MoeLayer::builder(&group, gate(), HIDDEN, experts).max_tokens(64).on(&on);
            let refused = builder.device_heap(4 << 20).build().unwrap_err();
            match &refused {
                Error::Device(DeviceError::OutOfMemory { device: 1, .. }) if full.is_some() => {}
                Error::Call(CallError::ConfigsDiffer { peer: 1, mine: 1, theirs: 0, .. }) => {}
                other => panic!("rank {}: {other}", world.rank()),
            }
        });
    });
}

/// The reason at the bottom of what went wrong.
pub fn root(error: &Error) -> &Error {
    match error {
        Error::Overlap(OverlapError::Failed { error, .. }) => root(error),
        other => other,
    }
}

#[test]
fn device_that_fails_before_a_forward_pass_ends_the_world() {
    let test = "pipeline::device::device_that_fails_before_a_forward_pass_ends_the_world";
    on_devices_of(test, 8, 12, 8 << 30, || broken(false));
}

#[test]
fn device_that_fails_before_a_backward_pass_ends_the_world() {
    let test = "pipeline::device::device_that_fails_before_a_backward_pass_ends_the_world";
    on_devices_of(test, 8, 12, 8 << 30, || broken(true));
}

/// The device of rank 1 fails before its forward pass, or its backward pass.
fn broken(backward: bool) {
    let case = Case::new(&[0, 0, 0], &[5, 7, 6], CHUNKS);
    let built = Barrier::new(3);
    on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut rank = Rank::new::<f32>(&case, &world, |builder| builder);
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let tape = backward.then(|| rank.forward(&x, &residual).unwrap().1);
        rank.layer.synchronize().unwrap();
        let [x, residual, of_out] = [x, residual, of_out].map(|values| rank.sent(&values));
        let out = rank.room(x.len() as usize);
        let words = [rank.layer.router(), rank.layer.experts(), rank.layer.shared().unwrap()];
        let [router, experts, shared] = words.map(|weights| weights.len() as usize).map(|len| rank.room(len));
        built.wait();
        if me == 1 {
            break_device(&rank.stream);
        }
        let passed = match tape {
            Some(tape) => {
                let into = DeviceGradients::new(&out, &router, &experts, Some(&shared));
                rank.layer.backward(tape, &of_out, into)
            }
            None => {
                let input = Input::new(&x).with_residual(Some(&residual));
                rank.layer.forward(&input, &out).map(drop)
            }
        };
        match (me, root(&passed.unwrap_err())) {
            (1, Error::Device(DeviceError::Call { .. })) => {}
            (0 | 2, Error::World(Cause::Cancelled { by: 1 })) => {}
            (me, other) => panic!("rank {me}: {other}"),
        }
    });
}

#[test]
fn gradients_of_a_world_that_fails_meanwhile_are_none() {
    let test = "pipeline::device::gradients_of_a_world_that_fails_meanwhile_are_none";
    on_devices_of(test, 8, 13, 8 << 30, || {
        let case = Case::new(&[0, 0], &[9, 21], WHOLE);
        let all = Barrier::new(2);
        on_ranks(&case.nodes, &small(), |world| {
            let me = world.rank() as usize;
            let mut rank = Rank::new::<f32>(&case, &world, |builder| builder);
            let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
            let (_, tape) = rank.forward(&x, &residual).unwrap();
            let of_out = rank.sent(&of_out);
            let words = [rank.layer.router(), rank.layer.experts(), rank.layer.shared().unwrap()];
            let bytes = words.map(|weights| weights.len() as usize);
            let [router, experts, shared] = bytes.map(|bytes| rank.room(bytes));
            let of_x = rank.room(of_out.len() as usize);
            // The graph is enqueued behind a wait, and the world ends before that does.
            let gate = PinnedMemory::new(rank.stream.context(), 8).unwrap();
            rank.stream.wait::<u64>(gate.range().word(0).unwrap(), 1).unwrap();
            all.wait();
            let refused = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(200));
                    all.wait();
                    world.cancel();
                    gate.word(0).unwrap().store(1, Ordering::Release);
                });
                let into = DeviceGradients::new(&of_x, &router, &experts, Some(&shared));
                rank.layer.backward(tape, &of_out, into).unwrap_err()
            });
            assert!(matches!(root(&refused), Error::World(Cause::Cancelled { .. })), "{refused}");
            let ended = rank.layer.synchronize().unwrap_err();
            assert!(matches!(ended, Error::World(Cause::Cancelled { .. })), "{ended}");
            assert_eq!(rank.stream.is_done(), Ok(true));
        });
    });
}
