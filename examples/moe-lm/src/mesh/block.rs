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
use sidelane::gate::{BalanceLoss, CountDivisor, Preset, TokenGroups};
use sidelane::layer::{Experts, GroupedSwiGlu, Input, MoeLayer, Tape};
use sidelane::{Dtype, Group};
use sidelane_parallel::context::{
    AttentionGradients, AttentionShape, RingAttention, RingTape, UlyssesAttention, UlyssesTape,
};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, DelayedWeights, LinearShape, RowParallelLinear,
};

use super::strategy::{Context, Strategy};
use super::tensors::{Rows, Sections};
use crate::error::{Error, Result};
use crate::reference::InTurn;
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
    pub fn new(strategy: &Strategy, settings: &Settings, parts: usize) -> MicrobatchSizes {
        let [dp, cp, tp] = [strategy.sizes.dp, strategy.sizes.cp, strategy.sizes.tp].map(|of| of as usize);
        let windows = settings.batch / parts / dp / strategy.microbatches as usize;
        let (width, window) = (settings.shape.width, settings.shape.window);
        let piece = window / cp;
        MicrobatchSizes { width, own_width: width / tp, windows, window, piece, tokens: windows * piece / tp }
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
        let (shape, tp) = (settings.shape, strategy.sizes.tp as usize);
        let (heads, head_dim) = (shape.heads / tp, shape.width / shape.heads);
        let of = AttentionShape { query_heads: heads, kv_heads: heads, head_dim, causal: true };
        Ok(match strategy.context(&shape) {
            Context::Ulysses => Attention::Ulysses(UlyssesAttention::new(cp, of)?),
            Context::Ring => Attention::Ring(RingAttention::new(cp, of)?),
        })
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

impl DelayedBlock {
    /// The gradients of the weights of each section.
    pub fn weights(self) -> Rows {
        let cut = [self.qkv, self.out].map(|delayed| delayed.weights().0).concat();
        Sections { cut, whole: self.router, experts: self.experts }
    }
}

impl Block {
    /// With weights of zeros. `in_turn` is the number of ranks whose tokens the experts of a
    /// [reference](super::MeshTrainer::reference) get in turn.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(
        tp: &mut Communicator,
        ep: &Group,
        attention: Attention,
        (strategy, settings): (&Strategy, &Settings),
        (of_microbatch, in_turn): (MicrobatchSizes, Option<usize>),
    ) -> Result<Block> {
        let MicrobatchSizes { width, own_width, .. } = of_microbatch;
        let plan = sidelane::Error::from;
        let qkv = LinearShape { inputs: width, outputs: 3 * width };
        let qkv = ColumnParallelLinear::new(tp, qkv, BETWEEN, vec![0.0; 3 * own_width * width], None)?;
        let out = LinearShape { inputs: width, outputs: width };
        let out = RowParallelLinear::new(tp, out, BETWEEN, vec![0.0; own_width * width], None)?;
        let (ffn, own) = (settings.shape.expert_width, settings.shape.experts / strategy.sizes.ep as usize);
        let weights = vec![0.0; GroupedSwiGlu::values(own, width, ffn)];
        let experts = GroupedSwiGlu::new(own, width, ffn, weights).map_err(plan)?;
        let moe = match in_turn {
            Some(ranks) => moe(ep, strategy, settings, of_microbatch, InTurn::new(experts, ranks))?,
            None => moe(ep, strategy, settings, of_microbatch, experts)?,
        };
        Ok(Block { of_microbatch, attention, qkv, out, moe, ep: ep.rank() as usize, expert_bytes: 0 })
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
    pub fn forward(
        &mut self,
        (tp, cp): (&mut Communicator, &mut Communicator),
        x: Vec<f32>,
    ) -> Result<(Vec<f32>, BlockTape)> {
        let MicrobatchSizes { own_width, windows, piece, .. } = self.of_microbatch;
        let qkv = self.qkv.forward(tp, &norm(&x, self.of_microbatch.width))?;
        let (mut attended, mut tapes) = (Vec::with_capacity(windows * piece * own_width), Vec::new());
        for of_window in qkv.chunks_exact(piece * 3 * own_width) {
            let (out, tape) = self.attention.forward(cp, &split(of_window, own_width))?;
            attended.extend(out);
            tapes.push(tape);
        }
        let between = sum(&x, &self.out.forward(tp, &attended)?);
        let (out, moe) = self.moe.forward(&Input::new(&norm(&between, self.of_microbatch.width)))?;
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
        (tp, cp): (&mut Communicator, &mut Communicator),
        tape: BlockTape,
        of_y: &[f32],
    ) -> Result<(Vec<f32>, DelayedBlock)> {
        let MicrobatchSizes { width, own_width, piece, .. } = self.of_microbatch;
        self.expert_bytes += 2 * tape.visits * self.row_bytes();
        let moe = self.moe.backward(tape.moe, of_y)?;
        let of_between = sum(of_y, &norm_backward(&tape.between, &moe.x, width));
        let (of_attended, out) = self.out.backward_input(tp, &tape.attended, &of_between)?;
        let mut of_qkv = Vec::with_capacity(3 * of_attended.len());
        for (tape, of_out) in tape.windows.iter().zip(of_attended.chunks_exact(piece * own_width)) {
            let AttentionGradients { query, key, value } = tape.backward(cp, of_out)?;
            let rows = [&query, &key, &value].map(|of| of.chunks_exact(own_width));
            let [query, key, value] = rows;
            for (query, (key, value)) in query.zip(key.zip(value)) {
                [query, key, value].into_iter().for_each(|row| of_qkv.extend_from_slice(row));
            }
        }
        let (of_normed, qkv) = self.qkv.backward_input(tp, &norm(&tape.x, width), &of_qkv)?;
        let of_x = sum(&of_between, &norm_backward(&tape.x, &of_normed, width));
        Ok((of_x, DelayedBlock { qkv, out, router: moe.router, experts: moe.experts }))
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

fn moe(
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
fn split(qkv: &[f32], width: usize) -> [Vec<f32>; 3] {
    [0, 1, 2]
        .map(|of| qkv.chunks_exact(3 * width).flat_map(|row| &row[of * width..][..width]).copied().collect())
}

/// Fills weights with the first values, and goes on behind them.
pub fn take(rows: &mut &[f32], weight: &mut [f32]) {
    let (first, rest) = rows.split_at(weight.len());
    weight.copy_from_slice(first);
    *rows = rest;
}

fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
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
