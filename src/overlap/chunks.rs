//! Chunks: into how many parts a call is cut, and where.
//!
//! | chunk | what is cut | dispatch and combine | bits |
//! |---|---|---|---|
//! | token slice | a rank's tokens | one pair for each slice, smaller | those of the whole: a token's sum knows nothing of other tokens |
//! | expert group | this rank's experts | none: the rows of all have landed | those of the whole: products of different experts |
//!
//! A dispatch for each *group of experts*, by routings with the other choices dropped, needs no new
//! call either, but a token's sum would be rounded once for each group, which changes the bits.
//! *Source groups*, for experts that begin when some ranks' rows have arrived, would need a
//! dispatch that finishes rank by rank: its program waits for all ranks in one stage, since
//! placement needs the counts of all ranks anyway; and expert-major rows of one source lie in as
//! many pieces as there are experts. A token slice brings rows of all sources for a whole product.
//! So neither is offered.

use std::num::NonZeroU32;
use std::ops::Range;

/// Cost of a call in one piece. All ranks must pass the same, independent of their tokens, so pass
/// the most that a rank can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallCost {
    /// Tokens of a rank, at most.
    pub tokens: u32,
    /// Bytes that go out for a token: those of a row, times its choices.
    pub token_bytes: u64,
    /// Rows that an expert gets on average.
    pub expert_rows: u32,
}

/// When a call is worth cutting.
///
/// With `n` slices, transfers and products of equal length `T` in all take about `T + T / n + n c`,
/// if each slice has a fixed cost `c`: only the first transfer and the fixed costs cannot overlap.
/// That is least at `n = sqrt(T / c)`. Time is counted in bytes that a rank sends in it, so
///
/// ```text
///   n  =  min( sqrt(bytes / call_bytes),  expert_rows / gemm_rows,  most ),   at least 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChunkRule {
    /// Fixed cost of a call, as the bytes that could be sent in that time: `sidelane bench` shows
    /// the time of a small call, and the bytes per second of a large one.
    pub call_bytes: u64,
    /// Rows below which an expert's product is not done sooner for having fewer of them.
    pub gemm_rows: u32,
    /// Slices at most.
    pub most: u32,
}

impl ChunkRule {
    /// A rule of these numbers.
    pub const fn new(call_bytes: u64, gemm_rows: u32, most: u32) -> Self {
        ChunkRule { call_bytes, gemm_rows, most }
    }

    /// Number of slices of a call of this cost: a function of its arguments, so the same on all
    /// ranks that pass the same.
    #[doc(hidden)]
    pub fn slices(&self, load: &CallCost) -> TokenChunks {
        let bytes = u64::from(load.tokens).saturating_mul(load.token_bytes);
        let by_cost = (bytes / self.call_bytes.max(1)).isqrt();
        let by_rows = load.expert_rows / self.gemm_rows.max(1);
        let most = by_rows.min(self.most).min(load.tokens);
        TokenChunks::new(u32::try_from(by_cost).unwrap_or(u32::MAX).min(most))
    }
}

/// Slices of a rank's tokens: the same number on all ranks, of sizes that differ by at most one
/// token. A rank with fewer tokens than slices has empty ones, and makes their calls, as its peers
/// need it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenChunks(NonZeroU32);

impl TokenChunks {
    /// So many; 0 counts as 1.
    pub fn new(count: u32) -> Self {
        TokenChunks(NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
    }

    /// How many.
    pub fn count(self) -> u32 {
        self.0.get()
    }

    /// The tokens of each, of `tokens` that this rank has.
    pub fn of(self, tokens: u32) -> impl ExactSizeIterator<Item = Range<u32>> {
        let bound = move |slice: u32| (u64::from(tokens) * u64::from(slice) / u64::from(self.count())) as u32;
        (0..self.count()).map(move |slice| bound(slice)..bound(slice + 1))
    }
}

/// Cuts local experts into at most `groups` runs of adjacent experts whose rows, as
/// [`Handle`](crate::ep::Handle)s count them, are as even as possible, so that several compute
/// streams share them ([`RoundRobin`](super::RoundRobin)). Rows lie expert-major, so each group's
/// are one range. Experts without rows are in no group of their own; without any rows all are one.
pub fn expert_groups(rows: &[i64], groups: u32) -> Vec<Range<usize>> {
    let total: u64 = rows.iter().map(|&rows| rows.max(0) as u64).sum();
    let target = |group: u64| total * group / u64::from(groups.max(1));
    let (mut cut, mut begin, mut so_far, mut made) = (Vec::new(), 0, 0, 1);
    for (expert, &count) in rows.iter().enumerate() {
        so_far += count.max(0) as u64;
        // After the expert whose rows fill the group's share.
        if count > 0 && so_far >= target(made) {
            cut.push(begin..expert + 1);
            begin = expert + 1;
            while made <= u64::from(groups) && target(made) <= so_far {
                made += 1;
            }
        }
    }
    match cut.last_mut() {
        Some(last) => last.end = rows.len(),
        None => cut.push(0..rows.len()),
    }
    cut
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULE: ChunkRule = ChunkRule { call_bytes: 1 << 20, gemm_rows: 128, most: 8 };

    fn load(tokens: u32, expert_rows: u32) -> CallCost {
        CallCost { tokens, token_bytes: 32 << 10, expert_rows }
    }

    #[test]
    fn large_calls_are_cut_and_small_ones_are_not() {
        let slices = |tokens, rows| RULE.slices(&load(tokens, rows)).count();
        assert_eq!(slices(4096, 100_000), 8, "sqrt(128 MiB / 1 MiB) = 11, but 8 at most");
        assert_eq!(slices(800, 100_000), 5, "sqrt(25)");
        assert_eq!(slices(800, 400), 3, "products of 128 rows at least");
        assert_eq!(slices(800, 100), 1);
        assert_eq!(slices(60, 100_000), 1, "less than the cost of two calls");
        assert_eq!(slices(0, 0), 1, "the call is made all the same");
    }

    proptest! {
        #[test]
        fn slices_hold_every_token_once_and_are_even(tokens in 0..10_000u32, count in 0..40u32) {
            let slices = TokenChunks::new(count);
            let ranges: Vec<_> = slices.of(tokens).collect();
            prop_assert_eq!(ranges.len() as u32, count.max(1));
            prop_assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), (0..tokens).collect::<Vec<_>>());
            let lengths = ranges.iter().map(|range| range.len() as u32);
            prop_assert!(lengths.clone().all(|len| len.abs_diff(tokens / count.max(1)) <= 1));
            prop_assert!(tokens < count || tokens == 0 || lengths.clone().all(|len| len > 0));
        }

        #[test]
        fn the_rule_never_cuts_too_far(
            (tokens, token_bytes, expert_rows) in (any::<u32>(), any::<u64>(), any::<u32>()),
            (call_bytes, gemm_rows, most) in (any::<u64>(), any::<u32>(), any::<u32>()),
        ) {
            let rule = ChunkRule { call_bytes, gemm_rows, most };
            let count = rule.slices(&CallCost { tokens, token_bytes, expert_rows }).count();
            prop_assert!(count == 1 || count <= most.min(tokens));
            prop_assert!(count == 1 || u64::from(expert_rows / count) >= u64::from(gemm_rows));
            let bytes = u128::from(tokens) * u128::from(token_bytes);
            prop_assert!(count == 1 || u128::from(count) * u128::from(count) * u128::from(call_bytes) <= bytes);
        }

        #[test]
        fn groups_are_neighbours_hold_every_row_once_and_are_as_even_as_experts_allow(
            rows in prop::collection::vec(prop_oneof![Just(0), 0..300i64], 0..40),
            groups in 0..9u32,
        ) {
            let made = expert_groups(&rows, groups);
            let total: i64 = rows.iter().sum();
            prop_assert!((1..=groups.max(1)).contains(&(made.len() as u32)));
            let experts = made.iter().cloned().flatten().collect::<Vec<_>>();
            prop_assert_eq!(experts, (0..rows.len()).collect::<Vec<_>>());
            let largest = rows.iter().max().copied().unwrap_or(0);
            for group in made {
                let sum: i64 = rows[group].iter().sum();
                let most = total / i64::from(groups.max(1)) + 1 + largest;
                prop_assert!((sum > 0 || total == 0) && sum <= most, "{} of {}", sum, total);
            }
        }
    }
}
