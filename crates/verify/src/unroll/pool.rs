//! A small first-fit allocator, so that unrolled memory is reused as soon as the rules allow: the
//! hard case.

use std::ops::Range;

/// The receive pool of one rank: the extents in use, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    used: Vec<Range<u64>>,
    /// End of the highest extent there ever was.
    pub high: u64,
}

impl Pool {
    /// The lowest gap of `bytes`. A real rank announces its largest free extent; the choice does
    /// not change the order of accesses, and the lowest gap is reused most.
    pub fn take(&mut self, bytes: u64) -> Range<u64> {
        let bytes = bytes.next_multiple_of(64);
        let mut start = 0;
        let mut at = 0;
        while at < self.used.len() && self.used[at].start < start + bytes {
            start = self.used[at].end;
            at += 1;
        }
        let extent = start..start + bytes;
        if bytes > 0 {
            self.used.insert(at, extent.clone());
        }
        self.high = self.high.max(extent.end);
        extent
    }

    /// Keeps `part` of an extent, in whole lines, and gives the rest back.
    pub fn keep(&mut self, extent: &Range<u64>, part: Range<u64>) -> Range<u64> {
        let kept = part.start..part.end.next_multiple_of(64);
        for used in self.used.iter_mut().filter(|used| *used == extent) {
            *used = kept.clone();
        }
        self.used.retain(|used| !used.is_empty());
        kept
    }

    /// Gives an extent back. One that was given back before stays so.
    pub fn give(&mut self, extent: &Range<u64>) {
        self.used.retain(|used| used != extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_gap_that_fits_is_taken() {
        let mut pool = Pool::default();
        let (a, b, c) = (pool.take(64), pool.take(1), pool.take(100));
        assert_eq!((&a, &b, &c), (&(0..64), &(64..128), &(128..256)));
        pool.give(&a);
        assert_eq!(pool.take(65), 256..384, "too large for the gap");
        assert_eq!(pool.take(64), 0..64);
        pool.give(&b);
        pool.give(&c);
        assert_eq!(pool.take(192), 64..256);
        assert_eq!(pool.high, 384);
        let large = pool.take(128);
        assert_eq!(large, 384..512);
        assert_eq!(pool.keep(&large, 384..385), 384..448);
        assert_eq!(pool.take(64), 448..512);
        let large = pool.take(192);
        assert_eq!((&large, pool.keep(&large, 576..704)), (&(512..704), 576..704));
        assert_eq!(pool.take(64), 512..576);
    }
}
