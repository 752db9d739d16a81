//! What can go wrong in an MoE layer besides what its dispatch and combine report.

/// Which experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum ExpertKind {
    /// Those that tokens are routed to.
    Routed,
    /// The one that all tokens pass.
    Shared,
}

/// What experts were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum ExpertPass {
    /// Rows to outputs.
    Forward,
    /// Gradients of outputs to gradients of rows.
    RowsBackward,
    /// The gradient of the weights.
    WeightsBackward,
}

/// Experts failed, or a layer is used wrongly. Panics and timeouts of experts are an
/// [`OverlapError`](super::OverlapError).
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
    /// What ranks say that they sent is not what came.
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
    /// What experts saved in a forward pass is not of these experts.
    #[error("the saved values of the forward pass belong to other experts")]
    ForeignSaved,
    /// A tape of another layer.
    #[error("the tape belongs to another layer (instance {seen}, this is {expected})")]
    ForeignTape {
        /// The tape's layer.
        seen: u64,
        /// The callee.
        expected: u64,
    },
}
