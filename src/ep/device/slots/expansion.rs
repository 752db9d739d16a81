//! Expert-major rows within a budget, from slots: what a CUDA graph replays where no host knows
//! sizes.
//!
//! ```text
//!   dispatch   pack tally | slots to all ranks | check admit expand regroup |  experts
//!   combine    fold | partial rows to their ranks | sum
//! ```
//!
//! Each slot carries its source's counts for all bins. So every rank knows the layout of all ranks,
//! and which rows a budget drops: those that the host drops. Experts find rows, weights and counts
//! in memory of a fixed size. Behind them `fold` adds up a token's rows of this rank, the first
//! half of a sum by rank, so that one row returns for each token and rank.

use super::slot_memory::write;
use crate::device::{
    Addresses, Admit, ByteSpan, DeviceRange, Expand, Kernels, PermuteArgs, Stream, SumChoices, Tally, Word,
};
use crate::dtype::Dtype;
use crate::ep::builder::Spec;
use crate::error::{DeviceError, Error, PlanError};
use crate::plan::{Bins, ExpertMap, SlotShape};
use crate::schedule::stream_program::Slots;

/// A piece of its memory.
#[derive(Clone, Copy, Debug)]
enum ExpandedPart {
    /// The first bin of each rank, and of none: `u32 [ranks + 1]`.
    Starts,
    /// The bin that this rank uses for each expert: `i32 [experts]`.
    BinOf,
    /// The place of each own bin in the order of sums: `i32 [own]`.
    Place,
    /// The bin of each own choice, and choices of that before it: `i32 [max_tokens, top_k]`.
    Bins,
    Before,
    /// Where bins begin, and rows of this rank that find room: `u32 [bins]`.
    Begin,
    Room,
    /// Where rows of each source begin: `u32 [ranks, own]`.
    First,
    /// Rows of each own bin, then with pads: `i64 [2, own]`.
    Counts,
    /// Which rank is over its budget: `u32`.
    Refusal,
    /// The row of each choice that came, and the place of its bin: `i32 [ranks, max_tokens,
    /// top_k]`.
    Rows,
    Sums,
    /// The source and the weight of each row: `[budget]`.
    Index,
    Weights,
    /// Rows, and what experts make of them: `[budget, hidden]`.
    Landed,
    Outputs,
}

const PIECES: usize = ExpandedPart::Outputs as usize + 1;

/// Where its memory lies, behind that of the slots; equal at all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpansionLayout {
    pieces: [(u64, u64); PIECES],
    bytes: u64,
}

impl ExpansionLayout {
    /// For rows within a budget, and slots of this shape.
    pub fn new(spec: &Spec, shape: &SlotShape, budget: u32) -> Self {
        let ranks = u64::from(spec.map.ranks());
        let of = |rank| spec.map.slots_of(rank).len() as u64;
        let own = (0..spec.map.ranks()).map(of).max().unwrap_or(0);
        let choices = u64::from(shape.max_tokens()) * u64::from(shape.top_k());
        let (bins, budget) = (u64::from(shape.bins()), u64::from(budget));
        let rows = budget.saturating_mul(spec.row_bytes());
        let (came, words) = (ranks * choices * 4, budget * 4);
        let sizes = [
            (ranks + 1) * 4,
            u64::from(spec.map.experts()) * 4,
            own * 4,
            choices * 4,
            choices * 4,
            bins * 4,
            bins * 4,
            ranks * own * 4,
            2 * own * 8,
            4,
            came,
            came,
            words,
            words,
            rows,
            rows,
        ];
        let mut bytes = 0_u64;
        let pieces = sizes.map(|len| {
            let at = bytes;
            bytes = bytes.saturating_add(len).checked_next_multiple_of(Slots::ALIGN).unwrap_or(u64::MAX);
            (at, len)
        });
        ExpansionLayout { pieces, bytes }
    }

    /// Whether kernels can count its rows, and a device may have as many bytes.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`].
    pub fn check(&self, spec: &Spec, shape: &SlotShape, budget: u32) -> Result<(), PlanError> {
        const MOST_BYTES: u64 = 1 << 56;
        let ranks = u64::from(spec.map.ranks());
        let slot_rows = ranks * u64::from(shape.slot_rows());
        let choices = ranks * u64::from(shape.max_tokens()) * u64::from(shape.top_k());
        let most = i32::MAX as u64;
        for (parameter, seen, most) in [
            ("budget", budget.into(), most),
            ("rows of all slots", slot_rows, most),
            ("choices of all slots", choices, most),
            ("ranks", ranks, u64::from(u16::MAX) - 1),
            ("bytes of the exchange", self.bytes, MOST_BYTES),
        ] {
            if seen > most {
                let expected = "what kernels can count: fewer ranks, tokens, choices or rows";
                return Err(PlanError::BadParameter { parameter, seen, expected });
            }
        }
        Ok(())
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Results of expanding the slots of a dispatch.
#[derive(Debug)]
pub(super) struct Expansion {
    ranges: [DeviceRange; PIECES],
    spec: Spec,
    shape: SlotShape,
    budget: u32,
    rank: u32,
    /// Bins of this rank.
    own: u32,
}

/// Inputs of the kernels that expand slots.
#[derive(Clone, Copy)]
pub(super) struct ExpansionInput<'a> {
    pub slots: &'a DeviceRange,
    /// Whether own choices were dropped, `u8 [max_tokens, top_k]`, as `pack` has marked them.
    pub dropped: &'a DeviceRange,
    /// Faults that kernels found so far, and how this call ends here.
    pub status: Word<'a, u32>,
    pub verdict: Word<'a, u64>,
}

impl Expansion {
    /// Over this memory, in which it writes the tables that never change.
    pub fn new(
        memory: &DeviceRange,
        layout: &ExpansionLayout,
        (spec, shape, budget): (&Spec, SlotShape, u32),
        (rank, bins): (u32, &Bins),
        stream: &Stream,
    ) -> Result<Self, Error> {
        let ranges = layout.pieces.map(|(offset, len)| memory.part(offset, len));
        let ranges: Vec<DeviceRange> = ranges.into_iter().collect::<Result<_, _>>()?;
        let ranges = <[DeviceRange; PIECES]>::try_from(ranges).map_err(|_| PlanError::RefusedHere)?;
        let (map, own) = (&spec.map, bins.of(rank));
        let starts: Vec<u32> =
            (0..map.ranks()).map(|rank| bins.of(rank).start).chain([bins.count()]).collect();
        let mut place = vec![0; own.len()];
        for (nth, bin) in (0..).zip(bins.in_order()).filter(|(_, bin)| own.contains(bin)) {
            place[(bin - own.start) as usize] = nth;
        }
        let own = own.len() as u32;
        let made = Expansion { ranges, spec: spec.clone(), shape, budget, rank, own };
        let tables = [(ExpandedPart::Starts, starts), (ExpandedPart::Place, place)];
        let tables = tables.iter().filter(|(_, words)| !words.is_empty());
        let _staged: Vec<_> = tables
            .map(|(piece, words)| write(stream, &made.range(*piece).part(0, words.len() as u64 * 4)?, words))
            .collect::<Result<_, DeviceError>>()?;
        made.write_map(map, stream)?;
        Ok(made)
    }

    /// Writes the bin that this rank uses for each expert, and waits for the stream. An expert
    /// without a bin has no row.
    pub fn write_map(&self, map: &ExpertMap, stream: &Stream) -> Result<(), Error> {
        let bin_of: Vec<u32> =
            (0..map.experts()).map(|expert| map.slot_for(self.rank, expert).unwrap_or(u32::MAX)).collect();
        let _staged = write(stream, self.range(ExpandedPart::BinOf), &bin_of)?;
        Ok(stream.synchronize()?)
    }

    fn range(&self, piece: ExpandedPart) -> &DeviceRange {
        &self.ranges[piece as usize]
    }

    fn span(&self, piece: ExpandedPart) -> Result<ByteSpan<'_>, DeviceError> {
        let range = self.range(piece);
        range.span(0, range.len())
    }

    /// Rows for which there is memory.
    pub fn budget(&self) -> u32 {
        self.budget
    }

    /// Type of the partial rows that return.
    pub fn partial_dtype(&self) -> Dtype {
        self.spec.partial_dtype.dtype()
    }

    /// The rows, `[budget, hidden]`.
    pub fn rows(&self) -> &DeviceRange {
        self.range(ExpandedPart::Landed)
    }

    /// Their weights, `f32 [budget]`.
    pub fn weights(&self) -> &DeviceRange {
        self.range(ExpandedPart::Weights)
    }

    /// Rows of each local expert, then the same with pads: `i64 [2, local experts]`.
    pub fn counts(&self) -> Result<DeviceRange, DeviceError> {
        self.range(ExpandedPart::Counts).part(0, 2 * u64::from(self.own) * 8)
    }

    /// Where experts write, `[budget, hidden]`.
    pub fn outputs(&self) -> &DeviceRange {
        self.range(ExpandedPart::Outputs)
    }

    /// Which rank is over its budget in the last call; 0 if none is.
    fn refusal(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.range(ExpandedPart::Refusal).word(0)
    }

    /// The kernel of [`Expansion::fold`], for reports.
    pub fn fold_name(&self) -> Result<&'static str, DeviceError> {
        match self.partial_dtype() {
            Dtype::F32 => Kernels::sum_choices_to_f32_name(self.spec.dtype),
            dtype => Kernels::sum_choices_name(dtype),
        }
    }

    fn choices(&self, tokens: u32) -> u32 {
        tokens * self.shape.top_k()
    }

    /// Behind `pack`: counts go into the slots.
    pub fn tally(
        &self,
        (kernels, stream): (&Kernels, &Stream),
        slots: &Addresses,
        (tokens, experts): (u32, ByteSpan<'_>),
    ) -> Result<(), Error> {
        let tally = Tally {
            shape: self.shape,
            choices: self.choices(tokens),
            experts,
            n_experts: self.spec.map.experts(),
            bin_of: self.span(ExpandedPart::BinOf)?,
            slots,
            bins: self.span(ExpandedPart::Bins)?,
            before: self.span(ExpandedPart::Before)?,
        };
        Ok(kernels.tally(stream, &tally)?)
    }

    /// Behind `check`: rows, weights and counts, and what was dropped of this rank's `tokens`.
    pub fn expand(
        &self,
        (kernels, stream): (&Kernels, &Stream),
        received: ExpansionInput<'_>,
        tokens: u32,
    ) -> Result<(), Error> {
        let Expansion { spec, shape, budget, rank, own, .. } = self;
        let (ranks, slots) = (spec.map.ranks(), received.slots.span(0, received.slots.len())?);
        let admit = Admit {
            shape: *shape,
            ranks,
            rank: *rank,
            own: *own,
            budget: *budget,
            overflow: spec.mode.overflow(),
            align: spec.align,
            received: slots,
            starts: self.span(ExpandedPart::Starts)?,
            begin: self.span(ExpandedPart::Begin)?,
            room: self.span(ExpandedPart::Room)?,
            first: self.span(ExpandedPart::First)?,
            counts: self.span(ExpandedPart::Counts)?,
            index: self.span(ExpandedPart::Index)?,
            weights: self.span(ExpandedPart::Weights)?,
            status: received.status,
            verdict: received.verdict,
            refusal: self.refusal()?,
        };
        kernels.admit(stream, &admit)?;
        let expand = Expand {
            shape: *shape,
            ranks,
            own: *own,
            budget: *budget,
            choices: self.choices(tokens),
            received: slots,
            first: self.span(ExpandedPart::First)?,
            place: self.span(ExpandedPart::Place)?,
            rows: self.span(ExpandedPart::Rows)?,
            sums: self.span(ExpandedPart::Sums)?,
            index: self.span(ExpandedPart::Index)?,
            weights: self.span(ExpandedPart::Weights)?,
            bins: self.span(ExpandedPart::Bins)?,
            before: self.span(ExpandedPart::Before)?,
            room: self.span(ExpandedPart::Room)?,
            dropped: received.dropped.span(0, received.dropped.len())?,
            refusal: self.refusal()?,
        };
        kernels.expand(stream, &expand)?;
        if *budget == 0 {
            return Ok(());
        }
        let gather = PermuteArgs {
            row_bytes: shape.row_bytes(),
            sources: ranks * shape.slot_rows(),
            rows: *budget,
            from: slots,
            index: self.span(ExpandedPart::Index)?,
            out: self.span(ExpandedPart::Landed)?,
            runs: None,
            status: received.status,
        };
        Ok(kernels.regroup(stream, &gather)?)
    }

    /// Before partial rows return: each is the sum of a token's rows at this rank.
    pub fn fold(&self, (kernels, stream): (&Kernels, &Stream), partials: &DeviceRange) -> Result<(), Error> {
        let spec = &self.spec;
        let sum = SumChoices {
            tokens: spec.map.ranks() * self.shape.max_tokens(),
            top_k: self.shape.top_k(),
            columns: spec.hidden as u32,
            dtype: spec.dtype,
            wire: spec.partial_dtype,
            n_rows: self.budget,
            rows: self.span(ExpandedPart::Outputs)?,
            own: None,
            index: self.span(ExpandedPart::Rows)?,
            n_experts: self.shape.bins(),
            experts: Some(self.span(ExpandedPart::Sums)?),
            weights: None,
            group_of: None,
            // Zeros where all ranks refuse the call, and not for a fault of this rank alone.
            status: self.refusal()?,
            out: partials.span(0, partials.len())?,
        };
        match self.partial_dtype() {
            Dtype::F32 => Ok(kernels.sum_choices_to_f32(stream, &sum)?),
            _ => Ok(kernels.sum_choices(stream, &sum)?),
        }
    }
}
