//! Common parts of all tests of the fake: a process for each run, and the driver's calls through
//! the binding that the library uses.

use std::env;
use std::ffi::c_void;
use std::io::Read;
use std::mem::MaybeUninit;
use std::process::{Command, Stdio};
use std::ptr;
use std::time::{Duration, Instant};

pub use cudarc::driver::sys::{self, CUresult};
use fake_cuda::{FakeDriver, install};

/// Tells the child its test, and its run of it.
const CHILD: &str = "FAKE_DRIVER_TEST_CHILD";

/// The longest that a child may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The word's value that fresh memory holds.
pub const POISON: u32 = 0x7fed_face;

/// Settings of one run.
pub type Settings<'a> = Vec<(&'a str, String)>;

/// Runs the body once for each list of settings, in a process of its own with the fake as its
/// driver. `test` is the test's full name: a child that did not run it is a failure.
pub fn apart(test: &str, runs: &[Settings], body: impl FnOnce()) {
    if env::var(CHILD).is_ok_and(|child| child == test) {
        body();
        println!("ran {test}");
        return;
    }
    let libraries = install().unwrap();
    for settings in runs {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD, test)
            .env("LD_LIBRARY_PATH", &libraries)
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).unwrap();
            text
        });
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("{test} with {settings:?} did not end");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let text = reader.join().unwrap();
        assert!(status.success() && text.contains(&format!("ran {test}")), "{settings:?}: {text}");
    }
}

/// One run without settings.
pub fn plainly() -> [Settings<'static>; 1] {
    [vec![]]
}

/// Runs that differ in the seed.
pub fn seeds(n: u64) -> Vec<Settings<'static>> {
    (0..n).map(|seed| vec![("SIDELANE_FAKE_CUDA_SEED", seed.to_string())]).collect()
}

/// Polls until the condition holds, and panics if it does not.
pub fn until(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE / 2;
    while !holds() {
        assert!(Instant::now() < deadline, "it never held");
        std::thread::yield_now();
    }
}

/// Calls a function of the driver: `cu!(cuInit(0))` gives its code.
#[macro_export]
macro_rules! cu {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the test passes the arguments that the function needs.
        unsafe { $crate::common::sys::$name($($argument),*) }
    };
}

/// As `cu`, for calls that must succeed.
#[macro_export]
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::cu!($name($($argument),*)), $crate::common::CUresult::CUDA_SUCCESS, stringify!($name))
    };
}

/// A result that a call puts somewhere: `made(|out| ok!(cuDeviceGetCount(out)))`.
pub fn made<T>(f: impl FnOnce(*mut T)) -> T {
    let mut value = MaybeUninit::uninit();
    f(value.as_mut_ptr());
    // SAFETY: `f` asserts that the call succeeded, and so wrote it.
    unsafe { value.assume_init() }
}

/// Initializes the driver, makes a device's context current, and returns the fake.
pub fn start(device: i32) -> FakeDriver {
    ok!(cuInit(0));
    use_device(device);
    FakeDriver::loaded().expect("the driver is the fake")
}

/// Makes a device's context current in this thread.
pub fn use_device(device: i32) -> sys::CUcontext {
    let context = made(|out| ok!(cuDevicePrimaryCtxRetain(out, device)));
    ok!(cuCtxSetCurrent(context));
    context
}

pub fn stream() -> sys::CUstream {
    made(|out| ok!(cuStreamCreate(out, 1)))
}

pub fn event() -> sys::CUevent {
    made(|out| ok!(cuEventCreate(out, 2)))
}

/// Memory of the current device.
pub fn device_words(count: usize) -> u64 {
    made(|out| ok!(cuMemAlloc_v2(out, count * 4)))
}

/// Pinned memory of the host, poisoned first and then all zero: its address for devices, and the
/// same for the host.
pub fn host_words(count: usize) -> (u64, &'static mut [u32]) {
    let at: *mut c_void = made(|out| ok!(cuMemHostAlloc(out, count * 4, 3)));
    // SAFETY: as many words, which stay to the end of the process.
    let words: &mut [u32] = unsafe { std::slice::from_raw_parts_mut(at.cast(), count) };
    assert!(words.iter().all(|&word| word == POISON));
    words.fill(0);
    (at as u64, words)
}

/// What words of device memory hold, read in the null stream.
pub fn read_words(at: u64, count: usize) -> Vec<u32> {
    let mut words = vec![0u32; count];
    ok!(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), at, count * 4));
    words
}

/// Fills words of device memory, in the null stream.
pub fn fill_words(at: u64, value: u32, count: usize) {
    ok!(cuMemsetD32_v2(at, value, count));
}

pub const GRANULARITY: usize = 2 << 20;

/// How VMM memory of a device is asked for, exportable or not.
pub fn properties(device: i32, exportable: bool) -> sys::CUmemAllocationProp {
    // SAFETY: all zero is a value of it.
    let mut how: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
    how.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    how.location = location(device);
    if exportable {
        how.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    how
}

pub fn location(device: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Maps memory and grants a device access to it.
pub fn map_for(handle: u64, bytes: usize, device: i32) -> u64 {
    let at = made(|out| ok!(cuMemAddressReserve(out, bytes, 0, 0, 0)));
    ok!(cuMemMap(at, bytes, 0, handle, 0));
    grant(at, bytes, device, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    at
}

pub fn grant(at: u64, bytes: usize, device: i32, flags: sys::CUmemAccess_flags) {
    let wish = sys::CUmemAccessDesc { location: location(device), flags };
    ok!(cuMemSetAccess(at, bytes, &wish, 1));
}

/// `CUmemcpyAttributes` of 12.8, which the binding of 12.5 does not know.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CopyAttributes {
    pub order: u32,
    pub hints: [i32; 4],
    pub flags: u32,
}

/// Copies in the order of the stream, concurrent with compute.
pub const BESIDE: CopyAttributes = CopyAttributes { order: 1, hints: [0; 4], flags: 1 };

pub type BatchCopy = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const CopyAttributes,
    *const usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> CUresult;

/// A function that the binding does not know, and the driver's answer.
pub fn look_up(name: &std::ffi::CStr, version: i32) -> (*mut c_void, sys::CUdriverProcAddressQueryResult) {
    let mut status = MaybeUninit::uninit();
    let function = made(|out| ok!(cuGetProcAddress_v2(name.as_ptr(), out, version, 0, status.as_mut_ptr())));
    // SAFETY: the call succeeded, and so wrote it.
    (function, unsafe { status.assume_init() })
}

/// Enqueues a batch of copies: to, from, bytes.
pub fn batch(copies: &[(u64, u64, usize)], attributes: CopyAttributes, stream: sys::CUstream) -> CUresult {
    let (function, _) = look_up(c"cuMemcpyBatchAsync", 12080);
    // SAFETY: of this version it has this type.
    let function: BatchCopy = unsafe { std::mem::transmute(function) };
    let (mut to, mut from, mut bytes) = (vec![], vec![], vec![]);
    for &(t, f, b) in copies {
        to.push(t);
        from.push(f);
        bytes.push(b);
    }
    let mut failed = 0;
    // SAFETY: all have the passed lengths.
    unsafe {
        function(
            to.as_ptr(),
            from.as_ptr(),
            bytes.as_ptr(),
            copies.len(),
            &attributes,
            &0,
            1,
            &mut failed,
            stream,
        )
    }
}

/// No stream: the null stream.
pub const NULL: sys::CUstream = ptr::null_mut();
