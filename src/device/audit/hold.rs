//! The launches of `cuda/hold.cu`.
//!
//! All resources of a block exist before it is launched. Calls that wait for the whole context
//! (freeing memory, loading modules) would wait for the hold, too, which waits for the host.

use std::sync::atomic::Ordering;

use super::{AuditKernels, THREADS};
use crate::device::launch::{Grid, Parameters};
use crate::device::module::Function;
use crate::device::pinned::PinnedMemory;
use crate::device::range::Word;
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// A hold on every multiprocessor of a device. It ends when it is released, or dropped.
#[derive(Debug)]
pub struct SmHold {
    function: Function,
    /// Whether all may end, then a word for each block: whether it runs.
    words: PinnedMemory,
    blocks: u32,
    shared: u32,
}

impl AuditKernels {
    /// A hold to be [taken](SmHold::take): one block for each SM, which leaves no shared memory for
    /// others.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] if two such blocks fit a multiprocessor;
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn hold(&self) -> Result<SmHold, DeviceError> {
        let facts = self.context.facts();
        let (blocks, shared) = (facts.multiprocessors, facts.block_shared);
        self.hold.allow_shared(shared)?;
        let at_once = self.hold.blocks_at_once(THREADS, shared)?;
        if at_once != 1 {
            let what = "blocks that a multiprocessor runs at once";
            return Err(DeviceError::Shape { kernel: "hold", what, given: at_once.into(), expected: "1" });
        }
        let words = PinnedMemory::new(&self.context, 8 * (blocks as usize + 1))?;
        Ok(SmHold { function: self.hold.clone(), words, blocks, shared })
    }

    /// Enqueues the smallest kernel there is: it writes 1 to the word.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn touch(&self, stream: &Stream, word: Word<'_, u64>) -> Result<(), DeviceError> {
        let parameters = Parameters::new(&self.context).word(word)?;
        // SAFETY: the kernel takes the address of one word.
        unsafe { self.touch.launch(stream, Grid::line(1, 32), &parameters) }
    }
}

/// `struct Hold` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Words {
    arrived: u64,
    go: u64,
}

impl SmHold {
    /// Enqueues it. It runs when [`running`](Self::running) returns as many as
    /// [`blocks`](Self::blocks).
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn take(&self, stream: &Stream) -> Result<(), DeviceError> {
        for place in 0..=self.blocks as usize {
            self.words.word(place * 8)?.store(0, Ordering::Release);
        }
        let memory = self.words.range();
        let words = Words { arrived: memory.address() + 8, go: memory.address() };
        let held = stream.hold(&[memory])?;
        let grid = Grid { shared: self.shared, ..Grid::line(self.blocks, THREADS) };
        // SAFETY: the struct is the one of the source: a word that is read, and behind it one for
        // each block.
        unsafe { self.function.launch_struct(stream, held, grid, &words) }
    }

    /// Blocks that it consists of: one for each multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks that run, or have run, since it was taken.
    pub fn running(&self) -> u32 {
        let runs =
            |&place: &usize| self.words.word(place * 8).is_ok_and(|word| word.load(Ordering::Acquire) != 0);
        (1..=self.blocks as usize).filter(runs).count() as u32
    }

    /// Lets it end.
    pub fn release(&self) {
        if let Ok(word) = self.words.word(0) {
            word.store(1, Ordering::Release);
        }
    }
}

impl Drop for SmHold {
    fn drop(&mut self) {
        self.release();
    }
}
