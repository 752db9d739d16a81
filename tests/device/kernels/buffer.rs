//! Memory that kernels and tests share, between guards.

use sidelane::device::{ByteSpan, Context, DeviceRange, PinnedMemory, Word};
use std::sync::Arc;

const GUARD: u8 = 0xa5;
const GUARDS: u64 = 256;
/// What is there before anybody writes.
pub const POISON: u8 = 0xcb;

/// Bytes that a device reads and writes. Anything that is written beside them is noticed when they
/// are looked at.
pub struct Buffer {
    memory: PinnedMemory,
    range: DeviceRange,
}

impl Buffer {
    pub fn new(context: &Arc<Context>, len: u64) -> Self {
        Self::of(context, &vec![POISON; len as usize])
    }

    pub fn of(context: &Arc<Context>, bytes: &[u8]) -> Self {
        let memory = PinnedMemory::new(context, bytes.len() + 2 * GUARDS as usize).unwrap();
        memory.write(0, &vec![GUARD; bytes.len() + 2 * GUARDS as usize]).unwrap();
        memory.write(GUARDS as usize, bytes).unwrap();
        let range = memory.range().part(GUARDS, bytes.len() as u64).unwrap();
        Buffer { memory, range }
    }

    pub fn words<T: bytemuck::NoUninit>(context: &Arc<Context>, words: &[T]) -> Self {
        Self::of(context, bytemuck::cast_slice(words))
    }

    pub fn range(&self) -> &DeviceRange {
        &self.range
    }

    pub fn span(&self) -> ByteSpan<'_> {
        self.range.span(0, self.range.len()).unwrap()
    }

    pub fn part(&self, offset: u64, len: u64) -> ByteSpan<'_> {
        self.range.span(offset, len).unwrap()
    }

    pub fn word<T: sidelane::device::Value>(&self) -> Word<'_, T> {
        self.range.word(0).unwrap()
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.memory.write((GUARDS + offset) as usize, bytes).unwrap();
    }

    /// The bytes, once the guards are seen to be untouched.
    pub fn content(&self) -> Vec<u8> {
        let mut all = vec![0; self.range.len() as usize + 2 * GUARDS as usize];
        self.memory.read(0, &mut all).unwrap();
        let (before, rest) = all.split_at(GUARDS as usize);
        let (content, after) = rest.split_at(self.range.len() as usize);
        assert!(before.iter().chain(after).all(|&byte| byte == GUARD), "written outside of the memory given");
        content.to_vec()
    }

    /// The content as words.
    pub fn read<T: bytemuck::Pod>(&self) -> Vec<T> {
        bytemuck::pod_collect_to_vec(&self.content())
    }
}
