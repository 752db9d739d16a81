//! One rank's layer: its place in the world, its tokens, and the check of all results, bit by bit.
//! Measurements and recordings run on it.
//!
//! A recorded round, as every rank's recorder sees it:
//!
//! ```text
//!   barrier | dispatch | experts | combine |     experts: their outputs are known, so they are only copied
//! ```
//!
//! Times of all ranks are on the clock of rank 0's machine.
//!
//! Rounds differ, most of all where ranks share cores. Several are recorded and the one of median
//! length is kept, so that a timeline shows a usual round.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::Serialize;
use sidelane::ep::{ExpertOutput, ExpertRows, Handle, Tensor, TokenBuffer};
use sidelane::exec::{Recorder, Timeline, now};
use sidelane::gate::Routing;
use sidelane::topology::NodeMap;
use sidelane::{Dtype, Error, ExpertParallel, Group, World};
use sidelane_testkit::expected::Expected;
use sidelane_testkit::machines::Machines;
use sidelane_testkit::timing::stats::Laps;
use sidelane_verify::reference::Real;

use super::Task;
use super::call_baselines::{self, LayerArrays};
use super::run_settings::{RunSettings, Shape};
use crate::baselines::{Field, Folder};
use crate::error::{CliError, failed};
use crate::ranks;
use crate::routing_source::Router;

pub struct Layer<'c, E> {
    pub config: &'c RunSettings,
    pub world: World,
    pub group: Group,
    pub machines: Machines,
    pub ep: ExpertParallel,
    pub routing: Routing<'static>,
    pub tokens: Tokens<E>,
    pub out: Vec<E>,
    pub expected: Expected<E>,
    /// Dispatches and combines that were checked; the first ones are the first of this world.
    pub dispatches: Laps,
    pub combines: Laps,
    /// Rows and sums that were compared and found equal.
    right: u64,
    compared: u64,
    /// Number of other findings that are wrong.
    wrong: u64,
}

/// The tokens of a rank, and its dispatched rows.
pub struct Tokens<E> {
    /// The dispatched rows: tokens, or records of fp8. NICs read them in place.
    buffer: TokenBuffer,
    tokens: Option<Vec<E>>,
}

impl<E: Real> Tokens<E> {
    fn new(ep: &ExpertParallel, x: Vec<E>, count: u32) -> Result<Self, Error> {
        let mut buffer = ep.token_buffer(count)?;
        if ep.record().is_none() {
            buffer.rows_mut::<E>()?.copy_from_slice(&x);
            return Ok(Tokens { buffer, tokens: None });
        }
        let mut records = Vec::new();
        ep.quantize(&x, &mut records)?;
        buffer.rows_mut::<u8>()?.copy_from_slice(&records);
        Ok(Tokens { buffer, tokens: Some(x) })
    }

    pub fn dispatch(
        &self,
        ep: &mut ExpertParallel,
        routing: &Routing<'_>,
    ) -> Result<(ExpertRows, Handle), Error> {
        let dtype = if self.tokens.is_some() { Dtype::Bytes } else { E::DTYPE };
        ep.dispatch(Tensor::Host { bytes: self.sent()?, dtype }, routing)
    }

    pub fn sent(&self) -> Result<&[u8], Error> {
        self.buffer.rows::<u8>()
    }

    pub fn x(&self) -> Result<&[E], Error> {
        self.tokens.as_deref().map_or_else(|| self.buffer.rows::<E>(), Ok)
    }

    /// Tokens that are dispatched as they are, to write to.
    pub fn x_mut(&mut self) -> Result<&mut [E], Error> {
        self.buffer.rows_mut::<E>()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub verified: bool,
    /// Rows and sums that are bitwise right.
    pub rows_verified: u64,
}

impl Verdict {
    pub fn text(self) -> String {
        match self {
            Verdict { verified: true, rows_verified } => format!("verified: {rows_verified} rows bit-exact"),
            Verdict { rows_verified, .. } => format!("NOT VERIFIED: only {rows_verified} rows are bit-exact"),
        }
    }
}

impl<'c, E: Real> Layer<'c, E> {
    pub fn join(command: &str, task: &'c Task) -> Result<Self, CliError> {
        let Task { config, sizes, records, .. } = task;
        let world = ranks::join(command, task, *sizes, if *records { EVENTS } else { 0 })?;
        let group = world.all()?;
        let machines = Machines::of(&group)?;
        let ep = config.settings()?.builder(&group).build()?;
        let router = Router::open(&config.routing)?;
        let routing = router.routing(config.share(), world.rank()).map_err(Error::from)?;
        let reference = config.reference(&router)?;
        let expected = Expected::new(reference, config.settings()?, world.rank(), config.seed);
        let x = expected.tokens();
        let out = vec![E::of(0.0); x.len()];
        let tokens = Tokens::new(&ep, x, config.tokens)?;
        Ok(Layer {
            config,
            world,
            group,
            machines,
            ep,
            routing,
            tokens,
            out,
            expected,
            dispatches: Laps::default(),
            combines: Laps::default(),
            right: 0,
            compared: 0,
            wrong: 0,
        })
    }

    pub fn dispatch_and_check(&mut self) -> Result<(ExpertRows, Handle), CliError> {
        self.world.pool().poison(0xff);
        self.group.gather(&[])?;
        let (rows, handle) = self.dispatches.time(|| self.tokens.dispatch(&mut self.ep, &self.routing))?;
        // Checks are long: a rank that is done sleeps here, so that it takes no core from the
        // others.
        self.group.gather(&[])?;
        self.expected.arrange(rows.index());
        self.check_rows(&rows, &handle)?;
        Ok((rows, handle))
    }

    pub fn check_rows(&mut self, rows: &ExpertRows, handle: &Handle) -> Result<(), CliError> {
        let seen = rows.rows::<u8>()?;
        self.right += self.expected.right_rows(seen, handle);
        self.compared += self.expected.row_count();
        self.wrong += u64::from(!self.expected.right_handle(handle));
        Ok(())
    }

    pub fn check_gradients(&mut self, rows: &ExpertRows) -> Result<(), CliError> {
        let seen = rows.rows::<E>()?;
        self.right += self.expected.right_gradients(seen);
        self.compared += self.expected.row_count();
        Ok(())
    }

    pub fn output(y: &[E], handle: &Handle) -> Result<ExpertOutput, Error> {
        let mut output = handle.output()?;
        output.rows_mut::<E>()?.copy_from_slice(y);
        Ok(output)
    }

    pub fn combine_and_check(&mut self, y: &[E], handle: &Handle) -> Result<(), CliError> {
        let output = Self::output(y, handle)?;
        self.group.gather(&[])?;
        self.combines.time(|| self.ep.combine_into(output, handle, &mut self.out))?;
        self.group.gather(&[])?;
        self.check_tokens();
        Ok(())
    }

    fn check_tokens(&mut self) {
        self.right += self.expected.right_tokens(&self.out);
        self.compared += u64::from(self.config.tokens);
    }

    /// Whether what this rank would send next is, bit by bit, this.
    pub fn check_returned(&mut self, returned: &[E]) -> Result<bool, CliError> {
        let hidden = self.config.shape.hidden as usize;
        let [seen, expected] = [self.tokens.x()?, returned]
            .map(|rows| bytemuck::cast_slice::<E, u8>(rows).chunks_exact(hidden * size_of::<E>()));
        let right = seen.zip(expected).filter(|(seen, expected)| seen == expected).count() as u64;
        self.right += right;
        self.compared += u64::from(self.config.tokens);
        Ok(right == u64::from(self.config.tokens))
    }

    pub fn backward_and_check(&mut self, y: &[E], handle: &Handle) -> Result<(), CliError> {
        let weights = self.expected.weight_gradients();
        let (tokens, weights) = self.ep.dispatch_backward::<E>(y, Some(&weights), handle)?;
        self.out.copy_from_slice(&tokens);
        self.check_tokens();
        self.wrong += u64::from(!weights.is_some_and(|weights| self.expected.right_weights(&weights)));
        self.gradients_and_check(handle).map(drop)
    }

    pub fn gradients_and_check(&mut self, handle: &Handle) -> Result<ExpertRows, CliError> {
        self.world.pool().poison(0xff);
        let (rows, _) = self.ep.combine_backward(self.tokens.x()?, handle)?;
        self.check_gradients(&rows)?;
        Ok(rows)
    }

    /// Starts the baselines on the same tokens, once these rows and sums are known to be right.
    /// Collective.
    pub fn challenge(&self, folder: &Folder, rows: &[u8], y: &[E]) -> Result<Field, CliError> {
        let RunSettings { tokens, top_k, experts, shape: Shape { hidden, .. }, .. } = *self.config;
        let seen = LayerArrays {
            shape: [self.config.ranks(), tokens, hidden, top_k, experts],
            ids: self.routing.experts(),
            x: self.tokens.sent()?,
            rows,
            y: bytemuck::cast_slice(y),
            out: bytemuck::cast_slice(&self.out),
        };
        call_baselines::open(&self.group, folder, &seen)
    }

    pub fn sum<const N: usize>(&self, words: [u64; N]) -> Result<[u64; N], Error> {
        let all = self.group.gather(bytemuck::cast_slice(&words))?;
        Ok(all.iter().fold([0; N], |sums, blob| {
            let words: Vec<u64> = bytemuck::allocation::pod_collect_to_vec(blob);
            std::array::from_fn(|i| sums[i] + words.get(i).copied().unwrap_or(0))
        }))
    }

    pub fn verdict(&self) -> Result<Verdict, Error> {
        let [rows_verified, compared, wrong] = self.sum([self.right, self.compared, self.wrong])?;
        Ok(Verdict { verified: rows_verified == compared && wrong == 0, rows_verified })
    }
}

/// Operations kept for a timeline: one round of calls at 1,024 ranks.
pub const EVENTS: usize = 1 << 16;

pub const CALLS: [&str; 3] = ["dispatch", "experts", "combine"];

/// Runs rounds with outputs `y` of the experts, checks the last, and sends every rank the timelines
/// of all in a usual one. Empty timelines if the layer has no recorder.
pub fn record<E: Real>(layer: &mut Layer<'_, E>, y: &[E]) -> Result<Vec<Timeline>, CliError> {
    const ROUNDS: usize = 15;
    let Some(recorder) = layer.world.recorder().cloned() else {
        return Ok(vec![Timeline::default(); layer.config.ranks() as usize]);
    };
    let mut barrier = layer.group.window(0)?;
    let offset = layer.machines.clock_offset(&layer.group, now)?;
    let (mut laps, mut timelines) = (Laps::default(), Vec::new());
    for number in 1..=ROUNDS {
        barrier.barrier()?;
        recorder.take();
        let (rows, handle) = laps.time(|| round(layer, y, &recorder))?;
        timelines.push(recorder.take());
        // Checks are long: a rank that is done sleeps here, so that it takes no core from the
        // others.
        barrier.barrier()?;
        if number == ROUNDS {
            layer.check_rows(&rows, &handle)?;
            layer.check_tokens();
        }
    }
    let lengths = laps.rounds(&layer.group, &layer.machines)?;
    let mut order: Vec<usize> = (0..ROUNDS).collect();
    order.sort_by(|&a, &b| lengths[a].total_cmp(&lengths[b]));
    share(&layer.group, timelines.swap_remove(order[ROUNDS / 2]), offset)
}

/// Recordings of all ranks, on the clock of rank 0's machine, which this one's is `offset` behind.
pub fn share(group: &Group, timeline: Timeline, offset: i64) -> Result<Vec<Timeline>, CliError> {
    ranks::tell_all(group, &moved(timeline, offset))
}

fn moved(mut timeline: Timeline, offset: i64) -> Timeline {
    let calls = timeline.calls.iter_mut().map(|call| &mut call.start_ns);
    let spans = timeline.spans.iter_mut().map(|span| &mut span.start_ns);
    let events = timeline.events.iter_mut().map(|event| &mut event.start_ns);
    for start in calls.chain(spans).chain(events) {
        *start = start.wrapping_add_signed(offset);
    }
    timeline
}

fn round<E: Real>(
    layer: &mut Layer<'_, E>,
    y: &[E],
    recorder: &Recorder,
) -> Result<(ExpertRows, Handle), Error> {
    let [dispatch, experts, combine] = CALLS;
    let (rows, handle) = recorder.call(dispatch, || layer.tokens.dispatch(&mut layer.ep, &layer.routing))?;
    let output = recorder.call(experts, || Layer::output(y, &handle))?;
    recorder.call(combine, || layer.ep.combine_into(output, &handle, &mut layer.out))?;
    Ok((rows, handle))
}

pub fn write_trace(path: &Path, nodes: &NodeMap, timelines: &[Timeline]) -> Result<(), CliError> {
    let write = || {
        let mut file = BufWriter::new(File::create(path)?);
        Timeline::write_chrome_trace(&mut file, nodes, timelines)?;
        file.flush()
    };
    write().map_err(|source| failed!("cannot write {path:?}: {source}"))
}
