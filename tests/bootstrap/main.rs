//! Bootstrap: rendezvous, heartbeats, rebuild, and exchange of descriptors.

mod common;
mod cuts;
mod fds;
mod grow;
#[allow(dead_code, reason = "each test program uses a part of this")]
#[path = "../support/network.rs"]
mod network;
#[allow(dead_code, reason = "each test program uses a part of this")]
#[path = "../support/processes.rs"]
mod processes;
mod rebuild;
mod survivors;
mod tcp;
mod threads;
