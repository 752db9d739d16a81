//! For tests: the fake under the names that loaders look for, and its counters.

use std::env;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::os::unix::Library;

use crate::abi::MAGIC;
use crate::counters::Counters;

/// Loaders try several names, and not all of them the same first: a `libcuda.so` of the system
/// would win over a `libcuda.so.1` of ours.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// The functions of CUPTI and of cuBLAS are in the same library: under these names they are found.
const OTHERS: [&str; 2] = ["libcupti.so.12", "libcublas.so.12"];

const LIBRARY: &str = "libfake_cuda.so";

/// Makes a directory with the fake under both names of the driver and under those of CUPTI and
/// cuBLAS, next to the calling test program, and returns it: a process with it as `LD_LIBRARY_PATH`
/// finds the fake and no other driver.
pub fn install() -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let built = program.parent().expect("a program is in a directory");
    // Next to tests, and next to a program's libraries.
    let Some(folder) = ["", "deps"].into_iter().find(|folder| built.join(folder).join(LIBRARY).exists())
    else {
        let text = format!("no {LIBRARY} in {}: this package must be a dev-dependency", built.display());
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    };
    let directory = built.join("fake-cuda");
    fs::create_dir_all(&directory)?;
    // Other test programs may do the same at this moment: a link is made and then moved into place.
    static MADE: AtomicU32 = AtomicU32::new(0);
    for name in NAMES.into_iter().chain(OTHERS) {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let fresh = directory.join(format!("{}-{number}", process::id()));
        symlink(Path::new("..").join(folder).join(LIBRARY), &fresh)?;
        fs::rename(&fresh, directory.join(name))?;
    }
    Ok(directory)
}

/// The fake that this process has loaded as its driver.
pub struct FakeDriver(Library);

impl FakeDriver {
    /// Finds it, and nothing else: none where the process's driver is another, or not loaded yet.
    pub fn loaded() -> Option<FakeDriver> {
        const NOLOAD: i32 = libc::RTLD_NOLOAD | libc::RTLD_NOW;
        NAMES.iter().find_map(|name| {
            // SAFETY: nothing is loaded here, so no constructor runs.
            let library = unsafe { Library::open(Some(Path::new(name)), NOLOAD) }.ok()?;
            // SAFETY: the fake's function of this name has this type.
            let magic = unsafe { library.get::<extern "C" fn() -> u32>(b"sidelane_fake_cuda\0") }.ok()?;
            (magic() == MAGIC).then_some(FakeDriver(library))
        })
    }

    /// What this process had it do so far.
    pub fn counters(&self) -> Counters {
        let mut counters = MaybeUninit::uninit();
        // SAFETY: the fake's function of this name has this type.
        let read = unsafe {
            self.0
                .get::<extern "C" fn(*mut Counters)>(b"sidelane_fake_cuda_counters\0")
                .expect("it is the fake")
        };
        read(counters.as_mut_ptr());
        // SAFETY: written above, as a whole.
        unsafe { counters.assume_init() }
    }

    /// The host, a NIC or another process writes these bytes, which are mapped here: a wait for a
    /// word in there has a cause.
    pub fn written_elsewhere(&self, at: u64, bytes: u64) {
        // SAFETY: the fake's function of this name has this type.
        let declare = unsafe {
            self.0.get::<extern "C" fn(u64, u64)>(b"sidelane_fake_cuda_declare\0").expect("it is the fake")
        };
        declare(at, bytes);
    }

    /// Products of cuBLAS on this device fail from now on.
    pub fn break_cublas(&self, device: u32) {
        // SAFETY: the fake's function of this name has this type.
        let fail = unsafe {
            self.0.get::<extern "C" fn(u32)>(b"sidelane_fake_cuda_break_cublas\0").expect("it is the fake")
        };
        fail(device);
    }

    /// The next call for this device by which memory is created (0), mapped (1) or made accessible
    /// (2) is refused.
    pub fn refuse_memory(&self, device: u32, kind: u32) {
        // SAFETY: the fake's function of this name has this type.
        let refuse = unsafe {
            self.0
                .get::<extern "C" fn(u32, u32)>(b"sidelane_fake_cuda_refuse_memory\0")
                .expect("it is the fake")
        };
        refuse(device, kind);
    }

    /// Ends all waits of streams, now and later.
    pub fn stop(&self) {
        // SAFETY: the fake's function of this name has this type.
        let stop =
            unsafe { self.0.get::<extern "C" fn()>(b"sidelane_fake_cuda_stop\0").expect("it is the fake") };
        stop();
    }
}
