//! Costs: what the pieces take, one at a time, then a layer of slots.

use sidelane::device::{CopyBatch, MemOpBatch, Stream, Version};
use sidelane::error::DeviceError;
use sidelane_testkit::conformance::large_layers::{rounds, timed};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::timer::Timer;
use sidelane_testkit::device::whole;
use sidelane_testkit::timing::stats::summary;

use super::Task;
use super::expert_parallel::on_nodes;
use super::report::{About, Checks};
use crate::error::CliError;

/// Bytes of copies: a slot of a small batch; sizes around which a copy costs more than its price;
/// little more than nothing.
pub const SIZES: [(u64, &str); 4] =
    [(921_600, "0.9 MB"), (28 << 10, "28 KiB"), (16 << 10, "16 KiB"), (4 << 10, "4 KiB")];
/// Copies, or operations, that are handed over at once.
pub const MANY: [usize; 3] = [8, 64, 255];
/// Where copies of a batch go, in turn.
const PLACES: u64 = 8;
const TARGETS: usize = 7;
pub const TO_HOST: &str = "to the host";
pub const ON_GPU: &str = "on the GPU";
pub const OF_HOST: &str = "of the host";
const OF_GPU: &str = "of the GPU";
const NVLINK: Option<&str> = Some("the same to other GPUs, over NVLink");

/// Question of a row: a copy alone.
pub fn one_copy(size: &str, place: &str) -> String {
    format!("one copy of {size} {place}")
}

/// A copy among so many.
pub fn copy_of_batch(size: &str, place: &str, count: usize) -> String {
    format!("a copy of {size} {place}, in a batch of {count}")
}

/// A word alone.
pub fn one_word(place: &str) -> String {
    format!("one write of a word {place}")
}

/// A word among so many.
pub fn word_of_list(place: &str, count: usize) -> String {
    format!("a write of a word {place}, in a list of {count}")
}

/// A word that one stream writes and another awaits.
pub fn stream_signal(place: &str) -> String {
    format!("a signal from stream to stream by a word {place}")
}

/// The host's part of one of those.
pub fn enqueued(what: &str) -> String {
    format!("the host enqueues {what}")
}

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = task.gpu()?;
    let mut bench =
        Bench { timer: Timer::new(&gpu)?, streams: gpu.streams(2)?, gpu: &gpu, checks: &mut *checks };
    bench.copies()?;
    bench.targets()?;
    bench.operations()?;
    bench.turns()?;
    layer(task, checks)
}

struct Bench<'a> {
    gpu: &'a Gpu,
    timer: Timer,
    streams: Vec<Stream>,
    checks: &'a mut Checks,
}

impl Bench<'_> {
    /// Times what is enqueued on the first stream, of which there are so many, and tells the share
    /// of one, which moves so many bytes. Of the longest lists the host's part is a row, too.
    fn measure(
        &mut self,
        (what, shows): (&str, &str),
        (count, bytes): (usize, Option<u64>),
        mut enqueue: impl FnMut(&[Stream]) -> Result<(), DeviceError>,
    ) -> Result<(), CliError> {
        let rounds = (self.gpu.few(50, 5), count);
        let samples = self.timer.time(self.gpu, &self.streams[0], rounds, || enqueue(&self.streams))?;
        let host = summary(&samples.host).p50_us;
        let rate = bytes.map(|bytes| bytes as f64 / summary(&samples.device).p50_us.max(1e-6) / 1e3);
        let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} GB/s"));
        let found = format!("the host takes {host:.2} us to enqueue it{rate}");
        self.checks.measured(About::new(what, shows).open(NVLINK), &samples.device, found)?;
        if count == MANY[2] {
            let shows = "the share of one: how fast a thread gives work to engines";
            self.checks.measured(About::new(&enqueued(what), shows), &samples.host, "")?;
        }
        Ok(())
    }

    fn copies(&mut self) -> Result<(), CliError> {
        let (gpu, version) = (self.gpu, self.gpu.version());
        let needs = ("a batch of copies", Version::BATCHED_COPIES);
        let batches = self.checks.has(About::new("copies in batches", "nothing"), version, needs)?;
        for (bytes, size) in SIZES {
            let (from, room) = (gpu.memory(bytes)?, bytes * PLACES);
            let (host, same) = (gpu.pinned(room)?, gpu.memory(room)?);
            for (to, place) in [(host.range(), TO_HOST), (&same, ON_GPU)] {
                let shows = match place {
                    ON_GPU => "a plain copy on one GPU: SMs do it",
                    _ => "a copy by an engine, with what it takes to begin and to end",
                };
                let what = one_copy(size, place);
                self.measure((&what, shows), (1, Some(bytes)), |streams| {
                    streams[0].copy(to.span(0, bytes)?, whole(&from)?)
                })?;
                let shows = match place {
                    ON_GPU if version < Version::OVERLAP_HINT => {
                        "the share of one copy; SMs make it: the overlap hint counts from CUDA 13.1 on"
                    }
                    _ => "the share of one copy: what a batch saves; they go to eight places in turn",
                };
                for count in MANY.into_iter().filter(|_| batches) {
                    let mut batch = CopyBatch::with_capacity(&gpu.context, count);
                    for nth in 0..count as u64 {
                        batch.push(to.span(nth % PLACES * bytes, bytes)?, whole(&from)?)?;
                    }
                    let what = copy_of_batch(size, place, count);
                    self.measure((&what, shows), (count, Some(bytes)), |streams| {
                        streams[0].copy_batch(&mut batch)
                    })?;
                }
            }
        }
        Ok(())
    }

    fn targets(&mut self) -> Result<(), CliError> {
        if !self.streams[0].takes_batches() {
            return Ok(());
        }
        let (gpu, (bytes, size)) = (self.gpu, SIZES[0]);
        let from = gpu.memory(bytes)?;
        let pinned = (0..TARGETS).map(|_| gpu.pinned(bytes));
        let pinned = pinned.collect::<Result<Vec<_>, _>>()?;
        let same = (0..TARGETS).map(|_| gpu.memory(bytes)).collect::<Result<Vec<_>, _>>()?;
        let hosts = pinned.iter().map(|host| host.range().clone()).collect();
        for (targets, place) in [(hosts, OF_HOST), (same, ON_GPU)] {
            let mut batch = CopyBatch::with_capacity(&gpu.context, TARGETS);
            for to in &targets {
                batch.push(whole(to)?, whole(&from)?)?;
            }
            let what = format!("{TARGETS} targets {place}, {size} each, at once");
            let shows = "all of them, in one batch: whether engines share the work";
            self.measure((&what, shows), (1, Some(bytes * TARGETS as u64)), |streams| {
                streams[0].copy_batch(&mut batch)
            })?;
        }
        Ok(())
    }

    fn operations(&mut self) -> Result<(), CliError> {
        let shows = "what a signal takes, with its fence";
        let (words, there) = (self.gpu.pinned(8)?, self.gpu.memory(8)?);
        for (place, range) in [(OF_HOST, words.range()), (OF_GPU, &there)] {
            let what = one_word(place);
            self.measure((&what, shows), (1, None), |streams| streams[0].write::<u32>(range.word(0)?, 1))?;
            for count in MANY {
                let mut list = MemOpBatch::with_capacity(&self.gpu.context, count);
                for value in 0..count as u32 {
                    list.write(range.word::<u32>(0)?, value)?;
                }
                let what = word_of_list(place, count);
                self.measure((&what, shows), (count, None), |streams| streams[0].operate(&mut list))?;
            }
        }
        Ok(())
    }

    /// Two streams that wait for each other: a write, and the wait that sees it.
    fn turns(&mut self) -> Result<(), CliError> {
        const TURNS: u32 = 60;
        let (words, there) = (self.gpu.pinned(256)?, self.gpu.memory(256)?);
        for (place, range) in [(OF_HOST, words.range()), (OF_GPU, &there)] {
            let list = || MemOpBatch::with_capacity(&self.gpu.context, TURNS as usize * 2 + 2);
            let (mut ping, mut pong) = (list(), list());
            let [here, back] = [range.word::<u32>(0)?, range.word::<u32>(128)?];
            for turn in 1..=TURNS {
                ping.write(here, turn)?;
                ping.wait(back, turn)?;
                pong.wait(here, turn)?;
                pong.write(back, turn)?;
            }
            // Back to the beginning, by the one that waits last.
            ping.write(here, 0)?;
            ping.write(back, 0)?;
            let first = &self.streams[0];
            first.write::<u32>(here, 0)?;
            first.write::<u32>(back, 0)?;
            first.synchronize()?;
            let what = stream_signal(place);
            let shows = "half a round trip: a write, and the wait that sees it";
            self.measure((&what, shows), (TURNS as usize * 2, None), |streams| {
                streams[0].operate(&mut ping)?;
                streams[1].operate(&mut pong)
            })?;
        }
        Ok(())
    }
}

/// A layer of eight ranks as threads: each round begins when all are there, and ends with the
/// slowest.
fn layer(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    const RANKS: usize = 8;
    let (case, count) = (timed(task.quick), task.few(50, 4));
    let [dispatch, combine, graph] =
        on_nodes(task, &[0; RANKS], |world| Ok(rounds(case, world, task.device, count)?))?;
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
