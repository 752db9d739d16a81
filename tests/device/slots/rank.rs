//! One rank of a world, with a device, an instance in fixed slots and tensors.

use std::ops::Range as Rounds;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use sidelane::device::{Context, DeviceRange, PinnedMemory, Stream};
use sidelane::ep::{Choices, ExpertParallelBuilder, ExpertRows, Handle, Report, Tensor, TensorMut};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SlotShape};
use sidelane::{Dtype, Error, ExpertParallel, Group, Options, World};
use sidelane_verify::random::Random;

use super::devices::stream;
use super::packed::Input;
use super::support;

/// What all ranks have in common.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: u32,
    pub experts: u32,
    pub top_k: u32,
    /// Columns of a row, in bf16.
    pub hidden: u32,
    pub max_tokens: u32,
}

impl Case {
    pub fn shape(&self) -> SlotShape {
        SlotShape::new(self.max_tokens, self.top_k, u64::from(self.hidden) * 2).unwrap()
    }

    /// What a rank sends in a round: any bits, and any number of tokens.
    pub fn input(&self, round: u64, rank: u32) -> Input {
        let mut random = Random(round << 8 | u64::from(rank));
        let tokens = (random.next() % u64::from(self.max_tokens + 1)) as u32;
        Input::any(&mut random, self.shape(), (self.experts, self.ranks), rank, tokens)
    }

    /// What all of them send.
    pub fn inputs(&self, round: u64) -> Vec<Input> {
        (0..self.ranks).map(|rank| self.input(round, rank)).collect()
    }

    /// The settings, on the host or, with a stream, on a device.
    pub fn builder<'g>(&self, group: &'g Group) -> ExpertParallelBuilder<'g> {
        let mode = ReceiveMode::Slots { rows: self.max_tokens, overflow: Overflow::Error };
        let builder = ExpertParallel::builder(group).experts(self.experts).top_k(self.top_k);
        let builder = builder.hidden(self.hidden as usize).max_tokens(self.max_tokens);
        builder.mode(mode).layout(RowLayout::RankMajor)
    }

    /// Bytes of `rows` rows.
    pub fn bytes(&self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.hidden) * 2
    }
}

pub struct Rank {
    pub case: Case,
    pub world: World,
    pub group: Group,
    pub context: Arc<Context>,
    pub stream: Arc<Stream>,
    pub ep: ExpertParallel,
}

impl Rank {
    /// On the device of its number.
    pub fn new(case: Case, world: World) -> Rank {
        let device = world.rank();
        Self::on_device(case, world, device)
    }

    pub fn on_device(case: Case, world: World, device: u32) -> Rank {
        let (group, stream) = (world.all().unwrap(), stream(device));
        let ep = case.builder(&group).on(&stream).build().unwrap();
        let context = Arc::clone(stream.context());
        Rank { case, world, group, context, stream, ep }
    }

    pub fn me(&self) -> u32 {
        self.ep.rank()
    }

    /// Tensors of a round.
    pub fn tensors(&self, input: &Input) -> Tensors {
        Tensors::of(&self.context, self.case, input)
    }

    /// The bytes of memory that this rank's device reaches, once the stream has come so far.
    pub fn read(&self, from: &DeviceRange) -> Vec<u8> {
        let read = self.read_even_if_refused(from);
        self.ep.synchronize().unwrap();
        read
    }

    /// The same, for any verdict of the last call.
    pub fn read_even_if_refused(&self, from: &DeviceRange) -> Vec<u8> {
        let staging = PinnedMemory::new(&self.context, from.len() as usize).unwrap();
        let whole = from.span(0, from.len()).unwrap();
        self.stream.copy(staging.range().span(0, from.len()).unwrap(), whole).unwrap();
        self.stream.synchronize().unwrap();
        content(&staging)
    }

    /// A dispatch, experts that copy, and a combine, enqueued.
    pub fn layer(&mut self, tensors: &Tensors) -> Result<Handle, Error> {
        let (rows, handle) = dispatch(&mut self.ep, tensors)?;
        experts_copy(&self.stream, &rows, &handle)?;
        combine(&mut self.ep, &handle, tensors)?;
        Ok(handle)
    }

    /// Such layers, so many enqueued at once; every row of every sum compared. Gives the reports of
    /// the last dispatch and combine.
    pub fn rounds(&mut self, rounds: Rounds<u64>, under_way: usize) -> [Report; 2] {
        let (case, me) = (self.case, self.me());
        let mut last = None;
        for rounds in rounds.collect::<Vec<u64>>().chunks(under_way) {
            let inputs: Vec<_> = rounds.iter().map(|&round| case.input(round, me)).collect();
            let tensors: Vec<Tensors> = inputs.iter().map(|input| self.tensors(input)).collect();
            last = tensors.iter().map(|tensors| self.layer(tensors).unwrap()).last();
            self.ep.synchronize().unwrap();
            for (input, tensors) in inputs.iter().zip(&tensors) {
                let expected = copied_back(case, input);
                assert_eq!(
                    content(&tensors.out)[..expected.len()],
                    expected,
                    "{} tokens at {me}",
                    input.tokens
                );
            }
        }
        let handle = last.expect("a round at least");
        [handle.report().unwrap(), handle.return_report().unwrap()]
    }
}

/// Enqueues a dispatch.
pub fn dispatch(ep: &mut ExpertParallel, tensors: &Tensors) -> Result<(ExpertRows, Handle), Error> {
    let ranges = tensors.ranges();
    let (x, choices) = call(&ranges);
    ep.dispatch(x, choices)
}

/// Enqueues a combine of what experts left in the output buffer.
pub fn combine(ep: &mut ExpertParallel, handle: &Handle, tensors: &Tensors) -> Result<(), Error> {
    ep.combine_into(handle.output()?, handle, TensorMut::device(&tensors.out(), Dtype::Bf16))
}

/// The experts of most tests: each partial row is the row itself. Nothing waits for the host.
pub fn experts_copy(stream: &Stream, rows: &ExpertRows, handle: &Handle) -> Result<(), Error> {
    let (shape, y) = (rows.slots().unwrap(), handle.output()?);
    let (received, partials) = (rows.range()?, y.range()?);
    let len = shape.bytes() - shape.rows_at();
    for source in 0..received.len() / shape.bytes() {
        let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
        stream.copy(partials.span(source * len, len)?, from)?;
    }
    Ok(())
}

/// The tensors of a dispatch: tokens, experts and weights.
pub fn call([x, experts, weights]: &[DeviceRange; 3]) -> (Tensor<'_>, Choices<'_>) {
    (Tensor::device(x, Dtype::Bf16), Choices::Device { experts, weights })
}

/// A caller's tensors of one call, which the host reads and writes, too.
pub struct Tensors {
    pub count: u32,
    /// As many as there is memory for.
    max: u32,
    pub rows: PinnedMemory,
    pub experts: PinnedMemory,
    pub weights: PinnedMemory,
    pub out: PinnedMemory,
}

impl Tensors {
    pub fn of(context: &Arc<Context>, case: Case, input: &Input) -> Tensors {
        let memory = |len: u64| PinnedMemory::new(context, len as usize).unwrap();
        let choices = u64::from(case.max_tokens * case.top_k) * 4;
        let rows = case.bytes(case.max_tokens);
        let tensors = Tensors {
            count: 0,
            max: case.max_tokens,
            rows: memory(rows),
            experts: memory(choices),
            weights: memory(choices),
            out: memory(rows),
        };
        tensors.with(input)
    }

    /// Another input in the same memory.
    pub fn with(mut self, input: &Input) -> Tensors {
        self.rows.write(0, &input.x).unwrap();
        self.experts.write(0, bytemuck::cast_slice(&input.experts)).unwrap();
        self.weights.write(0, bytemuck::cast_slice(&input.weights)).unwrap();
        self.count = input.tokens;
        self
    }

    /// Tokens, experts and weights, as many as there are.
    pub fn ranges(&self) -> [DeviceRange; 3] {
        let part = |memory: &PinnedMemory| {
            memory.range().part(0, memory.len() as u64 / u64::from(self.max) * u64::from(self.count)).unwrap()
        };
        [&self.rows, &self.experts, &self.weights].map(part)
    }

    /// The place of so many sums.
    pub fn out(&self) -> DeviceRange {
        let rows = self.out.len() as u64 / u64::from(self.max);
        self.out.range().part(0, rows * u64::from(self.count)).unwrap()
    }
}

pub fn content(memory: &PinnedMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// What a rank of these tokens gets back from experts that copy: each row as often as it has ranks,
/// added up.
pub fn copied_back(case: Case, input: &Input) -> Vec<u8> {
    let places = input.places();
    let partial = |token: usize, _rank: usize, _place: i32| {
        input.x[token * case.bytes(1) as usize..][..case.bytes(1) as usize].to_vec()
    };
    sums(case, input.tokens, &places, partial)
}

/// Sums in f32 from +0, ranks ascending, one rounding, one quiet NaN.
pub fn sums(
    case: Case,
    tokens: u32,
    places: &[i32],
    partial: impl Fn(usize, usize, i32) -> Vec<u8>,
) -> Vec<u8> {
    let (ranks, columns) = (case.ranks as usize, case.hidden as usize);
    let mut out = Vec::new();
    for token in 0..tokens as usize {
        let mut sum = vec![0_f32; columns];
        for (rank, &place) in places[token * ranks..][..ranks].iter().enumerate().filter(|(_, p)| **p >= 0) {
            let row = partial(token, rank, place);
            for (sum, value) in sum.iter_mut().zip(row.chunks_exact(2)) {
                *sum += bf16::from_le_bytes([value[0], value[1]]).to_f32();
            }
        }
        let rounded = |sum: f32| if sum.is_nan() { bf16::from_bits(0x7fc0) } else { bf16::from_f32(sum) };
        out.extend(sum.into_iter().flat_map(|sum| rounded(sum).to_le_bytes()));
    }
    out
}

/// Runs the body on every rank of a world of threads, all on one node.
pub fn on_ranks(ranks: u32, options: &Options, body: impl Fn(World) + Sync) {
    on_nodes(&vec![0; ranks as usize], options, body);
}

/// The same on nodes: that of each rank.
pub fn on_nodes(nodes: &[u32], options: &Options, body: impl Fn(World) + Sync) {
    support::on_ranks(nodes, options, body);
}

/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(60);

/// Looks until something is so.
pub fn until(is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < LONG, "it never comes");
        std::thread::yield_now();
    }
}

pub use super::support::small as options;
