//! Batches by which a stream's copies are enqueued.

use std::iter::from_fn;

/// Copies, or memory operations, that a driver takes in one call.
pub const MAX_BATCH: usize = 255;

/// Copies of the first batch. On a host that takes a microsecond to enqueue one, engines begin
/// after some 16 us, and copies of a megabyte keep them busy until the next batch is there.
const FIRST: usize = 16;

/// Sizes of the batches that enqueue so many copies, in their order.
///
/// Engines begin with a batch when the host has enqueued all of it. So the first batch is small,
/// and each has twice as many copies as the one before, up to [`MAX_BATCH`]: engines make copies
/// while the host enqueues the next ones.
///
/// ```
/// use sidelane_core::schedule::copy_batches;
///
/// assert_eq!(copy_batches(7).collect::<Vec<_>>(), [7]);
/// assert_eq!(copy_batches(224).collect::<Vec<_>>(), [16, 32, 64, 112]);
/// ```
pub fn copy_batches(copies: usize) -> impl Iterator<Item = usize> {
    let (mut rest, mut size) = (copies, FIRST);
    from_fn(move || {
        let batch = size.min(rest);
        (rest, size) = (rest - batch, (2 * size).min(MAX_BATCH));
        (batch > 0).then_some(batch)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn copy_batches_hold_all_copies_and_grow_to_driver_maximum(copies in 0usize..5000) {
            let sizes: Vec<usize> = copy_batches(copies).collect();
            prop_assert_eq!(sizes.iter().sum::<usize>(), copies);
            prop_assert!(sizes.iter().all(|&size| 0 < size && size <= MAX_BATCH));
            let full = &sizes[..sizes.len().saturating_sub(1)];
            prop_assert!(full.iter().enumerate().all(|(nth, &size)| size == MAX_BATCH.min(FIRST << nth.min(8))));
        }
    }
}
