//! Bootstrap: rendezvous, heartbeats, rebuild, and exchange of descriptors.

mod common;
mod fds;
mod rebuild;
mod tcp;
mod threads;
