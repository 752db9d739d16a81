//! The clock of the device, and a small transfer.
//!
//! To be timed, work is enqueued behind a wait for the host, which lets it go when all of it is
//! there: what is timed is the device, not how fast the host enqueues. How fast that was is timed
//! beside it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::device::{CopyBatch, DeviceRange, Event, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use super::gpu::Gpu;
use super::whole;
use crate::TestError;

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
    /// Between marks on the stream.
    pub device: Vec<f64>,
    /// Of the call that enqueued.
    pub host: Vec<f64>,
}

impl Timer {
    /// On this GPU.
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
    ) -> Result<Samples, TestError> {
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
    /// Its bytes, in figures and in words.
    pub const SIZE: (u64, &'static str) = (16 << 10, "16 KiB");

    /// In a batch, if the stream takes any.
    pub fn new(gpu: &Gpu, stream: &Stream) -> Result<Self, DeviceError> {
        let (bytes, _) = Self::SIZE;
        let (from, to, word) = (gpu.memory(bytes)?, gpu.pinned(bytes)?, gpu.pinned(8)?);
        let mut batch = CopyBatch::with_capacity(&gpu.context, 1);
        batch.push(whole(to.range())?, whole(&from)?)?;
        let batch = stream.takes_batches().then_some(batch);
        Ok(Transfer { from, to, word, batch, sent: 0 })
    }

    /// Makes it once. Returns the time from its call until the host sees its word.
    pub fn send(&mut self, gpu: &Gpu, stream: &Stream) -> Result<Duration, TestError> {
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
