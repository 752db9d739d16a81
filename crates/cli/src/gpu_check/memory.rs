//! Memory of the device and what is in it.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{Allocation, Context, PinnedMemory, Range, Reservation, Span, Stream};
use sidelane::error::DeviceError;

use crate::error::{CliError, failed, wrong};

/// New memory of the device.
pub fn device(context: &Arc<Context>, bytes: u64) -> Result<Range, DeviceError> {
    let allocation = Allocation::new(context, bytes)?;
    let reservation = Reservation::new(context, 1, allocation.bytes())?;
    reservation.map(0, &allocation, &[context.device()])?.part(0, bytes)
}

/// All of a range.
pub fn whole(range: &Range) -> Result<Span<'_>, DeviceError> {
    range.span(0, range.len())
}

/// What is in pinned memory.
pub fn content(memory: &PinnedMemory) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes to memory of the device, and waits until it is there.
pub fn write(stream: &Stream, to: &Range, bytes: &[u8]) -> Result<(), DeviceError> {
    let staging = PinnedMemory::new(stream.context(), bytes.len())?;
    staging.write(0, bytes)?;
    stream.copy(to.span(0, bytes.len() as u64)?, whole(staging.range())?)?;
    stream.synchronize()
}

/// Reads memory of the device, once the stream has come so far.
pub fn read(stream: &Stream, from: &Range, patience: Duration) -> Result<Vec<u8>, CliError> {
    let staging = PinnedMemory::new(stream.context(), from.len() as usize)?;
    stream.copy(whole(staging.range())?, whole(from)?)?;
    finish(stream, "a copy to the host", patience)?;
    Ok(content(&staging)?)
}

/// Waits until the stream is done, but not for ever.
pub fn finish(stream: &Stream, what: &str, patience: Duration) -> Result<(), CliError> {
    until(what, patience, || stream.is_done())
}

/// Waits for something, but not for ever.
pub fn until(
    what: &str,
    patience: Duration,
    mut done: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<(), CliError> {
    let start = Instant::now();
    while !done()? {
        let waited = start.elapsed();
        if waited > patience {
            return Err(failed!("{what} did not end within {waited:?}", what = what.to_owned()));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Bytes that repeat with the seed alone.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes());
        words.take(len).collect()
    }
}

/// Compares bytes.
pub fn same(what: impl Display, seen: &[u8], expected: &[u8]) -> Result<(), CliError> {
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    let Some(at) = seen.iter().zip(expected).position(|(seen, expected)| seen != expected) else {
        return Ok(());
    };
    let (len, seen, expected) = (seen.len(), seen[at], expected[at]);
    Err(wrong!("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}"))
}

/// Compares numbers.
pub fn equal(what: impl Display, seen: u64, expected: u64) -> Result<(), CliError> {
    if seen == expected { Ok(()) } else { Err(wrong!("{what} is {seen} and must be {expected}")) }
}
