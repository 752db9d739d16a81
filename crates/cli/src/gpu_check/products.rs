//! Products: a stream of matrix products, timed while another stream works next to it.

use std::sync::Arc;
use std::time::Duration;

use sidelane::device::{AuditKernels, Blas, Context, DeviceRange, Event, Priority, Product, Stream, TILE};
use sidelane::error::DeviceError;
use sidelane_testkit::device::{allocate, stream, until, whole};

use super::Task;
use super::bench::{self, random_elements};
use super::wheels;
use crate::error::CliError;

/// A stream of products, and one of traffic.
pub struct Products<'a> {
    task: &'a Task,
    kernels: AuditKernels,
    blas: Option<Blas>,
    size: u32,
    count: usize,
    matrices: [DeviceRange; 3],
    stream: Arc<Stream>,
    traffic: Stream,
    marks: [Event; 2],
    /// Behind each burst: two are in flight at once.
    bursts: [Event; 2],
}

/// One round of products.
pub struct Round {
    /// Microseconds of a product.
    pub product_us: f64,
    /// Microseconds of all.
    pub all_us: f64,
    /// Bursts of traffic that ended meanwhile.
    pub bursts: u64,
}

/// Enqueues a burst of traffic.
pub type Burst<'a> = &'a dyn Fn(&Stream) -> Result<(), DeviceError>;

impl<'a> Products<'a> {
    /// Traffic goes on a stream of this priority.
    pub fn new(task: &'a Task, context: &Arc<Context>, priority: Priority) -> Result<Self, CliError> {
        let size = task.size.map_or_else(|| largest(context), Ok)?;
        let bytes = Product::bytes(size);
        let stream = Arc::new(stream(context)?);
        let matrices = [allocate(context, bytes)?, allocate(context, bytes)?, allocate(context, bytes)?];
        // Any numbers below one: what multiplies zeros draws less power.
        let numbers = random_elements(1, bytes.min(8 << 20) / 2);
        for matrix in &matrices[..2] {
            for at in (0..bytes).step_by(numbers.len()) {
                let len = (bytes - at).min(numbers.len() as u64);
                bench::write(&stream, &matrix.part(at, len)?, &numbers[..len as usize])?;
            }
        }
        let event = || Event::timed(context);
        Ok(Products {
            task,
            kernels: AuditKernels::load(context)?,
            blas: Blas::load(&stream, &wheels::folders(context.driver())).ok(),
            size,
            count: task.few(20, 2),
            matrices,
            stream,
            traffic: Stream::new(context, priority)?,
            marks: [event()?, event()?],
            bursts: [event()?, event()?],
        })
    }

    /// The products in words: type and size, what makes them, and the rate of one that takes so
    /// long.
    pub fn told(&self, product_us: f64) -> String {
        let (size, by) =
            (self.size, self.blas.as_ref().map_or("our own kernel (no cuBLAS was found)", Blas::name));
        let tflops = 2.0 * f64::from(size).powi(3) / product_us / 1e6;
        format!("bf16 {size} x {size}, by {by}: {tflops:.0} TFLOP/s")
    }

    /// The kernels that the part has loaded for products.
    pub fn kernels(&self) -> &AuditKernels {
        &self.kernels
    }

    fn product(&self) -> Result<(), DeviceError> {
        let [a, b, out] = &self.matrices;
        let product = Product { size: self.size, a: whole(a)?, b: whole(b)?, out: whole(out)? };
        match &self.blas {
            Some(blas) => blas.product(&product),
            None => self.kernels.product(&self.stream, &product),
        }
    }

    /// Microseconds of one small transfer after another, from its call until the host sees its
    /// word, while products run.
    pub fn transfers(
        &self,
        mut transfer: impl FnMut(&Stream) -> Result<Duration, CliError>,
    ) -> Result<Vec<f64>, CliError> {
        let end = &self.marks[1];
        for _ in 0..self.count {
            self.product()?;
        }
        end.record(&self.stream)?;
        let mut samples = Vec::new();
        loop {
            samples.push(transfer(&self.traffic)?.as_secs_f64() * 1e6);
            if end.is_done()? {
                break;
            }
        }
        until("products", self.task.patience(), || self.stream.is_done())?;
        Ok(samples)
    }

    /// Products alone, or next to bursts of traffic without a gap.
    pub fn round(&self, burst: Option<Burst<'_>>) -> Result<Round, CliError> {
        let enqueue = |burst: Burst<'_>, event: &Event| {
            burst(&self.traffic)?;
            event.record(&self.traffic)
        };
        let mut bursts = 0_u64;
        if let Some(burst) = burst {
            self.bursts.iter().try_for_each(|event| enqueue(burst, event))?;
        }
        let [start, end] = &self.marks;
        start.record(&self.stream)?;
        for _ in 0..self.count {
            self.product()?;
        }
        end.record(&self.stream)?;
        until("products", self.task.patience() * 10, || {
            // Bursts that end while products run are counted, and the next one follows.
            let next = &self.bursts[(bursts % 2) as usize];
            if let Some(burst) = burst
                && next.is_done()?
            {
                enqueue(burst, next)?;
                bursts += 1;
            }
            end.is_done()
        })?;
        let all_us = end.since(start)?.as_secs_f64() * 1e6;
        until("traffic next to products", self.task.patience(), || self.traffic.is_done())?;
        until("products", self.task.patience(), || self.stream.is_done())?;
        Ok(Round { product_us: all_us / self.count as f64, all_us: all_us.max(1e-3), bursts })
    }
}

/// 8192, or what takes half of the free memory.
fn largest(context: &Context) -> Result<u32, DeviceError> {
    let free = context.free_memory()? / 2;
    let fits = |size: &u32| Product::bytes(*size) * 3 <= free;
    Ok([8192, 4096, 2048, 1024].into_iter().find(fits).unwrap_or(TILE))
}
