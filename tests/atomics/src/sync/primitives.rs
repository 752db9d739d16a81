//! What protocols are made of: loom's atomics. A mutation may weaken the order of an access.

use std::ops::Deref;
use std::panic::Location;

use loom::sync::atomic;
pub use loom::sync::atomic::Ordering;
pub use loom::sync::{Mutex, MutexGuard};
pub use std::sync::PoisonError;

use crate::mutation::{fence_order, order};

/// A fence, unless a mutation removes it.
#[track_caller]
pub fn fence(given: Ordering) {
    if let Some(order) = fence_order(given, Location::caller()) {
        atomic::fence(order);
    }
}

/// A full fence as a machine has it, which is given to [`FlagWords::raise`].
///
/// [`FlagWords::raise`]: super::flag::FlagWords::raise
pub fn full_fence() {
    fence(Ordering::SeqCst);
}

macro_rules! number {
    ($name:ident, $value:ty) => {
        #[doc = concat!("loom's `", stringify!($name), "`.")]
        #[derive(Debug, Default)]
        pub struct $name(atomic::$name);

        impl $name {
            /// With a first value.
            pub fn new(value: $value) -> Self {
                $name(atomic::$name::new(value))
            }

            /// As std's.
            #[track_caller]
            pub fn load(&self, given: Ordering) -> $value {
                self.0.load(order(given, Location::caller()))
            }

            /// As std's.
            #[track_caller]
            pub fn store(&self, value: $value, given: Ordering) {
                self.0.store(value, order(given, Location::caller()));
            }

            /// As std's.
            #[track_caller]
            pub fn swap(&self, value: $value, given: Ordering) -> $value {
                self.0.swap(value, order(given, Location::caller()))
            }
        }
    };
}

number!(AtomicBool, bool);
number!(AtomicU32, u32);
number!(AtomicU64, u64);

impl AtomicU32 {
    /// As std's.
    #[track_caller]
    pub fn fetch_add(&self, value: u32, given: Ordering) -> u32 {
        self.0.fetch_add(value, order(given, Location::caller()))
    }

    /// As std's.
    #[track_caller]
    pub fn fetch_sub(&self, value: u32, given: Ordering) -> u32 {
        self.0.fetch_sub(value, order(given, Location::caller()))
    }
}

impl AtomicU64 {
    /// As std's.
    #[track_caller]
    pub fn fetch_add(&self, value: u64, given: Ordering) -> u64 {
        self.0.fetch_add(value, order(given, Location::caller()))
    }

    /// As std's.
    #[track_caller]
    pub fn fetch_or(&self, value: u64, given: Ordering) -> u64 {
        self.0.fetch_or(value, order(given, Location::caller()))
    }

    /// As std's. A mutation is of the order of success.
    ///
    /// # Errors
    /// The value, if it is another one.
    #[track_caller]
    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        given: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, order(given, Location::caller()), failure)
    }
}

/// std's `OnceLock`, which loom lacks.
#[derive(Debug)]
pub struct OnceLock<T> {
    /// Whether there is a value; the lock of those that set it.
    is_set: atomic::AtomicBool,
    setting: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    /// Without a value.
    pub fn new() -> Self {
        let (is_set, setting) = (atomic::AtomicBool::new(false), Mutex::new(()));
        OnceLock { is_set, setting, value: std::sync::OnceLock::new() }
    }

    /// The value, if this thread sees one.
    pub fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    /// Sets the value, or returns this one if there is another. Then the caller sees that.
    ///
    /// # Errors
    /// The value.
    pub fn set(&self, value: T) -> Result<(), T> {
        let _setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        let set = self.value.set(value);
        self.is_set.store(true, Ordering::Release);
        set
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        OnceLock::new()
    }
}

/// std's `Arc`, with a count of its own: that of loom's shows every thread the latest value.
#[derive(Debug)]
pub struct Arc<T> {
    count: std::sync::Arc<atomic::AtomicUsize>,
    value: std::sync::Arc<T>,
}

impl<T> Arc<T> {
    /// The first reference.
    pub fn new(value: T) -> Self {
        let count = std::sync::Arc::new(atomic::AtomicUsize::new(1));
        Arc { count, value: std::sync::Arc::new(value) }
    }

    /// A reference that does not count.
    pub fn downgrade(this: &Self) -> Weak<T> {
        Weak { count: this.count.clone(), value: this.value.clone() }
    }

    /// References, as this thread sees them.
    pub fn strong_count(this: &Self) -> usize {
        this.count.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        self.count.fetch_add(1, Ordering::Relaxed);
        Arc { count: self.count.clone(), value: self.value.clone() }
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        // A model that has failed is over: loom has no order for what follows.
        if !std::thread::panicking() {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// std's `Weak`.
#[derive(Debug)]
pub struct Weak<T> {
    count: std::sync::Arc<atomic::AtomicUsize>,
    value: std::sync::Arc<T>,
}

impl<T> Weak<T> {
    /// One more reference, if there is one.
    pub fn upgrade(&self) -> Option<Arc<T>> {
        let one_more = |count| (count > 0).then_some(count + 1);
        self.count.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).ok()?;
        Some(Arc { count: self.count.clone(), value: self.value.clone() })
    }
}
