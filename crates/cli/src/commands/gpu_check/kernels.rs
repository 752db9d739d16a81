//! Kernels against their definitions, on random and special values: sums and gates to the bit,
//! products of whole numbers exactly, those of experts within the bounds of their roundings.

use sidelane::device::{AuditKernels, Blas, LayerKernels};
use sidelane::gate::{GateInput, Preset};
use sidelane::plan::{ExpertMap, RowLayout, SlotShape, SumOrder};
use sidelane::rows::Arithmetic;
use sidelane_testkit::device::gpu::Bench;
use sidelane_testkit::device::kernels::plan_choices::Case;
use sidelane_testkit::device::kernels::products::{self, Bound, Way};
use sidelane_testkit::device::kernels::rank_sums::Received;
use sidelane_testkit::device::kernels::sums::{ReturnedRows, TYPES};
use sidelane_testkit::device::kernels::{copies, gate};
use sidelane_testkit::values::Random;

use super::report::{About, Checks, State};
use super::{Task, packages};
use crate::error::CliError;

const RANKS: u32 = 8;
const TOKENS: u32 = 96;
/// Of a rank that sums a token's rows.
const EXPERTS: u32 = 32;

/// Tokens, experts and choices of a plan.
const PLANNED: (u32, u32, u32) = (4096, 256, 8);

const GATES: [(Preset, u32, u32); 3] =
    [(Preset::Mixtral, 8, 2), (Preset::Qwen3, 128, 8), (Preset::DeepseekV3, 256, 8)];

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let bench = Bench::new(task.gpu()?)?;
    let context = &bench.gpu.context;
    let (audit, layer) = (AuditKernels::load(context)?, LayerKernels::load(context)?);
    let columns = task.few(7168, 520);
    for types in TYPES {
        let what = format!("sum {} to {}", types.0, types.1);
        let about = About::new(&what, "in f32, ranks ascending, one rounding: to the bit");
        checks.check(about, || sums(&bench, types, columns))?;
    }
    for dtype in [Arithmetic::F32, Arithmetic::Bf16] {
        let what = format!("rank sums of {}", sidelane::Dtype::from(dtype));
        let shows = "in f32, in the order of experts, times weights, one rounding: to the bit";
        checks.check(About::new(&what, shows), || {
            let (sums, experts) = (TOKENS as usize, EXPERTS as usize);
            let received = Received::any(&mut Random(64), (sums, experts, columns as usize), (dtype, true));
            received.check(&bench)?;
            let rows = received.rows();
            Ok(format!("{TOKENS} sums of {rows} rows of {EXPERTS} experts, special values among them"))
        })?;
    }
    let about = |what, shows| About::new(what, shows);
    checks.check(about("gate", "experts and weights are those of the host: to the bit"), || {
        gates(&bench, &layer)
    })?;
    checks.check(
        about("plan of choices", "order, places and metadata are the host's: to the bit"),
        || {
            RowLayout::ALL.iter().try_for_each(|&layout| plan(&bench, layout))?;
            Ok(format!("both layouts, {RANKS} ranks, {} experts", PLANNED.1))
        },
    )?;
    checks.check(about("copy by SMs", "the copying kernel of the audit copies the right bytes"), || {
        let bytes = (1 << 20) + 48;
        copies::copy(&bench, &audit, bytes, None)?;
        Ok(format!("{bytes} bytes"))
    })?;
    let size = task.few(512, 128);
    checks.check(about("product", "our product is right: whole numbers, exactly"), || {
        copies::product(&bench, size, |product| audit.product(&bench.stream, product))?;
        Ok(format!("{size} x {size}, by ours"))
    })?;
    let blas = Blas::load(&bench.stream, &packages::folders(context.driver()));
    let about = about("product of cuBLAS", "cuBLAS is called as it must be");
    match &blas {
        Ok(blas) => checks.check(about, || {
            copies::product(&bench, size, |product| blas.product(product))?;
            Ok(format!("{size} x {size}, by {}", blas.name()))
        }),
        Err(error) => checks.judged(about, Ok((State::Skipped, format!("{error}: our own product is used")))),
    }?;
    let (experts, [rows, depth, columns]) = (8, task.few([64, 512, 256], [24, 64, 48]));
    let case = products::Case::of_experts(&mut Random(33), experts, rows, depth, columns);
    for way in Way::ALL {
        let what = format!("products of experts, {}", way.name());
        let about = About::new(&what, "cuBLAS's are within the bound of their roundings");
        let Ok(blas) = &blas else {
            checks.tell(about, State::Skipped, "no cuBLAS was found".to_owned())?;
            continue;
        };
        checks.check(about, || {
            // Tensor cores may cut off what they add. Factors lose nothing: bf16 holds them.
            let found = case.check(&bench, (blas, &layer), way, Bound { roundings: 2, lost: 0.0 })?;
            Ok(format!(
                "{} sums of {depth}, off by {:.1e} of their terms at most; \
                 {experts} x [{rows}, {depth}] [{depth}, {columns}], by {}",
                found.sums,
                found.off,
                blas.name()
            ))
        })?;
    }
    Ok(())
}

/// Sums of rows that returned. Some tokens have rows at all ranks, some at none.
fn sums(bench: &Bench, types: (sidelane::Dtype, sidelane::Dtype), columns: u32) -> Result<String, CliError> {
    let shape = SlotShape::new(TOKENS, 1, u64::from(columns) * types.1.size() as u64)?;
    let mut random = Random(types.0 as u64 * 16 + types.1 as u64);
    let place = |_| if random.below(4) == 0 { -1 } else { random.below(TOKENS) as i32 };
    let places = (0..TOKENS * RANKS).map(place).collect();
    ReturnedRows::any(&mut random, shape, (TOKENS, RANKS, columns), places, types)?.check(bench)?;
    Ok(format!("{} sums of up to {RANKS} rows, special values among them", TOKENS * columns))
}

fn gates(bench: &Bench, kernels: &LayerKernels) -> Result<String, CliError> {
    let (tokens, mut random) = (bench.gpu.few(4096, 64), Random(6));
    for (preset, experts, top_k) in GATES {
        let logits: Vec<f32> = (0..tokens * experts).map(|_| random.unit() * 8.0).collect();
        let call = GateInput::new(&logits);
        gate::check(bench, kernels, &preset.config(experts, top_k)?, &call)?;
    }
    Ok(format!("{tokens} tokens, {}", GATES.map(|(preset, ..)| preset.name()).join(", ")))
}

/// The plan of rank 1, and where its own rows land.
fn plan(bench: &Bench, layout: RowLayout) -> Result<(), CliError> {
    let (tokens, experts, top_k) = PLANNED;
    let (map, mut random) = (ExpertMap::contiguous(experts, RANKS)?, Random(8));
    let tokens = bench.gpu.few(tokens, 64);
    let case = Case::of(&mut random, (map, 1), (layout, SumOrder::Expert), (tokens, top_k));
    Ok(case.check(bench, &mut random)?)
}
