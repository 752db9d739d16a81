//! Launches of kernels that plan dispatches: `cuda/sort_choices.cu` and `place_choices.cu`.
//!
//! ```text
//!   sort_choices    expert ids --> rows in the order of bins
//!   plan_choices    expert ids, weights --> the same; rows of each bin, row of each choice, metadata of each row
//!   place_choices   where own rows land --> rows of their choices, and their metadata there
//! ```

use super::rows::RunParameters;
use super::{AT_WORK, Kernels, Operands, RunArgs, THREADS, WORD, bytes};
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::error::{DeviceError, PlanError};

/// Inputs and outputs of [`Kernels::sort_choices`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct SortArgs<'a> {
    /// Chosen experts, `i32 [choices]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// Number of choices: tokens times `top_k`, at least one.
    pub choices: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// The bin of each expert, `i32 [n_experts]`.
    pub bin_of: ByteSpan<'a>,
    /// Number of experts.
    pub n_experts: u32,
    /// Number of bins.
    pub bins: u32,
    /// A token has one row in a bin, however many of its choices are there.
    pub once: bool,
    /// The token of each row, `i32 [choices]`: by bin, then token; -1 behind the last.
    pub order: ByteSpan<'a>,
}

/// `struct SortChoices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct SortParameters {
    experts: u64,
    bin_of: u64,
    order: u64,
    choices: u32,
    top_k: u32,
    n_experts: u32,
    n_bins: u32,
    once: u32,
    unused: u32,
}

impl SortParameters {
    fn of(
        operands: &mut Operands<'_>,
        kernel: &'static str,
        sort: &SortArgs<'_>,
    ) -> Result<Self, DeviceError> {
        let SortArgs { choices, top_k, n_experts, bins, .. } = *sort;
        let refuse = |what, given: u32, expected| {
            Err(DeviceError::Shape { kernel, what, given: given.into(), expected })
        };
        // Four passes of a block's threads are added to the checked range.
        if !(1..1 << 31).contains(&choices) {
            return refuse("choices", choices, "between 1 and 2^31 - 1");
        }
        if top_k == 0 {
            return refuse("top_k", top_k, "at least 1");
        }
        if !(1..=i32::MAX as u32).contains(&n_experts) {
            return refuse("n_experts", n_experts, "between 1 and 2^31 - 1");
        }
        let list = bytes([choices.into(), WORD]);
        Ok(SortParameters {
            experts: operands.span("experts", sort.experts, list, WORD)?,
            bin_of: operands.span("bin_of", sort.bin_of, bytes([n_experts.into(), WORD]), WORD)?,
            order: operands.span("order", sort.order, list, WORD)?,
            choices,
            top_k,
            n_experts,
            n_bins: bins,
            once: sort.once.into(),
            unused: 0,
        })
    }
}

impl Kernels {
    /// Enqueues the sorting of choices by bin, as [`SortedRouting`](crate::plan::SortedRouting)
    /// numbers entries. Invalid experts count as dropped.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn sort_choices(&self, stream: &Stream, sort: &SortArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "sort_choices";
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = SortParameters::of(&mut operands, KERNEL, sort)?;
        let grid = self.limit.grid([sort.bins, 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, experts are compared before they are used, and no more rows are
        // written than there are choices.
        unsafe { self.sort_choices.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Inputs and outputs of [`Kernels::plan_choices`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct PlanArgs<'a> {
    /// Choices and their order. There is at least one bin.
    pub sort: SortArgs<'a>,
    /// Routing weights, `f32 [choices]`.
    pub weights: ByteSpan<'a>,
    /// The number of each expert at its rank, `i32 [n_experts]`.
    pub local_of: ByteSpan<'a>,
    /// The place of each bin in the order of a sum, `i32 [bins]`.
    pub place_of: ByteSpan<'a>,
    /// The row of each choice, `i32 [choices]`, or -1.
    pub rows: ByteSpan<'a>,
    /// The place of the bin of each choice, `i32 [choices]`, or -1. Of choices that share a row,
    /// the first has it.
    pub places: ByteSpan<'a>,
    /// Metadata of each row as [`SortedRouting`](crate::plan::SortedRouting) notes it: its weight,
    /// or where a token has one row in a bin `[2, top_k]`.
    pub notes: ByteSpan<'a>,
    /// Where the weights are kept, `f32 [choices]`, if they are.
    pub kept: Option<ByteSpan<'a>>,
    /// Rows of each bin, `u32 [bins]`.
    pub counts: ByteSpan<'a>,
    /// The first wrong choice of each share of the choices: [`ChoiceFault`] `[bins]`, by share.
    pub faults: ByteSpan<'a>,
}

/// `struct PlanChoices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct PlanParameters {
    sort: SortParameters,
    weights: u64,
    local_of: u64,
    place_of: u64,
    rows: u64,
    places: u64,
    notes: u64,
    kept: u64,
    counts: u64,
    faults: u64,
}

/// A choice that no dispatch can be made with, as [`Kernels::plan_choices`] finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ChoiceFault {
    what: u32,
    choice: u32,
    expert: i32,
}

impl ChoiceFault {
    /// Words of it.
    pub const WORDS: usize = size_of::<ChoiceFault>() / size_of::<u32>();

    /// The error of [`SortedRouting::fill`](crate::plan::SortedRouting::fill) for the choices of
    /// tokens with so many each, of so many experts; none if nothing is wrong.
    pub fn error(self, top_k: u32, experts: u32) -> Option<PlanError> {
        let ChoiceFault { what, choice, expert } = self;
        let (token, k) = (choice / top_k.max(1), choice % top_k.max(1));
        // The numbers of the source.
        match what {
            1 => Some(PlanError::ExpertOutOfRange { token, k, expert, experts }),
            2 => Some(PlanError::NanWeight { token, k }),
            3 => Some(PlanError::ExpertTwice { token, expert }),
            _ => None,
        }
    }
}

impl Kernels {
    /// Enqueues all that [`SortedRouting::fill`](crate::plan::SortedRouting::fill) finds, and the
    /// [`places`](crate::plan::SortedRouting::places) of choices as rows lie packed. Where a share
    /// has a fault, the rest means nothing.
    ///
    /// # Errors
    /// As [`Kernels::sort_choices`].
    pub fn plan_choices(&self, stream: &Stream, plan: &PlanArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "plan_choices";
        let SortArgs { choices, top_k, n_experts, bins, once, .. } = plan.sort;
        if bins == 0 {
            let expected = "at least 1";
            return Err(DeviceError::Shape { kernel: KERNEL, what: "bins", given: 0, expected });
        }
        let words = |count: u32, each: u64| bytes([count.into(), each * WORD]);
        let (list, of_bins) = (words(choices, 1), words(bins, 1));
        let note = if once { 2 * u64::from(top_k) } else { 1 };
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = PlanParameters {
            sort: SortParameters::of(&mut operands, KERNEL, &plan.sort)?,
            weights: operands.span("weights", plan.weights, list, WORD)?,
            local_of: operands.span("local_of", plan.local_of, words(n_experts, 1), WORD)?,
            place_of: operands.span("place_of", plan.place_of, of_bins, WORD)?,
            rows: operands.span("rows", plan.rows, list, WORD)?,
            places: operands.span("places", plan.places, list, WORD)?,
            notes: operands.span("notes", plan.notes, words(choices, note), WORD)?,
            kept: operands.optional("kept", plan.kept, list, WORD)?,
            counts: operands.span("counts", plan.counts, of_bins, WORD)?,
            faults: operands.span("faults", plan.faults, words(bins, ChoiceFault::WORDS as u64), WORD)?,
        };
        let grid = self.limit.grid([bins, 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, bins below `bins`, experts are compared before they are used,
        // and no more rows are written than there are choices.
        unsafe { self.plan_choices.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Inputs and outputs of [`Kernels::place_choices`]. Memory may be larger than the sizes named
/// here.
#[derive(Clone, Copy, Debug)]
pub struct PlaceArgs<'a> {
    /// Number of choices.
    pub choices: u32,
    /// The packed row of each choice, `i32 [choices]`, or -1; of an own row afterwards where it
    /// lands, counted on from `behind`.
    pub rows: ByteSpan<'a>,
    /// Rows before the first that landed.
    pub behind: u32,
    /// Words of metadata of a row.
    pub words: u32,
    /// Metadata of packed rows, `[entries, words]`.
    pub from: ByteSpan<'a>,
    /// Metadata of landed rows, `[places, words]`: own rows and their pads are written.
    pub notes: ByteSpan<'a>,
    /// Own rows, pads counted.
    pub own: u32,
    /// The runs of these, none of them empty, by packed row.
    pub runs: RunArgs<'a>,
}

/// `struct PlaceChoices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct PlaceParameters {
    rows: u64,
    from: u64,
    notes: u64,
    list: RunParameters,
    choices: u32,
    words: u32,
    behind: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues that the choices of own rows find these where they land, and that their metadata
    /// goes there.
    ///
    /// # Errors
    /// As [`Kernels::sort_choices`].
    pub fn place_choices(&self, stream: &Stream, place: &PlaceArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "place_choices";
        let PlaceArgs { choices, behind, words, own, .. } = *place;
        if words == 0 {
            let expected = "at least 1";
            return Err(DeviceError::Shape { kernel: KERNEL, what: "words", given: 0, expected });
        }
        let metadata = |rows: u32| bytes([rows.into(), words.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let list = RunParameters::of(&mut operands, KERNEL, own, Some(place.runs))?;
        let parameters = PlaceParameters {
            rows: operands.span("rows", place.rows, bytes([choices.into(), WORD]), WORD)?,
            from: operands.span("from", place.from, metadata(place.runs.entries), WORD)?,
            notes: operands.span("notes", place.notes, metadata(place.runs.places), WORD)?,
            list,
            choices,
            words,
            behind,
            unused: 0,
        };
        let most = u64::from(choices).max(u64::from(own).saturating_mul(words.into()));
        let grid = self.limit.line(stream, most.div_ceil(THREADS.into()), AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, runs below `count`; every entry is compared with `entries` and
        // every place with `places` before it is used.
        unsafe { self.place_choices.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
