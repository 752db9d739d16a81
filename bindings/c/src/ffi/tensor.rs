//! Tensors and routings of the caller's. These structs are what they are for good: they have no size field.

use std::ffi::c_void;

use sidelane::error::PlanError;
use sidelane::{Dtype, Element};

use super::memory::{slice, slice_mut, structure};
use crate::fault::{ArgumentError, Fault};
use crate::words;

/// A row-major matrix `[rows, columns]`, its rows without gaps. It is the caller's memory: read or written during the call
/// alone, unless a function says otherwise.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// The first element. May be NULL if there is none.
    pub data: *mut c_void,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Type of an element: SIDELANE_DTYPE_...
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// The choices of this rank's tokens, two arrays `[tokens, top_k]`. An id of -1 is a dropped choice.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    /// Expert ids.
    pub experts: *const i32,
    /// Weights.
    pub weights: *const f32,
    /// Tokens.
    pub tokens: u64,
    /// Choices per token.
    pub top_k: u32,
    /// 0.
    pub reserved: u32,
}

/// Which rank holds which expert, if not in contiguous blocks. An expert may have several replicas.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExpertMap {
    /// How many experts each rank holds, `[ranks]`.
    pub held: *const u32,
    /// Which, in the order of their local slots, those of rank 0 first: `[sum of held]`.
    pub experts_held: *const u32,
    /// Ranks.
    pub ranks: u32,
    /// Experts.
    pub experts: u32,
}

/// A tensor of the caller's to read.
pub struct Source<'a> {
    pub dtype: Dtype,
    bytes: &'a [u8],
}

impl<'a> Source<'a> {
    /// # Safety
    /// `at` and `data` are null or point to what the struct says, which nobody writes during `'a`.
    pub unsafe fn read(
        what: &'static str,
        at: *const Tensor,
        rows: u64,
        columns: u64,
    ) -> Result<Self, Fault> {
        // SAFETY: as the caller promised.
        let tensor = unsafe { structure(what, at) }?;
        let (dtype, bytes) = tensor.extent(what, rows, columns)?;
        // SAFETY: as the caller promised.
        let bytes = unsafe { slice(what, tensor.data.cast::<u8>(), bytes) }?;
        Ok(Source { dtype, bytes })
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its elements: of that type and aligned, if there are any.
    pub fn elements<E: Element>(&self) -> &'a [E] {
        if self.bytes.is_empty() { &[] } else { bytemuck::cast_slice(self.bytes) }
    }
}

/// A tensor of the caller's to write.
pub struct Target<'a> {
    pub dtype: Dtype,
    bytes: &'a mut [u8],
}

impl<'a> Target<'a> {
    /// # Safety
    /// As [`Source::read`], and nobody else reads it either.
    pub unsafe fn read(
        what: &'static str,
        at: *const Tensor,
        rows: u64,
        columns: u64,
    ) -> Result<Self, Fault> {
        // SAFETY: as the caller promised.
        let tensor = unsafe { structure(what, at) }?;
        let (dtype, bytes) = tensor.extent(what, rows, columns)?;
        // SAFETY: as the caller promised.
        let bytes = unsafe { slice_mut(what, tensor.data.cast::<u8>(), bytes) }?;
        Ok(Target { dtype, bytes })
    }

    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// As [`Source::elements`].
    pub fn elements<E: Element>(&mut self) -> &mut [E] {
        if self.bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(self.bytes) }
    }

    /// Copies what was made into it, if it is of that type.
    pub fn fill(&mut self, what: &'static str, made: Dtype, bytes: &[u8]) -> Result<(), Fault> {
        if self.dtype != made {
            return Err(PlanError::WrongDtype { what, seen: self.dtype, expected: made }.into());
        }
        self.bytes.copy_from_slice(bytes);
        Ok(())
    }
}

impl Tensor {
    /// Its type, and how many bytes it has, if it is of this shape and aligned to its elements.
    pub(super) fn extent(&self, what: &'static str, rows: u64, columns: u64) -> Result<(Dtype, u64), Fault> {
        reserved("reserved field of a tensor", self.reserved)?;
        let dtype = words::dtype(self.dtype)?;
        if (self.rows, self.columns) != (rows, columns) {
            let (expected_rows, expected_columns) = (rows, columns);
            let (rows, columns) = (self.rows, self.columns);
            return Err(ArgumentError::Shape { what, rows, columns, expected_rows, expected_columns }.into());
        }
        let (address, align) = (self.data.addr(), dtype.size());
        if !address.is_multiple_of(align) {
            return Err(ArgumentError::Misaligned { what, address, align }.into());
        }
        let bytes = rows.checked_mul(columns).and_then(|elements| elements.checked_mul(align as u64));
        Ok((dtype, bytes.ok_or(ArgumentError::TooLarge { what, rows, columns })?))
    }
}

impl Routing {
    /// # Safety
    /// `at` and its arrays are null or point to what the struct says, which nobody writes during `'a`.
    pub(super) unsafe fn read<'a>(at: *const Routing) -> Result<sidelane::gate::Routing<'a>, Fault> {
        // SAFETY: as the caller promised.
        let routing = unsafe { structure("routing", at) }?;
        reserved("reserved field of a routing", routing.reserved)?;
        let (rows, columns) = (routing.tokens, u64::from(routing.top_k));
        let what = "routing";
        if u32::try_from(rows).is_err() {
            return Err(ArgumentError::TooLarge { what, rows, columns }.into());
        }
        let len = rows.checked_mul(columns).ok_or(ArgumentError::TooLarge { what, rows, columns })?;
        // SAFETY: as the caller promised.
        let (experts, weights) = unsafe {
            (slice("routing.experts", routing.experts, len)?, slice("routing.weights", routing.weights, len)?)
        };
        Ok(sidelane::gate::Routing::new(routing.top_k, experts, weights)?)
    }
}

impl ExpertMap {
    /// # Safety
    /// As [`Routing::read`]; null is no map.
    pub(super) unsafe fn read(at: *const ExpertMap) -> Result<Option<sidelane::plan::ExpertMap>, Fault> {
        if at.is_null() {
            return Ok(None);
        }
        // SAFETY: as the caller promised.
        let map = unsafe { structure("expert map", at) }?;
        // SAFETY: as the caller promised.
        let held = unsafe { slice("expert_map.held", map.held, map.ranks.into()) }?;
        let slots: u64 = held.iter().map(|&held| u64::from(held)).sum();
        if u64::from(map.experts) > slots {
            let (what, expected) = ("expert_map.experts", "at most as many as are held: nobody holds some");
            return Err(ArgumentError::Value { what, seen: map.experts.into(), expected }.into());
        }
        // SAFETY: as the caller promised.
        let mut rest = unsafe { slice("expert_map.experts_held", map.experts_held, slots) }?;
        let mut lists = Vec::new();
        for &held in held {
            let (list, behind) = rest.split_at(held as usize);
            lists.push(list.to_vec());
            rest = behind;
        }
        Ok(Some(sidelane::plan::ExpertMap::from_slots(map.experts, &lists)?))
    }
}

/// That what has no meaning yet is 0: it may have one in a later version.
pub fn reserved(what: &'static str, seen: u32) -> Result<(), ArgumentError> {
    let expected = "0: it has no meaning yet";
    if seen == 0 { Ok(()) } else { Err(ArgumentError::Value { what, seen: seen.into(), expected }) }
}

/// Does the same for whichever type the elements are of.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            sidelane::Dtype::F32 => {
                type $element = f32;
                $body
            }
            sidelane::Dtype::Bf16 => {
                type $element = half::bf16;
                $body
            }
            sidelane::Dtype::F16 => {
                type $element = half::f16;
                $body
            }
            sidelane::Dtype::Bytes => {
                type $element = u8;
                $body
            }
        }
    };
}
pub(super) use with_element;
