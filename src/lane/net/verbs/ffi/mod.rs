//! The part of libibverbs' C interface that this library uses: structures, constants, and the calls
//! that C inlines.
//!
//! Only this part is declared, under its C names. The layouts are libibverbs' stable binary
//! interface (version 1.1, unchanged since 2006). Each structure that crosses as a whole has its
//! size asserted here. The package `tests/verbs-abi` compares every size, offset and constant with
//! those that `rdma-sys` reads from the system's headers.
//!
//! Numbers from a NIC are plain integers, never Rust enums, because a newer driver may return new
//! ones.
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
