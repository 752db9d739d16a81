//! Values that are read by every put and change seldom: what is registered, and the peer's keys.
//!
//! ```text
//!   Published   latest, version  <-- change: a new value, then a new version
//!       | version as in the reader: its copy is the latest, and no lock is taken
//!       '-> another version: the lock, for as long as it takes to share the latest
//!   Reader      copy, version
//! ```
//!
//! A value is never changed in place, so a reader may keep using its copy while the next is made.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bootstrap::count_lock;

/// A value that is replaced as a whole.
#[derive(Debug, Default)]
pub struct Published<T> {
    /// Grows with each value.
    version: AtomicU64,
    latest: Mutex<Arc<T>>,
}

/// A copy of it, as of the last [`refresh`](Reader::refresh).
#[derive(Debug)]
pub struct Reader<T> {
    version: u64,
    copy: Arc<T>,
}

impl<T: Clone> Published<T> {
    /// With this value.
    pub fn new(value: T) -> Self {
        Published { version: AtomicU64::new(0), latest: Mutex::new(Arc::new(value)) }
    }

    /// Replaces the value by a changed copy.
    pub fn change<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let mut latest = self.lock();
        let mut next = T::clone(&latest);
        let answer = act(&mut next);
        *latest = Arc::new(next);
        // Release, under the lock: a reader that sees the version takes the lock and finds this
        // value there, or a later one.
        self.version.fetch_add(1, Ordering::Release);
        answer
    }

    /// A reader of it.
    pub fn reader(&self) -> Reader<T> {
        let latest = self.lock();
        Reader { version: self.version.load(Ordering::Relaxed), copy: Arc::clone(&latest) }
    }
}

impl<T> Published<T> {
    fn lock(&self) -> MutexGuard<'_, Arc<T>> {
        count_lock();
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Reader<T> {
    /// Takes the latest value, if it is another than the copy.
    pub fn refresh(&mut self, published: &Published<T>) {
        // Acquire: all that was done before a change is seen with its version.
        if published.version.load(Ordering::Acquire) != self.version {
            let latest = published.lock();
            // Under the lock, the version is that of the value.
            self.version = published.version.load(Ordering::Relaxed);
            self.copy = Arc::clone(&latest);
        }
    }
}

impl<T> Deref for Reader<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::locks;

    #[test]
    fn a_reader_takes_a_lock_once_for_each_change() {
        let published = Published::new(1);
        let mut reader = published.reader();
        let refresh = |reader: &mut Reader<i32>| {
            let before = locks::taken();
            reader.refresh(&published);
            (locks::taken() - before, **reader)
        };
        assert_eq!([refresh(&mut reader), refresh(&mut reader)], [(0, 1), (0, 1)]);
        published.change(|value| *value = 2);
        published.change(|value| *value += 1);
        assert_eq!([refresh(&mut reader), refresh(&mut reader)], [(1, 3), (0, 3)]);
    }

    #[test]
    fn reader_in_other_thread_sees_values_in_order_and_last_one() {
        const LAST: usize = 1000;
        let published = Published::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..LAST).for_each(|_| published.change(|value| *value += 1)));
            let mut reader = published.reader();
            while *reader < LAST {
                let before = *reader;
                reader.refresh(&published);
                assert!(*reader >= before);
                std::thread::yield_now();
            }
        });
        assert_eq!(*published.reader(), LAST);
    }
}
