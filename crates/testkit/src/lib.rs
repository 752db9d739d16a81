//! The conformance suite of [`ExpertParallel`](sidelane::ExpertParallel), and what measurements and
//! checks hold calls against: the naive [`reference`](sidelane_verify::reference).
//!
//! ```text
//!   suite: Case (data) x Way --Run--> Player: builds, calls, compares --> Outcome, or the first Difference
//!                                       |
//!                        Place: tensors of the host, or of a device
//! ```
//!
//! A crate of its own, which the library does not know: the program runs the suite between
//! processes and on a GPU, and holds its measurements against the same reference. Its checks of a
//! [`device`] run on whatever driver is loaded: those of `gpu-check` on a GPU are those of the
//! tests on the fake driver. What is timed is here where the program and the benches time the same:
//! [`planning`], and rounds of ranks ([`stats`]).

pub mod case;
pub mod cells;
pub mod chain;
pub mod device;
pub mod difference;
mod error;
pub mod exchange;
pub mod expected;
pub mod machines;
pub mod place;
pub mod planning;
pub mod player;
pub mod run;
pub mod settings;
pub mod stats;
pub mod suite;
pub mod values;
pub mod worlds;

pub use error::TestError;
