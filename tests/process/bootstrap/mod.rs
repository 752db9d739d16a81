//! Bootstrap: rendezvous, heartbeats, rebuild, and exchange of descriptors.

mod common;
mod cuts;
mod fds;
mod grow;
mod rebuild;
mod survivors;
mod tcp;
mod threads;
