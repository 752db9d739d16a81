//! Making an instance in fixed slots: layout of its windows, tables, kernels, programs and, where
//! there are other nodes, a proxy.
//!
//! ```text
//!   memory of the device   | words for NICs | slots: packed, received, partial | tables | expansion |   WindowLayout
//!   words of the host      | flags of all peers | status, verdict |
//! ```
//!
//! Each rank makes its part alone. All ranks learn of a failure at one of them at the end.

use std::sync::Arc;

use super::SlotExchange;
use super::exchange::{CallState, DEAD, FLAGS, LoweredCall, SlotState};
use super::expand::{Expansion, ExpansionLayout};
use super::handle::Facts;
use super::proxy::{Back, Proxy, ProxyRequest, Work};
use crate::device::{Addresses, ByteSpan, Context, DeviceRange, Kernels, PinnedMemory, Priority, Stream};
use crate::ep::LaneUse;
use crate::ep::builder::Spec;
use crate::ep::device::guard::{BypassStream, DeviceFlagWriter, POISON, WaitBreaker};
use crate::ep::device::next_instance;
use crate::ep::device::transport::{RowTransport, TransportSizes};
use crate::error::{DeviceError, Error, LaneError, MemoryError, PlanError};
use crate::exec::{Lowered, PeerWindows, ProxyOps};
use crate::lane;
use crate::lane::{COPY_ENGINE, Port};
use crate::plan::{Bins, ExpertMap, SlotShape};
use crate::rows::Arithmetic;
use crate::schedule::WindowId;
use crate::schedule::call::SlotCall;
use crate::schedule::stream::{RowPath, Slots, StreamProgram};
use crate::topology::Route;
use crate::world::{DeviceWindow, Group, Member, SymmetricRange};

/// The device window of an exchange: the slots, which peers reach, and behind them memory of this
/// rank's kernels.
///
/// ```text
///   | words that cards raise | slots | rank of each expert | local number | slots to pack | rows to sum | place of each token | counter | expansion |
/// ```
///
/// Words exist if there are other nodes, and an expansion within a budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowLayout {
    slots: Slots,
    ranks: u64,
    experts: u64,
    max_tokens: u64,
    /// Bytes of an expansion.
    expansion: u64,
}

impl WindowLayout {
    /// For slots of this shape, and partial rows of `home_row` bytes; on several nodes or one; with
    /// so many bytes of an expansion.
    pub fn new(
        ranks: u32,
        experts: u32,
        shape: SlotShape,
        (home_row, several): (u64, bool),
        expansion: u64,
    ) -> Result<Self, PlanError> {
        let max_tokens = u64::from(shape.max_tokens());
        let slots = Slots::new(ranks, shape.bytes(), max_tokens * home_row)?;
        let slots = if several { slots.behind_words() } else { slots };
        Ok(WindowLayout { slots, ranks: ranks.into(), experts: experts.into(), max_tokens, expansion })
    }

    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// `i32 [experts]`.
    pub fn rank_of(&self) -> (u64, u64) {
        (self.slots.bytes(), self.experts * 4)
    }

    /// `i32 [experts]`.
    pub fn local_of(&self) -> (u64, u64) {
        after(self.rank_of(), self.experts * 4)
    }

    /// Addresses, `u64 [ranks]`: where each rank's slot is packed.
    pub fn packed_at(&self) -> (u64, u64) {
        after(self.local_of(), self.ranks * 8)
    }

    /// Addresses, `u64 [ranks]`: where each rank's partial rows are summed from.
    pub fn summed_from(&self) -> (u64, u64) {
        after(self.packed_at(), self.ranks * 8)
    }

    /// `i32 [max_tokens, ranks]`.
    pub fn rows(&self) -> (u64, u64) {
        after(self.summed_from(), self.max_tokens * self.ranks * 4)
    }

    /// `u64`.
    pub fn counter(&self) -> (u64, u64) {
        after(self.rows(), 8)
    }

    /// Memory of an expansion.
    pub fn expansion(&self) -> (u64, u64) {
        after(self.counter(), self.expansion)
    }

    /// Bytes of the window.
    pub fn bytes(&self) -> u64 {
        after(self.expansion(), 0).0
    }

    /// In the words: the status, behind the flags.
    pub fn status(&self) -> u64 {
        self.slots.flag_bytes()
    }

    /// In the words: the status of the last call alone.
    pub fn verdict(&self) -> u64 {
        self.status() + 64
    }

    /// Bytes of the words.
    pub fn word_bytes(&self) -> u64 {
        self.verdict() + 64
    }

    /// A piece of a window.
    pub fn part(memory: &DeviceRange, (offset, len): (u64, u64)) -> Result<DeviceRange, DeviceError> {
        memory.part(offset, len)
    }
}

/// Behind a piece, as aligned as slots are.
fn after((offset, len): (u64, u64), next: u64) -> (u64, u64) {
    ((offset + len).next_multiple_of(Slots::ALIGN), next)
}

/// Memory that is written once.
pub(super) struct Tables {
    /// The rank that this one uses for each expert, and the number of the expert there.
    pub rank_of: DeviceRange,
    pub local_of: DeviceRange,
    /// Where slots are packed to: one's own straight to where it is received.
    pub packed_at: Addresses,
    /// Where partial rows are summed from: one's own where its experts leave them.
    pub summed_from: Addresses,
}

impl Tables {
    /// Writes them, and waits until they are there.
    pub fn fill(
        places: &WindowLayout,
        memory: &DeviceRange,
        map: &ExpertMap,
        me: u32,
        stream: &Stream,
    ) -> Result<Tables, Error> {
        let chosen: Vec<u32> = (0..map.experts()).map(|expert| map.slot_for(me, expert)).collect();
        let ranks: Vec<u32> = chosen.iter().map(|&slot| map.rank_of(slot)).collect();
        let local = |(&slot, &rank): (&u32, &u32)| slot - map.slots_of(rank).start;
        let locals: Vec<u32> = chosen.iter().zip(&ranks).map(local).collect();
        let [rank_of, local_of] =
            [places.rank_of(), places.local_of()].map(|at| WindowLayout::part(memory, at));
        let (rank_of, local_of) = (rank_of?, local_of?);
        let _staged = [write(stream, &rank_of, &ranks)?, write(stream, &local_of, &locals)?];
        let slots = places.slots();
        let pick = |own: u64, other: &dyn Fn(u32) -> u64, len| -> Result<Vec<ByteSpan<'_>>, DeviceError> {
            let at = |rank| memory.span(if rank == me { own } else { other(rank) }, len);
            (0..slots.ranks()).map(at).collect()
        };
        let packed_at = pick(slots.receive(me), &|rank| slots.send(rank), slots.slot_bytes())?;
        let summed_from = pick(slots.partial(me), &|rank| slots.home(rank), slots.home_bytes())?;
        let packed_at = Addresses::new(stream, &WindowLayout::part(memory, places.packed_at())?, &packed_at)?;
        let summed_from =
            Addresses::new(stream, &WindowLayout::part(memory, places.summed_from())?, &summed_from)?;
        stream.write::<u64>(memory.word(places.counter().0)?, 0)?;
        stream.synchronize()?;
        Ok(Tables { rank_of, local_of, packed_at, summed_from })
    }
}

/// Copies words to the device. Their source lives until the stream has been waited for.
pub(super) fn write(stream: &Stream, to: &DeviceRange, words: &[u32]) -> Result<PinnedMemory, DeviceError> {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let staged = PinnedMemory::new(stream.context(), bytes.len())?;
    staged.write(0, bytes)?;
    stream.copy(to.span(0, to.len())?, staged.range().span(0, to.len())?)?;
    Ok(staged)
}

/// Memory that this rank's device reaches.
#[derive(Debug)]
pub(super) struct Windows {
    /// Per rank: none of those of other nodes.
    pub members: Vec<Option<Member>>,
    /// Ranks of other nodes.
    pub far: Vec<u32>,
    /// Words by which these speak, where cards raise them in memory of the device.
    pub card_words: Option<DeviceRange>,
    /// The host's twin, where rows cross by that.
    pub twin: Option<DeviceRange>,
}

impl Windows {
    fn member(&self, rank: u32) -> Option<&Member> {
        self.members.get(rank as usize)?.as_ref()
    }
}

impl PeerWindows for Windows {
    fn slots(&self, rank: u32) -> Option<&DeviceRange> {
        Some(&self.member(rank)?.memory)
    }

    fn flags(&self, rank: u32) -> Option<&DeviceRange> {
        Some(self.member(rank)?.words.range())
    }

    fn same_device(&self, rank: u32) -> bool {
        self.member(rank).is_some_and(|member| member.same_device)
    }

    fn twin(&self) -> Option<&DeviceRange> {
        self.twin.as_ref()
    }

    fn flags_of_card(&self, of: u32) -> Option<&DeviceRange> {
        self.card_words.as_ref().filter(|_| self.far.contains(&of))
    }
}

impl SlotExchange {
    /// Allocates device memory, maps that of the others, and loads the kernels. With several nodes
    /// it registers the memory with NICs, or pins as much host memory, and starts the proxy.
    /// Collective: all ranks learn of a failure at one rank.
    pub fn new(group: &Group, spec: &Spec, context: &Arc<Context>) -> Result<Self, Error> {
        let made = Self::of_rank(group, spec, context);
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

    /// Checks settings that only slots on a device have limits for.
    pub fn check_settings(spec: &Spec) -> Result<(), PlanError> {
        Arithmetic::try_from(spec.dtype)?;
        match spec.mode.slots() {
            Some(rows) if rows != spec.max_tokens => {
                let (parameter, expected) = ("slots", "max_tokens: on a device each token has one");
                return Err(PlanError::BadParameter { parameter, seen: rows.into(), expected });
            }
            _ => {}
        }
        let (shape, expansion) = shapes(spec)?;
        expansion.map_or(Ok(()), |(budget, layout)| layout.check(spec, &shape, budget))
    }

    /// This rank's. What fails after the windows are mapped fails at this rank alone.
    fn of_rank(group: &Group, spec: &Spec, context: &Arc<Context>) -> Result<Self, Error> {
        let lanes = group.lanes(Route::Direct)?;
        let map: &ExpertMap = &spec.map;
        let (shape, expansion) = shapes(spec)?;
        let (me, ranks, nodes) = (group.rank(), group.size(), group.nodes());
        let far: Vec<u32> = (0..ranks).filter(|&peer| !nodes.same_node(me, peer)).collect();
        let several = nodes.nodes() > 1;
        let home = if expansion.is_some() { spec.wire.dtype() } else { spec.dtype };
        let home_row = (spec.hidden * home.size()) as u64;
        let more = expansion.map_or(0, |(_, layout)| layout.bytes());
        let places = WindowLayout::new(ranks, map.experts(), shape, (home_row, several), more)?;
        let slots = *places.slots();
        // Whatever this rank lacks, the others hear of it where windows are compared.
        let loaded = context.driver().require_eager_loading().and_then(|()| Kernels::load(context));
        let sizes = (places.bytes(), places.word_bytes());
        let ready = loaded.as_ref().map(drop).map_err(Clone::clone);
        let members = DeviceWindow::new(group, context, sizes, ready)?.members();
        let crossing = if several { Some(cross(group, context, &members, &slots)?) } else { None };

        let own = members[me as usize].as_ref().ok_or(MemoryError::NotUsable { rank: me })?;
        let (kernels, memory, words) = (loaded?, own.memory.clone(), own.words.clone());
        let stream = Stream::new(context, Priority::Normal)?;
        let Tables { rank_of, local_of, packed_at, summed_from } =
            Tables::fill(&places, &memory, map, me, &stream)?;
        let straight = matches!(&crossing, Some((RowTransport::Straight(..), ..)));
        let card_words = straight.then(|| memory.part(0, slots.first())).transpose()?;
        let aside = card_words.as_ref().map(|words| {
            let awaited = far.iter().flat_map(|&peer| FLAGS.map(|flag| slots.flag(peer, flag)));
            BypassStream::new(context, words, awaited.collect()).map(Arc::new)
        });
        let aside = aside.transpose()?;
        let twin = crossing.as_ref().and_then(|(passage, ..)| passage.twin());
        let window = Windows { members, far: far.clone(), card_words, twin: twin.map(|t| t.memory.clone()) };

        let way = if straight { RowPath::GpuDirect } else { RowPath::HostStaged };
        let mut bells = Vec::new();
        let mut make = |call: SlotCall| -> Result<LoweredCall, Error> {
            let program = StreamProgram::new(call, slots, me)?.across(&nodes, way)?;
            let stage = Lowered::lower(context, &program, me, &window)?;
            let crossed = ProxyOps::of(&program);
            let counts = crossed.counts(stage.counts());
            let rings = program.proxied().map(|proxied| proxied.rings);
            bells.extend(rings.map(|rings| ProxyRequest {
                rings,
                place: slots.flag(me, rings) as usize,
                crossed,
            }));
            Ok(LoweredCall { stage, counts })
        };
        let [dispatch, combine, release] = SlotCall::ALL.map(&mut make);
        let lowered = [dispatch?, combine?, release?];

        let place = |peer| FLAGS.map(|flag| slots.flag(peer, flag) as usize);
        let by_host = (0..ranks).filter(|&peer| peer != me && !(straight && far.contains(&peer)));
        let by_host: Vec<u32> = by_host.collect();
        let beyond = aside.clone().map(|aside| Box::new(move || aside.release()) as DeviceFlagWriter);
        let (health, awaited) = (group.shared.hub.health(), by_host.iter().flat_map(|&peer| place(peer)));
        let status = (vec![places.status() as usize, places.verdict() as usize], DEAD);
        let guard = WaitBreaker::new(health, &words, (awaited.collect(), POISON), status, beyond)?;
        let by_card = if straight { far.clone() } else { Vec::new() };
        let back = far.iter().filter(|_| !straight).map(|&from| Back { from, words: place(from) });
        let proxy = crossing.map(|(passage, flags, port)| {
            let (shared, words, back) =
                (Arc::clone(&group.shared), Arc::clone(guard.words()), back.collect());
            Proxy::start(Work { shared, port, words, bells, back, passage, _flags: flags })
        });
        let received = memory.part(slots.receive(0), u64::from(ranks) * slots.slot_bytes())?;
        let rows = WindowLayout::part(&memory, places.rows())?;
        let partials = memory.part(slots.partial(0), u64::from(ranks) * slots.home_bytes())?;
        let expansion = expansion.map(|(budget, layout)| {
            let memory = WindowLayout::part(&memory, places.expansion())?;
            let bins = Bins::of_layout(spec.layout, map, spec.order, &nodes);
            Expansion::new(&memory, &layout, (spec, shape, budget), (me, &bins), &stream)
        });
        let expansion = expansion.transpose()?;
        let peers = (0..ranks).filter(|&peer| peer != me);
        let proxy = proxy.transpose()?;
        let of_proxy = proxy.as_ref().map(|proxy| &proxy.work().passage);
        let lanes = LaneUse::of_devices(&lanes);
        let facts = Arc::new(Facts {
            instance: next_instance(),
            outputs: expansion.as_ref().map_or(&partials, Expansion::outputs).clone(),
            rows: expansion.as_ref().map_or(ranks * spec.max_tokens, Expansion::budget),
            words: Arc::clone(guard.words()),
            status: if expansion.is_some() { places.verdict() } else { places.status() },
            kernels: kernels_of(expansion.as_ref())?,
            lanes: lanes.clone(),
            same_device: peers.filter(|&peer| window.same_device(peer)).count() as u32,
            detour: of_proxy.and_then(RowTransport::detour),
            registration: of_proxy.and_then(RowTransport::registration),
        });
        let state = SlotState {
            shared: Arc::clone(&group.shared),
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
            rows,
            received,
            partials,
            expansion,
            packed_at,
            summed_from,
            lanes,
            facts,
            guard,
            awaited: [by_host, by_card].concat(),
            aside,
            memory,
            window,
            proxy,
        };
        let turn = CallState { call: SlotCall::Dispatch, pending: false, dispatches: 0, tokens: 0 };
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
fn kernels_of(expansion: Option<&Expansion>) -> Result<[Vec<&'static str>; 2], DeviceError> {
    let Some(expansion) = expansion else { return Ok([vec!["pack", "check"], vec!["sum"]]) };
    let folds = expansion.fold_names()?.iter().copied().chain(["sum"]).collect();
    // Of no rows there is nothing to gather.
    let gather = (expansion.budget() > 0).then_some("regroup");
    Ok([["pack", "tally", "check", "admit", "expand"].into_iter().chain(gather).collect(), folds])
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
    let needs = TransportSizes { words: slots.first(), desk: None, twin: slots.bytes() };
    // First, needed or not: what fails at one rank alone must have nothing behind it that is
    // collective.
    let taken = group.take_symmetric(slots.flag_bytes())?;
    let passage = RowTransport::find(group, context, &lanes, members, needs)?;
    let (pool, flags, twin) = match &passage {
        RowTransport::None => return Err(MemoryError::NotUsable { rank: group.rank() }.into()),
        RowTransport::Straight(straight, _) => (straight.window.clone(), None, None),
        RowTransport::Detour(twin, _) => {
            // Slots themselves are reached by nobody.
            let mapped = Arc::clone(&twin.window.mapped);
            let nobodys = lane::MappedWindow { mapped, parts: Vec::new(), of_devices: true };
            (nobodys, Some(taken), Some(twin.window.clone()))
        }
    };
    let windows = [Some(pool), flags.as_ref().map(SymmetricRange::window), twin];
    let port = Port::new(lanes, windows.into_iter().flatten().collect(), WindowId::CONTROL);
    Ok((passage, flags, port))
}
