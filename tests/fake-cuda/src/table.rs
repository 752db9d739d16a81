//! Handles: numbers that host code holds, and their objects.
//!
//! A handle is never an address, so a stale or invented one is refused instead of followed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::code::{Code, Result};

/// Not 0, 1 or 2, which stand for the default streams.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// A number that no handle had before.
pub fn fresh() -> usize {
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// All live things of one kind.
pub struct Table<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Table<T> {
    pub const fn new() -> Table<T> {
        Table(Mutex::new(BTreeMap::new()))
    }

    pub fn insert(&self, thing: Arc<T>) -> usize {
        let handle = fresh();
        self.0.lock().unwrap().insert(handle, thing);
        handle
    }

    /// As `insert`, for things that know their own handle.
    pub fn insert_at(&self, handle: usize, thing: Arc<T>) {
        self.0.lock().unwrap().insert(handle, thing);
    }

    pub fn get(&self, handle: usize) -> Result<Arc<T>> {
        self.0.lock().unwrap().get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: usize) -> Result<Arc<T>> {
        self.0.lock().unwrap().remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// The first that `f` finds something in.
    pub fn find<U>(&self, f: impl FnMut(&Arc<T>) -> Option<U>) -> Option<U> {
        self.0.lock().unwrap().values().find_map(f)
    }
}
