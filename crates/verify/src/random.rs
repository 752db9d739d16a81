//! Random values that a seed repeats.

/// A small generator (splitmix64): values come from a seed, so that a failure can be repeated.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait, reason = "it never ends, so it is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not zero.
    pub fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes()).collect();
        bytes.truncate(len as usize);
        bytes
    }

    /// A number of 24 bits between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
