//! A fake `libcuda.so`, for tests of CUDA host code on machines without a GPU. README.md lists its
//! guarantees.
//!
//! ```text
//! abi        the driver's functions, by name                       host code calls these
//! stream     entries of a stream; capture, graph, event             written down or enqueued
//! queue      a thread per hardware queue: streams are folded on it  takes entries strictly in order
//! late       copies and fills: as late, and in as many pieces, as the rules allow
//! queues     which queues a stream has; lock, which calls of other threads wait; cause, what ends a wait
//! memory     memfds, addresses, who reaches what                    every byte of every copy is checked
//! kernels    PTX entries, run by a library built for the CPU
//! activity   what ran, for clients of CUPTI, whose functions are here too
//! product    matrix products, for clients of cuBLAS, whose functions are here too
//! ```
//!
//! Host code loads the shared library of this package. The Rust library next to it is for tests: it
//! puts the shared library where loaders look ([`install`]), builds kernels for it ([`kernels`])
//! and reads its counters ([`FakeDriver`]).

mod abi;
mod activity;
mod build;
mod capture;
mod cause;
mod code;
mod counters;
mod driver;
mod event;
mod graph;
mod host_call;
mod install;
mod kernels;
mod late;
mod lock;
mod memory;
mod memory_operation;
mod product;
mod ptx;
mod queue;
mod queues;
mod random;
mod settings;
mod stream;
mod table;
mod work;

pub use build::{all_kernels, kernels};
pub use counters::Counters;
pub use install::{FakeDriver, install};
