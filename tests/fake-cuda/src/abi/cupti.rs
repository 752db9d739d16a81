//! The functions of `libcupti.so` that list what devices did, with records as CUDA 12.5 lays them
//! out.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::Mutex;

use super::pointers::Out;
use crate::activity::{self, Activity};
use crate::driver::settings;

const SUCCESS: c_uint = 0;
const INVALID_PARAMETER: c_uint = 1;
const INVALID_OPERATION: c_uint = 7;
const MAX_LIMIT_REACHED: c_uint = 12;
const NOT_INITIALIZED: c_uint = 15;
const INVALID_KIND: c_uint = 21;

type Request = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Complete = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

static CLIENT: Mutex<Option<(Request, Complete)>> = Mutex::new(None);

/// Records that no buffer was there for.
static LOST: Mutex<usize> = Mutex::new(0);

/// Bytes of a record.
fn size(kind: u32) -> usize {
    match kind {
        activity::CONCURRENT_KERNEL => 208,
        activity::MEMCPY => 88,
        _ => 96,
    }
}

fn record(activity: &Activity) -> Vec<u8> {
    let mut bytes = vec![0; size(activity.kind)];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &activity.kind.to_ne_bytes());
    put(16, &activity.start.to_ne_bytes());
    put(24, &activity.end.to_ne_bytes());
    match activity.kind {
        activity::CONCURRENT_KERNEL => {
            let name = activity.name.map_or(0, |name| name.as_ptr() as usize);
            put(104, &name.to_ne_bytes());
        }
        kind => {
            put(8, &activity.bytes.to_ne_bytes());
            put(if kind == activity::MEMCPY { 80 } else { 88 }, &activity.channel.to_ne_bytes());
        }
    }
    bytes
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetVersion(version: Out<u32>) -> c_uint {
    let Ok(settings) = settings() else { return NOT_INITIALIZED };
    version.put(settings.cupti).map_or(INVALID_PARAMETER, |()| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(code: c_uint, text: Out<*const c_char>) -> c_uint {
    let name: &CStr = match code {
        SUCCESS => c"CUPTI_SUCCESS",
        INVALID_OPERATION => c"CUPTI_ERROR_INVALID_OPERATION",
        MAX_LIMIT_REACHED => c"CUPTI_ERROR_MAX_LIMIT_REACHED",
        NOT_INITIALIZED => c"CUPTI_ERROR_NOT_INITIALIZED",
        INVALID_KIND => c"CUPTI_ERROR_INVALID_KIND",
        _ => return INVALID_PARAMETER,
    };
    text.put(name.as_ptr()).map_or(INVALID_PARAMETER, |()| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityRegisterCallbacks(request: Option<Request>, complete: Option<Complete>) -> c_uint {
    let Some(both) = request.zip(complete) else { return INVALID_PARAMETER };
    *CLIENT.lock().unwrap() = Some(both);
    SUCCESS
}

fn want(kind: u32, wanted: bool) -> c_uint {
    match (settings().is_ok(), activity::want(kind, wanted)) {
        (false, _) => NOT_INITIALIZED,
        (true, false) => INVALID_KIND,
        (true, true) => SUCCESS,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityEnable(kind: u32) -> c_uint {
    want(kind, true)
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityDisable(kind: u32) -> c_uint {
    want(kind, false)
}

/// Hands out finished activities, in as many buffers as needed. All records are complete, so all
/// flushes are the same.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityFlushAll(_flag: u32) -> c_uint {
    let Some((request, complete)) = *CLIENT.lock().unwrap() else { return INVALID_OPERATION };
    let mut records = activity::take().iter().map(record).collect::<Vec<_>>().into_iter().peekable();
    while records.peek().is_some() {
        let (mut buffer, mut room, mut most) = (std::ptr::null_mut(), 0, 0);
        // SAFETY: the client's function has this type, and fills the three.
        unsafe { request(&raw mut buffer, &raw mut room, &raw mut most) };
        if buffer.is_null() {
            *LOST.lock().unwrap() += records.count();
            return SUCCESS;
        }
        let (mut valid, mut count) = (0, 0);
        let fits =
            |valid: usize, count: usize, len: usize| valid + len <= room && (most == 0 || count < most);
        while let Some(record) = records.next_if(|record| fits(valid, count, record.len())) {
            // SAFETY: the client vouches for `room` bytes.
            unsafe { buffer.add(valid).copy_from_nonoverlapping(record.as_ptr(), record.len()) };
            valid += record.len();
            count += 1;
        }
        if count == 0 {
            *LOST.lock().unwrap() += records.next().into_iter().count();
        }
        // SAFETY: the client's function, with the requested arguments.
        unsafe { complete(std::ptr::null_mut(), 0, buffer, room, valid) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNumDroppedRecords(_context: usize, _stream: u32, lost: Out<usize>) -> c_uint {
    let count = std::mem::take(&mut *LOST.lock().unwrap());
    lost.put(count).map_or(INVALID_PARAMETER, |()| SUCCESS)
}

/// The record behind the one that is given; the first for null.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNextRecord(buffer: *mut u8, valid: usize, record: Out<*mut u8>) -> c_uint {
    let Ok(before) = record.get() else { return INVALID_PARAMETER };
    let next = if before.is_null() {
        buffer
    } else {
        // SAFETY: the client vouches for a record of this buffer, which begins with its kind, and
        // others or the end come behind.
        unsafe { before.add(size(before.cast::<u32>().read_unaligned())) }
    };
    if next as usize >= buffer as usize + valid {
        return MAX_LIMIT_REACHED;
    }
    record.put(next).map_or(INVALID_PARAMETER, |()| SUCCESS)
}
