//! Interference: what a stream of matrix products loses to transfers beside it.
//!
//! ```text
//!   products  |= = = = = = = =|     |= = = = = = = =|     |=  =  =  =  =  =  =|
//!   beside                           copy engines          a copying kernel        to the host, too
//!              alone                 what is left of the difference is memory's
//! ```
//!
//! They take turns, so that clocks and heat touch them alike. The copying kernel has as many blocks
//! as libraries take SMs, and as many as fill the GPU. Transfers are as fast as they
//! go: the rate is told.

use sidelane::device::{Priority, Stream};
use sidelane_testkit::device::whole;

use super::Task;
use super::bench::{Gpu, Transfer};
use super::products::{Burst, Products, Round, middle};
use super::report::{About, Checks};
use crate::error::CliError;

/// Bytes of one copy, and copies of one burst.
const COPY: u64 = 1 << 20;
const BURST: u64 = 32;

/// Blocks of the copying kernel: SMs that a library takes which moves rows by kernels (DeepEP's V2
/// takes 6 to 12, V1 20 to 24), half of them, and all threads of all.
const BLOCKS: [Option<u32>; 4] = [Some(8), Some(24), Some(64), None];

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = Gpu::open(task)?;
    let products = Products::new(&gpu, Priority::Normal)?;
    let (from, to) = (gpu.memory(COPY * BURST)?, gpu.pinned(COPY * BURST)?);
    let engines = |traffic: &Stream| {
        let mut places = (0..BURST).map(|nth| nth * COPY);
        places.try_for_each(|at| traffic.copy(to.range().span(at, COPY)?, from.span(at, COPY)?))
    };
    let kernels = BLOCKS.map(|most| {
        let (products, from, to) = (&products, &from, &to);
        move |traffic: &Stream| products.kernels.copy(traffic, whole(to.range())?, whole(from)?, most)
    });
    let mut beside: Vec<Option<Burst<'_>>> = vec![None, Some(&engines)];
    beside.extend(kernels.iter().map(|kernel| Some(kernel as Burst<'_>)));
    let rounds = products.turns(task.few(15, 3), &beside)?;
    let alone = middle(&rounds[0], |round| round.product_us);
    let tell = |checks: &mut Checks, what: &str, shows, rounds: &[Round], beside: bool| {
        let product = middle(rounds, |round| round.product_us);
        let rate = middle(rounds, |round| (round.bursts * BURST * COPY) as f64 / round.all_us / 1e3);
        let slower = (product / alone - 1.0) * 100.0;
        let moved = if beside { format!("; {slower:+.1} % beside {rate:.1} GB/s") } else { String::new() };
        let open = beside.then_some("transfers over NVLink, which are several times faster");
        let samples: Vec<f64> = rounds.iter().map(|round| round.product_us).collect();
        checks.measured(About::new(what, shows).open(open), &samples, products.describe(product) + &moved)
    };
    tell(checks, "products alone", "what the next rows are compared with", &rounds[0], false)?;
    let shows = "what transfers without SMs cost the compute: memory and power";
    tell(checks, "products beside copy engines", shows, &rounds[1], true)?;
    for (most, rounds) in BLOCKS.into_iter().zip(&rounds[2..]) {
        let blocks = most.map_or_else(|| "that fills all SMs".to_owned(), |most| format!("of {most} blocks"));
        let what = format!("products beside a copying kernel {blocks}");
        tell(checks, &what, "what transfers on the same way cost when SMs move them", rounds, true)?;
    }
    latency(&gpu, &products, checks)
}

/// How long one small transfer takes where SMs have nothing to do, and where products run.
fn latency(gpu: &Gpu, products: &Products<'_>, checks: &mut Checks) -> Result<(), CliError> {
    let stream = gpu.stream()?;
    let mut transfer = Transfer::new(gpu, &stream)?;
    let mut alone = Vec::new();
    for _ in 0..=gpu.task.few(200, 20) {
        alone.push(transfer.send(gpu, &stream)?.as_secs_f64() * 1e6);
    }
    let beside = products.transfers(|stream| transfer.send(gpu, stream))?;
    let (_, size) = Transfer::SIZE;
    for (what, samples) in [("alone", &alone[1..]), ("beside products", &beside)] {
        let what = format!("copy of {size} to the host and its word, {what}");
        let shows = "whether a transfer comes later where SMs are busy: from its call to its word";
        checks.measured(About::new(&what, shows), samples, "")?;
    }
    Ok(())
}
