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

use sidelane::device::{Priority, Stream};
use sidelane_testkit::device::whole;

use super::Task;
use super::bench::{Gpu, Transfer};
use super::products::{Products, middle};
use super::report::{About, Checks};
use crate::error::CliError;

/// Bytes of one copy, and copies of one burst.
const COPY: u64 = 1 << 20;
const BURST: u64 = 32;

/// What is measured, and what it shows: nothing, copy engines and a kernel beside products.
const ROWS: [(&str, &str); 3] = [
    ("products alone", "what the next two rows are compared with"),
    ("products beside copy engines", "what transfers without SMs cost the compute: memory and power"),
    ("products beside a copying kernel", "what transfers on the same way cost when all SMs move them"),
];

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = Gpu::open(task)?;
    let products = Products::new(&gpu, Priority::Normal)?;
    let (from, to) = (gpu.memory(COPY * BURST)?, gpu.pinned(COPY * BURST)?);
    let engines = |traffic: &Stream| {
        let mut places = (0..BURST).map(|nth| nth * COPY);
        places.try_for_each(|at| traffic.copy(to.range().span(at, COPY)?, from.span(at, COPY)?))
    };
    let kernel = |traffic: &Stream| products.kernels.copy(traffic, whole(to.range())?, whole(&from)?);
    let rounds = products.turns(task.few(15, 3), &[None, Some(&engines), Some(&kernel)])?;
    let alone = middle(&rounds[0], |round| round.product_us);
    for ((what, shows), rounds) in ROWS.into_iter().zip(&rounds) {
        let product = middle(rounds, |round| round.product_us);
        let rate = middle(rounds, |round| (round.bursts * BURST * COPY) as f64 / round.all_us / 1e3);
        let is_alone = what == ROWS[0].0;
        let slower = (product / alone - 1.0) * 100.0;
        let moved = if is_alone { String::new() } else { format!("; {slower:+.1} % beside {rate:.1} GB/s") };
        let open = (!is_alone).then_some("transfers over NVLink, which are several times faster");
        let samples: Vec<f64> = rounds.iter().map(|round| round.product_us).collect();
        checks.measured(About::new(what, shows).open(open), &samples, products.told(product) + &moved)?;
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
