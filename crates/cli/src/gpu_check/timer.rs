//! Times by the device's own clock.
//!
//! Work is enqueued behind a wait for the host, which lets it go when all of it is there: what is timed is the device, not how
//! fast the host enqueues. How fast that was is timed beside it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::device::{Context, Event, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use super::memory::until;
use crate::error::CliError;

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

    /// Times `count` operations, enqueued by one call, again and again. The first time is for warming up.
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
            // Whatever happened, nobody waits at the gate.
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
