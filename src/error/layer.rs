//! Errors of an MoE layer and of its overlap graph, besides those of its dispatch and combine.

use std::fmt;
use std::time::Duration;

use super::Error;

/// Which experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum ExpertKind {
    /// Those that tokens are routed to.
    Routed,
    /// The one that all tokens pass.
    Shared,
}

/// Work that experts were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum ExpertPass {
    /// Rows to outputs.
    Forward,
    /// Gradients of outputs to gradients of rows.
    RowsBackward,
    /// The gradient of the weights.
    WeightsBackward,
    /// The same experts with other weights ([`Experts::with_weights`](crate::layer::Experts)).
    WithWeights,
}

/// Experts failed, or a layer is used wrongly. Panics and timeouts of experts are an
/// [`OverlapError`].
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum LayerError {
    /// Experts gave an error.
    #[error("{whose:?} experts, {pass:?}: {reason}")]
    Failed {
        /// Which experts.
        whose: ExpertKind,
        /// In what.
        pass: ExpertPass,
        /// Their message.
        reason: String,
    },
    /// Experts gave too few values, or too many.
    #[error("{whose:?} experts, {pass:?}: {seen} values, expected {rows} x {columns}")]
    WrongShape {
        /// Which experts.
        whose: ExpertKind,
        /// In what.
        pass: ExpertPass,
        /// Values found.
        seen: usize,
        /// Rows expected.
        rows: usize,
        /// Values per row.
        columns: usize,
    },
    /// Counts that ranks reported differ from the rows that came.
    #[error("chunk {chunk}, expert {expert}: ranks sent {seen} rows, {expected} came")]
    RowsDiffer {
        /// The chunk.
        chunk: usize,
        /// The expert, among those of this rank.
        expert: usize,
        /// Rows that ranks say they sent.
        seen: i64,
        /// Rows that came.
        expected: i64,
    },
    /// A rebuilt layer has an expert on this rank whose weights no rank supplies.
    #[error("expert {expert} moves to this rank, and no rank supplies its weights")]
    NoWeights {
        /// The expert.
        expert: u32,
    },
    /// State saved in a forward pass belongs to other experts.
    #[error("the saved values of the forward pass belong to other experts")]
    ForeignSaved,
    /// A layer on a device has no kernel for this setting.
    #[error("not available for a layer on a device: {feature}")]
    NotOnDevice {
        /// The setting.
        feature: &'static str,
    },
    /// A tape of another layer.
    #[error("the tape belongs to another layer (instance {seen}, this is {expected})")]
    ForeignTape {
        /// The tape's layer.
        seen: u64,
        /// The callee.
        expected: u64,
    },
}

/// A queue that runs nodes in their order, concurrently with other queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum StreamId {
    /// One of those that compute: products, sums of what lies on this rank.
    Compute(u32),
    /// One of those that move bytes between ranks.
    Transfer(u32),
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamId::Compute(index) => write!(f, "compute {index}"),
            StreamId::Transfer(index) => write!(f, "transfer {index}"),
        }
    }
}

/// A node's work, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct NodeLabel {
    /// The work: "dispatch", "experts".
    pub name: &'static str,
    /// To which chunk.
    pub chunk: u32,
}

/// A node, as errors and timelines name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct NodeInfo {
    /// Its work.
    pub work: NodeLabel,
    /// Where.
    pub stream: StreamId,
}

impl NodeLabel {
    /// A part of a layer, applied to a chunk.
    pub const fn new(name: &'static str, chunk: u32) -> Self {
        NodeLabel { name, chunk }
    }
}

impl NodeInfo {
    /// This work on this stream.
    pub const fn new(work: NodeLabel, stream: StreamId) -> Self {
        NodeInfo { work, stream }
    }
}

impl fmt::Display for NodeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeInfo { work: NodeLabel { name, chunk }, stream } = self;
        write!(f, "{name} of chunk {chunk} on {stream}")
    }
}

/// A graph failed. The error names the first node that failed; later failures that follow from it
/// are not reported.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum OverlapError {
    /// A node returned an error.
    #[error("{at}: {error} ({not_begun} nodes were not begun because of it)")]
    Failed {
        /// Which.
        at: NodeInfo,
        /// Its error.
        #[source]
        error: Box<Error>,
        /// Nodes that were not begun.
        not_begun: usize,
    },
    /// A node panicked. Its outputs may be half written.
    #[error("{at} panicked: {message} ({not_begun} nodes were not begun because of it)")]
    Panicked {
        /// Which.
        at: NodeInfo,
        /// The panic's message.
        message: String,
        /// Nodes that were not begun.
        not_begun: usize,
    },
    /// A node took longer than a node may.
    #[error(
        "{at} took {} ms, {} ms are allowed ({not_begun} nodes were not begun because of it)",
        took.as_millis(), limit.as_millis()
    )]
    Overran {
        /// Which.
        at: NodeInfo,
        /// Its duration; so far, if it is still running.
        took: Duration,
        /// How long it may take.
        limit: Duration,
        /// Nodes that were not begun.
        not_begun: usize,
    },
    /// The user of the caller's thread asked to stop
    /// ([`interruptible`](crate::bootstrap::interruptible)).
    #[error("interrupted ({not_begun} nodes were not begun because of it)")]
    Interrupted {
        /// Nodes that were not begun.
        not_begun: usize,
    },
    /// A thread that the run needs could not be started.
    #[error("the thread {name} could not be started: errno {errno}")]
    NoThread {
        /// The name of the thread.
        name: String,
        /// Why.
        errno: i32,
    },
    /// A thread of the run panicked outside the work of its nodes: a bug of the library.
    #[error("the thread {name} panicked: {message}")]
    ThreadPanicked {
        /// The name of the thread.
        name: String,
        /// The panic's message.
        message: String,
    },
    /// A node is for a stream that the executor has not. Nothing was begun.
    #[error("{at}: the executor has no such stream")]
    NoStream {
        /// Which.
        at: NodeInfo,
    },
    /// A node waits for a node of another graph. Nothing was begun.
    #[error("{at} waits for a node of another graph")]
    ForeignNode {
        /// Which.
        at: NodeInfo,
    },
    /// A node looked for another node's value, and found none: an edge is missing, or the value was
    /// taken already.
    #[error("the handoff is empty: add an edge from the node that fills it, or take the value only once")]
    HandoffEmpty,
    /// Two nodes are at a handoff at once: no edge orders them.
    #[error("another node uses the handoff: add an edge that orders the two")]
    HandoffInUse,
}
