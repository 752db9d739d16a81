//! Once shapes are known, no call allocates.

#[path = "../device/apart.rs"]
mod apart;
mod counting;
mod counts;
mod device;
mod device_rounds;
#[path = "../device/devices.rs"]
mod devices;
mod host;
mod host_rounds;
#[path = "../support/placer.rs"]
mod placer;
#[path = "../support/mod.rs"]
mod support;
