//! Calls that wait: without the GIL, and so that Ctrl-C ends them.
//!
//! A signal is handled by the main thread, when that asks. So the waiting thread asks: in a call on
//! the data path, and while it joins a world, it does so itself, now and then, once a wait has
//! become a sleep ([`call`], [`joining`]). Other meetings through the rendezvous are made by
//! another thread, while this one looks after signals ([`meeting`]).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::prelude::*;
use sidelane::bootstrap::interruptible;

use crate::errors::raise;

/// Between two looks after signals.
const SLICE: Duration = Duration::from_millis(20);

/// Runs a handler of Python's, if a signal has come; whether it raised, and so wants to stop.
fn signals() -> Result<(), Option<PyErr>> {
    // Where the interpreter is on its way out, no thread waits any more.
    match Python::try_attach(|py| py.check_signals()) {
        Some(checked) => checked.map_err(Some),
        None => Err(None),
    }
}

/// What an interrupted call leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// A failed world: others may have seen a part of the call, and must not wait for the rest.
    Cancels,
    /// Nothing: the call can be made again.
    Ends,
}

/// Makes a call of the library. If a signal's handler raises, that is the error, even if the call
/// says.
pub fn call<T: Send>(
    py: Python<'_>,
    world: &sidelane::World,
    interrupt: Interrupt,
    call: impl FnOnce() -> Result<T, sidelane::Error> + Send,
) -> PyResult<T> {
    let (done, raised) = py.detach(|| {
        let (done, raised) = asking(call);
        if raised.is_some() && interrupt == Interrupt::Cancels {
            world.cancel();
        }
        (done, raised)
    });
    finished(Some(done), raised)
}

/// Makes a call whose waits end when a signal's handler raises; what it raised.
fn asking<T>(call: impl FnOnce() -> T) -> (T, Option<PyErr>) {
    let raised = Rc::new(RefCell::new(None));
    let told = Rc::clone(&raised);
    let done = interruptible(
        move || match signals() {
            Ok(()) => false,
            Err(error) => {
                told.replace(error);
                true
            }
        },
        call,
    );
    (done, raised.take())
}

/// Makes a call that waits at the rendezvous. If a signal's handler raises, `stop` must end it.
pub fn meeting<T: Send>(
    py: Python<'_>,
    stop: impl FnOnce() + Send,
    call: impl FnOnce() -> Result<T, sidelane::Error> + Send,
) -> PyResult<T> {
    let (done, raised) = py.detach(|| {
        std::thread::scope(|scope| {
            let (tell, heard) = channel();
            scope.spawn(move || tell.send(call()));
            match look(&heard) {
                Ok(done) => (done, None),
                Err(error) => {
                    stop();
                    (heard.recv().ok(), error)
                }
            }
        })
    });
    finished(done, raised)
}

/// Makes a call that joins a world. If a signal's handler raises, this rank gives up, and other
/// ranks hear that it is missing.
pub fn joining<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, sidelane::Error> + Send,
) -> PyResult<T> {
    let (done, raised) = py.detach(|| asking(call));
    finished(Some(done), raised)
}

fn finished<T>(done: Option<Result<T, sidelane::Error>>, raised: Option<PyErr>) -> PyResult<T> {
    match (raised, done) {
        (Some(error), _) => Err(error),
        (None, Some(done)) => done.map_err(raise),
        (None, None) => Err(pyo3::exceptions::PyRuntimeError::new_err("the call's thread has ended")),
    }
}

/// What the other thread says; none if it says nothing any more. An error as soon as a handler
/// raises.
fn look<T>(heard: &Receiver<T>) -> Result<Option<T>, Option<PyErr>> {
    loop {
        match heard.recv_timeout(SLICE) {
            Ok(done) => return Ok(Some(done)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => signals()?,
        }
    }
}
