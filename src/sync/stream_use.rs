//! Threads that serve streams of a device, and when they may end.
//!
//! ```text
//!   owner     enqueue: claim the memory ... no more calls: close
//!   stream    work of a call, requests ...... last request, last claim dropped
//!   thread    is_needed?  serve requests     is_needed?  serve once more, end
//! ```
//!
//! A stream outlives the object that enqueued its work. What keeps a serving thread is a *claim*: a
//! reference to the memory that the stream works on. Only the open object makes claims from
//! nothing, so the thread asks whether it is closed first. A thread that finds itself no longer
//! needed sees everything that streams have done, so its last look at their requests misses none.

use super::primitives::{Arc, AtomicBool, AtomicU64, Ordering, fence};

/// Whether an object may still enqueue work.
#[derive(Debug, Default)]
pub struct StreamUse {
    closed: AtomicBool,
}

impl StreamUse {
    /// The owner enqueues nothing more.
    pub fn close(&self) {
        // Behind the owner's last claims: a thread that sees this sees them, too.
        self.closed.store(true, Ordering::Release);
    }

    /// Whether streams may still need a thread: the object is open, or there is a claim.
    pub fn is_needed(&self, is_claimed: impl FnOnce() -> bool) -> bool {
        // With the release in `close`: behind it all claims of the owner are visible.
        !self.closed.load(Ordering::Acquire) || is_claimed()
    }
}

/// The thread that ends the waits of streams, in a failed world: at most one, begun by the thread
/// that comes first.
#[derive(Debug, Default)]
pub struct Drain {
    streams: StreamUse,
    begun: AtomicBool,
}

impl Drain {
    /// The world has failed. Whether the caller is to start the thread.
    pub fn begin(&self) -> bool {
        // Relaxed: it only picks one of two threads, and the start of the new one orders the rest.
        !self.begun.swap(true, Ordering::Relaxed)
    }

    /// The owner enqueues nothing more. Whether the caller is to start the thread: in a failed
    /// world, too, whose watchers may not have come to this object yet, and find it gone.
    pub fn close(&self, is_claimed: impl FnOnce() -> bool) -> bool {
        self.streams.close();
        is_claimed() && self.begin()
    }

    /// Whether the thread goes on.
    pub fn is_needed(&self, is_claimed: impl FnOnce() -> bool) -> bool {
        self.streams.is_needed(is_claimed)
    }
}

/// Whether there are more than `own` references to a value. If there are not, the caller sees what
/// former holders have done.
pub fn is_shared<T>(value: &Arc<T>, own: usize) -> bool {
    let is_shared = Arc::strong_count(value) > own;
    // `strong_count` loads without an order. With this fence the load pairs with the release by
    // which a holder that is gone dropped its reference.
    fence(Ordering::Acquire);
    is_shared
}

/// A word that a stream sets when its thread has something to do.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a>(&'a AtomicU64);

impl<'a> Request<'a> {
    /// The request in this word.
    pub fn new(word: &'a AtomicU64) -> Self {
        Request(word)
    }

    /// Whether it is set, with everything that the stream did before.
    pub fn is_set(self) -> bool {
        // The device has the other side of the pair: it writes the word behind the stream's work.
        self.0.load(Ordering::Acquire) != 0
    }

    /// Takes it back, before the work is done: a stream that hears of the work may set it again.
    pub fn clear(self) {
        // Relaxed: the stream hears of the work by a later store with release, which orders
        // this one, too.
        self.0.store(0, Ordering::Relaxed);
    }
}
