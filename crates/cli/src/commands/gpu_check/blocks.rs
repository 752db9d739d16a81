//! Blocks: what a stream of matrix products loses to our own kernels next to it, by the limit on
//! their blocks.
//!
//! ```text
//!   products  |= = = = = =|     |=   =   =   =   =   =|     |=  =  =  =  =  =|      ..
//!   beside                       pack, regroup, sum          the same with at most so many blocks
//!              alone             on every multiprocessor     on a few: slower, and products keep the rest
//! ```
//!
//! All of them take turns. The kernels go on a stream of the highest priority without a gap, as the
//! transfers of a layer do. No bit of what they write may depend on the limit.

use std::collections::BTreeSet;

use sidelane::Dtype;
use sidelane::device::{Addresses, DeviceRange, Kernels, Pack, PermuteArgs, Priority, Stream, SumArgs, Word};
use sidelane::error::DeviceError;
use sidelane::plan::SlotShape;
use sidelane_testkit::device::whole;

use super::Task;
use super::bench::{self, Gpu, random_bytes, random_elements, same};
use super::products::{Burst, Products, Round, middle};
use super::report::{About, Checks, Limited};
use crate::error::CliError;

pub const RANKS: u32 = 8;
const EXPERTS: u32 = 64;
pub const TOP_K: u32 = 8;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let gpu = Gpu::open(task)?;
    let sms = gpu.context.facts().multiprocessors;
    let limits = [None, Some(sms), Some((sms / 2).max(1)), Some((sms / 4).max(1))];
    let rows = Rows::new(&gpu)?;
    let about = About::new("bits with every limit", "no bit depends on how many blocks a kernel has");
    if !checks.check(about, || rows.equal(&gpu, &limits))? {
        return Ok(());
    }
    let products = Products::new(&gpu, Priority::Highest)?;
    let bursts = limits.map(|limit| {
        let rows = &rows;
        move |traffic: &Stream| rows.burst(traffic, limit)
    });
    let beside = bursts.iter().map(|burst| Some(burst as Burst<'_>));
    let rounds = products.turns(task.few(15, 3), &[None].into_iter().chain(beside).collect::<Vec<_>>())?;
    let samples = |rounds: &[Round]| rounds.iter().map(|round| round.product_us).collect::<Vec<f64>>();
    let without = middle(&rounds[0], |round| round.product_us);
    let about = About::new("products alone", "what the next rows are compared with");
    checks.measured(about, &samples(&rounds[0]), products.describe(without))?;
    for (blocks, rounds) in limits.into_iter().zip(&rounds[1..]) {
        // A burst that does not end meanwhile takes as long at least.
        let burst = middle(rounds, |round| round.all_us / round.bursts.max(1) as f64);
        let what = match blocks {
            None => "products beside pack, regroup and sum without a limit".to_owned(),
            Some(blocks) => format!("products beside pack, regroup and sum of at most {blocks} blocks"),
        };
        let about =
            About::new(&what, "what our kernels take from the compute, and what fewer blocks cost them");
        let slowdown = middle(rounds, |round| round.product_us) / without;
        let percent = (slowdown - 1.0) * 100.0;
        let told = format!("{percent:+.1} %; the kernels take {burst:.0} us for {}", rows.describe());
        checks.limited(about, &samples(rounds), told, Limited { blocks, slowdown })?;
    }
    Ok(())
}

/// Expert of a choice. Any experts of a token, each once: steps are odd.
pub fn expert_of(token: u32, choice: u32, experts: u32) -> u32 {
    (token * 5 + choice * 7) % experts
}

pub fn ranks_of(token: u32) -> u64 {
    let ranks: BTreeSet<u32> =
        (0..TOP_K).map(|choice| expert_of(token, choice, EXPERTS) / (EXPERTS / RANKS)).collect();
    ranks.len() as u64
}

pub struct Rows {
    pub kernels: Kernels,
    pub shape: SlotShape,
    pub tokens: u32,
    pub hidden: u32,
    pub x: DeviceRange,
    experts: DeviceRange,
    weights: DeviceRange,
    rank_of: DeviceRange,
    local_of: DeviceRange,
    slots: DeviceRange,
    packed_at: Addresses,
    places: DeviceRange,
    dropped: DeviceRange,
    index: DeviceRange,
    regrouped: DeviceRange,
    summed_from: Addresses,
    pub out: DeviceRange,
    /// Calls so far, then the status.
    pub words: DeviceRange,
    pub stream: Stream,
}

impl Rows {
    pub fn new(gpu: &Gpu) -> Result<Self, CliError> {
        let (tokens, hidden) = gpu.task.few((4096, 7168), (32, 256));
        let (row, choices) = (u64::from(hidden) * 2, u64::from(tokens * TOP_K) * 4);
        let shape = SlotShape::new(tokens, TOP_K, row)?;
        let stream = gpu.stream()?;
        let sent = |content: &[u8]| gpu.put(&stream, content);
        let words = |count: u32, word: &dyn Fn(u32) -> i32| {
            sent(bytemuck::cast_slice(&(0..count).map(word).collect::<Vec<i32>>()))
        };
        let per_rank = EXPERTS / RANKS;
        let slot = |at: u32| at / tokens * shape.slot_rows() + shape.header_rows() + at % tokens;
        let slots = gpu.memory(shape.bytes() * u64::from(RANKS))?;
        let regrouped = gpu.memory(row * u64::from(tokens * RANKS))?;
        let at = |range: &DeviceRange, bytes: u64| -> Result<Addresses, CliError> {
            let spans: Vec<_> = (0..u64::from(RANKS))
                .map(|rank| range.span(rank * bytes, bytes))
                .collect::<Result<_, _>>()?;
            Ok(Addresses::new(&stream, &gpu.memory(8 * u64::from(RANKS))?, &spans)?)
        };
        Ok(Rows {
            kernels: Kernels::load(&gpu.context)?,
            shape,
            tokens,
            hidden,
            x: sent(&random_elements(3, u64::from(tokens * hidden)))?,
            experts: words(tokens * TOP_K, &|at| expert_of(at / TOP_K, at % TOP_K, EXPERTS) as i32)?,
            weights: sent(&random_bytes(2, choices))?,
            rank_of: words(EXPERTS, &|expert| (expert / per_rank) as i32)?,
            local_of: words(EXPERTS, &|expert| (expert % per_rank) as i32)?,
            packed_at: at(&slots, shape.bytes())?,
            slots,
            places: words(tokens * RANKS, &|_| -1)?,
            dropped: gpu.memory(choices / 4)?,
            index: words(tokens * RANKS, &|at| slot(at) as i32)?,
            summed_from: at(&regrouped, row * u64::from(tokens))?,
            regrouped,
            out: gpu.memory(row * u64::from(tokens))?,
            words: sent(&[0; 16])?,
            stream,
        })
    }

    pub fn describe(&self) -> String {
        format!("{} tokens x {} bf16 of {RANKS} ranks", self.tokens, self.hidden)
    }

    pub fn status(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.words.word(8)
    }

    fn burst(&self, stream: &Stream, limit: Option<u32>) -> Result<(), DeviceError> {
        let kernels = self.kernels.clone().max_blocks(limit);
        self.pack(&kernels, stream)?;
        self.regroup(&kernels, stream)?;
        self.sum(&kernels, stream)
    }

    pub fn pack(&self, kernels: &Kernels, stream: &Stream) -> Result<(), DeviceError> {
        kernels.pack(
            stream,
            &Pack {
                shape: self.shape,
                tokens: self.tokens,
                x: whole(&self.x)?,
                experts: whole(&self.experts)?,
                weights: whole(&self.weights)?,
                n_experts: EXPERTS,
                rank_of: whole(&self.rank_of)?,
                local_of: whole(&self.local_of)?,
                slots: &self.packed_at,
                places: whole(&self.places)?,
                dropped: whole(&self.dropped)?,
                counter: self.words.word(0)?,
                status: self.status()?,
                digest: 0,
            },
        )
    }

    pub fn regroup(&self, kernels: &Kernels, stream: &Stream) -> Result<(), DeviceError> {
        kernels.regroup(
            stream,
            &PermuteArgs {
                row_bytes: self.shape.row_bytes(),
                sources: self.shape.slot_rows() * RANKS,
                rows: self.tokens * RANKS,
                from: whole(&self.slots)?,
                index: whole(&self.index)?,
                out: whole(&self.regrouped)?,
                runs: None,
                status: self.status()?,
            },
        )
    }

    pub fn sum(&self, kernels: &Kernels, stream: &Stream) -> Result<(), DeviceError> {
        kernels.sum(
            stream,
            &SumArgs {
                shape: self.shape,
                tokens: self.tokens,
                columns: self.hidden,
                rows: Dtype::Bf16,
                dtype: Dtype::Bf16,
                homes: &self.summed_from,
                places: whole(&self.places)?,
                status: self.status()?,
                out: whole(&self.out)?,
            },
        )
    }

    fn equal(&self, gpu: &Gpu, limits: &[Option<u32>]) -> Result<String, CliError> {
        let mut first: Option<[Vec<u8>; 3]> = None;
        for &limit in limits.iter().chain(&[Some(1), Some(7)]) {
            for range in [&self.slots, &self.regrouped, &self.out] {
                bench::write(&self.stream, range, &vec![0xcb; range.len() as usize])?;
            }
            self.burst(&self.stream, limit)?;
            let read = |range| gpu.read(&self.stream, range);
            let seen = [read(&self.places)?, read(&self.regrouped)?, read(&self.out)?];
            bench::equal("the status", read(&self.words)?[8..12].iter().map(|&b| u64::from(b)).sum(), 0)?;
            let expected = first.get_or_insert_with(|| seen.clone());
            for ((what, seen), expected) in ["places", "rows", "sums"].iter().zip(&seen).zip(&*expected) {
                same(format!("{what} of at most {limit:?} blocks"), seen, expected)?;
            }
        }
        Ok(self.describe())
    }
}
