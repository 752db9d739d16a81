//! Events.

use std::ffi::{c_int, c_uint};

use super::call;
use super::context::here;
use super::pointers::Out;
use crate::capture;
use crate::code::Code;
use crate::counters::{COUNTERS, add};
use crate::event::{EVENTS, Event};
use crate::stream::Stream;

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<usize>, flags: c_uint) -> c_int {
    call(|| event.put(Event::create(&*here()?, flags)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    call(|| EVENTS.remove(event).map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    cuEventRecordWithFlags(event, stream, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: usize, stream: usize, flags: c_uint) -> c_int {
    call(|| {
        let context = here()?;
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        EVENTS.get(event)?.record(&Stream::of(stream, &context)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: usize) -> c_int {
    call(|| {
        capture::unsafe_call()?;
        EVENTS.get(event)?.query()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    call(|| {
        capture::unsafe_call()?;
        add(&COUNTERS.host_waits, 1);
        EVENTS.get(event)?.synchronize()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) -> c_int {
    call(|| milliseconds.put(EVENTS.get(end)?.since(&*EVENTS.get(start)?)?))
}
