//! Work of every rank: check, time, check again; rank 0 reports.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use half::bf16;
use sidelane::config::EmulatedLink;
use sidelane::gate::{Gate, Preset};
use sidelane::layer::{ExpertError, Experts, GradientOrder, GroupedSwiGlu, Input, MoeLayer, Saved, Segments};
use sidelane::plan::ExpertMap;
use sidelane::{Error, Group, World};
use sidelane_testkit::machines::Machines;
use sidelane_testkit::timing::stats::Laps;
use sidelane_testkit::values::Random;

use super::report::{self, Pass, Report};
use super::{LayerArgs, Shape, Task};
use crate::command_frame::{self, Command as _};
use crate::commands::bench::{EVENTS, write_trace};
use crate::error::CliError;
use crate::ranks::{self, Assignment};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Experts do nothing, and it takes what transfers take.
    Transfers,
    InTurn,
    Overlapped,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Transfers, Kind::InTurn, Kind::Overlapped];
}

/// Time of one direction of a step at this rank.
#[derive(Default)]
struct StepTime {
    laps: [Laps; 3],
    /// Nanoseconds of experts at work, in turn.
    experts: Vec<u64>,
}

pub fn main(Assignment { task, files }: &Assignment<Task>) -> Result<ExitCode, CliError> {
    let record = if task.records { EVENTS } else { 0 };
    let world = ranks::join(LayerArgs::NAME, task, task.shape.sizes(), record)?;
    let group = world.all()?;
    let mut rank = Rank::new(task, &world, &group)?;
    let verified = rank.same_bits()?;
    let taken = rank.time()?;
    let passes = taken.iter().map(|taken| rank.pass(taken)).collect::<Result<Vec<_>, _>>()?;
    let timelines = if task.records { rank.record()? } else { Vec::new() };
    let verified = verified && rank.same_bits()?;
    if world.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    // The emulated link may also come from the environment.
    let link = EmulatedLink::from_env().map_err(Error::from)?;
    let report = Report::new(task, (&world, &rank.machines), link, verified, &passes);
    if let Some(path) = &files.trace {
        write_trace(path, world.nodes(), &timelines)?;
    }
    command_frame::draw(&files.svg, || report::draw(&task.shape, &timelines))?;
    command_frame::finish(&report, &files.json)
}

/// A rank's two layers, which differ in how they are carried out, and its tokens.
struct Rank<'a> {
    task: &'a Task,
    world: &'a World,
    group: &'a Group,
    machines: Machines,
    in_turn: MoeLayer,
    overlapped: MoeLayer,
    watch: Arc<ExpertClock>,
    x: Vec<bf16>,
}

impl<'a> Rank<'a> {
    fn new(task: &'a Task, world: &'a World, group: &'a Group) -> Result<Self, CliError> {
        let Shape { tokens, hidden, .. } = task.shape;
        let watch = Arc::new(ExpertClock::default());
        let layer = |overlap| layer(task, group, &watch, overlap);
        let (in_turn, overlapped) = (layer(false)?, layer(true)?);
        let mut random = Random(task.shape.seed ^ (1 + u64::from(world.rank())) << 32);
        let x = (0..tokens as usize * hidden as usize).map(|_| bf16::from_f32(random.unit())).collect();
        let machines = Machines::of(group)?;
        Ok(Rank { task, world, group, machines, in_turn, overlapped, watch, x })
    }

    fn same_bits(&mut self) -> Result<bool, CliError> {
        let step = |layer: &mut MoeLayer, x: &[bf16]| {
            let (out, tape) = layer.forward(&Input::new(x))?;
            let gradients = layer.backward(tape, x)?;
            Ok::<_, Error>((out, gradients))
        };
        let same = step(&mut self.in_turn, &self.x)? == step(&mut self.overlapped, &self.x)?;
        Ok(ranks::all_say(self.group, same)?)
    }

    /// Forward and, where asked for, backward. Kinds take turns, so that all see the same machine.
    fn time(&mut self) -> Result<Vec<StepTime>, CliError> {
        let mut barrier = self.group.window(0)?;
        let directions = if self.task.backward { 2 } else { 1 };
        let mut taken: Vec<StepTime> = (0..directions).map(|_| StepTime::default()).collect();
        let bar = command_frame::progress(self.world.rank(), self.task.rounds.into());
        for round in 0..self.task.rounds as usize {
            for turn in 0..Kind::ALL.len() {
                let kind = Kind::ALL[(round + turn) % Kind::ALL.len()];
                let layer = match kind {
                    Kind::Overlapped => &mut self.overlapped,
                    Kind::Transfers | Kind::InTurn => &mut self.in_turn,
                };
                self.watch.idle(kind == Kind::Transfers);
                self.watch.take();
                barrier.barrier()?;
                let laps = &mut taken[0].laps[kind as usize];
                let (_, tape) = laps.time(|| layer.forward(&Input::new(&self.x)))?;
                if kind == Kind::InTurn {
                    taken[0].experts.push(self.watch.take());
                }
                if let Some(backward) = taken.get_mut(1) {
                    barrier.barrier()?;
                    backward.laps[kind as usize].time(|| layer.backward(tape, &self.x))?;
                    if kind == Kind::InTurn {
                        backward.experts.push(self.watch.take());
                    }
                }
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        self.watch.idle(false);
        barrier.barrier()?;
        Ok(taken)
    }

    /// Of all ranks, in microseconds: the slowest counts.
    fn pass(&self, taken: &StepTime) -> Result<Pass, CliError> {
        let rounds = |laps: &Laps| Ok::<_, CliError>(laps.rounds(self.group, &self.machines)?);
        let [transfers, in_turn, overlapped] = &taken.laps;
        let (transfers, in_turn, overlapped) = (rounds(transfers)?, rounds(in_turn)?, rounds(overlapped)?);
        let all = self.group.gather(bytemuck::cast_slice(&taken.experts))?;
        let mut experts = vec![0.0f64; taken.experts.len()];
        for blob in &all {
            let theirs: Vec<u64> = bytemuck::allocation::pod_collect_to_vec(blob);
            experts.iter_mut().zip(theirs).for_each(|(most, ns)| *most = most.max(ns as f64 / 1e3));
        }
        Ok(Pass::of_rounds(&experts, &transfers, &in_turn, &overlapped))
    }

    fn record(&mut self) -> Result<Vec<sidelane::exec::Timeline>, CliError> {
        let mut barrier = self.group.window(0)?;
        let Some(recorder) = self.world.recorder().cloned() else { return Ok(Vec::new()) };
        let offset = self.machines.clock_offset(self.group, sidelane::exec::now)?;
        barrier.barrier()?;
        recorder.take();
        let (_, tape) = self.overlapped.forward(&Input::new(&self.x))?;
        if self.task.backward {
            self.overlapped.backward(tape, &self.x)?;
        }
        crate::commands::bench::share(self.group, recorder.take(), offset)
    }
}

fn layer(task: &Task, group: &Group, watch: &Arc<ExpertClock>, overlap: bool) -> Result<MoeLayer, CliError> {
    let Shape { tokens, hidden, ffn, experts, top_k, token_chunks, seed, .. } = task.shape;
    let map = ExpertMap::contiguous(experts, group.size()).map_err(Error::from)?;
    let (hidden, ffn, local) = (hidden as usize, ffn as usize, map.slots_of(group.rank()).len());
    let mut random = Random(seed);
    let router = (0..hidden * experts as usize).map(|_| random.unit()).collect();
    let scale = 1.0 / (hidden as f32).sqrt();
    let weights = (0..GroupedSwiGlu::values(local, hidden, ffn)).map(|_| scale * random.unit()).collect();
    let swiglu = GroupedSwiGlu::new(local, hidden, ffn, weights).map_err(Error::from)?;
    let gate = Preset::Qwen3.config(experts, top_k).and_then(Gate::new).map_err(Error::from)?;
    let watched = ClockedExperts { inner: swiglu, watch: Arc::clone(watch) };
    let builder = MoeLayer::builder(group, gate.config().clone(), hidden, watched).router(router);
    Ok(builder
        .max_tokens(tokens)
        .chunks(token_chunks)
        .transfers(task.shape.transfers())
        .overlap(overlap)
        .build()?)
}

/// Switch and clock of a step's experts.
#[derive(Debug, Default)]
pub struct ExpertClock {
    idle: AtomicBool,
    ns: AtomicU64,
}

impl ExpertClock {
    /// From now on experts give zeros at once, or work.
    fn idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }

    /// Nanoseconds at work since this was asked last.
    pub fn take(&self) -> u64 {
        self.ns.swap(0, Ordering::Relaxed)
    }

    fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        self.ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }
}

struct ClockedExperts {
    inner: GroupedSwiGlu,
    watch: Arc<ExpertClock>,
}

impl ClockedExperts {
    fn is_idle(&self) -> bool {
        self.watch.idle.load(Ordering::Relaxed)
    }
}

impl Experts for ClockedExperts {
    fn count(&self) -> usize {
        self.inner.count()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError> {
        if self.is_idle() {
            return Ok((vec![0.0; rows.rows.len()], Box::new(())));
        }
        self.watch.time(|| self.inner.forward(rows))
    }

    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, ExpertError> {
        if self.is_idle() {
            return Ok(of_outputs);
        }
        self.watch.time(|| self.inner.rows_backward(rows, saved, of_outputs))
    }

    fn weights_backward(
        &self,
        chunks: &[(Segments<'_>, &Saved)],
        order: &GradientOrder,
    ) -> Result<Vec<f32>, ExpertError> {
        if self.is_idle() {
            return Ok(vec![0.0; self.weights().len()]);
        }
        self.watch.time(|| self.inner.weights_backward(chunks, order))
    }

    fn weights(&self) -> &[f32] {
        self.inner.weights()
    }

    fn weights_mut(&mut self) -> &mut [f32] {
        self.inner.weights_mut()
    }
}
