//! The launch of `cuda/check.cu`.

use super::operands::{Operands, VECTOR, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;
use crate::plan::SlotShape;

/// Inputs of [`Kernels::check`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The shape of the slots.
    pub shape: SlotShape,
    /// Number of ranks.
    pub ranks: u32,
    /// The slots that this rank received, one for each rank, one behind the other.
    pub received: ByteSpan<'a>,
    /// The call of which they must be: the word that [`Kernels::pack`] counts in.
    pub counter: Word<'a, u64>,
    /// Where a fault is written, a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
    /// The expected digest in the header of every slot.
    pub digest: u64,
}

/// `struct Check` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    received: u64,
    slot_bytes: u64,
    counter: u64,
    status: u64,
    digest: u64,
    ranks: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues a comparison of the heads of received slots with this rank's digest and counter:
    /// rows of another call, or of ranks with other settings, must not be used. It must run before
    /// the sources may write their next slots.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn check(&self, stream: &Stream, check: &Check<'_>) -> Result<(), DeviceError> {
        let received = bytes([check.ranks.into(), check.shape.bytes()]);
        let mut operands = Operands::of("check", stream);
        let parameters = Parameters {
            received: operands.span("received", check.received, received, VECTOR)?,
            slot_bytes: check.shape.bytes(),
            counter: operands.word(check.counter)?,
            status: operands.word(check.status)?,
            digest: check.digest,
            ranks: check.ranks,
            unused: 0,
        };
        // SAFETY: the struct is the one of the source. The kernel reads the heads of the checked
        // slots only.
        unsafe { self.check.launch_struct(stream, operands.held(), Grid::line(1, THREADS), &parameters) }
    }
}
