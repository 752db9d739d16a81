//! Copies and fills, alone and in batches.

use std::ffi::{c_int, c_uchar, c_uint};
use std::sync::Arc;

use super::call;
use super::context::here;
use super::pointers::{In, Out};
use crate::capture;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::Context;
use crate::stream::Stream;
use crate::work::{Copies, Copy, Late, Source, Work};

/// The most entries of a batch.
pub const BATCH: usize = 255;

/// Enqueues one copy: no work for zero bytes. Pageable memory of the host is read before the call
/// returns, and written before it returns.
fn copy(to: u64, from: u64, bytes: usize, stream: &Arc<Stream>) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let engine = stream.engine(true);
    let pageable = |at| !stream.is_capturing() && engine.is_pageable(at, bytes);
    let from = if pageable(from) {
        Source::Kept(engine.snapshot(from, bytes).map_err(|_| Code::INVALID_VALUE)?)
    } else {
        Source::At(from)
    };
    let one = Copy { to, from, bytes, overlap: false };
    stream.submit(Work::Late(Late::Copies(Arc::new(Copies { all: vec![one], pageable: true }))))?;
    if pageable(to) {
        stream.flush();
        stream.drained();
    }
    Ok(())
}

fn enqueue(to: u64, from: u64, bytes: usize, stream: usize) -> c_int {
    call(|| copy(to, from, bytes, &Stream::own(stream, &*here()?)?))
}

/// In the null stream, to the end.
fn at_once(f: impl FnOnce(&Arc<Stream>) -> Result<()>) -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        f(&context.null)?;
        context.null.synchronize();
        context.alive()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) -> c_int {
    enqueue(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> c_int {
    enqueue(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> c_int {
    enqueue(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) -> c_int {
    enqueue(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    to_context: usize,
    from: u64,
    from_context: usize,
    bytes: usize,
    stream: usize,
) -> c_int {
    call(|| {
        let context = here()?;
        Context::of(to_context)?;
        Context::of(from_context)?;
        copy(to, from, bytes, &Stream::own(stream, &context)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy(to: u64, from: u64, bytes: usize) -> c_int {
    at_once(|stream| copy(to, from, bytes, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    at_once(|stream| copy(to, from, bytes, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) -> c_int {
    at_once(|stream| copy(to, from, bytes, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    at_once(|stream| copy(to, from, bytes, stream))
}

fn fill(to: u64, pattern: &[u8], count: usize, stream: &Arc<Stream>) -> Result<()> {
    if !to.is_multiple_of(pattern.len() as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if count == 0 {
        return Ok(());
    }
    stream.submit(Work::Late(Late::Fill { to, pattern: pattern.into(), count }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: usize) -> c_int {
    call(|| fill(to, &[value], count, &Stream::own(stream, &*here()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: usize) -> c_int {
    call(|| fill(to, &value.to_ne_bytes(), count, &Stream::own(stream, &*here()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) -> c_int {
    at_once(|stream| fill(to, &[value], count, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> c_int {
    at_once(|stream| fill(to, &value.to_ne_bytes(), count, stream))
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, std::marker::Copy)]
pub struct Attributes {
    order: c_uint,
    hints: [c_int; 4],
    flags: c_uint,
}

/// The order `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`; the two above it let the source be read during
/// the call.
const IN_STREAM_ORDER: c_uint = 1;

/// The arguments that both forms of `cuMemcpyBatchAsync` have.
struct Batch {
    to: In<u64>,
    from: In<u64>,
    bytes: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    firsts: In<usize>,
    kinds: usize,
}

impl Batch {
    fn enqueue(&self, stream: usize) -> Result<()> {
        let context = here()?;
        let stream = Stream::own(stream, &context)?;
        if let Some(place) = &*stream.capture.lock().unwrap() {
            place.invalidate();
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if stream.is_legacy() || !(1..=BATCH).contains(&self.count) || !(1..=self.count).contains(&self.kinds)
        {
            return Err(Code::INVALID_VALUE);
        }
        let (attributes, firsts) = (self.attributes.all(self.kinds)?, self.firsts.all(self.kinds)?);
        let ascending =
            firsts[0] == 0 && firsts.is_sorted_by(|a, b| a < b) && firsts[self.kinds - 1] < self.count;
        if !ascending || attributes.iter().any(|one| !(1..=3).contains(&one.order) || one.flags > 1) {
            return Err(Code::INVALID_VALUE);
        }
        let ends = self.to.all(self.count)?.into_iter().zip(self.from.all(self.count)?);
        let mut all = Vec::with_capacity(self.count);
        for (index, ((to, from), bytes)) in ends.zip(self.bytes.all(self.count)?).enumerate() {
            if bytes == 0 {
                return Err(Code::INVALID_VALUE);
            }
            let kind = attributes[firsts.partition_point(|&first| first <= index) - 1];
            let from = match kind.order {
                IN_STREAM_ORDER => Source::At(from),
                _ => Source::Kept(stream.engine(false).snapshot(from, bytes)?),
            };
            all.push(Copy { to, from, bytes, overlap: kind.flags == 1 });
        }
        add(&COUNTERS.copy_batches, 1);
        stream.submit(Work::Late(Late::Copies(Arc::new(Copies { all, pageable: false }))))
    }
}

/// The form of 12.8. It does not report the failed copy.
pub extern "C" fn batch(
    to: In<u64>,
    from: In<u64>,
    bytes: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    firsts: In<usize>,
    kinds: usize,
    failed: Out<usize>,
    stream: usize,
) -> c_int {
    failed.offer(usize::MAX);
    call(|| Batch { to, from, bytes, count, attributes, firsts, kinds }.enqueue(stream))
}

/// The form of 13.0.
pub extern "C" fn batch_v2(
    to: In<u64>,
    from: In<u64>,
    bytes: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    firsts: In<usize>,
    kinds: usize,
    stream: usize,
) -> c_int {
    call(|| Batch { to, from, bytes, count, attributes, firsts, kinds }.enqueue(stream))
}
