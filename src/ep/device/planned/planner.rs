//! The planner: a thread that serves the calls of a stream, where a graph may replay them.
//!
//! It looks at the bells of its seats, and has the [`Enqueuer`] serve one call after the other. Calls come in the order of
//! the caller's stream, so no two bells are set at once: each call's wait stands before the next call's bell.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::enqueuer::Enqueuer;
use super::shape::StreamFlag;
use crate::ep::host::CancelOnPanic;
use crate::error::{CallKind, Error};

/// Looks at the bells before the thread sleeps between two: calls often follow each other closely.
const AWAKE: u32 = 20_000;
/// How long the planner's stream is waited for when the world is dead: what it still uses could not be given back.
const DRAIN: Duration = Duration::from_secs(10);
/// Sleep between two looks.
const NAP: Duration = Duration::from_micros(50);

/// One rank's planner.
#[derive(Debug)]
pub(super) struct Planner(pub Enqueuer);

impl Planner {
    /// Serves until the caller has closed and all is served, or the world is dead.
    pub fn serve(mut self) {
        let common = Arc::clone(&self.0.common);
        let fixed = &common.fixed;
        let _end = CancelOnPanic(&fixed.shared);
        if let Err(error) = self.listen() {
            let _ = fixed.fail(error);
            self.0.engine.await_queues(DRAIN);
        }
        common.gone.store(true, Ordering::Release);
        common.seats.iter().for_each(|seat| seat.tell(|_| ()));
    }

    fn listen(&mut self) -> Result<(), Error> {
        let common = Arc::clone(&self.0.common);
        let mut idle = 0;
        loop {
            common.fixed.shared.hub.health().check()?;
            let closing = common.closing.load(Ordering::Acquire);
            if self.look()? {
                idle = 0;
                continue;
            }
            if closing && common.served.load(Ordering::Relaxed) >= common.space.enqueued() {
                return Ok(());
            }
            idle += 1;
            match idle {
                0..AWAKE => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
        }
    }

    /// Serves the first bell that is set.
    fn look(&mut self) -> Result<bool, Error> {
        let common = Arc::clone(&self.0.common);
        for seat in 0..common.shape.word_sets() {
            for bell in [StreamFlag::Dispatch, StreamFlag::Combine] {
                let word = common.bell(seat, bell)?;
                let rung = word.load(Ordering::Acquire);
                if rung == 0 {
                    continue;
                }
                word.store(0, Ordering::Relaxed);
                let (machine, said) = (self.0.enter()?, (rung - 1) as u32);
                match bell {
                    StreamFlag::Dispatch => {
                        self.0.dispatch(machine, (CallKind::Dispatch, seat), (said, None))?
                    }
                    _ => drop(self.0.ret(machine, (CallKind::Combine, seat), (said, 0))?),
                }
                if !common.seats[seat as usize].is_captured() {
                    common.served.fetch_add(1, Ordering::Relaxed);
                }
                return Ok(true);
            }
        }
        Ok(false)
    }
}
