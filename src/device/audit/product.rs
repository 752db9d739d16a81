//! Matrix products: something for multiprocessors to do. The launch of `cuda/product.cu`.

use super::{AuditKernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::{ByteSpan, DeviceRange};
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Sizes of products are multiples of this: `TILE` in the source.
pub const TILE: u32 = 128;

/// `out = a * transposed b`, all `[size, size]` in bf16.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows and columns of each: a multiple of [`TILE`].
    pub size: u32,
    /// The left one.
    pub a: ByteSpan<'a>,
    /// The right one, by columns.
    pub b: ByteSpan<'a>,
    /// The result.
    pub out: ByteSpan<'a>,
}

impl Product<'_> {
    /// Bytes of each matrix of this size.
    pub fn bytes(size: u32) -> u64 {
        u64::from(size) * u64::from(size) * 2
    }

    /// Refuses sizes and memory that kernels cannot use; all addresses are multiples of 16 after
    /// that.
    pub(super) fn check(&self) -> Result<[&DeviceRange; 3], DeviceError> {
        const KERNEL: &str = "product";
        let (size, needed) = (self.size, Self::bytes(self.size));
        if size == 0 || !size.is_multiple_of(TILE) || size > 1 << 16 {
            let (what, expected) = ("size", "a multiple of 128 up to 65536");
            return Err(DeviceError::Shape { kernel: KERNEL, what, given: size.into(), expected });
        }
        for (what, span) in [("a", self.a), ("b", self.b), ("out", self.out)] {
            if span.len < needed {
                return Err(DeviceError::TooSmall { kernel: KERNEL, what, given: span.len, needed });
            }
            if !span.address.is_multiple_of(16) {
                return Err(DeviceError::Misaligned { what, value: span.address, align: 16 });
            }
        }
        Ok([self.a.range, self.b.range, self.out.range])
    }
}

/// `struct Product` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Operands {
    a: u64,
    b: u64,
    out: u64,
    size: u32,
    unused: u32,
}

impl AuditKernels {
    /// Enqueues a product by our own kernel: tensor cores, `f32` sums in their order, one rounding.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn product(&self, stream: &Stream, product: &Product<'_>) -> Result<(), DeviceError> {
        let ranges = product.check()?;
        let Product { size, a, b, out } = *product;
        let operands = Operands { a: a.address, b: b.address, out: out.address, size, unused: 0 };
        let held = stream.hold(&ranges)?;
        let grid = Grid { blocks: [size / TILE, size / TILE, 1], ..Grid::line(1, THREADS) };
        // SAFETY: the struct is the one of the source; the kernel stays inside of `size * size`
        // elements of each, which were checked.
        unsafe { self.product.launch_struct(stream, held, grid, &operands) }
    }
}
