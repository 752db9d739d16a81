//! A planner in small, wherever it runs.
//!
//! ```text
//!   shared memory of the host     | bell | ring | touched |   | rows ...
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidelane::device::{Allocation, Context, CopyBatch, PinnedMemory, Reservation, Stream, Version};
use sidelane::error::DeviceError;

use super::super::driver::stream;

/// Where the words lie, a line each, and how much room they have.
pub const BELL: u64 = 0;
pub const RING: u64 = 64;
pub const TOUCHED: u64 = 128;
pub const WORDS: u64 = 4096;

/// Copies of a bell, and bytes of each.
pub const COPIES: u64 = 8;
pub const COPY: u64 = 16 << 10;
pub const ROWS: u64 = COPIES * COPY;

/// Looks at the bell between two looks whether it is over.
const LOOKS: u32 = 4096;

/// Hears the bell, copies, rings.
pub struct Planner {
    words: PinnedMemory,
    batch: CopyBatch,
    batched: bool,
    stream: Stream,
    served: u32,
}

impl Planner {
    /// One that has served so many bells.
    pub fn new(
        context: &Arc<Context>,
        rows: &Arc<Allocation>,
        shared: &PinnedMemory,
        served: u32,
    ) -> Result<Self, DeviceError> {
        let from = Reservation::new(context, 1, rows.bytes())?.map(0, rows, &[context.device()])?;
        let mut batch = CopyBatch::with_capacity(context, COPIES as usize);
        for at in (0..COPIES).map(|nth| nth * COPY) {
            batch.push(shared.range().span(WORDS + at, COPY)?, from.span(at, COPY)?)?;
        }
        let batched = context.driver().version() >= Version::BATCHED_COPIES;
        Ok(Planner { words: shared.clone(), batch, batched, stream: stream(context)?, served })
    }

    /// Serves bells until it is over.
    pub fn serve(&mut self, mut over: impl FnMut() -> bool) -> Result<(), DeviceError> {
        let mut looks = 0_u32;
        loop {
            let rung = self.words.word(BELL as usize)?.load(Ordering::Acquire) as u32;
            if rung != self.served {
                // The caller waits for each before it rings again.
                self.served = rung;
                if self.batched {
                    self.stream.copy_batch(&mut self.batch)?;
                } else {
                    self.stream.copy_each(&self.batch)?;
                }
                self.stream.write(self.words.range().word::<u32>(RING)?, rung)?;
                continue;
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                if over() {
                    return Ok(());
                }
                // A machine may have fewer processors than there are threads.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}
