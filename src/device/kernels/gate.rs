//! The launch of `cuda/gate.cu`: the choice of experts, to the bit that of the host's
//! [`Gate`](crate::gate::Gate).

use super::{LayerKernels, Operands, WORD, bytes};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;
use crate::gate::{
    Divisor, GateConfig, GroupScore, Noise, Normalize, ScoreFunction, SecondExpertPolicy, Select,
};

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
        let GateConfig { experts, top_k, score, select, normalise, scaling, .. } = *config;
        let (groups, kept, best_of) = match select {
            Select::Groups { count, kept, by: GroupScore::SumOfBest(n) } => (count, kept, n),
            Select::Groups { count, kept, by: GroupScore::Best } => (count, kept, 1),
            Select::Best => (1, 1, 1),
            _ => return Err(lacks("this way to choose experts")),
        };
        let in_groups = matches!(select, Select::Groups { .. });
        let (divisor, divisor_value) = match normalise {
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
