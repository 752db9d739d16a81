//! `ExpertParallel` on one GPU, its ranks as threads or as processes, against the same calls on the
//! host: rows, choices, weights, counts and sums to the bit.
//!
//! Ranks share the context of their GPU, and memory that is freed waits for all that the context
//! does: for the streams of peers that wait for this rank. So a rank makes its memory before the
//! first call and keeps it until the last.

use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use sidelane::bootstrap::Timeouts;
use sidelane::config::Config;
use sidelane::device::{Context, DeviceRange, Driver, Graph, PinnedMemory, Stream};
use sidelane::ep::{
    Choices, ExpertOutput, ExpertParallelBuilder, ExpertRows, Handle, Report, Tensor, TensorMut,
};
use sidelane::error::DeviceError;
use sidelane::gate::Routing;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SlotShape, SumOrder};
use sidelane::{Dtype, Element, ExpertParallel, Group, Options, World};

use super::device::{Random, content, same, stream, whole};
use super::kernels::{any, any_rows};
use super::report::{About, Checks, State};
use super::{GpuCheckArgs, Part, Task, planned};
use crate::command::Command;
use crate::error::{CliError, failed};
use crate::launch::{Bind, Job};
use crate::ranks;
use crate::table::volume;

const ONE_GPU: &str = "the same between GPUs, over NVLink";

pub fn threads(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let shows = "as the host's ExpertParallel, to the bit";
    let mut tell = |what: String, found: Result<String, CliError>| {
        checks.check(About::new(&what, shows).open(ONE_GPU), || found).map(drop)
    };
    for ranks in [2, 4, 8] {
        let case = case(task, ranks);
        tell(format!("{ranks} ranks"), on_ranks(task, ranks, |world| plain::<bf16>(task, case, world)))?;
    }
    let case = case(task, 4);
    tell("4 ranks, f16".to_owned(), on_ranks(task, 4, |world| plain::<f16>(task, case, world)))?;
    tell("4 ranks, f32".to_owned(), on_ranks(task, 4, |world| plain::<f32>(task, case, world)))?;
    for ranks in [2, 4, 8] {
        let case = self::case(task, ranks);
        tell(format!("{ranks} ranks in a graph"), on_ranks(task, ranks, |world| graph(task, case, world)))?;
    }
    let nodes = [0, 0, 1, 1];
    let across = on_nodes(task, &nodes, |world| plain::<bf16>(task, case, world));
    tell("2 + 2 ranks, between nodes by memory of the host".to_owned(), across)?;
    let across = on_nodes(task, &nodes, |world| graph(task, case, world));
    tell("2 + 2 ranks, the same in a graph".to_owned(), across)?;
    tell("two exchanges in turns".to_owned(), on_ranks(task, 4, |world| turns(task, case, world)))?;
    for ranks in [2, 4, 8] {
        let case = self::case(task, ranks);
        for (mode, what) in [(planned::EAGER, "exact sizes"), (planned::half(case), "a budget")] {
            let found = on_ranks(task, ranks, |world| planned::plain(task, case, mode, world));
            tell(format!("{what}, {ranks} ranks"), found)?;
        }
    }
    tell(
        "a budget, 4 ranks in a graph".to_owned(),
        on_ranks(task, 4, |world| planned::graph(task, case, world)),
    )
}

/// The same, with ranks as processes that this one starts.
pub fn processes(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if !Driver::open()?.device(task.device)?.several_processes {
        let about = About::new("ranks as processes", "nothing: ranks are threads above");
        let found = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)".to_owned();
        return checks.tell(about, State::Skipped, found, None);
    }
    for count in [2, 4] {
        let job = Job {
            nodes: vec![count],
            part: None,
            command: ranks::again(GpuCheckArgs::NAME, &Task { part: Part::Rank, ..*task })?,
            env: Vec::new(),
            bind: Bind::None,
            grace: Duration::from_secs(5),
            tag_output: false,
        };
        let code = job.run()?.exit_code();
        if code != 0 {
            let what = format!("{count} ranks");
            let about = About::new(
                &what,
                "several processes use this GPU at once; nvidia-smi -q shows the compute mode",
            )
            .open(ONE_GPU);
            let ended = failed!("a rank ended with {code}");
            checks.check(about, || Err(ended))?;
        }
    }
    Ok(())
}

/// One of those.
pub fn rank(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let world = World::from_env_with(options(task))?;
    let (me, ranks) = (world.rank(), world.size());
    let case = case(task, ranks);
    // One speaks for all, unless another has something to say.
    let mut tell = |what: String, found: Result<String, CliError>| {
        let shows = "memory and words go from one to the other as descriptors; to the bit";
        let about = About::new(&what, shows).open(ONE_GPU);
        if me == 0 || found.is_err() { checks.check(about, || found).map(drop) } else { Ok(()) }
    };
    tell(format!("{ranks} ranks as processes"), plain::<bf16>(task, case, &world))?;
    for (mode, what) in [(planned::EAGER, "exact sizes"), (planned::half(case), "a budget")] {
        tell(format!("{what}, {ranks} ranks as processes"), planned::plain(task, case, mode, &world))?;
    }
    Ok(())
}

/// The layer of a large model, or a small one.
fn case(task: &Task, ranks: u32) -> Case {
    let full = Case { ranks, experts: 64, top_k: 8, hidden: 7168, max_tokens: 128 };
    task.few(full, Case { experts: 16, top_k: 4, hidden: 40, max_tokens: 9, ..full })
}

/// Runs the body on every rank of a world of threads. What is told is what rank 0 found, or the
/// first thing that is wrong.
pub fn on_ranks<T: Send>(
    task: &Task,
    ranks: u32,
    body: impl Fn(&World) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    on_nodes(task, &vec![0; ranks as usize], body)
}

/// The same on pretended nodes: that of each rank.
fn on_nodes<T: Send>(
    task: &Task,
    nodes: &[u32],
    body: impl Fn(&World) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    let worlds = World::threads_with(nodes, &options(task))?;
    let results: Vec<Result<T, CliError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.iter().map(|world| scope.spawn(|| body(world))).collect();
        let panicked = || failed!("a rank panicked");
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    // What differs says more than that others then missed their peer.
    let (right, mut wrong): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    wrong.sort_by_key(|error| {
        !matches!(error, Err(CliError::Wrong(_) | CliError::Library(sidelane::Error::Device(_))))
    });
    wrong.into_iter().chain(right).next().unwrap_or_else(|| Err(failed!("no ranks")))
}

/// Heaps for the host's side: full slots of all ranks, received and made.
fn options(task: &Task) -> Options {
    let config = Config { heap: task.few(256 << 20, 16 << 20), symmetric: 4 << 20, ..Config::default() };
    let clocks = Timeouts { deadline: task.patience(), ..Timeouts::default() };
    Options { config, clocks, ..Options::default() }
}

/// What the host makes of an input.
pub struct Answer {
    /// Of received rows.
    pub rows: Vec<u8>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
    /// Of each expert, without pads and with them.
    pub counts: Vec<i64>,
    pub dropped: Vec<bool>,
    /// Outputs of the experts, and their sums.
    pub made: Vec<u8>,
    pub out: Vec<u8>,
}

/// The host's side of a rank.
pub struct Host(pub ExpertParallel);

impl Host {
    fn new(rank: &Rank) -> Result<Self, CliError> {
        let builder = rank.case.builder(&rank.group, rank.case.slots())?;
        Ok(Host(builder.dtype(rank.dtype).sum_order(SumOrder::Rank).build()?))
    }

    /// A dispatch and a combine, with any outputs of the experts that follow from `seed`, or with
    /// the rows themselves.
    pub fn answer<E: Element>(&mut self, input: &Input, seed: Option<u64>) -> Result<Answer, CliError> {
        let x: Vec<E> = bytemuck::pod_collect_to_vec(&input.rows);
        let routing = Routing::new(self.0.top_k(), input.experts.as_slice(), input.weights.as_slice())
            .map_err(sidelane::Error::from)?;
        let (rows, handle) = self.0.dispatch(&x, &routing)?;
        let rows = bytemuck::cast_slice::<E, u8>(rows.rows()?).to_vec();
        let made = seed.map_or_else(|| rows.clone(), |seed| any_rows(seed ^ 1 << 40, E::DTYPE, rows.len()));
        let mut y = handle.output()?;
        bytemuck::cast_slice_mut::<E, u8>(y.rows_mut()?).copy_from_slice(&made);
        let (experts, weights) = (handle.row_experts().to_vec(), handle.row_weights().to_vec());
        let counts = [handle.tokens_per_expert(), handle.padded_tokens_per_expert()].concat();
        let dropped = handle.dropped().to_vec();
        let out = bytemuck::cast_slice(&self.0.combine::<E>(y, &handle)?).to_vec();
        Ok(Answer { rows, experts, weights, counts, dropped, made, out })
    }
}

/// Plain calls, any partial rows.
pub fn plain<E: Element>(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, E::DTYPE, world, task.device)?;
    let mut host = Host::new(&rank)?;
    let mut tensors = rank.tensors()?;
    let me = rank.ep.rank();
    let rounds: u64 = task.few(6, 4);
    let (mut compared, mut report) = (0, Report::default());
    for round in 1..=rounds {
        let seed = round << 8 | u64::from(me);
        let input = case.input(E::DTYPE, seed, case.tokens(seed));
        let answer = host.answer::<E>(&input, Some(seed))?;

        tensors.put(&input)?;
        let call = tensors.call()?;
        let (rows, handle) = call.dispatch(&mut rank.ep)?;
        let received = rank.received(&rows)?;
        compare(&rank, &rows, &received, &answer)?;
        let y = rank.leave(&handle, &answer.made)?;
        call.combine(&mut rank.ep, y, &handle)?;
        rank.ep.synchronize()?;
        same(format!("sums at rank {me}"), &tensors.sums()?[..answer.out.len()], &answer.out)?;
        compared += (received.len() + answer.out.len()) as u64;
        report = handle.report()?;
    }
    Ok(format!(
        "{rounds} rounds, {} compared at each rank; {} copies ({}) and {} operations a dispatch",
        volume(compared),
        report.enqueued.copies,
        if report.enqueued.batches > 0 { "one batch" } else { "single" },
        report.enqueued.memory_operations
    ))
}

/// What was received, slot by slot.
fn compare(rank: &Rank, rows: &ExpertRows, received: &[u8], answer: &Answer) -> Result<(), CliError> {
    let Some(shape) = rows.slots() else {
        return Err(failed!("rows of fixed slots have no slots"));
    };
    let (case, me) = (rank.case, rank.ep.rank());
    let (rows, choices) =
        (case.bytes(rank.dtype, case.max_tokens) as usize, (case.max_tokens * case.top_k) as usize);
    for (source, slot) in received.chunks_exact(shape.bytes() as usize).enumerate() {
        let at = |offset: u64, len: usize| &slot[offset as usize..][..len];
        let from = format!("from rank {source} at rank {me}");
        let experts = bytemuck::cast_slice(&answer.experts[source * choices..][..choices]);
        let weights = bytemuck::cast_slice(&answer.weights[source * choices..][..choices]);
        same(format!("rows {from}"), at(shape.rows_at(), rows), &answer.rows[source * rows..][..rows])?;
        same(format!("choices {from}"), at(shape.experts_at(), choices * 4), experts)?;
        same(format!("weights {from}"), at(shape.weights_at(), choices * 4), weights)?;
    }
    Ok(())
}

/// A layer that was captured once, replayed with other tokens.
pub fn graph(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, Dtype::Bf16, world, task.device)?;
    let mut host = Host::new(&rank)?;
    let me = u64::from(rank.ep.rank());
    // A graph has a constant number of tokens.
    let input = |round: u64| case.input(Dtype::Bf16, round << 8 | me, case.max_tokens);
    let mut tensors = rank.tensors()?;
    tensors.put(&input(0))?;
    let layer = {
        let (Rank { ep, stream, .. }, call) = (&mut rank, tensors.call()?);
        Graph::capture(stream, || call.layer(ep, stream))?
    };
    let rounds = task.few(10, 5);
    for round in 1..=rounds {
        let input = input(round);
        let answer = host.answer::<bf16>(&input, None)?;
        tensors.put(&input)?;
        layer.launch(&rank.stream)?;
        rank.ep.synchronize()?;
        same(format!("launch {round} at rank {me}"), &tensors.sums()?, &answer.out)?;
    }
    Ok(format!("{rounds} launches; a graph's copies on one GPU are single ones, which its SMs do"))
}

/// Two instances, of which one starts a dispatch before the other has enqueued its combine.
pub fn turns(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, Dtype::Bf16, world, task.device)?;
    let mut other = case.builder(&rank.group, case.slots())?.on(&rank.stream).build()?;
    let mut host = Host::new(&rank)?;
    let (mut first, mut second) = (rank.tensors()?, rank.tensors()?);
    let me = u64::from(rank.ep.rank());
    let rounds = task.few(10, 5);
    for round in 0..rounds {
        let seeds = [round << 8 | me, 1 << 32 | round << 8 | me];
        let inputs = seeds.map(|seed| case.input(Dtype::Bf16, seed, case.tokens(seed)));
        first.put(&inputs[0])?;
        second.put(&inputs[1])?;
        let Rank { ep, stream, .. } = &mut rank;
        let calls = [first.call()?, second.call()?];
        let (rows, handle) = calls[0].dispatch(ep)?;
        let y = experts_copy(stream, &rows, &handle)?;
        let (x, choices) = calls[1].input();
        let started = other.start_dispatch(x, choices)?;
        calls[0].combine(ep, y, &handle)?;
        let (rows, handle) = started.finish()?;
        let y = experts_copy(stream, &rows, &handle)?;
        calls[1].combine(&mut other, y, &handle)?;
        ep.synchronize()?;
        other.check()?;
        for (input, tensors) in inputs.iter().zip([&first, &second]) {
            let answer = host.answer::<bf16>(input, None)?;
            let seen = tensors.sums()?;
            same(format!("round {round} at rank {me}"), &seen[..answer.out.len()], &answer.out)?;
        }
    }
    Ok(format!("{rounds} rounds of two, one begun before the other ends"))
}

/// What all ranks have in common.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: u32,
    pub experts: u32,
    pub top_k: u32,
    pub hidden: u32,
    pub max_tokens: u32,
}

/// What one rank sends in one round.
pub struct Input {
    pub tokens: u32,
    pub rows: Vec<u8>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Case {
    /// Special values and any others; about one choice in four is dropped, and no token names an
    /// expert twice.
    pub fn input(&self, dtype: Dtype, seed: u64, tokens: u32) -> Input {
        let mut random = Random(seed);
        let rows = (0..tokens * self.hidden).flat_map(|_| any(&mut random, dtype)).collect();
        let mut experts: Vec<i32> = Vec::new();
        for _ in 0..tokens {
            let first = experts.len();
            for _ in 0..self.top_k {
                let expert = (random.next() % u64::from(self.experts)) as i32;
                let dropped = random.next() & 3 == 0 || experts[first..].contains(&expert);
                experts.push(if dropped { -1 } else { expert });
            }
        }
        let weights = experts.iter().map(|_| (random.next() % 64) as f32 / 8.0 - 1.0).collect();
        Input { tokens, rows, experts, weights }
    }

    /// Any number of tokens.
    pub fn tokens(&self, seed: u64) -> u32 {
        (Random(seed ^ 0x7a).next() % u64::from(self.max_tokens + 1)) as u32
    }

    /// Fixed slots for all tokens of each source.
    pub fn slots(&self) -> ReceiveMode {
        ReceiveMode::Slots { rows: self.max_tokens, overflow: Overflow::Error }
    }

    /// Settings on the host or, with a stream, on a device.
    pub fn builder<'g>(
        &self,
        group: &'g Group,
        mode: ReceiveMode,
    ) -> Result<ExpertParallelBuilder<'g>, sidelane::Error> {
        let builder = ExpertParallel::builder(group)?.experts(self.experts).top_k(self.top_k);
        let builder = builder.hidden(self.hidden as usize).max_tokens(self.max_tokens).mode(mode);
        Ok(if mode == self.slots() { builder.layout(RowLayout::RankMajor) } else { builder })
    }

    /// A slot of these rows.
    fn slot_shape(&self, dtype: Dtype) -> Result<SlotShape, sidelane::Error> {
        Ok(SlotShape::new(self.max_tokens, self.top_k, self.bytes(dtype, 1))?)
    }

    /// Bytes of so many rows.
    pub fn bytes(&self, dtype: Dtype, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.hidden) * dtype.size() as u64
    }
}

/// A rank on a device.
pub struct Rank {
    pub case: Case,
    pub dtype: Dtype,
    pub group: Group,
    pub context: Arc<Context>,
    pub ep: ExpertParallel,
    pub stream: Arc<Stream>,
    /// Through which memory of the device is read and written.
    staging: PinnedMemory,
}

impl Rank {
    pub fn new(case: Case, dtype: Dtype, world: &World, device: u32) -> Result<Self, CliError> {
        let group = world.all()?;
        let context = Driver::open().and_then(|driver| driver.context(device))?;
        let stream = Arc::new(stream(&context)?);
        let ep = case.builder(&group, case.slots())?.dtype(dtype).on(&stream).build()?;
        let slots = u64::from(case.ranks) * case.slot_shape(dtype)?.bytes();
        let staging = PinnedMemory::new(&context, slots as usize)?;
        Ok(Rank { case, dtype, group, context, ep, stream, staging })
    }

    /// Memory for the tensors of a call, with no tokens in it.
    pub fn tensors(&self) -> Result<Tensors, DeviceError> {
        let Case { max_tokens, top_k, .. } = self.case;
        let memory = |len: u64| PinnedMemory::new(&self.context, len as usize);
        let (choices, rows) = (u64::from(max_tokens * top_k) * 4, self.case.bytes(self.dtype, max_tokens));
        Ok(Tensors {
            case: self.case,
            dtype: self.dtype,
            tokens: 0,
            rows: memory(rows)?,
            experts: memory(choices)?,
            weights: memory(choices)?,
            out: memory(rows)?,
        })
    }

    /// Received slots, once the stream has come so far.
    pub fn received(&self, rows: &ExpertRows) -> Result<Vec<u8>, CliError> {
        self.stream.copy(whole(self.staging.range())?, whole(&rows.range()?)?)?;
        self.ep.synchronize()?;
        Ok(content(&self.staging)?)
    }

    /// Writes partial rows to a handle's output buffer, no more bytes than slots have, and waits
    /// until they are there.
    fn leave(&self, handle: &Handle, partials: &[u8]) -> Result<ExpertOutput, CliError> {
        let (y, len) = (handle.output()?, partials.len() as u64);
        self.staging.write(0, partials)?;
        self.stream.copy(y.range()?.span(0, len)?, self.staging.range().span(0, len)?)?;
        self.ep.synchronize()?;
        Ok(y)
    }
}

/// Enqueues experts whose partial rows are the rows that came. Nothing waits for the host.
pub fn experts_copy(
    stream: &Stream,
    rows: &ExpertRows,
    handle: &Handle,
) -> Result<ExpertOutput, sidelane::Error> {
    let (received, y) = (rows.range()?, handle.output()?);
    let Some(shape) = rows.slots() else {
        stream.copy(whole(y.range()?)?, whole(&received)?)?;
        return Ok(y);
    };
    let len = shape.bytes() - shape.rows_at();
    for source in 0..received.len() / shape.bytes() {
        let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
        stream.copy(y.range()?.span(source * len, len)?, from)?;
    }
    Ok(y)
}

/// Tensors of one call, which the host reads and writes, too.
pub struct Tensors {
    case: Case,
    dtype: Dtype,
    tokens: u32,
    rows: PinnedMemory,
    experts: PinnedMemory,
    weights: PinnedMemory,
    out: PinnedMemory,
}

impl Tensors {
    pub fn put(&mut self, input: &Input) -> Result<(), DeviceError> {
        self.rows.write(0, &input.rows)?;
        self.experts.write(0, bytemuck::cast_slice(&input.experts))?;
        self.weights.write(0, bytemuck::cast_slice(&input.weights))?;
        self.tokens = input.tokens;
        Ok(())
    }

    /// The tensors of as many tokens as were written last.
    pub fn call(&self) -> Result<Call, DeviceError> {
        let rows = self.case.bytes(self.dtype, self.tokens);
        let choices = u64::from(self.tokens * self.case.top_k) * 4;
        Ok(Call {
            x: self.rows.range().part(0, rows)?,
            experts: self.experts.range().part(0, choices)?,
            weights: self.weights.range().part(0, choices)?,
            out: self.out.range().part(0, rows)?,
            dtype: self.dtype,
        })
    }

    /// The sums, and whatever lies behind them.
    pub fn sums(&self) -> Result<Vec<u8>, DeviceError> {
        content(&self.out)
    }
}

/// Tensors of a dispatch and a combine.
pub struct Call {
    pub x: DeviceRange,
    pub experts: DeviceRange,
    pub weights: DeviceRange,
    pub out: DeviceRange,
    pub dtype: Dtype,
}

impl Call {
    /// The tokens and their choices.
    pub fn input(&self) -> (Tensor<'_>, Choices<'_>) {
        let Call { x, experts, weights, dtype, .. } = self;
        (Tensor::device(x, *dtype), Choices::Device { experts, weights })
    }

    pub fn dispatch(&self, ep: &mut ExpertParallel) -> Result<(ExpertRows, Handle), sidelane::Error> {
        let (x, choices) = self.input();
        ep.dispatch(x, choices)
    }

    pub fn combine(
        &self,
        ep: &mut ExpertParallel,
        y: ExpertOutput,
        handle: &Handle,
    ) -> Result<(), sidelane::Error> {
        ep.combine_into(y, handle, TensorMut::device(&self.out, self.dtype))
    }

    /// Enqueues a dispatch, experts that copy, and a combine.
    pub fn layer(&self, ep: &mut ExpertParallel, stream: &Stream) -> Result<(), sidelane::Error> {
        let (rows, handle) = self.dispatch(ep)?;
        let y = experts_copy(stream, &rows, &handle)?;
        self.combine(ep, y, &handle)
    }
}
