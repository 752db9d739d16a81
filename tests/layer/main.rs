//! The MoE layer and the overlap graphs that it runs on.

#[path = "../device/apart.rs"]
mod apart;
#[path = "../device/devices.rs"]
mod devices;
mod faults;
mod overlap;
mod pipeline;
#[path = "../support/mod.rs"]
mod support;
