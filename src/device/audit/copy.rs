//! The launch of `cuda/copy.cu`.

use super::{AuditKernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Bytes that the kernel moves at once.
const VECTOR: u64 = 16;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// `struct Copy` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Operands {
    to: u64,
    from: u64,
    vectors: u64,
}

impl AuditKernels {
    /// Enqueues a copy by multiprocessors, of whole vectors of 16 bytes that do not overlap.
    ///
    /// # Errors
    /// [`DeviceError::Lengths`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn copy(&self, stream: &Stream, to: ByteSpan<'_>, from: ByteSpan<'_>) -> Result<(), DeviceError> {
        if to.len != from.len {
            return Err(DeviceError::Lengths { to: to.len, from: from.len });
        }
        for (what, value) in [("bytes", to.len), ("target", to.address), ("source", from.address)] {
            if !value.is_multiple_of(VECTOR) {
                return Err(DeviceError::Misaligned { what, value, align: VECTOR });
            }
        }
        let vectors = to.len / VECTOR;
        if vectors == 0 {
            return Ok(());
        }
        let at_work = self.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK);
        let blocks = vectors.div_ceil(THREADS.into()).min(at_work.into()) as u32;
        let operands = Operands { to: to.address, from: from.address, vectors };
        let held = stream.hold(&[to.range, from.range])?;
        // SAFETY: the struct is the one of the source, and the kernel moves as many vectors as both
        // spans have.
        unsafe { self.copy.launch_struct(stream, held, Grid::line(blocks, THREADS), &operands) }
    }
}
