//! What protocols are made of. `tests/atomics` has loom's in place of these.

pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
pub use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
