//! Reasons why the FFI boundary refuses a call, and errors of the library.

use sidelane::error::{DeviceError, GateError, MemoryError, PlanError};

use crate::handles::Kind;

/// An argument that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArgumentError {
    /// A pointer that must not be null.
    #[error("{what} is NULL")]
    Null {
        /// Which argument.
        what: &'static str,
    },
    /// A pointer to something that cannot lie there.
    #[error("{what} is at {address:#x}, which is not a multiple of {align} bytes")]
    Misaligned {
        /// Which argument.
        what: &'static str,
        /// Where it points.
        address: usize,
        /// Alignment that the type needs.
        align: usize,
    },
    /// A descriptor that cannot be duplicated.
    #[error("{what} = {seen}: no descriptor that is open")]
    Descriptor {
        /// Which argument.
        what: &'static str,
        /// Its number.
        seen: i32,
    },
    /// More elements than there can be.
    #[error("{what}: {rows} x {columns} elements are too many")]
    TooLarge {
        /// Which argument.
        what: &'static str,
        /// Rows.
        rows: u64,
        /// Columns.
        columns: u64,
    },
    /// A struct of a size that no version of it has.
    #[error(
        "{name}: its size field says {seen} bytes, which no version of it has: set it to sizeof({name}), {expected} here"
    )]
    Size {
        /// The struct.
        name: &'static str,
        /// What its first field says.
        seen: usize,
        /// Size of the struct in this library.
        expected: usize,
    },
    /// A struct of a later version that asks for something.
    #[error(
        "{name}: byte {at} is set, but this version of the library knows {known} bytes: it is older than the header"
    )]
    Unknown {
        /// The struct.
        name: &'static str,
        /// The first byte that is set.
        at: usize,
        /// Bytes of the struct here.
        known: usize,
    },
    /// A number that means nothing.
    #[error("{what} = {seen}: {expected}")]
    Value {
        /// Which argument or field.
        what: &'static str,
        /// Its value.
        seen: u64,
        /// What would be right.
        expected: &'static str,
    },
    /// A tensor of another shape.
    #[error("{what} is [{rows}, {columns}], expected [{expected_rows}, {expected_columns}]")]
    Shape {
        /// Which argument.
        what: &'static str,
        /// Its rows.
        rows: u64,
        /// Its columns.
        columns: u64,
        /// Rows that would be right.
        expected_rows: u64,
        /// Columns that would be right.
        expected_columns: u64,
    },
    /// The memory that is read and the memory that is written overlap.
    #[error("{one} and {other} overlap: written and read memory must be disjoint")]
    Overlap {
        /// The first.
        one: &'static str,
        /// The second.
        other: &'static str,
    },
    /// A text that is no UTF-8.
    #[error("{what} is no UTF-8")]
    NotText {
        /// Which argument.
        what: &'static str,
    },
    /// A name that no preset has.
    #[error(transparent)]
    Preset(#[from] sidelane::gate::PresetError),
}

/// A handle that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HandleError {
    /// No handle at all.
    #[error("the handle of a {expected} is NULL")]
    Null {
        /// The expected kind.
        expected: Kind,
    },
    /// A number that this library never gave out.
    #[error("{seen:#x} is not a handle: a {expected} was expected")]
    Foreign {
        /// The given handle.
        seen: u64,
        /// The expected kind.
        expected: Kind,
    },
    /// A handle of another kind of object.
    #[error("this is the handle of a {seen}, a {expected} was expected")]
    WrongKind {
        /// The given kind.
        seen: Kind,
        /// The expected kind.
        expected: Kind,
    },
    /// A handle that is no longer valid.
    #[error("this {kind} was closed, or consumed by an earlier call")]
    Closed {
        /// The former kind.
        kind: Kind,
    },
    /// All handles that can be distinguished are open.
    #[error("{open} handles are open: close some first")]
    TooMany {
        /// How many.
        open: usize,
    },
}

/// Reason why a call failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// An argument cannot be used.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// A handle cannot be used.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// Another thread is in a call on the same object.
    #[error("another thread is in a call on this {kind}: calls on one object come one after another")]
    Busy {
        /// Kind of the object.
        kind: Kind,
    },
    /// The object is between the halves of a call.
    #[error("this {kind} is in a call that was started: finish that first")]
    Underway {
        /// Kind of the object.
        kind: Kind,
    },
    /// An earlier call on the object ended in a bug of the library.
    #[error("an earlier call on this {kind} ended in a bug of the library: it can only be closed")]
    Broken {
        /// Kind of the object.
        kind: Kind,
    },
    /// The process is the child of one that uses the library.
    #[error(
        "process {child} was forked from process {parent}, which has handles of its own: start ranks as programs, not by fork"
    )]
    Forked {
        /// This process.
        child: u32,
        /// The process that the handles belong to.
        parent: u32,
    },
    /// A bug of the library.
    #[error("a bug of the library, please report it: {said}")]
    Panicked {
        /// The panic's message.
        said: String,
    },
    /// The library's error.
    #[error(transparent)]
    Library(#[from] sidelane::Error),
}

impl From<PlanError> for Fault {
    fn from(error: PlanError) -> Fault {
        Fault::Library(error.into())
    }
}

impl From<GateError> for Fault {
    fn from(error: GateError) -> Fault {
        Fault::Library(error.into())
    }
}

impl From<MemoryError> for Fault {
    fn from(error: MemoryError) -> Fault {
        Fault::Library(error.into())
    }
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Fault {
        Fault::Library(error.into())
    }
}
