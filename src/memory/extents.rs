//! The offset allocator: which bytes of a space are free. Pure.
//!
//! Free ranges are kept sorted by offset and joined with adjacent ones; an allocation takes the
//! first that fits. Two equal sequences of calls give equal offsets.

/// All sizes and offsets are multiples of this: a cache line, and the widest vector store.
pub const GRAIN: u64 = 64;

/// Free and used bytes of a space.
#[derive(Clone, Debug)]
pub struct Extents {
    total: u64,
    used: u64,
    peak: u64,
    /// (offset, length), ascending, never empty, never touching.
    free: Vec<(u64, u64)>,
}

impl Extents {
    /// A space of `total` bytes, all free.
    pub fn new(total: u64) -> Self {
        let total = total / GRAIN * GRAIN;
        let mut free = Vec::with_capacity(64);
        if total > 0 {
            free.push((0, total));
        }
        Extents { total, used: 0, peak: 0, free }
    }

    /// Takes `len` bytes, rounded up; the offset, or the largest length that could have been had.
    pub fn alloc(&mut self, len: u64) -> Result<u64, u64> {
        let len = Self::round(len);
        if len == 0 {
            return Ok(0);
        }
        let Some(index) = self.free.iter().position(|&(_, free)| free >= len) else {
            return Err(self.largest());
        };
        let (offset, free) = self.free[index];
        if free == len {
            self.free.remove(index);
        } else {
            self.free[index] = (offset + len, free - len);
        }
        self.count(len);
        Ok(offset)
    }

    /// Takes the largest free range, or the first `most` bytes of it if that is less: (offset,
    /// length), (0, 0) if there is none.
    pub fn take_largest(&mut self, most: u64) -> (u64, u64) {
        let Some(index) = (0..self.free.len()).max_by_key(|&i| (self.free[i].1, u64::MAX - self.free[i].0))
        else {
            return (0, 0);
        };
        let (offset, free) = self.free[index];
        let len = Self::round(most).min(free);
        if len == free {
            self.free.remove(index);
        } else {
            self.free[index] = (offset + len, free - len);
        }
        self.count(len);
        (offset, len)
    }

    /// Gives `len` bytes (rounded up) at `offset` back.
    pub fn free(&mut self, offset: u64, len: u64) {
        let len = Self::round(len);
        if len == 0 {
            return;
        }
        self.used -= len;
        let index = self.free.partition_point(|&(free, _)| free < offset);
        self.free.insert(index, (offset, len));
        if self.free.get(index + 1).is_some_and(|&(next, _)| next == offset + len) {
            self.free[index].1 += self.free.remove(index + 1).1;
        }
        if index > 0 && self.free[index - 1].0 + self.free[index - 1].1 == offset {
            self.free[index - 1].1 += self.free.remove(index).1;
        }
    }

    /// Length of the largest free range.
    pub fn largest(&self) -> u64 {
        self.free.iter().map(|&(_, len)| len).max().unwrap_or(0)
    }

    /// Bytes of the space.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes taken.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The most bytes ever allocated at once.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// `len` as it is taken; more than any space has, if it cannot be.
    pub fn round(len: u64) -> u64 {
        len.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX)
    }

    fn count(&mut self, len: u64) {
        self.used += len;
        self.peak = self.peak.max(self.used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn extents_never_overlap_and_all_come_back(steps in prop::collection::vec((0u64..3000, any::<prop::sample::Index>()), 0..80)) {
            let mut space = Extents::new(64 * 1024);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, pick) in steps {
                if len % 3 == 0 && !held.is_empty() {
                    let (offset, len) = held.swap_remove(pick.index(held.len()));
                    space.free(offset, len);
                } else if let Ok(offset) = space.alloc(len) {
                    let len = Extents::round(len);
                    prop_assert!(offset % GRAIN == 0 && offset + len <= space.total());
                    for &(other, size) in &held {
                        prop_assert!(offset + len <= other || other + size <= offset || len == 0 || size == 0);
                    }
                    held.push((offset, len));
                }
                prop_assert_eq!(space.used(), held.iter().map(|&(_, len)| len).sum::<u64>());
            }
            for (offset, len) in held {
                space.free(offset, len);
            }
            prop_assert_eq!((space.largest(), space.used()), (space.total(), 0));
        }
    }

    #[test]
    fn the_first_fit_is_taken_and_the_largest_announced() {
        let mut space = Extents::new(1024);
        let a = space.alloc(128).unwrap();
        let b = space.alloc(64).unwrap();
        space.alloc(256).unwrap();
        space.free(a, 128);
        assert_eq!(space.alloc(100), Ok(0), "rounded up to the hole of 128");
        assert_eq!(space.take_largest(100), (448, 128), "rounded up");
        assert_eq!(space.take_largest(u64::MAX), (576, 448));
        space.free(b, 64);
        assert_eq!(space.alloc(65), Err(64), "only the hole of 64 is left");
    }
}
