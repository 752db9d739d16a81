//! Making an exchange: memory, and a stream for copies.

use std::sync::Arc;

use super::default_heap::HeapLoad;
use super::device_pool::{DevicePool, Progress};
use super::enqueued_exchange::{EnqueuedExchange, Parts};
use super::enqueuer::{CallerStream, ContextState, Enqueuer, Scratch};
use super::heap_growth::HeapGrowth;
use super::memory::{MemoryShape, StreamFlag};
use super::next_instance;
use super::row_transport::{RowTransport, TransportSizes};
use super::session::{DispatchContext, Session};
use super::watchdog::{POISON, WaitBreaker, Watch};
use crate::device::{Context, Event, Kernels, PinnedMemory, Priority, Stream};
use crate::ep::Status;
use crate::ep::builder::Spec;
use crate::ep::call_agreement::GroupCounts;
use crate::ep::relay::Relay;
use crate::ep::state::{EpState, ReceiveMemory};
use crate::error::{DeviceError, Error, MemoryError, PlanError};
use crate::exec::{CopyEngineStepper, DeviceMap, LocalPeer, RelaySums};
use crate::plan::{InterNodeRows, NodeSums, RankSums, RelayPermutation, SortedRouting};
use crate::schedule::call_program::{Engines, RankPrograms};
use crate::schedule::{CallerTables, Calls, ControlLayout, Flag};
use crate::topology::{Paths, Route};
use crate::world::{DeviceWindow, Group, Member, SymmetricRange, WindowSizes};

/// Settings that an instance needs beside those of every instance. All ranks must choose alike, but
/// for the stream and the priority.
#[derive(Clone, Debug)]
pub(in crate::ep) struct EnqueuedSettings {
    pub stream: Arc<Stream>,
    /// Dispatches that may be alive at once.
    pub max_in_flight: u32,
    /// Bytes of the device's memory in which dispatches receive and experts write; else the default
    /// for this load.
    pub device_heap: Option<u64>,
    /// Bytes to which they may grow; else the default for this load or, of a heap whose size is
    /// set, that size.
    pub device_heap_limit: Option<u64>,
    pub load: HeapLoad,
    /// That of the stream of copies.
    pub priority: Priority,
}

/// Memory and connections that ranks make together.
struct MadeTogether {
    shape: MemoryShape,
    fixed: Arc<EpState>,
    members: Vec<Option<Member>>,
    passage: RowTransport,
    control: SymmetricRange,
    growth: Option<HeapGrowth>,
}

impl EnqueuedExchange {
    /// Allocates, and makes a stream for copies. Collective.
    pub fn new(group: &Group, spec: Spec, settings: EnqueuedSettings) -> Result<EnqueuedExchange, Error> {
        let EnqueuedSettings { stream, max_in_flight: contexts, load, priority, .. } = settings;
        let (device_heap, device_heap_limit) = (settings.device_heap, settings.device_heap_limit);
        let context = Arc::clone(stream.context());
        let lanes = group.lanes(spec.route)?;
        let (rank_sums, node_sums) = (spec.gains_by_rank_sums(), spec.gains_by_node_sums(&lanes.paths()));
        let spec = Spec { rank_sums, node_sums, ..spec };
        let staged = most_staged(&lanes.paths(), spec.max_tokens);
        let flags = ControlLayout::flag(0, Flag::Entry, group.size());
        let words = flags + ControlLayout::flag_bytes(group.size());
        let crossed = if lanes.paths().is_multi_node() { words } else { 0 };
        let shape_with = |sizes| MemoryShape::new(&spec, contexts, sizes, staged, crossed);
        let bare = shape_with((0, 0));
        let pool = device_heap.unwrap_or_else(|| load.default_heap(&spec, &bare));
        let several = lanes.paths().is_multi_node();
        let limit = match (device_heap_limit, device_heap) {
            (Some(limit), _) => limit,
            (None, None) if !several => load.default_limit(&bare, pool),
            _ => pool,
        };
        let shape = shape_with((pool, limit));
        let usable = check_contexts(contexts).and_then(|()| Ok(shape.check()?));
        let usable = usable.and_then(|()| check_limit((pool, limit), several));
        let usable = usable.and_then(|()| prepare(&context, priority, spec.max_blocks));
        let usable_here = [("whether their streams can be used (1: yes)", usable.is_ok().into())];
        let heap = [("device_heap", pool), ("device_heap_limit", limit)];
        let settings = [("max_in_flight", contexts.into())];
        let told = group.alike(&[usable_here.as_slice(), &settings, &heap].concat());
        let usable = usable?;
        told?;
        let granularity = DeviceWindow::check_free(group, &context, shape.device_bytes())?;
        let (len, most) = (shape.device_bytes(), shape.most_device_bytes());
        let sizes = WindowSizes { len, most, granularity, words };
        let mut window = DeviceWindow::new(group, &context, sizes, Ok(()))?;
        let members = window.take_members();
        let room = ReceiveMemory::device_heap(shape.pool().1);
        let growth = HeapGrowth::of(group, &context, (window, &shape), &room.total)?;
        let room = match growth {
            // Without a limit of the caller, the default of the limit follows the size.
            Some(_) if device_heap_limit.is_some() => ReceiveMemory { setting: "device_heap_limit", ..room },
            _ => room,
        };
        let needs = TransportSizes {
            words: shape.words().1,
            enqueuer_scratch: shape.arrives().then(|| shape.scratch_bytes()),
            host_staging: shape.host_staging_bytes(),
        };
        let passage = RowTransport::find(group, &context, &lanes, &members, needs)?;
        let (mut fixed, control) = EpState::new(group, spec, room, passage.ground())?;
        fixed.enqueues = true;
        let together = MadeTogether { shape, fixed: Arc::new(fixed), members, passage, control, growth };
        let made = Self::finish(stream, usable, together);
        // No rank writes to one that is not ready, or waits for one that never will be.
        let told = group.alike(&[("whether their memory can be used (1: yes)", made.is_ok().into())]);
        let made = made?;
        told?;
        Ok(made)
    }

    /// Makes what is this rank's alone.
    fn finish(
        stream: Arc<Stream>,
        (copies, kernels): (Stream, Kernels),
        together: MadeTogether,
    ) -> Result<EnqueuedExchange, Error> {
        let MadeTogether { shape, fixed, members, passage, control, growth } = together;
        let (context, rank, ranks) = (Arc::clone(stream.context()), fixed.lanes.rank, fixed.lanes.ranks());
        let own = members[rank as usize].as_ref();
        let nowhere = MemoryError::NotUsable { rank };
        let own = own.ok_or(nowhere)?;
        let (memory, words_here) = (own.memory.clone(), own.words.clone());
        let host = PinnedMemory::new(&context, shape.host_bytes() as usize)?;
        let common = Arc::new(Session {
            instance: next_instance(),
            memory,
            host,
            contexts: (0..shape.word_sets()).map(|_| DispatchContext::default()).collect(),
            space: DevicePool::new(shape.pool().0, shape.pool().1),
            owed: Arc::default(),
            missed: Arc::default(),
            handles: Arc::default(),
            buffers: Arc::default(),
            progress: Arc::new(Progress::new(&fixed, &words_here)),
            served: Arc::default(),
            no_gpu_direct: passage.no_gpu_direct(),
            registration: passage.registration(),
            shape,
            fixed: Arc::clone(&fixed),
        });
        fill(&context, &copies, &common)?;
        let health = (fixed.shared.hub.rank(), fixed.shared.hub.health());
        let of_context = |context| shape.flag(context, StreamFlag::Status) as usize;
        let status = ((0..shape.word_sets()).map(of_context).collect(), Status::WORLD_FAILED.0.into());
        // Words that grow: no value of this epoch is as large, counted in a circle.
        let poison = Calls::new(fixed.shared.hub.epoch()).value().wrapping_add(1 << 62);
        let of = |flag| (0..ranks).map(move |rank| ControlLayout::flag(rank, flag, ranks) as usize);
        let awaited = of(Flag::Landed).chain(of(Flag::Ready)).collect();
        let guards = vec![
            WaitBreaker::new(health, &common.host, (Vec::new(), POISON), status, None)?,
            WaitBreaker::new(health, &words_here, (awaited, poison), (Vec::new(), 0), None)?,
        ];
        let near = |Member { memory, words, same_device }: Member| LocalPeer { memory, words, same_device };
        let ranks = members.into_iter().map(|member| member.map(near)).collect();
        let (zeros_at, zeros_len) = shape.zeros();
        let zeros = common.memory.part(zeros_at, zeros_len)?;
        let note_zeros = common.host_piece(shape.host_zeros())?;
        let host_staging =
            passage.host_staging().map(|host_staging| (host_staging.memory.clone(), shape.outbox()));
        let words = passage.registration().map(|_| common.piece(shape.words())).transpose()?;
        let ground = DeviceMap { ranks, zeros, note_zeros, host_staging, words };
        let kernels = Arc::new(kernels);
        let engine = CopyEngineStepper::new(&context, Arc::clone(&fixed.port), ground, copies);
        let engine = match fixed.spec.node_sums {
            true => engine.summing(relay_sums(&common, &kernels)?),
            false => engine,
        };
        let [packed, done] = [Event::new(&context)?, Event::new(&context)?];
        let watch = Watch::new(&fixed, &words_here)?;
        let caller =
            CallerStream { stream: Arc::clone(&stream), kernels: Arc::clone(&kernels), packed, done, watch };
        let enqueuer = Box::new(enqueuer(&common, caller, engine, growth));
        let programs = programs(&fixed);
        Ok(EnqueuedExchange::of(Parts { programs, stream, kernels, enqueuer, guards, passage, control }))
    }
}

/// Kernels by which engines sum for other nodes.
fn relay_sums(common: &Session, kernels: &Arc<Kernels>) -> Result<RelaySums, DeviceError> {
    let (spec, status) = (&common.fixed.spec, common.shape.flag(0, StreamFlag::RelaySums));
    Ok(RelaySums {
        kernels: Arc::clone(kernels),
        columns: spec.hidden as u32,
        dtype: spec.dtype,
        top_k: spec.top_k,
        status: common.host_piece((status, MemoryShape::STEP))?,
        tables: (0, None),
        unmarked: false,
    })
}

/// Rows that a rank relays at most, if there are relays.
fn most_staged(paths: &Paths<'_>, max_tokens: u32) -> Option<u64> {
    let sources = |rank| paths.of(rank).sources().count() as u64;
    let most = || (0..paths.ranks()).map(sources).max().unwrap_or(0) * u64::from(max_tokens);
    (paths.route() == Route::Pxn && paths.is_multi_node()).then(most)
}

/// Refuses no dispatches in flight, and more than tags number.
fn check_contexts(contexts: u32) -> Result<(), Error> {
    // Tags number the contexts in 16 bits, and one more is for calls without any.
    if !(1..u32::from(u16::MAX)).contains(&contexts) {
        let (parameter, expected) = ("max_in_flight", "between 1 and 65534");
        return Err(PlanError::BadParameter { parameter, seen: contexts.into(), expected }.into());
    }
    Ok(())
}

/// Refuses a limit below the size, and growth where NICs or memory of the host know the heap, too.
fn check_limit((heap, limit): (u64, u64), several_nodes: bool) -> Result<(), Error> {
    let expected = match (limit < heap, limit > heap && several_nodes) {
        (true, _) => "at least device_heap",
        (false, true) => "device_heap or nothing, in a group of several nodes",
        (false, false) => return Ok(()),
    };
    Err(PlanError::BadParameter { parameter: "device_heap_limit", seen: limit, expected }.into())
}

/// Makes all that can fail before ranks compare settings: a stream for copies, and kernels.
fn prepare(
    context: &Arc<Context>,
    priority: Priority,
    max_blocks: Option<u32>,
) -> Result<(Stream, Kernels), Error> {
    Ok((Stream::new(context, priority)?, Kernels::load(context)?.max_blocks(max_blocks)))
}

/// Writes what never changes: zeros for pads, and words that no rank has raised.
fn fill(context: &Arc<Context>, stream: &Stream, common: &Session) -> Result<(), Error> {
    let shape = &common.shape;
    let zeros = PinnedMemory::new(context, shape.zeros().1.max(shape.words().1) as usize)?;
    for (to, len) in [shape.words(), shape.zeros()] {
        stream.copy(common.memory.span(to, len)?, zeros.range().span(0, len)?)?;
    }
    stream.synchronize()?;
    common.write_map(context, stream, &common.fixed)
}

/// The programs of this rank's calls.
fn programs(fixed: &EpState) -> RankPrograms {
    let engines = Engines {
        pulls: true,
        brings_in: fixed.paths().is_multi_node() && (fixed.arrives() || !fixed.gpu_direct()),
        enqueues: true,
    };
    let sums = fixed.partial_bytes().is_some();
    RankPrograms::new(fixed.paths(), fixed.chunks, sums, engines)
}

fn enqueuer(
    common: &Arc<Session>,
    caller: CallerStream,
    engine: CopyEngineStepper,
    growth: Option<HeapGrowth>,
) -> Enqueuer {
    let fixed = &common.fixed;
    Enqueuer {
        common: Arc::clone(common),
        caller,
        engine,
        relay: fixed.paths().is_multi_node().then(|| Relay::new(Arc::clone(fixed))),
        calls: Calls::new(fixed.shared.hub.epoch()),
        tables: CallerTables::new(fixed.paths(), fixed.chunks),
        sorted: SortedRouting::default(),
        crossing: InterNodeRows::default(),
        arrivals: RelayPermutation::default(),
        rank_sums: RankSums::default(),
        node_sums: NodeSums::default(),
        numbers: GroupCounts::new(fixed),
        kept: (0..common.shape.word_sets()).map(|_| ContextState::default()).collect(),
        growth,
        metadata_at: vec![0; fixed.lanes.ranks() as usize],
        scratch: Scratch::default(),
    }
}
