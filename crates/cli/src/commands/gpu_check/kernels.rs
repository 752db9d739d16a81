//! Kernels against their definitions, on random and special values: sums and gates to the bit,
//! products of whole numbers exactly, those of experts within the bounds of their roundings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use sidelane::device::{
    Addresses, AuditKernels, Blas, DeviceRange, GateArgs, Kernels, LayerKernels, Product, RankSumArgs,
    Stream, SumArgs,
};
use sidelane::gate::{Gate, GateInput, Preset};
use sidelane::plan::SlotShape;
use sidelane_testkit::device::whole;
use sidelane_verify::reference::Real;

use super::Task;
use super::bench::{Gpu, equal, random, random_bytes, same};
use super::expert_products::{ExpertProducts, Sizes, WAYS};
use super::report::{About, Checks, State};
use super::wheels;
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
    checks.check(about("copy by SMs", "the copying kernel of the audit copies the right bytes"), || {
        bench.copy()
    })?;
    checks.check(about("product", "our product is right: whole numbers, exactly"), || {
        bench.product("ours", |product| bench.audit.product(&bench.stream, product))
    })?;
    let about = about("product of cuBLAS", "cuBLAS is called as it must be");
    match Blas::load(&bench.stream, &wheels::folders(driver)) {
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
    fn put(&self, bytes: &[u8]) -> Result<DeviceRange, CliError> {
        self.gpu.put(&self.stream, bytes)
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
        let there =
            homes.iter().map(|home| self.put(bytemuck::cast_slice(home))).collect::<Result<Vec<_>, _>>()?;
        let places_there = self.put(bytemuck::cast_slice(&places))?;
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
        same("sums", &seen, bytemuck::cast_slice(&expected))?;
        equal("the status word", status.word(0)?.load(Ordering::Acquire), 0)?;
        Ok(format!("{} sums of up to {RANKS} rows, special values among them", TOKENS * columns))
    }

    fn check_rank_sums<E: Real>(&self, checks: &mut Checks) -> Result<(), CliError> {
        let what = format!("rank sums of {}", E::DTYPE);
        let about = About::new(&what, "in f32, experts ascending, times weights, one rounding: to the bit");
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
        let n_rows = numbers.len() as u32;
        let rows: Vec<E> = (0..n_rows * columns).map(|_| any(&mut random)).collect();
        let weights: Vec<f32> = (0..n_rows).map(|_| random.random_range(-2.0..2.0)).collect();
        let there = self.put(bytemuck::cast_slice(&rows))?;
        let numbers_there = self.put(bytemuck::cast_slice(&numbers))?;
        let counts = self.put(bytemuck::cast_slice(&[used, padded].concat()))?;
        let weights_there = self.put(bytemuck::cast_slice(&weights))?;
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
            weights: Some(whole(&weights_there)?),
            out: whole(&out)?,
        };
        self.kernels.rank_sums(&self.stream, &args)?;
        let seen = self.gpu.read(&self.stream, &out)?;
        let mut expected: Vec<E> = Vec::new();
        for sum in 0..TOKENS as i32 {
            let of_sum: Vec<usize> = (0..numbers.len()).filter(|&row| numbers[row] == sum).collect();
            expected.extend((0..columns as usize).map(|column| {
                let mut total = 0_f32;
                for &row in &of_sum {
                    let value: f32 = rows[row * columns as usize + column].into();
                    total += value * weights[row];
                }
                E::of(if total.is_nan() { f32::NAN } else { total })
            }));
        }
        same("sums by rank", &seen, bytemuck::cast_slice(&expected))?;
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
            let there = self.put(bytemuck::cast_slice(&logits))?;
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
            same(of("experts"), &seen(&ids)?, bytemuck::cast_slice(expected.experts()))?;
            same(of("weights"), &seen(&weights)?, bytemuck::cast_slice(expected.weights()))?;
        }
        Ok(format!("{tokens} tokens, {}", GATES.map(|(preset, ..)| preset.name()).join(", ")))
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
