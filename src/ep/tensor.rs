//! Tensors that callers bring, on the host or on a device.
//!
//! ```text
//!   dispatch(x, choices)                              host                     device
//!     x         [tokens, hidden]                      &[E], &Vec<E>            Tensor::device(&range, dtype)
//!     choices   [tokens, top_k] ids and weights       &Routing                 Choices::Device { .. }
//!   combine_into(y, handle, out)                      &mut [E]                 TensorMut::device(&range, dtype)
//! ```
//!
//! An instance works in one [`Place`], which its builder chooses. The place is a value and not a
//! type, because Python and C choose it at run time. A tensor of the other place is refused like
//! any other bad input: with [`PlanError::WrongPlace`], on all ranks, before anything moves.

use super::builder::Spec;
use crate::device::DeviceRange;
use crate::dtype::{Dtype, Element};
use crate::error::{CallKind, DeviceError, Error, MemoryError, PlanError};
use crate::gate::Routing;

/// Where an instance has its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Place {
    /// Memory of the host.
    Host,
    /// Memory of the GPU with this number.
    Device(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Host => f.write_str("host"),
            Place::Device(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// A tensor that a call reads.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Tensor<'a> {
    /// In memory of the host.
    Host {
        /// The elements.
        bytes: &'a [u8],
        /// Their type.
        dtype: Dtype,
    },
    /// In memory that a device reaches. The call reads it when the stream comes to it.
    Device {
        /// The elements, at a multiple of 16 bytes.
        range: &'a DeviceRange,
        /// Their type.
        dtype: Dtype,
    },
}

impl<'a> Tensor<'a> {
    /// A tensor in memory of a device.
    pub fn device(range: &'a DeviceRange, dtype: Dtype) -> Self {
        Tensor::Device { range, dtype }
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Tensor::Host { dtype, .. } | Tensor::Device { dtype, .. } => *dtype,
        }
    }

    /// Size of the elements.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Tensor::Host { bytes, .. } => bytes.len() as u64,
            Tensor::Device { range, .. } => range.len(),
        }
    }

    /// The elements on the host.
    pub(super) fn on_host(self, what: &'static str) -> Result<(&'a [u8], Dtype), Error> {
        match self {
            Tensor::Host { bytes, dtype } => Ok((bytes, dtype)),
            Tensor::Device { .. } => Err(wrong_place(what, Side::Host)),
        }
    }

    /// Numbers of 32 bits on the host.
    pub(super) fn numbers(self, what: &'static str) -> Result<&'a [f32], Error> {
        let (bytes, seen) = self.on_host(what)?;
        numbers_of(what, seen)?;
        // Of no elements the address means nothing.
        if bytes.is_empty() {
            return Ok(&[]);
        }
        Ok(bytemuck::try_cast_slice(bytes).map_err(|_| misaligned(bytes))?)
    }

    /// The memory that this device reaches, if it is `rows` rows of `columns` elements of this
    /// type.
    pub(super) fn on_device(
        self,
        what: &'static str,
        shape: Shape,
        device: u32,
    ) -> Result<&'a DeviceRange, Error> {
        match self {
            Tensor::Device { range, dtype } => {
                shape.check_range(what, (range, dtype), device).map(|()| range)
            }
            Tensor::Host { .. } => Err(wrong_place(what, Side::Device)),
        }
    }
}

impl<'a, E: Element> From<&'a [E]> for Tensor<'a> {
    fn from(rows: &'a [E]) -> Self {
        Tensor::Host { bytes: bytemuck::cast_slice(rows), dtype: E::DTYPE }
    }
}

impl<'a, E: Element> From<&'a Vec<E>> for Tensor<'a> {
    fn from(rows: &'a Vec<E>) -> Self {
        rows.as_slice().into()
    }
}

impl<'a, E: Element, const N: usize> From<&'a [E; N]> for Tensor<'a> {
    fn from(rows: &'a [E; N]) -> Self {
        rows.as_slice().into()
    }
}

/// A tensor that a call writes.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorMut<'a> {
    /// In memory of the host.
    Host {
        /// The elements.
        bytes: &'a mut [u8],
        /// Their type.
        dtype: Dtype,
    },
    /// In memory that a device reaches. The call writes it when the stream comes to it.
    Device {
        /// The elements, at a multiple of 16 bytes.
        range: &'a DeviceRange,
        /// Their type.
        dtype: Dtype,
    },
}

impl<'a> TensorMut<'a> {
    /// A tensor in memory of a device.
    pub fn device(range: &'a DeviceRange, dtype: Dtype) -> Self {
        TensorMut::Device { range, dtype }
    }

    /// The elements on the host.
    pub(super) fn on_host(self, what: &'static str) -> Result<(&'a mut [u8], Dtype), Error> {
        match self {
            TensorMut::Host { bytes, dtype } => Ok((bytes, dtype)),
            TensorMut::Device { .. } => Err(wrong_place(what, Side::Host)),
        }
    }

    /// Numbers of 32 bits on the host.
    pub(super) fn numbers(self, what: &'static str) -> Result<&'a mut [f32], Error> {
        let (bytes, seen) = self.on_host(what)?;
        numbers_of(what, seen)?;
        if bytes.is_empty() {
            return Ok(&mut []);
        }
        let error = misaligned(bytes);
        Ok(bytemuck::try_cast_slice_mut(bytes).map_err(|_| error)?)
    }

    /// The memory on a device, if it has this shape.
    pub(super) fn on_device(
        &self,
        what: &'static str,
        shape: Shape,
        device: u32,
    ) -> Result<&'a DeviceRange, Error> {
        match *self {
            TensorMut::Device { range, dtype } => {
                shape.check_range(what, (range, dtype), device).map(|()| range)
            }
            TensorMut::Host { .. } => Err(wrong_place(what, Side::Device)),
        }
    }
}

impl<'a, E: Element> From<&'a mut [E]> for TensorMut<'a> {
    fn from(rows: &'a mut [E]) -> Self {
        TensorMut::Host { bytes: bytemuck::cast_slice_mut(rows), dtype: E::DTYPE }
    }
}

impl<'a, E: Element> From<&'a mut Vec<E>> for TensorMut<'a> {
    fn from(rows: &'a mut Vec<E>) -> Self {
        rows.as_mut_slice().into()
    }
}

impl<'a, E: Element, const N: usize> From<&'a mut [E; N]> for TensorMut<'a> {
    fn from(rows: &'a mut [E; N]) -> Self {
        rows.as_mut_slice().into()
    }
}

/// The experts that a rank's tokens chose, with their weights.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Choices<'a> {
    /// Known to the host.
    Host(&'a Routing<'a>),
    /// In memory that a device reaches; the call reads them when the stream comes to it.
    Device {
        /// Chosen experts, `i32 [tokens, top_k]`; -1 is dropped.
        experts: &'a DeviceRange,
        /// Routing weights, `f32 [tokens, top_k]`.
        weights: &'a DeviceRange,
    },
}

impl<'a> Choices<'a> {
    /// The routing on the host.
    pub(super) fn on_host(self) -> Result<&'a Routing<'a>, Error> {
        match self {
            Choices::Host(routing) => Ok(routing),
            Choices::Device { .. } => Err(wrong_place("routing", Side::Host)),
        }
    }

    /// The ids and weights on a device.
    pub(super) fn on_device(self) -> Result<(&'a DeviceRange, &'a DeviceRange), Error> {
        match self {
            Choices::Device { experts, weights } => Ok((experts, weights)),
            Choices::Host(_) => Err(wrong_place("routing", Side::Device)),
        }
    }
}

impl<'a> From<&'a Routing<'a>> for Choices<'a> {
    fn from(routing: &'a Routing<'a>) -> Self {
        Choices::Host(routing)
    }
}

/// Rows, columns and type that a tensor must have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub rows: u64,
    pub columns: usize,
    pub dtype: Dtype,
}

impl Shape {
    /// Shape of the tokens that a call of this kind brings in a tensor of this type on a device: as
    /// they are sent or, where those are records, as rows that packing makes records of.
    pub fn brought(spec: &Spec, kind: CallKind, tokens: u32, seen: Dtype) -> Self {
        let plain = (spec.hidden, spec.dtype);
        let (columns, dtype) = if seen == spec.dtype { plain } else { spec.sent(kind) };
        Shape { rows: tokens.into(), columns, dtype }
    }

    /// Kernels read and write rows 16 bytes at a time.
    const ALIGN: u64 = 16;

    /// Checks so many bytes of this type.
    pub fn check(&self, what: &'static str, bytes: u64, dtype: Dtype) -> Result<(), Error> {
        let Shape { rows, columns, dtype: expected } = *self;
        if dtype != expected {
            return Err(PlanError::WrongDtype { what, seen: dtype, expected }.into());
        }
        let row_bytes = (columns * expected.size()) as u64;
        if rows.checked_mul(row_bytes) != Some(bytes) {
            let (seen, rows) = (bytes as usize / expected.size(), rows as usize);
            return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
        }
        Ok(())
    }

    /// Checks memory, its alignment and this device's reach among the rest.
    fn check_range(
        &self,
        what: &'static str,
        (range, dtype): (&DeviceRange, Dtype),
        device: u32,
    ) -> Result<(), Error> {
        self.check(what, range.len(), dtype)?;
        range.check_reach(device)?;
        let element = self.dtype.size() as u64;
        // Kernels read and write numbers of rows one at a time.
        let align = if self.columns == 1 { element } else { Self::ALIGN };
        let value = range.address();
        if !value.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what, value, align }.into());
        }
        Ok(())
    }
}

/// Choices of so many tokens on a device, checked against each other and against the settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen<'a> {
    pub tokens: u32,
    pub experts: &'a DeviceRange,
    pub weights: &'a DeviceRange,
}

impl<'a> Chosen<'a> {
    /// There are as many tokens as have choices.
    pub fn check(spec: &Spec, device: u32, choices: Choices<'a>) -> Result<Self, Error> {
        let (experts, weights) = choices.on_device()?;
        let row = u64::from(spec.top_k) * 4;
        let rows = experts.len() / row;
        for (what, range) in [("routing", experts), ("routing weights", weights)] {
            range.check_reach(device)?;
            if range.len() != rows * row {
                let (seen, rows, columns) = (range.len() as usize / 4, rows as usize, spec.top_k as usize);
                return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
            }
            if !range.address().is_multiple_of(4) {
                return Err(DeviceError::Misaligned { what, value: range.address(), align: 4 }.into());
            }
        }
        let tokens = u32::try_from(rows).unwrap_or(u32::MAX);
        if tokens > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens, max: spec.max_tokens }.into());
        }
        Ok(Chosen { tokens, experts, weights })
    }
}

/// Tensors of a dispatch on a device, checked likewise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens<'a> {
    pub count: u32,
    pub x: &'a DeviceRange,
    /// Their type: bytes, if they are records.
    pub dtype: Dtype,
    pub experts: &'a DeviceRange,
    pub weights: &'a DeviceRange,
}

impl<'a> Tokens<'a> {
    /// There are as many tokens as have choices.
    pub fn check(spec: &Spec, device: u32, x: Tensor<'a>, choices: Choices<'a>) -> Result<Self, Error> {
        let Chosen { tokens: count, experts, weights } = Chosen::check(spec, device, choices)?;
        let dtype = x.dtype();
        let shape = Shape::brought(spec, CallKind::Dispatch, count, dtype);
        Ok(Tokens { count, x: x.on_device("tokens", shape, device)?, dtype, experts, weights })
    }

    /// Their choices.
    pub fn chosen(&self) -> Chosen<'a> {
        Chosen { tokens: self.count, experts: self.experts, weights: self.weights }
    }
}

fn numbers_of(what: &'static str, seen: Dtype) -> Result<(), PlanError> {
    let expected = Dtype::F32;
    if seen == expected { Ok(()) } else { Err(PlanError::WrongDtype { what, seen, expected }) }
}

fn misaligned(bytes: &[u8]) -> MemoryError {
    MemoryError::Misaligned { address: bytes.as_ptr() as usize, align: align_of::<f32>() }
}

/// Which of the two places is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Host,
    Device,
}

/// The refusal of a tensor, a handle or a question that belongs to the other place than `expected`.
pub(super) fn wrong_place(what: &'static str, expected: Side) -> Error {
    let (host, device) = ("the host", "a device");
    let (seen, expected) = match expected {
        Side::Host => (device, host),
        Side::Device => (host, device),
    };
    PlanError::WrongPlace { what, seen, expected }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_an_empty_tensor_need_no_aligned_address() {
        let (mut all, dtype) = ([0_u8; 8], Dtype::F32);
        let at = all.as_ptr().align_offset(4) + 1;
        let tensor = |len: usize| Tensor::Host { bytes: &all[at..at + len], dtype };
        assert_eq!(tensor(0).numbers("weights").unwrap(), [0.0; 0]);
        assert!(matches!(
            tensor(4).numbers("weights"),
            Err(Error::Memory(MemoryError::Misaligned { align: 4, .. }))
        ));
        let empty = TensorMut::Host { bytes: &mut all[at..at], dtype };
        assert_eq!(empty.numbers("weights").unwrap(), [0.0; 0]);
    }
}
