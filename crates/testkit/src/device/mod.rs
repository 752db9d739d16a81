//! A device as checks use it, and what checks find out about it: functions of the driver, our
//! kernels by their definitions, a dispatch as streams carry it out, and what stands still while a
//! stream waits.
//!
//! ```text
//!   gpu-check on a GPU --\
//!                         +--> driver, kernels, kernel_work, lock_and_queue .. --> what was found
//!   cargo test, fake ----/
//! ```

pub mod copied_dispatch;
pub mod driver;
pub mod expert_products;
pub mod gpu;
pub mod hold;
pub mod kernel_work;
pub mod kernels;
pub mod lock_and_queue;
pub mod products_beside;
pub mod timer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{Allocation, ByteSpan, Context, DeviceRange, Priority, Reservation, Stream};
use sidelane::error::DeviceError;

use crate::TestError;

/// A stream of its own.
pub fn stream(context: &Arc<Context>) -> Result<Stream, DeviceError> {
    Stream::new(context, Priority::Normal)
}

/// New memory of the device.
pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<DeviceRange, DeviceError> {
    let allocation = Allocation::new(context, bytes)?;
    let reservation = Reservation::new(context, 1, allocation.bytes())?;
    reservation.map(0, &allocation, &[context.device()])?.part(0, bytes)
}

/// All of a range.
pub fn whole(range: &DeviceRange) -> Result<ByteSpan<'_>, DeviceError> {
    range.span(0, range.len())
}

/// How long a wait looks without a pause. Later pauses are a hundredth of it.
const AWAKE: Duration = Duration::from_millis(5);

/// Waits for something, at most so long.
pub fn until(
    what: &str,
    patience: Duration,
    mut done: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<(), TestError> {
    let start = Instant::now();
    while !done()? {
        let waited = start.elapsed();
        if waited > patience {
            return Err(TestError::Stuck { what: what.to_owned(), waited });
        }
        // Others may need this processor. Work that is timed is seen at once, if it is short.
        if waited < AWAKE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(AWAKE / 100);
        }
    }
    Ok(())
}
