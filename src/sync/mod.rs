//! Protocols between threads: the orders and fences of the library, apart from what they guard.
//!
//! ```text
//!   flag          raise, sleep     value is stored, sleepers are read | sleeper is counted, value is read
//!   wake_request  arm, take        a thread asks to be woken, and looks at its ring once more
//!   owed_answers  ask, tend        a thread that finds the lock taken leaves its work to the holder
//!   failure       fail, watch      the first cause wins, and every watcher hears of it once
//!   slots         take, give_back  a slot has one holder, takers have turns, and leave slots to others
//!   stream_use    close, is_needed a thread serves streams until none can run any more
//! ```
//!
//! An order that is too weak loses a wake-up once in a million runs, on some machines. So these
//! files are compiled a second time, with loom's atomics in place of those of [`primitives`]:
//! `tests/atomics` runs each protocol in all its interleavings, with every value that a load may
//! return. It weakens each order and each fence in turn, too, and a model must find that out. Other
//! modules use atomics for counts, and to publish what a lock or a channel orders anyway.

pub(crate) mod failure;
pub(crate) mod flag;
pub(crate) mod owed_answers;
pub(crate) mod primitives;
pub(crate) mod slots;
pub(crate) mod stream_use;
pub(crate) mod wake_request;
