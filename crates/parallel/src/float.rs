//! Element types of the rows that travel between ranks. Sums and weights are `f32` for both.

use std::borrow::Cow;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use sidelane::Element;

/// An element type of activations and their gradients: `f32`, or `half::bf16`.
///
/// A value of `f32` is rounded to nearest even where it becomes an element. `f32` rounds nothing.
pub trait Float: Element + private::Convert {}

impl Float for f32 {}
impl Float for bf16 {}

pub(crate) mod private {
    use super::{Cow, HalfFloatSliceExt, bf16};

    /// Between elements and the `f32` of arithmetic.
    pub trait Convert: Sized {
        /// Elements as `f32`, exactly.
        fn widened(of: &[Self]) -> Cow<'_, [f32]>;

        /// `f32` as elements, each rounded once.
        fn rounded(of: Vec<f32>) -> Vec<Self>;

        /// Factors of a product in `f32`, each rounded to an element.
        fn factors(of: &[f32]) -> Cow<'_, [f32]>;

        /// Changes elements in `f32`, and rounds each once.
        fn in_f32(elements: &mut [Self], change: impl FnOnce(&mut [f32]));
    }

    impl Convert for f32 {
        fn widened(of: &[f32]) -> Cow<'_, [f32]> {
            Cow::Borrowed(of)
        }

        fn rounded(of: Vec<f32>) -> Vec<f32> {
            of
        }

        fn factors(of: &[f32]) -> Cow<'_, [f32]> {
            Cow::Borrowed(of)
        }

        fn in_f32(elements: &mut [f32], change: impl FnOnce(&mut [f32])) {
            change(elements);
        }
    }

    impl Convert for bf16 {
        fn widened(of: &[bf16]) -> Cow<'_, [f32]> {
            Cow::Owned(of.to_f32_vec())
        }

        fn rounded(of: Vec<f32>) -> Vec<bf16> {
            let mut elements = vec![bf16::ZERO; of.len()];
            elements.convert_from_f32_slice(&of);
            elements
        }

        fn factors(of: &[f32]) -> Cow<'_, [f32]> {
            Cow::Owned(of.iter().map(|&value| bf16::from_f32(value).to_f32()).collect())
        }

        fn in_f32(elements: &mut [bf16], change: impl FnOnce(&mut [f32])) {
            let mut values = elements.to_f32_vec();
            change(&mut values);
            elements.convert_from_f32_slice(&values);
        }
    }
}
