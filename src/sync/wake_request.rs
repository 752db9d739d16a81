//! A thread's request to be woken, beside a ring that another thread or process fills.
//!
//! ```text
//!   consumer    ask    full fence    look at the ring ──► sleep, if there is nothing
//!   producer    publish with FlagWords::raise, full fence ──► take the request, wake if there was one
//! ```

use super::primitives::{AtomicU32, Ordering, fence};

/// The word of a request. Two processes may share it.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct WakeRequest(AtomicU32);

impl WakeRequest {
    /// Consumer: asks to be woken. It looks at the ring once more afterwards, before it sleeps.
    pub fn arm(&self) {
        // Relaxed: the fence orders it before the last look at the ring.
        self.0.store(1, Ordering::Relaxed);
        // With the one of the raise: one side at least sees the store of the other.
        fence(Ordering::SeqCst);
    }

    /// Producer, after it has raised the ring's flag: whether the consumer asked to be woken. The
    /// fence of that raise comes between what was published and this look.
    #[inline]
    pub fn take(&self) -> bool {
        // A load first: requests are rare, and an exchange takes the line from the consumer.
        self.0.load(Ordering::Relaxed) != 0 && self.0.swap(0, Ordering::Relaxed) != 0
    }
}
