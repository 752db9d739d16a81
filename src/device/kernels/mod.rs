//! Our kernels: the arithmetic and the gathering around transfers, which copy engines cannot do.
//!
//! ```text
//!   x, choices --pack--> a slot for each rank ==copy engines==> received slots --check, experts--> partial rows
//!                            places                                                                     ||
//!                               `------------------------> sum <-- homes <==copy engines=================
//! ```
//!
//! They are compute, not communication: optional, listed where used, and with the same output bits
//! as the loops of the module `rows`. The sources in `cuda/` are also built for the CPU, where
//! tests check that; docs/kernels.md has the rounding points.
//!
//! **Status words.** A kernel writes an error that it finds into a word that the caller names
//! ([`KernelFault`]); the first fault stays. A sum whose word is set writes zeros: a result of
//! invalid rows never looks valid.

mod addresses;
mod check;
mod choices;
mod counts;
mod expand;
mod gradients;
mod operands;
mod order;
mod pack;
mod records;
mod regroup;
mod sum;
mod sum_choices;
mod sums;

use std::ffi::CStr;
use std::sync::Arc;

pub use addresses::Addresses;
pub use check::Check;
pub use choices::ChoiceArgs;
pub use counts::CountArgs;
pub use expand::{Admit, Expand, Tally};
pub use gradients::{DotScale, FetchWeights};
pub use order::SortArgs;
pub use pack::Pack;
pub use records::RecordArgs;
pub use regroup::PermuteArgs;
pub use sum::SumArgs;
pub use sum_choices::SumChoices;

use super::context::Context;
use super::module::{Function, Module};
use crate::error::DeviceError;
#[cfg(doc)]
use crate::error::KernelFault;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/kernels.ptx"), "\0");

/// Threads of a block: `THREADS` in `cuda/shim.h`.
const THREADS: u32 = 256;

/// The kernels, loaded for one device.
#[derive(Clone, Debug)]
pub struct Kernels {
    order: Function,
    pack: Function,
    check: Function,
    choices: Function,
    pack_fp8: Function,
    sums: sum::Functions,
    sums_of_choices: sum_choices::Functions,
    records: records::Functions,
    regroup: Function,
    counts: Function,
    gradients: gradients::Functions,
    expansion: expand::Functions,
}

impl Kernels {
    /// Has the driver compile them. It needs a driver for CUDA 12.5 or later, and a device of
    /// compute capability 8.0 or later.
    ///
    /// # Errors
    /// [`DeviceError::Module`], [`DeviceError::NoFunction`], [`DeviceError::TooOld`],
    /// [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = Module::load(context, "sidelane", text)?;
        Ok(Kernels {
            order: module.function(c"order")?,
            pack: module.function(c"pack")?,
            check: module.function(c"check")?,
            choices: module.function(c"choices")?,
            pack_fp8: module.function(c"pack_fp8")?,
            sums: sum::Functions::of(&module)?,
            sums_of_choices: sum_choices::Functions::of(&module)?,
            records: records::Functions::of(&module)?,
            regroup: module.function(c"regroup")?,
            counts: module.function(c"counts")?,
            gradients: gradients::Functions::of(&module)?,
            expansion: expand::Functions::of(&module)?,
        })
    }
}
