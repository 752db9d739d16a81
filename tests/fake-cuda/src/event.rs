//! Events: the last point of a stream that one was recorded at.

use std::sync::{Arc, Mutex};

use crate::capture::Capture;
use crate::code::{Code, Result};
use crate::driver::Context;
use crate::stream::Stream;
use crate::table::Table;
use crate::work::{Mark, Work};

pub static EVENTS: Table<Event> = Table::new();

/// `CU_EVENT_DISABLE_TIMING`.
const UNTIMED: u32 = 2;

/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;

pub struct Event {
    /// Its context's handle.
    context: usize,
    flags: u32,
    last: Mutex<Last>,
}

#[derive(Clone, Default)]
enum Last {
    #[default]
    Never,
    Live(Arc<Mark>, Arc<Stream>),
    Captured(Arc<Capture>, usize),
}

impl Event {
    pub fn create(context: &Context, flags: u32) -> Result<usize> {
        if flags & INTERPROCESS != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        Ok(EVENTS.insert(Arc::new(Event { context: context.handle, flags, last: Mutex::default() })))
    }

    /// Makes it stand for all that was enqueued in the stream so far.
    pub fn record(&self, stream: &Arc<Stream>) -> Result<()> {
        if stream.context != self.context {
            return Err(Code::INVALID_HANDLE);
        }
        let place = stream.capture.lock().unwrap().clone();
        let last = match place {
            Some(place) => Last::Captured(Arc::clone(&place.capture), place.record()?),
            None => {
                let mark = Arc::new(Mark::default());
                stream.submit(Work::Record(Arc::clone(&mark)))?;
                Last::Live(mark, Arc::clone(stream))
            }
        };
        *self.last.lock().unwrap() = last;
        Ok(())
    }

    /// Makes later work of the stream wait for it.
    pub fn awaited_by(&self, stream: &Arc<Stream>) -> Result<()> {
        // The enqueueing thread may have to wait: it blocks no other thread from the event
        // meanwhile.
        let last = self.last.lock().unwrap().clone();
        match last {
            Last::Never => Ok(()),
            Last::Captured(capture, mark) => capture.wait(stream, mark),
            Last::Live(mark, _) => {
                if let Some(place) = &*stream.capture.lock().unwrap() {
                    place.invalidate();
                    return Err(Code::STREAM_CAPTURE_ISOLATION);
                }
                stream.submit(Work::Await(mark))
            }
        }
    }

    fn live(&self) -> Result<Option<(Arc<Mark>, Arc<Stream>)>> {
        match self.last.lock().unwrap().clone() {
            Last::Never => Ok(None),
            Last::Live(mark, stream) => Ok(Some((mark, stream))),
            Last::Captured(..) => Err(Code::CAPTURED_EVENT),
        }
    }

    /// Answers `NOT_READY` while its point is not reached.
    pub fn query(&self) -> Result<()> {
        Context::of(self.context)?.alive()?;
        match self.live()? {
            Some((mark, _)) if !mark.is_reached() => Err(Code::NOT_READY),
            _ => Ok(()),
        }
    }

    /// Waits until its point is reached.
    pub fn synchronize(&self) -> Result<()> {
        if let Some((mark, stream)) = self.live()? {
            stream.until(|| mark.is_reached());
        }
        Context::of(self.context)?.alive()
    }

    /// Milliseconds from the start to this one.
    pub fn since(&self, start: &Event) -> Result<f32> {
        if (self.flags | start.flags) & UNTIMED != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        let (Some((from, _)), Some((to, _))) = (start.live()?, self.live()?) else {
            return Err(Code::INVALID_HANDLE);
        };
        let (Some(from), Some(to)) = (from.when(), to.when()) else { return Err(Code::NOT_READY) };
        let apart = to.saturating_duration_since(from).as_secs_f32()
            - from.saturating_duration_since(to).as_secs_f32();
        Ok(apart * 1000.0)
    }
}
