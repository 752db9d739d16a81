//! Work of every rank of a measurement: check, time, check again; rank 0 reports.
//!
//! Each call is timed with its floor. Real and floor alternate round by round in the same
//! processes, and take turns in going first, so that a busy moment of the machine or a throttled
//! core meets both alike.

use std::process::ExitCode;

use serde::Serialize;
use sidelane::dtype::with_element;
use sidelane::ep::{FloorBench, Handle};
use sidelane::plan::{Bins, ExpertMap, RowMetadata, Strategy, SumOrder};
use sidelane::rows::{Arithmetic, Stores};
use sidelane::topology::{Paths, Route};
use sidelane::world::NicCounters;
use sidelane::{Error, Window};
use sidelane_core::schedule::ControlLayout;
use sidelane_testkit::machines;
use sidelane_testkit::timing::stats::{Laps, median};
use sidelane_verify::reference::{Real, Reference};

use super::call_baselines::{self, Baselines};
use super::chain;
use super::checked_layer::{self, Layer, Verdict, write_trace};
use super::collectivex;
use super::report::{FirstCall, InterNode, Lanes, Pass, Report, RunConfig, Volume};
use super::run_settings::{Kind, RunSettings};
use super::{BenchArgs, Task};
use crate::baselines::{Field, Folder};
use crate::command_frame::{self, Command as _};
use crate::error::{CliError, wrong};
use crate::ranks::{self, Assignment, Files, Sizes};
use crate::routing_source::Router;

pub fn main(Assignment { task, files }: &Assignment<Task>) -> Result<ExitCode, CliError> {
    let report = with_element!(task.config.shape.dtype.element(), E => run::<E>(task, files))?;
    let Some(report) = report else { return Ok(ExitCode::SUCCESS) };
    command_frame::draw(&files.collectivex, || collectivex::document(&report))?;
    command_frame::finish(&report, &files.json)
}

fn run<E: Real>(task: &Task, files: &Files) -> Result<Option<Report>, CliError> {
    let mut layer: Layer<'_, E> = Layer::join(BenchArgs::NAME, task)?;
    if layer.world.rank() == 0 {
        command_frame::complain(&format!("sidelane: all ranks met; {} rounds to time", task.config.rounds));
    }
    let (rows, handle) = layer.dispatch_and_check()?;
    let y = layer.expected.outputs();
    let received = if files.baselines.is_some() { rows.rows::<u8>()?.to_vec() } else { Vec::new() };
    drop(rows);
    layer.combine_and_check(&y, &handle)?;
    let folder = files.baselines.as_deref().map(Folder::at);
    let mut field = folder.map(|folder| layer.challenge(&folder, &received, &y)).transpose()?;
    drop(received);
    if task.config.backward {
        layer.backward_and_check(&y, &handle)?;
    }
    // Once all ranks are here, all have read the offered rows, and the pool is empty. Then the
    // output lies below the rows: whenever these are dropped, the next dispatch lands in the same
    // place.
    layer.group.gather(&[])?;
    let mut barrier = layer.group.window(0)?;
    let memcpy = memcpy_gbps(&layer, &mut barrier)?;
    let mut output = Layer::output(&y, &handle)?;
    let mut passes = Vec::new();
    for kinds in Kind::phases(task.config.backward) {
        let forward = kinds.contains(&Kind::Dispatch);
        let rows =
            if forward { layer.dispatch_and_check()?.0 } else { layer.gradients_and_check(&handle)? };
        let mut floor = layer.ep.floor_bench(&layer.group, rows, output, &handle)?;
        passes.extend(time(&mut layer, &mut barrier, kinds, &mut floor, &mut field, &handle)?);
        let (Some(rows), Some(kept)) = (floor.lend_rows(), floor.lend_output()) else {
            return Err(moved(layer.world.rank()));
        };
        // The floor has written the same rows again and again: they must still be right.
        if forward {
            layer.check_rows(&rows, &handle)?;
        } else {
            layer.check_gradients(&rows)?;
        }
        output = kept;
    }
    drop(output);
    layer.combine_and_check(&y, &handle)?;
    let chains =
        if task.config.chained { Some(chain::run(&mut layer, &mut barrier, &handle)?) } else { None };
    if chains.is_some() {
        let (_, handle) = layer.dispatch_and_check()?;
        layer.combine_and_check(&y, &handle)?;
    }
    if task.records {
        let timelines = checked_layer::record(&mut layer, &y)?;
        if let (Some(path), 0) = (&files.trace, layer.world.rank()) {
            write_trace(path, layer.world.nodes(), &timelines)?;
        }
    }
    barrier.quiet()?;
    report(&layer, &handle, &passes, &field, memcpy, &chains)
}

fn time<E: Real>(
    layer: &mut Layer<'_, E>,
    barrier: &mut Window,
    kinds: &[Kind],
    floor: &mut FloorBench,
    field: &mut Option<Field>,
    handle: &Handle,
) -> Result<Vec<CallTimes>, CliError> {
    let (config, rank) = (layer.config, layer.world.rank());
    let stores = [Stores::Streaming, Stores::Cached];
    let mut track = Track { layer, barrier, floor, field, stores, handle, moved: false };
    track.choose_stores(kinds)?;
    let mut pairs = vec![CallTimes::default(); kinds.len()];
    let bar = command_frame::progress(rank, config.rounds.into());
    for round in 0..config.rounds {
        track.round(kinds, &mut pairs, round % 2 == 1)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    track.barrier.barrier()?;
    if track.moved { Err(moved(rank)) } else { Ok(pairs) }
}

/// Whether this rank has moved in a dispatch the planned bytes; if not, prints the difference.
fn moved_as_planned(rank: u32, report: &sidelane::ep::Report) -> bool {
    let (moved, traffic) = (report.moved, report.traffic);
    let near = traffic.sent.own + traffic.sent.local + traffic.relayed + traffic.regrouped;
    let planned = [near, traffic.sent.remote].map(|rows| rows * traffic.row_bytes);
    let seen = [moved.intra_node_bytes, moved.inter_node_bytes];
    if seen != planned {
        command_frame::complain(&format!(
            "sidelane: rank {rank} moved {seen:?} bytes on its node and to other nodes, not {planned:?}"
        ));
    }
    let (copies, planned_copies) = (report.relayed.copies, traffic.copies);
    if copies != planned_copies {
        command_frame::complain(&format!(
            "sidelane: rank {rank} relayed rows in {copies} copies, not {planned_copies}"
        ));
    }
    seen == planned && copies == planned_copies
}

/// Real and floor were not measured in the same memory.
fn moved(rank: u32) -> CliError {
    wrong!(
        "rank {rank}: a timed call did not land where its floor writes: its share of the floor would mean nothing"
    )
}

fn report<E: Real>(
    layer: &Layer<'_, E>,
    handle: &Handle,
    pairs: &[CallTimes],
    field: &Option<Field>,
    memcpy_gbps: f64,
    chains: &Option<chain::Timed>,
) -> Result<Option<Report>, CliError> {
    let config = layer.config;
    let (dispatched, combined) = (handle.report()?, handle.return_report()?);
    let found = [
        u64::from(!moved_as_planned(layer.world.rank(), &dispatched)),
        layer.expected.row_count(),
        dispatched.moved.inter_node_bytes,
        combined.moved.inter_node_bytes,
        handle.dropped().iter().filter(|&&dropped| dropped).count() as u64,
    ];
    let [strays, landed, inter_node, returned, dropped_choices] = layer.sum(found)?;
    let words = InterNode::words(&dispatched.traffic, layer.expected.crossing_choices());
    let crossing = InterNode::new(config, layer.sum(words)?);
    let expected = crossing.combine_bytes(config);
    let verdict = layer.verdict()?;
    let (mut passes, mut rounds) = (Vec::new(), Vec::new());
    for (kind, pair) in Kind::phases(config.backward).iter().flatten().zip(pairs) {
        let row_bytes = if *kind == Kind::Dispatch { config.sent_bytes() } else { config.row_bytes() };
        let volume = Volume {
            landed: landed * row_bytes,
            inter_node: match kind {
                Kind::Dispatch => inter_node,
                Kind::CombineBackward => crossing.rows * row_bytes,
                Kind::Combine | Kind::DispatchBackward => returned,
            },
            inter_node_logical: crossing.expert_rows * row_bytes,
        };
        let real = pair.real.rounds(&layer.group, &layer.machines)?;
        let floor = pair.floor.rounds(&layer.group, &layer.machines)?;
        passes.push(Pass::of_rounds(&real, &floor, volume));
        rounds.push(real);
    }
    let first = |laps: &Laps| -> Result<f64, CliError> { Ok(laps.rounds(&layer.group, &layer.machines)?[0]) };
    let first = FirstCall { dispatch_us: first(&layer.dispatches)?, combine_us: first(&layer.combines)? };
    let chain = chains.as_ref().map(|chains| chains.report(layer)).transpose()?;
    let nics = Nics::of(layer)?;
    if layer.world.rank() != 0 {
        return Ok(None);
    }
    if returned != expected {
        command_frame::complain(&format!(
            "sidelane: a combine moved {returned} bytes between nodes, not {expected}"
        ));
    }
    let local = layer.ep.lanes().iter().any(|used| used.lane == "shm").then(|| "shm".to_owned());
    let (net, net_reason) = machines::net(&layer.world).unzip();
    let exact = nics.as_ref().is_none_or(|nics| nics.exact);
    let huge_pages_granted = layer.world.pages().huge.is_some_and(|bytes| bytes > 0);
    Ok(Some(Report {
        config: RunConfig { config: config.clone(), hosts: layer.machines.hosts(), huge_pages_granted },
        verdict: Verdict {
            verified: verdict.verified && strays == 0 && returned == expected && exact,
            ..verdict
        },
        required_rows: handle.required_rows().iter().copied().max().unwrap_or(0),
        dropped_choices,
        memcpy_gbps,
        first_call: first,
        lanes: Lanes { intra_node: local, inter_node: net, inter_node_reason: net_reason },
        nics,
        inter_node: crossing,
        dispatch: passes[0],
        combine: passes[1],
        dispatch_backward: passes.get(2).copied(),
        combine_backward: passes.get(3).copied(),
        chain,
        baselines: field.as_ref().map(|field| Baselines::new(field, [&rounds[0], &rounds[1]])),
    }))
}

#[derive(Clone, Debug, Default)]
pub struct CallTimes {
    pub real: Laps,
    pub floor: Laps,
}

struct Track<'a, 'c, E> {
    layer: &'a mut Layer<'c, E>,
    barrier: &'a mut Window,
    floor: &'a mut FloorBench,
    field: &'a mut Option<Field>,
    /// Faster stores of the floor, for scattered rows and for sums.
    stores: [Stores; 2],
    /// Handle of a dispatch that stays alive: combines and backward calls follow it.
    handle: &'a Handle,
    /// Whether a real call got other memory than the floor's: then its floor has not been measured.
    moved: bool,
}

impl<E: Real> Track<'_, '_, E> {
    pub fn round(
        &mut self,
        kinds: &[Kind],
        pairs: &mut [CallTimes],
        floor_first: bool,
    ) -> Result<(), CliError> {
        kinds.iter().zip(pairs).try_for_each(|(&kind, pair)| {
            self.lap(kind, pair, floor_first)?;
            // A rank that is done must not start baselines while others measure: they would take a
            // core from those.
            self.barrier.barrier()?;
            let others = self.field.as_mut().zip(call_baselines::command(kind));
            others.map_or(Ok(()), |(field, command)| field.lap(command))
        })
    }

    /// One round of one kind: real and floor, in this order or the other. Each is run twice and
    /// timed the second time, so that it finds the caches in the state that it left itself.
    fn lap(&mut self, kind: Kind, pair: &mut CallTimes, floor_first: bool) -> Result<(), Error> {
        for floor in [floor_first, !floor_first] {
            if floor {
                self.floor(kind, &mut Laps::default())?;
                self.floor(kind, &mut pair.floor)?;
            } else {
                self.real(kind, &mut Laps::default())?;
                self.real(kind, &mut pair.real)?;
            }
        }
        Ok(())
    }

    fn real(&mut self, kind: Kind, laps: &mut Laps) -> Result<(), Error> {
        let Layer { ep, tokens, routing, out, .. } = &mut *self.layer;
        match kind {
            Kind::Dispatch | Kind::CombineBackward => {
                drop(self.floor.lend_rows());
                let x = tokens.x()?;
                self.barrier.barrier()?;
                let rows = match kind {
                    Kind::Dispatch => laps.time(|| tokens.dispatch(ep, routing))?.0,
                    _ => laps.time(|| ep.combine_backward(x, self.handle))?.0,
                };
                self.moved |= self.floor.keep_rows(rows).is_err();
            }
            Kind::Combine | Kind::DispatchBackward => {
                let y = self.floor.lend_output().map_or_else(|| self.handle.output(), Ok)?;
                self.barrier.barrier()?;
                match kind {
                    Kind::Combine => laps.time(|| ep.combine_into(y, self.handle, &mut **out))?,
                    _ => laps.time(|| ep.dispatch_backward_into(y, None, self.handle, &mut **out, None))?,
                }
                // Once all are here, all have read it, and it is free again.
                self.barrier.barrier()?;
                self.moved |= self.floor.keep_output(self.handle.output()?).is_err();
            }
        }
        Ok(())
    }

    fn floor(&mut self, kind: Kind, laps: &mut Laps) -> Result<(), Error> {
        self.barrier.barrier()?;
        let [scatter, sum] = self.stores;
        let (floor, dtype) =
            (&mut *self.floor, Arithmetic::try_from(self.layer.config.shape.dtype.element())?);
        let input = match kind {
            Kind::CombineBackward => bytemuck::cast_slice(self.layer.tokens.x()?),
            _ => self.layer.tokens.sent()?,
        };
        if kind.sums() {
            let out = bytemuck::cast_slice_mut(&mut self.layer.out);
            laps.time(|| floor.combine(dtype, out, sum));
        } else {
            laps.time(|| floor.dispatch(input, scatter));
        }
        Ok(())
    }

    /// Finds the faster stores for the floor: a few rounds of each, as they will be timed, decided
    /// alike on all ranks.
    fn choose_stores(&mut self, kinds: &[Kind]) -> Result<(), Error> {
        const MOST: usize = 15;
        // Where rounds are few they are slow, and choosing must not take longer than they do.
        let count = MOST.min(self.layer.config.rounds as usize).max(1);
        for &kind in kinds {
            let at = usize::from(kind.sums());
            let mut best = f64::INFINITY;
            for stores in [Stores::Streaming, Stores::Cached] {
                let mut pair = CallTimes::default();
                let before = std::mem::replace(&mut self.stores[at], stores);
                for _ in 0..count {
                    self.lap(kind, &mut pair, false)?;
                }
                let rounds = median(&mut pair.floor.rounds(&self.layer.group, &self.layer.machines)?);
                if rounds < best {
                    best = rounds;
                } else {
                    self.stores[at] = before;
                }
            }
        }
        Ok(())
    }
}

/// Speed of memcpy, all ranks at once, from private memory to where rows land, as much as the cache
/// does not hold: 10^9 bytes per second.
pub fn memcpy_gbps<E: Real>(layer: &Layer<'_, E>, barrier: &mut Window) -> Result<f64, Error> {
    const MOST: u64 = 32 << 20;
    const ROUNDS: usize = 7;
    let Layer { world, group, .. } = layer;
    let bytes = world.pool().report().largest_free.min(MOST);
    let mut extent = world.pool().alloc(bytes)?;
    let to = extent.slice_mut::<u8>(0, bytes as usize)?;
    let from = vec![1u8; to.len()];
    let mut laps = Laps::default();
    for _ in 0..ROUNDS {
        barrier.barrier()?;
        laps.time(|| std::hint::black_box(&mut *to).copy_from_slice(std::hint::black_box(&from)));
    }
    let [total] = layer.sum([bytes])?;
    Ok(total as f64 / median(&mut laps.rounds(group, &layer.machines)?) / 1e3)
}

/// Room for the calls of a round next to a dispatch that stays alive, for the busiest rank.
pub fn sizes(config: &RunSettings) -> Result<Sizes, CliError> {
    let router = Router::open(&config.routing)?;
    let Reference { case, seen, .. } = config.reference::<f32>(&router)?;
    let busiest = seen.rows.iter().map(|rows| rows.len() as u64).max().unwrap_or(0);
    let (nodes, tokens) = (config.node_map(), u64::from(config.tokens));
    let paths = Paths::new(&nodes, config.shape.route, 0);
    let relayed = |rank| paths.of(rank).sources().count() as u64;
    let relays = if config.shape.route == Route::Pxn { 0..config.ranks() } else { 0..0 };
    let relayed = relays.map(relayed).max().unwrap_or(0);
    let own = tokens * u64::from(config.top_k);
    let metadata = RowMetadata::of(config.shape.layout, config.receive.mode(), config.shape.coalesce_relays);
    let metadata_bytes = u64::from(metadata.words(config.top_k)) * size_of::<u32>() as u64;
    // Rows of a chunk have words behind them; other rows have none. Alive together at most: rows
    // and output of the first dispatch, rows and output of the round, the tokens, own returned rows
    // and, of each relayed rank, the rows that wait to be relayed or the sums that wait to be
    // returned.
    let partial = u64::from(config.shape.hidden) * config.shape.partial_dtype.size() as u64;
    let row = config.row_bytes().max(config.sent_bytes()).max(partial) + metadata_bytes;
    // An all-gather has a control window of its own, and all tokens lie next to the rows.
    let (ranks, gathers) = (u64::from(config.ranks()), config.shape.strategy == Strategy::AllGather);
    let words = u64::from(RowMetadata::Gathered.words(config.top_k));
    let (gathered, gathering) = match gathers {
        true => (
            (ranks * tokens).saturating_mul(row + 4 * words),
            ControlLayout::new(&paths, &gather_bins(config)?, ranks * tokens, 4 * words).bytes(),
        ),
        false => (0, 0),
    };
    // More than there is, where it does not fit in a word: the launcher refuses it.
    let rows = 5 * busiest + 3 * own + tokens + relayed * (tokens + own);
    let pool = rows.saturating_mul(row).saturating_add(gathered).saturating_add(16 << 20);
    let bins = Bins::of_layout(config.shape.layout, &case.map, config.shape.sum_order, &nodes);
    let symmetric = ControlLayout::new(&paths, &bins, own, metadata_bytes).bytes() + gathering + (4 << 20);
    let heap = pool.saturating_add(symmetric).checked_next_multiple_of(2 << 20).unwrap_or(u64::MAX);
    Ok(Sizes { heap, symmetric })
}

/// The bins of an all-gather: a rank is one.
fn gather_bins(config: &RunSettings) -> Result<Bins, CliError> {
    let map = ExpertMap::contiguous(config.ranks(), config.ranks())?;
    Ok(Bins::experts(&map, SumOrder::Expert, &config.node_map()))
}

/// Counted by the lane, and forecast from its calls; a node's ranks together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nics {
    pub measured: Vec<NicCounters>,
    pub predicted: Vec<NicCounters>,
    /// Whether requests, packets and bytes match the prediction. A full queue rings more doorbells.
    pub exact: bool,
}

impl Nics {
    /// Of all ranks; none where the net has no NICs. Collective: all sent bytes have landed.
    pub fn of<E: Real>(layer: &Layer<'_, E>) -> Result<Option<Self>, CliError> {
        let world = &layer.world;
        let count = world.nodes().nodes() as usize;
        let [mut done, mut forecast] =
            [vec![NicCounters::default(); count], vec![NicCounters::default(); count]];
        let own = [world.nic_counters(), world.nic_forecast()];
        for ([of_rank, told], rank) in ranks::tell_all(&layer.group, &own)?.into_iter().zip(0..) {
            let node = world.nodes().node_of(rank) as usize;
            done[node] = [done[node], of_rank].into_iter().sum();
            forecast[node] = [forecast[node], told].into_iter().sum();
        }
        let same = |(done, told): (&NicCounters, &NicCounters)| {
            let exact = |c: &NicCounters| (c.requests, c.packets, c.bytes, c.copied);
            exact(done) == exact(told) && done.doorbells == done.completions
        };
        let exact = done.iter().zip(&forecast).all(same);
        let any = done.iter().any(|done| done.requests > 0);
        Ok(any.then_some(Nics { measured: done, predicted: forecast, exact }))
    }

    pub fn text(&self) -> String {
        let sum: NicCounters = self.measured.iter().copied().sum();
        let verdict = if self.exact { "as predicted" } else { "NOT AS PREDICTED" };
        let NicCounters { requests, doorbells, packets, .. } = sum;
        format!("{requests} work requests, {doorbells} doorbells, {packets} packets, {verdict}")
    }
}
