//! Rates: our kernels alone, at the size of a training step, in bytes read and written.
//!
//! ```text
//!   slots         x --pack--> slots .. --regroup--> rows .. --sum--> out
//!   exact sizes   ids --counts, sort--> order     x --permute--> rows .. --sum of choices--> out
//! ```
//!
//! The rate of a kernel that moves rows says how far it is from the memory's. Kernels that read
//! choices alone say how long a dispatch plans.

use sidelane::Dtype;
use sidelane::device::{CountArgs, DeviceRange, PermuteArgs, SortArgs, Stream, SumChoices};
use sidelane::dtype::PartialDtype;
use sidelane::error::DeviceError;
use sidelane_testkit::device::whole;

use super::Task;
use super::bench::{self, Gpu, Timer};
use super::blocks::{RANKS, Rows, TOP_K, expert_of, ranks_of};
use super::report::{About, Checks};
use crate::error::CliError;
use crate::stats::summary;

/// Experts of all ranks where sizes are exact.
const EXPERTS: u32 = 256;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = Gpu::open(task)?;
    let rows = Rows::new(&gpu)?;
    let (row, tokens) = (rows.shape.row_bytes(), u64::from(rows.tokens));
    let packed = row * (0..rows.tokens).map(ranks_of).sum::<u64>();
    let [all, slots] = [row * tokens, row * tokens * u64::from(RANKS)];
    let (kernels, stream) = (&rows.kernels, &rows.stream);
    let mut rates = Rates { timer: Timer::new(&gpu)?, gpu: &gpu, stream, told: rows.told(), checks };
    // All of a slot is written, whether it is used or not.
    rates.rate("pack into slots", Some(all + slots), || rows.pack(kernels, stream))?;
    rates.rate("regroup slots", Some(2 * slots), || rows.regroup(kernels, stream))?;
    rates.rate("sum of slots", Some(packed + all), || rows.sum(kernels, stream))?;

    let exact = Exact::new(&rows, &gpu)?;
    let choices = row * u64::from(exact.choices);
    rates.rate("count choices", None, || exact.count(&rows))?;
    rates.rate("sort choices by expert", None, || exact.sort(&rows, false))?;
    rates.rate("sort choices by rank", None, || exact.sort(&rows, true))?;
    // A token's later rows are read from the cache.
    rates.rate("permute rows", Some(all + choices), || exact.permute(&rows))?;
    rates.rate("sum of choices", Some(choices + all), || exact.sum(&rows))?;
    // After a fault kernels move nothing, and look fast.
    let status = gpu.read(stream, &rows.words)?[8..12].iter().map(|&byte| u64::from(byte)).sum();
    bench::equal("the status of all kernels", status, 0)
}

struct Rates<'a> {
    timer: Timer,
    gpu: &'a Gpu,
    stream: &'a Stream,
    told: String,
    checks: &'a mut Checks,
}

impl Rates<'_> {
    fn rate(
        &mut self,
        what: &str,
        bytes: Option<u64>,
        launch: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), CliError> {
        let rounds = (self.gpu.task.few(20, 3), 1);
        let samples = self.timer.time(self.gpu, self.stream, rounds, launch)?;
        let tera = |bytes| bytes as f64 / summary(&samples.device).p50_us.max(1e-6) / 1e6;
        let (shows, found) = match bytes {
            Some(bytes) => (
                "how far a kernel is from the memory's rate",
                format!("{:.2} TB/s; {}", tera(bytes), self.told),
            ),
            None => ("how long a dispatch plans on the device", self.told.clone()),
        };
        self.checks.measured(About::new(what, shows), &samples.device, found)
    }
}

struct Exact {
    choices: u32,
    ids: DeviceRange,
    own_bin: DeviceRange,
    rank_of: DeviceRange,
    per_expert: DeviceRange,
    per_rank: DeviceRange,
    order: DeviceRange,
    from: DeviceRange,
    to: DeviceRange,
    rows: DeviceRange,
}

impl Exact {
    fn new(rows: &Rows, gpu: &Gpu) -> Result<Self, CliError> {
        let choices = rows.tokens * TOP_K;
        let words = |count: u32, word: &dyn Fn(u32) -> i32| {
            gpu.put(&rows.stream, bytemuck::cast_slice(&(0..count).map(word).collect::<Vec<i32>>()))
        };
        // Each choice of a token is of another expert, since steps are odd.
        let expert = |at: u32| expert_of(at / TOP_K, at % TOP_K, EXPERTS);
        // Choices lie by expert, as those that landed do: any row of each token, once.
        let mut by_expert: Vec<u32> = (0..choices).collect();
        by_expert.sort_by_key(|&at| expert(at));
        let mut place = vec![0; choices as usize];
        by_expert.iter().zip(0..).for_each(|(&at, row)| place[at as usize] = row);
        Ok(Exact {
            choices,
            ids: words(choices, &|at| expert(at) as i32)?,
            own_bin: words(EXPERTS, &|expert| expert as i32)?,
            rank_of: words(EXPERTS, &|expert| (expert / (EXPERTS / RANKS)) as i32)?,
            per_expert: gpu.memory(u64::from(EXPERTS) * 4)?,
            per_rank: gpu.memory(u64::from(RANKS) * 4)?,
            order: gpu.memory(u64::from(choices) * 4)?,
            from: words(choices, &|row| (by_expert[row as usize] / TOP_K) as i32)?,
            to: words(choices, &|at| place[at as usize])?,
            rows: gpu.memory(rows.shape.row_bytes() * u64::from(choices))?,
        })
    }

    fn count(&self, rows: &Rows) -> Result<(), DeviceError> {
        rows.kernels.counts(
            &rows.stream,
            &CountArgs {
                tokens: rows.tokens,
                top_k: TOP_K,
                n_experts: EXPERTS,
                ranks: RANKS,
                experts: whole(&self.ids)?,
                rank_of: whole(&self.rank_of)?,
                per_expert: whole(&self.per_expert)?,
                per_rank: whole(&self.per_rank)?,
                status: rows.status()?,
            },
        )
    }

    fn sort(&self, rows: &Rows, by_rank: bool) -> Result<(), DeviceError> {
        rows.kernels.sort_choices(
            &rows.stream,
            &SortArgs {
                experts: whole(&self.ids)?,
                choices: self.choices,
                top_k: TOP_K,
                bin_of: whole(if by_rank { &self.rank_of } else { &self.own_bin })?,
                n_experts: EXPERTS,
                bins: if by_rank { RANKS } else { EXPERTS },
                once: by_rank,
                order: whole(&self.order)?,
            },
        )
    }

    fn permute(&self, rows: &Rows) -> Result<(), DeviceError> {
        rows.kernels.regroup(
            &rows.stream,
            &PermuteArgs {
                row_bytes: rows.shape.row_bytes(),
                sources: rows.tokens,
                rows: self.choices,
                from: whole(&rows.x)?,
                index: whole(&self.from)?,
                out: whole(&self.rows)?,
                status: rows.status()?,
            },
        )
    }

    fn sum(&self, rows: &Rows) -> Result<(), DeviceError> {
        rows.kernels.sum_choices(
            &rows.stream,
            &SumChoices {
                tokens: rows.tokens,
                top_k: TOP_K,
                columns: rows.hidden,
                dtype: Dtype::Bf16,
                wire: PartialDtype::F32,
                n_rows: self.choices,
                rows: whole(&self.rows)?,
                index: whole(&self.to)?,
                n_experts: EXPERTS,
                experts: Some(whole(&self.ids)?),
                weights: None,
                group_of: None,
                status: rows.status()?,
                out: whole(&rows.out)?,
            },
        )
    }
}
