//! Sidelane's declarations of libibverbs against those of the system: every size, offset and
//! constant.
//!
//! ```text
//!   ffi (the library's own source)  --+
//!   rdma-sys (bindgen of the headers) +--> table: what, ours, theirs
//!                                     |
//!   the headers, by the C compiler  --+    a _Static_assert per row
//! ```
//!
//! Both, because `rdma-sys` wrote structures with unions (completions, work requests, addresses) by
//! hand, and has no anonymous enums. Needs `libibverbs-dev`, `librdmacm-dev`, `libclang` (14 works,
//! 18 does not) and `cc`:
//!
//! ```sh
//! cargo test -p verbs-abi
//! ```

#[cfg(test)]
#[allow(dead_code, reason = "declarations are compared, not used")]
#[path = "../../../src/lane/net/verbs/ffi.rs"]
mod ffi;
#[cfg(test)]
mod table;
#[cfg(test)]
mod tests;
