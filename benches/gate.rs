//! What a router costs: gate and placement of 4096 tokens, 256 experts, 8 choices, on one core.
//!
//! The floor is one reading of the logits with a sum over them, in order of memory: 4 MiB, which no router can do without.
//! Where all experts have scores, another 4 MiB are written, and an exponential in f64 is made per logit.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::gate::{Call, Gate, Preset};
use sidelane::plan::{Bins, ExpertMap, Notes, Order, Sorted};
use sidelane::topology::NodeMap;

const RANKS: u32 = 64;

/// Logits as a trained router's: about normal, some tenths to some units wide.
fn logits(tokens: u32, experts: u32) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    (0..tokens * experts).map(|_| (0..6).map(|_| random.random::<f32>() - 0.5).sum::<f32>() * 2.0).collect()
}

fn gate(c: &mut Criterion) {
    for (tokens, experts, top_k) in [(4096, 256, 8), (512, 64, 8), (4096, 8, 2)] {
        let logits = logits(tokens, experts);
        let map = ExpertMap::contiguous(experts, RANKS.min(experts)).unwrap();
        let nodes = NodeMap::from_labels(&vec![0; RANKS.min(experts) as usize]);
        let bins = Bins::experts(&map, Order::Expert, &nodes);
        let bias = vec![0.01; experts as usize];
        let mut group = c.benchmark_group(format!("{tokens} tokens, {experts} experts, top {top_k}"));
        group.throughput(Throughput::Elements(u64::from(tokens) * u64::from(experts)));
        group.bench_function("floor", |b| {
            b.iter(|| {
                let mut lanes = [0f32; 16];
                for row in black_box(&logits).chunks_exact(16.min(experts as usize)) {
                    lanes.iter_mut().zip(row).for_each(|(lane, logit)| *lane += logit);
                }
                lanes
            })
        });
        for preset in [Preset::DeepseekV3, Preset::Qwen3, Preset::Mixtral] {
            let Ok(config) = preset.config(experts, top_k) else { continue };
            let mut gate = Gate::new(config).unwrap();
            let mut sorted = Sorted::default();
            let bias = (preset == Preset::DeepseekV3).then_some(bias.as_slice());
            group.bench_function(preset.name(), |b| {
                b.iter(|| {
                    gate.route(&Call { logits: black_box(&logits), bias, ..Call::default() })
                        .unwrap()
                        .tokens()
                })
            });
            group.bench_function(format!("{preset} and placement"), |b| {
                b.iter(|| {
                    let call = Call { logits: black_box(&logits), bias, ..Call::default() };
                    let decision = gate.route(&call).unwrap();
                    sorted.fill(&map, &bins, Notes::Weight, 0, &decision.routing()).unwrap();
                    sorted.entries()
                })
            });
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(1)).warm_up_time(std::time::Duration::from_millis(300)); targets = gate }
criterion_main!(benches);
