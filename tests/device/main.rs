//! The device module, kernels, and exchanges on streams, against a fake CUDA driver.

mod apart;
mod driver;
mod kernels;
mod planned;
#[path = "../rows/common/mod.rs"]
mod rows_common;
mod stream;
#[path = "../support/mod.rs"]
mod support;
