//! Once shapes are known, no call allocates.

#[path = "../device/apart.rs"]
mod apart;
mod counting;
mod device;
#[path = "../device/devices.rs"]
mod devices;
mod host;
#[path = "../support/placer.rs"]
mod placer;
#[path = "../support/mod.rs"]
mod support;
