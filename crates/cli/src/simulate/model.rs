//! Models: what a layer of theirs moves, and how their routers decide.

use clap::ValueEnum;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use sidelane::gate::{Call, Gate, Preset, Routing};

use crate::error::CliError;
use crate::routing::Share;

/// A model of which one MoE layer is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// 256 experts in 8 groups, of which 4 are taken, top-8, rows of 7168
    #[value(name = "deepseek_v3")]
    DeepseekV3,
    /// Qwen3-235B: 128 experts, top-8, rows of 4096
    #[value(name = "qwen3")]
    Qwen3,
    /// Mixtral 8x7B: 8 experts, top-2, rows of 4096
    #[value(name = "mixtral")]
    Mixtral,
    /// OLMoE-1B-7B: 64 experts, top-8, rows of 2048
    #[value(name = "olmoe")]
    Olmoe,
}

/// Sizes of a layer.
pub struct Layer {
    pub experts: u32,
    pub top_k: u32,
    pub hidden: u32,
    /// Width of an expert, and of the one that all tokens pass (0: there is none).
    pub ffn: u32,
    pub shared_ffn: u32,
}

impl Model {
    pub fn layer(self) -> Layer {
        let (experts, top_k, hidden, ffn, shared_ffn) = match self {
            Model::DeepseekV3 => (256, 8, 7168, 2048, 2048),
            Model::Qwen3 => (128, 8, 4096, 1536, 0),
            Model::Mixtral => (8, 2, 4096, 14_336, 0),
            Model::Olmoe => (64, 8, 2048, 1024, 0),
        };
        Layer { experts, top_k, hidden, ffn, shared_ffn }
    }

    fn preset(self) -> Preset {
        match self {
            Model::DeepseekV3 => Preset::DeepseekV3,
            Model::Qwen3 => Preset::Qwen3,
            Model::Mixtral => Preset::Mixtral,
            Model::Olmoe => Preset::Olmoe,
        }
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        self.preset().name()
    }

    /// What the model's router decides for one rank whose logits are random, and about normal: all experts alike, in the long
    /// run.
    pub fn routing(self, share: Share, rank: u32) -> Result<Routing<'static>, CliError> {
        let Share { experts, top_k, tokens, seed } = share;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(u64::from(rank));
        let mut logit = || (0..4).map(|_| random.random::<f32>() - 0.5).sum::<f32>();
        let logits: Vec<f32> = (0..tokens as usize * experts as usize).map(|_| logit()).collect();
        let mut gate = Gate::new(self.preset().config(experts, top_k)?)?;
        let bias = vec![0.0; experts as usize];
        let bias = (self == Model::DeepseekV3).then_some(&bias[..]);
        let decision = gate.route(&Call { logits: &logits, bias, ..Call::default() })?;
        let (experts, weights) = (decision.experts().to_vec(), decision.weights().to_vec());
        Ok(Routing::new(top_k, experts, weights)?)
    }
}
