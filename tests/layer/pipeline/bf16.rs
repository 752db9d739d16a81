//! A layer on a device with factors of bf16: to the bit its formula with the same roundings.

use fake_cuda::FakeDriver;
use half::bf16;
use sidelane::error::{CallError, LayerError};
use sidelane::layer::{DeviceMoeLayerBuilder, GroupedSwiGlu, MoeLayer, Products};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, World};

use super::bf16_reference::{Expected, Expert, Layer, Order, Rank as Tokens, weights_of};
use super::case::{Case, EXPERTS, HIDDEN, SHARED, WHOLE, router, swiglu, tensors};
use super::device::{CHUNKS, Rank, root};
use crate::apart::{Settings, each_with_kernels};
use crate::devices::stream;
use crate::support::{on_ranks, small};

/// Both orders of sums that the fake has, with grouped calls and without them.
const RUNS: [Settings<'static>; 3] = [
    &[("SIDELANE_FAKE_CUDA_SEED", "22")],
    &[("SIDELANE_FAKE_CUDA_SEED", "23"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")],
    &[("SIDELANE_FAKE_CUDA_SEED", "24"), ("SIDELANE_FAKE_CUDA_CUBLAS", "120400")],
];

/// Rows of 12 elements are no whole vectors, and of 5 no whole words.
const WIDTHS: [usize; 3] = [16, 12, 5];

fn on_devices(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    each_with_kernels(test, runs, || {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        body();
    });
}

/// Experts of a rank, by their numbers, with weights that `change` is added to.
fn experts(held: &[u32], ffn: usize, change: f32) -> GroupedSwiGlu {
    let weights: Vec<f32> = held.iter().flat_map(|&expert| weights_of(expert, ffn)).collect();
    let weights = weights.into_iter().map(|weight| weight + change).collect();
    GroupedSwiGlu::new(held.len(), HIDDEN, ffn, weights).unwrap()
}

/// A case without losses: the device chooses.
fn case(nodes: &[u32], tokens: &[usize], cut: super::case::Cut) -> Case {
    Case { losses: false, ..Case::new(nodes, tokens, cut) }
}

fn built(
    case: &Case,
    world: &World,
    ffn: usize,
    settings: impl FnOnce(DeviceMoeLayerBuilder<'_>) -> DeviceMoeLayerBuilder<'_>,
) -> Rank {
    let (group, stream, held) = (world.all().unwrap(), stream(world.rank()), case.held(world.rank()));
    let builder = MoeLayer::builder(&group, case.gate.clone(), HIDDEN, experts(&held, ffn, 0.0));
    let builder = case.cut(builder.dtype(Dtype::Bf16)).shared(experts(&[SHARED], ffn, 0.0)).on(&stream);
    let builder = settings(builder.products(Products::CublasBf16).device_heap(4 << 20));
    Rank { layer: builder.build().unwrap(), stream, kept: Vec::new() }
}

/// A step of all ranks is that of the formula.
fn step_is_the_formula(case: &Case, ffn: usize) {
    let seen = on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut rank = built(case, &world, ffn, |builder| builder);
        let [x, residual, of_out] = tensors::<bf16>(me, case.tokens[me]);
        let mut last = None;
        // The second pass finds memory as the first one left it.
        for _ in 0..2 {
            let (out, tape) = rank.forward(&x, &residual).unwrap();
            let decision = tape.decision().clone();
            let [of_x, router, experts, shared] = rank.backward(tape, &of_out).unwrap();
            let rows = [out, of_x].map(|range| rank.read::<bf16>(&range));
            last = Some((decision, rows, [router, experts, shared].map(|range| rank.read::<f32>(&range))));
        }
        rank.layer.synchronize().unwrap();
        let (decision, rows, weights) = last.unwrap();
        (Tokens { x, residual, of_out, decision }, rows, weights)
    });
    let order = Order::of_process();
    let all: Vec<Expert> =
        (0..EXPERTS).map(|expert| Expert::new(&weights_of(expert, ffn), ffn, order)).collect();
    let shared = Expert::new(&weights_of(SHARED, ffn), ffn, order);
    let router = router();
    let layer = Layer { experts: &all, shared: &shared, router: &router, config: &case.gate, order };
    let expected: Vec<Expected> = seen.iter().map(|(tokens, ..)| layer.step(tokens)).collect();
    for (me, ((_, [out, of_x], [router, experts, shared]), expected_of_rank)) in
        seen.iter().zip(&expected).enumerate()
    {
        let what = format!("rank {me}, width {ffn}, {order:?}, {case:?}");
        assert!(*out == expected_of_rank.out, "out, {what}");
        assert!(*of_x == expected_of_rank.of_x, "gradients of tokens, {what}");
        assert!(*router == expected_of_rank.router, "gradients of the router, {what}");
        assert!(*shared == expected_of_rank.shared, "gradients of the shared expert, {what}");
        // Rows of an expert lie by source rank and token.
        let of = |expert: u32| {
            let rows = expected.iter().flat_map(|of| &of.rows).filter(|(at, _)| *at == expert as usize);
            all[expert as usize].of_weights(&rows.map(|(_, row)| row).collect::<Vec<_>>())
        };
        let of_experts: Vec<f32> = case.held(me as u32).into_iter().flat_map(of).collect();
        assert!(*experts == of_experts, "gradients of experts, {what}");
    }
}

#[test]
fn step_in_bf16_is_its_formula_with_the_same_roundings() {
    on_devices("pipeline::bf16::step_in_bf16_is_its_formula_with_the_same_roundings", &RUNS, || {
        for ffn in WIDTHS {
            step_is_the_formula(&case(&[0, 0, 0], &[17, 0, 30], WHOLE), ffn);
        }
        // No rank has tokens, and one token leaves experts without rows.
        step_is_the_formula(&case(&[0, 0], &[0, 0], WHOLE), 16);
        step_is_the_formula(&case(&[0, 0], &[0, 1], WHOLE), 16);
        assert_eq!(FakeDriver::loaded().unwrap().counters().waits_without_cause, 0);
    });
}

#[test]
fn chunks_and_nodes_change_no_bit_in_bf16() {
    on_devices("pipeline::bf16::chunks_and_nodes_change_no_bit_in_bf16", &RUNS, || {
        for ffn in WIDTHS {
            step_is_the_formula(&case(&[0, 0, 0], &[17, 0, 30], CHUNKS), ffn);
        }
        let nodes = case(&[0, 1, 0, 1], &[12, 5, 1, 20], CHUNKS);
        step_is_the_formula(&nodes, 12);
        step_is_the_formula(&Case { route: Route::Pxn, ..nodes }, 12);
    });
}

#[test]
fn changed_weights_are_never_used_as_they_were() {
    let test = "pipeline::bf16::changed_weights_are_never_used_as_they_were";
    on_devices(test, &[&[("SIDELANE_FAKE_CUDA_SEED", "25")]], || {
        on_ranks(&[0], &small(), |world| {
            let case = case(&[0], &[9], WHOLE);
            let ([x, residual, _], held) = (tensors::<bf16>(0, 9), case.held(0));
            let made = |rank: &mut Rank| {
                let (out, _) = rank.forward(&x, &residual).unwrap();
                rank.read::<bf16>(&out)
            };
            let weights = |change: f32| experts(&held, 16, change);
            let of = |change: f32| {
                let mut rank = built(&case, &world, 16, |builder| builder);
                let to = rank.layer.experts().clone();
                rank.layer.send(&to, sidelane::layer::Experts::weights(&weights(change))).unwrap();
                made(&mut rank)
            };
            let expected = [0.0, 0.25, 0.5, 0.75].map(of);
            assert!(expected.windows(2).all(|two| two[0] != two[1]));
            let mut rank = built(&case, &world, 16, |builder| builder);
            assert!(made(&mut rank) == expected[0]);
            let change = |rank: &mut Rank, to: &sidelane::device::DeviceRange, by: f32| {
                rank.layer.send(to, sidelane::layer::Experts::weights(&weights(by))).unwrap();
            };
            // By a range that was asked for after the last pass, and is gone in the next.
            let to = rank.layer.experts().clone();
            change(&mut rank, &to, 0.25);
            drop(to);
            assert!(made(&mut rank) == expected[1]);
            // By one that was kept while a pass went by.
            let kept = rank.layer.experts().part(0, rank.layer.experts().len()).unwrap();
            assert!(made(&mut rank) == expected[1]);
            change(&mut rank, &kept, 0.5);
            assert!(made(&mut rank) == expected[2]);
            change(&mut rank, &kept, 0.75);
            drop(kept);
            assert!(made(&mut rank) == expected[3]);
        });
    });
}

#[test]
fn weights_that_are_certainly_unchanged_are_converted_once() {
    let test = "pipeline::bf16::weights_that_are_certainly_unchanged_are_converted_once";
    on_devices(test, &[&[("SIDELANE_FAKE_CUDA_SEED", "26")]], || {
        on_ranks(&[0], &small(), |world| {
            let case = case(&[0], &[9], WHOLE);
            let [x, residual, _] = tensors::<bf16>(0, 9);
            let mut rank = built(&case, &world, 16, |builder| builder);
            let fake_driver = FakeDriver::loaded().unwrap();
            let mut kernels = || {
                let before = fake_driver.counters().kernels;
                rank.forward(&x, &residual).unwrap();
                rank.layer.synchronize().unwrap();
                fake_driver.counters().kernels - before
            };
            let [first, second, third] = [kernels(), kernels(), kernels()];
            // Those of the experts, and those of the expert that all tokens pass.
            assert_eq!([first - 2, third], [second, second]);
            rank.layer.shared().unwrap();
            let mut kernels = || {
                let before = fake_driver.counters().kernels;
                rank.forward(&x, &residual).unwrap();
                rank.layer.synchronize().unwrap();
                fake_driver.counters().kernels - before
            };
            assert_eq!([kernels(), kernels()], [second + 1, second]);
        });
    });
}

#[test]
fn rows_that_are_not_bf16_are_refused_when_the_layer_is_built() {
    let test = "pipeline::bf16::rows_that_are_not_bf16_are_refused_when_the_layer_is_built";
    on_devices(test, &[&[]], || {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, on) = (world.all().unwrap(), stream(world.rank()));
            let case = case(&[0, 0], &[1, 1], WHOLE);
            let refused = |dtype, experts| {
                let builder = MoeLayer::builder(&group, case.gate.clone(), HIDDEN, experts).dtype(dtype);
                builder.on(&on).products(Products::CublasBf16).build().unwrap_err()
            };
            let held = case.held(world.rank());
            for (dtype, ffn) in [(Dtype::F32, 12), (Dtype::F16, 12), (Dtype::Bf16, 0)] {
                let error = refused(dtype, experts(&held, ffn, 0.0));
                let lacks = matches!(error, Error::Layer(LayerError::NotOnDevice { .. }));
                assert!(lacks && error.to_string().contains("products in bf16"), "{error}");
            }
            // TF32 and bf16 are other products.
            let products = if world.rank() == 0 { Products::CublasBf16 } else { Products::CublasTf32 };
            let builder = MoeLayer::builder(&group, case.gate.clone(), HIDDEN, swiglu(held));
            let refused = builder.dtype(Dtype::Bf16).on(&on).products(products).build().unwrap_err();
            assert!(matches!(refused, Error::Call(CallError::ConfigsDiffer { .. })), "{refused}");
        });
    });
}

#[test]
fn several_tapes_keep_their_rows_in_bf16() {
    let test = "pipeline::bf16::several_tapes_keep_their_rows_in_bf16";
    on_devices(test, &[&[("SIDELANE_FAKE_CUDA_SEED", "27")]], || {
        let case = case(&[0, 0], &[9, 14], CHUNKS);
        on_ranks(&case.nodes, &small(), |world| {
            let me = world.rank() as usize;
            let steps = [0, 2].map(|seed| tensors::<bf16>(me + seed, case.tokens[me]));
            let mut rank = built(&case, &world, 12, |builder| builder.tapes(2));
            let of = |rank: &mut Rank, tape, of_out: &[bf16]| {
                let gradients_out =
                    rank.backward(tape, of_out).map_err(|error| root(&error).to_string()).unwrap();
                (rank.read::<bf16>(&gradients_out[0]), rank.read::<f32>(&gradients_out[2]))
            };
            let alone = [0, 1].map(|nth: usize| {
                let [x, residual, of_out] = &steps[nth];
                let tape = rank.forward(x, residual).unwrap().1;
                of(&mut rank, tape, of_out)
            });
            let tapes = [0, 1].map(|nth: usize| rank.forward(&steps[nth][0], &steps[nth][1]).unwrap().1);
            for (nth, tape) in tapes.into_iter().enumerate().rev() {
                assert!(of(&mut rank, tape, &steps[nth][2]) == alone[nth], "step {nth}");
            }
        });
    });
}
