//! Calls on the host, collectives and gates.

use half::bf16;
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::dtype::PartialDtype;
use sidelane::gate::{DropPolicy, Gate, GateInput, Noise, Preset, Select};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel};

use super::counting::{Library, allocations, turn};
use super::host_rounds::{EXPERTS, HIDDEN, ROUNDS, TOP_K, allocated_by, took};
use super::placer::Placer;
use super::support::{medium, on_ranks, tokens};

#[test]
fn calls_of_known_shapes_do_not_allocate() {
    let _turn = turn();
    const NODES: [[u32; 4]; 4] = [[0; 4], [0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 2]];
    for (nodes, route) in NODES.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route))) {
        for (order, weighted) in [(SumOrder::Expert, false), (SumOrder::Rank, true), (SumOrder::Node, true)] {
            let library = Library::new(4);
            on_ranks(&nodes, &medium(), |world| {
                let group = world.all().unwrap();
                let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K);
                let builder = builder.hidden(HIDDEN).dtype(Dtype::Bf16).sum_order(order).weighted(weighted);
                let mut ep = builder.align(4).route(route).build().unwrap();
                let mine = tokens::<bf16>(u64::from(world.rank()), 9, HIDDEN, TOP_K, EXPERTS);
                let (allocated, reports) = allocated_by(&mut ep, &mine, &library);
                let what = format!("rank {}, {nodes:?}, {route:?}, {order:?}", world.rank());
                assert_eq!(allocated, (0, 0), "{what}");
                let crosses = nodes != [0; 4];
                assert_eq!(reports.map(|report| took(&report, "loopback")), [crosses; 2], "{what}");
            });
        }
    }
}

#[test]
fn collectives_and_messages_of_known_shapes_do_not_allocate() {
    let _turn = turn();
    for (nodes, sums) in [[0; 4], [0, 1, 1, 2]].into_iter().flat_map(|nodes| {
        [AllReduceAlgorithm::Direct, AllReduceAlgorithm::Ring(PartialDtype::F32)].map(|sums| (nodes, sums))
    }) {
        let library = Library::new(4);
        on_ranks(&nodes, &medium(), |world| {
            let builder = world.all().unwrap();
            let mut group = Communicator::builder(&builder)
                .chunk(4096)
                .one_shot_bytes(64)
                .zero_copy_bytes(20_000)
                .algorithm(sums)
                .build()
                .unwrap();
            let (mut data, mut came, mut parts) =
                (vec![1.0f32; 5000], vec![0.0f32; 5000], Vec::with_capacity(5000));
            let (me, pair) = (world.rank(), world.rank() ^ 1);
            let mut round = || {
                group.all_reduce(&mut data).unwrap();
                group.all_reduce(&mut data[..8]).unwrap();
                group.broadcast(1, &mut data).unwrap();
                group.all_to_all(&data, &mut came).unwrap();
                group.all_to_all_v(&data[..1000], &[0, 300, 300, 400], &mut parts).unwrap();
                assert_eq!(group.all_to_all_zero_copy(&data).unwrap(), came);
                group.reduce_scatter(&data[..4000], &mut came[..1000]).unwrap();
                group.send_receive(pair, &data[..3000], &mut came[..3000]).unwrap();
                data.fill(me as f32);
            };
            round();
            let mut own = 0;
            let of_library = library.during(|| {
                let before = allocations();
                (0..ROUNDS).for_each(|_| round());
                own = allocations() - before;
            });
            assert!(own == 0 && of_library == 0, "{own}, {of_library} at rank {me}, {nodes:?}, {sums:?}");
        });
    }
}

#[test]
fn calls_that_drop_rows_do_not_allocate() {
    let _turn = turn();
    let overflow = Overflow::Drop;
    let modes = [
        ReceiveMode::Exact,
        ReceiveMode::Budget { rows: 7, overflow },
        ReceiveMode::Slots { rows: 2, overflow },
    ];
    let ways = Route::ALL.into_iter().flat_map(|route| RowLayout::ALL.map(|l| (route, l, false)));
    for (route, layout, spans) in ways.chain([(Route::Pxn, RowLayout::RankMajor, true)]) {
        for mode in modes {
            let library = Library::new(4);
            on_ranks(&[0, 1, 1, 1], &medium(), |world| {
                let group = world.all().unwrap();
                let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K);
                let builder = builder.hidden(HIDDEN).dtype(Dtype::Bf16).route(route).layout(layout);
                let mut ep = builder.mode(mode).coalesce_relays(spans).build().unwrap();
                let mine = tokens::<bf16>(u64::from(world.rank()), 9, HIDDEN, TOP_K, EXPERTS);
                let (allocated, reports) = allocated_by(&mut ep, &mine, &library);
                let what = format!("rank {}, {mode:?}, {route:?}, {layout:?}, {spans}", world.rank());
                assert_eq!(allocated, (0, 0), "{what}");
                assert!(reports.iter().all(|report| took(report, "loopback")), "{what}");
            });
        }
    }
}

#[test]
fn a_gate_and_its_placement_do_not_allocate() {
    let _turn = turn();
    const EXPERTS: usize = 64;
    for preset in Preset::ALL {
        let config = preset.config(EXPERTS as u32, preset.fixed_top_k().unwrap_or(4)).unwrap();
        let mut configs = vec![config.clone()];
        for keep in [
            DropPolicy::Score,
            DropPolicy::Position,
            DropPolicy::FirstChoices,
            DropPolicy::Priority,
            DropPolicy::Random,
        ] {
            let capacity = config.capacity.map(|capacity| capacity.with_drop_policy(keep));
            configs.push(config.clone().with_capacity(capacity));
        }
        let select = Select::Sinkhorn { tolerance: 1e-4 };
        configs.push(config.with_select(select).with_noise(Noise::None));
        for (config, layout) in configs.into_iter().flat_map(|c| RowLayout::ALL.map(|l| (c.clone(), l))) {
            let logits: Vec<f32> = (0..60 * EXPERTS).map(|i| (i * 37 % 101) as f32 * 0.05).collect();
            // All experts alike, and all tokens alike.
            let flat = vec![0.5; logits.len()];
            let crowded: Vec<f32> = (0..logits.len()).map(|i| (i % EXPERTS) as f32).collect();
            let call = GateInput::default().with_training(true);
            let mut gate = Gate::new(config.clone()).unwrap();
            let mut placer = Placer::new(EXPERTS as u32, 4, layout);
            let mut scores = vec![0.0; logits.len()];
            let mut place = |gate: &mut Gate, tokens: usize| {
                let call = call.with_logits(&logits[..tokens * EXPERTS]);
                placer.place(&gate.route(&call).unwrap().routing());
                gate.scores(&call, &mut scores[..tokens * EXPERTS]).unwrap();
            };
            place(&mut gate, 60);
            let before = allocations();
            [60, 1, 0, 30, 60].into_iter().for_each(|tokens| place(&mut gate, tokens));
            for logits in [&flat, &crowded] {
                gate.route(&call.with_logits(logits)).unwrap();
            }
            assert_eq!(allocations() - before, 0, "{config:?}, {layout:?}");
        }
    }
}
