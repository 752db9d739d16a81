//! Once shapes are known, no call allocates.

#![allow(unsafe_code, reason = "an allocator cannot be written in safe Rust")]

#[path = "support/placer.rs"]
mod placer;
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};

use half::bf16;
use placer::Placer;
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::dtype::PartialDtype;
use sidelane::gate::{DropPolicy, Gate, GateInput, Noise, Preset, Routing, Select};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel};
use support::{Tokens, medium, on_ranks, tokens};

/// The system's allocator, which counts for each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of the library's own threads.
static OF_LIBRARY: AtomicU64 = AtomicU64::new(0);

/// Whether this is a progress thread or a relay, by the name that the kernel keeps.
fn is_of_library() -> bool {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    [&b"sidelane-net"[..], b"sidelane-relay"].iter().any(|of| name.starts_with(of))
}

fn count() {
    if is_of_library() {
        OF_LIBRARY.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is ending has no counter any more, and no test reads it.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// Tests with worlds go one at a time: threads of one would be counted in another.
static TURN: Mutex<()> = Mutex::new(());

/// Allocations of the library's threads while all `ranks` do their rounds.
struct Library(Barrier, AtomicU64);

impl Library {
    fn new(ranks: usize) -> Self {
        Library(Barrier::new(ranks), AtomicU64::new(0))
    }

    /// The rounds of a rank, which begin and end with those of the others.
    fn during(&self, rounds: impl FnOnce()) -> u64 {
        let Library(barrier, before) = self;
        if barrier.wait().is_leader() {
            before.store(OF_LIBRARY.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        barrier.wait();
        rounds();
        barrier.wait();
        OF_LIBRARY.load(Ordering::Relaxed) - before.load(Ordering::Relaxed)
    }
}

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 6;

/// A layer's forward and backward, into tensors that are there already.
fn round(ep: &mut ExpertParallel, mine: &Tokens<bf16>, out: &mut [bf16], weights: &mut [f32]) {
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
    let mut y = handle.output().unwrap();
    y.rows_mut::<bf16>().unwrap().copy_from_slice(rows.rows().unwrap());
    ep.combine_into(y, &handle, &mut *out).unwrap();
    ep.combine_into(rows.rows::<bf16>().unwrap(), &handle, &mut *out).unwrap();
    let again = ep.dispatch_cached(&mine.x, &handle).unwrap();
    let gradients = again.rows::<bf16>().unwrap();
    let (of_rows, home) = (Some(handle.row_weights().into()), Some(weights.into()));
    ep.dispatch_backward_into(gradients, of_rows, &handle, out, home).unwrap();
}

/// Rounds that are counted. Threads of the library may allocate at their start and at their first
/// sleep, of which no rank knows when it is: fewer times in all than there are rounds.
const ROUNDS: u64 = 40;

/// Allocations of rounds behind the first: this rank's thread, and those of the library. These
/// make dispatches in halves, too, of which the relay does its part in its thread.
fn allocated_by(ep: &mut ExpertParallel, mine: &Tokens<bf16>, library: &Library) -> (u64, u64) {
    let (mut out, mut weights) = (vec![bf16::ZERO; mine.x.len()], vec![0.0; mine.ids.len()]);
    round(ep, mine, &mut out, &mut weights);
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let in_halves = |ep: &mut ExpertParallel| {
        drop(ep.start_dispatch(&mine.x, &routing).unwrap().finish().unwrap());
    };
    in_halves(ep);
    let mut own = 0;
    let of_library = library.during(|| {
        for _ in 0..ROUNDS {
            let before = allocations();
            round(ep, mine, &mut out, &mut weights);
            own += allocations() - before;
            in_halves(ep);
        }
    });
    (own, of_library)
}

#[test]
fn calls_of_known_shapes_do_not_allocate() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
                let (own, of_library) = allocated_by(&mut ep, &mine, &library);
                assert!(
                    own == 0 && of_library < ROUNDS,
                    "{own}, {of_library} at rank {}, {nodes:?}, {route:?}, {order:?}",
                    world.rank()
                );
            });
        }
    }
}

#[test]
fn collectives_and_messages_of_known_shapes_do_not_allocate() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
            assert!(own == 0 && of_library < ROUNDS, "{own}, {of_library} at rank {me}, {nodes:?}, {sums:?}");
        });
    }
}

#[test]
fn calls_that_drop_rows_do_not_allocate() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
                let (own, of_library) = allocated_by(&mut ep, &mine, &library);
                assert!(
                    own == 0 && of_library < ROUNDS,
                    "{own}, {of_library} at rank {}, {mode:?}, {route:?}, {layout:?}, {spans}",
                    world.rank()
                );
            });
        }
    }
}

#[test]
fn a_gate_and_its_placement_do_not_allocate() {
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

#[test]
fn the_counter_counts() {
    let before = allocations();
    let held = std::hint::black_box(vec![1u8; 100]);
    assert_eq!(allocations() - before, 1);
    drop(held);
}
