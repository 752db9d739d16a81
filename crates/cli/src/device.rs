//! Common parts of all checks on a device: its memory, its clock, and NVIDIA's libraries.
//!
//! To be timed, work is enqueued behind a wait for the host, which lets it go when all of it is
//! there: what is timed is the device, not how fast the host enqueues. How fast that was is timed
//! beside it.
//!
//! Packages of Python (wheels) put NVIDIA's libraries where the loader does not look.
//!
//! ```text
//!   site-packages / nvidia / cublas, cuda_cupti, cu13 ... / lib / libcublas.so.12
//! ```
//!
//! `SIDELANE_SITE_PACKAGES` names such folders. Else they are those of the environment that is
//! active, and of `python3`.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::device::{
    Allocation, ByteSpan, Context, DeviceRange, Driver, Event, PinnedMemory, Priority, Reservation, Stream,
};
use sidelane::error::DeviceError;

use crate::error::{CliError, failed, wrong};

/// Variables that ranks and checks need unless they are set: kernels that are there before a stream
/// waits, and queues enough that ranks of one GPU do not wait behind each other.
pub const VARIABLES: [(&str, &str); 2] =
    [("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Those of some variables that are not set.
pub fn missing<'v>(variables: impl IntoIterator<Item = (&'v str, &'v str)>) -> Vec<(String, OsString)> {
    let missing = variables.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    missing.map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// Why no other process can use the device, if that is so.
pub fn one_process(driver: &Driver, device: u32) -> Result<Option<&'static str>, DeviceError> {
    const REASON: &str = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)";
    Ok((!driver.device(device)?.several_processes).then_some(REASON))
}

/// A stream of its own.
pub fn stream(context: &Arc<Context>) -> Result<Stream, DeviceError> {
    Stream::new(context, Priority::Normal)
}

/// New memory of the device.
pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<DeviceRange, DeviceError> {
    let allocation = Allocation::new(context, bytes)?;
    let reservation = Reservation::new(context, 1, allocation.bytes())?;
    reservation.map(0, &allocation, &[context.device()])?.part(0, bytes)
}

/// All of a range.
pub fn whole(range: &DeviceRange) -> Result<ByteSpan<'_>, DeviceError> {
    range.span(0, range.len())
}

/// What is in pinned memory.
pub fn content(memory: &PinnedMemory) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes to memory of the device, and waits until it is there.
pub fn write(stream: &Stream, to: &DeviceRange, bytes: &[u8]) -> Result<(), DeviceError> {
    let staging = PinnedMemory::new(stream.context(), bytes.len())?;
    staging.write(0, bytes)?;
    stream.copy(to.span(0, bytes.len() as u64)?, whole(staging.range())?)?;
    stream.synchronize()
}

/// Reads memory of the device, once the stream has come so far.
pub fn read(stream: &Stream, from: &DeviceRange, patience: Duration) -> Result<Vec<u8>, CliError> {
    let staging = PinnedMemory::new(stream.context(), from.len() as usize)?;
    stream.copy(whole(staging.range())?, whole(from)?)?;
    finish(stream, "a copy to the host", patience)?;
    Ok(content(&staging)?)
}

/// Waits until the stream is done, but not for ever.
pub fn finish(stream: &Stream, what: &str, patience: Duration) -> Result<(), CliError> {
    until(what, patience, || stream.is_done())
}

/// Waits for something, but not for ever.
pub fn until(
    what: &str,
    patience: Duration,
    mut done: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<(), CliError> {
    let start = Instant::now();
    while !done()? {
        let waited = start.elapsed();
        if waited > patience {
            return Err(failed!("{what} did not end within {waited:?}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Bytes that repeat with the seed alone.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_ne_bytes());
        words.take(len).collect()
    }
}

/// Compares bytes.
pub fn same(what: impl Display, seen: &[u8], expected: &[u8]) -> Result<(), CliError> {
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    let Some(at) = seen.iter().zip(expected).position(|(seen, expected)| seen != expected) else {
        return Ok(());
    };
    let (len, seen, expected) = (seen.len(), seen[at], expected[at]);
    Err(wrong!("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}"))
}

/// Compares numbers.
pub fn equal(what: impl Display, seen: u64, expected: u64) -> Result<(), CliError> {
    if seen == expected { Ok(()) } else { Err(wrong!("{what} is {seen} and must be {expected}")) }
}

/// A gate and two marks.
pub struct Timer {
    start: Event,
    end: Event,
    gate: PinnedMemory,
    opened: u32,
    patience: Duration,
}

/// Microseconds of one operation: on the device, and for the host that enqueued it.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub device: Vec<f64>,
    pub host: Vec<f64>,
}

impl Timer {
    pub fn new(context: &Arc<Context>, patience: Duration) -> Result<Self, DeviceError> {
        Ok(Timer {
            start: Event::timed(context)?,
            end: Event::timed(context)?,
            gate: PinnedMemory::new(context, 8)?,
            opened: 0,
            patience,
        })
    }

    /// Times `count` operations, enqueued by one call, again and again. The first time is for
    /// warming up.
    pub fn time(
        &mut self,
        stream: &Stream,
        (rounds, count): (usize, usize),
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<Samples, CliError> {
        let mut samples = Samples::default();
        for round in 0..=rounds {
            self.opened += 1;
            stream.wait::<u32>(self.gate.range().word(0)?, self.opened)?;
            self.start.record(stream)?;
            let before = Instant::now();
            let enqueued = enqueue();
            let host = before.elapsed();
            let marked = self.end.record(stream);
            // Whatever happened, the gate opens.
            self.gate.word(0)?.store(self.opened.into(), Ordering::Release);
            enqueued?;
            marked?;
            until("what is timed", self.patience, || self.end.is_done())?;
            if round > 0 {
                samples.device.push(per(self.end.since(&self.start)?, count));
                samples.host.push(per(host, count));
            }
        }
        // Nothing of it is left: what it used is let go.
        until("what is timed", self.patience, || stream.is_done())?;
        Ok(samples)
    }
}

fn per(time: Duration, count: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count.max(1) as f64
}

/// The variable with folders of packages, as `PATH` has its own.
const VARIABLE: &str = "SIDELANE_SITE_PACKAGES";

/// Variables that say where an environment of Python lies.
const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];

/// Where a wheel has its libraries.
const INSIDE: [&str; 2] = ["lib", "extras/CUPTI/lib64"];

/// Files of these names, in wheels, in the order of the names. With the fake driver only the
/// variable counts.
pub fn find_in_wheels(driver: &Driver, names: &[&str]) -> Vec<PathBuf> {
    among(&folders(driver.is_stand_in()), names)
}

/// Variable to set where a library is not found.
pub fn hint(variable: &str, wheel: &str) -> String {
    format!("set {variable} to its path, or {VARIABLE} to the folder of Python packages with {wheel}")
}

fn folders(stand_in: bool) -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|folders| !folders.is_empty()) {
        return std::env::split_paths(&named).collect();
    }
    if stand_in {
        return Vec::new();
    }
    let environments = ENVIRONMENTS.iter().filter_map(std::env::var_os).map(PathBuf::from);
    let mut all: Vec<PathBuf> = environments.flat_map(|home| packages_of(&home)).collect();
    all.extend(of_python());
    all
}

/// `lib/python3.*/site-packages` of an environment.
fn packages_of(home: &Path) -> Vec<PathBuf> {
    let versions = sorted(&home.join("lib")).into_iter();
    versions.map(|version| version.join("site-packages")).filter(|folder| folder.is_dir()).collect()
}

/// Where `python3` looks for packages, if there is one.
fn of_python() -> Vec<PathBuf> {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print(*filter(None, sys.path), sep='\\n')"]);
    let Ok(said) = python.stdin(Stdio::null()).stderr(Stdio::null()).output() else { return Vec::new() };
    String::from_utf8_lossy(&said.stdout).lines().map(PathBuf::from).collect()
}

fn among(folders: &[PathBuf], names: &[&str]) -> Vec<PathBuf> {
    let libraries: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| sorted(&folder.join("nvidia")))
        .flat_map(|wheel| INSIDE.map(|inside| wheel.join(inside)))
        .collect();
    let of = |name: &&str| libraries.iter().map(|folder| folder.join(name)).collect::<Vec<_>>();
    names.iter().flat_map(of).filter(|file| file.exists()).collect()
}

/// Entries of a folder by name; nothing if there is no folder.
fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_wheels_are_found_in_the_order_of_their_names() {
        let home = tempfile::tempdir().unwrap();
        let site = home.path().join("lib/python3.12/site-packages");
        let [old, new] = ["cublas/lib/libcublas.so.12", "cu13/lib/libcublas.so.13"]
            .map(|file| site.join("nvidia").join(file));
        for file in [&old, &new] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        let folders = packages_of(home.path());
        assert_eq!(folders, [site]);
        assert_eq!(among(&folders, &["libcublas.so.13", "libcublas.so.12"]), [new, old]);
        assert!(among(&folders, &["libcupti.so.12"]).is_empty());
        assert!(packages_of(&home.path().join("none")).is_empty());
    }
}
