//! Work of the fake in this process: exact numbers for tests to assert.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        /// Work of the fake in this process since its start. Work counts when it runs, not when it
        /// is enqueued or captured.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        #[derive(Default)]
        pub(crate) struct Live {
            $(pub $name: AtomicU64,)*
        }

        pub(crate) static COUNTERS: Live = Live { $($name: AtomicU64::new(0),)* };

        impl Live {
            pub fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Single copies, and entries of batches.
    copies,
    /// Bytes that these copies moved.
    copied_bytes,
    /// Batches of copies.
    copy_batches,
    /// Copies that SMs, not copy engines, would run on a real device: both ends in one device's
    /// memory, and no wish to overlap with compute.
    copies_by_sms,
    /// Fills of memory.
    fills,
    /// Single memory operations, and entries of batches.
    memory_operations,
    /// Batches of memory operations.
    memory_batches,
    /// Kernels run.
    kernels,
    /// Blocks of the kernel that had most.
    most_blocks,
    /// Host functions run in stream order.
    host_functions,
    /// Graphs launched.
    graphs,
    /// Times the host was made to wait for a stream, an event or a context.
    host_waits,
    /// Times a call that waits for its device took the driver's lock.
    lock_holds,
    /// Allocations of device memory or of pinned memory.
    allocations,
    /// Changes of what addresses of devices mean: mappings, and grants of access.
    mappings,
    /// Flushes of NICs' writes into device memory.
    flushes,
    /// Waits for words that nothing would have ended when they were enqueued, so that another call
    /// of the driver had to come. Words that the host or another process writes count, too, unless
    /// that was declared.
    waits_without_cause,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}
