//! A layer on a device whose products are those of cuBLAS.
//!
//! Sums of whole numbers are exact in any order, so such a layer has the bits of the host's. All
//! others are compared within what two orders of sums can differ by.

use fake_cuda::FakeDriver;
use half::bf16;
use sidelane::error::{CallError, Cause, DeviceError};
use sidelane::gate::Preset;
use sidelane::layer::{GroupedSwiGlu, MoeLayer, MoeLayerBuilder, Products};
use sidelane::{Error, World};

use super::case::{Case, EXPERTS, FFN, HIDDEN, Real, Seen, TOP_K, WHOLE, step, swiglu, tensors};
use super::device::{CHUNKS, Rank, root};
use crate::apart::{Settings, each_with_kernels};
use crate::devices::stream;
use crate::support::{To, on_ranks, small};

/// Both orders of sums that the fake has, with grouped calls and without them.
const RUNS: [Settings<'static>; 3] = [
    &[("SIDELANE_FAKE_CUDA_SEED", "2")],
    &[("SIDELANE_FAKE_CUDA_SEED", "3"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")],
    &[("SIDELANE_FAKE_CUDA_SEED", "3"), ("SIDELANE_FAKE_CUDA_CUBLAS", "120400")],
];

const NODES: [u32; 3] = [0, 0, 0];
const TOKENS: [usize; 3] = [17, 0, 30];

fn on_devices(test: &str, runs: &[Settings<'_>], body: impl FnOnce()) {
    each_with_kernels(test, runs, || {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        body();
    });
}

/// Whole numbers from `least` on, as many different ones, each times a factor.
fn whole<E>(seed: usize, count: usize, (least, numbers, factor): (i32, usize, f32)) -> Vec<E>
where
    f32: To<E>,
{
    let number = |nth: usize| least + ((nth * 7919 + nth / 5 + seed * 31) % 104_729 % numbers) as i32;
    (0..count).map(|nth| (number(nth) as f32 * factor).to()).collect()
}

/// Experts whose gates give 0 or at least 32, where SwiGLU and its gradients are exact.
fn experts(held: &[u32]) -> GroupedSwiGlu {
    let matrix = HIDDEN * FFN;
    let of = |expert: u32| {
        let (seed, count) = (100 + 3 * expert as usize, matrix);
        let gate: Vec<f32> = whole(seed, count, (0, 2, 32.0));
        [gate, whole(seed + 1, count, (-2, 5, 1.0)), whole(seed + 2, count, (-2, 5, 1.0))].concat()
    };
    let weights: Vec<f32> = held.iter().flat_map(|&expert| of(expert)).collect();
    GroupedSwiGlu::new(held.len(), HIDDEN, FFN, weights).unwrap()
}

/// One expert for each token: its score is 1, those of others are 0, and so are the router's
/// gradients.
fn whole_numbers<'g, E: Real>(case: &Case, group: &'g sidelane::Group, rank: u32) -> MoeLayerBuilder<'g> {
    let gate = Preset::Qwen3.config(EXPERTS, 1).unwrap();
    // Each expert goes by an element of the token, and no two logits are closer than 256.
    let weight = |expert: usize, element: usize| {
        if expert == element { 256.0 * (64 + expert) as f32 } else { 0.0 }
    };
    let of = |nth: usize| weight(nth % EXPERTS as usize, nth / EXPERTS as usize);
    let router = (0..HIDDEN * EXPERTS as usize).map(of).collect();
    let builder = MoeLayer::builder(group, gate, HIDDEN, experts(&case.held(rank))).dtype(E::DTYPE);
    builder.router(router).shared(experts(&[50])).max_tokens(64).chunks(3).overlap(true).align(4)
}

fn tensors_of_whole_numbers<E>(rank: usize, tokens: usize) -> [Vec<E>; 3]
where
    f32: To<E>,
{
    let count = tokens * HIDDEN;
    let x = whole(10 + rank, count, (1, 5, 1.0));
    [x, whole(20 + rank, count, (-9, 19, 1.0)), whole(30 + rank, count, (-1, 3, 1.0))]
}

/// Two steps with the bits of the host's.
fn same_bits<E: Real>()
where
    f32: To<E>,
{
    let case = Case::new(&NODES, &TOKENS, CHUNKS);
    let expected: Vec<Seen<E>> = on_ranks(&NODES, &small(), |world| {
        let (group, me) = (world.all().unwrap(), world.rank());
        let mut layer = whole_numbers::<E>(&case, &group, me).build().unwrap();
        let [x, residual, of_out] = tensors_of_whole_numbers::<E>(me as usize, TOKENS[me as usize]);
        step(&mut layer, &x, &residual, &of_out)
    });
    let rows = |seen: &Seen<E>| seen.gradients.experts.iter().filter(|&&of| of != 0.0).count();
    assert!(expected.iter().all(|seen| rows(seen) > 0), "experts of every rank have rows");
    on_ranks(&NODES, &small(), |world| {
        let (group, stream, me) = (world.all().unwrap(), stream(world.rank()), world.rank());
        let builder = whole_numbers::<E>(&case, &group, me).on(&stream).device_heap(4 << 20);
        let layer = builder.products(Products::Cublas).build().unwrap();
        let (mut rank, me) = (Rank { layer, stream, kept: Vec::new() }, me as usize);
        for round in 0..2 {
            let what = format!("rank {me}, round {round}");
            rank.step(&tensors_of_whole_numbers::<E>(me, TOKENS[me]), &expected[me], &what);
        }
        rank.layer.synchronize().unwrap();
    });
}

#[test]
fn whole_numbers_by_cublas_have_the_bits_of_the_host() {
    on_devices("pipeline::cublas::whole_numbers_by_cublas_have_the_bits_of_the_host", &RUNS, || {
        same_bits::<f32>();
        same_bits::<bf16>();
        assert_eq!(FakeDriver::loaded().unwrap().counters().waits_without_cause, 0);
    });
}

/// How far apart two layers can be that differ in the order of sums and in factors that each lose
/// at most this part of themselves, as a part of a tensor's
/// largest element: of the output, and of gradients of tokens, router, experts and shared expert.
///
/// Both layers round once for each term of a sum, by `2^-24` at most. The terms are those of all
/// products on the longest way to the tensor. Nothing here cancels so far that the largest element
/// is smaller than its terms. Products alone are held to the strict bound in
/// `tests/device/kernels/cublas.rs`.
fn bounds(lost: f64) -> [f64; 5] {
    let (rows, experts, top_k) = (TOKENS.iter().sum::<usize>(), EXPERTS as usize, TOP_K as usize);
    // Routing weights, gate and up, down, and the combine.
    let forward = HIDDEN + HIDDEN + FFN + top_k;
    let through_experts = forward + HIDDEN + FFN + top_k;
    let through_router = forward + HIDDEN + experts + experts;
    let of_x = through_experts.max(through_router);
    [forward, of_x, through_router + rows, through_experts + rows, through_experts + rows]
        .map(|terms| 2.0 * terms as f64 * f64::powi(2.0, -24) + 2.0 * PRODUCTS as f64 * lost)
}

/// Products of the experts on the longest way to a tensor: gate and up, down, and their gradients.
const PRODUCTS: usize = 4;

#[test]
fn step_by_cublas_is_within_the_bound_of_its_sums() {
    on_devices("pipeline::cublas::step_by_cublas_is_within_the_bound_of_its_sums", &RUNS, || {
        let asked = [(Products::Cublas, 0.0), (Products::CublasTf32, f64::powi(2.0, -10))];
        for (cut, (products, lost)) in [WHOLE, CHUNKS].into_iter().flat_map(|cut| asked.map(|of| (cut, of))) {
            let bounds = bounds(lost);
            let case = Case::new(&NODES, &TOKENS, cut);
            let expected: Vec<Seen<f32>> = Case { cut: WHOLE, ..case.clone() }.step();
            let equal = on_ranks(&NODES, &small(), |world| {
                let me = world.rank() as usize;
                let mut rank = Rank::new::<f32>(&case, &world, |builder| builder.products(products));
                let [x, residual, of_out] = tensors::<f32>(me, TOKENS[me]);
                let (out, tape) = rank.forward(&x, &residual).unwrap();
                let [of_x, router, experts, shared] = rank.backward(tape, &of_out).unwrap();
                let seen = [out, of_x, router, experts, shared].map(|range| rank.read::<f32>(&range));
                rank.layer.synchronize().unwrap();
                let Seen { out, gradients, .. } = &expected[me];
                let all = [out, &gradients.x, &gradients.router, &gradients.experts, &gradients.shared];
                for ((seen, expected), bound) in seen.iter().zip(all).zip(bounds) {
                    let apart = seen.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs()));
                    let apart = apart.fold(0.0, f64::max);
                    let bound = bound * expected.iter().fold(0.0, |most, of| f64::max(most, of.abs().into()));
                    assert!(apart <= bound && seen.len() == expected.len(), "{apart:e}, not {bound:e}");
                }
                seen.iter().zip(all).all(|(seen, expected)| seen == expected)
            });
            assert!(!equal.iter().all(|&equal| equal), "some bit is cuBLAS's");
        }
    });
}

#[test]
fn layer_without_the_library_is_refused_when_it_is_built() {
    let test = "pipeline::cublas::layer_without_the_library_is_refused_when_it_is_built";
    on_devices(test, &[&[("SIDELANE_CUBLAS_LIBRARY", "/nowhere/libcublas.so.12")]], || {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, on) = (world.all().unwrap(), stream(world.rank()));
            let case = Case::new(&[0, 0], &[1, 1], WHOLE);
            let experts = || swiglu(case.held(world.rank()));
            let builder = || MoeLayer::builder(&group, case.gate.clone(), HIDDEN, experts()).on(&on);
            let refused = builder().products(Products::Cublas).build().unwrap_err();
            let Error::Device(DeviceError::NoCublas { tried }) = &refused else { panic!("{refused}") };
            assert!(tried[0].contains("/nowhere/libcublas.so.12"), "{refused}");
            // Our own products need none.
            builder().build().unwrap();
        });
    });
}

#[test]
fn ranks_with_other_products_hear_of_it() {
    on_devices("pipeline::cublas::ranks_with_other_products_hear_of_it", &[&[]], || {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, on) = (world.all().unwrap(), stream(world.rank()));
            let case = Case::new(&[0, 0], &[1, 1], WHOLE);
            let experts = swiglu(case.held(world.rank()));
            let builder = MoeLayer::builder(&group, case.gate.clone(), HIDDEN, experts).on(&on);
            let products = if world.rank() == 1 { Products::Cublas } else { Products::Own };
            let refused = builder.products(products).build().unwrap_err();
            assert!(matches!(refused, Error::Call(CallError::ConfigsDiffer { .. })), "{refused}");
            assert!(refused.to_string().contains("cuBLAS"), "{refused}");
        });
    });
}

#[test]
fn product_that_fails_before_a_forward_pass_ends_the_world() {
    let test = "pipeline::cublas::product_that_fails_before_a_forward_pass_ends_the_world";
    on_devices(test, &[&[]], || broken(false));
}

#[test]
fn product_that_fails_in_a_backward_pass_ends_the_world() {
    let test = "pipeline::cublas::product_that_fails_in_a_backward_pass_ends_the_world";
    on_devices(test, &[&[]], || broken(true));
}

/// cuBLAS fails on the device of rank 1: its error has the status, and the others hear of it.
fn broken(backward: bool) {
    let case = Case::new(&NODES, &[5, 7, 6], CHUNKS);
    on_ranks(&NODES, &small(), |world: World| {
        let me = world.rank() as usize;
        let mut rank = Rank::new::<f32>(&case, &world, |builder| builder.products(Products::Cublas));
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let tape = backward.then(|| rank.forward(&x, &residual).unwrap().1);
        rank.layer.synchronize().unwrap();
        if me == 1 {
            FakeDriver::loaded().unwrap().break_cublas(1);
        }
        let failed = match tape {
            Some(tape) => rank.backward(tape, &of_out).map(drop).unwrap_err(),
            None => rank.forward(&x, &residual).map(drop).unwrap_err(),
        };
        match (me, root(&failed)) {
            (1, Error::Device(DeviceError::Call { call, device: Some(1), code: 13, name })) => {
                assert!(call.starts_with("cublasGemm"), "{failed}");
                assert_eq!(name, "CUBLAS_STATUS_EXECUTION_FAILED");
            }
            (0 | 2, Error::World(Cause::Cancelled { by: 1 })) => {}
            (me, other) => panic!("rank {me}: {other}"),
        }
    });
}
