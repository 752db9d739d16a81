//! Making an instance in fixed slots: memory, kernels, programs and, where there are other nodes, a
//! proxy. Each rank makes its part alone, and all ranks learn of a failure at one of them at the
//! end.

use std::sync::Arc;

use super::SlotExchange;
use super::expansion::{Expansion, ExpansionLayout};
use super::proxy::{Back, Proxy, ProxyRequest, Work};
use super::slot_exchange::{CallState, DEAD, FLAGS, LoweredCall, SlotState};
use super::slot_memory::{Tables, WindowLayout, Windows};
use super::slot_results::ExchangeState;
use crate::device::{Context, Kernels, Priority, Stream};
use crate::ep::LaneUse;
use crate::ep::builder::Spec;
use crate::ep::device::next_instance;
use crate::ep::device::row_transport::{RowTransport, TransportSizes};
use crate::ep::device::watchdog::{BypassStream, DeviceFlagWriter, POISON, WaitBreaker};
use crate::ep::report::CallKernels;
use crate::error::{DeviceError, Error, LaneError, MemoryError, PlanError};
use crate::exec::{Lowered, PeerWindows, ProxyOps};
use crate::lane::{self, COPY_ENGINE, Port};
use crate::plan::{Bins, ExpertMap, SlotShape};
use crate::schedule::WindowId;
use crate::schedule::call_program::SlotCall;
use crate::schedule::stream_program::{RowPath, Slots, StreamProgram};
use crate::topology::Route;
use crate::world::{DeviceWindow, Group, Member, SymmetricRange, WindowSizes};

impl SlotExchange {
    /// Allocates device memory, maps that of the others, and loads the kernels. With several nodes
    /// it registers the memory with NICs, or pins as much host memory, and starts the proxy.
    /// Collective: all ranks learn of a failure at one rank.
    pub fn new(group: &Group, spec: &Spec, context: &Arc<Context>) -> Result<Self, Error> {
        // First of all: ranks count the groups that they have made.
        let meeting = Group::new(Arc::clone(&group.shared), group.ranks())?;
        let made = Self::of_rank(group, meeting, spec, context);
        let lacks = made.as_ref().err().map_or_else(String::new, ToString::to_string);
        let all = group.gather(lacks.as_bytes())?;
        let made = made?;
        match all.iter().zip(group.ranks()).find(|(lacks, _)| !lacks.is_empty()) {
            Some((lacks, &rank)) => {
                let reason = String::from_utf8_lossy(lacks).into_owned();
                Err(LaneError::PeerUnsupported { rank, lane: COPY_ENGINE, reason }.into())
            }
            None => Ok(made),
        }
    }

    /// Refuses more rows and bytes than kernels count, and a device has.
    pub fn check_sizes(spec: &Spec) -> Result<(), PlanError> {
        let (shape, expansion) = shapes(spec)?;
        expansion.map_or(Ok(()), |(budget, layout)| layout.check(spec, &shape, budget))
    }

    /// This rank's. What fails after the windows are mapped fails at this rank alone.
    fn of_rank(group: &Group, meeting: Group, spec: &Spec, context: &Arc<Context>) -> Result<Self, Error> {
        let lanes = group.lanes(Route::Direct)?;
        let map: &ExpertMap = &spec.map;
        let (shape, expansion) = shapes(spec)?;
        let (me, ranks, nodes) = (group.rank(), group.size(), group.nodes());
        let far: Vec<u32> = (0..ranks).filter(|&peer| !nodes.same_node(me, peer)).collect();
        let several = nodes.nodes() > 1;
        let partial = if expansion.is_some() { spec.partial_dtype.dtype() } else { spec.dtype };
        let partial_row = (spec.hidden * partial.size()) as u64;
        let more = expansion.map_or(0, |(_, layout)| layout.bytes());
        let places = WindowLayout::new(ranks, map.experts(), shape, (partial_row, several), more)?;
        let slots = *places.slots();
        // The other ranks hear of a failure here where windows are compared.
        let loaded = Kernels::load(context).map(|kernels| kernels.max_blocks(spec.max_blocks));
        let sizes = WindowSizes::fixed(places.bytes(), places.word_bytes());
        let ready = loaded.as_ref().map(drop).map_err(Clone::clone);
        let members = DeviceWindow::new(group, context, sizes, ready)?.take_members();
        let crossing = if several { Some(cross(group, context, &members, &slots)?) } else { None };

        let own = members[me as usize].as_ref().ok_or(MemoryError::NotUsable { rank: me })?;
        let (kernels, memory, words) = (loaded?, own.memory.clone(), own.words.clone());
        let stream = Stream::new(context, Priority::Normal)?;
        let Tables { rank_of, local_of, dropped, packed_at, summed_from } =
            Tables::fill(&places, &memory, map, me, &stream)?;
        let gpu_direct = matches!(&crossing, Some((RowTransport::GpuDirect(..), ..)));
        let nic_words = gpu_direct.then(|| memory.part(0, slots.first())).transpose()?;
        let aside = nic_words.as_ref().map(|words| {
            let awaited = far.iter().flat_map(|&peer| FLAGS.map(|flag| slots.flag(peer, flag)));
            BypassStream::new(context, words, awaited.collect()).map(Arc::new)
        });
        let aside = aside.transpose()?;
        let host_staging = crossing.as_ref().and_then(|(passage, ..)| passage.host_staging());
        let window = Windows {
            members,
            far: far.clone(),
            nic_words,
            host_staging: host_staging.map(|t| t.memory.clone()),
        };

        let way = if gpu_direct { RowPath::GpuDirect } else { RowPath::HostStaged };
        let mut requests = Vec::new();
        let mut make = |call: SlotCall| -> Result<LoweredCall, Error> {
            let program = StreamProgram::new(call, slots, me)?.across(&nodes, way)?;
            let stage = Lowered::lower(context, &program, me, &window)?;
            let crossed = ProxyOps::of(&program);
            let counts = crossed.counts(stage.counts());
            let request = program.proxied().map(|proxied| proxied.request);
            requests.extend(request.map(|flag| ProxyRequest {
                flag,
                place: slots.flag(me, flag) as usize,
                crossed,
            }));
            Ok(LoweredCall { stage, counts })
        };
        let [dispatch, combine, release, refusal] = SlotCall::ALL.map(&mut make);
        let lowered = [dispatch?, combine?, release?, refusal?];

        let place = |peer| FLAGS.map(|flag| slots.flag(peer, flag) as usize);
        let by_host = (0..ranks).filter(|&peer| peer != me && !(gpu_direct && far.contains(&peer)));
        let by_host: Vec<u32> = by_host.collect();
        let beyond = aside.clone().map(|aside| Box::new(move || aside.release()) as DeviceFlagWriter);
        let hub = &group.shared.hub;
        let (health, awaited) = ((hub.rank(), hub.health()), by_host.iter().flat_map(|&peer| place(peer)));
        let status = (vec![places.status() as usize, places.verdict() as usize], DEAD);
        let guard = WaitBreaker::new(health, &words, (awaited.collect(), POISON), status, beyond)?;
        let by_nic = if gpu_direct { far.clone() } else { Vec::new() };
        let back = far.iter().filter(|_| !gpu_direct).map(|&from| Back { from, words: place(from) });
        let proxy = crossing.map(|(passage, flags, port)| {
            let (shared, words, back) =
                (Arc::clone(&group.shared), Arc::clone(guard.words()), back.collect());
            Proxy::start(Work { shared, port, words, requests, back, passage, _flags: flags })
        });
        let received = memory.part(slots.receive(0), u64::from(ranks) * slots.slot_bytes())?;
        let rows = WindowLayout::part(&memory, places.rows())?;
        let marks = WindowLayout::part(&memory, places.marks())?;
        let partials = memory.part(slots.partial(0), u64::from(ranks) * slots.return_bytes())?;
        let expansion = expansion.map(|(budget, layout)| {
            let memory = WindowLayout::part(&memory, places.expansion())?;
            let bins = Bins::of_layout(spec.layout, map, spec.sum_order, &nodes);
            Expansion::new(&memory, &layout, (spec, shape, budget), (me, &bins), &stream)
        });
        let expansion = expansion.transpose()?;
        let peers = (0..ranks).filter(|&peer| peer != me);
        let proxy = proxy.transpose()?;
        let of_proxy = proxy.as_ref().map(|proxy| &proxy.work().passage);
        let lanes = LaneUse::of_devices(&lanes);
        let facts = Arc::new(ExchangeState {
            instance: next_instance(),
            outputs: expansion.as_ref().map_or(&partials, Expansion::outputs).clone(),
            rows: expansion.as_ref().map_or(ranks * spec.max_tokens, Expansion::budget),
            words: Arc::clone(guard.words()),
            verdict: places.verdict(),
            kernels: kernels_of(expansion.as_ref())?,
            max_blocks: spec.max_blocks,
            lanes: lanes.clone(),
            same_device: peers.filter(|&peer| window.same_device(peer)).count() as u32,
            no_gpu_direct: of_proxy.and_then(RowTransport::no_gpu_direct),
            registration: of_proxy.and_then(RowTransport::registration),
        });
        let state = SlotState {
            shared: Arc::clone(&group.shared),
            group: meeting,
            world_ranks: group.ranks().to_vec(),
            me,
            device: context.device(),
            spec: spec.clone(),
            shape,
            experts: map.experts(),
            digest: map.digest() ^ shape.bytes().rotate_left(32),
            places,
            kernels,
            rank_of,
            local_of,
            dropped,
            marks,
            rows,
            received,
            partials,
            expansion,
            packed_at,
            summed_from,
            lanes,
            facts,
            guard,
            awaited: [by_host, by_nic].concat(),
            aside,
            memory,
            window,
            proxy,
        };
        let turn =
            CallState { call: SlotCall::Dispatch, pending: false, refusal: None, dispatches: 0, tokens: 0 };
        Ok(SlotExchange { programs: SlotCall::ALL.map(SlotCall::program), lowered, turn, state })
    }
}

/// The shape of slots and, within a budget, the memory of what they are expanded to.
fn shapes(spec: &Spec) -> Result<(SlotShape, Option<(u32, ExpansionLayout)>), PlanError> {
    let shape = SlotShape::new(spec.max_tokens, spec.top_k, spec.row_bytes())?;
    let Some(budget) = spec.mode.budget() else { return Ok((shape, None)) };
    let shape = shape.with_counts(spec.map.slots())?;
    Ok((shape, Some((budget, ExpansionLayout::new(spec, &shape, budget)))))
}

/// Kernels of a dispatch, and of a combine, for reports.
fn kernels_of(expansion: Option<&Expansion>) -> Result<[CallKernels; 2], DeviceError> {
    let expanded = |kernel| expansion.map(|_| kernel);
    // Of no rows there is nothing to gather.
    let gather = expansion.filter(|expansion| expansion.budget() > 0).map(|_| "regroup");
    let fold = expansion.map(Expansion::fold_name).transpose()?;
    Ok([
        [Some("pack"), expanded("tally"), Some("check"), expanded("admit"), expanded("expand"), gather],
        [fold, Some("sum"), None, None, None, None],
    ])
}

/// The path of rows between nodes, with the flags that the lane raises where these are not the
/// device's, and the programs for other nodes. Collective.
fn cross(
    group: &Group,
    context: &Arc<Context>,
    members: &[Option<Member>],
    slots: &Slots,
) -> Result<(RowTransport, Option<SymmetricRange>, Port), Error> {
    let lanes = group.lanes(Route::Direct)?;
    let needs = TransportSizes { words: slots.first(), enqueuer_scratch: None, host_staging: slots.bytes() };
    // First, needed or not: what fails at one rank alone must have nothing behind it that is
    // collective.
    let taken = group.take_symmetric(slots.flag_bytes())?;
    let passage = RowTransport::find(group, context, &lanes, members, needs)?;
    let (pool, flags, host_staging) = match &passage {
        RowTransport::None => return Err(MemoryError::NotUsable { rank: group.rank() }.into()),
        RowTransport::GpuDirect(gpu_direct, _) => (gpu_direct.window.clone(), None, None),
        RowTransport::HostStaged(host_staging, _) => {
            // Slots themselves are reached by no peer.
            let mapped = Arc::clone(&host_staging.window.mapped);
            let nobodys = lane::MappedWindow { mapped, parts: Vec::new(), of_devices: true };
            (nobodys, Some(taken), Some(host_staging.window.clone()))
        }
    };
    let windows = [Some(pool), flags.as_ref().map(SymmetricRange::window), host_staging];
    let port = Port::new(lanes, windows.into_iter().flatten().collect(), WindowId::CONTROL);
    Ok((passage, flags, port))
}
