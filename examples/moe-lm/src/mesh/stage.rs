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
//!
//! With recomputation a stage keeps the inputs of a forward pass alone. Before the backward pass
//! the layers are called once more: they exchange and compute the same, to the bit.

use std::collections::HashMap;
use std::time::Instant;

use sidelane::collective::Communicator;
use sidelane::error::PlanError;
use sidelane_parallel::pipeline::{Compute, Pass, Span, Stage as PipelineStage, Step};
use sidelane_parallel::tensor::{
    ColumnParallelLinear, CrossEntropyTape, DelayedWeights, LinearShape, VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
};

use super::block::{
    Attention, BETWEEN, Block, BlockTape, DelayedBlock, MicrobatchSizes, norm, norm_backward, take,
};
use super::groups::{Groups, LayerGroups, positions};
use super::pass_calls::{ChunkLayers, LayerCall, Peers, Progress};
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
    weights: HeadWeights,
    loss: VocabularyParallelCrossEntropy,
    /// Different tokens of this rank's logits.
    columns: usize,
}

/// Weights of the last layer.
enum HeadWeights {
    Own(ColumnParallelLinear),
    /// A copy of the first stage's embedding.
    Copy(VocabularyParallelEmbedding),
    /// Those of the embedding of the same model chunk.
    Embedding,
}

/// Layers of a model chunk.
struct Chunk {
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<Head>,
    /// Its first value in each section.
    first: Sections<usize>,
}

impl Chunk {
    /// Different tokens of this rank's logits.
    fn columns(&self) -> usize {
        self.head.as_ref().map_or(0, |head| head.columns)
    }

    /// The last layer, if this is the last model chunk.
    fn output(&self) -> Option<(&Head, &ColumnParallelLinear)> {
        let head = self.head.as_ref()?;
        let linear = match &head.weights {
            HeadWeights::Own(linear) => linear,
            HeadWeights::Copy(token) => token.output(),
            HeadWeights::Embedding => self.embedding.as_ref()?.token.output(),
        };
        Some((head, linear))
    }
}

/// Tensors that a forward pass of a model chunk makes for the backward pass.
struct ChunkTape {
    blocks: Vec<BlockTape>,
    head: Option<(Vec<f32>, CrossEntropyTape)>,
}

/// Values of a forward pass that are kept until the backward pass.
enum Kept {
    /// All that it made.
    Tape(ChunkTape),
    /// Its inputs, from which it is repeated. The first virtual stage has none.
    Inputs(Vec<f32>),
}

/// Results of the layers of a model chunk.
struct Made {
    /// None behind the head.
    outputs: Option<Vec<f32>>,
    tape: ChunkTape,
    /// Sum of the losses of this rank's tokens.
    loss: f64,
}

/// Bytes that are held, and the most that were.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauge {
    held: u64,
    most: u64,
}

impl Gauge {
    fn add(&mut self, bytes: u64) {
        self.held += bytes;
        self.most = self.most.max(self.held);
    }

    /// The most bytes that were held at a time.
    pub fn most(&self) -> u64 {
        self.most
    }
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
    /// Bytes that it holds.
    fn bytes(&self) -> u64 {
        let embedding = size_of_val(&self.embedding.cut[..]) + size_of_val(&self.embedding.whole[..]);
        let blocks: u64 = self.blocks.iter().map(DelayedBlock::bytes).sum();
        embedding as u64 + blocks + self.head.as_ref().map_or(0, DelayedWeights::bytes)
    }

    /// The gradients of the weights of each section, and those of the head.
    fn weights(self) -> (Rows, Vec<f32>) {
        let mut sections = self.embedding;
        for block in self.blocks {
            sections.as_mut().zip(block.weights()).map(|(all, of)| all.extend(of));
        }
        (sections, self.head.map(|head| head.weights().0).unwrap_or_default())
    }
}

/// Tokens of a microbatch on this rank's context parallel part.
#[derive(Clone, Debug)]
struct Microbatch {
    tokens: Vec<u32>,
    following: Vec<u32>,
}

/// A rank's layers, and what a step has come to.
pub struct Stage {
    /// The groups of its layers.
    pub groups: LayerGroups,
    /// Gradients of its tokens, summed over microbatches.
    pub gradients: Rows,
    /// Those of the head, where it has the weights of this rank's embedding; else none.
    pub of_tied_head: Vec<f32>,
    /// Sum of the losses of this rank's tokens, on the last stage.
    pub loss: f64,
    /// Bytes that it keeps between passes.
    pub activations: Gauge,
    /// Its passes in order, in nanoseconds since its clock began.
    pub spans: Vec<Span>,
    clock: Instant,
    of_microbatch: MicrobatchSizes,
    /// Positions of this rank's tokens in a window.
    positions: Vec<usize>,
    of_loss: f32,
    attention: Attention,
    chunks: Vec<Chunk>,
    microbatches: Vec<Microbatch>,
    recompute: bool,
    kept: HashMap<(u32, u32), Kept>,
    waiting: HashMap<(u32, u32), DelayedChunk>,
}

impl Stage {
    /// With weights of zeros. Collective.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(
        rank: &Groups,
        mut groups: LayerGroups,
        strategy: &Strategy,
        settings: &Settings,
        tensors: &[Sections<Vec<Tensor>>],
    ) -> Result<Stage> {
        let of_microbatch = MicrobatchSizes::new(strategy, settings);
        let attention = Attention::new(&mut groups.cp, strategy, settings)?;
        let mut first = Sections { cut: 0, whole: 0, experts: 0 };
        let mut chunks = Vec::new();
        for (nth, tensors) in tensors.iter().enumerate() {
            let layers = layers_of(strategy, &settings.shape, rank.place.stage, nth);
            let is_first = layers.start == 0;
            let embedding = is_first.then(|| Embedding::new(&mut groups.tp, settings)).transpose()?;
            let block = |nth| Block::new(nth, &mut groups, attention, strategy, settings);
            chunks.push(Chunk {
                embedding,
                blocks: (0..layers.len()).map(block).collect::<Result<_>>()?,
                head: (layers.end == settings.shape.layers)
                    .then(|| Head::new(&mut groups.tp, settings, is_first))
                    .transpose()?,
                first: first.clone(),
            });
            let len = |of: &Vec<Tensor>| of.iter().map(Tensor::elements).sum::<usize>();
            first = first.zip(tensors.as_ref().map(len)).map(|(first, len)| first + len);
        }
        let is_tied =
            |chunk: &&Chunk| matches!(&chunk.head, Some(Head { weights: HeadWeights::Embedding, .. }));
        let columns = chunks.iter().find(is_tied).map_or(0, Chunk::columns);
        let of_tied_head = vec![0.0; columns * of_microbatch.width];
        Ok(Stage {
            positions: positions(rank.parts.1, strategy, settings),
            gradients: first.map(|len| vec![0.0; len]),
            of_tied_head,
            loss: 0.0,
            activations: Gauge::default(),
            spans: Vec::new(),
            clock: Instant::now(),
            of_loss: of_microbatch.of_loss(strategy),
            of_microbatch,
            attention,
            chunks,
            microbatches: Vec::new(),
            recompute: strategy.recompute,
            kept: HashMap::new(),
            waiting: HashMap::new(),
            groups,
        })
    }

    /// Elements that a microbatch has between two stages.
    pub fn message_elements(&self) -> usize {
        self.of_microbatch.tokens * self.of_microbatch.width
    }

    /// Bytes of its layers' weights, and of the sums of their gradients.
    pub fn weight_bytes(&self) -> u64 {
        let mut values = 0;
        self.gradients.as_ref().map(|of| values += 2 * of.len());
        ((values + self.of_tied_head.len()) * size_of::<f32>()) as u64
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
            match chunk.head.as_mut().map(|head| &mut head.weights) {
                Some(HeadWeights::Own(linear)) => take(&mut rows.cut, linear.weight_mut()),
                Some(HeadWeights::Copy(token)) => take(&mut rows.cut, token.weight_mut()),
                Some(HeadWeights::Embedding) | None => {}
            }
        }
    }

    /// Begins a step with the windows of each of its microbatches.
    pub fn begin(&mut self, microbatches: impl Iterator<Item = Windows>) {
        let own = |of: &[u32]| -> Vec<u32> {
            let windows = of.chunks_exact(self.of_microbatch.window);
            windows.flat_map(|of| self.positions.iter().map(|&position| of[position])).collect()
        };
        let own = |of: Windows| Microbatch { tokens: own(&of.tokens), following: own(&of.following) };
        self.microbatches = microbatches.map(own).collect();
        self.gradients.as_mut().map(|values| values.fill(0.0));
        self.of_tied_head.fill(0.0);
        (self.loss, self.spans) = (0.0, Vec::new());
        (self.kept, self.waiting) = (HashMap::new(), HashMap::new());
        self.activations = Gauge::default();
    }

    /// Begins the clock of the step's passes.
    pub fn begin_clock(&mut self) {
        self.clock = Instant::now();
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// Records a pass that ends now.
    fn ends(&mut self, pass: Pass, (microbatch, model_chunk): (u32, u32), begin: u64) {
        let compute = Compute { pass, microbatch, model_chunk };
        self.spans.push(Span { compute, begin, end: self.now() });
    }

    /// Bytes of rows of experts since the last call.
    pub fn take_expert_bytes(&mut self) -> u64 {
        let blocks = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.blocks);
        blocks.map(|block| std::mem::take(&mut block.expert_bytes)).sum()
    }

    /// Adds the gradients of a pass' weights.
    fn add_weights(&mut self, model_chunk: u32, delayed: DelayedChunk) {
        let (mut gradients, of_head) = delayed.weights();
        if self.of_tied_head.is_empty() {
            gradients.cut.extend(of_head);
        } else {
            self.of_tied_head.iter_mut().zip(of_head).for_each(|(sum, of)| *sum += of);
        }
        let first = self.chunks[model_chunk as usize].first.clone();
        let sums = self.gradients.as_mut();
        sums.zip(gradients.zip(first)).map(|(sums, (gradient, first))| {
            sums[first..].iter_mut().zip(gradient).for_each(|(sum, of)| *sum += of);
        });
    }

    /// The layers of a model chunk, forward.
    fn make(&mut self, (microbatch, model_chunk): (u32, u32), inputs: &[f32]) -> Result<Made> {
        let Stage { groups, chunks, microbatches, positions, of_microbatch, .. } = self;
        let (chunk, data) = (&mut chunks[model_chunk as usize], &microbatches[microbatch as usize]);
        let mut x = match &chunk.embedding {
            Some(embedding) => {
                let mut rows = groups.on_tp(|tp| embedding.token.forward(tp, &data.tokens))?;
                let own = own_tokens(&groups.tp, of_microbatch, positions);
                for (position, row) in own.zip(rows.chunks_exact_mut(of_microbatch.width)) {
                    let place = &embedding.place[position * of_microbatch.width..];
                    row.iter_mut().zip(place).for_each(|(value, place)| *value += place);
                }
                rows
            }
            None => inputs.to_vec(),
        };
        let mut blocks = Vec::new();
        for block in &mut chunk.blocks {
            let (y, tape) = block.forward(groups, x)?;
            x = y;
            blocks.push(tape);
        }
        let Some((head, linear)) = chunk.output() else {
            return Ok(Made { outputs: Some(x), tape: ChunkTape { blocks, head: None }, loss: 0.0 });
        };
        let logits = groups.on_tp(|tp| linear.forward(tp, &norm(&x, of_microbatch.width)))?;
        let (losses, tape) = groups.on_tp(|tp| head.loss.forward(tp, &logits, &data.following))?;
        let loss = losses.into_iter().map(f64::from).sum();
        Ok(Made { outputs: None, tape: ChunkTape { blocks, head: Some((x, tape)) }, loss })
    }

    /// Bytes of a tape, without the rows of experts.
    fn bytes(&self, tape: &ChunkTape, model_chunk: u32) -> u64 {
        let blocks = tape.blocks.iter().map(|block| block.bytes(&self.of_microbatch));
        let tokens = self.of_microbatch.windows * self.of_microbatch.piece;
        let head = tape.head.as_ref().map_or(0, |(x, _)| {
            let softmax = tokens * self.chunks[model_chunk as usize].columns();
            size_of_val(&x[..]) + softmax * size_of::<f32>()
        });
        blocks.sum::<u64>() + head as u64
    }

    /// The tape of a forward pass: as it was kept, or of the same pass once more.
    fn tape(&mut self, of: (u32, u32)) -> Result<ChunkTape> {
        let kept = self.kept.remove(&of).ok_or(Error::NoForward { microbatch: of.0 })?;
        let tape = match kept {
            Kept::Tape(tape) => return Ok(tape),
            Kept::Inputs(inputs) => {
                let made = self.make(of, &inputs)?;
                self.activations.held -= size_of_val(&inputs[..]) as u64;
                made.tape
            }
        };
        let bytes = self.bytes(&tape, of.1);
        self.activations.add(bytes);
        Ok(tape)
    }

    /// The result of a pass. If it has failed, the ranks that wait for this one hear of it.
    fn or_refuse<T>(&mut self, pass: Pass, model_chunk: u32, made: Result<T>) -> Result<T> {
        match made {
            Ok(_) => debug_assert!(self.groups.progress.is_behind(&self.calls(pass, model_chunk))),
            Err(_) => self.refuse_left(pass, model_chunk),
        }
        made
    }

    /// Refuses the calls of a pass that ranks wait in.
    fn refuse_left(&mut self, pass: Pass, model_chunk: u32) {
        let calls = self.groups.progress.left_to_refuse(self.calls(pass, model_chunk));
        let refused = || PlanError::RefusedHere.into();
        for LayerCall { peers, kind } in calls {
            match peers {
                Peers::Tp => drop(self.groups.tp.refuse(kind, refused())),
                Peers::Cp => drop(self.groups.cp.refuse(kind, refused())),
                Peers::Ep { block } => self.chunks[model_chunk as usize].blocks[block].refuse(kind),
            }
        }
    }

    /// The calls of a pass' layers.
    fn calls(&self, pass: Pass, model_chunk: u32) -> Vec<LayerCall> {
        let Chunk { embedding, blocks, head, .. } = &self.chunks[model_chunk as usize];
        let layers = ChunkLayers {
            embedding: embedding.is_some(),
            blocks: blocks.len(),
            head: head.is_some(),
            windows: self.of_microbatch.windows,
            attention: self.attention.first_call(),
            recompute: self.recompute,
        };
        layers.calls(pass)
    }

    /// The gradients of a pass' inputs, and what those of its weights are made of.
    fn gradients_of(
        &mut self,
        (microbatch, model_chunk): (u32, u32),
        gradient: Option<&[f32]>,
    ) -> Result<(Option<Vec<f32>>, DelayedChunk)> {
        let tape = self.tape((microbatch, model_chunk))?;
        self.activations.held -= self.bytes(&tape, model_chunk);
        let Stage { groups, chunks, microbatches, positions, of_microbatch, of_loss, .. } = self;
        let (chunk, data) = (&mut chunks[model_chunk as usize], &microbatches[microbatch as usize]);
        let (mut of_x, head) = match (chunk.output(), tape.head) {
            (Some((head, linear)), Some((x, tape))) => {
                let of_losses = vec![*of_loss; data.tokens.len()];
                let of_logits = head.loss.backward(tape, &of_losses).map_err(sidelane::Error::from)?;
                let normed = norm(&x, of_microbatch.width);
                let (of_normed, delayed) =
                    groups.on_tp(|tp| linear.backward_input(tp, &normed, &of_logits))?;
                (norm_backward(&x, &of_normed, of_microbatch.width), Some(delayed))
            }
            _ => (gradient.unwrap_or_default().to_vec(), None),
        };
        let mut blocks = Vec::new();
        for (block, tape) in chunk.blocks.iter_mut().zip(tape.blocks).rev() {
            let (of_inputs, delayed) = block.backward(groups, tape, &of_x)?;
            of_x = of_inputs;
            blocks.push(delayed);
        }
        blocks.reverse();
        let mut embedding = Rows::default();
        let first = chunk.embedding.as_ref();
        if let Some(layer) = first {
            embedding.cut = groups.on_tp(|tp| layer.token.backward(tp, &data.tokens, &of_x))?;
            embedding.whole = vec![0.0; layer.place.len()];
            let own = own_tokens(&groups.tp, of_microbatch, positions);
            for (position, row) in own.zip(of_x.chunks_exact(of_microbatch.width)) {
                let sum = &mut embedding.whole[position * of_microbatch.width..][..of_microbatch.width];
                sum.iter_mut().zip(row).for_each(|(sum, of)| *sum += of);
            }
        }
        Ok((first.is_none().then_some(of_x), DelayedChunk { embedding, blocks, head }))
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
        let (of, begin) = ((microbatch, model_chunk), self.now());
        self.groups.progress = Progress::default();
        let made = self.make(of, inputs.unwrap_or_default());
        let Made { outputs, tape, loss } = self.or_refuse(Pass::Forward, model_chunk, made)?;
        self.loss += loss;
        let (kept, bytes) = match self.recompute {
            true => {
                let inputs = inputs.unwrap_or_default().to_vec();
                let bytes = size_of_val(&inputs[..]) as u64;
                (Kept::Inputs(inputs), bytes)
            }
            false => {
                let bytes = self.bytes(&tape, model_chunk);
                (Kept::Tape(tape), bytes)
            }
        };
        self.activations.add(bytes);
        self.kept.insert(of, kept);
        self.ends(Pass::Forward, of, begin);
        Ok(outputs)
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>> {
        let (of, begin) = ((microbatch, model_chunk), self.now());
        if pass == Pass::BackwardWeight {
            let delayed = self.waiting.remove(&of).ok_or(Error::NoForward { microbatch })?;
            self.activations.held -= delayed.bytes();
            self.add_weights(model_chunk, delayed);
            self.ends(pass, of, begin);
            return Ok(None);
        }
        self.groups.progress = Progress::default();
        let made = self.gradients_of(of, gradient);
        let (of_inputs, delayed) = self.or_refuse(pass, model_chunk, made)?;
        match pass {
            Pass::BackwardInput => {
                self.activations.add(delayed.bytes());
                self.waiting.insert(of, delayed);
            }
            _ => self.add_weights(model_chunk, delayed),
        }
        self.ends(pass, of, begin);
        Ok(of_inputs)
    }

    fn refuse(&mut self, step: &Step) {
        self.groups.progress = Progress::default();
        step.passes().for_each(|of| self.refuse_left(of.pass, of.model_chunk));
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
    /// `is_first` is whether its model chunk has the embedding, too.
    fn new(tp: &mut Communicator, settings: &Settings, is_first: bool) -> Result<Head> {
        let Shape { vocabulary, width, tied, .. } = settings.shape;
        let columns = vocabulary / tp.size() as usize;
        let weight = vec![0.0; columns * width];
        let shape = LinearShape { inputs: width, outputs: vocabulary };
        let weights = match (tied, is_first) {
            (true, true) => HeadWeights::Embedding,
            (true, false) => {
                let token = VocabularyParallelEmbedding::new(tp, vocabulary, width, BETWEEN, weight)?;
                HeadWeights::Copy(token)
            }
            (false, _) => HeadWeights::Own(ColumnParallelLinear::new(tp, shape, BETWEEN, weight, None)?),
        };
        let loss = VocabularyParallelCrossEntropy { vocabulary, ignore: None };
        Ok(Head { weights, loss, columns })
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
