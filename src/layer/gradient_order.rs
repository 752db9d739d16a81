//! The one order of rows in which gradients of weights are summed, independent of chunks.
//!
//! Rows of a chunk lie by (expert, source rank, token). Chunks are consecutive tokens of each
//! source, so the rows of one expert, put together as below, are by (source rank, token) again, as
//! without chunks:
//!
//! ```text
//!   chunk 0   | e0: s0 s0 s1 | e1: s1 |          chunk 1   | e0: s0 s1 | e1: s0 s1 |
//!
//!   order     e0:  s0 s0 (0)   s0 (1)   s1 (0)   s1 (1)         e1:  s0 (1)   s1 (0)   s1 (1)
//! ```

/// Consecutive rows of one expert and one source in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub chunk: usize,
    pub first: usize,
    pub rows: usize,
}

/// All rows of a step in the order (expert, source rank, token).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientOrder {
    runs: Vec<Vec<Run>>,
}

impl GradientOrder {
    /// From the numbers of rows of each source for each expert in each chunk,
    /// `[chunks, sources, experts]`, and the lengths of the experts' segments with pads, per chunk.
    ///
    /// # Panics
    /// If a chunk has fewer sources or experts than the first.
    pub fn new(counts: &[Vec<Vec<u32>>], padded: &[&[i64]]) -> GradientOrder {
        let experts = padded.first().map_or(0, |padded| padded.len());
        let sources = counts.first().map_or(0, Vec::len);
        let mut runs = vec![Vec::new(); experts];
        let mut segments = vec![0; counts.len()];
        for (expert, runs) in runs.iter_mut().enumerate() {
            let mut next = segments.clone();
            for source in 0..sources {
                for (chunk, counts) in counts.iter().enumerate() {
                    let rows = counts[source][expert] as usize;
                    if rows > 0 {
                        runs.push(Run { chunk, first: next[chunk], rows });
                        next[chunk] += rows;
                    }
                }
            }
            segments.iter_mut().zip(padded).for_each(|(first, padded)| *first += padded[expert] as usize);
        }
        GradientOrder { runs }
    }

    /// All rows in one segment, as they lie: of experts that take all tokens.
    pub(super) fn whole(rows: usize) -> GradientOrder {
        GradientOrder { runs: vec![vec![Run { chunk: 0, first: 0, rows }]] }
    }

    /// Runs of an expert, in order.
    pub(super) fn runs(&self, expert: usize) -> impl Iterator<Item = Run> + '_ {
        self.runs[expert].iter().copied()
    }

    /// Rows of an expert, of all chunks.
    pub fn rows(&self, expert: usize) -> usize {
        self.runs[expert].iter().map(|run| run.rows).sum()
    }

    /// The rows of an expert in order, `[rows, columns]`, from those of the chunks,
    /// `[rows, columns]` each.
    pub fn gather<'a>(
        &self,
        expert: usize,
        columns: usize,
        of_chunk: impl Fn(usize) -> &'a [f32],
    ) -> Vec<f32> {
        let mut gathered = Vec::with_capacity(self.rows(expert) * columns);
        for run in &self.runs[expert] {
            gathered.extend_from_slice(&of_chunk(run.chunk)[run.first * columns..][..run.rows * columns]);
        }
        gathered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_chunks_come_in_the_order_of_source_and_token() {
        // The picture above; expert 0 is padded to 4 rows in chunk 0.
        let counts = [vec![vec![2, 0], vec![1, 1]], vec![vec![1, 1], vec![1, 1]]];
        let order = GradientOrder::new(&counts, &[&[4, 1], &[2, 2]]);
        let rows = [vec![0.0, 1.0, 4.0, -1.0, 8.0], vec![2.0, 5.0, 6.0, 9.0]];
        assert_eq!(order.gather(0, 1, |chunk| &rows[chunk]), [0.0, 1.0, 2.0, 4.0, 5.0]);
        assert_eq!(order.gather(1, 1, |chunk| &rows[chunk]), [6.0, 8.0, 9.0]);
        assert_eq!((order.rows(0), order.rows(1)), (5, 3));
    }
}
