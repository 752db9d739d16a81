//! Sidelane's declarations of CUPTI against NVIDIA's: every offset, number and function, in several
//! versions.
//!
//! ```text
//!   ffi (the library's own source) --> what, ours --+
//!                                                   +--> a _Static_assert per row and version, by the C compiler
//!   wheels of PyPI in target/ --> headers ----------+
//!                            '--> libcupti.so --> all functions are found
//! ```
//!
//! Needs the network, `python3` with `venv`, and `cc`; no GPU and no toolkit:
//!
//! ```sh
//! cargo test -p cupti-abi
//! ```

#[cfg(test)]
#[allow(dead_code, reason = "declarations are compared, not used")]
#[path = "../../../src/device/audit/cupti/ffi.rs"]
mod ffi;
#[cfg(test)]
mod releases;
#[cfg(test)]
mod tests;
