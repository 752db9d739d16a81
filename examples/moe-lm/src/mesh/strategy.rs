//! The strategy of a run: sizes of its mesh, what ZeRO cuts, and its pipeline's schedule.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sidelane_parallel::Mesh;
use sidelane_parallel::pipeline::{Plan, Schedule, WarmUp};

use crate::error::{Error, Result};
use crate::settings::{Settings, Shape};

/// Ranks of each dimension of a mesh. A dimension that is not named has one.
///
/// ```
/// use moe_lm::mesh::Sizes;
///
/// let sizes: Sizes = "pp=2,tp=2,ep=2".parse()?;
/// assert_eq!((sizes.ranks(), sizes.to_string()), (4, "pp=2,dp=1,cp=1,tp=2,ep=2".to_owned()));
/// # Ok::<(), moe_lm::mesh::StrategyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Stages of the pipeline.
    pub pp: u32,
    /// Parts of the batch.
    pub dp: u32,
    /// Parts of each window.
    pub cp: u32,
    /// Parts of each matrix.
    pub tp: u32,
    /// Parts of the experts of a layer, folded over dp x cp x tp.
    pub ep: u32,
}

/// State that is cut over the ranks that have the same weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Zero {
    /// Nothing.
    #[default]
    None,
    /// Optimizer states.
    One,
    /// Optimizer states and gradients.
    Two,
    /// Optimizer states, gradients, and parameters between two steps.
    Three,
}

/// A schedule of `sidelane-parallel`, as the command line and checkpoints name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScheduleName {
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward pass, one backward pass.
    OneFOneB,
    /// The same over so many model chunks of a stage.
    Interleaved(u32),
    /// Gradients of weights fill the bubble.
    ZeroBubbleH1,
}

/// How each token sees those of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Context {
    /// Tokens move to the ranks of their heads.
    Ulysses,
    /// Keys and values travel round.
    Ring,
}

/// How the ranks of a run share its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strategy {
    /// Ranks of each dimension.
    pub sizes: Sizes,
    /// State that is cut.
    pub zero: Zero,
    /// Schedule of the pipeline; 1F1B if none is named.
    pub order: Option<ScheduleName>,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Kind of attention; if none is named, Ulysses where heads divide, else a ring.
    pub context: Option<Context>,
    /// Whether ranks keep inputs of model chunks alone, and repeat forward passes.
    pub recompute: bool,
}

/// A strategy that does not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StrategyError {
    /// Not a dimension with its size.
    #[error("{said:?} is not a dimension and its size, as tp=2: dimensions are pp, dp, cp, tp and ep")]
    Dimension {
        /// The text.
        said: String,
    },
    /// A dimension that is named twice.
    #[error("{name} is named twice")]
    Twice {
        /// The dimension.
        name: String,
    },
    /// Not a schedule.
    #[error("{said:?} is not gpipe, 1f1b, interleaved, interleaved:CHUNKS or zb-h1")]
    Schedule {
        /// The text.
        said: String,
    },
    /// ZeRO without ranks that have the same weights.
    #[error("--zero cuts state over dp x cp ranks, and the mesh has one: name dp")]
    NothingToCut,
    /// Attention over one rank.
    #[error("--attention is over cp ranks, and the mesh has one: name cp")]
    NoContext,
    /// A schedule without a pipeline.
    #[error("--schedule orders the passes of stages, and the mesh has one: name pp")]
    NoPipeline,
    /// A balance of windows that no rank has whole.
    #[error(
        "the balance is one of each window, and cp {cp} x tp {tp} cut windows over ranks: \
         give --balance 0"
    )]
    CutBalance {
        /// Parts of each window.
        cp: u32,
        /// Parts of the tokens between layers.
        tp: u32,
    },
}

impl Sizes {
    /// Of one rank.
    pub const ONE: Sizes = Sizes { pp: 1, dp: 1, cp: 1, tp: 1, ep: 1 };

    /// Ranks of the mesh, or the largest number.
    pub fn ranks(&self) -> u32 {
        [self.dp, self.cp, self.tp].into_iter().fold(self.pp, u32::saturating_mul)
    }

    /// The mesh that attention sees, of so many ranks.
    ///
    /// # Errors
    /// [`Error::Mesh`].
    pub fn mesh(&self, ranks: u32) -> Result<Mesh> {
        Ok(Mesh::new(ranks, [("pp", self.pp), ("dp", self.dp), ("cp", self.cp), ("tp", self.tp)])?)
    }
}

impl FromStr for Sizes {
    type Err = StrategyError;

    fn from_str(said: &str) -> std::result::Result<Sizes, StrategyError> {
        let (mut sizes, mut named) = (Sizes::ONE, Vec::new());
        for said in said.split(',') {
            let wrong = || StrategyError::Dimension { said: said.to_owned() };
            let (name, size) = said.split_once('=').ok_or_else(wrong)?;
            let of = match name {
                "pp" => &mut sizes.pp,
                "dp" => &mut sizes.dp,
                "cp" => &mut sizes.cp,
                "tp" => &mut sizes.tp,
                "ep" => &mut sizes.ep,
                _ => return Err(wrong()),
            };
            *of = size.parse().map_err(|_| wrong())?;
            if named.contains(&name) {
                return Err(StrategyError::Twice { name: name.to_owned() });
            }
            named.push(name);
        }
        Ok(sizes)
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { pp, dp, cp, tp, ep } = self;
        write!(f, "pp={pp},dp={dp},cp={cp},tp={tp},ep={ep}")
    }
}

impl FromStr for ScheduleName {
    type Err = StrategyError;

    fn from_str(said: &str) -> std::result::Result<ScheduleName, StrategyError> {
        match (said, said.strip_prefix("interleaved:").map(str::parse)) {
            ("gpipe", _) => Ok(ScheduleName::GPipe),
            ("1f1b", _) => Ok(ScheduleName::OneFOneB),
            ("interleaved", _) => Ok(ScheduleName::Interleaved(2)),
            ("zb-h1", _) => Ok(ScheduleName::ZeroBubbleH1),
            (_, Some(Ok(chunks))) => Ok(ScheduleName::Interleaved(chunks)),
            _ => Err(StrategyError::Schedule { said: said.to_owned() }),
        }
    }
}

impl fmt::Display for ScheduleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleName::GPipe => f.write_str("gpipe"),
            ScheduleName::OneFOneB => f.write_str("1f1b"),
            ScheduleName::Interleaved(chunks) => write!(f, "interleaved:{chunks}"),
            ScheduleName::ZeroBubbleH1 => f.write_str("zb-h1"),
        }
    }
}

impl Strategy {
    /// Of a mesh, with all else as by default.
    pub fn of(sizes: Sizes) -> Strategy {
        Strategy { sizes, zero: Zero::None, order: None, microbatches: 1, context: None, recompute: false }
    }

    /// Model chunks of a stage.
    pub fn model_chunks(&self) -> u32 {
        match self.order {
            Some(ScheduleName::Interleaved(chunks)) => chunks,
            _ => 1,
        }
    }

    /// The pipeline's plan.
    ///
    /// # Errors
    /// [`Error::Pipeline`].
    pub fn plan(&self) -> Result<Plan> {
        let schedule = match self.order.unwrap_or(ScheduleName::OneFOneB) {
            ScheduleName::GPipe => Schedule::GPipe,
            ScheduleName::OneFOneB => Schedule::OneFOneB,
            ScheduleName::Interleaved(model_chunks) => {
                Schedule::Interleaved { model_chunks, warm_up: WarmUp::Megatron }
            }
            ScheduleName::ZeroBubbleH1 => Schedule::ZeroBubbleH1,
        };
        Ok(schedule.plan(self.sizes.pp, self.microbatches)?.recompute(self.recompute))
    }

    /// The kind of attention.
    pub fn context(&self, shape: &Shape) -> Context {
        let [heads, kv_heads] = [shape.heads, shape.kv_heads].map(|heads| heads / self.sizes.tp as usize);
        let cp = self.sizes.cp as usize;
        let divides =
            heads.is_multiple_of(cp) && (kv_heads.is_multiple_of(cp) || cp.is_multiple_of(kv_heads));
        self.context.unwrap_or(if divides { Context::Ulysses } else { Context::Ring })
    }

    /// Whether a run of these settings can be trained so by so many ranks. All ranks come to the
    /// same answer, before anything moves.
    ///
    /// # Errors
    /// [`Error::Mesh`] for a mesh of another number of ranks, or experts that do not fold;
    /// [`Error::NotMultiple`]; [`Error::Pipeline`]; [`Error::Strategy`]; as [`Settings::check`].
    pub fn check(&self, settings: &Settings, ranks: u32) -> Result<()> {
        settings.check()?;
        let Sizes { pp, dp, cp, tp, ep } = self.sizes;
        self.sizes.mesh(ranks)?.experts(ep, 1)?;
        if self.zero != Zero::None && dp == 1 && cp == 1 {
            return Err(StrategyError::NothingToCut.into());
        }
        if self.order.is_some() && pp == 1 {
            return Err(StrategyError::NoPipeline.into());
        }
        if self.context.is_some() && cp == 1 {
            return Err(StrategyError::NoContext.into());
        }
        if settings.balance != 0.0 && (cp > 1 || tp > 1) {
            return Err(StrategyError::CutBalance { cp, tp }.into());
        }
        self.plan()?;
        let Shape { vocabulary, window, layers, heads, kv_heads, experts, .. } = settings.shape;
        let [pp, dp, cp, tp, ep] = [pp, dp, cp, tp, ep].map(|size| size as usize);
        let (chunks, microbatches) = (self.model_chunks() as usize, self.microbatches as usize);
        let ring = self.context(&settings.shape) == Context::Ring;
        let (heads_by, pieces) = if ring { (1, 2 * cp) } else { (cp, cp) };
        // With Ulysses several ranks have a replica of a KV head where these are fewer.
        let replicated = cp.is_multiple_of((kv_heads / tp).max(1));
        let kv_heads_by = if replicated { 1 } else { heads_by };
        for (what, seen, of) in [
            ("windows of a step, by dp and microbatches", settings.batch, dp.saturating_mul(microbatches)),
            ("tokens of a window, by the pieces of cp", window, pieces),
            (
                "tokens of a microbatch, by tp",
                (settings.batch / dp / microbatches).saturating_mul(window) / cp,
                tp,
            ),
            ("heads, by tp", heads, tp),
            ("heads of a tensor parallel rank, by cp", heads / tp, heads_by),
            ("KV heads, by tp", kv_heads, tp),
            ("KV heads of a tensor parallel rank, by cp", kv_heads / tp, kv_heads_by),
            ("different tokens, by tp", vocabulary, tp),
            ("layers, by stages and model chunks", layers, pp * chunks),
            ("experts, by ep", experts, ep),
        ] {
            if seen == 0 || !seen.is_multiple_of(of) {
                return Err(Error::NotMultiple { what, seen, of });
            }
        }
        Ok(())
    }
}
