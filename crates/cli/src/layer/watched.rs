//! Experts whose time is taken, and that can be told to do nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sidelane::layer::{Chunk, Experts, Failure, GroupedSwiGlu, RowOrder, Saved, Segments};

/// What becomes of a step's experts.
#[derive(Debug, Default)]
pub struct Watch {
    idle: AtomicBool,
    ns: AtomicU64,
}

impl Watch {
    /// From now on experts give zeros at once, or work.
    pub fn idle(&self, idle: bool) {
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

/// Experts under watch.
pub struct Watched {
    inner: GroupedSwiGlu,
    watch: Arc<Watch>,
}

impl Watched {
    /// These, by this watch.
    pub fn new(inner: GroupedSwiGlu, watch: Arc<Watch>) -> Self {
        Watched { inner, watch }
    }

    fn is_idle(&self) -> bool {
        self.watch.idle.load(Ordering::Relaxed)
    }
}

impl Experts for Watched {
    fn count(&self) -> usize {
        self.inner.count()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), Failure> {
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
    ) -> Result<Vec<f32>, Failure> {
        if self.is_idle() {
            return Ok(of_outputs);
        }
        self.watch.time(|| self.inner.rows_backward(rows, saved, of_outputs))
    }

    fn weights_backward(&self, chunks: &[Chunk<'_>], order: &RowOrder) -> Result<Vec<f32>, Failure> {
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
