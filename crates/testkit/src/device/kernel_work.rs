//! Our kernels at the size of a training step, with what they read and write: those of slots, and
//! those of exact sizes.
//!
//! ```text
//!   slots         x --pack--> slots .. --regroup--> rows .. --sum--> out
//!   exact sizes   ids --counts, sort--> order     x --permute--> rows .. --sum of choices--> out
//! ```

use std::collections::BTreeSet;

use half::bf16;
use sidelane::Dtype;
use sidelane::device::{
    Addresses, CountArgs, DeviceRange, Kernels, Pack, PermuteArgs, SortArgs, Stream, SumArgs, SumChoices,
    Word,
};
use sidelane::dtype::PartialDtype;
use sidelane::error::DeviceError;
use sidelane::plan::SlotShape;

use super::gpu::{Gpu, same, write};
use super::whole;
use crate::TestError;
use crate::values::Random;

/// Ranks that tokens go to.
pub const RANKS: u32 = 8;
/// Choices of a token.
pub const TOP_K: u32 = 8;
const EXPERTS: u32 = 64;

/// Experts of all ranks where sizes are exact.
const EXACT_EXPERTS: u32 = 256;

/// Expert of a choice. Any experts of a token, each once: steps are odd.
fn expert_of(token: u32, choice: u32, experts: u32) -> u32 {
    (token * 5 + choice * 7) % experts
}

/// How many ranks a token goes to.
pub fn ranks_of(token: u32) -> u64 {
    let ranks: BTreeSet<u32> =
        (0..TOP_K).map(|choice| expert_of(token, choice, EXPERTS) / (EXPERTS / RANKS)).collect();
    ranks.len() as u64
}

/// So many elements of bf16 between -1 and 1.
pub fn elements(random: &mut Random, count: u64) -> Vec<bf16> {
    (0..count).map(|_| bf16::from_f32(random.unit())).collect()
}

/// Kernels of slots, and their memory.
pub struct SlotWork {
    /// The kernels, without a limit on their blocks.
    pub kernels: Kernels,
    shape: SlotShape,
    /// Tokens of a rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    x: DeviceRange,
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
    out: DeviceRange,
    /// Calls so far, then the status.
    words: DeviceRange,
    /// Stream of the launches that time one kernel.
    pub stream: Stream,
}

impl SlotWork {
    /// Rows of 4,096 tokens of a large model, or to be quick few short ones.
    pub fn new(gpu: &Gpu) -> Result<Self, TestError> {
        let (tokens, hidden) = gpu.few((4096, 7168), (32, 256));
        let (row, choices) = (u64::from(hidden) * 2, u64::from(tokens * TOP_K) * 4);
        let shape = SlotShape::new(tokens, TOP_K, row)?;
        let stream = gpu.stream()?;
        let per_rank = EXPERTS / RANKS;
        let slot = |at: u32| at / tokens * shape.slot_rows() + shape.header_rows() + at % tokens;
        let slots = gpu.memory(shape.bytes() * u64::from(RANKS))?;
        let regrouped = gpu.memory(row * u64::from(tokens * RANKS))?;
        let at = |range: &DeviceRange, bytes: u64| -> Result<Addresses, TestError> {
            let spans: Vec<_> = (0..u64::from(RANKS))
                .map(|rank| range.span(rank * bytes, bytes))
                .collect::<Result<_, _>>()?;
            Ok(Addresses::new(&stream, &gpu.memory(8 * u64::from(RANKS))?, &spans)?)
        };
        Ok(SlotWork {
            kernels: Kernels::load(&gpu.context)?,
            shape,
            tokens,
            hidden,
            x: gpu.put(&stream, &elements(&mut Random(3), u64::from(tokens * hidden)))?,
            experts: gpu
                .put_each(&stream, tokens * TOP_K, |at| expert_of(at / TOP_K, at % TOP_K, EXPERTS) as i32)?,
            weights: gpu.put(&stream, &Random(2).bytes(choices))?,
            rank_of: gpu.put_each(&stream, EXPERTS, |expert| (expert / per_rank) as i32)?,
            local_of: gpu.put_each(&stream, EXPERTS, |expert| (expert % per_rank) as i32)?,
            packed_at: at(&slots, shape.bytes())?,
            slots,
            places: gpu.put_each(&stream, tokens * RANKS, |_| -1)?,
            dropped: gpu.memory(choices / 4)?,
            index: gpu.put_each(&stream, tokens * RANKS, |at| slot(at) as i32)?,
            summed_from: at(&regrouped, row * u64::from(tokens))?,
            regrouped,
            out: gpu.memory(row * u64::from(tokens))?,
            words: gpu.put(&stream, &[0_u32; 4])?,
            stream,
        })
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.shape.row_bytes()
    }

    /// The sizes in words.
    pub fn describe(&self) -> String {
        format!("{} tokens x {} bf16 of {RANKS} ranks", self.tokens, self.hidden)
    }

    fn status(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.words.word(8)
    }

    /// Whether no kernel so far has found a fault: after one, kernels move nothing, and look fast.
    pub fn check_status(&self, gpu: &Gpu) -> Result<(), TestError> {
        same("the status of all kernels", &gpu.read(&self.stream, &self.words)?[8..12], &[0_u32])
    }

    /// All three kernels, one behind the other.
    pub fn burst(&self, stream: &Stream, limit: Option<u32>) -> Result<(), DeviceError> {
        let kernels = self.kernels.clone().max_blocks(limit);
        self.pack(&kernels, stream)?;
        self.regroup(&kernels, stream)?;
        self.sum(&kernels, stream)
    }

    /// Enqueues the rows of tokens, into the slots of all ranks.
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
                digest: 0,
                refused: 0,
            },
        )
    }

    /// Enqueues the rows of slots, by expert.
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

    /// Enqueues the sums of tokens.
    pub fn sum(&self, kernels: &Kernels, stream: &Stream) -> Result<(), DeviceError> {
        kernels.sum(
            stream,
            &SumArgs {
                shape: self.shape,
                tokens: self.tokens,
                columns: self.hidden,
                rows: Dtype::Bf16,
                dtype: Dtype::Bf16,
                returned_rows: &self.summed_from,
                places: whole(&self.places)?,
                status: self.status()?,
                marks: None,
                out: whole(&self.out)?,
            },
        )
    }

    /// Whether the kernels write the same bytes with all of these limits on their blocks, and with
    /// others.
    pub fn equal(&self, gpu: &Gpu, limits: &[Option<u32>]) -> Result<String, TestError> {
        let mut first: Option<[Vec<u8>; 3]> = None;
        for &limit in limits.iter().chain(&[Some(1), Some(7)]) {
            for range in [&self.slots, &self.regrouped, &self.out] {
                write(&self.stream, range, &vec![0xcb; range.len() as usize])?;
            }
            self.burst(&self.stream, limit)?;
            let read = |range| gpu.read(&self.stream, range);
            let seen = [read(&self.places)?, read(&self.regrouped)?, read(&self.out)?];
            self.check_status(gpu)?;
            let expected = first.get_or_insert_with(|| seen.clone());
            for ((what, seen), expected) in ["places", "rows", "sums"].iter().zip(&seen).zip(&*expected) {
                same(format!("{what} of at most {limit:?} blocks"), seen, expected)?;
            }
        }
        Ok(self.describe())
    }
}

/// Kernels of exact sizes, and their memory.
pub struct ExactWork {
    /// Tokens times choices of each.
    pub choices: u32,
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

impl ExactWork {
    /// Choices of the same tokens.
    pub fn new(rows: &SlotWork, gpu: &Gpu) -> Result<Self, TestError> {
        let choices = rows.tokens * TOP_K;
        // Each choice of a token is of another expert, since steps are odd.
        let expert = |at: u32| expert_of(at / TOP_K, at % TOP_K, EXACT_EXPERTS);
        // Choices lie by expert, as those that landed do: any row of each token, once.
        let mut by_expert: Vec<u32> = (0..choices).collect();
        by_expert.sort_by_key(|&at| expert(at));
        let mut place = vec![0; choices as usize];
        by_expert.iter().zip(0..).for_each(|(&at, row)| place[at as usize] = row);
        Ok(ExactWork {
            choices,
            ids: gpu.put_each(&rows.stream, choices, |at| expert(at) as i32)?,
            own_bin: gpu.put_each(&rows.stream, EXACT_EXPERTS, |expert| expert as i32)?,
            rank_of: gpu
                .put_each(&rows.stream, EXACT_EXPERTS, |expert| (expert / (EXACT_EXPERTS / RANKS)) as i32)?,
            per_expert: gpu.memory(u64::from(EXACT_EXPERTS) * 4)?,
            per_rank: gpu.memory(u64::from(RANKS) * 4)?,
            order: gpu.memory(u64::from(choices) * 4)?,
            from: gpu.put_each(&rows.stream, choices, |row| (by_expert[row as usize] / TOP_K) as i32)?,
            to: gpu.put_each(&rows.stream, choices, |at| place[at as usize])?,
            rows: gpu.memory(rows.shape.row_bytes() * u64::from(choices))?,
        })
    }

    /// Enqueues the counts of choices, by expert and by rank.
    pub fn count(&self, rows: &SlotWork) -> Result<(), DeviceError> {
        rows.kernels.counts(
            &rows.stream,
            &CountArgs {
                tokens: rows.tokens,
                top_k: TOP_K,
                n_experts: EXACT_EXPERTS,
                ranks: RANKS,
                experts: whole(&self.ids)?,
                rank_of: whole(&self.rank_of)?,
                per_expert: whole(&self.per_expert)?,
                per_rank: whole(&self.per_rank)?,
                status: rows.status()?,
            },
        )
    }

    /// Enqueues the order of choices by expert, or by rank.
    pub fn sort(&self, rows: &SlotWork, by_rank: bool) -> Result<(), DeviceError> {
        rows.kernels.sort_choices(
            &rows.stream,
            &SortArgs {
                experts: whole(&self.ids)?,
                choices: self.choices,
                top_k: TOP_K,
                bin_of: whole(if by_rank { &self.rank_of } else { &self.own_bin })?,
                n_experts: EXACT_EXPERTS,
                bins: if by_rank { RANKS } else { EXACT_EXPERTS },
                once: by_rank,
                order: whole(&self.order)?,
            },
        )
    }

    /// The first so many rows.
    pub fn permute(&self, rows: &SlotWork, count: u32) -> Result<(), DeviceError> {
        rows.kernels.regroup(
            &rows.stream,
            &PermuteArgs {
                row_bytes: rows.shape.row_bytes(),
                sources: rows.tokens,
                rows: count,
                from: whole(&rows.x)?,
                index: self.from.span(0, u64::from(count) * 4)?,
                out: self.rows.span(0, u64::from(count) * rows.shape.row_bytes())?,
                runs: None,
                status: rows.status()?,
            },
        )
    }

    /// Enqueues the sums of choices.
    pub fn sum(&self, rows: &SlotWork) -> Result<(), DeviceError> {
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
                own: None,
                index: whole(&self.to)?,
                n_experts: EXACT_EXPERTS,
                experts: Some(whole(&self.ids)?),
                weights: None,
                group_of: None,
                status: rows.status()?,
                out: whole(&rows.out)?,
            },
        )
    }
}
