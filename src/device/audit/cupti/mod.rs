//! CUPTI, NVIDIA's library for tools: a list of the device's work, including the driver's own
//! kernels.
//!
//! ```text
//!   Cupti::open ---- from here on CUPTI writes records -----------------------------> dropped
//!                        |  buffers, by callbacks (request, complete)
//!   recorded() ----------+-- flushed, walked, read (read_record) --> Vec<Activity>
//! ```
//!
//! Loaded at run time, like the driver, and only by `sidelane gpu-check`. It is the old interface,
//! without subscribers, that all versions for CUDA 12 and 13 have. CUPTI asks for buffers and gives
//! them back on threads of its own, by callbacks that take no argument of ours: so they lie in a
//! static until they are read.

mod ffi;

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::device::driver::Driver;
use crate::device::libcuda::Version;
use crate::error::{DeviceError, of_loader};

/// Names for the loader, by the driver's version: a newer CUPTI does not work with an older driver.
const NAMES: [&str; 2] = ["libcupti.so.12", "libcupti.so.13"];

/// The variable with a path.
const VARIABLE: &str = "SIDELANE_CUPTI_LIBRARY";

/// The records that are asked for.
const KINDS: [u32; 3] = [ffi::CONCURRENT_KERNEL, ffi::MEMCPY, ffi::MEMCPY2];

/// CUPTI, writing records until it is dropped. One at a time in a process: its buffers are the
/// process's.
pub struct Cupti {
    functions: ffi::Functions,
    name: String,
    version: u32,
    /// Never unloaded: it has hooks in the driver.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Cupti {
    /// Names for the loader.
    pub const NAMES: [&str; 2] = NAMES;

    /// Loads the library that `SIDELANE_CUPTI_LIBRARY` names, or `libcupti.so.12` or `.13`. From
    /// now on it writes records of kernels and copies; call this before there is a context. With
    /// the fake driver of the tests only the variable counts.
    ///
    /// # Errors
    /// [`DeviceError::NoCupti`], [`DeviceError::MissingSymbol`], [`DeviceError::OldCupti`],
    /// [`DeviceError::Call`] with CUPTI's code.
    pub fn open(driver: &Driver) -> Result<Self, DeviceError> {
        Self::open_with(driver, &[])
    }

    /// The same, and where the loader finds none, the first of these files that is for the driver's
    /// version.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(driver: &Driver, files: &[PathBuf]) -> Result<Self, DeviceError> {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
        if let Some(path) = &path {
            return Self::load(Path::new(path));
        }
        let old = driver.version() < Version(13000);
        // A newer CUPTI does not work with an older driver.
        let fits = |name: &str| !old || name == NAMES[0];
        let named = |file: &&PathBuf| file.file_name().and_then(|name| name.to_str()).is_some_and(fits);
        let file = files.iter().find(named);
        if driver.is_fake() {
            if let Some(file) = file {
                return Self::load(file);
            }
            let reason = format!("with the fake driver only {VARIABLE} counts");
            return Err(DeviceError::NoCupti { library: "libcupti".to_owned(), reason });
        }
        let [older, newer] = NAMES.map(Path::new);
        let (first, second) = if old { (older, newer) } else { (newer, older) };
        let loaded = Self::load(first).or_else(|error| match error {
            DeviceError::NoCupti { .. } => Self::load(second),
            error => Err(error),
        });
        match (loaded, file) {
            (Err(DeviceError::NoCupti { .. }), Some(file)) => Self::load(file),
            (loaded, _) => loaded,
        }
    }

    fn load(path: &Path) -> Result<Self, DeviceError> {
        let name = path.display().to_string();
        // SAFETY: this runs the library's initializers. A user who names a path is responsible for
        // that library; CUPTI's may run at any time.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            let reason = of_loader(&name, &error);
            DeviceError::NoCupti { library: name.clone(), reason }
        })?;
        let loaded = ManuallyDrop::new(loaded);
        // SAFETY: the types are those of the header; the library stays loaded.
        let functions = unsafe { ffi::Functions::from(&loaded) }
            .map_err(|symbol| DeviceError::MissingSymbol { library: name.clone(), symbol })?;
        let mut cupti = Cupti { functions, name, version: 0, _loaded: loaded };
        let mut version = 0;
        // SAFETY: fills the number.
        cupti.check("cuptiGetVersion", unsafe { (cupti.functions.cuptiGetVersion)(&raw mut version) })?;
        if version < ffi::OLDEST {
            let (library, needed) = (cupti.name.clone(), ffi::OLDEST);
            return Err(DeviceError::OldCupti { library, version, needed });
        }
        cupti.version = version;
        // SAFETY: functions of these types, which live as long as the process.
        let code = unsafe { (cupti.functions.cuptiActivityRegisterCallbacks)(request, complete) };
        cupti.check("cuptiActivityRegisterCallbacks", code)?;
        for kind in KINDS {
            // SAFETY: takes any number.
            let code = unsafe { (cupti.functions.cuptiActivityEnable)(kind) };
            cupti.check("cuptiActivityEnable", code)?;
        }
        Ok(cupti)
    }

    /// The loaded library: a path, or a name for the loader.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// CUPTI's own count of its versions.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The device's work since the last call, in order of begin. It includes all work that was done
    /// at the call; unfinished work may have records without times.
    ///
    /// # Errors
    /// [`DeviceError::LostRecords`], [`DeviceError::Call`] with CUPTI's code.
    pub fn recorded(&self) -> Result<Vec<Activity>, DeviceError> {
        // Complete buffers first, then incomplete ones.
        for flag in [0, ffi::FLUSH_FORCED] {
            // SAFETY: takes any number; buffers come by the callbacks.
            let code = unsafe { (self.functions.cuptiActivityFlushAll)(flag) };
            self.check("cuptiActivityFlushAll", code)?;
        }
        let mut lost = 0;
        // SAFETY: fills the number; no context stands for all of them.
        let code = unsafe {
            (self.functions.cuptiActivityGetNumDroppedRecords)(std::ptr::null_mut(), 0, &raw mut lost)
        };
        self.check("cuptiActivityGetNumDroppedRecords", code)?;
        let mut activities = Vec::new();
        for filled in take_filled() {
            lost += self.read(filled, &mut activities)?;
        }
        if lost > 0 {
            return Err(DeviceError::LostRecords { lost: lost as u64 });
        }
        activities.sort_by_key(|activity| activity.start);
        Ok(activities)
    }

    /// Reads the records of a buffer, and gives how many could not be read.
    fn read(&self, mut filled: Filled, activities: &mut Vec<Activity>) -> Result<usize, DeviceError> {
        let (mut record, mut cut) = (std::ptr::null_mut::<c_void>(), 0);
        loop {
            let buffer = filled.words.as_mut_ptr().cast::<u8>();
            // SAFETY: a buffer that CUPTI filled, with this many bytes; it reads the previous
            // record, if there is one.
            let code =
                unsafe { (self.functions.cuptiActivityGetNextRecord)(buffer, filled.valid, &raw mut record) };
            if code == ffi::MAX_LIMIT_REACHED {
                return Ok(cut);
            }
            self.check("cuptiActivityGetNextRecord", code)?;
            let bytes = &bytemuck::cast_slice::<u64, u8>(&filled.words)[..filled.valid];
            let at = (record as usize).wrapping_sub(buffer as usize);
            // SAFETY: CUPTI says that a record begins there; names live as long as CUPTI.
            match bytes.get(at..).map_or(Err(Cut), |bytes| unsafe { read_record(bytes) }) {
                Ok(activity) => activities.extend(activity),
                Err(Cut) => cut += 1,
            }
        }
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), DeviceError> {
        if code == ffi::SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: fills the pointer with a string that lives as long as the library, or leaves it.
        let answer = unsafe { (self.functions.cuptiGetResultString)(code, &raw mut text) };
        let known = answer == ffi::SUCCESS && !text.is_null();
        // SAFETY: as above: a string with a zero byte at its end.
        let name = known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|| "unknown to this CUPTI".to_owned());
        Err(DeviceError::Call { call, device: None, code, name })
    }
}

impl Drop for Cupti {
    fn drop(&mut self) {
        for kind in KINDS {
            // SAFETY: takes any number; enabled or not.
            let _ = unsafe { (self.functions.cuptiActivityDisable)(kind) };
        }
    }
}

impl std::fmt::Debug for Cupti {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cupti")
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Words of a buffer: a mebibyte, thousands of records. Records begin at multiples of eight.
const WORDS: usize = 1 << 17;

/// CUPTI hands buffers back on a thread of its own, to a function that has no argument of ours.
static FILLED: Mutex<Vec<Filled>> = Mutex::new(Vec::new());

/// A buffer with records.
pub struct Filled {
    pub words: Box<[u64]>,
    /// Bytes that hold records.
    pub valid: usize,
}

/// Buffers that came back since the last call.
fn take_filled() -> Vec<Filled> {
    std::mem::take(&mut *FILLED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// # Safety
/// As [`Request`](self::ffi::Request) says: three places for results.
pub unsafe extern "C" fn request(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    let words = Box::into_raw(vec![0_u64; WORDS].into_boxed_slice());
    // SAFETY: by the contract; the receiver of the buffer gives it back to `complete`.
    unsafe {
        buffer.write(words.cast());
        size.write(WORDS * 8);
        records.write(0);
    }
}

/// # Safety
/// As [`Complete`](self::ffi::Complete) says: the buffer is from [`request`], and no code uses it
/// any more.
pub unsafe extern "C" fn complete(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    let words = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), WORDS);
    // SAFETY: made by `request`, all of the same length, and given back once.
    let words = unsafe { Box::from_raw(words) };
    let filled = Filled { words, valid: valid.min(WORDS * 8) };
    FILLED.lock().unwrap_or_else(PoisonError::into_inner).push(filled);
}

/// An activity of the device. Times are nanoseconds of one clock, both 0 where CUPTI does not know
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Its kind.
    pub did: ActivityKind,
    /// When it began.
    pub start: u64,
    /// When it was done.
    pub end: u64,
}

/// Kinds of activities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// A kernel, of any launcher.
    Kernel {
        /// As the module has it.
        name: String,
    },
    /// It copied. CUPTI calls that a copy also where multiprocessors do it.
    Copy {
        /// How much; of a batch perhaps all copies together.
        bytes: u64,
        /// Where the work was handed in.
        channel: Channel,
    },
}

/// Which kind of queue of the hardware took the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// A copy within a device. SMs may make it, or the copy engine next to them.
    Compute,
    /// That of a copy engine.
    CopyEngine,
    /// Any other, or unknown, by CUPTI's number.
    Other(u32),
}

/// The unreadable part: the record extends beyond the filled bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Cut;

/// Reads the record at the beginning; none if it is of a kind that was not asked for.
///
/// # Safety
/// The bytes are a record as CUPTI writes it, and the name that it points to is still there.
unsafe fn read_record(bytes: &[u8]) -> Result<Option<Activity>, Cut> {
    let copy = |bytes, channel| ActivityKind::Copy { bytes, channel: Channel::of(channel) };
    // SAFETY: any bits are a number.
    let kind: u32 = unsafe { first(bytes) }?;
    Ok(match kind {
        ffi::CONCURRENT_KERNEL => {
            // SAFETY: the kind says that the record begins so; numbers and a pointer.
            let ffi::Kernel { start, end, name, .. } = unsafe { first(bytes) }?;
            // SAFETY: null, or by the contract a string with a zero byte at its end.
            let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
            let name = name.map_or("a kernel without a name".into(), CStr::to_string_lossy);
            Some(Activity { did: ActivityKind::Kernel { name: name.into_owned() }, start, end })
        }
        ffi::MEMCPY => {
            // SAFETY: the kind says that the record begins so; numbers.
            let ffi::Memcpy { bytes, start, end, channel_type, .. } = unsafe { first(bytes) }?;
            Some(Activity { did: copy(bytes, channel_type), start, end })
        }
        ffi::MEMCPY2 => {
            // SAFETY: as above.
            let ffi::MemcpyPtoP { bytes, start, end, channel_type, .. } = unsafe { first(bytes) }?;
            Some(Activity { did: copy(bytes, channel_type), start, end })
        }
        _ => None,
    })
}

/// # Safety
/// If there are as many bytes as a `T` has, they are one.
unsafe fn first<T: Copy>(bytes: &[u8]) -> Result<T, Cut> {
    let bytes = bytes.get(..size_of::<T>()).ok_or(Cut)?;
    // SAFETY: there are enough; by the contract they are a `T`.
    Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

impl Channel {
    fn of(number: u32) -> Self {
        match number {
            ffi::CHANNEL_COMPUTE => Channel::Compute,
            ffi::CHANNEL_ASYNC_MEMCPY => Channel::CopyEngine,
            other => Channel::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of so many bytes: words at their places, the rest other than zero.
    fn record(len: usize, words: &[(usize, u64)], numbers: &[(usize, u32)]) -> Vec<u8> {
        let mut bytes = vec![0x5a; len];
        for &(at, word) in words {
            bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        for &(at, number) in numbers {
            bytes[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    fn known(bytes: &[u8]) -> Result<Option<Activity>, Cut> {
        // SAFETY: made above, and names are constants.
        unsafe { read_record(bytes) }
    }

    /// Places as CUDA 12.5 has them (`tests/cupti-abi`).
    #[test]
    fn records_are_read_as_the_header_lays_them_out() {
        let name = c"pack".as_ptr() as u64;
        let kernel = record(200, &[(16, 5), (24, 9), (104, name)], &[(0, 10)]);
        let did = ActivityKind::Kernel { name: "pack".into() };
        assert_eq!(known(&kernel), Ok(Some(Activity { did, start: 5, end: 9 })));
        let nameless = record(200, &[(16, 5), (24, 9), (104, 0)], &[(0, 10)]);
        let Ok(Some(Activity { did: ActivityKind::Kernel { name }, .. })) = known(&nameless) else {
            panic!()
        };
        assert_eq!(name, "a kernel without a name");
        for (kind, at, number, channel) in [
            (1, 80, 1, Channel::Compute),
            (1, 80, 2, Channel::CopyEngine),
            (22, 88, 2, Channel::CopyEngine),
            (22, 88, 7, Channel::Other(7)),
        ] {
            let copy = record(96, &[(8, 921_600), (16, 1), (24, 2)], &[(0, kind), (at, number)]);
            let did = ActivityKind::Copy { bytes: 921_600, channel };
            assert_eq!(known(&copy), Ok(Some(Activity { did, start: 1, end: 2 })));
        }
        assert_eq!(known(&record(48, &[], &[(0, 17)])), Ok(None), "a kind that was not asked for");
    }

    #[test]
    fn a_record_that_is_cut_is_refused() {
        for (kind, len) in [(10, 111), (1, 83), (22, 91)] {
            assert_eq!(known(&record(len, &[], &[(0, kind)])), Err(Cut));
        }
        assert_eq!(known(&[1, 0]), Err(Cut));
    }
}
