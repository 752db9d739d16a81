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

use sidelane::device::{Priority, Stream};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::kernel_work::SlotWork;
use sidelane_testkit::device::products_beside::{Beside, Burst, Products};
use sidelane_testkit::device::timer::Transfer;
use sidelane_testkit::device::whole;

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
    let products =
        Products::new(&gpu, task.size, Priority::Normal, &packages::folders(gpu.context.driver()))?;
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
    for ((what, shows), beside) in work.iter().zip(beside(checks, &products, &bursts)?) {
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
    let products =
        Products::new(&gpu, task.size, Priority::Highest, &packages::folders(gpu.context.driver()))?;
    let bursts = limits.map(|limit| {
        let rows = &rows;
        move |traffic: &Stream| rows.burst(traffic, limit)
    });
    let bursts = bursts.each_ref().map(|burst| burst as Burst<'_>);
    for (blocks, beside) in limits.into_iter().zip(beside(checks, &products, &bursts)?) {
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

/// Tells the time of a product alone, and gives the rounds next to each of these bursts.
fn beside(
    checks: &mut Checks,
    products: &Products<'_>,
    bursts: &[Burst<'_>],
) -> Result<Vec<Beside>, CliError> {
    let (alone, all) = products.beside(bursts)?;
    let about = About::new("products alone", "what the next rows are compared with");
    let found = products.describe(alone.middle(|round| round.product_us));
    checks.measured(about, &alone.samples(), found)?;
    Ok(all)
}

/// How long one small transfer takes where SMs have nothing to do, and where products run.
fn latency(gpu: &Gpu, products: &Products<'_>, checks: &mut Checks) -> Result<(), CliError> {
    let stream = gpu.stream()?;
    let mut transfer = Transfer::new(gpu, &stream)?;
    let mut alone = Vec::new();
    for _ in 0..=gpu.few(200, 20) {
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
