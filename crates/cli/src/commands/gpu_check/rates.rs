//! Rates: our kernels alone, at the size of a training step, in bytes read and written.
//!
//! The kernels are those of slots and of exact sizes in the test kit's
//! [list](sidelane_testkit::device::kernel_work), and
//! [products of cuBLAS](sidelane_testkit::device::expert_products) for experts.
//!
//! The rate of a kernel that moves rows says how far it is from the memory's. Kernels that read
//! choices alone say how long a dispatch plans. A kernel of one row says what each of them takes
//! beside its work.

use sidelane::Dtype;
use sidelane::device::Stream;
use sidelane::error::DeviceError;
use sidelane_testkit::device::expert_products::{ExpertProducts, Sizes};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::kernel_work::{ExactWork, RANKS, SlotWork, ranks_of};
use sidelane_testkit::device::kernels::products::Way;
use sidelane_testkit::device::timer::Timer;
use sidelane_testkit::timing::stats::summary;

use super::report::{About, Checks, State};
use super::{Task, packages};
use crate::error::CliError;

/// Questions of the rows that [`super::calibrate`] reads.
pub const MEGABYTE: &str = "a MB read and written by a permutation of rows";
pub const SORTED_CHOICE: &str = "a choice of many, sorted by expert";
pub const SMALL_KERNEL: &str = "a kernel of one row, in a row of 64";
/// Kernels of one row, one behind the other.
const SMALL: usize = 64;

/// Those of 4,096 tokens and top-8 of OLMoE's sizes.
const EXPERT_SIZES: Sizes = Sizes { experts: 64, rows: 512, depth: 2048, columns: 1024 };

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = task.gpu()?;
    let rows = SlotWork::new(&gpu)?;
    let (row, tokens) = (rows.row_bytes(), u64::from(rows.tokens));
    let packed = row * (0..rows.tokens).map(ranks_of).sum::<u64>();
    let [all, slots] = [row * tokens, row * tokens * u64::from(RANKS)];
    let (kernels, stream) = (&rows.kernels, &rows.stream);
    let mut rates = Rates { timer: Timer::new(&gpu)?, gpu: &gpu, stream, told: rows.describe(), checks };
    // All of a slot is written, whether it is used or not.
    rates.rate("pack into slots", Some(all + slots), || rows.pack(kernels, stream))?;
    rates.rate("regroup slots", Some(2 * slots), || rows.regroup(kernels, stream))?;
    rates.rate("sum of slots", Some(packed + all), || rows.sum(kernels, stream))?;

    let exact = ExactWork::new(&rows, &gpu)?;
    let choices = row * u64::from(exact.choices);
    rates.rate("count choices", None, || exact.count(&rows))?;
    let sorted = rates.rate("sort choices by expert", None, || exact.sort(&rows, false))?;
    let shows = "the share of one choice";
    rates.share(About::new(SORTED_CHOICE, shows), &sorted, f64::from(exact.choices))?;
    rates.rate("sort choices by rank", None, || exact.sort(&rows, true))?;
    // A token's later rows are read from the cache.
    let permuted = rates.rate("permute rows", Some(all + choices), || exact.permute(&rows, exact.choices))?;
    let megabytes = (all + choices) as f64 / 1e6;
    rates.share(About::new(MEGABYTE, "the share of a million bytes"), &permuted, megabytes)?;
    let small = rates.samples(SMALL, || exact.permute(&rows, 1))?;
    let shows = "what a kernel takes beside its work, where kernels follow each other";
    rates.share(About::new(SMALL_KERNEL, shows), &small, 1.0)?;
    rates.rate("sum of choices", Some(choices + all), || exact.sum(&rows))?;
    rows.check_status(&gpu)?;
    drop((exact, rows));
    products(&gpu, checks)
}

/// Rows of a layer's experts times their matrices, and the gradient of these.
fn products(gpu: &Gpu, checks: &mut Checks) -> Result<(), CliError> {
    let shows = "how long the experts of a layer take";
    let sizes = gpu.few(EXPERT_SIZES, Sizes { experts: 4, rows: 16, depth: 64, columns: 32 });
    let folders = packages::folders(gpu.context.driver());
    let Some(products) = ExpertProducts::new(gpu, sizes, &folders)? else {
        let about = About::new("products of experts", shows);
        return checks.tell(about, State::Skipped, "no cuBLAS was found".to_owned());
    };
    let (mut timer, rounds) = (Timer::new(gpu)?, (gpu.few(20, 3), 1));
    for way in Way::ALL {
        for (what, gradient) in [("products of experts", false), ("gradients of experts", true)] {
            // Gradients are added up further, so they are f32.
            if gradient && way == Way::Bf16(Dtype::Bf16) {
                continue;
            }
            let enqueue = || if gradient { products.gradient(way) } else { products.rows(way) };
            // Where kernels are loaded lazily the first product waits for the device, which would
            // wait for the timer's gate.
            enqueue()?;
            gpu.finish(products.stream(), "the first product")?;
            let samples = timer.time(gpu, products.stream(), rounds, enqueue)?.device;
            let tflops = sizes.operations() / summary(&samples).p50_us.max(1e-6) / 1e6;
            let found = format!("{tflops:.0} TFLOP/s; {}, by {}", sizes.describe(), products.name());
            let what = format!("{what}, {}", way.name());
            checks.measured(About::new(&what, shows), &samples, found)?;
        }
    }
    Ok(())
}

struct Rates<'a> {
    timer: Timer,
    gpu: &'a Gpu,
    stream: &'a Stream,
    told: String,
    checks: &'a mut Checks,
}

impl Rates<'_> {
    /// Microseconds of a kernel on the device, of so many that follow each other.
    fn samples(
        &mut self,
        kernels: usize,
        mut launch: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<Vec<f64>, CliError> {
        let rounds = (self.gpu.few(20, 3), kernels);
        let all = || (0..kernels).try_for_each(|_| launch());
        Ok(self.timer.time(self.gpu, self.stream, rounds, all)?.device)
    }

    fn rate(
        &mut self,
        what: &str,
        bytes: Option<u64>,
        launch: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<Vec<f64>, CliError> {
        let samples = self.samples(1, launch)?;
        let tera = |bytes| bytes as f64 / summary(&samples).p50_us.max(1e-6) / 1e6;
        let (shows, found) = match bytes {
            Some(bytes) => (
                "how far a kernel is from the memory's rate",
                format!("{:.2} TB/s; {}", tera(bytes), self.told),
            ),
            None => ("how long a dispatch plans on the device", self.told.clone()),
        };
        self.checks.measured(About::new(what, shows), &samples, found)?;
        Ok(samples)
    }

    /// Tells the share of one of so many.
    fn share(&mut self, about: About<'_>, samples: &[f64], of: f64) -> Result<(), CliError> {
        let shares: Vec<f64> = samples.iter().map(|us| us / of).collect();
        self.checks.measured(about, &shares, "")
    }
}
