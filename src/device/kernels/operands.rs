//! The memory of a launch: compared with its shapes, and claimed for its stream.

use std::sync::MutexGuard;

use super::addresses::Addresses;
use crate::device::range::{ByteSpan, Claims, Value, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Vectors that kernels read and write.
pub(super) const VECTOR: u64 = 16;
/// Words that kernels read and write.
pub(super) const WORD: u64 = 4;

/// Checks the operands of one launch, one after the other, and gives the addresses.
pub(super) struct Operands<'a> {
    kernel: &'static str,
    device: u32,
    held: MutexGuard<'a, Claims>,
}

impl<'a> Operands<'a> {
    pub fn of(kernel: &'static str, stream: &'a Stream) -> Self {
        Operands { kernel, device: stream.device(), held: stream.held() }
    }

    /// Memory for `needed` bytes at a multiple of `align`.
    pub fn span(
        &mut self,
        what: &'static str,
        span: ByteSpan<'_>,
        needed: Option<u64>,
        align: u64,
    ) -> Result<u64, DeviceError> {
        span.range.check_reach(self.device)?;
        self.large_enough(what, span.len, needed)?;
        if !span.address.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what, value: span.address, align });
        }
        self.held.add(span.range.keep());
        Ok(span.address)
    }

    /// As [`span`](Self::span), or 0 for none.
    pub fn optional(
        &mut self,
        what: &'static str,
        span: Option<ByteSpan<'_>>,
        needed: Option<u64>,
        align: u64,
    ) -> Result<u64, DeviceError> {
        span.map_or(Ok(0), |span| self.span(what, span, needed, align))
    }

    /// A word.
    pub fn word<T: Value>(&mut self, word: Word<'_, T>) -> Result<u64, DeviceError> {
        word.range.check_reach(self.device)?;
        self.held.add(word.range.keep());
        Ok(word.address)
    }

    /// A table of addresses, each with memory for `needed` bytes.
    pub fn addresses(
        &mut self,
        what: &'static str,
        addresses: &Addresses,
        needed: Option<u64>,
    ) -> Result<u64, DeviceError> {
        addresses.table.check_reach(self.device)?;
        self.large_enough(what, addresses.each, needed)?;
        self.held.add(addresses.table.keep());
        self.held.add_all(&addresses.named);
        Ok(addresses.table.address())
    }

    /// Claims for the launch.
    pub fn held(self) -> MutexGuard<'a, Claims> {
        self.held
    }

    /// `needed` is `None` for more bytes than can be counted.
    fn large_enough(&self, what: &'static str, given: u64, needed: Option<u64>) -> Result<(), DeviceError> {
        match needed {
            Some(needed) if needed <= given => Ok(()),
            _ => {
                let needed = needed.unwrap_or(u64::MAX);
                Err(DeviceError::TooSmall { kernel: self.kernel, what, given, needed })
            }
        }
    }
}

/// The bytes of an array, if they can be counted.
pub(super) fn bytes<const N: usize>(factors: [u64; N]) -> Option<u64> {
    factors.into_iter().try_fold(1_u64, u64::checked_mul)
}
