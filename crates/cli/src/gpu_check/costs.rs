//! Costs: what the pieces take, one at a time, then a layer of slots.

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use sidelane::device::{Context, CopyBatch, DeviceRange, Driver, MemOpBatch, PinnedMemory, Stream, Version};
use sidelane::error::DeviceError;
use sidelane::{Group, World};
use sidelane_verify::reference;

use super::Task;
use super::bench::{Samples, Timer};
use super::exchange::{memory, on_nodes, timed};
use super::report::{About, Checks};
use crate::conformance::{Case, Device, Player, Way, experts_copy};
use crate::device::{allocate, stream, whole};
use crate::error::CliError;
use crate::ranks;
use crate::stats::summary;

/// Bytes of copies: a slot of a small batch; sizes around which a copy costs more than its price;
/// little more than nothing.
const SIZES: [(u64, &str); 4] =
    [(921_600, "0.9 MB"), (28 << 10, "28 KiB"), (16 << 10, "16 KiB"), (4 << 10, "4 KiB")];
/// Copies, or operations, that are handed over at once.
const COUNTS: [usize; 4] = [1, 8, 64, 255];
/// Where copies of a batch go, in turn.
const PLACES: u64 = 8;
const TARGETS: usize = 7;
const NVLINK: Option<&str> = Some("the same to other GPUs, over NVLink");

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let mut bench = Bench {
        task,
        context: &context,
        timer: Timer::new(&context, task.patience())?,
        streams: (0..=TARGETS).map(|_| stream(&context)).collect::<Result<_, _>>()?,
    };
    bench.copies(checks)?;
    bench.targets(checks)?;
    bench.operations(checks)?;
    bench.turns(checks)?;
    layer(task, checks)
}

struct Bench<'a> {
    task: &'a Task,
    context: &'a Arc<Context>,
    timer: Timer,
    streams: Vec<Stream>,
}

impl Bench<'_> {
    fn tell(
        &self,
        checks: &mut Checks,
        (what, shows): (&str, &str),
        open: Option<&str>,
        samples: &Samples,
        bytes: Option<u64>,
    ) -> Result<(), CliError> {
        let host = summary(&samples.host).p50_us;
        let rate = bytes.map(|bytes| bytes as f64 / summary(&samples.device).p50_us.max(1e-6) / 1e3);
        let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} GB/s"));
        let found = format!("the host takes {host:.2} us to enqueue it{rate}");
        checks.measured(About::new(what, shows).open(open), &samples.device, found)
    }

    fn stream_takes_batches(&self) -> bool {
        self.streams[0].takes_batches()
    }

    /// The same, told where there are none.
    fn has_batches(&self, checks: &mut Checks) -> Result<bool, CliError> {
        let about = About::new("copies in batches", "nothing");
        let version = self.context.driver().version();
        checks.has(about, version, ("a batch of copies", Version::BATCHED_COPIES))
    }

    /// Copies to the host and within the GPU, singly and in batches.
    fn copies(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        let context = self.context;
        let batches = self.has_batches(checks)?;
        for (bytes, size) in SIZES {
            let (from, room) = (allocate(context, bytes)?, bytes * PLACES);
            let (host, same) = (PinnedMemory::new(context, room as usize)?, allocate(context, room)?);
            for (to, place) in [(host.range(), "to the host"), (&same, "on the GPU")] {
                let stream = &self.streams[0];
                for count in COUNTS {
                    let rounds = (self.task.few(50, 5), count);
                    if count == 1 {
                        let samples = self
                            .timer
                            .time(stream, rounds, || stream.copy(to.span(0, bytes)?, whole(&from)?))?;
                        let what = format!("one copy of {size} {place}");
                        let shows = if place == "on the GPU" {
                            "a plain copy on one GPU: SMs do it"
                        } else {
                            "a copy by an engine, with what it takes to begin and to end"
                        };
                        self.tell(checks, (&what, shows), NVLINK, &samples, Some(bytes))?;
                    } else if batches {
                        let mut batch = CopyBatch::with_capacity(context, count);
                        for nth in 0..count as u64 {
                            batch.push(to.span(nth % PLACES * bytes, bytes)?, whole(&from)?)?;
                        }
                        let samples = self.timer.time(stream, rounds, || stream.copy_batch(&mut batch))?;
                        let what = format!("a copy of {size} {place}, in a batch of {count}");
                        let by_sms =
                            place == "on the GPU" && context.driver().version() < Version::OVERLAP_HINT;
                        let shows = if by_sms {
                            "the share of one copy; SMs make it: the overlap hint counts from CUDA 13.1 on"
                        } else {
                            "the share of one copy: what a batch saves; they go to eight places in turn"
                        };
                        self.tell(checks, (&what, shows), NVLINK, &samples, Some(bytes))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// As many targets as a rank of eight has peers.
    fn targets(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        if !self.stream_takes_batches() {
            return Ok(());
        }
        let (bytes, size) = SIZES[0];
        let from = allocate(self.context, bytes)?;
        let hosts = (0..TARGETS)
            .map(|_| PinnedMemory::new(self.context, bytes as usize))
            .collect::<Result<Vec<_>, _>>()?;
        let same = (0..TARGETS).map(|_| allocate(self.context, bytes)).collect::<Result<Vec<_>, _>>()?;
        let hosts: Vec<DeviceRange> = hosts.iter().map(|host| host.range().clone()).collect();
        for (targets, place) in [(&hosts, "of the host"), (&same, "on the GPU")] {
            let mut batch = CopyBatch::with_capacity(self.context, TARGETS);
            for to in targets {
                batch.push(whole(to)?, whole(&from)?)?;
            }
            let stream = &self.streams[0];
            let samples =
                self.timer.time(stream, (self.task.few(50, 5), 1), || stream.copy_batch(&mut batch))?;
            let what = format!("{TARGETS} targets {place}, {size} each, at once");
            let shows = "all of them, in one batch: whether engines share the work";
            self.tell(checks, (&what, shows), NVLINK, &samples, Some(bytes * TARGETS as u64))?;
        }
        Ok(())
    }

    fn operations(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        let words = PinnedMemory::new(self.context, 8)?;
        let there = allocate(self.context, 8)?;
        for (place, range) in [("of the host", words.range()), ("of the GPU", &there)] {
            for count in COUNTS {
                let mut list = MemOpBatch::with_capacity(self.context, count);
                for value in 0..count as u32 {
                    list.write(range.word::<u32>(0)?, value)?;
                }
                let stream = &self.streams[0];
                let rounds = (self.task.few(50, 5), count);
                let samples = self.timer.time(stream, rounds, || {
                    if count == 1 {
                        stream.write::<u32>(range.word(0)?, 1)
                    } else {
                        stream.operate(&mut list)
                    }
                })?;
                let what = match count {
                    1 => format!("one write of a word {place}"),
                    _ => format!("a write of a word {place}, in a list of {count}"),
                };
                let shows = "what a signal takes, with its fence";
                self.tell(checks, (&what, shows), NVLINK, &samples, None)?;
            }
        }
        Ok(())
    }

    /// Two streams that wait for each other: a write, and the wait that sees it.
    fn turns(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        const TURNS: u32 = 60;
        let words = PinnedMemory::new(self.context, 256)?;
        let there = allocate(self.context, 256)?;
        for (place, range) in [("of the host", words.range()), ("of the GPU", &there)] {
            let mut lists = [self.list(TURNS)?, self.list(TURNS)?];
            for turn in 1..=TURNS {
                let [ping, pong] = [range.word::<u32>(0)?, range.word::<u32>(128)?];
                lists[0].write(ping, turn)?;
                lists[0].wait(pong, turn)?;
                lists[1].wait(ping, turn)?;
                lists[1].write(pong, turn)?;
            }
            let (first, second) = (&self.streams[0], &self.streams[1]);
            for offset in [0, 128] {
                first.write::<u32>(range.word(offset)?, 0)?;
            }
            first.synchronize()?;
            let [ping, pong] = &mut lists;
            // Back to the beginning, by the one that waits last.
            ping.write(range.word::<u32>(0)?, 0)?;
            ping.write(range.word::<u32>(128)?, 0)?;
            let rounds = (self.task.few(50, 5), TURNS as usize * 2);
            let samples = self.timer.time(first, rounds, || {
                first.operate(ping)?;
                second.operate(pong)
            })?;
            let what = format!("a signal from stream to stream by a word {place}");
            let shows = "half a round trip: a write, and the wait that sees it";
            self.tell(checks, (&what, shows), NVLINK, &samples, None)?;
        }
        Ok(())
    }

    fn list(&self, turns: u32) -> Result<MemOpBatch, DeviceError> {
        Ok(MemOpBatch::with_capacity(self.context, turns as usize * 2 + 2))
    }
}

/// A layer of eight ranks as threads: each round begins when all are there, and takes as long as
/// the slowest.
fn layer(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    const RANKS: usize = 8;
    let case = timed(task);
    let [dispatch, combine, graph] = on_nodes(task, &[0; RANKS], |world| rounds(task, case, world))?;
    let size = format!("{RANKS} ranks x {} tokens x {} bf16", case.tokens[0], case.hidden);
    let shows = "eight ranks on one GPU: the bandwidth of its memory, not NVLink's; kernels and a host's wait are in it";
    for (what, samples) in [
        (format!("dispatch, {size}"), dispatch),
        (format!("combine, {size}"), combine),
        (format!("graph of a layer, {size}"), graph),
    ] {
        checks.measured(About::new(&what, shows).open(NVLINK), &samples, "")?;
    }
    Ok(())
}

/// Microseconds of dispatch, of combine, and of a launch of a graph with both.
fn rounds(task: &Task, case: Case, world: &World) -> Result<[Vec<f64>; 3], CliError> {
    let (group, count) = (world.all()?, task.few(50, 4));
    let settings = case.settings(Way::Slots, &vec![0; group.size() as usize])?;
    let device = Device::new(Some(task.device), world.rank(), memory(&settings))?;
    let mut player = Player::<bf16>::build(&settings, &group, Some(&device), (0, 0))?;
    let seed = u64::from(world.rank());
    let tokens = reference::tokens(seed, settings.max_tokens, settings.case.hidden, case.top_k, case.experts);
    let mut layer = player.layer(&tokens)?;
    let (ep, stream) = (&mut player.ep, &device.stream);
    let mut found: [Vec<f64>; 3] = Default::default();
    // The first round warms up.
    for _ in 0..=count {
        let mut dispatched = None;
        found[0].push(slowest(&group, || {
            dispatched = Some(layer.start(ep)?.finish()?);
            Ok(ep.synchronize()?)
        })?);
        let Some((rows, handle)) = dispatched else { continue };
        let y = experts_copy(stream, &rows, &handle)?;
        ep.synchronize()?;
        found[1].push(slowest(&group, || {
            layer.combine(ep, y, &handle)?;
            Ok(ep.synchronize()?)
        })?);
    }
    let graph = layer.capture(ep, stream)?.0;
    for _ in 0..=count {
        found[2].push(slowest(&group, || {
            graph.launch(stream)?;
            Ok(ep.synchronize()?)
        })?);
    }
    // Memory is given back when no rank waits for this one.
    group.gather(&[])?;
    Ok(found.map(|samples| samples[1..].to_vec()))
}

/// Microseconds of the slowest rank, from when all were there.
fn slowest(group: &Group, work: impl FnOnce() -> Result<(), CliError>) -> Result<f64, CliError> {
    group.gather(&[])?;
    let start = Instant::now();
    work()?;
    let all = ranks::tell_all(group, &(start.elapsed().as_secs_f64() * 1e6))?;
    Ok(all.into_iter().fold(0.0, f64::max))
}
