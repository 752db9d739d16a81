//! What this library uses of libibverbs' C interface: structures, constants, and the calls that C
//! inlines.
//!
//! Only what is used is declared, under its C name. The layouts are libibverbs' stable binary
//! interface (version 1.1, unchanged since 2006); each structure that crosses as a whole has its
//! size asserted here, and the package `tests/verbs-abi` compares every size, offset and constant
//! with what `rdma-sys` reads from the system's headers.
//!
//! Numbers that a card answers are plain integers, never Rust enums: a newer driver may say
//! something new.
//!
//! ```text
//!   ibv_device -> ibv_context --+-- ibv_pd --+-- ibv_mr
//!                  | .ops       |            +-- ibv_qp  <-- ibv_send_wr, ibv_recv_wr -> ibv_sge
//!                  |            +-- ibv_cq --> ibv_wc
//!                  +-- poll_cq, req_notify_cq, post_send, post_recv: the driver's own, no symbol of the library
//! ```

#![allow(non_camel_case_types, reason = "the names of C, so that its manual pages apply")]

mod completion;
mod device;
mod memory;
mod queue_pair;
mod work;

pub use completion::*;
pub use device::*;
pub use memory::*;
pub use queue_pair::*;
pub use work::*;
