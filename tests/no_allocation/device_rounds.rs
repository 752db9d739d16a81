//! Rounds of calls on devices, whose allocations are counted.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::bf16;
use sidelane::device::{DeviceRange, PinnedMemory, Stream};
use sidelane::ep::{Choices, ExpertParallelBuilder, Handle, Report, Tensor, TensorMut, TokenBuffer};
use sidelane::plan::RowLayout;
use sidelane::{Dtype, ExpertParallel, Options, World};

use super::counting::{Library, allocations};
use super::devices::{Memory, stream};
use super::host_rounds::took;
use super::support::{medium, on_ranks, tokens};

pub const HIDDEN: usize = 16;
pub const TOP_K: u32 = 2;
pub const EXPERTS: u32 = 6;
pub const TOKENS: u32 = 9;
pub const RANKS: usize = 4;
pub const ROUNDS: u64 = 20;

/// Tensors of a rank, on its device.
pub struct Tensors {
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

    /// The same, whose tokens lie in a buffer of the instance, and go to each expert, and to each
    /// rank, in a run: the first two thirds to ranks of two experts, the last to those of one.
    fn in_a_buffer(self, buffer: &TokenBuffer) -> Self {
        let x = buffer.range().unwrap().clone();
        self.copy(&x, &self.x);
        let id = |choice: u32| match (choice / TOP_K / (TOKENS / 3), choice % TOP_K) {
            (third @ 0..2, nth) => (third + 2 * nth) as i32,
            (_, nth) => (4 + nth) as i32,
        };
        let ids: Vec<i32> = (0..TOKENS * TOP_K).map(id).collect();
        let ids = Memory::new(self.stream.context(), self.ids.len()).fill(&self.stream, &ids);
        self.stream.synchronize().unwrap();
        Tensors { x, ids, ..self }
    }

    pub fn x(&self) -> Tensor<'_> {
        Tensor::device(&self.x, Dtype::Bf16)
    }

    pub fn choices(&self) -> Choices<'_> {
        Choices::Device { experts: &self.ids, weights: &self.weights }
    }

    pub fn out(&self) -> TensorMut<'_> {
        TensorMut::device(&self.out, Dtype::Bf16)
    }

    fn of_choices(&self) -> TensorMut<'_> {
        TensorMut::device(&self.of_choices, Dtype::F32)
    }

    /// Experts that copy rows.
    pub fn copy(&self, to: &DeviceRange, from: &DeviceRange) {
        let len = to.len().min(from.len());
        self.stream.copy(to.span(0, len).unwrap(), from.span(0, len).unwrap()).unwrap();
    }

    /// The stream goes no further until the gate is opened.
    pub fn close_gate(&self) {
        self.gate.word(0).unwrap().store(0, Ordering::Release);
        self.stream.wait(self.gate.range().word::<u32>(0).unwrap(), 1).unwrap();
    }

    pub fn open_gate(&self) {
        self.gate.word(0).unwrap().store(1, Ordering::Release);
    }
}

/// A dispatch and its combine, each in halves, and the calls along the handle.
pub fn in_halves(ep: &mut ExpertParallel, of: &Tensors) -> Handle {
    let (rows, handle) = ep.start_dispatch(of.x(), of.choices()).unwrap().finish().unwrap();
    let y = handle.output().unwrap();
    of.copy(y.range().unwrap(), &rows.range().unwrap());
    ep.start_combine(y, &handle).unwrap().finish(of.out()).unwrap();
    along(ep, of, &handle, (false, RowLayout::ExpertMajor));
    handle
}

/// The calls along a handle.
pub fn along(ep: &mut ExpertParallel, of: &Tensors, handle: &Handle, (weighted, layout): (bool, RowLayout)) {
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
/// calls that streams have yet to come to are then as long as they will be. With the handle of the
/// last round.
fn allocated_by(library: &Library, mut round: impl FnMut(bool) -> Handle) -> ((u64, u64), Handle) {
    let mut last = None;
    let mut rounds = |count, late| {
        for _ in 0..count {
            drop(last.take());
            last = Some(round(late));
        }
    };
    rounds(3, true);
    let mut own = 0;
    let of_library = library.during(|| {
        let before = allocations();
        rounds(ROUNDS, false);
        own = allocations() - before;
    });
    ((own, of_library), last.expect("the handle of a round"))
}

/// Calls of a round, which are asked or not to have streams as late as they may be, and the handle
/// of its dispatch.
pub type Round<'r> = dyn Fn(&mut ExpertParallel, &Tensors, bool) -> Handle + Sync + 'r;

/// Settings of an instance.
pub type Settings<'s> = dyn for<'g> Fn(ExpertParallelBuilder<'g>) -> ExpertParallelBuilder<'g> + Sync + 's;

/// Runs rounds of an instance on each rank. The first ones are asked to have streams as late as
/// they may be.
pub fn counted(nodes: [u32; RANKS], what: &str, settings: &Settings<'_>, round: &Round<'_>) {
    counted_with((nodes, &medium()), (what, false), settings, round, &|report| {
        assert_eq!(over_loopback(report), nodes != [0; RANKS], "{nodes:?}, {what}");
    });
}

/// Whether rows crossed by memory of the host, because the lane reaches no other.
pub fn over_loopback(report: &Report) -> bool {
    took(report, "loopback") && report.host_staged() == Some("loopback")
}

/// The same in worlds of these options; tokens may lie in a buffer. `check` looks whether calls
/// went as they should, by the report of the last dispatch.
pub fn counted_with(
    (nodes, options): ([u32; RANKS], &Options),
    (what, buffered): (&str, bool),
    settings: &Settings<'_>,
    round: &Round<'_>,
    check: &(dyn Fn(&Report) + Sync),
) {
    let library = Library::new(RANKS);
    on_ranks(&nodes, options, |world: World| {
        let (group, mut of) = (world.all().unwrap(), Tensors::new(world.rank()));
        let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
        let builder = builder.dtype(Dtype::Bf16).max_tokens(TOKENS).on(&of.stream);
        let mut ep = settings(builder).build().unwrap();
        let buffer = buffered.then(|| ep.token_buffer(TOKENS).unwrap());
        if let Some(buffer) = &buffer {
            of = of.in_a_buffer(buffer);
        }
        let (allocated, last) = allocated_by(&library, |late| {
            let handle = round(&mut ep, &of, late);
            ep.synchronize().unwrap();
            handle
        });
        assert_eq!(allocated, (0, 0), "rank {}, {nodes:?}, {what}", world.rank());
        let report = last.report().unwrap();
        check(&report);
        if buffered {
            // By the route that relays, a kernel puts rows into visible order, too.
            let kernels = 1 + usize::from(took(&report, "relay"));
            let moves = report.kernels.iter().filter(|kernel| **kernel == "regroup");
            assert_eq!(moves.count(), kernels, "rows for peers go as they lie: {nodes:?}, {what}");
        }
    });
}
