//! Streams, captures of them, host functions.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::Arc;

use super::context::{current, here};
use super::pointers::Out;
use super::{call, local};
use crate::capture::{self, Mode, Status};
use crate::code::{Code, Result};
use crate::event::EVENTS;
use crate::graph::{GRAPHS, Graph};
use crate::stream::{NON_BLOCKING, Stream};
use crate::work::{HostCall, Work};

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<usize>, flags: c_uint) -> c_int {
    cuStreamCreateWithPriority(stream, flags, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(stream: Out<usize>, flags: c_uint, priority: c_int) -> c_int {
    call(|| {
        let context = here()?;
        if flags & !NON_BLOCKING != 0 {
            return Err(Code::INVALID_VALUE);
        }
        stream.put(Stream::create(&context, flags, priority).handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    call(|| {
        let context = current()?;
        let stream = Stream::of(stream, &context)?;
        if stream.is_legacy() { Err(Code::INVALID_HANDLE) } else { stream.destroy() }
    })
}

/// A stream that the host may ask after or wait for: not in a capture, which the attempt spoils.
fn asked(stream: usize) -> Result<Arc<Stream>> {
    let context = here()?;
    let stream = Stream::of(stream, &context)?;
    if let Some(place) = &*stream.capture.lock().unwrap() {
        place.invalidate();
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    capture::unsafe_call()?;
    Ok(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: usize) -> c_int {
    call(|| {
        let stream = asked(stream)?;
        let done = stream.is_done();
        stream.alive()?;
        if done { Ok(()) } else { Err(Code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    call(|| {
        let stream = asked(stream)?;
        stream.synchronize();
        stream.alive()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> c_int {
    call(|| {
        let context = here()?;
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        EVENTS.get(event)?.awaited_by(&Stream::own(stream, &context)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx(stream: usize, context: Out<usize>) -> c_int {
    call(|| context.put(Stream::of(stream, &*current()?)?.context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: usize, priority: Out<c_int>) -> c_int {
    call(|| priority.put(Stream::of(stream, &*current()?)?.priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: usize, flags: Out<c_uint>) -> c_int {
    call(|| flags.put(Stream::of(stream, &*current()?)?.flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetId(stream: usize, id: Out<c_ulonglong>) -> c_int {
    call(|| id.put(Stream::of(stream, &*current()?)?.handle as c_ulonglong))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: usize,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        let context = here()?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        Stream::own(stream, &context)?.submit(Work::Host(HostCall { function, argument }))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) -> c_int {
    call(|| capture::begin(&Stream::own(stream, &*here()?)?, Mode::of(mode)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: usize, graph: Out<usize>) -> c_int {
    call(|| {
        graph.put(0)?;
        let captured = capture::end(&*Stream::own(stream, &*here()?)?)?;
        graph.put(GRAPHS.insert(Arc::new(Graph::new(captured))))
    })
}

fn status(stream: usize) -> Result<(Status, u64)> {
    let stream = Stream::of(stream, &*here()?)?;
    let place = stream.capture.lock().unwrap();
    Ok(place.as_ref().map_or((Status::None, 0), |place| (place.status(), place.capture.id)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: usize, answer: Out<c_int>) -> c_int {
    call(|| answer.put(status(stream)?.0 as c_int))
}

/// A capture's graph and dependencies are not shown: they are null and none.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: usize,
    answer: Out<c_int>,
    id: Out<u64>,
    graph: Out<usize>,
    dependencies: Out<*const usize>,
    count: Out<usize>,
) -> c_int {
    call(|| {
        let (status, capture) = status(stream)?;
        answer.put(status as c_int)?;
        id.offer(capture);
        graph.offer(0);
        dependencies.offer(ptr::null());
        count.offer(0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: usize,
    answer: Out<c_int>,
    id: Out<u64>,
    graph: Out<usize>,
    dependencies: Out<*const usize>,
    edges: Out<*const c_void>,
    count: Out<usize>,
) -> c_int {
    edges.offer(ptr::null());
    cuStreamGetCaptureInfo_v2(stream, answer, id, graph, dependencies, count)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) -> c_int {
    local(|| mode.put(capture::exchange_mode(Mode::of(mode.get()?)?) as c_uint))
}
