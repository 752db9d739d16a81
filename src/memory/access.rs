//! A thread's reads and writes in mapped memory outside of stages. Unit tests compare it with the
//! footprints that the proof orders.
//!
//! Elsewhere than in unit tests nothing is recorded.

#[cfg(test)]
pub(crate) use log::{Event, begin, take};

/// Bytes are read here.
#[inline(always)]
pub(crate) fn read(at: *const u8, len: u64) {
    log::access(at, len, false);
}

/// Bytes are written here.
#[inline(always)]
pub(crate) fn write(at: *const u8, len: u64) {
    log::access(at, len, true);
}

/// Performs a stage.
#[inline(always)]
pub(crate) fn in_stage<T>(name: &'static str, stage: impl FnOnce() -> T) -> T {
    log::stage(name, true);
    let done = stage();
    log::stage(name, false);
    done
}

#[cfg(not(test))]
mod log {
    #[inline(always)]
    pub fn access(_: *const u8, _: u64, _: bool) {}

    #[inline(always)]
    pub fn stage(_: &'static str, _: bool) {}
}

#[cfg(test)]
mod log {
    use std::cell::RefCell;

    /// One entry of the log.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Event {
        /// Bytes that were read or written.
        Access { at: usize, len: u64, write: bool },
        /// A stage, or its second half, begins or ends. Its accesses are its operations.
        Stage { name: &'static str, begins: bool },
    }

    thread_local! {
        static LOG: RefCell<Option<Vec<Event>>> = const { RefCell::new(None) };
    }

    /// Records what this thread does from now on.
    pub(crate) fn begin() {
        LOG.set(Some(Vec::new()));
    }

    /// Records since [`begin`].
    pub(crate) fn take() -> Vec<Event> {
        LOG.take().unwrap_or_default()
    }

    pub fn access(at: *const u8, len: u64, write: bool) {
        record(Event::Access { at: at as usize, len, write });
    }

    pub fn stage(name: &'static str, begins: bool) {
        record(Event::Stage { name, begins });
    }

    fn record(event: Event) {
        LOG.with_borrow_mut(|log| log.iter_mut().for_each(|log| log.push(event)));
    }
}
