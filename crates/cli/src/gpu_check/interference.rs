//! Interference: what a stream of matrix products loses to transfers beside it.
//!
//! ```text
//!   products  |= = = = = = = =|     |= = = = = = = =|     |=  =  =  =  =  =  =|
//!   beside                           copy engines          a copying kernel        the same bytes, to the host
//!              alone                 what is left of the difference is memory's
//! ```
//!
//! The three take turns, so that clocks and heat touch them alike. Transfers are as fast as they
//! go: the rate is told.

use std::sync::Arc;

use sidelane::device::{
    AuditKernels, Blas, Context, DeviceRange, Driver, Event, PinnedMemory, Product, Stream, TILE,
};
use sidelane::error::DeviceError;

use super::Task;
use super::bench::{self, Random};
use super::report::{About, Checks};
use super::wheels;
use crate::device::{allocate, stream, until, whole};
use crate::error::CliError;
use crate::stats::summary;

/// Bytes of one copy, and copies of one burst.
const COPY: u64 = 1 << 20;
const BURST: u64 = 32;

/// Transfers concurrent with the products.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    Engines,
    Kernel,
}

const ALL: [Beside; 3] = [Beside::Nothing, Beside::Engines, Beside::Kernel];

/// Figures of one kind, round by round.
#[derive(Default)]
struct Found {
    /// Microseconds of a product.
    product: Vec<f64>,
    /// GB/s beside it.
    rate: Vec<f64>,
}

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let bench = Bench::new(task, &context)?;
    let mut found: [Found; 3] = Default::default();
    for round in 0..=task.few(15, 3) {
        for (beside, found) in ALL.into_iter().zip(&mut found) {
            let (product, rate) = bench.round(beside)?;
            // The first round warms up.
            if round > 0 {
                found.product.push(product);
                found.rate.push(rate);
            }
        }
    }
    let middle = |samples: &[f64]| summary(samples).p50_us;
    let alone = middle(&found[0].product);
    for (beside, found) in ALL.into_iter().zip(&found) {
        let (what, shows) = beside.words();
        let slower = (middle(&found.product) / alone - 1.0) * 100.0;
        let tflops = 2.0 * f64::from(bench.size).powi(3) / middle(&found.product) / 1e6;
        let moved = match beside {
            Beside::Nothing => String::new(),
            _ => format!("; {slower:+.1} % beside {:.1} GB/s", middle(&found.rate)),
        };
        let size = bench.size;
        let told = format!("bf16 {size} x {size}, by {}: {tflops:.0} TFLOP/s{moved}", bench.by());
        let open =
            (beside != Beside::Nothing).then_some("transfers over NVLink, which are several times faster");
        checks.measured(About::new(what, shows).open(open), &found.product, told)?;
    }
    Ok(())
}

impl Beside {
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Beside::Nothing => ("products alone", "what the next two rows are compared with"),
            Beside::Engines => (
                "products beside copy engines",
                "what transfers without SMs cost the compute: memory and power",
            ),
            Beside::Kernel => (
                "products beside a copying kernel",
                "what the same bytes cost when SMs move them, on the same way",
            ),
        }
    }
}

struct Bench<'a> {
    task: &'a Task,
    kernels: AuditKernels,
    blas: Option<Blas>,
    size: u32,
    products: usize,
    matrices: [DeviceRange; 3],
    from: DeviceRange,
    to: PinnedMemory,
    compute: Arc<Stream>,
    traffic: Stream,
    marks: [Event; 2],
    /// Behind each burst: two are under way at once.
    bursts: [Event; 2],
}

impl<'a> Bench<'a> {
    fn new(task: &'a Task, context: &'a Arc<Context>) -> Result<Self, CliError> {
        let size = task.size.map_or_else(|| largest(context), Ok)?;
        let bytes = Product::bytes(size);
        let compute = Arc::new(stream(context)?);
        let matrices = [allocate(context, bytes)?, allocate(context, bytes)?, allocate(context, bytes)?];
        // Any numbers below one: what multiplies zeros draws less power.
        let numbers: Vec<u8> = {
            let mut random = Random(1);
            let value = |bits: u64| half::bf16::from_f32((bits % 2001) as f32 / 1000.0 - 1.0);
            (0..bytes.min(8 << 20) / 2).flat_map(|_| value(random.next()).to_ne_bytes()).collect()
        };
        for matrix in &matrices[..2] {
            for at in (0..bytes).step_by(numbers.len()) {
                let len = (bytes - at).min(numbers.len() as u64);
                bench::write(&compute, &matrix.part(at, len)?, &numbers[..len as usize])?;
            }
        }
        let event = || Event::timed(context);
        Ok(Bench {
            task,
            kernels: AuditKernels::load(context)?,
            blas: Blas::load(&compute, &wheels::folders(context.driver())).ok(),
            size,
            products: task.few(20, 2),
            matrices,
            from: allocate(context, COPY * BURST)?,
            to: PinnedMemory::new(context, (COPY * BURST) as usize)?,
            compute,
            traffic: stream(context)?,
            marks: [event()?, event()?],
            bursts: [event()?, event()?],
        })
    }

    fn by(&self) -> &str {
        self.blas.as_ref().map_or("our own kernel (no cuBLAS was found)", Blas::name)
    }

    fn product(&self) -> Result<(), DeviceError> {
        let [a, b, out] = &self.matrices;
        let product = Product { size: self.size, a: whole(a)?, b: whole(b)?, out: whole(out)? };
        match &self.blas {
            Some(blas) => blas.product(&product),
            None => self.kernels.product(&self.compute, &product),
        }
    }

    /// Microseconds of a product, and GB/s that were moved meanwhile.
    fn round(&self, beside: Beside) -> Result<(f64, f64), CliError> {
        let mut bursts = 0_u64;
        if beside != Beside::Nothing {
            for event in &self.bursts {
                self.burst(beside, event)?;
            }
        }
        let [start, end] = &self.marks;
        start.record(&self.compute)?;
        for _ in 0..self.products {
            self.product()?;
        }
        end.record(&self.compute)?;
        until("products", self.task.patience() * 10, || {
            // Bursts that end while products run are counted, and the next one follows.
            let next = &self.bursts[(bursts % 2) as usize];
            if beside != Beside::Nothing && next.is_done()? {
                self.burst(beside, next)?;
                bursts += 1;
            }
            end.is_done()
        })?;
        let time = end.since(start)?;
        until("what is copied beside", self.task.patience(), || self.traffic.is_done())?;
        until("products", self.task.patience(), || self.compute.is_done())?;
        let rate = (bursts * BURST * COPY) as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        Ok((time.as_secs_f64() * 1e6 / self.products as f64, rate))
    }

    fn burst(&self, beside: Beside, event: &Event) -> Result<(), DeviceError> {
        let to = self.to.range();
        if beside == Beside::Kernel {
            self.kernels.copy(&self.traffic, whole(to)?, whole(&self.from)?)?;
        } else {
            for at in (0..BURST).map(|nth| nth * COPY) {
                self.traffic.copy(to.span(at, COPY)?, self.from.span(at, COPY)?)?;
            }
        }
        event.record(&self.traffic)
    }
}

/// 8192, or what takes half of the free memory.
fn largest(context: &Context) -> Result<u32, DeviceError> {
    let free = context.free_memory()? / 2;
    let fits = |size: &u32| Product::bytes(*size) * 3 <= free;
    Ok([8192, 4096, 2048, 1024].into_iter().find(fits).unwrap_or(TILE))
}
