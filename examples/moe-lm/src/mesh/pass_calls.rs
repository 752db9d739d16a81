//! The calls of a rank's layers in a pass, so that a rank which fails alone can refuse those that
//! other ranks wait in.
//!
//! ```text
//!   forward     embedding tp    each block tp, cp for each window, tp, ep    head tp, loss tp
//!   backward    head tp         each block ep, tp, cp for each window, tp    embedding tp
//! ```
//!
//! A rank may fail alone: a token outside the vocabulary, a router's score that is no number. Ranks
//! of the same group hear of it in the call that failed, and ranks of its other groups in the next
//! one: the rank refuses it, in the order of the pass.

use sidelane::error::CallKind;
use sidelane_parallel::pipeline::Pass;

/// The ranks that a layer calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Those that cut its matrices.
    Tp,
    /// Those that cut its windows.
    Cp,
    /// Those that share the experts of a block of the model chunk.
    Ep {
        /// The block.
        block: usize,
    },
}

impl Peers {
    /// Whether both are the same ranks: those of all blocks are.
    fn are(self, other: Peers) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// The call that a layer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCall {
    /// Its ranks.
    pub peers: Peers,
    /// Its kind.
    pub kind: CallKind,
}

/// The layers of a model chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkLayers {
    /// Whether it has the embedding.
    pub embedding: bool,
    /// Its blocks.
    pub blocks: usize,
    /// Whether it has the head and the loss.
    pub head: bool,
    /// Windows of a microbatch.
    pub windows: usize,
    /// The first call of attention.
    pub attention: CallKind,
    /// Whether a backward pass repeats the forward pass.
    pub recompute: bool,
}

impl ChunkLayers {
    /// The calls of a pass, in order.
    pub fn calls(&self, pass: Pass) -> Vec<LayerCall> {
        match pass {
            Pass::Forward => self.forward(),
            Pass::Backward | Pass::BackwardInput if self.recompute => {
                [self.forward(), self.backward()].concat()
            }
            Pass::Backward | Pass::BackwardInput => self.backward(),
            Pass::BackwardWeight => Vec::new(),
        }
    }

    fn forward(&self) -> Vec<LayerCall> {
        let mut calls = vec![tp(CallKind::ReduceScatter); usize::from(self.embedding)];
        for block in 0..self.blocks {
            calls.push(tp(CallKind::AllGather));
            calls.extend(self.windows());
            calls.push(tp(CallKind::ReduceScatter));
            calls.push(LayerCall { peers: Peers::Ep { block }, kind: CallKind::Dispatch });
        }
        calls.extend(vec![tp(CallKind::AllGather); 2 * usize::from(self.head)]);
        calls
    }

    fn backward(&self) -> Vec<LayerCall> {
        let mut calls = vec![tp(CallKind::AllGather); usize::from(self.head)];
        for block in (0..self.blocks).rev() {
            calls.push(LayerCall { peers: Peers::Ep { block }, kind: CallKind::CombineBackward });
            calls.push(tp(CallKind::AllGather));
            calls.extend(self.windows());
            calls.push(tp(CallKind::AllGather));
        }
        calls.extend(vec![tp(CallKind::AllGather); usize::from(self.embedding)]);
        calls
    }

    fn windows(&self) -> Vec<LayerCall> {
        vec![LayerCall { peers: Peers::Cp, kind: self.attention }; self.windows]
    }
}

fn tp(kind: CallKind) -> LayerCall {
    LayerCall { peers: Peers::Tp, kind }
}

/// How far a rank has come in a pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Calls that it has begun.
    begun: usize,
    /// The ranks of the one that failed.
    failed: Option<Peers>,
}

impl Progress {
    /// Counts a call of a layer.
    pub fn count<T, E>(&mut self, peers: Peers, made: &Result<T, E>) {
        self.begun += 1;
        if made.is_err() {
            self.failed = Some(peers);
        }
    }

    /// Whether it is through with these calls.
    pub fn is_behind(&self, calls: &[LayerCall]) -> bool {
        self.begun == calls.len() && self.failed.is_none()
    }

    /// The first call that is left with each group, but for the one that has heard.
    pub fn left_to_refuse(&self, calls: Vec<LayerCall>) -> Vec<LayerCall> {
        let mut told: Vec<Peers> = self.failed.into_iter().collect();
        let left = calls.into_iter().skip(self.begun);
        let is_first = |call: &LayerCall| {
            let first = !told.iter().any(|of| of.are(call.peers));
            told.push(call.peers);
            first
        };
        left.filter(is_first).collect()
    }
}
