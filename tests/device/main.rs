//! The device module, kernels, and instances on a device, against a fake CUDA driver.

mod apart;
mod devices;
mod driver;
mod enqueued;
mod kernels;
mod places;
#[path = "../rows/common.rs"]
mod rows_common;
mod slots;
#[path = "../support/mod.rs"]
mod support;
