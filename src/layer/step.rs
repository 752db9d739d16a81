//! Parts of a step that both passes use: the tape between them, groups of experts, the objects that
//! move rows and compute, and rows in f32.
//!
//! ```text
//!   forward                                                 Tape                        backward
//!   dispatch --> ReceivedChunk { rows, handle, groups } --> ChunkTape { landed, made } --> gradients of rows
//!   experts  --> GroupOutputs per group  ------------------>     |
//!   shared   --> SavedShared  ---------------------------->  Tape::shared  ------------> of weights
//! ```
//!
//! Compute streams that share a chunk divide its experts into groups. To experts, a group is like a
//! chunk: rows for some of them, and none for the others.
//!
//! ```text
//!   rows of a chunk   | e0 e0 e0 | e1 | e3 e3 | e4 |          three groups: e0, e1, e2 to e4
//!
//!   the last, as experts see it:   | e3 e3 | e4 |,   counts 0 0 0 2 1
//! ```

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::experts::CheckedExperts;
use super::moe::sources_columns;
use super::router_step::Routed;
use super::{MoeLayer, Saved, Segments};
use crate::dtype::{Dtype, Element};
use crate::ep::{ExpertOutput, ExpertParallel, ExpertRows, Handle, RowCollective, RowPartition};
use crate::error::{Error, ExpertKind, LayerError, OverlapError};
use crate::gate::Decision;
use crate::overlap::{Handoff, Run, expert_groups};
use crate::rows::{Arithmetic, RowKernels};
use crate::world::WorldState;

/// One forward pass, kept for its gradients. Several may be alive, and go backward in any order,
/// the same on all ranks.
///
/// Rows of f32 stay in the receive pool until the tape is consumed or dropped; others are kept
/// widened, outside of it.
#[derive(Debug)]
pub struct Tape {
    pub(super) instance: u64,
    /// The router's part.
    pub(super) routed: Routed,
    pub(super) chunks: Vec<ChunkTape>,
    pub(super) shared: Option<SavedShared>,
}

/// A chunk that experts have gone through.
pub(super) struct ChunkTape {
    pub landed: ReceivedChunk,
    /// Of each of its groups.
    pub made: Vec<GroupOutputs>,
}

/// Outputs of a group of experts for a chunk.
pub(super) struct GroupOutputs {
    /// `[rows, hidden]`, before it was weighted.
    pub outputs: Vec<f32>,
    pub saved: Saved,
}

/// Rows of the dispatch of a chunk, and their layout.
#[derive(Debug)]
pub(super) struct ReceivedChunk {
    pub rows: F32Rows,
    pub handle: Handle,
    pub groups: Vec<ExpertGroup>,
}

/// Values that the shared expert saved.
pub(super) struct SavedShared(pub Saved);

impl ReceivedChunk {
    /// For so many groups of experts at most.
    pub fn new(rows: F32Rows, handle: Handle, most: u32) -> Self {
        let groups = groups(handle.tokens_per_expert(), handle.padded_tokens_per_expert(), most);
        ReceivedChunk { rows, handle, groups }
    }

    /// As a group of experts sees it.
    pub fn segments<'a>(&'a self, group: &'a ExpertGroup, hidden: usize) -> Result<Segments<'a>, Error> {
        Ok(group.segments(self.rows.values()?, hidden))
    }
}

impl Tape {
    /// The gate's decision for this rank's tokens. Its counts balance a bias
    /// ([`update_bias`](crate::gate::update_bias)).
    pub fn decision(&self) -> &Decision {
        &self.routed.gated.decision
    }

    /// The balancing loss of this rank's tokens; 0 if there is none.
    pub fn balance_loss(&self) -> f32 {
        self.routed.gated.balance
    }

    /// The loss on the size of logits; 0 if there is none.
    pub fn z_loss(&self) -> f32 {
        self.routed.gated.z
    }
}

impl std::fmt::Debug for ChunkTape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkTape").field("landed", &self.landed).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for SavedShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SavedShared")
    }
}

/// A group of experts, and their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpertGroup {
    experts: Range<usize>,
    /// Where their rows are among those of the chunk, pads counted.
    pub rows: Range<usize>,
    /// Rows of each expert of this rank: of others there are none.
    counts: Vec<i64>,
    padded: Vec<i64>,
}

/// Those of a chunk with so many rows for each expert, without pads and with them.
pub(super) fn groups(counts: &[i64], padded: &[i64], most: u32) -> Vec<ExpertGroup> {
    let mut first = 0;
    let group = |experts: Range<usize>| {
        let (counts, padded) = (only(&experts, counts), only(&experts, padded));
        let rows = first..first + padded.iter().sum::<i64>() as usize;
        first = rows.end;
        ExpertGroup { experts, rows, counts, padded }
    };
    expert_groups(counts, most).into_iter().map(group).collect()
}

/// Zeros but for these experts.
fn only<T: Copy + Default>(experts: &Range<usize>, counts: &[T]) -> Vec<T> {
    let mut own = vec![T::default(); counts.len()];
    own[experts.clone()].copy_from_slice(&counts[experts.clone()]);
    own
}

impl ExpertGroup {
    /// Where values of its rows are, so many of each.
    pub fn values(&self, columns: usize) -> Range<usize> {
        self.rows.start * columns..self.rows.end * columns
    }

    /// Length of each expert's segment.
    pub fn padded(&self) -> &[i64] {
        &self.padded
    }

    /// Of rows that each source has for each expert, those for its own.
    pub fn counts_of(&self, sources: &[Vec<u32>]) -> Vec<Vec<u32>> {
        sources.iter().map(|counts| only(&self.experts, counts)).collect()
    }

    /// Its rows of those of the chunk, as experts take them.
    pub fn segments<'a>(&'a self, rows: &'a [f32], hidden: usize) -> Segments<'a> {
        let ExpertGroup { counts, padded, .. } = self;
        Segments { rows: &rows[self.values(hidden)], hidden, counts, padded }
    }
}

/// Output memory of a chunk: allocated when the first of its groups is done; each group writes its
/// own rows.
#[derive(Debug, Default)]
pub(super) struct Outgoing(Mutex<Option<Result<ExpertOutput, Error>>>);

impl Outgoing {
    /// Lets a group write. Without room no group does: the result of [`take`](Self::take) tells all
    /// ranks.
    pub fn write<E: Element>(
        &self,
        handle: &Handle,
        values: Range<usize>,
        fill: impl FnOnce(&mut [E]),
    ) -> Result<(), Error> {
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(output) = output.get_or_insert_with(|| handle.output()) {
            fill(&mut output.rows_mut::<E>()?[values]);
        }
        Ok(())
    }

    /// All of it, once all groups have written; or why there is no room.
    pub fn take(&self) -> Result<Result<ExpertOutput, Error>, Error> {
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(output.take().ok_or(OverlapError::HandoffEmpty)?)
    }
}

/// How many rows this rank has for each slot, chunk after chunk.
pub(super) fn own_row_counts(ep: &ExpertParallel, decision: &Decision, slices: &[Range<usize>]) -> Vec<u32> {
    let (map, k) = (ep.expert_map(), decision.top_k() as usize);
    let slots = map.slots() as usize;
    let mut counts = vec![0; sources_columns(slices.len() as u32, map)];
    for (chunk, tokens) in slices.iter().enumerate() {
        let chosen = &decision.experts()[tokens.start * k..tokens.end * k];
        let ids = chosen.iter().filter_map(|&id| u32::try_from(id).ok());
        for slot in ids.filter_map(|id| map.slot_for(ep.rank(), id)) {
            counts[chunk * slots + slot as usize] += 1;
        }
    }
    counts
}

/// Those of all ranks, `[ranks, columns]`, for this rank's slots: `[chunks, ranks, experts]`. As
/// many as came of each chunk for each expert must have been sent.
pub(super) fn source_row_counts<'a>(
    all: &[u32],
    columns: usize,
    (slots, own): (usize, &Range<usize>),
    came: impl Iterator<Item = &'a [i64]>,
) -> Result<Vec<Vec<Vec<u32>>>, Error> {
    let of_chunk = |(chunk, came): (usize, &[i64])| -> Result<Vec<Vec<u32>>, Error> {
        let own = chunk * slots + own.start..chunk * slots + own.end;
        let counts: Vec<_> = all.chunks_exact(columns).map(|counts| counts[own.clone()].to_vec()).collect();
        for (expert, &expected) in came.iter().enumerate() {
            let seen = counts.iter().map(|counts: &Vec<u32>| i64::from(counts[expert])).sum();
            if seen != expected {
                return Err(LayerError::RowsDiffer { chunk, expert, seen, expected }.into());
            }
        }
        Ok(counts)
    };
    came.enumerate().map(of_chunk).collect()
}

/// The objects that move rows, and those that compute.
pub(super) struct StepContext<'m> {
    exchanges: Vec<Handoff<&'m mut ExpertParallel>>,
    sources: Handoff<&'m mut RowCollective>,
    pub one_each: &'m RowPartition,
    pub experts: CheckedExperts<'m>,
    pub shared: Option<CheckedExperts<'m>>,
    pub hidden: usize,
    pub rows: RowKernels,
}

impl<'m> StepContext<'m> {
    /// The object that moves rows of a chunk.
    pub fn exchange(&self, chunk: usize) -> &Handoff<&'m mut ExpertParallel> {
        &self.exchanges[chunk % self.exchanges.len()]
    }

    /// A transfer of a chunk, by a node that is halfway when all ranks have agreed on it.
    pub fn moves<R>(
        &self,
        chunk: usize,
        run: &Run,
        call: impl FnOnce(&mut ExpertParallel) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let run = run.clone();
        self.exchange(chunk).with(|ep| ep.on_agreed(move || run.halfway(), |ep| call(ep)))
    }

    /// The same, of what each rank has for all.
    pub fn gathers<R>(
        &self,
        run: &Run,
        call: impl FnOnce(&mut RowCollective) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let run = run.clone();
        self.sources.with(|sources| sources.on_agreed(move || run.halfway(), |sources| call(sources)))
    }
}

impl MoeLayer {
    /// All participants, and the world that ends with them.
    pub(super) fn context(&mut self) -> (StepContext<'_>, Arc<WorldState>) {
        let called = |whose, experts| CheckedExperts { whose, experts };
        let context = StepContext {
            exchanges: self.exchanges.iter_mut().map(Handoff::new).collect(),
            sources: Handoff::new(&mut self.sources),
            one_each: &self.one_each,
            experts: called(ExpertKind::Routed, &*self.experts),
            shared: self.shared.as_deref().map(|expert| called(ExpertKind::Shared, expert)),
            hidden: self.hidden,
            rows: self.rows,
        };
        (context, Arc::clone(&self.world))
    }
}

/// Elements as f32, exactly. Without arithmetic there are none: a layer is not built for such a
/// type.
pub(super) fn widened<E: Element>(values: &[E]) -> Vec<f32> {
    match Arithmetic::try_from(E::DTYPE) {
        Ok(Arithmetic::F32) => bytemuck::cast_slice(values).to_vec(),
        Ok(Arithmetic::Bf16) => bytemuck::cast_slice::<_, bf16>(values).to_f32_vec(),
        Ok(Arithmetic::F16) => bytemuck::cast_slice::<_, f16>(values).to_f32_vec(),
        Err(_) => Vec::new(),
    }
}

/// f32 rounded to elements, to nearest even.
pub(super) fn round_into<E: Element>(values: &[f32], to: &mut [E]) {
    match Arithmetic::try_from(E::DTYPE) {
        Ok(Arithmetic::F32) => bytemuck::cast_slice_mut::<_, f32>(to).copy_from_slice(values),
        Ok(Arithmetic::Bf16) => bytemuck::cast_slice_mut::<_, bf16>(to).convert_from_f32_slice(values),
        Ok(Arithmetic::F16) => bytemuck::cast_slice_mut::<_, f16>(to).convert_from_f32_slice(values),
        Err(_) => {}
    }
}

/// Received rows as f32: where they lie if they are, else a copy, and the pool has its memory back.
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum F32Rows {
    Landed(ExpertRows),
    Widened(Vec<f32>),
}

impl F32Rows {
    pub fn new<E: Element>(rows: ExpertRows) -> Result<F32Rows, Error> {
        if E::DTYPE == Dtype::F32 {
            return Ok(F32Rows::Landed(rows));
        }
        Ok(F32Rows::Widened(widened(rows.rows::<E>()?)))
    }

    pub fn values(&self) -> Result<&[f32], Error> {
        match self {
            F32Rows::Landed(rows) => rows.rows(),
            F32Rows::Widened(values) => Ok(values),
        }
    }
}

impl std::fmt::Debug for F32Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("F32Rows").field("values", &self.values().map_or(0, <[f32]>::len)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_the_rows_of_its_experts_and_none_of_others() {
        // The picture above; expert 1 is padded to 2 rows.
        let rows: Vec<f32> = (0..8u8).map(f32::from).collect();
        let groups = groups(&[3, 1, 0, 2, 1], &[3, 2, 0, 2, 1], 3);
        let seen: Vec<_> = groups
            .iter()
            .map(|group| {
                let Segments { rows, counts, padded, .. } = group.segments(&rows, 1);
                (rows.to_vec(), counts.to_vec(), padded.to_vec())
            })
            .collect();
        let expected = [
            (vec![0.0, 1.0, 2.0], vec![3, 0, 0, 0, 0], vec![3, 0, 0, 0, 0]),
            (vec![3.0, 4.0], vec![0, 1, 0, 0, 0], vec![0, 2, 0, 0, 0]),
            (vec![5.0, 6.0, 7.0], vec![0, 0, 0, 2, 1], vec![0, 0, 0, 2, 1]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_chunk_without_rows_is_one_group() {
        assert_eq!(groups(&[0, 0], &[0, 0], 4).len(), 1);
        assert_eq!(groups(&[], &[], 4).len(), 1);
    }
}
