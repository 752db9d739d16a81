//! What planning a dispatch costs: sorting a rank's own routing, placing it once counts are known, and bringing a
//! block for a remote node into relay order.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sidelane::gate::{Pattern, synthetic};
use sidelane::plan::{Counts, ExpertMap, Frame, Layout, Order, RankSets, RelayOrder, Sizes, Sorted};
use sidelane::topology::NodeMap;

fn planning(c: &mut Criterion) {
    for (tokens, experts, ranks) in [(64, 64, 8), (512, 64, 8), (4096, 256, 64)] {
        let map = ExpertMap::contiguous(experts, ranks).unwrap();
        let nodes = NodeMap::from_labels(&vec![0; ranks as usize]);
        let routing = synthetic(Pattern::Zipf(1.0), experts, 8, tokens, 0, 0).unwrap();
        let frame = Frame { map: &map, nodes: &nodes, me: 0, align: 1, order: Order::Expert };
        let (mut sorted, mut counts, mut sizes) = (Sorted::default(), Counts::default(), Sizes::default());
        let mut layout = Layout::default();
        let mut group = c.benchmark_group(format!("{tokens} tokens, {experts} experts, {ranks} ranks"));
        group.throughput(Throughput::Elements(u64::from(tokens) * 8));
        group.bench_function("sort", |b| b.iter(|| sorted.fill(&map, 0, black_box(&routing)).unwrap()));
        group.bench_function("place", |b| {
            b.iter(|| {
                counts.clear(&map, 0);
                (0..ranks).for_each(|source| counts.add(&map, 0, source, sorted.counts.iter().copied()));
                sizes.fill(&map, 1, &counts.total);
                layout.fill(&frame, black_box(&sorted), 8, &counts, &sizes);
            })
        });
        group.finish();
    }
}

fn relay_order(c: &mut Criterion) {
    for (tokens, experts, nodes, ranks) in [(512, 64, 2, 4), (4096, 256, 2, 8), (4096, 288, 2, 72)] {
        let routing = synthetic(Pattern::Uniform, experts, 8, tokens, 0, 0).unwrap();
        let (each, held) = (experts / nodes, experts / nodes / ranks);
        let mut sets = RankSets::new(ranks);
        for token in 0..tokens {
            let ids = routing.experts_of(token).iter().map(|&id| id as u32);
            sets.push(ids.filter(|id| id / each == 0).map(|id| id / held));
        }
        let mut order = RelayOrder::default();
        let mut group = c.benchmark_group(format!("{tokens} tokens, {ranks} ranks a node"));
        group.throughput(Throughput::Elements(u64::from(tokens)));
        group.bench_function("relay order", |b| b.iter(|| order.fill(black_box(&sets))));
        group.finish();
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(1)).warm_up_time(std::time::Duration::from_millis(300)); targets = planning, relay_order }
criterion_main!(benches);
