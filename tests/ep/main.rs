//! Dispatch and combine on the host, against plain references.

mod backward;
mod differences;
mod exchange;
mod floor;
mod groups;
mod halves;
mod handles;
mod layouts;
mod modes;
mod nodes;
mod prepare;
mod rebuilt;
mod records;
mod refusals;
mod remap;
mod simd;
mod spans;
mod strategy;
#[path = "../support/mod.rs"]
mod support;
mod traffic;
