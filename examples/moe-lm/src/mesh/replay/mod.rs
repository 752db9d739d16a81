//! A mesh that one process replays: the sums of all its ranks, in their order, with nothing
//! between ranks. It judges the bits of all meshes.
//!
//! ```text
//!   a microbatch of a data parallel rank        tokens of each cp rank
//!     qkv          a product for each part of tp
//!     attention    blocks of cp in the order of the ring; one block with Ulysses
//!     out          a product for each part of tp, and their sum from +0 by ascending rank
//!     experts      tokens of each tp rank in turn; the gradient of an expert is one product over
//!                  the rows of the ep ranks that share it
//!     loss         parts of the vocabulary; sums as for out
//!   backward       the gradients of inputs of qkv and of the head are sums as for out
//!   gradients      of each rank by themselves, microbatch by microbatch; then from +0 by ascending
//!                  rank, and one division
//! ```
//!
//! Stages, schedules, recomputation and ZeRO change no bit, so a replay knows none of them. Norms
//! and residual sums are those of [`block`](super::block), the gate and the experts those of
//! Sidelane's layer on one rank. All that ranks exchange is written here anew.

mod attention;
mod cut;
mod loss;

use sidelane::Group;
use sidelane::layer::{GroupedSwiGlu, Input, MoeLayer, Tape};

use self::attention::{Attended, Window};
use self::cut::{Cut, CutTensor, of_inputs, of_weights, outputs, sum_of_ranks};
use self::loss::Logits;
use super::block::{
    MicrobatchSizes, attention_shape, interleaved, moe, norm, norm_backward, split, sum, take,
};
use super::groups::positions;
use super::strategy::{Context, Strategy};
use super::tensors::{Rows, Sections, Tensor};
use crate::batches::Windows;
use crate::error::Result;
use crate::reference::InTurn;
use crate::settings::Settings;

/// Rows of all tokens of each context parallel rank.
type OfRanks = Vec<Vec<f32>>;

/// The layers of all ranks, and what a step has come to.
pub struct Replay {
    /// Sum of the losses of all tokens.
    pub loss: f64,
    /// That of the ranks.
    pub strategy: Strategy,
    settings: Settings,
    of_microbatch: MicrobatchSizes,
    /// Positions of the tokens of each cp rank.
    positions: Vec<Vec<usize>>,
    /// By tp rank.
    cut: Vec<Cut>,
    place: Vec<f32>,
    layers: Vec<MoeLayer>,
    /// Elements of the whole tensors of each kind.
    elements: Sections<usize>,
    sums: Sums,
}

/// Sums of gradients over the microbatches of each rank. Ranks ascend by dp, then cp, then tp.
struct Sums {
    /// By rank of dp x cp, and by tp rank.
    cut: Vec<Vec<Vec<f32>>>,
    /// The same of the head.
    head: Vec<Vec<Vec<f32>>>,
    /// By rank of dp x cp x tp.
    whole: Vec<Vec<f32>>,
    /// By rank of edp: those of all experts.
    experts: Vec<Vec<f32>>,
}

/// Tensors that the forward pass of a block keeps.
struct BlockTape {
    x: OfRanks,
    /// By window, and by tp rank.
    windows: Vec<Vec<Attended>>,
    /// By tp rank.
    attended: Vec<OfRanks>,
    between: OfRanks,
    /// By rank of cp x tp.
    moe: Vec<Tape>,
}

impl Replay {
    /// Of the ranks of a strategy, with weights of zeros. `tensors` are the whole ones. `alone` is
    /// a group of this process alone.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(
        alone: &Group,
        strategy: &Strategy,
        settings: &Settings,
        tensors: &Sections<Vec<&Tensor>>,
    ) -> Result<Replay> {
        let [cp, tp] = [strategy.sizes.cp, strategy.sizes.tp].map(|of| of as usize);
        let of_microbatch = MicrobatchSizes::new(strategy, settings);
        let shape = settings.shape;
        let layer = |_| {
            let sizes = (shape.experts, shape.width, shape.expert_width);
            let weights = vec![0.0; GroupedSwiGlu::values(sizes.0, sizes.1, sizes.2)];
            let experts = GroupedSwiGlu::new(sizes.0, sizes.1, sizes.2, weights);
            let experts = InTurn::new(experts.map_err(sidelane::Error::from)?, strategy.sizes.ep as usize);
            moe(alone, strategy, settings, of_microbatch, experts)
        };
        let count = |of: &Vec<&Tensor>| of.iter().map(|tensor| tensor.elements()).sum();
        Ok(Replay {
            loss: 0.0,
            strategy: *strategy,
            settings: *settings,
            of_microbatch,
            positions: (0..cp).map(|rank| positions(rank, strategy, settings)).collect(),
            cut: (0..tp).map(|rank| Cut::new(strategy, settings, rank, &tensors.cut)).collect(),
            place: vec![0.0; shape.window * shape.width],
            layers: (0..shape.layers).map(layer).collect::<Result<_>>()?,
            elements: tensors.as_ref().map(count),
            sums: Sums { cut: Vec::new(), head: Vec::new(), whole: Vec::new(), experts: Vec::new() },
        })
    }

    /// Gives all layers their weights.
    pub fn load(&mut self, rows: Sections<&[f32]>) {
        let Sections { cut, mut whole, mut experts } = rows;
        self.cut.iter_mut().for_each(|part| part.load(cut));
        take(&mut whole, &mut self.place);
        for layer in &mut self.layers {
            take(&mut whole, layer.router_mut());
            take(&mut experts, layer.experts_mut().weights_mut());
        }
    }

    /// All passes of a step. `windows` are those of a data parallel rank and a microbatch.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn step(&mut self, windows: impl Fn(usize, usize) -> Windows) -> Result<()> {
        let [dp, cp, tp, ep] = self.sizes();
        let Sections { whole, experts, .. } = self.elements;
        let of_part = |_| self.cut.iter().map(|part| vec![0.0; part.elements()]).collect();
        let of_head = |_| self.cut.iter().map(|part| vec![0.0; part.range(CutTensor::Head).len()]).collect();
        self.sums = Sums {
            cut: (0..dp * cp).map(of_part).collect(),
            head: (0..dp * cp).map(of_head).collect(),
            whole: vec![vec![0.0; whole]; dp * cp * tp],
            experts: vec![vec![0.0; experts]; dp * cp * tp / ep],
        };
        self.loss = 0.0;
        for microbatch in 0..self.strategy.microbatches as usize {
            for rank in 0..dp {
                self.passes(rank, &windows(rank, microbatch))?;
            }
        }
        // Tied, behind all that the embedding has.
        let ranks = self.sums.cut.iter_mut().flatten().zip(self.sums.head.iter().flatten());
        for ((sums, of_head), part) in ranks.zip(self.cut.iter().cycle()) {
            add(&mut sums[part.range(CutTensor::Head)], of_head);
        }
        Ok(())
    }

    /// Means over ranks of the step's gradients, in the order of the whole tensors. `scales` are a
    /// factor and a divisor of each rank's.
    pub fn gradients(&self, scales: Sections<(f32, f32)>) -> Rows {
        let ranks = self.sums.cut.iter();
        let cut = self.cut.iter().enumerate().fold(vec![0.0; self.elements.cut], |mut all, (nth, part)| {
            let of_part = ranks.clone().map(|parts| &parts[nth]);
            part.scatter(&mean(of_part, part.elements(), scales.cut), &mut all);
            all
        });
        let Sections { whole, experts, .. } = self.elements;
        let whole = mean(self.sums.whole.iter(), whole, scales.whole);
        Sections { cut, whole, experts: mean(self.sums.experts.iter(), experts, scales.experts) }
    }

    fn sizes(&self) -> [usize; 4] {
        let sizes = self.strategy.sizes;
        [sizes.dp, sizes.cp, sizes.tp, sizes.ep].map(|of| of as usize)
    }

    /// Both passes over a microbatch of a data parallel rank.
    fn passes(&mut self, dp: usize, windows: &Windows) -> Result<()> {
        let of_ranks = |of: &[u32]| -> Vec<Vec<u32>> {
            let of_rank = |positions: &Vec<usize>| {
                let windows = of.chunks_exact(self.of_microbatch.window);
                windows.flat_map(|of| positions.iter().map(|&position| of[position])).collect()
            };
            self.positions.iter().map(of_rank).collect()
        };
        let (tokens, following) = (of_ranks(&windows.tokens), of_ranks(&windows.following));
        let (mut x, mut tapes) = (self.embed(&tokens), Vec::new());
        for layer in 0..self.layers.len() {
            let (y, tape) = self.block(layer, x)?;
            x = y;
            tapes.push(tape);
        }
        let mut of_x = self.losses(dp, &x, &following);
        for (layer, tape) in tapes.into_iter().enumerate().rev() {
            of_x = self.block_backward(dp, layer, tape, of_x)?;
        }
        self.embed_backward(dp, &tokens, &of_x);
        Ok(())
    }

    fn embed(&self, tokens: &[Vec<u32>]) -> OfRanks {
        let width = self.of_microbatch.width;
        let of_rank = |(tokens, positions): (&Vec<u32>, &Vec<usize>)| {
            let row = |(&token, &position): (&u32, &usize)| {
                let rows = self.cut[0].tensor(CutTensor::Token).len() / width;
                let (part, row) = (token as usize / rows, token as usize % rows);
                let token = &self.cut[part].tensor(CutTensor::Token)[row * width..][..width];
                // The sum over tp ranks makes a -0 a +0.
                let token = token.iter().map(|value| 0.0 + value);
                token.zip(&self.place[position * width..]).map(|(value, place)| value + place)
            };
            tokens.iter().zip(positions.iter().cycle()).flat_map(row).collect()
        };
        tokens.iter().zip(&self.positions).map(of_rank).collect()
    }

    fn embed_backward(&mut self, dp: usize, tokens: &[Vec<u32>], of_x: &OfRanks) {
        let [_, cp, tp, _] = self.sizes();
        let width = self.of_microbatch.width;
        for rank in 0..cp {
            let rows = self.cut[0].tensor(CutTensor::Token).len() / width;
            let mut of_tokens = vec![vec![0.0; rows * width]; tp];
            let mut of_places = vec![vec![0.0; self.place.len()]; tp];
            let positions = self.positions[rank].iter().cycle();
            let tokens = tokens[rank].iter().zip(positions);
            for (nth, ((&token, &position), of)) in tokens.zip(of_x[rank].chunks_exact(width)).enumerate() {
                let (part, row) = (token as usize / rows, token as usize % rows);
                add(&mut of_tokens[part][row * width..][..width], of);
                let owner = nth / self.of_microbatch.tokens;
                add(&mut of_places[owner][position * width..][..width], of);
            }
            for (nth, (of_token, of_place)) in of_tokens.iter().zip(&of_places).enumerate() {
                let part = &self.cut[nth];
                add(&mut self.sums.cut[dp * cp + rank][nth][part.range(CutTensor::Token)], of_token);
                add(&mut self.sums.whole[(dp * cp + rank) * tp + nth][..of_place.len()], of_place);
            }
        }
    }

    fn block(&mut self, layer: usize, x: OfRanks) -> Result<(OfRanks, BlockTape)> {
        let MicrobatchSizes { width, windows, .. } = self.of_microbatch;
        let [_, cp, tp, _] = self.sizes();
        let normed: OfRanks = x.iter().map(|x| norm(x, width)).collect();
        let qkv: Vec<OfRanks> =
            self.cut.iter().map(|part| outputs(&normed, part.tensor(CutTensor::Qkv(layer)), width)).collect();
        let of_window = |window| {
            let of_part = |qkv: &OfRanks| self.window(qkv, window).attend();
            qkv.iter().map(of_part).collect::<Vec<_>>()
        };
        let tapes: Vec<Vec<Attended>> = (0..windows).map(of_window).collect();
        let of_part = |nth: usize| -> OfRanks {
            let mut of_ranks = vec![Vec::new(); cp];
            for window in &tapes {
                let out = window[nth].outputs();
                let each = out.chunks_exact(out.len() / cp);
                of_ranks.iter_mut().zip(each).for_each(|(of_rank, rows)| of_rank.extend_from_slice(rows));
            }
            of_ranks
        };
        let attended: Vec<OfRanks> = (0..tp).map(of_part).collect();
        let own = self.of_microbatch.own_width;
        let parts = self
            .cut
            .iter()
            .zip(&attended)
            .map(|(part, rows)| outputs(rows, part.tensor(CutTensor::Out(layer)), own));
        let out = sum_of_ranks(parts);
        let between: OfRanks = x.iter().zip(&out).map(|(x, out)| sum(x, out)).collect();
        let (mut y, mut moe) = (Vec::new(), Vec::new());
        for rows in &between {
            let mut out = Vec::new();
            for rows in rows.chunks_exact(self.of_microbatch.tokens * width) {
                let (rows, tape) = self.layers[layer].forward(&Input::new(&norm(rows, width)))?;
                out.extend(rows);
                moe.push(tape);
            }
            y.push(sum(rows, &out));
        }
        Ok((y, BlockTape { x, windows: tapes, attended, between, moe }))
    }

    /// A window of all cp ranks, with the heads of a tp rank.
    fn window(&self, qkv: &OfRanks, window: usize) -> Window {
        let MicrobatchSizes { windows, .. } = self.of_microbatch;
        let mut rows = [Vec::new(), Vec::new(), Vec::new()];
        for of_rank in qkv {
            let of_window = of_rank.chunks_exact(of_rank.len() / windows).nth(window).unwrap_or_default();
            let of_window = split(of_window, &self.of_microbatch);
            rows.iter_mut().zip(of_window).for_each(|(rows, of)| rows.extend(of));
        }
        let [query, key, value] = rows;
        let (ranks, replicas) = match self.strategy.context(&self.settings.shape) {
            Context::Ulysses => (1, self.positions.len()),
            Context::Ring => (self.positions.len(), 1),
        };
        let shape = attention_shape(&self.strategy, &self.settings);
        Window { shape, ranks, replicas, positions: self.positions.concat(), query, key, value }
    }

    fn block_backward(&mut self, dp: usize, layer: usize, tape: BlockTape, of_y: OfRanks) -> Result<OfRanks> {
        let MicrobatchSizes { width, own_width, .. } = self.of_microbatch;
        let [_, cp, tp, ep] = self.sizes();
        let mut moe = tape.moe.into_iter();
        let mut of_between = Vec::new();
        for (nth, (of_y, between)) in of_y.iter().zip(&tape.between).enumerate() {
            let mut of_normed = Vec::new();
            let of_ranks = of_y.chunks_exact(self.of_microbatch.tokens * width);
            for ((tp_rank, of_y), tape) in of_ranks.enumerate().zip(&mut moe) {
                let of_moe = self.layers[layer].backward(tape, of_y)?;
                of_normed.extend(of_moe.x);
                let rank = (dp * cp + nth) * tp + tp_rank;
                let first = self.place.len() + layer * of_moe.router.len();
                add(&mut self.sums.whole[rank][first..], &of_moe.router);
                // The last rank of those that share experts has the gradients of all their rows.
                if rank % ep == ep - 1 {
                    let first = layer * of_moe.experts.len();
                    add(&mut self.sums.experts[rank / ep][first..], &of_moe.experts);
                }
            }
            of_between.push(sum(of_y, &norm_backward(between, &of_normed, width)));
        }
        let mut of_qkv: Vec<OfRanks> = Vec::new();
        for (nth, attended) in tape.attended.iter().enumerate() {
            let part = &self.cut[nth];
            let of_attended = of_inputs(&of_between, part.tensor(CutTensor::Out(layer)), width);
            for (rank, (of_out, rows)) in of_between.iter().zip(attended).enumerate() {
                let of_weight = of_weights(of_out, rows, (width, own_width));
                add(&mut self.sums.cut[dp * cp + rank][nth][part.range(CutTensor::Out(layer))], &of_weight);
            }
            let mut of_ranks = vec![Vec::new(); cp];
            for (window, of) in tape.windows.iter().enumerate() {
                let of_window: Vec<f32> = of_attended
                    .iter()
                    .flat_map(|of| of.chunks_exact(of.len() / tape.windows.len()).nth(window))
                    .flatten()
                    .copied()
                    .collect();
                let rows = interleaved(&of[nth].backward(&of_window), &self.of_microbatch);
                let each = rows.chunks_exact(rows.len() / cp);
                of_ranks.iter_mut().zip(each).for_each(|(of_rank, rows)| of_rank.extend_from_slice(rows));
            }
            of_qkv.push(of_ranks);
        }
        let normed: OfRanks = tape.x.iter().map(|x| norm(x, width)).collect();
        for (nth, of_part) in of_qkv.iter().enumerate() {
            let part = &self.cut[nth];
            for (rank, (of_rows, normed)) in of_part.iter().zip(&normed).enumerate() {
                let of_weight =
                    of_weights(of_rows, normed, (part.tensor(CutTensor::Qkv(layer)).len() / width, width));
                add(&mut self.sums.cut[dp * cp + rank][nth][part.range(CutTensor::Qkv(layer))], &of_weight);
            }
        }
        let parts = self.cut.iter().zip(&of_qkv);
        let of_normed = sum_of_ranks(parts.map(|(part, of)| {
            of_inputs(
                of,
                part.tensor(CutTensor::Qkv(layer)),
                part.tensor(CutTensor::Qkv(layer)).len() / width,
            )
        }));
        let rows = of_between.iter().zip(tape.x.iter().zip(&of_normed));
        Ok(rows.map(|(of, (x, of_normed))| sum(of, &norm_backward(x, of_normed, width))).collect())
    }

    /// Adds the losses of all tokens. Returns the gradients of the last block's outputs.
    fn losses(&mut self, dp: usize, x: &OfRanks, following: &[Vec<u32>]) -> OfRanks {
        let width = self.of_microbatch.width;
        let [_, cp, ..] = self.sizes();
        let normed: OfRanks = x.iter().map(|x| norm(x, width)).collect();
        let parts: Vec<OfRanks> =
            self.cut.iter().map(|part| outputs(&normed, part.tensor(CutTensor::Head), width)).collect();
        let of_loss = self.of_microbatch.of_loss(&self.strategy);
        let columns = self.cut[0].tensor(CutTensor::Head).len() / width;
        let mut of_logits: Vec<OfRanks> = vec![Vec::new(); parts.len()];
        for (rank, following) in following.iter().enumerate() {
            let logits = Logits { parts: parts.iter().map(|of| &of[rank][..]).collect(), columns };
            let (loss, gradients) = logits.cross_entropy(following, of_loss);
            self.loss += loss;
            of_logits.iter_mut().zip(gradients).for_each(|(all, of)| all.push(of));
            for (nth, of) in of_logits.iter().enumerate() {
                let of_weight = of_weights(&of[rank], &normed[rank], (columns, width));
                add(&mut self.sums.head[dp * cp + rank][nth], &of_weight);
            }
        }
        let parts = self
            .cut
            .iter()
            .zip(&of_logits)
            .map(|(part, of)| of_inputs(of, part.tensor(CutTensor::Head), columns));
        let of_normed = sum_of_ranks(parts);
        x.iter().zip(&of_normed).map(|(x, of)| norm_backward(x, of, width)).collect()
    }
}

fn add(sums: &mut [f32], row: &[f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, of)| *sum += of);
}

/// From +0 by ascending rank, and one division.
fn mean<'a>(
    ranks: impl ExactSizeIterator<Item = &'a Vec<f32>>,
    elements: usize,
    (factor, divisor): (f32, f32),
) -> Vec<f32> {
    let count = ranks.len() as f32;
    let mut sums = vec![0.0; elements];
    for rank in ranks {
        sums.iter_mut().zip(rank).for_each(|(sum, of)| *sum += of * factor / divisor);
    }
    sums.iter_mut().for_each(|sum| *sum /= count);
    sums
}
