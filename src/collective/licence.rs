//! When the windows of a communicator may be freed.
//!
//! A rank may leave a call while local peers still copy from its memory. It may leave a message
//! while up to two unread parts, or the receiver's last answers, are still in flight; no sender
//! waits for those. So a dropped communicator signals all others that it is done, behind all its
//! earlier messages. Its windows live until all of them have signaled the same.
//!
//! ```text
//!   rank 0   send to 2, drop: done -> 1, 2          | held ...                      ... held | free
//!   rank 2                        ... receive: answer -> 0, drop: done -> 0, 1 --------------^
//! ```

use std::sync::Arc;

use super::Communicator;
use crate::lane::Port;
use crate::memory::ReleaseCheck;
use crate::schedule::Flag;
use crate::world::SymmetricRange;

/// Above all numbers of rounds.
const DONE: u64 = u64::MAX >> 1;

/// The windows, and the other ranks, which may read or write there.
pub(super) struct WindowHold {
    pub port: Arc<Port>,
    pub others: Vec<u32>,
    pub _ranges: [SymmetricRange; 2],
}

impl std::fmt::Debug for WindowHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("others", &self.others).finish_non_exhaustive()
    }
}

impl ReleaseCheck for WindowHold {
    fn is_released(&self, value: u64) -> bool {
        let done = |&of: &u32| self.port.flag(of, Flag::Returned).is_ok_and(|flag| flag.value() >= value);
        self.others.iter().all(done)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let me = self.seat.me;
        for &peer in &self.held.others {
            // A rank that cannot be reached is gone, and the world with it: then no memory is given
            // back.
            let _ = self.port.signal(peer, (me, Flag::Returned), DONE, None);
        }
        let pool = self.world.heap.pool();
        if let Ok(nothing) = pool.alloc(0) {
            let licence: Arc<dyn ReleaseCheck> = Arc::clone(&self.held) as _;
            pool.retire(nothing, &licence, DONE);
        }
    }
}
