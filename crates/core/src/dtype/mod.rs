//! Element types of the rows that move.
//!
//! Moving rows needs only their width; summing rows (combine) needs their meaning. All sums are
//! taken in `f32` from +0 and rounded once, to nearest even, when the result is stored. Partial
//! sums between nodes travel in a type of their own, the [`PartialDtype`].

mod record;
mod wire;

pub use record::Fp8RowShape;
pub use wire::{PARTIAL, PartialDtype, rows_of};

use half::{bf16, f16};

/// The type of one element of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Bytes without arithmetic (fp8 with its scales, for example, as [`Fp8RowShape`] lays them
    /// out): dispatch moves them, and combine refuses them.
    Bytes,
}

impl Dtype {
    /// Width of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::Bytes => 1,
        }
    }

    /// The name used on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::Bytes => "bytes",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type whose slices can be handed over as rows.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The row type it stands for.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl Element for u8 {
    const DTYPE: Dtype = Dtype::Bytes;
}
