//! Sizes of a model, from a configuration in the style of HuggingFace, and what they add up to.
//!
//! ```text
//!   layer   attention            queries, keys, values and output; DeepSeek's latent attention too
//!           MLP, or experts      three matrices [hidden, width]: gate, up and down (assumed: all models here are gated)
//! ```
//!
//! Norms, biases and position embeddings are left out: less than a thousandth of a large model.

use std::str::FromStr;

use serde::Serialize;
use serde_json::{Map, Value};

/// Sizes of a decoder.
///
/// ```
/// use sidelane_model::parallel::Transformer;
///
/// let model: Transformer = "deepseek-v3".parse()?;
/// assert_eq!(model.parameters() / 1_000_000_000, 671);
/// assert_eq!(model.active_parameters() / 1_000_000_000, 37);
/// # Ok::<(), sidelane_model::parallel::UnknownModel>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Transformer {
    /// Its name.
    pub name: String,
    /// Elements of a row.
    pub hidden: u32,
    /// Number of layers.
    pub layers: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Attention of every layer.
    pub attention: Attention,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u32,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// Width of the MLP in layers without experts; `None` where all layers have experts.
    pub ffn: Option<u32>,
    /// Experts; `None` in a dense model.
    pub experts: Option<Experts>,
}

/// Sizes of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Attention {
    /// Query heads share KV heads in equal groups; with as many of both it is plain attention.
    Grouped {
        /// Number of KV heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Keys and values come from a short latent row, as in DeepSeek-V2 and V3.
    Latent {
        /// Elements of a query's latent row; `None`: queries come from the hidden row.
        query_rank: Option<u32>,
        /// Elements of the latent row of keys and values.
        kv_rank: u32,
        /// Elements of a query head and a key head without position.
        nope_dim: u32,
        /// Elements with position; all key heads share theirs.
        rope_dim: u32,
        /// Elements of a value head.
        value_dim: u32,
    },
}

/// Experts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Experts {
    /// Routed experts of a layer.
    pub count: u32,
    /// Experts that each token chooses.
    pub top_k: u32,
    /// Width of an expert.
    pub ffn: u32,
    /// Width of the expert that all tokens pass; 0: there is none.
    pub shared_ffn: u32,
    /// First layers that have an MLP instead.
    pub dense_layers: u32,
}

/// Matrices of one layer, in parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerParameters {
    /// Attention, and an MLP, a router or a shared expert.
    pub common: u64,
    /// All routed experts.
    pub experts: u64,
    /// Of the experts, those of one token.
    pub chosen: u64,
}

/// A field that describes no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("not JSON: {reason}")]
    NotJson {
        /// The parser's words.
        reason: String,
    },
    /// The text is JSON, but no object with fields.
    #[error("not an object with fields such as hidden_size")]
    NotAnObject,
    /// A size that no other field gives.
    #[error("no {field}")]
    Missing {
        /// Its name; of several, the one that is most usual.
        field: &'static str,
    },
    /// A field that has to be a whole number, and is not.
    #[error("{field} = {seen} is not a whole number")]
    NotANumber {
        /// Its name.
        field: &'static str,
        /// Its JSON.
        seen: String,
    },
    /// A field that has to be `true` or `false`, and is not.
    #[error("{field} = {seen} is neither true nor false")]
    NotABoolean {
        /// Its name.
        field: &'static str,
        /// Its JSON.
        seen: String,
    },
    /// A list of layers without experts that others come before, or that leaves no layer.
    #[error("{field} = {seen}, but it must list the first layers (0, 1, ..), and not all")]
    NotFirstLayers {
        /// Its name.
        field: &'static str,
        /// Its JSON.
        seen: String,
    },
    /// A number outside of its range.
    #[error("{field} = {seen}, but it must be between {least} and {most}")]
    OutOfRange {
        /// Its name.
        field: &'static str,
        /// Its value.
        seen: u64,
        /// The smallest that can be.
        least: u64,
        /// The largest that can be.
        most: u64,
    },
    /// A number that has to divide another one, and does not.
    #[error("{field} = {seen} does not divide {of} = {total}")]
    NoDivisor {
        /// Name of the divisor.
        field: &'static str,
        /// Its value.
        seen: u64,
        /// Name of the number.
        of: &'static str,
        /// Its value.
        total: u64,
    },
    /// More parameters than can be counted.
    #[error("{parameters} parameters, more than {}", Transformer::MAX_PARAMETERS)]
    TooManyParameters {
        /// Their number.
        parameters: u128,
    },
}

/// A name that no model has here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{seen}` is no model known here: {}", Transformer::NAMES.join(", "))]
pub struct UnknownModel {
    /// The given text.
    pub seen: String,
}

/// Public configurations, in the order of [`Transformer::NAMES`].
const FILES: [&str; 7] = [
    include_str!("../../models/llama-2-13b.json"),
    include_str!("../../models/llama-3-70b.json"),
    include_str!("../../models/mixtral-8x7b.json"),
    include_str!("../../models/olmoe-1b-7b.json"),
    include_str!("../../models/qwen3-30b-a3b.json"),
    include_str!("../../models/qwen3-235b-a22b.json"),
    include_str!("../../models/deepseek-v3.json"),
];

impl Transformer {
    /// Names of the models known here.
    pub const NAMES: [&str; 7] = [
        "llama-2-13b",
        "llama-3-70b",
        "mixtral-8x7b",
        "olmoe-1b-7b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "deepseek-v3",
    ];

    /// The most parameters that a model may have: bytes of all its states still fit 64 bits.
    pub const MAX_PARAMETERS: u64 = 1 << 56;

    /// Reads a configuration (`config.json`). Unknown fields are ignored.
    ///
    /// # Errors
    /// [`ConfigError`] with the first field that is missing or impossible.
    pub fn from_config(name: &str, text: &str) -> Result<Self, ConfigError> {
        let parsed = serde_json::from_str::<Value>(text);
        let value = parsed.map_err(|error| ConfigError::NotJson { reason: error.to_string() })?;
        let fields = Fields(value.as_object().ok_or(ConfigError::NotAnObject)?);
        let (hidden, heads) = (fields.size(&["hidden_size"])?, fields.size(&["num_attention_heads"])?);
        let layers = fields.size(&["num_hidden_layers"])?;
        let experts = fields.experts(layers)?;
        let has_mlp = experts.is_none_or(|experts| experts.dense_layers > 0);
        let model = Transformer {
            name: name.to_owned(),
            hidden,
            layers,
            heads,
            attention: fields.attention(hidden, heads)?,
            vocabulary: fields.size(&["vocab_size"])?,
            tied: fields.tied()?,
            ffn: if has_mlp { Some(fields.size(&["intermediate_size"])?) } else { None },
            experts,
        };
        match model.counted() {
            parameters if parameters > Self::MAX_PARAMETERS.into() => {
                Err(ConfigError::TooManyParameters { parameters })
            }
            _ => Ok(model),
        }
    }

    /// Parameters of all matrices.
    pub fn parameters(&self) -> u64 {
        u64::try_from(self.counted()).unwrap_or(u64::MAX)
    }

    /// Parameters that one token multiplies with: all but the experts that it does not choose. The
    /// embedding is in it, as in the names of models.
    pub fn active_parameters(&self) -> u64 {
        let idle = |layer: LayerParameters| layer.experts - layer.chosen;
        let layers = u64::from(self.expert_layers());
        self.parameters() - layers * self.expert_layer().map_or(0, idle)
    }

    /// Parameters of the embedding, or of the output layer.
    pub fn embedding_parameters(&self) -> u64 {
        u64::from(self.vocabulary) * u64::from(self.hidden)
    }

    /// Layers that have experts.
    pub fn expert_layers(&self) -> u32 {
        self.experts.map_or(0, |experts| self.layers - experts.dense_layers)
    }

    /// Width over which tensor parallelism cuts the widest block: of the MLP, or of attention where
    /// all layers have experts, which are not cut.
    pub fn tensor_width(&self) -> u64 {
        self.ffn.map_or(u64::from(self.heads) * u64::from(self.value_dim()), u64::from)
    }

    /// A layer without experts; `None` where there is none.
    pub(super) fn dense_layer(&self) -> Option<LayerParameters> {
        let common = self.attention_parameters() + self.mlp(self.ffn?);
        Some(LayerParameters { common, ..LayerParameters::default() })
    }

    /// A layer with experts; `None` in a dense model.
    pub(super) fn expert_layer(&self) -> Option<LayerParameters> {
        let experts = self.experts?;
        let router = u64::from(self.hidden) * u64::from(experts.count);
        let (one, [count, top_k]) = (self.mlp(experts.ffn), [experts.count, experts.top_k].map(u64::from));
        Some(LayerParameters {
            common: self.attention_parameters() + router + self.mlp(experts.shared_ffn),
            experts: one * count,
            chosen: one * top_k,
        })
    }

    /// Elements of the keys and values of one token in one layer, as context parallelism moves
    /// them: whole heads, or the latent row.
    pub(super) fn kv_width(&self) -> u64 {
        match self.attention {
            Attention::Grouped { kv_heads, head_dim } => 2 * u64::from(kv_heads) * u64::from(head_dim),
            Attention::Latent { kv_rank, rope_dim, .. } => u64::from(kv_rank) + u64::from(rope_dim),
        }
    }

    /// KV heads that ranks can hold apart; a latent row is one.
    pub(super) fn kv_heads(&self) -> u32 {
        match self.attention {
            Attention::Grouped { kv_heads, .. } => kv_heads,
            Attention::Latent { .. } => 1,
        }
    }

    /// Multiplications and additions of one token with one other token, in all heads of a layer:
    /// its score, and its value.
    pub(super) fn flops_per_pair(&self) -> u64 {
        let query_dim = match self.attention {
            Attention::Grouped { head_dim, .. } => head_dim,
            Attention::Latent { nope_dim, rope_dim, .. } => nope_dim + rope_dim,
        };
        2 * u64::from(self.heads) * (u64::from(query_dim) + u64::from(self.value_dim()))
    }

    fn value_dim(&self) -> u32 {
        match self.attention {
            Attention::Grouped { head_dim, .. } => head_dim,
            Attention::Latent { value_dim, .. } => value_dim,
        }
    }

    fn attention_parameters(&self) -> u64 {
        let [hidden, heads] = [self.hidden, self.heads].map(u64::from);
        match self.attention {
            Attention::Grouped { kv_heads, head_dim } => {
                2 * hidden * u64::from(head_dim) * (heads + u64::from(kv_heads))
            }
            Attention::Latent { query_rank, kv_rank, nope_dim, rope_dim, value_dim } => {
                let [kv_rank, nope, rope, value] = [kv_rank, nope_dim, rope_dim, value_dim].map(u64::from);
                let width = heads * (nope + rope);
                let query = query_rank
                    .map_or(hidden * width, |rank| hidden * u64::from(rank) + u64::from(rank) * width);
                query + hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
            }
        }
    }

    /// Three matrices.
    fn mlp(&self, width: u32) -> u64 {
        3 * u64::from(self.hidden) * u64::from(width)
    }

    /// Parameters, before it is known that they fit.
    fn counted(&self) -> u128 {
        let of = |layer: LayerParameters| u128::from(layer.common) + u128::from(layer.experts);
        let experts = u128::from(self.expert_layers()) * self.expert_layer().map_or(0, of);
        let dense = u128::from(self.layers - self.expert_layers()) * self.dense_layer().map_or(0, of);
        let embeddings = if self.tied { 1 } else { 2 };
        experts + dense + embeddings * u128::from(self.embedding_parameters())
    }
}

impl FromStr for Transformer {
    type Err = UnknownModel;

    fn from_str(name: &str) -> Result<Self, UnknownModel> {
        let at = Transformer::NAMES.iter().position(|known| *known == name);
        let at = at.ok_or_else(|| UnknownModel { seen: name.to_owned() })?;
        Ok(Transformer::from_config(name, FILES[at]).expect("a test reads the files of all known models"))
    }
}

/// Fields of a configuration.
struct Fields<'a>(&'a Map<String, Value>);

/// The largest size: products of three sizes and a number of experts fit 64 bits.
const MOST: u64 = 1 << 20;
/// The most experts of a layer, and choices of a token: the time model looks at each of them.
const MOST_EXPERTS: u64 = 4_096;
const MOST_CHOICES: u64 = 64;
/// Architectures that HuggingFace's library ties by default, by the beginning of `model_type`. All
/// others are taken to have two matrices, as Llama, Mixtral, OLMoE, Qwen and DeepSeek have.
const TIED_BY_DEFAULT: [&str; 2] = ["gemma", "cohere"];

impl Fields<'_> {
    /// A field that is there and not null.
    fn given(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A number by the first of these names that is given.
    fn number(&self, names: &[&'static str]) -> Result<Option<(&'static str, u64)>, ConfigError> {
        let first = |name: &&'static str| Some((*name, self.given(name)?));
        let Some((field, value)) = names.iter().find_map(first) else { return Ok(None) };
        match value.as_u64() {
            Some(number) => Ok(Some((field, number))),
            None => Err(ConfigError::NotANumber { field, seen: value.to_string() }),
        }
    }

    fn within(&self, names: &[&'static str], (least, most): (u64, u64)) -> Result<Option<u32>, ConfigError> {
        let Some((field, seen)) = self.number(names)? else { return Ok(None) };
        if !(least..=most).contains(&seen) {
            return Err(ConfigError::OutOfRange { field, seen, least, most });
        }
        Ok(Some(seen as u32))
    }

    fn optional(&self, names: &[&'static str]) -> Result<Option<u32>, ConfigError> {
        self.within(names, (1, MOST))
    }

    fn size(&self, names: &[&'static str]) -> Result<u32, ConfigError> {
        self.optional(names)?.ok_or(ConfigError::Missing { field: names[0] })
    }

    fn attention(&self, hidden: u32, heads: u32) -> Result<Attention, ConfigError> {
        if let Some(kv_rank) = self.optional(&["kv_lora_rank"])? {
            return Ok(Attention::Latent {
                query_rank: self.optional(&["q_lora_rank"])?,
                kv_rank,
                nope_dim: self.size(&["qk_nope_head_dim"])?,
                rope_dim: self.size(&["qk_rope_head_dim"])?,
                value_dim: self.size(&["v_head_dim"])?,
            });
        }
        let divides = |field, seen: u32, of, total: u32| match total.is_multiple_of(seen) {
            true => Ok(()),
            false => Err(ConfigError::NoDivisor { field, seen: seen.into(), of, total: total.into() }),
        };
        let kv_heads = self.optional(&["num_key_value_heads"])?.unwrap_or(heads);
        divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
        let head_dim = match self.optional(&["head_dim"])? {
            Some(head_dim) => head_dim,
            None => {
                divides("num_attention_heads", heads, "hidden_size", hidden)?;
                hidden / heads
            }
        };
        Ok(Attention::Grouped { kv_heads, head_dim })
    }

    fn experts(&self, layers: u32) -> Result<Option<Experts>, ConfigError> {
        let names = ["num_experts", "num_local_experts", "n_routed_experts"];
        let Some(count) = self.within(&names, (1, MOST_EXPERTS))? else { return Ok(None) };
        // Every further layer has experts: others would be counted wrong.
        self.within(&["decoder_sparse_step"], (1, 1))?;
        self.within(&["moe_layer_freq"], (1, 1))?;
        let top_k = self.within(&["num_experts_per_tok"], (1, MOST_CHOICES.min(count.into())))?;
        let ffn = self.size(&["moe_intermediate_size", "intermediate_size"])?;
        let shared = self.within(&["n_shared_experts"], (0, 1 << 8))?.unwrap_or(0);
        let shared_ffn = match self.within(&["shared_expert_intermediate_size"], (0, MOST))? {
            Some(width) => width,
            None => shared * ffn,
        };
        let dense = self.within(&["first_k_dense_replace"], (0, u64::from(layers) - 1))?;
        let dense_layers = dense.unwrap_or(0).max(self.mlp_layers(layers)?);
        let top_k = top_k.ok_or(ConfigError::Missing { field: "num_experts_per_tok" })?;
        Ok(Some(Experts { count, top_k, ffn, shared_ffn, dense_layers }))
    }

    /// Number of layers that Qwen's `mlp_only_layers` lists.
    fn mlp_layers(&self, layers: u32) -> Result<u32, ConfigError> {
        let field = "mlp_only_layers";
        let Some(value) = self.given(field) else { return Ok(0) };
        let refused = || ConfigError::NotFirstLayers { field, seen: value.to_string() };
        let listed = value.as_array().ok_or_else(refused)?;
        let are_first = (0..).zip(listed).all(|(at, layer)| layer.as_u64() == Some(at));
        match u32::try_from(listed.len()) {
            Ok(number) if are_first && number < layers => Ok(number),
            _ => Err(refused()),
        }
    }

    fn tied(&self) -> Result<bool, ConfigError> {
        let field = "tie_word_embeddings";
        if let Some(value) = self.given(field) {
            return value
                .as_bool()
                .ok_or_else(|| ConfigError::NotABoolean { field, seen: value.to_string() });
        }
        let architecture = self.given("model_type").and_then(Value::as_str).unwrap_or_default();
        Ok(TIED_BY_DEFAULT.iter().any(|tied| architecture.starts_with(tied)))
    }
}
