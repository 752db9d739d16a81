//! Control groups, of either version: limits that hold for root, too.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::error::{About, Result};
use crate::leftovers;

/// Controllers that limit a fault's resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Threads and processes.
    Pids,
    /// Memory.
    Memory,
}

impl Controller {
    const fn name(self) -> &'static str {
        match self {
            Controller::Pids => "pids",
            Controller::Memory => "memory",
        }
    }
}

/// Where this machine has a controller, and the file of its limit.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
    limit: &'static str,
}

impl Hierarchy {
    /// The hierarchy of a controller, if this process may make groups in it.
    pub fn of(controller: Controller) -> Option<Hierarchy> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let found = mounts.lines().find_map(|line| Hierarchy::at(line, controller))?;
        let probe = found.root.join(group_name());
        fs::create_dir(&probe).ok()?;
        let is_limited = probe.join(found.limit).exists();
        fs::remove_dir(&probe).ok()?;
        is_limited.then_some(found)
    }

    /// The hierarchy at a line of `/proc/mounts`, if it has the controller.
    fn at(line: &str, controller: Controller) -> Option<Hierarchy> {
        let mut fields = line.split(' ').skip(1);
        let (root, kind, options) = (PathBuf::from(fields.next()?), fields.next()?, fields.next()?);
        let limit = match (kind, controller) {
            (_, Controller::Pids) => "pids.max",
            ("cgroup", Controller::Memory) => "memory.limit_in_bytes",
            (_, Controller::Memory) => "memory.max",
        };
        match kind {
            "cgroup" => {
                options.split(',').any(|name| name == controller.name()).then_some(Hierarchy { root, limit })
            }
            "cgroup2" => {
                let there = fs::read_to_string(root.join("cgroup.controllers")).ok()?;
                there.split_whitespace().find(|name| *name == controller.name())?;
                // Groups below have the controller only then; it may be on already.
                let _ = fs::write(root.join("cgroup.subtree_control"), format!("+{}", controller.name()));
                Some(Hierarchy { root, limit })
            }
            _ => None,
        }
    }
}

fn group_name() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}{count}", leftovers::prefix(GROUP, std::process::id()))
}

/// Folders of all groups of this program, of every run.
pub fn groups() -> Vec<PathBuf> {
    let roots = [Controller::Pids, Controller::Memory].map(Hierarchy::of);
    let entries = roots.into_iter().flatten().filter_map(|found| fs::read_dir(found.root).ok());
    let folders = entries.flatten().flatten().map(|entry| entry.path());
    let is_ours = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(GROUP);
    folders.filter(|folder| folder.file_name().is_some_and(is_ours)).collect()
}

/// How the names of groups begin.
pub const GROUP: &str = "sidelane-faults-";

/// A group with one process. Dropping it lets the process go.
#[derive(Debug)]
pub struct Group {
    root: PathBuf,
    own: PathBuf,
    process: Pid,
}

impl Group {
    /// Puts a process under a limit: from now on what it takes beyond what it has is counted in
    /// memory, and all that it has in threads.
    ///
    /// # Errors
    /// [`Error::File`](crate::error::Error::File).
    pub fn limit(hierarchy: &Hierarchy, process: Pid, limit: u64) -> Result<Group> {
        let own = hierarchy.root.join(group_name());
        let making = leftovers::making();
        fs::create_dir(&own).of_file(own.display().to_string())?;
        drop(making);
        let group = Group { root: hierarchy.root.clone(), own, process };
        write(&group.own.join(hierarchy.limit), limit)?;
        write(&group.own.join("cgroup.procs"), process.as_raw_nonzero())?;
        Ok(group)
    }
}

fn write(file: &Path, value: impl ToString) -> Result<()> {
    fs::write(file, value.to_string()).of_file(file.display().to_string())
}

/// A group of a process that was just killed takes a moment to be empty.
const EMPTY_WITHIN: Duration = Duration::from_secs(2);

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has ended is in no group.
        let _ = write(&self.root.join("cgroup.procs"), self.process.as_raw_nonzero());
        let until = Instant::now() + EMPTY_WITHIN;
        while fs::remove_dir(&self.own).is_err() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controller_of_the_first_version_is_an_option_of_its_mount() {
        let line = "cgroup /sys/fs/cgroup/cpu,pids cgroup rw,relatime,cpu,pids 0 0";
        let found = Hierarchy::at(line, Controller::Pids).unwrap();
        assert_eq!((found.root.to_str(), found.limit), (Some("/sys/fs/cgroup/cpu,pids"), "pids.max"));
        assert!(Hierarchy::at(line, Controller::Memory).is_none());
        assert!(Hierarchy::at("tmpfs /sys/fs/cgroup tmpfs rw,pids 0 0", Controller::Pids).is_none());
    }
}
