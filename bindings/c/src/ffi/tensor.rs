//! Tensors and routings of the caller. These structs never change: they have no size field.
//!
//! The layer says where its tensors must lie, and each struct says where it does. Memory of the
//! host becomes a slice; an address of a device is looked up by the driver. A struct that names the
//! other place is refused before its pointer is used.

use std::ffi::c_void;
use std::ops::Range as Addresses;
use std::sync::Arc;

use sidelane::device::{Context, DeviceRange};
use sidelane::ep::{self, Choices, TensorMut};
use sidelane::error::PlanError;
use sidelane::{Dtype, gate};

use super::lent;
use super::memory::{addresses, slice, slice_mut, structure};
use crate::fault::{ArgumentError, Fault};
use crate::words::{self, SIDELANE_DTYPE_F32, SIDELANE_PLACE_DEVICE, SIDELANE_PLACE_HOST};

/// A row-major matrix `[rows, columns]`, its rows without gaps. It is the caller's memory. On the
/// host it is read or written during the call alone, unless a function says otherwise. On a device
/// it stays there, and stays as it is, until the layer's stream has passed the call.
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
    /// Where the elements lie: SIDELANE_PLACE_... On a device they begin at a multiple of 16 bytes.
    pub place: u32,
}

/// The choices of this rank's tokens, two arrays `[tokens, top_k]`. An id of -1 is a dropped
/// choice. The memory is the caller's, like that of a tensor.
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
    /// Where both arrays lie: SIDELANE_PLACE_...
    pub place: u32,
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
pub enum Source<'a> {
    Host { bytes: &'a [u8], dtype: Dtype },
    Device { range: DeviceRange, dtype: Dtype },
}

impl<'a> Source<'a> {
    /// A tensor in memory of the host or, with a context, of its device. Without `rows` it has as
    /// many as it says.
    ///
    /// # Safety
    /// `at` and `data` are null or point to the memory that the struct describes. No one writes
    /// there during `'a`; on a device, until all operations enqueued with the tensor are done.
    pub unsafe fn read(
        context: Option<&Arc<Context>>,
        what: &'static str,
        at: *const Tensor,
        (rows, columns): (Option<u64>, u64),
    ) -> Result<Self, Fault> {
        // SAFETY: as the caller promised.
        let tensor = unsafe { structure(what, at) }?;
        let (dtype, bytes) = tensor.extent(context, what, (rows.unwrap_or(tensor.rows), columns))?;
        // SAFETY: as the caller promised.
        unsafe {
            Ok(match context {
                None => Source::Host { bytes: slice(what, tensor.data.cast::<u8>(), bytes)?, dtype },
                Some(context) => {
                    Source::Device { range: lent::range(context, what, tensor.data.addr(), bytes)?, dtype }
                }
            })
        }
    }

    /// As the library takes it.
    pub fn lend(&self) -> ep::Tensor<'_> {
        match self {
            Source::Host { bytes, dtype } => ep::Tensor::Host { bytes, dtype: *dtype },
            Source::Device { range, dtype } => ep::Tensor::Device { range, dtype: *dtype },
        }
    }

    pub fn addresses(&self) -> Addresses<usize> {
        match self {
            Source::Host { bytes, .. } => addresses(bytes),
            Source::Device { range, .. } => of_device(range),
        }
    }

    pub fn dtype(&self) -> Dtype {
        self.lend().dtype()
    }
}

/// A tensor of the caller's to write.
pub enum Target<'a> {
    Host { bytes: &'a mut [u8], dtype: Dtype },
    Device { range: DeviceRange, dtype: Dtype },
}

impl Target<'_> {
    /// # Safety
    /// As [`Source::read`], and no one else reads it either.
    pub unsafe fn read(
        context: Option<&Arc<Context>>,
        what: &'static str,
        at: *const Tensor,
        (rows, columns): (u64, u64),
    ) -> Result<Self, Fault> {
        // SAFETY: as the caller promised.
        let tensor = unsafe { structure(what, at) }?;
        let (dtype, bytes) = tensor.extent(context, what, (rows, columns))?;
        // SAFETY: as the caller promised.
        unsafe {
            Ok(match context {
                None => Target::Host { bytes: slice_mut(what, tensor.data.cast::<u8>(), bytes)?, dtype },
                Some(context) => {
                    Target::Device { range: lent::range(context, what, tensor.data.addr(), bytes)?, dtype }
                }
            })
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            Target::Host { dtype, .. } | Target::Device { dtype, .. } => *dtype,
        }
    }

    /// As the library takes it.
    pub fn lend(&mut self) -> TensorMut<'_> {
        match self {
            Target::Host { bytes, dtype } => TensorMut::Host { bytes, dtype: *dtype },
            Target::Device { range, dtype } => TensorMut::Device { range, dtype: *dtype },
        }
    }

    pub fn addresses(&self) -> Addresses<usize> {
        match self {
            Target::Host { bytes, .. } => addresses(bytes),
            Target::Device { range, .. } => of_device(range),
        }
    }
}

fn of_device(range: &DeviceRange) -> Addresses<usize> {
    let start = range.address() as usize;
    start..start + range.len() as usize
}

impl Tensor {
    /// So many numbers of 32 bits, on the layer's device or on the host.
    pub fn numbers(data: *const f32, rows: u64, on_device: bool) -> Tensor {
        let place = if on_device { SIDELANE_PLACE_DEVICE } else { SIDELANE_PLACE_HOST };
        let (data, dtype) = (data.cast_mut().cast(), SIDELANE_DTYPE_F32);
        Tensor { data, rows, columns: 1, dtype, place }
    }

    /// Its type, and how many bytes it has, if it lies where the layer's tensors do, is of this
    /// shape and aligned to its elements.
    fn extent(
        &self,
        context: Option<&Arc<Context>>,
        what: &'static str,
        (rows, columns): (u64, u64),
    ) -> Result<(Dtype, u64), Fault> {
        check_place(context, what, self.place)?;
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

/// That something lies where the layer's tensors do.
fn check_place(context: Option<&Arc<Context>>, what: &'static str, seen: u32) -> Result<(), Fault> {
    let (host, device) = ("the host", "a device");
    let all = [(SIDELANE_PLACE_HOST, host), (SIDELANE_PLACE_DEVICE, device)];
    let seen = words::choice("place", seen, &all, "SIDELANE_PLACE_HOST or _DEVICE")?;
    let expected = if context.is_some() { device } else { host };
    if seen == expected { Ok(()) } else { Err(PlanError::WrongPlace { what, seen, expected }.into()) }
}

/// A routing of the caller's.
pub enum Chosen<'a> {
    Host(gate::Routing<'a>),
    Device { experts: DeviceRange, weights: DeviceRange },
}

impl Chosen<'_> {
    /// As the library takes it.
    pub fn lend(&self) -> Choices<'_> {
        match self {
            Chosen::Host(routing) => Choices::Host(routing),
            Chosen::Device { experts, weights } => Choices::Device { experts, weights },
        }
    }
}

impl Routing {
    /// A routing with so many choices per token, and the number of its tokens.
    ///
    /// # Safety
    /// As [`Source::read`], of the struct and of both its arrays.
    pub(super) unsafe fn read<'a>(
        context: Option<&Arc<Context>>,
        at: *const Routing,
        top_k: u64,
    ) -> Result<(Chosen<'a>, u64), Fault> {
        let what = "routing";
        // SAFETY: as the caller promised.
        let routing = unsafe { structure(what, at) }?;
        check_place(context, what, routing.place)?;
        let (rows, columns) = (routing.tokens, u64::from(routing.top_k));
        if columns != top_k {
            let (expected_rows, expected_columns) = (rows, top_k);
            return Err(ArgumentError::Shape { what, rows, columns, expected_rows, expected_columns }.into());
        }
        let len = rows.checked_mul(columns).filter(|len| u32::try_from(rows).is_ok() && *len <= u64::MAX / 4);
        let len = len.ok_or(ArgumentError::TooLarge { what, rows, columns })?;
        let (ids, weights) = ("routing.experts", "routing.weights");
        // SAFETY: as the caller promised.
        let chosen = unsafe {
            match context {
                None => Chosen::Host(gate::Routing::new(
                    routing.top_k,
                    slice(ids, routing.experts, len)?,
                    slice(weights, routing.weights, len)?,
                )?),
                Some(context) => Chosen::Device {
                    experts: lent::range(context, ids, routing.experts.addr(), 4 * len)?,
                    weights: lent::range(context, weights, routing.weights.addr(), 4 * len)?,
                },
            }
        };
        Ok((chosen, rows))
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
            let (what, expected) = ("expert_map.experts", "at most as many as are held: some have no rank");
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
