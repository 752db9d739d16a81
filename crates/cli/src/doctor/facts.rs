//! What the process knows about itself and no file below a root can say.

use std::path::PathBuf;

use rustix::process::{Resource, getrlimit};
use sidelane::device::{Driver, Probe};
use sidelane::error::DeviceError;

/// Facts about this process. A limit of `None` is no limit.
pub struct Facts {
    pub usable_cores: usize,
    pub locked_memory: Option<u64>,
    pub open_files: Option<u64>,
    /// Whether a segment that asked for huge pages got them; `None` if the kernel does not tell.
    pub huge_pages: Option<bool>,
    /// Directories of `LD_LIBRARY_PATH`.
    pub library_path: Vec<PathBuf>,
    /// What the CUDA driver says, or why it does not.
    pub cuda: Result<Probe, DeviceError>,
}

impl Facts {
    /// Asks the kernel, the environment and the CUDA driver.
    pub fn of_this_process() -> Self {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Facts {
            usable_cores: crate::machines::cores(),
            locked_memory: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            huge_pages: sidelane::memory::huge_pages_granted(),
            library_path: std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()).collect(),
            cuda: Driver::open().and_then(|driver| driver.probe()),
        }
    }
}
