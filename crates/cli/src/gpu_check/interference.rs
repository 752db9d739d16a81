//! Interference: what a stream of matrix products loses to transfers beside it.
//!
//! ```text
//!   products  |= = = = = = = =|     |= = = = = = = =|     |=  =  =  =  =  =  =|
//!   beside                           copy engines          a copying kernel        to the host, too
//!              alone                 what is left of the difference is memory's
//! ```
//!
//! The three take turns, so that clocks and heat touch them alike. Transfers are as fast as they
//! go: the rate is told.

use sidelane::device::{DeviceRange, PinnedMemory, Priority, Stream};
use sidelane::error::DeviceError;
use sidelane_testkit::device::whole;

use super::Task;
use super::bench::{Gpu, Transfer};
use super::products::{Products, Round};
use super::report::{About, Checks};
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
    let gpu = Gpu::open(task)?;
    let bench = Bench {
        products: Products::new(task, &gpu.context, Priority::Normal)?,
        from: gpu.memory(COPY * BURST)?,
        to: gpu.pinned(COPY * BURST)?,
    };
    let mut found: [Found; 3] = Default::default();
    for round in 0..=task.few(15, 3) {
        for (beside, found) in ALL.into_iter().zip(&mut found) {
            let Round { product_us, all_us, bursts } = bench.round(beside)?;
            // The first round warms up.
            if round > 0 {
                found.product.push(product_us);
                found.rate.push((bursts * BURST * COPY) as f64 / all_us / 1e3);
            }
        }
    }
    let middle = |samples: &[f64]| summary(samples).p50_us;
    let alone = middle(&found[0].product);
    for (beside, found) in ALL.into_iter().zip(&found) {
        let (what, shows) = beside.words();
        let product = middle(&found.product);
        let moved = match beside {
            Beside::Nothing => String::new(),
            _ => {
                format!("; {:+.1} % beside {:.1} GB/s", (product / alone - 1.0) * 100.0, middle(&found.rate))
            }
        };
        let told = bench.products.told(product) + &moved;
        let open =
            (beside != Beside::Nothing).then_some("transfers over NVLink, which are several times faster");
        checks.measured(About::new(what, shows).open(open), &found.product, told)?;
    }
    bench.latency(&gpu, checks)
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
                "what transfers on the same way cost when all SMs move them",
            ),
        }
    }
}

struct Bench<'a> {
    products: Products<'a>,
    from: DeviceRange,
    to: PinnedMemory,
}

impl Bench<'_> {
    /// How long one small transfer takes where SMs have nothing to do, and where products run.
    fn latency(&self, gpu: &Gpu, checks: &mut Checks) -> Result<(), CliError> {
        let stream = gpu.stream()?;
        let mut transfer = Transfer::new(gpu, &stream)?;
        let mut alone = Vec::new();
        for _ in 0..=gpu.task.few(200, 20) {
            alone.push(transfer.send(gpu, &stream)?.as_secs_f64() * 1e6);
        }
        let beside = self.products.transfers(|stream| transfer.send(gpu, stream))?;
        let (_, size) = Transfer::SIZE;
        for (what, samples) in [("alone", &alone[1..]), ("beside products", &beside)] {
            let what = format!("copy of {size} to the host and its word, {what}");
            let shows = "whether a transfer comes later where SMs are busy: from its call to its word";
            checks.measured(About::new(&what, shows), samples, "")?;
        }
        Ok(())
    }

    fn round(&self, beside: Beside) -> Result<Round, CliError> {
        let burst = |traffic: &Stream| self.burst(beside, traffic);
        self.products.round(if beside == Beside::Nothing { None } else { Some(&burst) })
    }

    fn burst(&self, beside: Beside, traffic: &Stream) -> Result<(), DeviceError> {
        let to = self.to.range();
        if beside == Beside::Kernel {
            return self.products.kernels().copy(traffic, whole(to)?, whole(&self.from)?);
        }
        (0..BURST)
            .map(|nth| nth * COPY)
            .try_for_each(|at| traffic.copy(to.span(at, COPY)?, self.from.span(at, COPY)?))
    }
}
