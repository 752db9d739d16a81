//! The MoE layer and the overlap graphs that it runs on.

#[path = "../device/apart.rs"]
mod apart;
mod overlap;
mod pipeline;
#[path = "../support/mod.rs"]
mod support;
