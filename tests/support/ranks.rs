//! Worlds of threads.

use std::sync::mpsc;
use std::time::Duration;

use sidelane::config::Config;
use sidelane::error::Cause;
use sidelane::{Options, World};

pub use super::cases::random_seed;

/// Options for worlds that are many and hold a few rows.
pub fn tiny() -> Options {
    let config = Config::default().with_heap(640 << 10).with_symmetric(256 << 10);
    Options::default().with_config(config)
}

/// Runs `body` on every rank of a world of threads; rank r is on node `nodes[r]`. Results in order
/// of rank.
pub fn on_ranks<T: Send>(nodes: &[u32], options: &Options, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    on_threads(nodes, options, &body)
}

/// The same, compiled once for each result and not for each of a program's bodies.
fn on_threads<T: Send>(nodes: &[u32], options: &Options, body: &(dyn Fn(World) -> T + Sync)) -> Vec<T> {
    let worlds = World::threads_with(nodes, options).expect("a world of threads");
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Waits until the world has failed: its cause. It takes no core from ranks that have a deadline to
/// meet.
#[allow(dead_code, reason = "not all tests end their world")]
pub fn failed(world: &World) -> Cause {
    let (tell, told) = mpsc::channel();
    world.health().on_failure(move |cause| drop(tell.send(cause.clone())));
    told.recv_timeout(Duration::from_secs(120)).expect("the world ends")
}
