//! Tools of all parts: the GPU and its memory, random bytes, comparisons, the clock of the device,
//! and NVIDIA's libraries in packages of Python.
//!
//! To be timed, work is enqueued behind a wait for the host, which lets it go when all of it is
//! there: what is timed is the device, not how fast the host enqueues. How fast that was is timed
//! beside it.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::NoUninit;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::device::{
    Context, CopyBatch, DeviceRange, Driver, Event, PinnedMemory, Stream, Version, wheels,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::{allocate, stream, until, whole};

use super::Task;
use crate::error::{CliError, wrong};

pub struct Gpu {
    pub task: Task,
    pub context: Arc<Context>,
}

impl Gpu {
    pub fn open(task: &Task) -> Result<Self, DeviceError> {
        Ok(Gpu { task: *task, context: Driver::open()?.context(task.device)? })
    }

    pub fn version(&self) -> Version {
        self.context.driver().version()
    }

    pub fn stream(&self) -> Result<Stream, DeviceError> {
        stream(&self.context)
    }

    /// So many, made one after the other: on hardware queues of their own.
    pub fn streams(&self, count: usize) -> Result<Vec<Stream>, DeviceError> {
        (0..count).map(|_| self.stream()).collect()
    }

    pub fn memory(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        allocate(&self.context, bytes)
    }

    pub fn pinned(&self, bytes: u64) -> Result<PinnedMemory, DeviceError> {
        PinnedMemory::new(&self.context, bytes as usize)
    }

    pub fn put(&self, stream: &Stream, content: &[impl NoUninit]) -> Result<DeviceRange, CliError> {
        let bytes = bytemuck::cast_slice(content);
        let range = self.memory(bytes.len() as u64)?;
        write(stream, &range, bytes)?;
        Ok(range)
    }

    /// So many numbers, each by its position.
    pub fn put_each(
        &self,
        stream: &Stream,
        count: u32,
        of: impl Fn(u32) -> i32,
    ) -> Result<DeviceRange, CliError> {
        self.put(stream, &(0..count).map(of).collect::<Vec<_>>())
    }

    /// Waits for something, but not for ever.
    pub fn until(&self, what: &str, done: impl FnMut() -> Result<bool, DeviceError>) -> Result<(), CliError> {
        Ok(until(what, self.task.patience(), done)?)
    }

    pub fn finish(&self, stream: &Stream, what: &str) -> Result<(), CliError> {
        self.until(what, || stream.is_done())
    }

    pub fn read(&self, stream: &Stream, from: &DeviceRange) -> Result<Vec<u8>, CliError> {
        let staging = self.pinned(from.len())?;
        stream.copy(whole(staging.range())?, whole(from)?)?;
        self.finish(stream, "a copy to the host")?;
        Ok(content(&staging)?)
    }
}

pub fn content(memory: &PinnedMemory) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

pub fn write(stream: &Stream, to: &DeviceRange, bytes: &[u8]) -> Result<(), DeviceError> {
    let staging = PinnedMemory::new(stream.context(), bytes.len())?;
    staging.write(0, bytes)?;
    stream.copy(to.span(0, bytes.len() as u64)?, whole(staging.range())?)?;
    stream.synchronize()
}

pub fn random(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

pub fn random_bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    random(seed).fill(&mut bytes[..]);
    bytes
}

/// So many elements of bf16 between -1 and 1, in bytes.
pub fn random_elements(seed: u64, count: u64) -> Vec<u8> {
    let mut random = random(seed);
    let mut value = || half::bf16::from_f32(random.random_range(-1.0..1.0));
    (0..count).flat_map(|_| value().to_ne_bytes()).collect()
}

pub fn same(what: impl Display, seen: &[u8], expected: &[impl NoUninit]) -> Result<(), CliError> {
    let expected: &[u8] = bytemuck::cast_slice(expected);
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    let Some(at) = seen.iter().zip(expected).position(|(seen, expected)| seen != expected) else {
        return Ok(());
    };
    let (len, seen, expected) = (seen.len(), seen[at], expected[at]);
    Err(wrong!("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}"))
}

pub fn equal(what: impl Display, seen: u64, expected: u64) -> Result<(), CliError> {
    if seen == expected { Ok(()) } else { Err(wrong!("{what} is {seen} and must be {expected}")) }
}

/// A gate and two marks.
pub struct Timer {
    start: Event,
    end: Event,
    gate: PinnedMemory,
    opened: u32,
}

/// Microseconds of one operation: on the device, and for the host that enqueued it.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub device: Vec<f64>,
    pub host: Vec<f64>,
}

impl Timer {
    pub fn new(gpu: &Gpu) -> Result<Self, DeviceError> {
        let event = || Event::timed(&gpu.context);
        Ok(Timer { start: event()?, end: event()?, gate: gpu.pinned(8)?, opened: 0 })
    }

    /// Times `count` operations, enqueued by one call, again and again. The first time is for
    /// warming up.
    pub fn time(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        (rounds, count): (usize, usize),
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<Samples, CliError> {
        let mut samples = Samples::default();
        for round in 0..=rounds {
            self.opened += 1;
            stream.wait::<u32>(self.gate.range().word(0)?, self.opened)?;
            self.start.record(stream)?;
            let before = Instant::now();
            let enqueued = enqueue();
            let host = before.elapsed();
            let marked = self.end.record(stream);
            // The gate opens after an error, too.
            self.gate.word(0)?.store(self.opened.into(), Ordering::Release);
            enqueued?;
            marked?;
            gpu.until("what is timed", || self.end.is_done())?;
            if round > 0 {
                samples.device.push(per(self.end.since(&self.start)?, count));
                samples.host.push(per(host, count));
            }
        }
        // Nothing of it is left: what it used is let go.
        gpu.until("what is timed", || stream.is_done())?;
        Ok(samples)
    }
}

/// A small transfer to the host: a copy in a batch, and a word behind it.
pub struct Transfer {
    from: DeviceRange,
    to: PinnedMemory,
    word: PinnedMemory,
    batch: Option<CopyBatch>,
    sent: u64,
}

impl Transfer {
    pub const SIZE: (u64, &'static str) = (16 << 10, "16 KiB");

    pub fn new(gpu: &Gpu, stream: &Stream) -> Result<Self, DeviceError> {
        let (bytes, _) = Self::SIZE;
        let (from, to, word) = (gpu.memory(bytes)?, gpu.pinned(bytes)?, gpu.pinned(8)?);
        let mut batch = CopyBatch::with_capacity(&gpu.context, 1);
        batch.push(whole(to.range())?, whole(&from)?)?;
        let batch = stream.takes_batches().then_some(batch);
        Ok(Transfer { from, to, word, batch, sent: 0 })
    }

    /// Makes it once. Returns the time from its call until the host sees its word.
    pub fn send(&mut self, gpu: &Gpu, stream: &Stream) -> Result<Duration, CliError> {
        self.sent += 1;
        let start = Instant::now();
        match &mut self.batch {
            Some(batch) => stream.copy_batch(batch)?,
            None => stream.copy(whole(self.to.range())?, whole(&self.from)?)?,
        }
        stream.write(self.word.range().word::<u64>(0)?, self.sent)?;
        let word = self.word.word(0)?;
        gpu.until("a word of the host", || Ok(word.load(Ordering::Acquire) == self.sent))?;
        let took = start.elapsed();
        // The stream releases its memory, and the next transfer finds an idle stream.
        gpu.finish(stream, "a transfer to the host")?;
        Ok(took)
    }
}

fn per(time: Duration, count: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count.max(1) as f64
}

/// Folders of packages, those that `python3` knows among them.
pub fn packages(driver: &Driver) -> Vec<PathBuf> {
    wheels::folders(driver.is_stand_in(), of_python)
}

/// Files of these names in the packages.
pub fn in_packages(driver: &Driver, names: &[&str]) -> Vec<PathBuf> {
    wheels::among(&packages(driver), names)
}

/// How a user names a library that was not found.
pub fn hint(variable: &str, wheel: &str) -> String {
    let packages = wheels::VARIABLE;
    format!("set {variable} to its path, or {packages} to the folder of Python packages with {wheel}")
}

fn of_python() -> Vec<PathBuf> {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print(*filter(None, sys.path), sep='\\n')"]);
    let Ok(said) = python.stdin(Stdio::null()).stderr(Stdio::null()).output() else { return Vec::new() };
    String::from_utf8_lossy(&said.stdout).lines().map(PathBuf::from).collect()
}
