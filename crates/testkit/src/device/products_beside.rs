//! Matrix products with work beside them, to be timed: alone, or next to bursts of traffic.
//!
//! ```text
//!   products  |= = = = = = = =|     |=  =  =  =  =  =  =|      one after another on their stream
//!   traffic     alone                burst burst burst         two bursts in flight, without a gap
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sidelane::device::{AuditKernels, Blas, Context, DeviceRange, Event, Priority, Product, Stream, TILE};
use sidelane::error::DeviceError;

use super::gpu::{Gpu, write};
use super::kernel_work::elements;
use super::{until, whole};
use crate::TestError;
use crate::timing::stats::summary;
use crate::values::Random;

/// A stream of products, and one of traffic.
pub struct Products<'a> {
    gpu: &'a Gpu,
    /// Kernels of the product where there is no cuBLAS, and of a copy.
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

/// Products one after another, and traffic meanwhile.
pub struct Round {
    /// Microseconds of one product.
    pub product_us: f64,
    /// Microseconds of all.
    pub all_us: f64,
    /// Bursts of traffic that ended meanwhile.
    pub bursts: u64,
}

/// Enqueues traffic.
pub type Burst<'a> = &'a dyn Fn(&Stream) -> Result<(), DeviceError>;

/// Rounds next to one burst after another.
pub struct Beside {
    rounds: Vec<Round>,
    /// Time of a product here by that of one alone.
    pub slowdown: f64,
}

impl Beside {
    /// The median of a figure.
    pub fn middle(&self, figure: fn(&Round) -> f64) -> f64 {
        middle(&self.rounds, figure)
    }

    /// Microseconds of a product.
    pub fn samples(&self) -> Vec<f64> {
        self.rounds.iter().map(|round| round.product_us).collect()
    }

    /// In per cent.
    pub fn slower(&self) -> f64 {
        (self.slowdown - 1.0) * 100.0
    }
}

impl<'a> Products<'a> {
    /// Of so many rows and columns, if it is said, by cuBLAS if it is found, in these folders too.
    /// Traffic goes on a stream of this priority.
    ///
    /// # Errors
    /// Refusals of the device.
    pub fn new(
        gpu: &'a Gpu,
        size: Option<u32>,
        priority: Priority,
        folders: &[PathBuf],
    ) -> Result<Self, TestError> {
        let context = &gpu.context;
        let size = size.map_or_else(|| largest(context), Ok)?;
        let bytes = Product::bytes(size);
        let stream = Arc::new(gpu.stream()?);
        let matrices = [gpu.memory(bytes)?, gpu.memory(bytes)?, gpu.memory(bytes)?];
        // Any numbers below one: what multiplies zeros draws less power.
        let numbers = elements(&mut Random(1), bytes.min(8 << 20) / 2);
        let numbers: &[u8] = bytemuck::cast_slice(&numbers);
        for matrix in &matrices[..2] {
            for at in (0..bytes).step_by(numbers.len()) {
                let len = (bytes - at).min(numbers.len() as u64);
                write(&stream, &matrix.part(at, len)?, &numbers[..len as usize])?;
            }
        }
        let event = || Event::timed(context);
        Ok(Products {
            gpu,
            kernels: AuditKernels::load(context)?,
            blas: Blas::load(&stream, folders).ok(),
            size,
            count: gpu.few(20, 2),
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
    ///
    /// # Errors
    /// Refusals of the device, and a wait that does not end.
    pub fn transfers(
        &self,
        mut transfer: impl FnMut(&Stream) -> Result<Duration, TestError>,
    ) -> Result<Vec<f64>, TestError> {
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

    /// Rounds of products alone, and those next to each of these bursts. All of them take turns, so
    /// that clocks and heat touch them alike. The first round of each warms up.
    ///
    /// # Errors
    /// Refusals of the device, and a wait that does not end.
    pub fn beside(&self, bursts: &[Burst<'_>]) -> Result<(Beside, Vec<Beside>), TestError> {
        let mut alone = Beside { rounds: Vec::new(), slowdown: 1.0 };
        let mut all: Vec<Vec<Round>> = bursts.iter().map(|_| Vec::new()).collect();
        for round in 0..=self.gpu.few(15, 3) {
            let counts = round > 0;
            alone.rounds.extend(Some(self.round(None)?).filter(|_| counts));
            for (burst, rounds) in bursts.iter().zip(&mut all) {
                rounds.extend(Some(self.round(Some(burst))?).filter(|_| counts));
            }
        }
        let product = alone.middle(|round| round.product_us);
        let slowdown = |rounds: &[Round]| middle(rounds, |round| round.product_us) / product;
        let all = all.into_iter().map(|rounds| Beside { slowdown: slowdown(&rounds), rounds });
        Ok((alone, all.collect()))
    }

    /// Products alone, or next to bursts of traffic without a gap.
    fn round(&self, burst: Option<Burst<'_>>) -> Result<Round, TestError> {
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
        until("products", self.gpu.patience * 10, || {
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

fn middle(rounds: &[Round], figure: fn(&Round) -> f64) -> f64 {
    summary(&rounds.iter().map(figure).collect::<Vec<_>>()).p50_us
}

/// 8192, or what takes half of the free memory.
fn largest(context: &Context) -> Result<u32, DeviceError> {
    let free = context.free_memory()? / 2;
    let fits = |size: &u32| Product::bytes(*size) * 3 <= free;
    Ok([8192, 4096, 2048, 1024].into_iter().find(fits).unwrap_or(TILE))
}
