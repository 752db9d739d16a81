//! Memory that a rank holds, counted.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that this rank holds, padding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Of parameters.
    pub parameters_bytes: u64,
    /// Of gradients, from a backward pass to the step, and of their sums over microbatches.
    pub gradients_bytes: u64,
    /// Of the optimizer's states.
    pub states_bytes: u64,
    /// Of buckets and layers in flight, and of the copies that a step makes, the most at once since
    /// this was built.
    pub buffers_peak_bytes: u64,
}

pub(super) fn bytes(values: &[f32]) -> u64 {
    size_of_val(values) as u64
}

/// Bytes of the buffers of an instance.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Gauge {
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

/// Bytes that are counted while this lives.
#[derive(Debug)]
pub(super) struct Counted {
    bytes: u64,
    gauge: Arc<Gauge>,
}

impl Counted {
    pub fn new(gauge: &Arc<Gauge>, bytes: u64) -> Counted {
        let now = gauge.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        gauge.peak.fetch_max(now, Ordering::Relaxed);
        Counted { bytes, gauge: Arc::clone(gauge) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A buffer, counted while it lives.
#[derive(Debug)]
pub(super) struct Buffer {
    values: Vec<f32>,
    _counted: Counted,
}

impl Buffer {
    pub fn zeros(gauge: &Arc<Gauge>, len: usize) -> Buffer {
        Buffer::new(gauge, vec![0.0; len])
    }

    pub fn new(gauge: &Arc<Gauge>, values: Vec<f32>) -> Buffer {
        Buffer { _counted: Counted::new(gauge, bytes(&values)), values }
    }

    /// The values, to be kept and counted elsewhere.
    pub fn keep(mut self) -> Vec<f32> {
        std::mem::take(&mut self.values)
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}
