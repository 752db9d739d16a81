//! What a run has in the kernel, and what outlives it: namespaces and control groups. A run that a
//! signal ends removes its own, and each run removes those of runs that were killed.
//!
//! ```text
//!   faults1234-0-1            namespace 1 of the first wire of process 1234
//!   sidelane-faults-1234-5    a control group of that process
//! ```

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fs, process, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{About, Result};
use crate::{cgroup, ffi, wire};

/// The first part of the names of a process.
pub fn prefix(kind: &str, process: u32) -> String {
    format!("{kind}{process}-")
}

/// The process of a name.
fn owner(kind: &str, name: &str) -> Option<u32> {
    name.strip_prefix(kind)?.split_once('-')?.0.parse().ok()
}

/// Removes what runs have left that were killed.
pub fn remove_of_dead_runs() {
    remove_of(|process| !Path::new("/proc").join(process.to_string()).exists());
}

/// Has this process remove what it has in the kernel when a signal ends it. Threads that have
/// started by now get such signals themselves.
///
/// # Errors
/// [`Error::System`](crate::error::Error::System).
pub fn remove_on_signals() -> Result<()> {
    ffi::block_end_signals().of_call("pthread_sigmask")?;
    let waits = || {
        let signal = ffi::await_end_signal().unwrap_or_default();
        // Held until the end: nothing is made any more.
        let _making = making();
        end_children();
        remove_of(|process| process == process::id());
        // As a shell reports a program that a signal has ended.
        process::exit(128 + signal);
    };
    thread::Builder::new().name("signals".to_owned()).spawn(waits).of_call("clone").map(drop)
}

/// Held while something is made that must not outlive this process.
pub fn making() -> MutexGuard<'static, ()> {
    static MAKING: Mutex<()> = Mutex::new(());
    MAKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the ranks that this process has started. A stopped one dies of this, too.
fn end_children() {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    for thread in threads {
        // A thread may end meanwhile; a kernel may have no such file.
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|child| Pid::from_raw(child.parse().ok()?)) {
            let _ = kill_process(child, Signal::KILL);
        }
    }
}

/// Removes what processes have that this holds for.
fn remove_of(is_one: impl Fn(u32) -> bool) {
    for name in wire::namespaces() {
        if owner(wire::NAMESPACE, &name).is_some_and(&is_one) {
            wire::remove(&name);
        }
    }
    for folder in cgroup::groups() {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if owner(cgroup::GROUP, &name).is_some_and(&is_one) {
            // One with a process in it stays for the next run.
            let _ = fs::remove_dir(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_leftover_tells_its_process() {
        let named = format!("{}0-1", prefix(wire::NAMESPACE, 1234));
        assert_eq!(owner(wire::NAMESPACE, &named), Some(1234));
        assert_eq!(owner(cgroup::GROUP, &format!("{}5", prefix(cgroup::GROUP, 7))), Some(7));
        assert_eq!(owner(wire::NAMESPACE, "faults"), None);
        assert_eq!(owner(wire::NAMESPACE, "other7-0"), None);
    }
}
