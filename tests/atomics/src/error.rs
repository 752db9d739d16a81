//! Errors of the library that the pool names.

#[path = "../../../src/error/memory.rs"]
mod memory;

pub use memory::MemoryError;

/// A cause of a world's failure: no model has one.
#[derive(Clone, Debug, PartialEq)]
pub struct Cause;

/// An error of planning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlanError {
    /// The user of the thread wants to stop.
    Interrupted,
}

/// Any of these.
#[derive(Clone, Debug, PartialEq)]
pub enum Error {
    /// Of memory.
    Memory(MemoryError),
    /// Of planning.
    Plan(PlanError),
    /// The world has failed.
    World(Cause),
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        Error::Memory(error)
    }
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Error::Plan(error)
    }
}

impl From<Cause> for Error {
    fn from(cause: Cause) -> Self {
        Error::World(cause)
    }
}
