//! Worlds whose ranks are threads of this process.

use sidelane::World;

use crate::TestError;

/// Runs the body on every rank of a world. Results in order of rank.
pub fn on_ranks<T: Send, E: From<TestError> + Send>(
    worlds: &[World],
    body: impl Fn(&World) -> Result<T, E> + Sync,
) -> Vec<Result<T, E>> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|_| Err(TestError::Panicked.into())))
            .collect()
    })
}
