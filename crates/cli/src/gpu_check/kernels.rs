//! Kernels against their definitions, on random and special values: sums to the bit, products of
//! whole numbers exactly.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::{bf16, f16};
use sidelane::Dtype;
use sidelane::device::{
    Addresses, AuditKernels, Blas, Context, DeviceRange, Driver, Kernels, PinnedMemory, Product, Stream,
    SumArgs,
};
use sidelane::plan::SlotShape;

use super::Task;
use super::bench::{self, Random, equal, same};
use super::report::{About, Checks, State};
use super::wheels;
use crate::device::{allocate, finish, stream, whole};
use crate::error::CliError;

const TYPES: [(Dtype, Dtype); 5] = [
    (Dtype::F32, Dtype::F32),
    (Dtype::Bf16, Dtype::Bf16),
    (Dtype::F16, Dtype::F16),
    (Dtype::F32, Dtype::Bf16),
    (Dtype::F32, Dtype::F16),
];

/// Zeros, denormals, ties of the two-byte types, extremes, infinities, NaN.
const SPECIAL: [u32; 16] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3f80_8000,
    0x3f81_8000,
    0x477f_f000,
    0x3300_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7f80_0001,
    0xffc0_1234,
];

const RANKS: u32 = 8;
const TOKENS: u32 = 96;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let (kernels, audit) = (Kernels::load(&context)?, AuditKernels::load(&context)?);
    let bench = Bench { task, context: &context, stream: Arc::new(stream(&context)?), kernels, audit };
    for (rows, out) in TYPES {
        let what = format!("sum {} to {}", name(rows), name(out));
        let about = About::new(&what, "in f32, ranks ascending, one rounding: to the bit");
        checks.check(about, || bench.sum(rows, out))?;
    }
    let about = |what, shows| About::new(what, shows);
    checks.check(about("copy by SMs", "the yardstick copies what it is told"), || bench.copy())?;
    checks.check(about("product", "our product is right: whole numbers, exactly"), || {
        bench.product("ours", |product| bench.audit.product(&bench.stream, product))
    })?;
    let about = about("product of cuBLAS", "cuBLAS is called as it must be");
    match Blas::load(&bench.stream, &wheels::folders(context.driver())) {
        Ok(blas) => {
            checks.check(about, || bench.product(blas.name(), |product| blas.product(product)))?;
        }
        Err(error) => checks.tell(about, State::Skipped, format!("{error}: our own product is used"))?,
    }
    Ok(())
}

struct Bench<'a> {
    task: &'a Task,
    context: &'a Arc<Context>,
    stream: Arc<Stream>,
    kernels: Kernels,
    audit: AuditKernels,
}

impl Bench<'_> {
    fn finish(&self) -> Result<(), CliError> {
        finish(&self.stream, "a kernel", self.task.patience())
    }

    fn put(&self, bytes: &[u8]) -> Result<DeviceRange, CliError> {
        let range = allocate(self.context, bytes.len() as u64)?;
        bench::write(&self.stream, &range, bytes)?;
        Ok(range)
    }

    fn sum(&self, rows: Dtype, dtype: Dtype) -> Result<String, CliError> {
        let columns = self.task.few(7168, 520);
        let shape = SlotShape::new(TOKENS, 1, u64::from(columns) * dtype.size() as u64)?;
        let mut random = Random(rows as u64 * 16 + dtype as u64);
        let homes: Vec<Vec<u8>> = (0..RANKS)
            .map(|_| (0..TOKENS * columns).flat_map(|_| any(&mut random, rows)).collect())
            .collect();
        // Some tokens have rows at all ranks, some at none.
        let places: Vec<i32> = (0..TOKENS * RANKS)
            .map(|_| if random.next() & 3 == 0 { -1 } else { (random.next() % u64::from(TOKENS)) as i32 })
            .collect();
        let there = homes.iter().map(|home| self.put(home)).collect::<Result<Vec<_>, _>>()?;
        let places_there = self.put(bytemuck::cast_slice(&places))?;
        let spans = there.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
        let table = allocate(self.context, u64::from(RANKS) * 8)?;
        let homes_at = Addresses::new(&self.stream, &table, &spans)?;
        let status = PinnedMemory::new(self.context, 8)?;
        let out = allocate(self.context, u64::from(TOKENS * columns) * dtype.size() as u64)?;
        let sum = SumArgs {
            shape,
            tokens: TOKENS,
            columns,
            rows,
            dtype,
            homes: &homes_at,
            places: whole(&places_there)?,
            status: status.range().word(0)?,
            out: whole(&out)?,
        };
        self.kernels.sum(&self.stream, &sum)?;
        let seen = bench::read(&self.stream, &out, self.task.patience())?;
        let mut expected = Vec::new();
        for token in 0..TOKENS {
            let places = &places[(token * RANKS) as usize..][..RANKS as usize];
            for column in 0..columns {
                let mut sum = 0_f32;
                for (home, &place) in homes.iter().zip(places).filter(|&(_, &place)| place >= 0) {
                    sum += read(home, rows, (place as u32 * columns + column) as usize);
                }
                expected.extend(rounded(sum, dtype));
            }
        }
        same("sums", &seen, &expected)?;
        equal("the status word", status.word(0)?.load(Ordering::Acquire), 0)?;
        Ok(format!("{} sums of up to {RANKS} rows, special values among them", TOKENS * columns))
    }

    fn copy(&self) -> Result<String, CliError> {
        let bytes = Random(5).bytes((1 << 20) + 48);
        let (from, to) = (self.put(&bytes)?, allocate(self.context, bytes.len() as u64)?);
        self.audit.copy(&self.stream, whole(&to)?, whole(&from)?)?;
        same("a copy", &bench::read(&self.stream, &to, self.task.patience())?, &bytes)?;
        Ok(format!("{} bytes", bytes.len()))
    }

    /// Products of whole numbers from -8 to 8, whose sums `f32` holds exactly, and some of them
    /// bf16 not.
    fn product(
        &self,
        by: &str,
        enqueue: impl FnOnce(&Product<'_>) -> Result<(), sidelane::error::DeviceError>,
    ) -> Result<String, CliError> {
        let size = self.task.few(512, 128);
        let mut random = Random(size.into());
        let mut matrix = || (0..size * size).map(|_| (random.next() % 17) as f32 - 8.0).collect::<Vec<f32>>();
        let (a, b) = (matrix(), matrix());
        let bytes = |matrix: &[f32]| -> Vec<u8> {
            matrix.iter().flat_map(|&value| bf16::from_f32(value).to_ne_bytes()).collect()
        };
        let (a_there, b_there) = (self.put(&bytes(&a))?, self.put(&bytes(&b))?);
        let out = allocate(self.context, Product::bytes(size))?;
        enqueue(&Product { size, a: whole(&a_there)?, b: whole(&b_there)?, out: whole(&out)? })?;
        self.finish()?;
        let n = size as usize;
        let mut expected = Vec::with_capacity(n * n);
        for row in a.chunks_exact(n) {
            for column in b.chunks_exact(n) {
                expected.push(row.iter().zip(column).map(|(a, b)| a * b).sum::<f32>());
            }
        }
        same("a product", &bench::read(&self.stream, &out, self.task.patience())?, &bytes(&expected))?;
        Ok(format!("{size} x {size}, by {by}"))
    }
}

fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        _ => "f32",
    }
}

/// An element: special, any bits, or one whose sums round and tie.
fn any(random: &mut Random, dtype: Dtype) -> Vec<u8> {
    let bits = random.next();
    let value = match bits >> 60 {
        0 | 1 => f32::from_bits(SPECIAL[(bits % SPECIAL.len() as u64) as usize]),
        2 | 3 => f32::from_bits(bits as u32),
        _ => (bits as i32 >> (bits >> 40 & 31)) as f32 / 1024.0,
    };
    match dtype {
        Dtype::Bf16 => bf16::from_f32(value).to_ne_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
        _ => value.to_ne_bytes().to_vec(),
    }
}

fn read(row: &[u8], dtype: Dtype, at: usize) -> f32 {
    let two = || [row[at * 2], row[at * 2 + 1]];
    match dtype {
        Dtype::Bf16 => bf16::from_ne_bytes(two()).to_f32(),
        Dtype::F16 => f16::from_ne_bytes(two()).to_f32(),
        _ => f32::from_ne_bytes([row[at * 4], row[at * 4 + 1], row[at * 4 + 2], row[at * 4 + 3]]),
    }
}

/// One rounding, to nearest even; every NaN the one quiet NaN.
fn rounded(sum: f32, dtype: Dtype) -> Vec<u8> {
    match (dtype, sum.is_nan()) {
        (Dtype::Bf16, true) => 0x7fc0_u16.to_ne_bytes().to_vec(),
        (Dtype::F16, true) => 0x7e00_u16.to_ne_bytes().to_vec(),
        (_, true) => 0x7fc0_0000_u32.to_ne_bytes().to_vec(),
        (Dtype::Bf16, _) => bf16::from_f32(sum).to_ne_bytes().to_vec(),
        (Dtype::F16, _) => f16::from_f32(sum).to_ne_bytes().to_vec(),
        (_, false) => sum.to_ne_bytes().to_vec(),
    }
}
