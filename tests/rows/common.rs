//! Common parts of the tests of the vector loops: guarded targets, repeatable values, strategies.

#![allow(dead_code, reason = "each test program uses a part of this")]

pub use sidelane_testkit::values::{self, Random};

use proptest::prelude::*;
use sidelane::dtype::PartialDtype;
use sidelane::rows::{Arithmetic, Stores};

/// A target between guard bytes, at a chosen distance from an alignment of 64.
pub struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

const GUARD: u8 = 0xa5;

impl Guarded {
    pub fn new(len: usize, misaligned_by: usize) -> Self {
        let bytes = vec![GUARD; len + 3 * 64];
        let start = 64 + bytes.as_ptr().addr().wrapping_neg() % 64 + misaligned_by % 64;
        Guarded { bytes, start, len }
    }

    pub fn holding(content: &[u8], misaligned_by: usize) -> Self {
        let mut guarded = Guarded::new(content.len(), misaligned_by);
        guarded.bytes[guarded.start..][..content.len()].copy_from_slice(content);
        guarded
    }

    pub fn ptr(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    /// The content, once the guards are seen to be untouched.
    pub fn content(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.start);
        let (content, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|&byte| byte == GUARD), "wrote outside the target");
        content
    }
}

pub fn stores() -> impl Strategy<Value = Stores> {
    prop::sample::select(&[Stores::Cached, Stores::Streaming][..])
}

/// Half of the targets aligned, so that streaming is met, the others anywhere.
pub fn misalignment() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 0usize..64]
}

/// Every type of rows with every wire that carries its sums.
pub fn carried() -> impl Strategy<Value = (Arithmetic, PartialDtype)> {
    let pairs = Arithmetic::ALL.into_iter().flat_map(|dtype| PartialDtype::ALL.map(|wire| (dtype, wire)));
    prop::sample::select(pairs.filter(|&(dtype, wire)| wire.carries(dtype.into())).collect::<Vec<_>>())
}
