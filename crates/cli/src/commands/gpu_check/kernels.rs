//! Kernels against their definitions, on random and special values: sums and gates to the bit,
//! products of whole numbers exactly, those of experts within the bounds of their roundings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::NoUninit;
use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use sidelane::device::{
    Addresses, AuditKernels, Blas, ChoiceFault, DeviceRange, GateArgs, Kernels, LayerKernels, PlaceArgs,
    PlanArgs, Product, RankSumArgs, RunArgs, SortArgs, Stream, SumArgs,
};
use sidelane::gate::{Gate, GateInput, Preset, Routing};
use sidelane::plan::{
    Bins, ExpertMap, ReceiveMode, RowLayout, RowMetadata, RowRun, SlotShape, SortedRouting, SumOrder,
};
use sidelane::topology::NodeMap;
use sidelane_testkit::device::whole;
use sidelane_verify::reference::Real;

use super::Task;
use super::expert_products::{ExpertProducts, Sizes, WAYS};
use super::gpu::{self, Gpu, equal, random, random_bytes, same};
use super::report::{About, Checks, State};
use crate::error::CliError;

/// Zeros, denormals, ties of the two-byte types, extremes, infinities, NaN.
const SPECIAL: [u32; 16] = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x3f808000, 0x3f818000,
    0x477ff000, 0x33000000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0xffc01234,
];

const RANKS: u32 = 8;
const TOKENS: u32 = 96;
/// Of a rank that sums a token's rows.
const EXPERTS: u32 = 32;

/// Products of experts, some of which have fewer rows.
const SIZES: Sizes = Sizes { experts: 8, rows: 64, depth: 512, columns: 256 };

/// Tokens, experts and choices of a plan.
const PLANNED: (u32, u32, u32) = (4096, 256, 8);

const GATES: [(Preset, u32, u32); 3] =
    [(Preset::Mixtral, 8, 2), (Preset::Qwen3, 128, 8), (Preset::DeepseekV3, 256, 8)];

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = Gpu::open(task)?;
    let (kernels, audit) = (Kernels::load(&gpu.context)?, AuditKernels::load(&gpu.context)?);
    let bench = Bench { stream: Arc::new(gpu.stream()?), kernels, audit, gpu };
    let driver = bench.gpu.context.driver();
    bench.check_sum::<f32, f32>(checks)?;
    bench.check_sum::<bf16, bf16>(checks)?;
    bench.check_sum::<f16, f16>(checks)?;
    bench.check_sum::<f32, bf16>(checks)?;
    bench.check_sum::<f32, f16>(checks)?;
    bench.check_rank_sums::<f32>(checks)?;
    bench.check_rank_sums::<bf16>(checks)?;
    let about = |what, shows| About::new(what, shows);
    checks.check(about("gate", "experts and weights are those of the host: to the bit"), || bench.gate())?;
    checks.check(
        about("plan of choices", "order, places and metadata are the host's: to the bit"),
        || {
            RowLayout::ALL.iter().try_for_each(|&layout| bench.plan(layout))?;
            Ok(format!("both layouts, {RANKS} ranks, {} experts", PLANNED.1))
        },
    )?;
    checks.check(about("copy by SMs", "the copying kernel of the audit copies the right bytes"), || {
        bench.copy()
    })?;
    checks.check(about("product", "our product is right: whole numbers, exactly"), || {
        bench.product("ours", |product| bench.audit.product(&bench.stream, product))
    })?;
    let about = about("product of cuBLAS", "cuBLAS is called as it must be");
    match Blas::load(&bench.stream, &gpu::packages(driver)) {
        Ok(blas) => {
            checks.check(about, || bench.product(blas.name(), |product| blas.product(product)))?;
        }
        Err(error) => checks.tell(about, State::Skipped, format!("{error}: our own product is used"))?,
    }
    let sizes = bench.gpu.task.few(SIZES, Sizes { rows: 24, depth: 64, columns: 48, ..SIZES });
    let products = ExpertProducts::new(&bench.gpu, sizes)?;
    for way in WAYS {
        let what = format!("products of experts, {}", way.name());
        let about = About::new(&what, "cuBLAS's are within the bound of their roundings");
        match &products {
            Some(products) => checks.check(about, || products.check(way)).map(drop)?,
            None => checks.tell(about, State::Skipped, "no cuBLAS was found".to_owned())?,
        }
    }
    Ok(())
}

struct Bench {
    gpu: Gpu,
    stream: Arc<Stream>,
    kernels: Kernels,
    audit: AuditKernels,
}

impl Bench {
    fn put(&self, content: &[impl NoUninit]) -> Result<DeviceRange, CliError> {
        self.gpu.put(&self.stream, content)
    }

    fn check_sum<R: Real, O: Real>(&self, checks: &mut Checks) -> Result<(), CliError> {
        let what = format!("sum {} to {}", R::DTYPE, O::DTYPE);
        let about = About::new(&what, "in f32, ranks ascending, one rounding: to the bit");
        checks.check(about, || self.sum::<R, O>()).map(drop)
    }

    fn sum<R: Real, O: Real>(&self) -> Result<String, CliError> {
        let columns = self.gpu.task.few(7168, 520);
        let shape = SlotShape::new(TOKENS, 1, u64::from(columns) * O::DTYPE.size() as u64)?;
        let mut random = random(R::DTYPE as u64 * 16 + O::DTYPE as u64);
        let homes: Vec<Vec<R>> =
            (0..RANKS).map(|_| (0..TOKENS * columns).map(|_| any(&mut random)).collect()).collect();
        // Some tokens have rows at all ranks, some at none.
        let places: Vec<i32> = (0..TOKENS * RANKS)
            .map(|_| if random.random_ratio(1, 4) { -1 } else { random.random_range(0..TOKENS as i32) })
            .collect();
        let there = homes.iter().map(|home| self.put(home)).collect::<Result<Vec<_>, _>>()?;
        let places_there = self.put(&places)?;
        let spans = there.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
        let table = self.gpu.memory(u64::from(RANKS) * 8)?;
        let homes_at = Addresses::new(&self.stream, &table, &spans)?;
        let status = self.gpu.pinned(8)?;
        let out = self.gpu.memory(u64::from(TOKENS * columns) * O::DTYPE.size() as u64)?;
        let sum = SumArgs {
            shape,
            tokens: TOKENS,
            columns,
            rows: R::DTYPE,
            dtype: O::DTYPE,
            homes: &homes_at,
            places: whole(&places_there)?,
            status: status.range().word(0)?,
            out: whole(&out)?,
        };
        self.kernels.sum(&self.stream, &sum)?;
        let seen = self.gpu.read(&self.stream, &out)?;
        let mut expected: Vec<O> = Vec::new();
        for places in places.chunks_exact(RANKS as usize) {
            expected.extend((0..columns).map(|column| {
                let mut sum = 0_f32;
                for (home, &place) in homes.iter().zip(places).filter(|&(_, &place)| place >= 0) {
                    sum += home[(place as u32 * columns + column) as usize].into();
                }
                // One rounding, to nearest even; every NaN is the one quiet NaN.
                O::of(if sum.is_nan() { f32::NAN } else { sum })
            }));
        }
        same("sums", &seen, &expected)?;
        equal("the status word", status.word(0)?.load(Ordering::Acquire), 0)?;
        Ok(format!("{} sums of up to {RANKS} rows, special values among them", TOKENS * columns))
    }

    fn check_rank_sums<E: Real>(&self, checks: &mut Checks) -> Result<(), CliError> {
        let what = format!("rank sums of {}", E::DTYPE);
        let about =
            About::new(&what, "in f32, in the order of experts, times weights, one rounding: to the bit");
        checks.check(about, || self.rank_sums::<E>()).map(drop)
    }

    fn rank_sums<E: Real>(&self) -> Result<String, CliError> {
        let columns = self.gpu.task.few(7168, 520);
        let mut random = random(64 + E::DTYPE as u64);
        let (mut numbers, mut used, mut padded) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..EXPERTS {
            let first = numbers.len();
            // Every sum has a row of the first expert.
            numbers.extend((0..TOKENS as i32).filter(|_| first == 0 || random.random_ratio(1, 8)));
            used.push((numbers.len() - first) as i64);
            numbers.resize(numbers.len().next_multiple_of(8), -1);
            padded.push((numbers.len() - first) as i64);
        }
        // As if the experts' ids descended.
        let order: Vec<u32> = (0..EXPERTS).rev().collect();
        let n_rows = numbers.len() as u32;
        let rows: Vec<E> = (0..n_rows * columns).map(|_| any(&mut random)).collect();
        let weights: Vec<f32> = (0..n_rows).map(|_| random.random_range(-2.0..2.0)).collect();
        let there = self.put(&rows)?;
        let numbers_there = self.put(&numbers)?;
        let counts = self.put(&[used, padded].concat())?;
        let order = self.put(&order)?;
        let weights_there = self.put(&weights)?;
        let out = self.gpu.memory(u64::from(TOKENS * columns) * E::DTYPE.size() as u64)?;
        let args = RankSumArgs {
            sums: TOKENS,
            columns,
            dtype: E::DTYPE,
            n_rows,
            rows: whole(&there)?,
            numbers: whole(&numbers_there)?,
            n_experts: EXPERTS,
            counts: whole(&counts)?,
            order: whole(&order)?,
            weights: Some(whole(&weights_there)?),
            out: whole(&out)?,
        };
        self.kernels.rank_sums(&self.stream, &args)?;
        let seen = self.gpu.read(&self.stream, &out)?;
        let mut expected: Vec<E> = Vec::new();
        for sum in 0..TOKENS as i32 {
            let of_sum: Vec<usize> = (0..numbers.len()).rev().filter(|&row| numbers[row] == sum).collect();
            expected.extend((0..columns as usize).map(|column| {
                let mut total = 0_f32;
                for &row in &of_sum {
                    let value: f32 = rows[row * columns as usize + column].into();
                    total += value * weights[row];
                }
                E::of(if total.is_nan() { f32::NAN } else { total })
            }));
        }
        same("sums by rank", &seen, &expected)?;
        Ok(format!("{TOKENS} sums of {n_rows} rows of {EXPERTS} experts, special values among them"))
    }

    fn gate(&self) -> Result<String, CliError> {
        let tokens = self.gpu.task.few(4096, 64);
        let kernels = LayerKernels::load(&self.gpu.context)?;
        let mut random = random(6);
        for (preset, experts, top_k) in GATES {
            let config = preset.config(experts, top_k)?;
            let mut host = Gate::new(config.clone())?;
            let logits: Vec<f32> = (0..tokens * experts).map(|_| random.random_range(-8.0..8.0)).collect();
            let expected = host.route(&GateInput { logits: &logits, ..GateInput::default() })?;
            let there = self.put(&logits)?;
            let choices = u64::from(tokens * top_k) * 4;
            let (ids, weights) = (self.gpu.memory(choices)?, self.gpu.memory(choices)?);
            let status = self.gpu.pinned(8)?;
            let args = GateArgs {
                tokens,
                logits: whole(&there)?,
                bias: None,
                used: None,
                experts: whole(&ids)?,
                weights: whole(&weights)?,
                status: status.range().word(0)?,
            };
            kernels.gate(&self.stream, &config, &args)?;
            let seen = |range| self.gpu.read(&self.stream, range);
            let of = |what| format!("{what} of {preset}");
            same(of("experts"), &seen(&ids)?, expected.experts())?;
            same(of("weights"), &seen(&weights)?, expected.weights())?;
        }
        Ok(format!("{tokens} tokens, {}", GATES.map(|(preset, ..)| preset.name()).join(", ")))
    }

    /// The plan of rank 1, and where its own rows land if rows of one rank before it land there.
    fn plan(&self, layout: RowLayout) -> Result<(), CliError> {
        let (tokens, experts, top_k) = PLANNED;
        let (tokens, me, once) = (self.gpu.task.few(tokens, 64), 1, layout.is_per_rank());
        let map = ExpertMap::contiguous(experts, RANKS)?;
        let nodes = NodeMap::from_labels(&[0; RANKS as usize]);
        let bins = Bins::of_layout(layout, &map, SumOrder::Expert, &nodes);
        let mut random = random(8 + u64::from(once));
        let ids: Vec<i32> = (0..tokens)
            .flat_map(|_| {
                // Odd steps through a power of two: the choices of a token differ.
                let (first, step) = (random.random_range(0..experts), random.random_range(0..8) * 2 + 1);
                (0..top_k).map(move |k| ((first + k * step) % experts) as i32)
            })
            .map(|id| if id % 11 == 5 { -1 } else { id })
            .collect();
        let weights: Vec<f32> = ids.iter().map(|_| random.random_range(0.0..1.0)).collect();
        let (notes, mut sorted) =
            (RowMetadata::of(layout, ReceiveMode::Exact, false), SortedRouting::default());
        sorted.fill(&map, &bins, notes, me, &Routing::new(top_k, &ids[..], &weights[..])?)?;
        let of_experts = |of: &dyn Fn(u32) -> u32| (0..experts).map(of).collect::<Vec<u32>>();
        let bin_of = of_experts(&|expert| if once { map.rank_of(expert) } else { expert });
        let local_of = of_experts(&|expert| expert - map.slots_of(map.rank_of(expert)).start);
        let place_of: Vec<u32> = (0..bins.count()).collect();
        let put = |words: &[u32]| self.put(words);
        let [bin_of, local_of, place_of] = [put(&bin_of)?, put(&local_of)?, put(&place_of)?];
        let [experts_there, weights_there] = [self.put(&ids)?, self.put(&weights)?];
        let (choices, words) = (ids.len() as u32, u64::from(notes.words(top_k)));
        let list = |each: u64| self.gpu.memory(u64::from(choices) * 4 * each);
        let [order, rows, places, noted] = [list(1)?, list(1)?, list(1)?, list(words)?];
        let counted = |each: u64| self.gpu.memory(u64::from(bins.count()) * 4 * each);
        let [counts, faults] = [counted(1)?, counted(ChoiceFault::WORDS as u64)?];
        let sort = SortArgs {
            experts: whole(&experts_there)?,
            choices,
            top_k,
            bin_of: whole(&bin_of)?,
            n_experts: experts,
            bins: bins.count(),
            once,
            order: whole(&order)?,
        };
        let args = PlanArgs {
            sort,
            weights: whole(&weights_there)?,
            local_of: whole(&local_of)?,
            place_of: whole(&place_of)?,
            rows: whole(&rows)?,
            places: whole(&places)?,
            notes: whole(&noted)?,
            kept: None,
            counts: whole(&counts)?,
            faults: whole(&faults)?,
        };
        self.kernels.plan_choices(&self.stream, &args)?;
        let entries = sorted.entries() * 4;
        let seen = |range| self.gpu.read(&self.stream, range);
        same("rows of bins", &seen(&counts)?, &sorted.counts)?;
        same("tokens of rows", &seen(&order)?[..entries], &sorted.tokens)?;
        let metadata = &seen(&noted)?[..entries * words as usize];
        same("metadata of rows", metadata, &sorted.notes)?;
        let (mut starts, mut own, mut landed) = (sorted.starts.clone(), Vec::new(), 0);
        for bin in bins.of(me) {
            let (first, count) = (sorted.starts[bin as usize], sorted.counts[bin as usize]);
            starts[bin as usize] = choices + landed + 1;
            own.push(RowRun { to_row: landed + 1, first, count, pad: 0 });
            landed += count + 1;
        }
        own.retain(|run| run.count > 0);
        let mut listed = Vec::new();
        let count = RunArgs::lay_out(&own, &mut listed);
        let (listed, home) = (put(&listed)?, self.gpu.memory(u64::from(landed) * words * 4)?);
        let runs =
            RunArgs { runs: whole(&listed)?, count: own.len() as u32, entries: choices, places: landed };
        let place = PlaceArgs {
            choices,
            rows: whole(&rows)?,
            behind: choices,
            words: words as u32,
            from: whole(&noted)?,
            notes: whole(&home)?,
            own: count,
            runs,
        };
        self.kernels.place_choices(&self.stream, &place)?;
        let (mut expected_rows, mut expected_places) = (Vec::new(), Vec::new());
        sorted.places(&bins, top_k, &starts, [&mut expected_rows, &mut expected_places]);
        same("rows of choices", &seen(&rows)?, &expected_rows)?;
        same("places of choices", &seen(&places)?, &expected_places)?;
        let home = seen(&home)?;
        for RowRun { to_row, first, count, .. } in own {
            let [to, from, len] = [to_row, first, count].map(|rows| rows as usize * words as usize);
            let expected = &sorted.notes[from..from + len];
            same("metadata of own rows", &home[to * 4..][..len * 4], expected)?;
        }
        Ok(())
    }

    fn copy(&self) -> Result<String, CliError> {
        let bytes = random_bytes(5, (1 << 20) + 48);
        let (from, to) = (self.put(&bytes)?, self.gpu.memory(bytes.len() as u64)?);
        self.audit.copy(&self.stream, whole(&to)?, whole(&from)?, None)?;
        same("a copy", &self.gpu.read(&self.stream, &to)?, &bytes)?;
        Ok(format!("{} bytes", bytes.len()))
    }

    /// Products of whole numbers from -8 to 8, whose sums `f32` holds exactly, and some of them
    /// bf16 not.
    fn product(
        &self,
        by: &str,
        enqueue: impl FnOnce(&Product<'_>) -> Result<(), sidelane::error::DeviceError>,
    ) -> Result<String, CliError> {
        let size = self.gpu.task.few(512, 128);
        let mut random = random(size.into());
        let mut matrix =
            || (0..size * size).map(|_| random.random_range(-8..=8) as f32).collect::<Vec<f32>>();
        let (a, b) = (matrix(), matrix());
        let bytes = |matrix: &[f32]| -> Vec<u8> {
            matrix.iter().flat_map(|&value| bf16::from_f32(value).to_ne_bytes()).collect()
        };
        let (a_there, b_there) = (self.put(&bytes(&a))?, self.put(&bytes(&b))?);
        let out = self.gpu.memory(Product::bytes(size))?;
        enqueue(&Product { size, a: whole(&a_there)?, b: whole(&b_there)?, out: whole(&out)? })?;
        self.gpu.finish(&self.stream, "a kernel")?;
        let n = size as usize;
        let mut expected = Vec::with_capacity(n * n);
        for row in a.chunks_exact(n) {
            for column in b.chunks_exact(n) {
                expected.push(row.iter().zip(column).map(|(a, b)| a * b).sum::<f32>());
            }
        }
        same("a product", &self.gpu.read(&self.stream, &out)?, &bytes(&expected))?;
        Ok(format!("{size} x {size}, by {by}"))
    }
}

/// An element: special, any bits, or one whose sums round and tie.
fn any<E: Real>(random: &mut ChaCha8Rng) -> E {
    let bits: u64 = random.random();
    E::of(match bits >> 60 {
        0 | 1 => f32::from_bits(SPECIAL[(bits % SPECIAL.len() as u64) as usize]),
        2 | 3 => f32::from_bits(bits as u32),
        _ => (bits as i32 >> (bits >> 40 & 31)) as f32 / 1024.0,
    })
}
