//! A block of the model on a rank of a mesh: norm and attention, norm and experts, each with a
//! residual path; forward, and backward without a tape of candle's.
//!
//! ```text
//!   x [T/tp, width]                                            tokens of this rank
//!   norm -> ColumnParallelLinear -> q k v [T, 3 width/tp]      all tokens of the tensor parallel group, own heads
//!           attention over cp, window by window                all tokens of each window
//!           RowParallelLinear -> [T/tp, width], + x
//!   norm -> MoeLayer over ep -> [T/tp, width], + x             each token comes from one rank
//! ```

use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::gate::{BalanceLoss, CountDivisor, Preset, TokenGroups};
use sidelane::layer::{Experts, GroupedSwiGlu, Input, MoeLayer, Tape};
use sidelane::{Dtype, Group};
use sidelane_parallel::context::{
    AttentionGradients, AttentionShape, RingAttention, RingTape, UlyssesAttention, UlyssesTape,
};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, DelayedWeights, LinearShape, RowParallelLinear,
};

use super::groups::LayerGroups;
use super::pass_calls::Peers;
use super::strategy::{Context, Strategy};
use super::tensors::{Rows, Sections};
use crate::error::{Error, Result};
use crate::settings::Settings;

/// Between layers, each tensor parallel rank has tokens of its own.
pub const BETWEEN: Activations = Activations::SequenceParallel;

/// Sizes of a microbatch on a rank.
#[derive(Clone, Copy, Debug)]
pub struct MicrobatchSizes {
    /// Elements of a token.
    pub width: usize,
    /// Elements of a token's queries on this rank.
    pub own_width: usize,
    /// Elements of a token's keys on this rank, and of its values.
    pub own_kv_width: usize,
    /// The same of what attention keeps of them, with replicas of KV heads.
    kept_kv_width: usize,
    /// Query heads of this rank.
    own_heads: usize,
    /// Windows of a microbatch.
    pub windows: usize,
    /// Tokens of a window.
    pub window: usize,
    /// Those of them on this rank's context parallel part.
    pub piece: usize,
    /// Tokens between layers on this rank.
    pub tokens: usize,
}

impl MicrobatchSizes {
    /// Of a strategy.
    pub fn new(strategy: &Strategy, settings: &Settings) -> MicrobatchSizes {
        let [dp, cp, tp] = [strategy.sizes.dp, strategy.sizes.cp, strategy.sizes.tp].map(|of| of as usize);
        let windows = settings.batch / dp / strategy.microbatches as usize;
        let (width, window) = (settings.shape.width, settings.shape.window);
        let piece = window / cp;
        let AttentionShape { query_heads: own_heads, kv_heads, head_dim, .. } =
            attention_shape(strategy, settings);
        let kept_kv_heads = match strategy.context(&settings.shape) {
            Context::Ulysses => kv_heads.max(cp),
            Context::Ring => kv_heads,
        };
        MicrobatchSizes {
            width,
            own_width: own_heads * head_dim,
            own_kv_width: kv_heads * head_dim,
            kept_kv_width: kept_kv_heads * head_dim,
            own_heads,
            windows,
            window,
            piece,
            tokens: windows * piece / tp,
        }
    }

    /// Elements of a token's queries, keys and values on this rank.
    pub fn own_qkv_width(&self) -> usize {
        self.own_width + 2 * self.own_kv_width
    }

    /// Bytes that the attention of a window keeps: queries, outputs, keys, values and sums, of the
    /// same sizes for [`Context::Ulysses`] and [`Context::Ring`].
    fn attention_bytes(&self) -> u64 {
        let rows = 2 * (self.own_width + self.kept_kv_width) * size_of::<f32>();
        let sums = 2 * self.own_heads * size_of::<f32>();
        (self.piece * (rows + sums)) as u64
    }

    /// Gradient of the loss of a token: a rank's loss is the mean over its own tokens of a step.
    pub fn of_loss(&self, strategy: &Strategy) -> f32 {
        let tokens = self.windows * self.piece * strategy.microbatches as usize;
        1.0 / tokens as f32
    }
}

/// Attention over the tokens of all ranks of the context parallel group.
#[derive(Clone, Copy, Debug)]
pub enum Attention {
    /// Tokens move to their heads.
    Ulysses(UlyssesAttention),
    /// Keys and values travel.
    Ring(RingAttention),
}

enum AttentionTape {
    Ulysses(UlyssesTape),
    Ring(RingTape),
}

impl Attention {
    /// Of the heads of a tensor parallel rank. Collective over the context parallel group.
    ///
    /// # Errors
    /// Those of the group.
    pub fn new(cp: &mut Communicator, strategy: &Strategy, settings: &Settings) -> Result<Attention> {
        let of = attention_shape(strategy, settings);
        Ok(match strategy.context(&settings.shape) {
            Context::Ulysses => Attention::Ulysses(UlyssesAttention::new(cp, of)?),
            Context::Ring => Attention::Ring(RingAttention::new(cp, of)?),
        })
    }

    /// The call that it begins with, forward and backward.
    pub fn first_call(&self) -> CallKind {
        match self {
            Attention::Ulysses(_) => CallKind::AllToAll,
            Attention::Ring(_) => CallKind::AllGather,
        }
    }

    fn forward(&self, cp: &mut Communicator, qkv: &[Vec<f32>; 3]) -> Result<(Vec<f32>, AttentionTape)> {
        let [query, key, value] = qkv;
        Ok(match self {
            Attention::Ulysses(attention) => {
                let (out, tape) = attention.forward(cp, query, key, value)?;
                (out, AttentionTape::Ulysses(tape))
            }
            Attention::Ring(attention) => {
                let (out, tape) = attention.forward(cp, query, key, value)?;
                (out, AttentionTape::Ring(tape))
            }
        })
    }
}

impl AttentionTape {
    fn backward(&self, cp: &mut Communicator, of_out: &[f32]) -> Result<AttentionGradients> {
        Ok(match self {
            AttentionTape::Ulysses(tape) => tape.backward(cp, of_out)?,
            AttentionTape::Ring(tape) => tape.backward(cp, of_out)?,
        })
    }
}

/// The layers of a block.
pub struct Block {
    of_microbatch: MicrobatchSizes,
    attention: Attention,
    qkv: ColumnParallelLinear,
    out: RowParallelLinear,
    moe: MoeLayer,
    /// Ranks that share the experts.
    peers: Peers,
    /// This rank's part of the experts.
    ep: usize,
    /// Bytes of rows that this rank's tokens had brought to other ranks of the experts, and back.
    pub expert_bytes: u64,
}

/// Tensors that a forward pass keeps for the backward pass.
pub struct BlockTape {
    x: Vec<f32>,
    windows: Vec<AttentionTape>,
    attended: Vec<f32>,
    between: Vec<f32>,
    moe: Tape,
    /// Pairs of a token and another rank that has an expert of its choice.
    visits: u64,
}

/// Factors of the gradients of weights. The gradients of the router and of the experts are there
/// already: `MoeLayer` makes them with those of its inputs.
pub struct DelayedBlock {
    qkv: DelayedWeights,
    out: DelayedWeights,
    router: Vec<f32>,
    experts: Vec<f32>,
}

impl BlockTape {
    /// Bytes that it holds, without the rows of experts.
    pub fn bytes(&self, of_microbatch: &MicrobatchSizes) -> u64 {
        let rows = [&self.x, &self.attended, &self.between].map(|rows| size_of_val(&rows[..]) as u64);
        rows.iter().sum::<u64>() + self.windows.len() as u64 * of_microbatch.attention_bytes()
    }
}

impl DelayedBlock {
    /// Bytes that it holds.
    pub fn bytes(&self) -> u64 {
        let made = size_of_val(&self.router[..]) + size_of_val(&self.experts[..]);
        self.qkv.bytes() + self.out.bytes() + made as u64
    }

    /// The gradients of the weights of each section.
    pub fn weights(self) -> Rows {
        let cut = [self.qkv, self.out].map(|delayed| delayed.weights().0).concat();
        Sections { cut, whole: self.router, experts: self.experts }
    }
}

impl Block {
    /// The nth of a model chunk, with weights of zeros.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(
        nth: usize,
        LayerGroups { tp, ep, .. }: &mut LayerGroups,
        attention: Attention,
        strategy: &Strategy,
        settings: &Settings,
    ) -> Result<Block> {
        let of_microbatch = MicrobatchSizes::new(strategy, settings);
        let MicrobatchSizes { width, own_width, .. } = of_microbatch;
        let qkv = LinearShape { inputs: width, outputs: settings.shape.qkv_width() };
        let weight = vec![0.0; of_microbatch.own_qkv_width() * width];
        let qkv = ColumnParallelLinear::new(tp, qkv, BETWEEN, weight, None)?;
        let out = LinearShape { inputs: width, outputs: width };
        let out = RowParallelLinear::new(tp, out, BETWEEN, vec![0.0; own_width * width], None)?;
        let (ffn, own) = (settings.shape.expert_width, settings.shape.experts / strategy.sizes.ep as usize);
        let weights = vec![0.0; GroupedSwiGlu::values(own, width, ffn)];
        let experts = GroupedSwiGlu::new(own, width, ffn, weights).map_err(sidelane::Error::from)?;
        let moe = moe(ep, strategy, settings, of_microbatch, experts)?;
        let (peers, ep) = (Peers::Ep { block: nth }, ep.rank() as usize);
        Ok(Block { of_microbatch, attention, qkv, out, moe, peers, ep, expert_bytes: 0 })
    }

    /// Takes the first values of each section for the weights of this block.
    pub fn load(&mut self, rows: &mut Sections<&[f32]>) {
        for weight in [self.qkv.weight_mut(), self.out.weight_mut()] {
            take(&mut rows.cut, weight);
        }
        take(&mut rows.whole, self.moe.router_mut());
        take(&mut rows.experts, self.moe.experts_mut().weights_mut());
    }

    /// Outputs of this rank's tokens. Collective over tp, cp and ep.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn forward(&mut self, groups: &mut LayerGroups, x: Vec<f32>) -> Result<(Vec<f32>, BlockTape)> {
        let MicrobatchSizes { own_width, windows, piece, .. } = self.of_microbatch;
        let qkv = groups.on_tp(|tp| self.qkv.forward(tp, &norm(&x, self.of_microbatch.width)))?;
        let (mut attended, mut tapes) = (Vec::with_capacity(windows * piece * own_width), Vec::new());
        for of_window in qkv.chunks_exact(piece * self.of_microbatch.own_qkv_width()) {
            let qkv = split(of_window, &self.of_microbatch);
            let (out, tape) = groups.on_cp(|cp| self.attention.forward(cp, &qkv))?;
            attended.extend(out);
            tapes.push(tape);
        }
        let between = sum(&x, &groups.on_tp(|tp| self.out.forward(tp, &attended))?);
        let made = self.moe.forward(&Input::new(&norm(&between, self.of_microbatch.width)));
        groups.progress.count(self.peers, &made);
        let (out, moe) = made?;
        let y = sum(&between, &out);
        let visits = self.visits(&moe);
        // Dispatched rows, and those that are combined.
        self.expert_bytes += 2 * visits * self.row_bytes();
        Ok((y, BlockTape { x, windows: tapes, attended, between, moe, visits }))
    }

    /// Gradients of the inputs, and what those of weights are made of. Collective over tp, cp and
    /// ep.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn backward(
        &mut self,
        groups: &mut LayerGroups,
        tape: BlockTape,
        of_y: &[f32],
    ) -> Result<(Vec<f32>, DelayedBlock)> {
        let MicrobatchSizes { width, own_width, piece, .. } = self.of_microbatch;
        self.expert_bytes += 2 * tape.visits * self.row_bytes();
        let made = self.moe.backward(tape.moe, of_y);
        groups.progress.count(self.peers, &made);
        let moe = made?;
        let of_between = sum(of_y, &norm_backward(&tape.between, &moe.x, width));
        let (of_attended, out) =
            groups.on_tp(|tp| self.out.backward_input(tp, &tape.attended, &of_between))?;
        let mut of_qkv = Vec::new();
        for (tape, of_out) in tape.windows.iter().zip(of_attended.chunks_exact(piece * own_width)) {
            let of = groups.on_cp(|cp| tape.backward(cp, of_out))?;
            of_qkv.extend(interleaved(&of, &self.of_microbatch));
        }
        let (of_normed, qkv) =
            groups.on_tp(|tp| self.qkv.backward_input(tp, &norm(&tape.x, width), &of_qkv))?;
        let of_x = sum(&of_between, &norm_backward(&tape.x, &of_normed, width));
        Ok((of_x, DelayedBlock { qkv, out, router: moe.router, experts: moe.experts }))
    }

    /// Tells the ranks that share the experts that this one does not make its next call.
    pub fn refuse(&mut self, kind: CallKind) {
        self.moe.refuse(kind, PlanError::RefusedHere.into());
    }

    fn row_bytes(&self) -> u64 {
        4 * self.of_microbatch.width as u64
    }

    /// Counts the rows that a dispatch puts to other ranks: one for each token and rank.
    fn visits(&self, tape: &Tape) -> u64 {
        let decision = tape.decision();
        let own = self.moe.experts().count();
        let ranks = |choices: &[i32]| {
            let mut ranks: Vec<usize> = choices.iter().map(|&expert| expert as usize / own).collect();
            ranks.sort_unstable();
            ranks.dedup();
            ranks
        };
        let visited = decision.experts().chunks_exact(decision.top_k() as usize).flat_map(ranks);
        visited.filter(|&rank| rank != self.ep).count() as u64
    }
}

/// Heads of a tensor parallel rank.
pub fn attention_shape(strategy: &Strategy, settings: &Settings) -> AttentionShape {
    let (shape, tp) = (settings.shape, strategy.sizes.tp as usize);
    let (query_heads, kv_heads) = (shape.heads / tp, shape.kv_heads / tp);
    AttentionShape { query_heads, kv_heads, head_dim: shape.width / shape.heads, causal: true }
}

/// The layer of experts of a block, with a router of zeros.
///
/// # Errors
/// Those of the layer's builder.
pub fn moe(
    ep: &Group,
    strategy: &Strategy,
    settings: &Settings,
    of_microbatch: MicrobatchSizes,
    experts: impl Experts + 'static,
) -> Result<MoeLayer> {
    let gate = Preset::Mixtral.config(settings.shape.experts as u32, settings.shape.top_k as u32);
    let gate = gate.map_err(sidelane::Error::from)?;
    // Of each window by itself, as in the plain model, and the mean over a rank's microbatches.
    let balance = BalanceLoss::of(Preset::Mixtral)
        .with_parts(TokenGroups::Consecutive(of_microbatch.windows as u32))
        .with_coefficient(settings.balance / strategy.microbatches as f32)
        .with_share(CountDivisor::OfChoices);
    let builder =
        MoeLayer::builder(ep, gate, of_microbatch.width, experts).dtype(Dtype::F32).balance(balance);
    builder.max_tokens(of_microbatch.tokens as u32).chunks(1).overlap(false).build().map_err(Error::from)
}

/// Queries, keys and values of each token, in vectors of their own.
pub fn split(qkv: &[f32], of_microbatch: &MicrobatchSizes) -> [Vec<f32>; 3] {
    let MicrobatchSizes { own_width, own_kv_width, .. } = *of_microbatch;
    let rows = qkv.chunks_exact(of_microbatch.own_qkv_width());
    [(0, own_width), (own_width, own_kv_width), (own_width + own_kv_width, own_kv_width)]
        .map(|(first, width)| rows.clone().flat_map(|row| &row[first..][..width]).copied().collect())
}

/// Gradients of queries, keys and values, token by token as they were [split].
pub fn interleaved(of: &AttentionGradients, of_microbatch: &MicrobatchSizes) -> Vec<f32> {
    let query = of.query.chunks_exact(of_microbatch.own_width);
    let [key, value] = [&of.key, &of.value].map(|of| of.chunks_exact(of_microbatch.own_kv_width));
    let rows = query.zip(key.zip(value)).flat_map(|(query, (key, value))| [query, key, value]);
    rows.flatten().copied().collect()
}

/// Fills weights with the first values, and goes on behind them.
pub fn take(rows: &mut &[f32], weight: &mut [f32]) {
    let (first, rest) = rows.split_at(weight.len());
    weight.copy_from_slice(first);
    *rows = rest;
}

/// Sums of each two values.
pub fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// By ascending element, from +0.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

fn length(row: &[f32]) -> f32 {
    (dot(row, row) / row.len() as f32 + 1e-6).sqrt()
}

/// Rows to the length of the root of their width.
pub fn norm(x: &[f32], width: usize) -> Vec<f32> {
    let of_row = |row| {
        let length = length(row);
        row.iter().map(move |value| value / length)
    };
    x.chunks_exact(width).flat_map(of_row).collect()
}

/// Gradient of the rows from that of the [normed](norm) ones.
pub fn norm_backward(x: &[f32], of_y: &[f32], width: usize) -> Vec<f32> {
    let of_row = |(row, of_y): (&[f32], &[f32])| {
        let length = length(row);
        let along = dot(row, of_y) / (width as f32 * length * length);
        row.iter().zip(of_y).map(|(value, of)| (of - value * along) / length).collect::<Vec<_>>()
    };
    x.chunks_exact(width).zip(of_y.chunks_exact(width)).flat_map(of_row).collect()
}
