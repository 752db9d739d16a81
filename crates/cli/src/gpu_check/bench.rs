//! Tools of all parts: random bytes, comparisons, content of memory, and the clock of the device.
//!
//! To be timed, work is enqueued behind a wait for the host, which lets it go when all of it is
//! there: what is timed is the device, not how fast the host enqueues. How fast that was is timed
//! beside it.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::device::{Context, DeviceRange, Event, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use crate::device::{finish, until, whole};
use crate::error::{CliError, wrong};

/// Content of pinned memory.
pub fn content(memory: &PinnedMemory) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes to memory of the device, and waits until it is there.
pub fn write(stream: &Stream, to: &DeviceRange, bytes: &[u8]) -> Result<(), DeviceError> {
    let staging = PinnedMemory::new(stream.context(), bytes.len())?;
    staging.write(0, bytes)?;
    stream.copy(to.span(0, bytes.len() as u64)?, whole(staging.range())?)?;
    stream.synchronize()
}

/// Reads memory of the device, once the stream has come so far.
pub fn read(stream: &Stream, from: &DeviceRange, patience: Duration) -> Result<Vec<u8>, CliError> {
    let staging = PinnedMemory::new(stream.context(), from.len() as usize)?;
    stream.copy(whole(staging.range())?, whole(from)?)?;
    finish(stream, "a copy to the host", patience)?;
    Ok(content(&staging)?)
}

/// Bytes that repeat with the seed alone.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes());
        words.take(len).collect()
    }

    /// Elements of bf16 between -1 and 1.
    pub fn elements(&mut self, count: usize) -> Vec<u8> {
        let value = |bits: u64| half::bf16::from_f32((bits % 2001) as f32 / 1000.0 - 1.0);
        (0..count).flat_map(|_| value(self.next()).to_ne_bytes()).collect()
    }
}

/// Compares bytes.
pub fn same(what: impl Display, seen: &[u8], expected: &[u8]) -> Result<(), CliError> {
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    let Some(at) = seen.iter().zip(expected).position(|(seen, expected)| seen != expected) else {
        return Ok(());
    };
    let (len, seen, expected) = (seen.len(), seen[at], expected[at]);
    Err(wrong!("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}"))
}

/// Compares numbers.
pub fn equal(what: impl Display, seen: u64, expected: u64) -> Result<(), CliError> {
    if seen == expected { Ok(()) } else { Err(wrong!("{what} is {seen} and must be {expected}")) }
}

/// A gate and two marks.
pub struct Timer {
    start: Event,
    end: Event,
    gate: PinnedMemory,
    opened: u32,
    patience: Duration,
}

/// Microseconds of one operation: on the device, and for the host that enqueued it.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub device: Vec<f64>,
    pub host: Vec<f64>,
}

impl Timer {
    pub fn new(context: &Arc<Context>, patience: Duration) -> Result<Self, DeviceError> {
        Ok(Timer {
            start: Event::timed(context)?,
            end: Event::timed(context)?,
            gate: PinnedMemory::new(context, 8)?,
            opened: 0,
            patience,
        })
    }

    /// Times `count` operations, enqueued by one call, again and again. The first time is for
    /// warming up.
    pub fn time(
        &mut self,
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
            until("what is timed", self.patience, || self.end.is_done())?;
            if round > 0 {
                samples.device.push(per(self.end.since(&self.start)?, count));
                samples.host.push(per(host, count));
            }
        }
        // Nothing of it is left: what it used is let go.
        until("what is timed", self.patience, || stream.is_done())?;
        Ok(samples)
    }
}

fn per(time: Duration, count: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count.max(1) as f64
}
