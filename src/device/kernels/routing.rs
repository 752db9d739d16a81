//! Launches of kernels that choose experts, read routing and plan dispatches: `cuda/gate.cu`,
//! `rank_major_choices.cu`, `counts.cu`, `check.cu`, `sort_choices.cu` and `place_choices.cu`.
//!
//! ```text
//!   gate            logits --> expert ids and weights, to the bit those of the host's `Gate`
//!   choices         expert ids and weights --> metadata of the rows of each slot
//!   counts          expert ids --> rows for each expert, and for each rank
//!   check           heads of received slots: are they of this call, from ranks with the same settings?
//!   sort_choices    expert ids --> rows in the order of bins
//!   plan_choices    expert ids, weights --> the same; rows of each bin, row of each choice, metadata of each row
//!   place_choices   where own rows land --> rows of their choices, and their metadata there
//! ```

use super::rows::RunParameters;
use super::{AT_WORK, Kernels, LayerKernels, Operands, RunArgs, THREADS, VECTOR, WORD, bytes};
use crate::device::module::Grid;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::{DeviceError, PlanError};
use crate::gate::{
    Divisor, GateConfig, GroupScore, Noise, Normalize, ScoreFunction, SecondExpertPolicy, Select,
};
use crate::plan::SlotShape;

/// Inputs and outputs of [`Kernels::choices`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceArgs<'a> {
    /// Number of rows, pads counted.
    pub rows: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Number of local experts.
    pub n_experts: u32,
    /// Metadata of the rows, `[rows, 2, top_k]`: per choice the local expert + 1, or 0; then per
    /// choice its weight.
    pub metadata: ByteSpan<'a>,
    /// The local expert of each row and choice, `i32 [rows, top_k]`, or -1.
    pub experts: ByteSpan<'a>,
    /// The weight of each row and choice, `f32 [rows, top_k]`; 0 where there is no expert.
    pub weights: ByteSpan<'a>,
    /// Rows that chose each local expert, `i64 [n_experts]`.
    pub counts: ByteSpan<'a>,
}

/// `struct Choices` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct ChoiceParameters {
    metadata: u64,
    experts: u64,
    weights: u64,
    counts: u64,
    rows: u32,
    top_k: u32,
    n_experts: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues that what goes with rank-major rows is laid apart, as
    /// [`Handle::row_experts`](crate::ep::Handle::row_experts) and
    /// [`row_weights`](crate::ep::Handle::row_weights) have it on the host, and that rows are
    /// counted by expert.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn choices(&self, stream: &Stream, choices: &ChoiceArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "choices";
        let ChoiceArgs { rows, top_k, n_experts, .. } = *choices;
        if top_k == 0 || top_k >= 1 << 16 {
            let (given, expected) = (top_k.into(), "between 1 and 2^16 - 1");
            return Err(DeviceError::Shape { kernel: KERNEL, what: "top_k", given, expected });
        }
        let words = |each: u64| bytes([rows.into(), top_k.into(), each * WORD]);
        let counts = bytes([n_experts.into(), 2 * WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = ChoiceParameters {
            metadata: operands.span("metadata", choices.metadata, words(2), WORD)?,
            experts: operands.span("experts", choices.experts, words(1), WORD)?,
            weights: operands.span("weights", choices.weights, words(1), WORD)?,
            counts: operands.span("counts", choices.counts, counts, 2 * WORD)?,
            rows,
            top_k,
            n_experts,
            unused: 0,
        };
        let needed = (u64::from(rows) * u64::from(top_k)).div_ceil(THREADS.into()).max(n_experts.into());
        let grid = self.limit.line(stream, needed, AT_WORK);
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // rows below `rows`, choices below `top_k` and counts below `n_experts`.
        unsafe { self.choices.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Experts, or ranks, that a block counts for at a time: `WARP` in the source.
const BINS: u32 = 32;

/// Inputs and outputs of [`Kernels::counts`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct CountArgs<'a> {
    /// Tokens.
    pub tokens: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Number of experts.
    pub n_experts: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Choices, `i32 [tokens, top_k]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// The rank that this one uses for each expert, `i32 [n_experts]`.
    pub rank_of: ByteSpan<'a>,
    /// Choices of each expert, `u32 [n_experts]`.
    pub per_expert: ByteSpan<'a>,
    /// Tokens that chose an expert of each rank, `u32 [ranks]`: rows where layouts are rank-major.
    pub per_rank: ByteSpan<'a>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Counts` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct CountParameters {
    experts: u64,
    rank_of: u64,
    per_expert: u64,
    per_rank: u64,
    status: u64,
    tokens: u32,
    top_k: u32,
    n_experts: u32,
    ranks: u32,
}

impl Kernels {
    /// Enqueues counting: how many rows this rank's tokens are for each expert, and for each rank.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn counts(&self, stream: &Stream, counts: &CountArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "counts";
        let CountArgs { tokens, top_k, n_experts, ranks, .. } = *counts;
        for (what, given) in [("n_experts", n_experts), ("ranks", ranks)] {
            if !(1..=i32::MAX as u32).contains(&given) {
                let (given, expected) = (given.into(), "between 1 and 2^31 - 1");
                return Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
            }
        }
        let (map, choices) = (bytes([n_experts.into(), WORD]), bytes([tokens.into(), top_k.into(), WORD]));
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = CountParameters {
            experts: operands.span("experts", counts.experts, choices, WORD)?,
            rank_of: operands.span("rank_of", counts.rank_of, map, WORD)?,
            per_expert: operands.span("per_expert", counts.per_expert, map, WORD)?,
            per_rank: operands.span("per_rank", counts.per_rank, bytes([ranks.into(), WORD]), WORD)?,
            status: operands.word(counts.status)?,
            tokens,
            top_k,
            n_experts,
            ranks,
        };
        let grid = self.limit.grid([n_experts.div_ceil(BINS) + ranks.div_ceil(BINS), 1]);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, and every expert and rank is compared before it is used.
        unsafe { self.counts.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Inputs of [`Kernels::check`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The shape of the slots.
    pub shape: SlotShape,
    /// Number of ranks.
    pub ranks: u32,
    /// This rank.
    pub rank: u32,
    /// The slots that this rank received, one for each rank, one behind the other.
    pub received: ByteSpan<'a>,
    /// The call of which they must be: the word that [`Kernels::pack`] counts in.
    pub counter: Word<'a, u64>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
    /// Where this call's own verdict is written: the status or, if a rank refuses the call, why.
    /// The upper half is the number of the call, modulo 2^32.
    pub verdict: Word<'a, u64>,
    /// The expected digest in the header of every slot.
    pub digest: u64,
}

/// `struct Check` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct CheckParameters {
    received: u64,
    slot_bytes: u64,
    counter: u64,
    status: u64,
    verdict: u64,
    digest: u64,
    ranks: u32,
    me: u32,
    choices: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues a comparison of the heads of received slots with this rank's digest and counter:
    /// rows of another call, or of ranks with other settings, must not be used. If a rank refuses
    /// the call, all slots are left without rows. It must run before the sources may write their
    /// next slots.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn check(&self, stream: &Stream, check: &Check<'_>) -> Result<(), DeviceError> {
        if check.rank >= check.ranks {
            let (given, expected) = (check.rank.into(), "one of the ranks");
            return Err(DeviceError::Shape { kernel: "check", what: "rank", given, expected });
        }
        let received = bytes([check.ranks.into(), check.shape.bytes()]);
        let mut operands = Operands::of("check", stream);
        let parameters = CheckParameters {
            received: operands.span("received", check.received, received, VECTOR)?,
            slot_bytes: check.shape.bytes(),
            counter: operands.word(check.counter)?,
            status: operands.word(check.status)?,
            verdict: operands.word(check.verdict)?,
            digest: check.digest,
            ranks: check.ranks,
            me: check.rank,
            choices: check.shape.max_tokens() * check.shape.top_k(),
            unused: 0,
        };
        // SAFETY: the struct is the one of the source. The kernel stays inside the heads of the
        // checked slots and the experts behind them.
        unsafe { self.check.launch_struct(stream, operands.held(), Grid::line(1, THREADS), &parameters) }
    }
}

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
    /// Metadata of each row as [`SortedRouting`](crate::plan::SortedRouting) has it: its weight,
    /// or where a token has one row in a bin `[2, top_k]`.
    pub metadata: ByteSpan<'a>,
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
    metadata: u64,
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
        let of_row = if once { 2 * u64::from(top_k) } else { 1 };
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = PlanParameters {
            sort: SortParameters::of(&mut operands, KERNEL, &plan.sort)?,
            weights: operands.span("weights", plan.weights, list, WORD)?,
            local_of: operands.span("local_of", plan.local_of, words(n_experts, 1), WORD)?,
            place_of: operands.span("place_of", plan.place_of, of_bins, WORD)?,
            rows: operands.span("rows", plan.rows, list, WORD)?,
            places: operands.span("places", plan.places, list, WORD)?,
            metadata: operands.span("metadata", plan.metadata, words(choices, of_row), WORD)?,
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
    pub metadata: ByteSpan<'a>,
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
    metadata: u64,
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
            metadata: operands.span("metadata", place.metadata, metadata(place.runs.places), WORD)?,
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

/// The most experts and choices that a block has room for: `GATE_EXPERTS` and `GATE_CHOICES` in the
/// source.
const EXPERTS: u32 = 1024;
const CHOICES: u32 = 64;

/// Inputs and outputs of [`LayerKernels::gate`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct GateArgs<'a> {
    /// Tokens.
    pub tokens: u32,
    /// The router's logits, `f32 [tokens, experts]`.
    pub logits: ByteSpan<'a>,
    /// Added to the scores for the choice alone, `f32 [experts]`; finite.
    pub bias: Option<ByteSpan<'a>>,
    /// Which tokens choose, `u8 [tokens]`; all do without it.
    pub used: Option<ByteSpan<'a>>,
    /// Choices, best first, `i32 [tokens, top_k]`; -1 for tokens that do not choose.
    pub experts: ByteSpan<'a>,
    /// Their weights, `f32 [tokens, top_k]`.
    pub weights: ByteSpan<'a>,
    /// Where 1 is written if a logit is not finite: its token then chooses nothing.
    pub status: Word<'a, u32>,
}

/// `struct Gate` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct GateParameters {
    logits: u64,
    bias: u64,
    used: u64,
    ids: u64,
    weights: u64,
    status: u64,
    tokens: u32,
    experts: u32,
    top_k: u32,
    score: u32,
    by_scores: u32,
    groups: u32,
    kept: u32,
    best_of: u32,
    divisor: u32,
    divisor_value: f32,
    scaling: f32,
    unused: u32,
}

impl LayerKernels {
    /// The first setting of a gate that [`gate`](Self::gate) does not have: such a gate is the
    /// host's.
    pub fn gate_lacks(config: &GateConfig) -> Option<&'static str> {
        let lacks = [
            (config.score == ScoreFunction::SqrtSoftplus, "scores by the root of softplus"),
            (matches!(config.select, Select::Sinkhorn { .. }), "Sinkhorn's balancing"),
            (config.noise != Noise::None, "noise"),
            (config.second != SecondExpertPolicy::All, "second choices that are thinned out"),
            (config.capacity.is_some(), "a capacity"),
            (config.experts > EXPERTS, "more than 1024 experts"),
            (config.top_k > CHOICES, "more than 64 choices"),
        ];
        lacks.into_iter().find_map(|(asked, feature)| asked.then_some(feature))
    }

    /// Enqueues the choice of experts for each token, and their weights.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] for a gate that [lacks](Self::gate_lacks) a kernel;
    /// [`DeviceError::TooSmall`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn gate(&self, stream: &Stream, config: &GateConfig, gate: &GateArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "gate";
        let lacks =
            |what| DeviceError::Shape { kernel: KERNEL, what, given: 1, expected: "a gate without it" };
        if let Some(what) = Self::gate_lacks(config) {
            return Err(lacks(what));
        }
        let GateConfig { experts, top_k, score, select, normalize, scaling, .. } = *config;
        let (groups, kept, best_of) = match select {
            Select::Groups { count, kept, by: GroupScore::SumOfBest(n) } => (count, kept, n),
            Select::Groups { count, kept, by: GroupScore::Best } => (count, kept, 1),
            Select::Best => (1, 1, 1),
            _ => return Err(lacks("this way to choose experts")),
        };
        let in_groups = matches!(select, Select::Groups { .. });
        let (divisor, divisor_value) = match normalize {
            Normalize::Never => (0, 0.0),
            Normalize::BeforeDrop(Divisor::SumPlus(more)) | Normalize::AfterDrop(Divisor::SumPlus(more)) => {
                (1, more)
            }
            Normalize::BeforeDrop(Divisor::SumAtLeast(least))
            | Normalize::AfterDrop(Divisor::SumAtLeast(least)) => (2, least),
            _ => return Err(lacks("this divisor of weights")),
        };
        let score = match score {
            ScoreFunction::Softmax => 0,
            ScoreFunction::SoftmaxOfChosen => 1,
            ScoreFunction::Sigmoid => 2,
            _ => return Err(lacks("this function of scores")),
        };
        let choices = bytes([gate.tokens.into(), top_k.into(), WORD]);
        let logits = bytes([gate.tokens.into(), experts.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = GateParameters {
            logits: operands.span("logits", gate.logits, logits, WORD)?,
            bias: operands.optional("bias", gate.bias, bytes([experts.into(), WORD]), WORD)?,
            used: operands.optional("used", gate.used, Some(gate.tokens.into()), 1)?,
            ids: operands.span("experts", gate.experts, choices, WORD)?,
            weights: operands.span("weights", gate.weights, choices, WORD)?,
            status: operands.word(gate.status)?,
            tokens: gate.tokens,
            experts,
            top_k,
            score,
            by_scores: (in_groups && config.score != ScoreFunction::SoftmaxOfChosen || gate.bias.is_some())
                .into(),
            groups,
            kept,
            best_of,
            divisor,
            divisor_value,
            scaling,
            unused: 0,
        };
        let grid = self.limit.line(stream, gate.tokens.into(), 2);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, experts below `experts` and choices below `top_k`, for which its
        // block has room.
        unsafe { self.gate.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
