//! Sidelane from C: the library's public face behind a border that nothing crosses unseen.
//!
//! ```text
//!   C program                    | border (room `ffi`)                        | Rust
//!   sidelane_ep_t *  a ticket  --+--> forked? -> table: kind, generation --------> Arc of the object
//!   options, tensors  pointers --+--> null? size? alignment? shape? --> slices --> the same calls as from Rust
//!   status, message           <--+--- error or panic: a number and a sentence <--- Result
//! ```
//!
//! **Unsafe code lives in the module `ffi` alone**, and that module is in this package rather than
//! in the library. So a Rust program neither builds it nor exports its symbols, and C can do
//! exactly what the library's public API can do.
//!
//! **A handle is a ticket and no address.** It names a place in a table, the place's generation and
//! the kind of object. So every call detects a handle that was closed, is of another kind or was
//! never given, and names the error. An object lives as long as something made from it needs it:
//! handles may be closed in any order.
//!
//! **Bad input of a collective call is refused on all ranks**, as in Rust: a rank whose arguments
//! the FFI boundary refuses still enters the call, so that the others get an error and do not wait
//! (`refuse`).

mod fault;
mod ffi;
mod handles;
mod message;
mod process;
mod refuse;
mod status;
mod words;

pub use ffi::*;
pub use status::Status;
pub use words::*;
