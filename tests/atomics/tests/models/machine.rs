//! What threads share beside the library's words: memory, and what the kernel lets them sleep on.

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};

/// Plain memory: a model fails if a thread may write it while another uses it.
#[derive(Debug)]
pub struct Memory(UnsafeCell<()>);

impl Memory {
    pub fn new() -> Self {
        Memory(UnsafeCell::new(()))
    }

    pub fn write(&self) {
        self.0.with_mut(|_| ());
    }

    pub fn read(&self) {
        self.0.with(|_| ());
    }
}

/// A futex: the word is compared under the lock that a wake-up takes.
#[derive(Debug)]
pub struct Futex {
    bucket: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    pub fn new() -> Self {
        Futex { bucket: Mutex::new(()), woken: Condvar::new() }
    }

    /// Sleeps, unless the word has changed. No time limit: whoever is not woken sleeps for ever.
    pub fn wait(&self, is_unchanged: impl FnOnce() -> bool) {
        let bucket = self.bucket.lock().unwrap();
        if is_unchanged() {
            drop(self.woken.wait(bucket).unwrap());
        }
    }

    pub fn wake(&self) {
        let _bucket = self.bucket.lock().unwrap();
        self.woken.notify_all();
    }
}

/// An event descriptor: a number that is readable while it is not 0.
#[derive(Debug)]
pub struct EventFd {
    number: Mutex<u64>,
    readable: Condvar,
}

impl EventFd {
    pub fn new() -> Self {
        EventFd { number: Mutex::new(0), readable: Condvar::new() }
    }

    /// Sleeps until it is readable, and takes the number.
    pub fn wait(&self) {
        let mut number = self.number.lock().unwrap();
        while *number == 0 {
            number = self.readable.wait(number).unwrap();
        }
        *number = 0;
    }

    pub fn post(&self) {
        *self.number.lock().unwrap() += 1;
        self.readable.notify_all();
    }
}

/// A word that a device polls: its thread sleeps here, because loom runs no thread that spins while
/// another one does.
#[derive(Debug)]
pub struct DeviceWord {
    value: Mutex<u64>,
    changed: Condvar,
}

impl DeviceWord {
    pub fn new() -> Self {
        DeviceWord { value: Mutex::new(0), changed: Condvar::new() }
    }

    pub fn set(&self, value: u64) {
        *self.value.lock().unwrap() = value;
        self.changed.notify_all();
    }

    /// Waits for at least this value, for ever.
    pub fn wait_for(&self, least: u64) {
        let mut value = self.value.lock().unwrap();
        while *value < least {
            value = self.changed.wait(value).unwrap();
        }
    }
}
