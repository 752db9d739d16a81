//! Calls on a device. The fake driver is a library of its own with an allocator of its own, so what
//! it allocates for streams and kernels is not counted.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};

use half::bf16;
use sidelane::device::{DeviceRange, PinnedMemory, Stream};
use sidelane::ep::{Choices, ExpertParallelBuilder, Graphs, Handle, Tensor, TensorMut};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, World};

use super::apart::each_with_kernels;
use super::counting::{Library, allocations};
use super::devices::{Memory, stream};
use super::support::{medium, on_ranks, tokens};

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 6;
const TOKENS: u32 = 9;
const RANKS: usize = 4;
const ROUNDS: u64 = 20;

/// Tensors of a rank, on its device.
struct Tensors {
    stream: Arc<Stream>,
    x: DeviceRange,
    ids: DeviceRange,
    weights: DeviceRange,
    out: DeviceRange,
    /// Gradients of the weights of choices, and of rows.
    of_choices: DeviceRange,
    of_rows: DeviceRange,
    /// A word that a stream waits for.
    gate: PinnedMemory,
}

impl Tensors {
    fn new(rank: u32) -> Self {
        let stream = stream(rank);
        let input = tokens::<bf16>(rank.into(), TOKENS, HIDDEN, TOP_K, EXPERTS);
        let memory = |bytes: usize| Memory::new(stream.context(), bytes as u64);
        let (tokens, choices) = (input.x.len() * 2, input.ids.len() * 4);
        let of_rows = vec![0.5_f32; RANKS * input.ids.len() * TOP_K as usize];
        Tensors {
            x: memory(tokens).fill(&stream, &input.x),
            ids: memory(choices).fill(&stream, &input.ids),
            weights: memory(choices).fill(&stream, &input.weights),
            out: memory(tokens).part(tokens as u64),
            of_choices: memory(choices).part(choices as u64),
            of_rows: memory(of_rows.len() * 4).fill(&stream, &of_rows),
            gate: PinnedMemory::new(stream.context(), 8).unwrap(),
            stream,
        }
    }

    fn x(&self) -> Tensor<'_> {
        Tensor::device(&self.x, Dtype::Bf16)
    }

    fn choices(&self) -> Choices<'_> {
        Choices::Device { experts: &self.ids, weights: &self.weights }
    }

    fn out(&self) -> TensorMut<'_> {
        TensorMut::device(&self.out, Dtype::Bf16)
    }

    fn of_choices(&self) -> TensorMut<'_> {
        TensorMut::device(&self.of_choices, Dtype::F32)
    }

    /// Experts that copy rows.
    fn copy(&self, to: &DeviceRange, from: &DeviceRange) {
        let len = to.len().min(from.len());
        self.stream.copy(to.span(0, len).unwrap(), from.span(0, len).unwrap()).unwrap();
    }

    /// The stream goes no further until the gate is opened.
    fn close_gate(&self) {
        self.gate.word(0).unwrap().store(0, Ordering::Release);
        self.stream.wait(self.gate.range().word::<u32>(0).unwrap(), 1).unwrap();
    }

    fn open_gate(&self) {
        self.gate.word(0).unwrap().store(1, Ordering::Release);
    }
}

/// The calls along a handle.
fn along(ep: &mut ExpertParallel, of: &Tensors, handle: &Handle, (weighted, layout): (bool, RowLayout)) {
    let y = handle.output().unwrap();
    ep.combine_into(y, handle, of.out()).unwrap();
    let rows = ep.dispatch_cached(of.x(), handle).unwrap();
    drop(ep.combine_backward_into(of.x(), handle, weighted.then(|| of.of_choices())).unwrap());
    let of_row = if layout == RowLayout::RankMajor { TOP_K } else { 1 };
    let of_rows = of.of_rows.part(0, u64::from(handle.rows() * of_row) * 4).unwrap();
    let of_rows = Some(Tensor::device(&of_rows, Dtype::F32));
    let gradients = handle.output().unwrap();
    of.copy(gradients.range().unwrap(), &rows.range().unwrap());
    ep.dispatch_backward_into(gradients, of_rows, handle, of.out(), Some(of.of_choices())).unwrap();
}

/// Allocations of this rank's thread, and of the library's, in rounds behind the first. Lists of
/// calls that streams have yet to come to are then as long as they will be.
fn allocated_by(library: &Library, mut round: impl FnMut(bool)) -> (u64, u64) {
    (0..3).for_each(|_| round(true));
    let mut own = 0;
    let of_library = library.during(|| {
        let before = allocations();
        (0..ROUNDS).for_each(|_| round(false));
        own = allocations() - before;
    });
    (own, of_library)
}

/// Settings of an instance.
type Settings<'s> = dyn for<'g> Fn(ExpertParallelBuilder<'g>) -> ExpertParallelBuilder<'g> + Sync + 's;

/// Runs rounds of an instance on each rank. The first ones are asked to have streams as late as
/// they may be.
fn counted(
    nodes: [u32; RANKS],
    what: &str,
    settings: &Settings<'_>,
    round: &(dyn Fn(&mut ExpertParallel, &Tensors, bool) + Sync),
) {
    let library = Library::new(RANKS);
    on_ranks(&nodes, &medium(), |world: World| {
        let (group, of) = (world.all().unwrap(), Tensors::new(world.rank()));
        let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
        let builder = builder.dtype(Dtype::Bf16).max_tokens(TOKENS).on(&of.stream);
        let mut ep = settings(builder).build().unwrap();
        let allocated = allocated_by(&library, |late| {
            round(&mut ep, &of, late);
            ep.synchronize().unwrap();
        });
        assert_eq!(allocated, (0, 0), "rank {}, {nodes:?}, {what}", world.rank());
    });
}

#[test]
fn calls_that_the_enqueuer_lays_out_do_not_allocate() {
    each_with_kernels("device::calls_that_the_enqueuer_lays_out_do_not_allocate", &[&[]], || {
        let ways = [([0; 4], Route::Direct), ([0, 1, 0, 1], Route::Direct), ([0, 1, 1, 1], Route::Pxn)];
        for (nodes, route) in ways {
            for (order, weighted, layout) in [
                (SumOrder::Expert, false, RowLayout::ExpertMajor),
                (SumOrder::Rank, true, RowLayout::ExpertMajor),
                (SumOrder::Node, false, RowLayout::ExpertMajor),
                (SumOrder::Rank, false, RowLayout::RankMajor),
            ] {
                let everywhere = Barrier::new(RANKS);
                let round = |ep: &mut ExpertParallel, of: &Tensors, late: bool| {
                    let (rows, handle) = ep.dispatch(of.x(), of.choices()).unwrap();
                    let y = handle.output().unwrap();
                    of.copy(y.range().unwrap(), &rows.range().unwrap());
                    ep.combine_into(y, &handle, of.out()).unwrap();
                    // Between nodes the host waits for the stream.
                    if late && nodes == [0; 4] {
                        of.close_gate();
                        (0..2).for_each(|_| along(ep, of, &handle, (weighted, layout)));
                        everywhere.wait();
                        of.open_gate();
                    } else {
                        along(ep, of, &handle, (weighted, layout));
                    }
                    drop(ep.prepare(of.choices()).unwrap());
                };
                let what = format!("{route:?}, {order:?}, {layout:?}");
                let settings: &Settings<'_> = &|builder| {
                    let builder = builder.sum_order(order).weighted(weighted).layout(layout);
                    builder.route(route).device_heap(1 << 20)
                };
                counted(nodes, &what, settings, &round);
            }
        }
    });
}

#[test]
fn calls_in_slots_do_not_allocate() {
    each_with_kernels("device::calls_in_slots_do_not_allocate", &[&[]], || {
        for nodes in [[0; 4], [0, 1, 0, 1]] {
            let mode = ReceiveMode::Slots { rows: TOKENS, overflow: Overflow::Error };
            counted(
                nodes,
                "slots",
                &|builder| builder.mode(mode).layout(RowLayout::RankMajor),
                &|ep, of, _| {
                    let (rows, handle) = ep.dispatch(of.x(), of.choices()).unwrap();
                    let y = handle.output().unwrap();
                    of.copy(y.range().unwrap(), &rows.range().unwrap());
                    ep.combine_into(y, &handle, of.out()).unwrap();
                    let (_, handle) = ep.start_dispatch(of.x(), of.choices()).unwrap().finish().unwrap();
                    ep.release(Some(&handle)).unwrap();
                },
            );
            let mode = ReceiveMode::Budget { rows: 30, overflow: Overflow::Drop };
            let dispatch = |ep: &mut ExpertParallel, of: &Tensors| {
                let started = ep.start_dispatch(of.x(), of.choices()).unwrap();
                let (rows, handle) = started.finish_async().unwrap();
                let y = handle.output().unwrap();
                of.copy(y.range().unwrap(), &rows.range().unwrap());
                ep.combine_into(y, &handle, of.out())
            };
            counted(
                nodes,
                "a budget in slots",
                &|builder| builder.mode(mode).sum_order(SumOrder::Rank).graphs(Graphs::Slots),
                &|ep, of, _| dispatch(ep, of).unwrap(),
            );
        }
    });
}
