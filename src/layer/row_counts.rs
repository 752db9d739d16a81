//! Rows that each rank has for each expert in each chunk, which ranks tell each other: by them the
//! order of a gradient's sums is known.

use std::ops::Range;

use super::moe::sources_columns;
use crate::ep::ExpertParallel;
use crate::error::{Error, LayerError};
use crate::gate::Decision;

/// How many rows this rank has for each slot, chunk after chunk.
pub(super) fn choices(ep: &ExpertParallel, decision: &Decision, slices: &[Range<usize>]) -> Vec<u32> {
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
pub(super) fn counts<'a>(
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
