//! A rank with an instance on a device, and one on the host to compare it with.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidelane::device::{DeviceRange, PinnedMemory, Stream};
use sidelane::dtype::PartialDtype;
use sidelane::ep::{
    Choices, ExpertOutput, ExpertParallelBuilder, ExpertRows, Graphs, Handle, Report, Tensor, TensorMut,
};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Element, Error, ExpertParallel, Group};

use super::devices::{Memory, stream};
use super::support::layer::bits;
use super::support::{self, To};

/// What is exchanged, and how.
#[derive(Clone, Debug)]
pub struct Case {
    /// The node of each rank.
    pub nodes: Vec<u32>,
    pub route: Route,
    pub map: ExpertMap,
    pub top_k: u32,
    pub hidden: usize,
    pub align: u32,
    pub max_tokens: u32,
    pub mode: ReceiveMode,
    pub graphs: Graphs,
    pub max_in_flight: u32,
    /// Limit on the blocks of kernels.
    pub max_blocks: Option<u32>,
    pub order: SumOrder,
    pub wire: PartialDtype,
    pub weighted: bool,
    pub fp8: bool,
    pub layout: RowLayout,
}

impl Case {
    pub fn new(ranks: u32, experts: u32, top_k: u32) -> Case {
        Case::across(&vec![0; ranks as usize], experts, top_k)
    }

    /// One in which rank r is on node `nodes[r]`.
    pub fn across(nodes: &[u32], experts: u32, top_k: u32) -> Case {
        let map = ExpertMap::contiguous(experts, nodes.len() as u32).unwrap();
        Case {
            nodes: nodes.to_vec(),
            route: Route::Direct,
            map,
            top_k,
            hidden: 16,
            align: 1,
            max_tokens: 12,
            mode: ReceiveMode::Exact,
            graphs: Graphs::Off,
            max_in_flight: 2,
            max_blocks: None,
            order: SumOrder::Expert,
            wire: PartialDtype::F32,
            weighted: false,
            fp8: false,
            layout: RowLayout::ExpertMajor,
        }
    }

    /// The same with a budget of as many rows: those behind it are dropped.
    pub fn dropping(self, rows: u32) -> Case {
        let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
        Case { mode, ..self }
    }

    pub fn settings<'g, E: Element>(&self, group: &'g Group) -> ExpertParallelBuilder<'g> {
        let builder = ExpertParallel::builder(group).expert_map(self.map.clone()).top_k(self.top_k);
        let builder = builder.hidden(self.hidden).dtype(E::DTYPE).align(self.align);
        let builder = builder.sum_order(self.order).partial_dtype(self.wire).weighted(self.weighted);
        let builder = builder.fp8(self.fp8).layout(self.layout);
        builder.max_tokens(self.max_tokens).mode(self.mode).route(self.route)
    }

    /// Rows of a rank's, at most.
    fn most_rows(&self) -> u64 {
        let rows = self.map.ranks() * self.max_tokens * self.top_k;
        u64::from(rows + self.map.slots() * self.align)
    }
}

/// One rank.
pub struct Rank<E> {
    pub case: Case,
    pub host: ExpertParallel,
    pub planned: ExpertParallel,
    pub stream: Arc<Stream>,
    pub x: Memory,
    pub experts: Memory,
    pub weights: Memory,
    pub out: Memory,
    pub rows: Memory,
    /// How bytes went in the last round: of its dispatch and its combine.
    pub reports: Vec<Report>,
    element: std::marker::PhantomData<E>,
}

/// What a rank puts in.
pub type Input<E> = support::Tokens<E>;

/// The tensors of a dispatch: tokens, experts and weights.
pub fn call<E: Element>([x, experts, weights]: &[DeviceRange; 3]) -> (Tensor<'_>, Choices<'_>) {
    (Tensor::device(x, E::DTYPE), Choices::Device { experts, weights })
}

/// The tensor of a combine's sums.
pub fn target<E: Element>(out: &DeviceRange) -> TensorMut<'_> {
    TensorMut::device(out, E::DTYPE)
}

impl<E: Element> Rank<E>
where
    f32: To<E>,
    E: Into<f32>,
{
    /// On the device of the rank's number.
    pub fn new(group: &Group, case: &Case) -> Self {
        Self::with(group, case, |builder| builder)
    }

    /// With the heap that its settings have by default.
    pub fn by_default(group: &Group, case: &Case) -> Self {
        Self::built(group, case, stream(group.rank()), |builder| builder)
    }

    pub fn with(
        group: &Group,
        case: &Case,
        settings: impl FnOnce(ExpertParallelBuilder<'_>) -> ExpertParallelBuilder<'_>,
    ) -> Self {
        Self::on_stream(group, case, stream(group.rank()), settings)
    }

    /// With this stream as the caller's.
    pub fn on_stream(
        group: &Group,
        case: &Case,
        stream: Arc<Stream>,
        settings: impl FnOnce(ExpertParallelBuilder<'_>) -> ExpertParallelBuilder<'_>,
    ) -> Self {
        // Room for the rows of the calls in flight. The driver fills it with poison, and every rank
        // maps it, so more costs most of the time of a test of long rows.
        let heap = 4 * case.most_rows() * ((case.hidden * E::DTYPE.size()) as u64 + 64);
        Self::built(group, case, stream, |builder| match case.graphs {
            Graphs::Off => settings(builder.device_heap(heap)),
            _ => settings(builder),
        })
    }

    fn built(
        group: &Group,
        case: &Case,
        stream: Arc<Stream>,
        settings: impl FnOnce(ExpertParallelBuilder<'_>) -> ExpertParallelBuilder<'_>,
    ) -> Self {
        let context = stream.context();
        let row = (case.hidden * E::DTYPE.size()) as u64;
        let (tokens, choices) = (u64::from(case.max_tokens), u64::from(case.max_tokens * case.top_k));
        let builder = case.settings::<E>(group).on(&stream).graphs(case.graphs);
        let builder = match case.graphs {
            Graphs::Off => builder.max_in_flight(case.max_in_flight),
            _ => builder,
        };
        let builder = case.max_blocks.into_iter().fold(builder, ExpertParallelBuilder::max_blocks);
        Rank {
            case: case.clone(),
            host: case.settings::<E>(group).build().unwrap(),
            planned: settings(builder).build().unwrap(),
            x: Memory::new(context, tokens * row),
            experts: Memory::new(context, choices * 4),
            weights: Memory::new(context, choices * 4),
            out: Memory::new(context, tokens * row),
            rows: Memory::new(context, case.most_rows() * row),
            reports: Vec::new(),
            stream,
            element: std::marker::PhantomData,
        }
    }

    /// What stands in row `row` of this rank's outputs, made of what came.
    pub fn expert(&self, nth: usize, value: E) -> E {
        (value.into() * (1.0 + nth as f32 / 64.0) + self.planned.rank() as f32 / 8.0).to()
    }

    /// A dispatch and a combine of the same tokens on host and device, compared in everything that
    /// is seen of them.
    pub fn round(&mut self, input: &Input<E>) {
        let Case { top_k, hidden, .. } = self.case;
        let routing = Routing::new(top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let (rows, handle) = self.host.dispatch(&input.x, &routing).unwrap();
        let seen: Vec<E> = rows.to_vec().unwrap();
        let mut y = handle.output().unwrap();
        let made: Vec<E> =
            seen.iter().enumerate().map(|(at, &value)| self.expert(at / hidden, value)).collect();
        y.rows_mut::<E>().unwrap().copy_from_slice(&made);
        let sums: Vec<E> = self.host.combine(y, &handle).unwrap();

        let stream = Arc::clone(&self.stream);
        let (rows, planned) = self.dispatch(input).unwrap();
        let per_rank = self.case.layout == RowLayout::RankMajor;
        let none: &[i64] = &[];
        let said = if per_rank { none } else { handle.tokens_per_expert() };
        assert_eq!(planned.tokens_per_expert(), said);
        assert_eq!(planned.padded_tokens_per_expert(), handle.padded_tokens_per_expert());
        assert_eq!((planned.dropped(), planned.required_rows()), (handle.dropped(), handle.required_rows()));
        let landed = rows.range().unwrap().part(0, (seen.len() * E::DTYPE.size()) as u64).unwrap();
        assert_eq!(bits(&self.rows.read::<E>(&stream, &landed)), bits(&seen), "rows");
        let with_rows = rows.weights().unwrap().part(0, handle.row_weights().len() as u64 * 4).unwrap();
        assert_eq!(bits(&self.rows.read::<f32>(&stream, &with_rows)), bits(handle.row_weights()), "weights");
        if per_rank {
            let experts = rows.experts().unwrap();
            assert_eq!(self.rows.read::<i32>(&stream, experts), handle.row_experts(), "experts");
        }
        let padded = if per_rank { none } else { handle.padded_tokens_per_expert() };
        let counts = [handle.tokens_per_expert(), padded].concat();
        let counted = rows.counts().unwrap().part(0, counts.len() as u64 * 8).unwrap();
        assert_eq!(self.rows.read::<i64>(&stream, &counted), counts, "counts");

        let y = planned.output().unwrap();
        self.rows.send(&stream, y.range().unwrap(), bits(&made));
        let out = self.out.part((sums.len() * E::DTYPE.size()) as u64);
        self.planned.combine_into(y, &planned, target::<E>(&out)).unwrap();
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&sums), "sums");
        self.reports = vec![planned.report().unwrap(), planned.returned().unwrap()];
    }

    /// Sums of experts that change nothing, on the host.
    fn unchanged(&mut self, input: &Input<E>) -> Vec<E> {
        let routing = Routing::new(self.case.top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let (rows, handle) = self.host.dispatch(&input.x, &routing).unwrap();
        let mut y = handle.output().unwrap();
        y.rows_mut::<E>().unwrap().copy_from_slice(rows.rows::<E>().unwrap());
        self.host.combine(y, &handle).unwrap()
    }

    /// As many dispatches, then experts that change nothing, then combines, as there are inputs:
    /// nothing waits for the stream before all is enqueued. At most as many inputs as there are
    /// max_in_flight.
    pub fn all_in_flight(&mut self, inputs: &[Input<E>]) {
        let (context, stream) = (Arc::clone(self.stream.context()), Arc::clone(&self.stream));
        let expected: Vec<Vec<E>> = inputs.iter().map(|input| self.unchanged(input)).collect();
        let there: Vec<_> = inputs.iter().map(|input| self.apart(input)).collect();
        let sums: Vec<_> = expected
            .iter()
            .map(|sums| {
                let memory = Memory::new(&context, bits(sums).len() as u64);
                let out = memory.fill(&stream, &vec![0xcb_u8; bits(sums).len()]);
                (memory, out)
            })
            .collect();
        let mut under_way = Vec::new();
        for tensors in &there {
            let (x, choices) = call::<E>(tensors);
            under_way.push(self.planned.dispatch(x, choices).unwrap());
        }
        for ((rows, handle), (_, out)) in under_way.into_iter().zip(&sums) {
            let y = self.unchanged_on_device(&rows, &handle).unwrap();
            self.planned.combine_into(y, &handle, target::<E>(out)).unwrap();
        }
        for ((tensor, out), expected) in sums.iter().zip(&expected) {
            assert_eq!(bits(&tensor.read::<E>(&stream, out)), bits(expected), "sums");
        }
    }

    /// Rows of a first dispatch are dropped while the stream has yet to read them, and to come to a
    /// second one, for which there is room beside them.
    pub fn dropped_early(&mut self, first: &Input<E>, second: &Input<E>) {
        let (context, stream) = (Arc::clone(self.stream.context()), Arc::clone(&self.stream));
        let expected = self.unchanged(first);
        let second = self.apart(second);
        let (rows, handle) = self.dispatch(first).unwrap();
        let gate = PinnedMemory::new(&context, 8).unwrap();
        stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
        let y = self.unchanged_on_device(&rows, &handle).unwrap();
        let out = self.out.part((expected.len() * E::DTYPE.size()) as u64);
        self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        let (x, choices) = call::<E>(&second);
        let next = self.planned.start_dispatch(x, choices).unwrap();
        drop((rows, handle));
        gate.word(0).unwrap().store(1, Ordering::Release);
        next.finish().unwrap();
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&expected), "sums");
    }

    /// Two combines of one dispatch, one behind the other: with a budget experts write where those
    /// before them did.
    pub fn combined_twice(&mut self, input: &Input<E>) {
        let (context, stream) = (Arc::clone(self.stream.context()), Arc::clone(&self.stream));
        let expected = self.unchanged(input);
        let nothing = vec![0_u8; bits(&expected).len()];
        let second = Memory::new(&context, nothing.len() as u64);
        let again = second.fill(&stream, &vec![0xcb_u8; nothing.len()]);
        let (rows, handle) = self.dispatch(input).unwrap();
        let rows = rows.range().unwrap();
        let zeros = Memory::new(&context, rows.len());
        let zeros = zeros.fill(&stream, &vec![0_u8; rows.len() as usize]);
        let out = self.out.part(nothing.len() as u64);
        for (made, sums) in [(&rows, &out), (&zeros, &again)] {
            let y = handle.output().unwrap();
            let len = made.len();
            stream.copy(y.range().unwrap().span(0, len).unwrap(), made.span(0, len).unwrap()).unwrap();
            self.planned.combine_into(y, &handle, target::<E>(sums)).unwrap();
        }
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&expected), "sums");
        assert_eq!(second.read::<u8>(&stream, &again), nothing, "sums of nothing");
    }

    /// Two combines while the stream waits for this very thread, which opens the gate when both are
    /// enqueued.
    pub fn combined_ahead(&mut self, input: &Input<E>) {
        let stream = Arc::clone(&self.stream);
        let expected = self.unchanged(input);
        let (rows, handle) = self.dispatch(input).unwrap();
        let second = Memory::new(stream.context(), self.out.part(0).len().max(1 << 12));
        let len = (expected.len() * E::DTYPE.size()) as u64;
        let gate = PinnedMemory::new(stream.context(), 8).unwrap();
        stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
        for out in [self.out.part(len), second.part(len)] {
            let y = self.unchanged_on_device(&rows, &handle).unwrap();
            self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        }
        gate.word(0).unwrap().store(1, Ordering::Release);
        for (memory, what) in [(&self.out, "first sums"), (&second, "second sums")] {
            assert_eq!(bits(&memory.read::<E>(&stream, &memory.part(len))), bits(&expected), "{what}");
        }
    }

    /// As many combines of one dispatch as that, one behind the other.
    pub fn combined_often(&mut self, input: &Input<E>, times: u32) {
        let stream = Arc::clone(&self.stream);
        let expected = self.unchanged(input);
        let (rows, handle) = self.dispatch(input).unwrap();
        let out = self.out.part((expected.len() * E::DTYPE.size()) as u64);
        for _ in 0..times {
            let y = self.unchanged_on_device(&rows, &handle).unwrap();
            self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        }
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&expected), "sums");
    }

    /// A dispatch, and a combine of outputs that lie in memory of the caller's.
    pub fn combined_from_elsewhere(&mut self, input: &Input<E>) {
        let stream = Arc::clone(&self.stream);
        let expected = self.unchanged(input);
        let (rows, handle) = self.dispatch(input).unwrap();
        let rows = rows.range().unwrap();
        let elsewhere = self.rows.part(rows.len());
        stream.copy(elsewhere.span(0, rows.len()).unwrap(), rows.span(0, rows.len()).unwrap()).unwrap();
        let out = self.out.part((expected.len() * E::DTYPE.size()) as u64);
        let y = Tensor::device(&elsewhere, E::DTYPE);
        self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        assert_eq!(handle.copied_bytes(), rows.len());
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&expected), "sums");
    }

    /// A dispatch and a combine, each in two halves.
    pub fn halves(&mut self, input: &Input<E>) {
        let stream = Arc::clone(&self.stream);
        let expected = self.unchanged(input);
        let tensors = self.put(input);
        let (x, choices) = call::<E>(&tensors);
        let (rows, handle) = self.planned.start_dispatch(x, choices).unwrap().finish().unwrap();
        let y = self.unchanged_on_device(&rows, &handle).unwrap();
        let out = self.out.part((expected.len() * E::DTYPE.size()) as u64);
        self.planned.start_combine(y, &handle).unwrap().finish(target::<E>(&out)).unwrap();
        assert_eq!(bits(&self.out.read::<E>(&stream, &out)), bits(&expected), "sums");
    }

    /// Enqueues the dispatch of an input, and says what came of it.
    pub fn dispatch(&mut self, input: &Input<E>) -> Result<(ExpertRows, Handle), Error> {
        let tensors = self.put(input);
        let (x, choices) = call::<E>(&tensors);
        self.planned.dispatch(x, choices)
    }

    /// Writes an input to this rank's tensors.
    pub fn put(&self, input: &Input<E>) -> [DeviceRange; 3] {
        let stream = &*self.stream;
        [
            self.x.fill(stream, &input.x),
            self.experts.fill(stream, &input.ids),
            self.weights.fill(stream, &input.weights),
        ]
    }

    /// Writes an input to tensors of its own.
    fn apart(&self, input: &Input<E>) -> [DeviceRange; 3] {
        [bits(&input.x), bits(&input.ids), bits(&input.weights)]
            .map(|bytes| Memory::new(self.stream.context(), bytes.len() as u64).fill(&self.stream, bytes))
    }

    /// Enqueues experts that change nothing.
    fn unchanged_on_device(&self, rows: &ExpertRows, handle: &Handle) -> Result<ExpertOutput, Error> {
        let (y, rows) = (handle.output()?, rows.range()?);
        self.stream.copy(y.range()?.span(0, rows.len())?, rows.span(0, rows.len())?)?;
        Ok(y)
    }
}
