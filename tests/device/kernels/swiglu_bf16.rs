//! SwiGLU between products of bf16: f32 between two roundings, whatever rows lie like.

use half::bf16;
use sidelane::device::{LayerKernels, SwigluRows};
use sidelane::error::DeviceError;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Numbers of bf16.
fn halves(random: &mut Random, count: usize, size: f32) -> Vec<bf16> {
    let some = |random: &mut Random| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..count).map(|_| bf16::from_f32(some(random) * size)).collect()
}

fn buffer(device: &Device, values: &[bf16]) -> Buffer {
    let bits: Vec<u16> = values.iter().map(|value| value.to_bits()).collect();
    Buffer::words(&device.context, &bits)
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

/// A row's gate, up and gradient.
struct Row {
    gate: Vec<f32>,
    up: Vec<f32>,
    of_act: Vec<f32>,
}

impl Row {
    /// SwiGLU in f32.
    fn act(&self, weight: f32) -> impl Iterator<Item = f32> + '_ {
        self.gate.iter().zip(&self.up).map(move |(&g, &u)| weight * (g * sigmoid(g) * u))
    }

    /// The gradient of the weight.
    fn of_weight(&self) -> f32 {
        let mut lanes = [0.0_f32; 32];
        for (at, (made, of_act)) in self.act(1.0).zip(&self.of_act).enumerate() {
            lanes[at / 8 % 32] += of_act * made;
        }
        for half in [16, 8, 4, 2, 1] {
            let before = lanes;
            (0..32).for_each(|lane| lanes[lane] = before[lane] + before[lane ^ half]);
        }
        lanes[0]
    }

    /// Gradients of gate and up.
    fn of_inner(&self, weight: f32) -> Vec<f32> {
        let of = |at: usize| {
            let (g, u, d) = (self.gate[at], self.up[at], weight * self.of_act[at]);
            let s = sigmoid(g);
            let silu = g * s;
            (d * u * (s + silu * (1.0 - s)), d * silu)
        };
        let (gate, up): (Vec<_>, Vec<_>) = (0..self.gate.len()).map(of).unzip();
        [gate, up].concat()
    }
}

fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u16> {
    values.into_iter().map(|value| bf16::from_f32(value).to_bits()).collect()
}

#[test]
fn activations_in_bf16_round_once_in_rows_of_any_width() {
    let test = "kernels::swiglu_bf16::activations_in_bf16_round_once_in_rows_of_any_width";
    with_kernels(test, |device| {
        let (mut random, kernels) = (Random(21), LayerKernels::load(&device.context).unwrap());
        // Whole vectors and others, and more columns than a warp takes at a time.
        for (rows, ffn) in [(1, 8), (9, 1), (7, 5), (33, 12), (20, 16), (3, 520), (2, 515), (0, 8)] {
            let (inner, of_act) =
                (halves(&mut random, rows * 2 * ffn, 8.0), halves(&mut random, rows * ffn, 1.0));
            let weights: Vec<f32> =
                halves(&mut random, rows, 1.0).iter().map(|w| w.to_f32() * 1.01).collect();
            let wide = |values: &[bf16]| values.iter().map(|value| value.to_f32()).collect::<Vec<f32>>();
            let all: Vec<Row> = (0..rows)
                .map(|row| Row {
                    gate: wide(&inner[2 * row * ffn..][..ffn]),
                    up: wide(&inner[(2 * row + 1) * ffn..][..ffn]),
                    of_act: wide(&of_act[row * ffn..][..ffn]),
                })
                .collect();
            let there = Buffer::words(&device.context, &weights);
            for given in [true, false] {
                let weight = |row: usize| if given { weights[row] } else { 1.0 };
                let each = |of: &dyn Fn(usize, &Row) -> Vec<f32>| {
                    bits(all.iter().enumerate().flat_map(|(row, values)| of(row, values)))
                };
                let acts = each(&|row, values| values.act(weight(row)).collect());
                let (of_inner, act) =
                    (buffer(device, &inner), Buffer::new(&device.context, rows as u64 * ffn as u64 * 2));
                let args = SwigluRows {
                    rows: rows as u32,
                    ffn: ffn as u32,
                    inner: of_inner.span(),
                    act: act.span(),
                    weights: given.then(|| there.span()),
                };
                kernels.swiglu_bf16(&device.stream, &args).unwrap();
                device.stream.synchronize().unwrap();
                assert!(act.read::<u16>() == acts, "{rows} rows of {ffn}");
                assert!(of_inner.read::<u16>() == bits(wide(&inner)), "gate and up stay");
                let (gradients, of_weights) =
                    (buffer(device, &of_act), Buffer::new(&device.context, rows as u64 * 4));
                let args = SwigluRows { act: gradients.span(), ..args };
                let to = given.then(|| of_weights.span());
                kernels.swiglu_backward_bf16(&device.stream, &args, to).unwrap();
                device.stream.synchronize().unwrap();
                assert!(gradients.read::<u16>() == acts, "{rows} rows of {ffn}, again");
                let expected = each(&|row, values| values.of_inner(weight(row)));
                assert!(of_inner.read::<u16>() == expected, "{rows} rows of {ffn}, gradients");
                let expected: Vec<u32> = all.iter().map(|row| row.of_weight().to_bits()).collect();
                if given {
                    assert!(of_weights.read::<u32>() == expected, "{rows} rows of {ffn}, weights");
                } else {
                    assert!(of_weights.content().iter().all(|&byte| byte == POISON));
                }
            }
        }
    });
}

#[test]
fn weights_in_bf16_have_gate_and_up_side_by_side() {
    let test = "kernels::swiglu_bf16::weights_in_bf16_have_gate_and_up_side_by_side";
    with_kernels(test, |device| {
        let (mut random, kernels) = (Random(22), LayerKernels::load(&device.context).unwrap());
        for sizes in [[1, 8, 8], [3, 8, 16], [2, 8, 5], [2, 6, 3], [1, 16, 1100], [4, 24, 12], [0, 8, 8]] {
            let [experts, hidden, ffn] = sizes.map(|size: u32| size as usize);
            let weights: Vec<f32> =
                (0..experts * 3 * hidden * ffn).map(|_| f32::from_bits(random.next() as u32)).collect();
            let weights: Vec<f32> = weights.into_iter().map(|w| if w.is_nan() { 1.0 } else { w }).collect();
            let from = Buffer::words(&device.context, &weights);
            let out = Buffer::new(&device.context, weights.len() as u64 * 2);
            kernels.narrow_weights(&device.stream, sizes, [from.span(), out.span()]).unwrap();
            device.stream.synchronize().unwrap();
            let mut expected = Vec::new();
            for expert in weights.chunks(3 * hidden * ffn) {
                let (gate, rest) = expert.split_at(hidden * ffn);
                let (up, down) = rest.split_at(hidden * ffn);
                let rows = gate.chunks(ffn).zip(up.chunks(ffn));
                expected.extend(rows.flat_map(|(gate, up)| [gate, up].concat()));
                expected.extend_from_slice(down);
            }
            assert!(out.read::<u16>() == bits(expected), "{sizes:?}");
        }
    });
}

#[test]
fn memory_that_is_too_small_for_halves_is_refused_by_name() {
    let test = "kernels::swiglu_bf16::memory_that_is_too_small_for_halves_is_refused_by_name";
    with_kernels(test, |device| {
        let kernels = LayerKernels::load(&device.context).unwrap();
        let memory = Buffer::new(&device.context, 1024);
        let good = SwigluRows {
            rows: 2,
            ffn: 5,
            inner: memory.part(0, 40),
            act: memory.part(64, 20),
            weights: Some(memory.part(128, 8)),
        };
        for (args, what, given, needed) in [
            (SwigluRows { inner: memory.part(0, 39), ..good }, "inner", 39, 40),
            (SwigluRows { act: memory.part(64, 19), ..good }, "act", 19, 20),
            (SwigluRows { weights: Some(memory.part(128, 7)), ..good }, "weights", 7, 8),
        ] {
            let expected = DeviceError::TooSmall { kernel: "swiglu_bf16", what, given, needed };
            assert_eq!(kernels.swiglu_bf16(&device.stream, &args), Err(expected));
            let expected = DeviceError::TooSmall { kernel: "swiglu_backward_bf16", what, given, needed };
            assert_eq!(kernels.swiglu_backward_bf16(&device.stream, &args, None), Err(expected));
        }
        let refused = kernels.swiglu_backward_bf16(&device.stream, &good, Some(memory.part(256, 7)));
        assert!(matches!(refused, Err(DeviceError::TooSmall { what: "of_weights", .. })));
        let narrow = |sizes, from, out| kernels.narrow_weights(&device.stream, sizes, [from, out]);
        let refused = narrow([1, 8, 2], memory.part(0, 191), memory.part(256, 96));
        assert!(matches!(refused, Err(DeviceError::TooSmall { what: "weights", needed: 192, .. })));
        let refused = narrow([1, 8, 2], memory.part(0, 192), memory.part(256, 95));
        assert!(matches!(refused, Err(DeviceError::TooSmall { what: "out", needed: 96, .. })));
        let refused = narrow([u32::MAX, 8, 2], memory.span(), memory.span());
        assert!(matches!(refused, Err(DeviceError::Shape { what: "rows of matrices", .. })));
        device.stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
