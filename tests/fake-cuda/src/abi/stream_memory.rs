//! Stream memory operations.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::call;
use super::context::here;
use super::copy::BATCH;
use super::pointers::In;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::settings;
use crate::memory::{MAP, device_of};
use crate::settings::NicWrites;
use crate::stream::Stream;
use crate::work::{MemoryOperation, Until, Width, Work};

/// `CU_STREAM_WAIT_VALUE_FLUSH`.
const FLUSH: c_uint = 1 << 30;

fn straight(at: u64, width: Width) -> Result<u64> {
    if at.is_multiple_of(width.bytes() as u64) { Ok(at) } else { Err(Code::INVALID_VALUE) }
}

fn write(at: u64, value: u64, width: Width, flags: c_uint) -> Result<MemoryOperation> {
    let fenced = match flags {
        0 => true,
        1 => false,
        _ => return Err(Code::INVALID_VALUE),
    };
    Ok(MemoryOperation::Write { at: straight(at, width)?, value, width, fenced })
}

fn wait(at: u64, value: u64, width: Width, flags: c_uint) -> Result<MemoryOperation> {
    if flags & FLUSH != 0 {
        if settings()?.nic_writes != NicWrites::Flushed {
            return Err(Code::NOT_SUPPORTED);
        }
        add(&COUNTERS.flushes, 1);
    }
    let until = match flags & !FLUSH {
        0 => Until::Reached,
        1 => Until::Equal,
        2 => Until::AnyBit,
        3 => Until::AnyZero,
        _ => return Err(Code::INVALID_VALUE),
    };
    Ok(MemoryOperation::Wait { at: straight(at, width)?, value, width, until })
}

/// Whether the word is in memory of another device.
fn is_remote(operation: &MemoryOperation, device: usize) -> bool {
    let (MemoryOperation::Write { at, .. } | MemoryOperation::Wait { at, .. }) = *operation else {
        return false;
    };
    device_of(&MAP.read().unwrap(), at).is_some_and(|owner| owner != device)
}

fn enqueue(stream: usize, operations: impl FnOnce() -> Result<Arc<[MemoryOperation]>>) -> c_int {
    call(|| {
        let context = here()?;
        let (stream, operations) = (Stream::own(stream, &context)?, operations()?);
        if !settings()?.has_remote_words() && operations.iter().any(|one| is_remote(one, context.device)) {
            return Err(Code::NOT_SUPPORTED);
        }
        stream.submit(Work::Memory(operations))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue32_v2(stream: usize, at: u64, value: u32, flags: c_uint) -> c_int {
    enqueue(stream, || Ok([write(at, value.into(), Width::Four, flags)?].into()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue64_v2(stream: usize, at: u64, value: u64, flags: c_uint) -> c_int {
    enqueue(stream, || Ok([write(at, value, Width::Eight, flags)?].into()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue32_v2(stream: usize, at: u64, value: u32, flags: c_uint) -> c_int {
    enqueue(stream, || Ok([wait(at, value.into(), Width::Four, flags)?].into()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue64_v2(stream: usize, at: u64, value: u64, flags: c_uint) -> c_int {
    enqueue(stream, || Ok([wait(at, value, Width::Eight, flags)?].into()))
}

/// `CUstreamBatchMemOpParams`; waits and writes have the same fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Parameters {
    operation: c_uint,
    at: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    rest: u64,
}

impl Parameters {
    fn operation(&self) -> Result<MemoryOperation> {
        // Of a 32-bit value, the rest of its place has no meaning.
        let short = u64::from(self.value as u32);
        match self.operation {
            1 => wait(self.at, short, Width::Four, self.flags),
            2 => write(self.at, short, Width::Four, self.flags),
            4 => wait(self.at, self.value, Width::Eight, self.flags),
            5 => write(self.at, self.value, Width::Eight, self.flags),
            6 => Ok(MemoryOperation::Barrier),
            // Flushes of remote writes, which the devices say they cannot do.
            3 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBatchMemOp_v2(
    stream: usize,
    count: c_uint,
    all: In<Parameters>,
    flags: c_uint,
) -> c_int {
    enqueue(stream, || {
        if flags != 0 || !(1..=BATCH).contains(&(count as usize)) {
            return Err(Code::INVALID_VALUE);
        }
        let operations = all.all(count as usize)?.iter().map(Parameters::operation).collect::<Result<_>>()?;
        add(&COUNTERS.memory_batches, 1);
        Ok(operations)
    })
}
