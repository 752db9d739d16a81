//! Products: a stream of matrix products, timed while another stream works next to it.

use std::sync::Arc;
use std::time::Duration;

use sidelane::device::{AuditKernels, Blas, Context, DeviceRange, Event, Priority, Product, Stream, TILE};
use sidelane::error::DeviceError;
use sidelane_testkit::device::{until, whole};

use super::bench::{self, Gpu, random_elements};
use super::wheels;
use crate::error::CliError;
use crate::stats::summary;

/// A stream of products, and one of traffic.
pub struct Products<'a> {
    gpu: &'a Gpu,
    pub kernels: AuditKernels,
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

pub struct Round {
    pub product_us: f64,
    pub all_us: f64,
    /// Bursts of traffic that ended meanwhile.
    pub bursts: u64,
}

pub type Burst<'a> = &'a dyn Fn(&Stream) -> Result<(), DeviceError>;

impl<'a> Products<'a> {
    /// Traffic goes on a stream of this priority.
    pub fn new(gpu: &'a Gpu, priority: Priority) -> Result<Self, CliError> {
        let context = &gpu.context;
        let size = gpu.task.size.map_or_else(|| largest(context), Ok)?;
        let bytes = Product::bytes(size);
        let stream = Arc::new(gpu.stream()?);
        let matrices = [gpu.memory(bytes)?, gpu.memory(bytes)?, gpu.memory(bytes)?];
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
            gpu,
            kernels: AuditKernels::load(context)?,
            blas: Blas::load(&stream, &wheels::folders(context.driver())).ok(),
            size,
            count: gpu.task.few(20, 2),
            matrices,
            stream,
            traffic: Stream::new(context, priority)?,
            marks: [event()?, event()?],
            bursts: [event()?, event()?],
        })
    }

    /// The products in words: type and size, what makes them, and the rate of one that takes so
    /// long.
    pub fn describe(&self, product_us: f64) -> String {
        let (size, by) =
            (self.size, self.blas.as_ref().map_or("our own kernel (no cuBLAS was found)", Blas::name));
        let tflops = 2.0 * f64::from(size).powi(3) / product_us / 1e6;
        format!("bf16 {size} x {size}, by {by}: {tflops:.0} TFLOP/s")
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
        self.gpu.finish(&self.stream, "products")?;
        Ok(samples)
    }

    /// Rounds alone or next to each of these bursts, in turn, so that clocks and heat touch all of
    /// them alike. The first one of each warms up.
    pub fn turns(&self, rounds: usize, beside: &[Option<Burst<'_>>]) -> Result<Vec<Vec<Round>>, CliError> {
        let mut found: Vec<Vec<Round>> = beside.iter().map(|_| Vec::new()).collect();
        for round in 0..=rounds {
            for (&burst, found) in beside.iter().zip(&mut found) {
                let seen = self.round(burst)?;
                found.extend((round > 0).then_some(seen));
            }
        }
        Ok(found)
    }

    /// Products alone, or next to bursts of traffic without a gap.
    fn round(&self, burst: Option<Burst<'_>>) -> Result<Round, CliError> {
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
        until("products", self.gpu.task.patience() * 10, || {
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
        self.gpu.finish(&self.traffic, "traffic next to products")?;
        self.gpu.finish(&self.stream, "products")?;
        Ok(Round { product_us: all_us / self.count as f64, all_us: all_us.max(1e-3), bursts })
    }
}

pub fn middle(rounds: &[Round], figure: fn(&Round) -> f64) -> f64 {
    summary(&rounds.iter().map(figure).collect::<Vec<_>>()).p50_us
}

/// 8192, or what takes half of the free memory.
fn largest(context: &Context) -> Result<u32, DeviceError> {
    let free = context.free_memory()? / 2;
    let fits = |size: &u32| Product::bytes(*size) * 3 <= free;
    Ok([8192, 4096, 2048, 1024].into_iter().find(fits).unwrap_or(TILE))
}
