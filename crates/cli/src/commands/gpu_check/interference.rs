//! Interference: what a stream of matrix products loses to work beside it: to transfers (part
//! `interference`), and to our own kernels by the limit on their blocks (part `blocks`).
//!
//! ```text
//!   products  |= = = = = = = =|     |= = = = = = = =|     |=  =  =  =  =  =  =|     |=   =   =   =   =   =|
//!   beside                           copy engines          a copying kernel        pack, regroup, sum, of
//!              alone                 what is left of the difference is memory's    at most so many blocks
//! ```
//!
//! They take turns, so that clocks and heat touch them alike. Transfers are as fast as they go, to
//! the host, and the report has their rate. The copying kernel has as many blocks as libraries take
//! SMs, and as many as fill the GPU. Our own kernels go on a stream of the highest priority without
//! a gap, as the transfers of a layer do, and no bit of what they write may depend on the limit.

use std::sync::Arc;
use std::time::Duration;

use sidelane::device::{AuditKernels, Blas, Context, DeviceRange, Event, Priority, Product, Stream, TILE};
use sidelane::error::DeviceError;
use sidelane_testkit::device::gpu::{Gpu, write};
use sidelane_testkit::device::kernel_work::{SlotWork, elements};
use sidelane_testkit::device::timer::Transfer;
use sidelane_testkit::device::{until, whole};
use sidelane_testkit::timing::stats::summary;
use sidelane_testkit::values::Random;

use super::report::{About, Checks, Limited};
use super::{Task, packages};
use crate::error::CliError;

/// Bytes of one copy, and copies of one burst.
const COPY: u64 = 1 << 20;
const BURST: u64 = 32;

/// Blocks of the copying kernel: SMs that a library takes which moves rows by kernels (DeepEP's V2
/// takes 6 to 12, V1 20 to 24), half of them, and all threads of all.
const BLOCKS: [Option<u32>; 4] = [Some(8), Some(24), Some(64), None];

pub fn transfers(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = task.gpu()?;
    let products = Products::new(&gpu, task.size, Priority::Normal)?;
    let (from, to) = (gpu.memory(COPY * BURST)?, gpu.pinned(COPY * BURST)?);
    let engines = |traffic: &Stream| {
        let mut places = (0..BURST).map(|nth| nth * COPY);
        places.try_for_each(|at| traffic.copy(to.range().span(at, COPY)?, from.span(at, COPY)?))
    };
    let kernels = BLOCKS.map(|most| {
        let (products, from, to) = (&products, &from, &to);
        move |traffic: &Stream| products.kernels.copy(traffic, whole(to.range())?, whole(from)?, most)
    });
    let mut bursts: Vec<Burst<'_>> = vec![&engines];
    bursts.extend(kernels.iter().map(|kernel| kernel as Burst<'_>));
    let shows = "what transfers without SMs cost the compute: memory and power";
    let mut work = vec![("products beside copy engines".to_owned(), shows)];
    work.extend(BLOCKS.map(|most| {
        let blocks = most.map_or_else(|| "that fills all SMs".to_owned(), |most| format!("of {most} blocks"));
        let shows = "what transfers on the same way cost when SMs move them";
        (format!("products beside a copying kernel {blocks}"), shows)
    }));
    for ((what, shows), beside) in work.iter().zip(products.beside(checks, &bursts)?) {
        let rate = beside.middle(|round| (round.bursts * BURST * COPY) as f64 / round.all_us / 1e3);
        let product = products.describe(beside.middle(|round| round.product_us));
        let found = format!("{product}; {:+.1} % beside {rate:.1} GB/s", beside.slower());
        let about = About::new(what, shows).open("transfers over NVLink, which are several times faster");
        checks.measured(about, &beside.samples(), found)?;
    }
    latency(&gpu, &products, checks)
}

pub fn kernels(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = task.gpu()?;
    let sms = gpu.context.facts().multiprocessors;
    let limits = [None, Some(sms), Some((sms / 2).max(1)), Some((sms / 4).max(1))];
    let rows = SlotWork::new(&gpu)?;
    let about = About::new("bits with every limit", "no bit depends on how many blocks a kernel has");
    if !checks.check(about, || Ok(rows.equal(&gpu, &limits)?))? {
        return Ok(());
    }
    let products = Products::new(&gpu, task.size, Priority::Highest)?;
    let bursts = limits.map(|limit| {
        let rows = &rows;
        move |traffic: &Stream| rows.burst(traffic, limit)
    });
    let bursts = bursts.each_ref().map(|burst| burst as Burst<'_>);
    for (blocks, beside) in limits.into_iter().zip(products.beside(checks, &bursts)?) {
        let most = blocks.map_or("without a limit".to_owned(), |most| format!("of at most {most} blocks"));
        let what = format!("products beside pack, regroup and sum {most}");
        let shows = "what our kernels take from the compute, and what fewer blocks cost them";
        // A burst that does not end meanwhile takes as long at least.
        let burst = beside.middle(|round| round.all_us / round.bursts.max(1) as f64);
        let (slower, rows) = (beside.slower(), rows.describe());
        let found = format!("{slower:+.1} %; the kernels take {burst:.0} us for {rows}");
        let limited = Limited { blocks, slowdown: beside.slowdown };
        checks.limited(About::new(&what, shows), &beside.samples(), found, limited)?;
    }
    Ok(())
}

/// How long one small transfer takes where SMs have nothing to do, and where products run.
fn latency(gpu: &Gpu, products: &Products<'_>, checks: &mut Checks) -> Result<(), CliError> {
    let stream = gpu.stream()?;
    let mut transfer = Transfer::new(gpu, &stream)?;
    let mut alone = Vec::new();
    for _ in 0..=gpu.few(200, 20) {
        alone.push(transfer.send(gpu, &stream)?.as_secs_f64() * 1e6);
    }
    let beside = products.transfers(|stream| Ok(transfer.send(gpu, stream)?))?;
    let (_, size) = Transfer::SIZE;
    for (what, samples) in [("alone", &alone[1..]), ("beside products", &beside)] {
        let what = format!("copy of {size} to the host and its word, {what}");
        let shows = "whether a transfer comes later where SMs are busy: from its call to its word";
        checks.measured(About::new(&what, shows), samples, "")?;
    }
    Ok(())
}

/// A stream of products, and one of traffic.
struct Products<'a> {
    gpu: &'a Gpu,
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

struct Round {
    product_us: f64,
    all_us: f64,
    /// Bursts of traffic that ended meanwhile.
    bursts: u64,
}

type Burst<'a> = &'a dyn Fn(&Stream) -> Result<(), DeviceError>;

/// Rounds next to one burst after another.
struct Beside {
    rounds: Vec<Round>,
    /// Time of a product here by that of one alone.
    slowdown: f64,
}

impl Beside {
    fn middle(&self, figure: fn(&Round) -> f64) -> f64 {
        middle(&self.rounds, figure)
    }

    /// Microseconds of a product.
    fn samples(&self) -> Vec<f64> {
        self.rounds.iter().map(|round| round.product_us).collect()
    }

    /// In per cent.
    fn slower(&self) -> f64 {
        (self.slowdown - 1.0) * 100.0
    }
}

impl<'a> Products<'a> {
    /// Of so many rows and columns, if it is said. Traffic goes on a stream of this priority.
    fn new(gpu: &'a Gpu, size: Option<u32>, priority: Priority) -> Result<Self, CliError> {
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
            blas: Blas::load(&stream, &packages::folders(context.driver())).ok(),
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
    fn describe(&self, product_us: f64) -> String {
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
    fn transfers(
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

    /// Tells the time of a product alone, and gives the rounds next to each of these bursts. All of
    /// them take turns, so that clocks and heat touch them alike. The first round of each warms up.
    fn beside(&self, checks: &mut Checks, bursts: &[Burst<'_>]) -> Result<Vec<Beside>, CliError> {
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
        let about = About::new("products alone", "what the next rows are compared with");
        checks.measured(about, &alone.samples(), self.describe(product))?;
        let slowdown = |rounds: &[Round]| middle(rounds, |round| round.product_us) / product;
        Ok(all.into_iter().map(|rounds| Beside { slowdown: slowdown(&rounds), rounds }).collect())
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
