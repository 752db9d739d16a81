//! The border: what C calls, and the only room with unsafe code.
//!
//! Every function is one call of [`border`], which checks the process, catches panics, and turns
//! the outcome into a status and a sentence. Inside, pointers become slices at once ([`memory`],
//! [`versioned`], [`tensor`]), and everything after that is safe code.
#![allow(unsafe_code, reason = "pointers and symbols of C")]

// The header keeps this order, and so a reader's: what comes first is needed first.
mod library;

mod world;

mod group;

mod window;

mod gate_config;

mod gate;

mod balance;

mod losses;

mod stream;

mod tensor;

mod ep;

mod dispatch;

mod handle;

mod buffers;

mod heap;

mod combine;

mod backward;

mod start_finish;

mod report;

mod collective;

mod communicator;

mod moe;

mod moe_pass;

mod handle_calls;
mod kinds;
mod lent;
mod memory;
mod objects;
mod versioned;

pub use backward::*;
pub use balance::*;
pub use buffers::*;
pub use collective::*;
pub use combine::*;
pub use communicator::*;
pub use dispatch::*;
pub use ep::*;
pub use gate::*;
pub use gate_config::*;
pub use group::*;
pub use handle::*;
pub use heap::*;
pub use library::*;
pub use losses::{
    ImportanceInput, WeightsInput, sidelane_gate_weights_backward, sidelane_importance_loss, sidelane_z_loss,
};
pub use moe::{MoeOptions, sidelane_moe_build, sidelane_moe_close, sidelane_moe_set_weights};
pub use moe_pass::*;
pub use objects::{
    Communicator, Ep, Gate, Group, Handle, HeapAllocator, Moe, Output, PendingCombine, PendingDispatch,
    RowCollective, RowPartition, Rows, Stream, Tape, Tokens, Window, World,
};
pub use report::*;
pub use start_finish::*;
pub use stream::*;
pub use tensor::{ExpertMap, Routing, Tensor};
pub use window::*;
pub use world::*;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use self::memory::Out;
use self::objects::Opaque;
use crate::fault::Fault;
use crate::handles::Table;
use crate::{Status, message, process};

static TABLE: Table = Table::new();

/// Makes a call from C: nothing unwinds out of it.
fn border(call: impl FnOnce() -> Result<(), Fault>) -> Status {
    let caught = || {
        // State that a panic left behind is behind a lock that is poisoned then.
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
            // The call may have been collective: no other rank may wait for the rest of it.
            TABLE.all::<sidelane::World>().iter().for_each(|world| world.cancel());
            Err(Fault::Panicked { said: said(&*panic) })
        })
    };
    match process::check().and_then(|()| caught()) {
        Ok(()) => Status::SIDELANE_OK,
        Err(fault) => {
            message::keep(fault.to_string());
            (&fault).into()
        }
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without words").to_owned()
}

/// The object of a handle.
fn get<T: Opaque>(handle: *mut T) -> Result<Arc<T::Object>, Fault> {
    Ok(TABLE.get(handle.addr() as u64)?)
}

/// Gives a handle for an object, and writes it where the caller wants it.
fn give<T: Opaque>(object: T::Object, out: Out<*mut T>) -> Result<(), Fault> {
    process::own();
    let ticket = TABLE.insert(Arc::new(object))?;
    out.write(std::ptr::without_provenance_mut(ticket as usize));
    Ok(())
}

/// Takes a handle back.
fn retract<T: Opaque>(handle: *mut T) -> Result<Arc<T::Object>, Fault> {
    Ok(TABLE.remove(handle.addr() as u64)?)
}

/// Closes a handle. Without one this is a no-op.
fn close(handle: *mut impl Opaque) -> Status {
    border(|| if handle.is_null() { Ok(()) } else { retract(handle).map(drop) })
}

const _: () = assert!(size_of::<usize>() == 8, "a ticket is as wide as a pointer");

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use sidelane::error::Cause;

    use super::*;

    #[test]
    fn a_panic_is_told_to_the_other_ranks_at_once() {
        let mut worlds = sidelane::World::threads(2).unwrap().into_iter();
        let (broken, other) = (worlds.next().unwrap(), worlds.next().unwrap());
        let mut ticket = std::ptr::null_mut::<World>();
        // SAFETY: it is valid.
        give(broken, unsafe { Out::new("world", &raw mut ticket) }.unwrap()).unwrap();
        let status = border(|| std::panic::resume_unwind(Box::new("a bug")));
        assert_eq!(status, Status::SIDELANE_ERROR_INTERNAL);
        let since = Instant::now();
        let cause = loop {
            match other.health().check() {
                Err(cause) => break cause,
                Ok(()) => assert!(since.elapsed() < Duration::from_secs(60), "no rank was told"),
            }
            std::thread::yield_now();
        };
        assert_eq!(cause, Cause::Cancelled { by: 0 });
        assert_eq!(close(ticket), Status::SIDELANE_OK);
    }
}
