//! Outcome of a call, as a number.

use sidelane::Error;
use sidelane::error::BootstrapError::{NoSpare, NotGrown, SettingsDiffer, SpareLost};
use sidelane::error::OverlapError;

use crate::fault::Fault;

/// Outcome of a call. `sidelane_last_message()` describes it in a sentence.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "they are C's names")]
pub enum Status {
    /// Done.
    SIDELANE_OK = 0,
    /// An argument is invalid: a null pointer, an unknown number, a struct of an unknown size, a
    /// wrong shape.
    SIDELANE_ERROR_ARGUMENT = 1,
    /// A handle was closed, is of another kind, or was never given.
    SIDELANE_ERROR_HANDLE = 2,
    /// The object is in a call of another thread, or between the halves of a call.
    SIDELANE_ERROR_BUSY = 3,
    /// This process was forked from one that uses the library.
    SIDELANE_ERROR_FORKED = 4,
    /// A bug of the library: it is caught, and the object that was in use can only be closed. The
    /// worlds of this process with open handles are cancelled, so that no other rank waits for this
    /// one.
    SIDELANE_ERROR_INTERNAL = 5,
    /// The ranks did not meet.
    SIDELANE_ERROR_BOOTSTRAP = 16,
    /// The world has failed: a rank is lost, or a rank cancelled it. Rebuild it.
    SIDELANE_ERROR_WORLD = 17,
    /// Memory could not be had, or an access lies outside its window.
    SIDELANE_ERROR_MEMORY = 18,
    /// The instruction set that was asked for cannot be used.
    SIDELANE_ERROR_SIMD = 19,
    /// A GPU could not be used.
    SIDELANE_ERROR_DEVICE = 20,
    /// Bytes or signals could not be moved, or did not come.
    SIDELANE_ERROR_LANE = 21,
    /// The input of a router is wrong.
    SIDELANE_ERROR_GATE = 22,
    /// The input of a call is wrong: nothing moved on any rank.
    SIDELANE_ERROR_PLAN = 23,
    /// Ranks disagree about a call, or it is used wrongly: nothing moved on any rank.
    SIDELANE_ERROR_CALL = 24,
    /// Experts of a whole layer failed or took too long, or a layer on a device does not have what
    /// was asked for.
    SIDELANE_ERROR_LAYER = 25,
    /// No spare asked while the world waited to grow. The world lives.
    SIDELANE_ERROR_NO_SPARE = 26,
    /// A spare was lost while the world took it in; the message names its rank. The world lives.
    SIDELANE_ERROR_SPARE_LOST = 27,
    /// Another rank could not go on to the larger world; the message names it. The world lives.
    SIDELANE_ERROR_NOT_GROWN = 28,
    /// This spare has other settings than the ranks; the message names the first.
    SIDELANE_ERROR_SETTINGS_DIFFER = 29,
}

impl Status {
    const ALL: [Status; 20] = [
        Status::SIDELANE_OK,
        Status::SIDELANE_ERROR_ARGUMENT,
        Status::SIDELANE_ERROR_HANDLE,
        Status::SIDELANE_ERROR_BUSY,
        Status::SIDELANE_ERROR_FORKED,
        Status::SIDELANE_ERROR_INTERNAL,
        Status::SIDELANE_ERROR_BOOTSTRAP,
        Status::SIDELANE_ERROR_WORLD,
        Status::SIDELANE_ERROR_MEMORY,
        Status::SIDELANE_ERROR_SIMD,
        Status::SIDELANE_ERROR_DEVICE,
        Status::SIDELANE_ERROR_LANE,
        Status::SIDELANE_ERROR_GATE,
        Status::SIDELANE_ERROR_PLAN,
        Status::SIDELANE_ERROR_CALL,
        Status::SIDELANE_ERROR_LAYER,
        Status::SIDELANE_ERROR_NO_SPARE,
        Status::SIDELANE_ERROR_SPARE_LOST,
        Status::SIDELANE_ERROR_NOT_GROWN,
        Status::SIDELANE_ERROR_SETTINGS_DIFFER,
    ];

    /// The status with this number.
    pub(crate) fn from_code(code: i32) -> Option<Status> {
        Status::ALL.into_iter().find(|&status| status as i32 == code)
    }

    pub(crate) const fn name(self) -> &'static std::ffi::CStr {
        match self {
            Status::SIDELANE_OK => c"SIDELANE_OK",
            Status::SIDELANE_ERROR_ARGUMENT => c"SIDELANE_ERROR_ARGUMENT",
            Status::SIDELANE_ERROR_HANDLE => c"SIDELANE_ERROR_HANDLE",
            Status::SIDELANE_ERROR_BUSY => c"SIDELANE_ERROR_BUSY",
            Status::SIDELANE_ERROR_FORKED => c"SIDELANE_ERROR_FORKED",
            Status::SIDELANE_ERROR_INTERNAL => c"SIDELANE_ERROR_INTERNAL",
            Status::SIDELANE_ERROR_BOOTSTRAP => c"SIDELANE_ERROR_BOOTSTRAP",
            Status::SIDELANE_ERROR_WORLD => c"SIDELANE_ERROR_WORLD",
            Status::SIDELANE_ERROR_MEMORY => c"SIDELANE_ERROR_MEMORY",
            Status::SIDELANE_ERROR_SIMD => c"SIDELANE_ERROR_SIMD",
            Status::SIDELANE_ERROR_DEVICE => c"SIDELANE_ERROR_DEVICE",
            Status::SIDELANE_ERROR_LANE => c"SIDELANE_ERROR_LANE",
            Status::SIDELANE_ERROR_GATE => c"SIDELANE_ERROR_GATE",
            Status::SIDELANE_ERROR_PLAN => c"SIDELANE_ERROR_PLAN",
            Status::SIDELANE_ERROR_CALL => c"SIDELANE_ERROR_CALL",
            Status::SIDELANE_ERROR_LAYER => c"SIDELANE_ERROR_LAYER",
            Status::SIDELANE_ERROR_NO_SPARE => c"SIDELANE_ERROR_NO_SPARE",
            Status::SIDELANE_ERROR_SPARE_LOST => c"SIDELANE_ERROR_SPARE_LOST",
            Status::SIDELANE_ERROR_NOT_GROWN => c"SIDELANE_ERROR_NOT_GROWN",
            Status::SIDELANE_ERROR_SETTINGS_DIFFER => c"SIDELANE_ERROR_SETTINGS_DIFFER",
        }
    }
}

impl From<&Fault> for Status {
    fn from(fault: &Fault) -> Status {
        match fault {
            Fault::Argument(_) => Status::SIDELANE_ERROR_ARGUMENT,
            Fault::Handle(_) => Status::SIDELANE_ERROR_HANDLE,
            Fault::Busy { .. } | Fault::Underway { .. } => Status::SIDELANE_ERROR_BUSY,
            Fault::Forked { .. } => Status::SIDELANE_ERROR_FORKED,
            Fault::Panicked { .. } | Fault::Broken { .. } => Status::SIDELANE_ERROR_INTERNAL,
            Fault::Library(error) => error.into(),
        }
    }
}

impl From<&Error> for Status {
    fn from(error: &Error) -> Status {
        match error {
            Error::Bootstrap(NoSpare { .. }) => Status::SIDELANE_ERROR_NO_SPARE,
            Error::Bootstrap(SpareLost { .. }) => Status::SIDELANE_ERROR_SPARE_LOST,
            Error::Bootstrap(NotGrown { .. }) => Status::SIDELANE_ERROR_NOT_GROWN,
            Error::Bootstrap(SettingsDiffer { .. }) => Status::SIDELANE_ERROR_SETTINGS_DIFFER,
            Error::Bootstrap(_) => Status::SIDELANE_ERROR_BOOTSTRAP,
            Error::World(_) => Status::SIDELANE_ERROR_WORLD,
            Error::Memory(_) => Status::SIDELANE_ERROR_MEMORY,
            Error::Simd(_) => Status::SIDELANE_ERROR_SIMD,
            Error::Device(_) => Status::SIDELANE_ERROR_DEVICE,
            Error::Lane(_) => Status::SIDELANE_ERROR_LANE,
            Error::Gate(_) => Status::SIDELANE_ERROR_GATE,
            Error::Plan(_) => Status::SIDELANE_ERROR_PLAN,
            Error::Call(_) => Status::SIDELANE_ERROR_CALL,
            // The message says which node of a layer failed. The error is what it met.
            Error::Overlap(OverlapError::Failed { error, .. }) => (&**error).into(),
            Error::Overlap(_) | Error::Layer(_) => Status::SIDELANE_ERROR_LAYER,
            _ => Status::SIDELANE_ERROR_INTERNAL,
        }
    }
}
