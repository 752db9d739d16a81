//! Cost of planning a dispatch: sorting a rank's own routing, placing it once counts are known,
//! filling the operands of its program, and bringing a block for a remote node into relay order.
//! `sidelane plan-bench` prints and plots the same.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sidelane::gate::{Pattern, synthetic};
use sidelane::plan::{
    Bins, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, RankSets, ReceiveMode,
    ReceiveSizes, RelayOrder, RowMetadata, RowSizes, SortedRouting, SumOrder,
};
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane_core::schedule::{CallerTables, ControlLayout, FillContext, WindowId};

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
    let map = ExpertMap::contiguous(experts, ranks).unwrap();
    let nodes = NodeMap::from_labels(&(0..ranks).map(|rank| rank / per_node).collect::<Vec<_>>());
    let routing = synthetic(Pattern::Zipf(1.0), experts, 8, tokens, 0, 0).unwrap();
    let (bins, paths) = (Bins::experts(&map, SumOrder::Expert, &nodes), Paths::new(&nodes, route, 0));
    let sizing = RowSizes {
        row_bytes: 4096,
        home_bytes: 4096,
        words_out: 1,
        words_home: 1,
        partial_bytes: None,
        rank_sums: false,
        pulled_bytes: PulledSums::CHUNK_BYTES,
    };
    let frame = PlanContext { bins: &bins, paths, align: 1, chunks: 4, sizing, mode: ReceiveMode::Exact };
    let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
    let (mut counts, mut sizes, mut layout) =
        (Counts::default(), ReceiveSizes::default(), DispatchLayout::default());
    let mut group =
        c.benchmark_group(format!("{tokens} tokens, {experts} experts, {ranks} ranks, {}", route.name()));
    group.throughput(Throughput::Elements(u64::from(tokens) * 8));
    group.bench_function("sort", |b| {
        b.iter(|| {
            sorted.fill(&map, &bins, RowMetadata::Weight, 0, black_box(&routing)).unwrap();
            crossing.fill(&bins, &paths, &sorted);
        })
    });
    let mut words = sorted.counts.clone();
    crossing.staged(&paths, &mut words);
    group.bench_function("place", |b| {
        b.iter(|| {
            counts.clear(words.len() as u32);
            (0..ranks).for_each(|source| counts.add(0, source, &words));
            sizes.fill(&bins, 1, &counts.total, None);
            layout.fill(&frame, (black_box(&sorted), &crossing), 8, &counts, &sizes);
        })
    });
    let control = ControlLayout::new(&paths, &bins, u64::from(tokens) * 8, sizing.note_bytes());
    let far = WindowId::POOL;
    let setting = FillContext { paths, control: &control, sizing, chunks: 4, parity: 0, far, notes: None };
    let mut tables = CallerTables::new(paths, 4);
    group.bench_function("fill", |b| b.iter(|| tables.rows(&setting, black_box(&layout), true)));
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
