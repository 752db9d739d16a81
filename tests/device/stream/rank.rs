//! One rank of a world, with a device, an exchange and tensors.

use std::ops::Range as Rounds;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use sidelane::device::{Context, Driver, PinnedMemory, Priority, Range, Stream};
use sidelane::ep::{StreamExchange, StreamExchangeBuilder, StreamTokens};
use sidelane::plan::SlotShape;
use sidelane::{Group, Options, World};

use super::packed::Input;
use super::rows_common::Random;

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

    pub fn builder<'g>(&self, group: &'g Group, context: &'g Arc<Context>) -> StreamExchangeBuilder<'g> {
        let builder = StreamExchange::builder(group, context).experts(self.experts).top_k(self.top_k);
        builder.hidden(self.hidden).max_tokens(self.max_tokens)
    }

    /// Bytes of `rows` rows.
    pub fn bytes(&self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.hidden) * 2
    }
}

/// The context of a device of the stand-in.
pub fn context(device: u32) -> Arc<Context> {
    let driver = Driver::load(Some(&stand_in_cuda::install().unwrap().join("libcuda.so.1"))).unwrap();
    assert!(driver.is_stand_in(), "tests run without a GPU");
    driver.context(device).unwrap()
}

pub struct Rank {
    pub case: Case,
    pub world: World,
    pub group: Group,
    pub context: Arc<Context>,
    pub stream: Stream,
    pub exchange: StreamExchange,
}

impl Rank {
    /// On the device of its number.
    pub fn new(case: Case, world: World) -> Rank {
        let device = world.rank();
        Self::on_device(case, world, device)
    }

    pub fn on_device(case: Case, world: World, device: u32) -> Rank {
        let (group, context) = (world.all().unwrap(), context(device));
        let exchange = case.builder(&group, &context).build().unwrap();
        let stream = Stream::new(&context, Priority::Usual).unwrap();
        Rank { case, world, group, context, stream, exchange }
    }

    pub fn me(&self) -> u32 {
        self.exchange.rank()
    }

    /// Tensors of a round.
    pub fn tensors(&self, input: &Input) -> Tensors {
        Tensors::of(&self.context, self.case, input)
    }

    /// The bytes of memory that this rank's device reaches, once the stream has come so far.
    pub fn read(&self, from: &Range) -> Vec<u8> {
        let staging = PinnedMemory::new(&self.context, from.len() as usize).unwrap();
        let whole = from.span(0, from.len()).unwrap();
        self.stream.copy(staging.range().span(0, from.len()).unwrap(), whole).unwrap();
        self.exchange.synchronize(&self.stream).unwrap();
        content(&staging)
    }

    /// Dispatches and combines of these rounds, so many enqueued at once, experts that copy; every row of every sum compared.
    pub fn rounds(&mut self, rounds: Rounds<u64>, under_way: usize) {
        let (case, me) = (self.case, self.me());
        for rounds in rounds.collect::<Vec<u64>>().chunks(under_way) {
            let inputs: Vec<_> = rounds.iter().map(|&round| case.input(round, me)).collect();
            let tensors: Vec<Tensors> = inputs.iter().map(|input| self.tensors(input)).collect();
            for tensors in &tensors {
                self.exchange.dispatch(&self.stream, &tensors.tokens()).unwrap();
                self.experts_copy();
                self.exchange.combine(&self.stream, tensors.out()).unwrap();
            }
            self.exchange.synchronize(&self.stream).unwrap();
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
    }

    /// The experts of most tests: each partial row is the row itself. Nothing waits for the host.
    pub fn experts_copy(&self) {
        let shape = self.exchange.shape();
        let (received, partials) = (self.exchange.received(), self.exchange.partials().unwrap());
        let len = shape.bytes() - shape.rows_at();
        for source in 0..u64::from(self.case.ranks) {
            let from = received.span(source * shape.bytes() + shape.rows_at(), len).unwrap();
            self.stream.copy(partials.span(source * len, len).unwrap(), from).unwrap();
        }
    }
}

/// A caller's tensors of one call, which the host reads and writes, too.
pub struct Tensors {
    pub count: u32,
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

    pub fn tokens(&self) -> StreamTokens<'_> {
        let whole = |memory: &'_ PinnedMemory| memory.len() as u64;
        StreamTokens {
            count: self.count,
            rows: self.rows.range().span(0, whole(&self.rows)).unwrap(),
            experts: self.experts.range().span(0, whole(&self.experts)).unwrap(),
            weights: self.weights.range().span(0, whole(&self.weights)).unwrap(),
        }
    }

    pub fn out(&self) -> sidelane::device::Span<'_> {
        self.out.range().span(0, self.out.len() as u64).unwrap()
    }
}

pub fn content(memory: &PinnedMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// What a rank of these tokens gets back from experts that copy: each row as often as it has ranks, added up.
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
    let worlds = World::threads_with(nodes, options).unwrap();
    std::thread::scope(|scope| worlds.into_iter().for_each(|world| _ = scope.spawn(|| body(world))));
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

/// Small heaps: an exchange on streams needs none.
pub fn options() -> Options {
    let config = sidelane::config::Config { heap: 16 << 20, symmetric: 4 << 20, ..Default::default() };
    Options { config, ..Options::default() }
}
