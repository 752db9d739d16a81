//! Cost of a router on one core: of the decision alone, and of the decision with its placement,
//! which a dispatch waits for. The main case is 4096 tokens, 256 experts, 8 choices; half of it
//! shows the growth.
//!
//! Placement is a rank's work on its routing: sorting it by bin, and the layout once the counts of
//! all ranks are known; here all ranks have the same.
//!
//! The floor is one reading of the logits with a sum over them, in order of memory: 4 MiB, which
//! every router needs. A softmax of all also needs an exponential in f64 per logit: the difference
//! between `olmoe` and `mixtral`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::gate::{Gate, GateInput, Preset};
use sidelane::plan::RowLayout;

#[path = "../tests/support/placer.rs"]
mod placer;

use placer::Placer;

/// Logits as a trained router's: about normal, some tenths to some units wide.
fn logits(tokens: u32, experts: u32) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    (0..tokens * experts).map(|_| (0..6).map(|_| random.random::<f32>() - 0.5).sum::<f32>() * 2.0).collect()
}

fn gate(c: &mut Criterion) {
    for (tokens, experts, top_k) in [(4096, 256, 8), (2048, 256, 8), (512, 64, 8), (4096, 8, 2)] {
        let logits = logits(tokens, experts);
        let bias: Vec<f32> = (0..experts).map(|expert| (expert % 7) as f32 * 0.01 - 0.03).collect();
        let mut placer = Placer::new(experts, experts.min(64), RowLayout::ExpertMajor);
        let mut group = c.benchmark_group(format!("{tokens} tokens, {experts} experts, top {top_k}"));
        group.throughput(Throughput::Elements(u64::from(tokens) * u64::from(experts)));
        group.bench_function("floor", |b| {
            b.iter(|| {
                let mut lanes = [0f32; 8];
                for row in black_box(&logits).as_chunks::<8>().0 {
                    lanes.iter_mut().zip(row).for_each(|(lane, logit)| *lane += logit);
                }
                lanes
            })
        });
        for preset in [Preset::DeepseekV3, Preset::Qwen3, Preset::Olmoe, Preset::Mixtral] {
            // A few experts are no eight groups.
            let Ok(config) = preset.config(experts, top_k) else { continue };
            let mut gate = Gate::new(config).unwrap();
            let bias = (preset == Preset::DeepseekV3).then_some(bias.as_slice());
            group.bench_function(preset.name(), |b| {
                b.iter(|| {
                    let call = GateInput::new(black_box(&logits)).with_bias(bias);
                    gate.route(&call).unwrap().required()
                })
            });
            group.bench_function(format!("{preset} and placement"), |b| {
                b.iter(|| {
                    let call = GateInput::new(black_box(&logits)).with_bias(bias);
                    placer.place(&gate.route(&call).unwrap().routing())
                })
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .measurement_time(Duration::from_secs(1))
        .warm_up_time(Duration::from_millis(300));
    targets = gate
}
criterion_main!(benches);
