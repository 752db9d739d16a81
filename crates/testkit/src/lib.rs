//! The conformance suite of [`ExpertParallel`](sidelane::ExpertParallel), and what measurements and
//! checks hold calls against: the naive [`reference`](sidelane_verify::reference).
//!
//! A crate of its own, which the library does not know: the program runs the suite between
//! processes and on a GPU, and holds its measurements against the same reference. Its checks of a
//! [`device`] run on the driver that is loaded: those of `gpu-check` on a GPU are those of the
//! tests on the fake driver. [`timing`] is what the program and the benches time alike.

pub mod conformance;
pub mod device;
pub mod difference;
pub mod ep_settings;
mod error;
pub mod expected;
pub mod machines;
pub mod timing;
pub mod values;
pub mod worlds;

pub use error::TestError;
