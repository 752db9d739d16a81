//! Cost of planning a dispatch: sorting a rank's own routing, placing it once counts are known,
//! filling the operands of its program, and bringing a block for a remote node into relay order.
//! `sidelane plan-bench` prints and plots the same steps.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sidelane::gate::{Pattern, synthetic};
use sidelane::plan::{RankSets, RelayOrder, RowLayout};
use sidelane::topology::Route;
use sidelane_testkit::timing::planning_steps::{Planning, Shape};

fn planning(c: &mut Criterion) {
    for (tokens, experts, ranks) in
        [(64, 64, 8), (512, 64, 8), (4096, 256, 8), (4096, 256, 64), (4096, 512, 512)]
    {
        for (route, per_node) in [(Route::Direct, ranks), (Route::Pxn, ranks / 2)] {
            plan(c, (tokens, experts, ranks), route, per_node);
        }
    }
}

fn plan(c: &mut Criterion, (tokens, experts, ranks): (u32, u32, u32), route: Route, per_node: u32) {
    let (pattern, top_k, layout) = (Pattern::Zipf(1.0), 8, RowLayout::ExpertMajor);
    let shape = Shape { pattern, tokens, top_k, experts, ranks, per_node, route, layout };
    let mut planning = Planning::new(shape).unwrap();
    let name = format!("{tokens} tokens, {experts} experts, {ranks} ranks, {}", route.name());
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements(u64::from(tokens * top_k)));
    group.bench_function("sort", |b| b.iter(|| planning.sort().unwrap()));
    let words = planning.sort().unwrap();
    group.bench_function("place", |b| b.iter(|| planning.place(&words)));
    group.bench_function("fill", |b| b.iter(|| planning.fill()));
    group.finish();
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
