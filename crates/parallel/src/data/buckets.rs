//! Parameters in a row, the buckets that they travel in, and the part of each that a rank owns.
//!
//! ```text
//!   parameters   | 0 | 1     | 2 | 3           | 4  |         flat, ascending
//!   buckets      | 0         | 1 | 2                |         filled from the last parameter on
//!   3 ranks      |a  |b  |c  |a|b| |a     |b     |c    |.     each bucket in equal parts; . is padding
//! ```

use std::ops::Range;

use super::error::DataError;

/// Sizes of all parameters, and the buckets that they travel in. All ranks must have the same.
///
/// ```
/// use sidelane_parallel::data::Layout;
///
/// let layout = Layout::buckets(&[10, 30, 20, 4], 100)?;             // 25 elements of four bytes
/// assert_eq!(layout.bucket_parameters(), [0..1, 1..2, 2..4]);       // the second exceeds a bucket alone
/// # Ok::<(), sidelane_parallel::data::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// First element of each parameter in the row, and the end of the last.
    bounds: Vec<usize>,
    /// Parameters of each bucket.
    buckets: Vec<Range<usize>>,
}

impl Layout {
    /// Buckets in backward order: they are filled from the last parameter on, up to `bucket_bytes`.
    /// A larger parameter is a bucket of its own. `sizes` are elements of each parameter.
    ///
    /// # Errors
    /// [`DataError::NoParameters`], [`DataError::NoElements`], [`DataError::TooLarge`].
    pub fn buckets(sizes: &[usize], bucket_bytes: usize) -> Result<Layout, DataError> {
        let bounds = bounds(sizes)?;
        let (room, mut buckets, mut end) = (bucket_bytes / size_of::<f32>(), Vec::new(), sizes.len());
        for first in (0..sizes.len()).rev() {
            if first + 1 < end && bounds[end] - bounds[first] > room {
                buckets.push(first + 1..end);
                end = first + 1;
            }
        }
        buckets.push(0..end);
        buckets.reverse();
        Ok(Layout { bounds, buckets })
    }

    /// A bucket for each layer, by the elements of its parameters: what
    /// [`FullySharded`](super::FullySharded) gathers at once.
    ///
    /// # Errors
    /// As [`Layout::buckets`].
    pub fn layers(layers: &[impl AsRef<[usize]>]) -> Result<Layout, DataError> {
        let layers: Vec<_> = layers.iter().map(AsRef::as_ref).collect();
        let bounds = bounds(&layers.concat())?;
        let (mut buckets, mut first) = (Vec::new(), 0);
        for (nth, layer) in layers.iter().enumerate() {
            if layer.is_empty() {
                return Err(DataError::NoParameters { what: format!("layer {nth}") });
            }
            buckets.push(first..first + layer.len());
            first += layer.len();
        }
        Ok(Layout { bounds, buckets })
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> usize {
        self.bounds[self.parameters()]
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Parameters of each bucket, ascending. A backward pass sends the last bucket first.
    pub fn bucket_parameters(&self) -> &[Range<usize>] {
        &self.buckets
    }

    /// Place of a parameter in the row of all.
    ///
    /// # Errors
    /// [`DataError::UnknownParameter`].
    pub fn place(&self, parameter: usize) -> Result<Range<usize>, DataError> {
        match self.bounds.get(parameter..) {
            Some(&[first, end, ..]) => Ok(first..end),
            _ => Err(DataError::UnknownParameter { parameter, parameters: self.parameters() }),
        }
    }

    /// Elements that each of so many ranks holds, at least one: its part of each bucket, padding
    /// included.
    pub fn shard_len(&self, ranks: u32) -> usize {
        Cut::new(self, (0, ranks.max(1))).shard_len()
    }

    /// Number of buckets.
    pub(super) fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Place of a bucket in the row of all parameters.
    pub(super) fn bucket(&self, bucket: usize) -> Range<usize> {
        let Range { start, end } = self.buckets[bucket];
        self.bounds[start]..self.bounds[end]
    }

    /// The bucket of a parameter.
    pub(super) fn bucket_of(&self, parameter: usize) -> usize {
        self.buckets.partition_point(|bucket| bucket.end <= parameter)
    }

    /// Checks a slice of all parameters.
    pub(super) fn check(&self, parameters: &[f32]) -> Result<(), DataError> {
        if parameters.len() == self.elements() {
            return Ok(());
        }
        let (what, seen) = ("parameters".to_owned(), parameters.len());
        Err(DataError::WrongLength { what, seen, expected: self.elements() })
    }

    /// Numbers that differ where layouts do.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        let ends = self.buckets.iter().map(|bucket| bucket.end);
        self.bounds.iter().copied().chain(ends).map(|number| number as u64)
    }
}

fn bounds(sizes: &[usize]) -> Result<Vec<usize>, DataError> {
    if sizes.is_empty() {
        return Err(DataError::NoParameters { what: "the layout".to_owned() });
    }
    let mut bounds = vec![0usize];
    for (parameter, &size) in sizes.iter().enumerate() {
        if size == 0 {
            return Err(DataError::NoElements { parameter });
        }
        let end = bounds[parameter].checked_add(size);
        // Bytes are counted, too, and each bucket may be padded.
        let end = end.filter(|end| end.checked_mul(16).is_some());
        bounds.push(end.ok_or(DataError::TooLarge { parameter })?);
    }
    Ok(bounds)
}

/// The part of each bucket that a rank owns. Parts are equal, so the last ones may be padded.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    rank: usize,
    ranks: usize,
    /// First element of each bucket's part in the shard, and the end of the last.
    firsts: Vec<usize>,
}

impl Cut {
    pub fn new(layout: &Layout, (rank, ranks): (u32, u32)) -> Cut {
        let mut firsts = vec![0];
        for bucket in 0..layout.len() {
            firsts.push(firsts[bucket] + layout.bucket(bucket).len().div_ceil(ranks as usize));
        }
        Cut { rank: rank as usize, ranks: ranks as usize, firsts }
    }

    /// Elements of the shard, padding included.
    pub fn shard_len(&self) -> usize {
        self.firsts[self.firsts.len() - 1]
    }

    /// Place of a bucket's part in the shard, padding included.
    pub fn part(&self, bucket: usize) -> Range<usize> {
        self.firsts[bucket]..self.firsts[bucket + 1]
    }

    /// Elements of a bucket, padding included.
    pub fn padded_len(&self, bucket: usize) -> usize {
        self.part(bucket).len() * self.ranks
    }

    /// Place of this rank's part of a bucket in the row of all parameters, without padding.
    pub fn place(&self, layout: &Layout, bucket: usize) -> Range<usize> {
        let (whole, part) = (layout.bucket(bucket), self.part(bucket).len());
        let first = (whole.start + self.rank * part).min(whole.end);
        first..(first + part).min(whole.end)
    }

    /// This rank's part of values of all parameters, padded with zeros.
    pub fn shard(&self, layout: &Layout, whole: &[f32]) -> Vec<f32> {
        let mut shard = vec![0.0; self.shard_len()];
        for bucket in 0..layout.len() {
            let place = self.place(layout, bucket);
            shard[self.firsts[bucket]..][..place.len()].copy_from_slice(&whole[place]);
        }
        shard
    }

    /// Places of this rank's parts in the row of all parameters, and where each begins in the
    /// shard.
    pub fn places(&self, layout: &Layout) -> Vec<(Range<usize>, usize)> {
        (0..layout.len()).map(|bucket| (self.place(layout, bucket), self.firsts[bucket])).collect()
    }
}
