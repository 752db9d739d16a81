//! Errors of meshes and of plans, with data in fields. Layers raise those of `sidelane`, so
//! that a rank can tell the other ranks of a call why it refuses it.

use crate::pipeline::{Compute, Transfer};
use crate::tensor::overlap::{Cell, Work};

/// A mesh cannot be made, or a question about it has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The sizes do not multiply to the number of ranks.
    #[error("{ranks} ranks, but {} = {product}{}", factors(.sizes), hint(.sizes))]
    Sizes {
        /// Ranks to place.
        ranks: u32,
        /// Names and sizes.
        sizes: Vec<(String, u32)>,
        /// Their product, or the largest number if it is larger.
        product: u64,
    },
    /// A dimension without ranks.
    #[error("dimension {name} has size 0: leave it out, or give it size 1")]
    NoSize {
        /// The dimension.
        name: String,
    },
    /// A dimension that is named twice.
    #[error("dimension {name} is named twice")]
    Twice {
        /// The dimension.
        name: String,
    },
    /// A dimension that the mesh does not have.
    #[error("no dimension {name}: the mesh has {}", .known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Names that the mesh has.
        known: Vec<String>,
    },
    /// A rank that the mesh does not have.
    #[error("no rank {rank}: the mesh has {ranks} ranks")]
    NoRank {
        /// The rank.
        rank: u32,
        /// Ranks of the mesh.
        ranks: u32,
    },
    /// The expert dimensions do not divide the ranks that hold a layer.
    #[error(
        "ep {expert} x etp {expert_tensor} = {} does not divide {} = {ranks}",
        u64::from(*.expert) * u64::from(*.expert_tensor),
        factors(.folded)
    )]
    Experts {
        /// Size of expert parallelism.
        expert: u32,
        /// Size of expert tensor parallelism.
        expert_tensor: u32,
        /// Dimensions that are folded.
        folded: Vec<(String, u32)>,
        /// Their product.
        ranks: u32,
    },
    /// Dimensions that hold a layer together are not next to each other, so they do not fold.
    #[error("{between} lies between the dimensions that hold a layer: move {name} before it")]
    Apart {
        /// The dimension behind.
        name: String,
        /// The dimension between.
        between: String,
    },
    /// Tokens cannot be sliced over ranks that cut experts.
    #[error("etp {expert_tensor}: ranks that hold parts of the same experts need the same tokens")]
    CutExperts {
        /// Size of expert tensor parallelism.
        expert_tensor: u32,
    },
    /// A world with another number of ranks.
    #[error("the mesh has {ranks} ranks, the world {world}")]
    OtherWorld {
        /// Ranks of the mesh.
        ranks: u32,
        /// Ranks of the world.
        world: u32,
    },
    /// The world cannot make the group.
    #[error(transparent)]
    Group(#[from] sidelane::Error),
}

/// Where dimensions of experts belong, which are ranks of others once more.
fn hint(sizes: &[(String, u32)]) -> &'static str {
    match sizes.iter().any(|(name, _)| ["edp", "ep", "etp"].contains(&name.as_str())) {
        true => ": leave edp, ep and etp out, and give ep and etp to Mesh::experts",
        false => "",
    }
}

/// Sizes as a product: "dp 2 x tp 4", or "1" if there are none.
fn factors(sizes: &[(String, u32)]) -> String {
    if sizes.is_empty() {
        return "1".to_owned();
    }
    sizes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(" x ")
}

/// A schedule cannot be made, a plan does not prove, or a step of a pipeline fails.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A pipeline without stages, microbatches or model chunks.
    #[error("a pipeline needs at least one {what}")]
    None {
        /// What is missing.
        what: &'static str,
    },
    /// A plan that would be too large.
    #[error("{passes} forward passes: a plan has at most {most}")]
    TooMany {
        /// Forward passes of all stages, or the largest number if there are more.
        passes: u64,
        /// Forward passes of a plan, at most.
        most: u64,
    },
    /// Model chunks need rounds of as many microbatches as there are stages.
    #[error(
        "{microbatches} microbatches on {stages} stages: {microbatches} mod {stages} = {}, \
         but {model_chunks} model chunks need whole rounds",
        .microbatches % .stages
    )]
    Rounds {
        /// Microbatches of a step.
        microbatches: u32,
        /// Stages of the pipeline.
        stages: u32,
        /// Model chunks of a stage.
        model_chunks: u32,
    },
    /// DualPipe needs two equal halves.
    #[error(
        "DualPipe of {stages} stages and {microbatches} microbatches: it needs even numbers, and at least \
         2 x {stages} = {} microbatches",
        2 * u64::from(*.stages)
    )]
    Dual {
        /// Stages of the pipeline.
        stages: u32,
        /// Microbatches of both halves.
        microbatches: u32,
    },
    /// A plan whose microbatches go both ways, but which has not a model chunk for each.
    #[error("microbatches go both ways: that takes 2 model chunks, not {model_chunks}")]
    Ways {
        /// Model chunks of a stage.
        model_chunks: u32,
    },
    /// Passes that cannot overlap: it takes a forward pass and a backward pass.
    #[error("stage {stage}, step {step}: {forward} cannot overlap with {backward}")]
    Overlap {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// What should be a forward pass.
        forward: Compute,
        /// What should be a backward pass.
        backward: Compute,
    },
    /// A plan with another number of lists than stages.
    #[error("{seen} lists of steps for {stages} stages")]
    Stages {
        /// Lists.
        seen: usize,
        /// Stages.
        stages: u32,
    },
    /// A pass of a microbatch or model chunk that does not exist.
    #[error("stage {stage}, step {step}: {compute} does not exist")]
    Unknown {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// The pass.
        compute: Compute,
    },
    /// A pass that no step makes.
    #[error("stage {stage}: no step makes {compute}")]
    Missing {
        /// The stage.
        stage: u32,
        /// The pass.
        compute: Compute,
    },
    /// A pass that two steps make.
    #[error("stage {stage}, step {step}: {compute} comes twice")]
    Twice {
        /// The stage.
        stage: u32,
        /// Position of the second step.
        step: usize,
        /// The pass.
        compute: Compute,
    },
    /// A pass before another of this stage that it needs.
    #[error("stage {stage}, step {step}: {compute} comes before {needs}")]
    BeforePass {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// The pass.
        compute: Compute,
        /// What it needs.
        needs: Compute,
    },
    /// A pass before the message that it needs.
    #[error("stage {stage}, step {step}: {compute} comes before {needs}")]
    BeforeMessage {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// The pass.
        compute: Compute,
        /// What it needs.
        needs: Transfer,
    },
    /// A message that is sent before it is computed.
    #[error("stage {stage}, step {step}: {transfer} comes before {needs}")]
    SentEarly {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// The message.
        transfer: Transfer,
        /// What computes it.
        needs: Compute,
    },
    /// A message that no pass needs, or that goes to a stage that does not need it, or twice.
    #[error("stage {stage}, step {step}: no pass needs {transfer}")]
    Stray {
        /// The stage.
        stage: u32,
        /// Position in its list.
        step: usize,
        /// The message.
        transfer: Transfer,
    },
    /// Two stages disagree about a message: messages of a channel match in order.
    #[error("message {nth} from stage {from} to stage {to}: {from} does {sent}, but {to} does {received}")]
    Mismatch {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// Position among the messages of the channel.
        nth: usize,
        /// What the sender does.
        sent: Transfer,
        /// What the receiver does.
        received: Transfer,
    },
    /// Stages wait for each other for ever.
    #[error("deadlock: {}", waits(.waiting))]
    Deadlock {
        /// Stages that wait, and the first transfer that each waits for.
        waiting: Vec<(u32, Transfer)>,
    },
    /// A plan for another number of ranks.
    #[error("the plan has {stages} stages, the group {ranks} ranks")]
    Ranks {
        /// Ranks of the group.
        ranks: u32,
        /// Stages of the plan.
        stages: u32,
    },
    /// Layers made a tensor of another length than messages have.
    #[error("stage {stage}: {compute} made {seen} elements, but a message has {expected}")]
    Length {
        /// The stage.
        stage: u32,
        /// The pass.
        compute: Compute,
        /// Elements that the layers made.
        seen: usize,
        /// Elements of a message.
        expected: usize,
    },
    /// Another stage has failed, and says why.
    #[error("stage {stage} has failed in this step")]
    Elsewhere {
        /// The first stage that has failed.
        stage: u32,
    },
    /// A setting is out of its range.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The group cannot be used.
    #[error(transparent)]
    Sidelane(#[from] sidelane::Error),
}

fn waits(waiting: &[(u32, Transfer)]) -> String {
    let each = waiting.iter().map(|(stage, transfer)| format!("stage {stage} waits in {transfer}"));
    each.collect::<Vec<_>>().join(", ")
}

/// A plan of products next to transfers does not prove.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverlapPlanError {
    /// A step that waits for itself or for a later one.
    #[error("step {step}, {work}, waits for step {needs}, which does not come before it")]
    Ahead {
        /// Position of the step.
        step: usize,
        /// Its work.
        work: Work,
        /// Position of the step that it waits for.
        needs: usize,
    },
    /// A step that the pass does not have, or of a chunk that does not exist.
    #[error("step {step}: the pass has no {work}")]
    Stray {
        /// Position of the step.
        step: usize,
        /// Its work.
        work: Work,
    },
    /// Ranks compare their chunks in the first call, and only there.
    #[error("step {step}, {work}: the first call compares the chunks of all ranks, and no other does")]
    Uncompared {
        /// Position of the step.
        step: usize,
        /// Its work.
        work: Work,
    },
    /// A step that may begin before what it reads is there.
    #[error("step {step}, {work}, is not ordered behind {needs}")]
    Early {
        /// Position of the step.
        step: usize,
        /// Its work.
        work: Work,
        /// Rows that it reads.
        needs: Cell,
    },
    /// Rows that two steps write.
    #[error("step {step}, {work}: {cell} are made twice")]
    Twice {
        /// Position of the second step.
        step: usize,
        /// Its work.
        work: Work,
        /// The rows.
        cell: Cell,
    },
    /// A result that no step makes.
    #[error("no step makes {cell}")]
    Missing {
        /// The result.
        cell: Cell,
    },
}

/// A setting that is a fraction is out of its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// It is too small, too large, or no number.
    #[error("{setting} is {seen}: it must be {expected}")]
    OutOfRange {
        /// The setting.
        setting: &'static str,
        /// Its value.
        seen: f64,
        /// Values that it may have.
        expected: &'static str,
    },
}
