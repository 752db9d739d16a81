//! One-sided windows, emulated links, row collectives, and the communicator.

mod communicator;
mod emulated_links;
mod rows;
#[path = "../support/mod.rs"]
mod support;
mod windows;

use sidelane::Options;
use sidelane::config::Config;

/// Options for worlds whose windows take megabytes.
fn roomy() -> Options {
    let config = Config::default().with_heap(16 << 20).with_symmetric(4 << 20);
    Options::default().with_config(config)
}
