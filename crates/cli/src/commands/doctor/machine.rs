//! The machine and the process that are examined: files below a root, limits, libraries.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use sidelane::NicSurvey;
use sidelane::config::{UnknownVariable, unknown_variables};
use sidelane::device::{Driver, Probe};
use sidelane::error::{DeviceError, Error};

/// Facts about this process. A limit of `None` is no limit.
pub struct Facts {
    pub usable_cores: usize,
    pub locked_memory: Option<u64>,
    pub open_files: Option<u64>,
    /// Whether a segment that asked for huge pages got them; `None` if the kernel does not report
    /// it.
    pub huge_pages: Option<bool>,
    pub verbs_signal: Option<String>,
    /// NICs that ranks of this machine take.
    pub nics: Result<NicSurvey, Error>,
    /// Variables with our prefix that no part of this version reads.
    pub unknown_variables: Vec<UnknownVariable>,
    pub library_path: Vec<PathBuf>,
    pub cuda: Result<Probe, DeviceError>,
}

impl Facts {
    pub fn of_this_process() -> Self {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let names = std::env::vars_os();
        Facts {
            usable_cores: sidelane_testkit::machines::cores(),
            locked_memory: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            huge_pages: sidelane::memory::huge_pages_granted(),
            verbs_signal: std::env::var("SIDELANE_VERBS_SIGNAL").ok(),
            nics: NicSurvey::here(),
            unknown_variables: unknown_variables(names.filter_map(|(name, _)| name.into_string().ok())),
            library_path: std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()).collect(),
            cuda: Driver::open().and_then(|driver| driver.probe()),
        }
    }
}

/// Reads small files of /sys, /proc, /etc and /dev. Missing and unreadable files count as absent.
pub struct Root(PathBuf);

impl Root {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Root(path.into())
    }

    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.join(path)).ok().map(|text| text.trim().to_owned())
    }

    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    pub fn numbered(&self, path: impl AsRef<Path>, prefix: &str) -> usize {
        let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
        self.list(path).iter().filter(|name| name.strip_prefix(prefix).is_some_and(is_number)).count()
    }

    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.join(path).exists()
    }
}

const USUAL: [&str; 6] = ["/usr/local/lib", "/usr/local/lib64", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

pub fn find_library(root: &Root, facts: &Facts, names: &[&str]) -> Option<PathBuf> {
    let paths =
        directories(root, facts).into_iter().flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    paths.into_iter().find(|path| root.has(path))
}

/// In the loader's order: the environment, the configuration, the usual places.
fn directories(root: &Root, facts: &Facts) -> Vec<PathBuf> {
    const CONFIGURED: &str = "/etc/ld.so.conf.d";
    let mut texts: Vec<String> = root.read("/etc/ld.so.conf").into_iter().collect();
    texts.extend(root.list(CONFIGURED).iter().filter_map(|name| root.read(format!("{CONFIGURED}/{name}"))));
    let configured = texts.iter().flat_map(|text| text.lines()).map(str::trim).filter(|l| l.starts_with('/'));
    facts.library_path.iter().cloned().chain(configured.chain(USUAL).map(PathBuf::from)).collect()
}
