//! Digests by which ranks and readers find out whether they hold the same bytes.

/// FNV-1a of 64 bits: the same in every build and on every machine. It finds mistakes, not
/// forgeries.
///
/// ```
/// use sidelane_core::digest::Digest;
///
/// let mut digest = Digest::default();
/// digest.add(b"foo");
/// digest.add(b"bar");
/// assert_eq!(digest.value(), 0x8594_4171_f739_67e8);
/// assert_eq!(digest.value(), Digest::of(*b"foobar"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Digest of all these bytes.
    pub fn of(bytes: impl IntoIterator<Item = u8>) -> u64 {
        bytes.into_iter().fold(Digest::default(), Digest::with).0
    }

    /// Adds bytes behind those so far.
    pub fn add(&mut self, bytes: &[u8]) {
        *self = bytes.iter().copied().fold(*self, Digest::with);
    }

    /// The digest of the bytes so far.
    pub fn value(self) -> u64 {
        self.0
    }

    fn with(self, byte: u8) -> Digest {
        Digest((self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    }
}
