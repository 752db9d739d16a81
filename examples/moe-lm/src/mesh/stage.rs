//! A rank's piece of the model, as a stage of a pipeline: embedding, blocks, and the loss.
//!
//! ```text
//!   first virtual stage    ids [T] -> VocabularyParallelEmbedding, + places -> [T/tp, width]
//!   each                   blocks
//!   last                   norm -> ColumnParallelLinear -> logits [T, vocabulary/tp] -> cross-entropy
//! ```
//!
//! Gradients of weights are added microbatch by microbatch, from +0. All schedules
//! ([`ScheduleName`](super::ScheduleName)) make the passes of a model chunk by ascending
//! microbatch, so they give the same bits. Where a schedule asks for the gradients of inputs first,
//! the products of linear layers' weights wait for their own pass. Those of router, experts and
//! embedding do not: they are made with the gradients of inputs.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sidelane::collective::Communicator;
use sidelane_parallel::pipeline::{Pass, Stage as PipelineStage};
use sidelane_parallel::tensor::{
    ColumnParallelLinear, CrossEntropyTape, DelayedWeights, LinearShape, VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
};

use super::block::{
    Attention, BETWEEN, Block, BlockTape, DelayedBlock, MicrobatchSizes, norm, norm_backward, take,
};
use super::groups::Groups;
use super::strategy::Strategy;
use super::tensors::{Rows, Sections, Tensor, layers_of};
use crate::batches::Windows;
use crate::error::{Error, Result};
use crate::settings::{Settings, Shape};

/// The first layer.
struct Embedding {
    token: VocabularyParallelEmbedding,
    place: Vec<f32>,
}

/// The last layer.
struct Head {
    linear: ColumnParallelLinear,
    loss: VocabularyParallelCrossEntropy,
}

/// Layers of a model chunk.
struct Chunk {
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<Head>,
    /// Its first value in each section.
    first: Sections<usize>,
}

/// Tensors that a forward pass of a model chunk keeps for the backward pass.
struct ChunkTape {
    blocks: Vec<BlockTape>,
    head: Option<(Vec<f32>, CrossEntropyTape)>,
}

/// Factors of the gradients of a model chunk's weights.
struct DelayedChunk {
    /// Gradients of the embedding.
    embedding: Rows,
    /// From the first block on.
    blocks: Vec<DelayedBlock>,
    head: Option<DelayedWeights>,
}

impl DelayedChunk {
    /// The gradients of the weights of each section.
    fn weights(self) -> Rows {
        let mut sections = self.embedding;
        for block in self.blocks {
            sections.as_mut().zip(block.weights()).map(|(all, of)| all.extend(of));
        }
        sections.cut.extend(self.head.map(|head| head.weights().0).unwrap_or_default());
        sections
    }
}

/// Tokens of a microbatch on this rank's context parallel part.
#[derive(Clone, Debug)]
struct Microbatch {
    tokens: Vec<u32>,
    following: Vec<u32>,
}

/// Times of passes of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Of all.
    pub total: Duration,
    /// How many there were.
    pub passes: u32,
}

impl Times {
    fn add(&mut self, began: Instant) {
        (self.total, self.passes) = (self.total + began.elapsed(), self.passes + 1);
    }
}

/// Data parallel ranks that one process plays.
#[derive(Clone, Copy, Debug)]
pub struct Played {
    /// Parts of the batch, one for each.
    pub parts: usize,
    /// Those of them that share experts.
    pub sharing: usize,
}

/// A rank's layers, and what a step has come to.
pub struct Stage {
    /// The groups of the rank.
    pub groups: Groups,
    /// Gradients of each part of the batch, summed over its microbatches. A rank has one part; a
    /// reference has all.
    pub gradients: Vec<Rows>,
    /// Sum of the losses of this rank's tokens, on the last stage.
    pub loss: f64,
    /// Bytes sent to other stages.
    pub stage_bytes: u64,
    /// Times of its passes: forward, and the gradients of inputs and of weights.
    pub times: [Times; 3],
    of_microbatch: MicrobatchSizes,
    /// Positions of this rank's tokens in a window.
    positions: Vec<usize>,
    of_loss: f32,
    chunks: Vec<Chunk>,
    microbatches: Vec<Microbatch>,
    tapes: HashMap<(u32, u32), ChunkTape>,
    waiting: HashMap<(u32, u32), DelayedChunk>,
}

impl Stage {
    /// With weights of zeros. A reference plays some ranks. Collective.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(
        mut groups: Groups,
        strategy: &Strategy,
        settings: &Settings,
        tensors: &[Sections<Vec<Tensor>>],
        played: Option<Played>,
    ) -> Result<Stage> {
        let parts = played.map_or(1, |played| played.parts);
        let of_microbatch = MicrobatchSizes::new(strategy, settings, parts);
        let attention = Attention::new(&mut groups.cp, strategy, settings)?;
        let mut first = Sections { cut: 0, whole: 0, experts: 0 };
        let mut chunks = Vec::new();
        for (nth, tensors) in tensors.iter().enumerate() {
            let layers = layers_of(strategy, &settings.shape, groups.place.stage, nth);
            let is_first = layers.start == 0;
            let embedding = is_first.then(|| Embedding::new(&mut groups.tp, settings)).transpose()?;
            let block = |_| {
                let in_turn = played.map(|played| played.sharing);
                let sizes = (of_microbatch, in_turn);
                Block::new(&mut groups.tp, &groups.ep, attention, (strategy, settings), sizes)
            };
            chunks.push(Chunk {
                embedding,
                blocks: layers.clone().map(block).collect::<Result<_>>()?,
                head: (layers.end == settings.shape.layers)
                    .then(|| Head::new(&mut groups.tp, settings))
                    .transpose()?,
                first: first.clone(),
            });
            let len = |of: &Vec<Tensor>| of.iter().map(Tensor::elements).sum::<usize>();
            first = first.zip(tensors.as_ref().map(len)).map(|(first, len)| first + len);
        }
        let zeros = first.map(|len| vec![0.0; len]);
        let tokens = of_microbatch.windows * of_microbatch.piece * strategy.microbatches as usize;
        Ok(Stage {
            positions: groups.positions(strategy, settings),
            gradients: vec![zeros; parts],
            loss: 0.0,
            stage_bytes: 0,
            times: Default::default(),
            of_microbatch,
            of_loss: 1.0 / tokens as f32,
            chunks,
            microbatches: Vec::new(),
            tapes: HashMap::new(),
            waiting: HashMap::new(),
            groups,
        })
    }

    /// Elements that a microbatch has between two stages.
    pub fn message_elements(&self) -> usize {
        self.of_microbatch.tokens * self.of_microbatch.width
    }

    /// Gives all layers their weights.
    pub fn load(&mut self, rows: Sections<&[f32]>) {
        let mut rows = rows;
        for chunk in &mut self.chunks {
            if let Some(embedding) = &mut chunk.embedding {
                take(&mut rows.cut, embedding.token.weight_mut());
                take(&mut rows.whole, &mut embedding.place);
            }
            chunk.blocks.iter_mut().for_each(|block| block.load(&mut rows));
            if let Some(head) = &mut chunk.head {
                take(&mut rows.cut, head.linear.weight_mut());
            }
        }
    }

    /// Begins a step with the windows of its microbatches, one after another.
    pub fn begin(&mut self, windows: &Windows) {
        let MicrobatchSizes { windows: count, window, .. } = self.of_microbatch;
        let own = |of: &[u32]| -> Vec<u32> {
            let windows = of.chunks_exact(window);
            windows.flat_map(|of| self.positions.iter().map(|&position| of[position])).collect()
        };
        let microbatches = windows.tokens.chunks_exact(count * window);
        let microbatches = microbatches.zip(windows.following.chunks_exact(count * window));
        let own = |(tokens, following)| Microbatch { tokens: own(tokens), following: own(following) };
        self.microbatches = microbatches.map(own).collect();
        self.gradients.iter_mut().for_each(|of| {
            of.as_mut().map(|values| values.fill(0.0));
        });
        (self.loss, self.stage_bytes, self.times) = (0.0, 0, Default::default());
        (self.tapes, self.waiting) = (HashMap::new(), HashMap::new());
    }

    /// Bytes of rows of experts since the last call.
    pub fn take_expert_bytes(&mut self) -> u64 {
        let blocks = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.blocks);
        blocks.map(|block| std::mem::take(&mut block.expert_bytes)).sum()
    }

    fn add(&mut self, (microbatch, chunk): (u32, u32), gradients: Rows) {
        let parts = self.gradients.len();
        let first = self.chunks[chunk as usize].first.clone();
        let sums = self.gradients[microbatch as usize % parts].as_mut();
        sums.zip(gradients.zip(first)).map(|(sums, (gradient, first))| {
            sums[first..].iter_mut().zip(gradient).for_each(|(sum, of)| *sum += of);
        });
    }

    /// Counts a message to another stage.
    fn sends(&mut self, tensor: &[f32]) {
        if self.groups.stages > 1 {
            self.stage_bytes += size_of_val(tensor) as u64;
        }
    }

    /// The gradients of a pass' inputs, and what those of its weights are made of.
    fn gradients_of(
        &mut self,
        (microbatch, model_chunk): (u32, u32),
        gradient: Option<&[f32]>,
    ) -> Result<(Option<Vec<f32>>, DelayedChunk)> {
        let tape = self.tapes.remove(&(microbatch, model_chunk)).ok_or(Error::NoForward { microbatch })?;
        let Stage { groups, chunks, microbatches, positions, of_microbatch, of_loss, .. } = self;
        let Groups { tp, cp, .. } = groups;
        let (chunk, data) = (&mut chunks[model_chunk as usize], &microbatches[microbatch as usize]);
        let (mut of_x, head) = match (&chunk.head, tape.head) {
            (Some(head), Some((x, tape))) => {
                let of_losses = vec![*of_loss; data.tokens.len()];
                let of_logits = head.loss.backward(tape, &of_losses).map_err(sidelane::Error::from)?;
                let normed = norm(&x, of_microbatch.width);
                let (of_normed, delayed) = head.linear.backward_input(tp, &normed, &of_logits)?;
                (norm_backward(&x, &of_normed, of_microbatch.width), Some(delayed))
            }
            _ => (gradient.unwrap_or_default().to_vec(), None),
        };
        let mut blocks = Vec::new();
        for (block, tape) in chunk.blocks.iter_mut().zip(tape.blocks).rev() {
            let (of_inputs, delayed) = block.backward((tp, cp), tape, &of_x)?;
            of_x = of_inputs;
            blocks.push(delayed);
        }
        blocks.reverse();
        let mut embedding = Rows::default();
        let first = chunk.embedding.as_ref();
        if let Some(layer) = first {
            embedding.cut = layer.token.backward(tp, &data.tokens, &of_x)?;
            embedding.whole = vec![0.0; layer.place.len()];
            let own = own_tokens(tp, of_microbatch, positions);
            for (position, row) in own.zip(of_x.chunks_exact(of_microbatch.width)) {
                let sum = &mut embedding.whole[position * of_microbatch.width..][..of_microbatch.width];
                sum.iter_mut().zip(row).for_each(|(sum, of)| *sum += of);
            }
        }
        Ok((first.is_none().then_some(of_x), DelayedChunk { embedding, blocks, head }))
    }

    /// Adds the gradients of a pass' weights.
    fn add_weights(&mut self, of: (u32, u32), delayed: DelayedChunk) {
        let began = Instant::now();
        let gradients = delayed.weights();
        self.times[2].add(began);
        self.add(of, gradients);
    }
}

impl PipelineStage for Stage {
    type Error = Error;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>> {
        let began = Instant::now();
        let Stage { groups, chunks, microbatches, positions, of_microbatch, loss, tapes, .. } = self;
        let Groups { tp, cp, .. } = groups;
        let (chunk, data) = (&mut chunks[model_chunk as usize], &microbatches[microbatch as usize]);
        let mut x = match &chunk.embedding {
            Some(embedding) => {
                let mut rows = embedding.token.forward(tp, &data.tokens)?;
                let own = own_tokens(tp, of_microbatch, positions);
                for (position, row) in own.zip(rows.chunks_exact_mut(of_microbatch.width)) {
                    let place = &embedding.place[position * of_microbatch.width..];
                    row.iter_mut().zip(place).for_each(|(value, place)| *value += place);
                }
                rows
            }
            None => inputs.unwrap_or_default().to_vec(),
        };
        let mut blocks = Vec::new();
        for block in &mut chunk.blocks {
            let (y, tape) = block.forward((tp, cp), x)?;
            x = y;
            blocks.push(tape);
        }
        let (outputs, head) = match &chunk.head {
            Some(head) => {
                let logits = head.linear.forward(tp, &norm(&x, of_microbatch.width))?;
                let (losses, tape) = head.loss.forward(tp, &logits, &data.following)?;
                *loss += losses.iter().copied().map(f64::from).sum::<f64>();
                (None, Some((x, tape)))
            }
            None => (Some(x), None),
        };
        tapes.insert((microbatch, model_chunk), ChunkTape { blocks, head });
        self.times[0].add(began);
        self.sends(outputs.as_deref().unwrap_or_default());
        Ok(outputs)
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>> {
        let of = (microbatch, model_chunk);
        if pass == Pass::BackwardWeight {
            let delayed = self.waiting.remove(&of).ok_or(Error::NoForward { microbatch })?;
            self.add_weights(of, delayed);
            return Ok(None);
        }
        let began = Instant::now();
        let (of_inputs, delayed) = self.gradients_of(of, gradient)?;
        self.times[1].add(began);
        match pass {
            Pass::BackwardInput => drop(self.waiting.insert(of, delayed)),
            _ => self.add_weights(of, delayed),
        }
        self.sends(of_inputs.as_deref().unwrap_or_default());
        Ok(of_inputs)
    }
}

impl Embedding {
    fn new(tp: &mut Communicator, settings: &Settings) -> Result<Embedding> {
        let Shape { vocabulary, window, width, .. } = settings.shape;
        let weight = vec![0.0; vocabulary / tp.size() as usize * width];
        let token = VocabularyParallelEmbedding::new(tp, vocabulary, width, BETWEEN, weight)?;
        Ok(Embedding { token, place: vec![0.0; window * width] })
    }
}

impl Head {
    fn new(tp: &mut Communicator, settings: &Settings) -> Result<Head> {
        let Shape { vocabulary, width, .. } = settings.shape;
        let weight = vec![0.0; vocabulary / tp.size() as usize * width];
        let shape = LinearShape { inputs: width, outputs: vocabulary };
        let linear = ColumnParallelLinear::new(tp, shape, BETWEEN, weight, None)?;
        let loss = VocabularyParallelCrossEntropy { vocabulary, ignore: None };
        Ok(Head { linear, loss })
    }
}

/// Positions of the tokens that a rank has between layers, in their windows.
fn own_tokens(
    tp: &Communicator,
    of_microbatch: &MicrobatchSizes,
    positions: &[usize],
) -> impl Iterator<Item = usize> {
    let first = tp.rank() as usize * of_microbatch.tokens;
    (first..first + of_microbatch.tokens).map(|token| positions[token % positions.len()])
}
