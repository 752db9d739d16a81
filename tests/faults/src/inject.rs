//! Faults: each is made from outside of the rank that it strikes, and lifted again.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, geteuid, getrlimit, kill_process, prlimit};

use crate::cell::Fault;
use crate::cgroup::{Controller, Group, Hierarchy};
use crate::error::{About, Error, Result};
use crate::ffi;
use crate::wire::{self, Trouble, Wire};

/// Bytes that a rank under the memory limit may still take.
const MEMORY: u64 = 512 << 10;
/// Time between two signals of a storm to each thread.
const GUST: Duration = Duration::from_micros(500);

/// What this machine offers to faults.
#[derive(Debug)]
pub struct Machine {
    /// Whether it has a NIC.
    pub has_nic: bool,
    /// Why it has no network of namespaces.
    no_wire: Option<String>,
    pids: Option<Hierarchy>,
    memory: Option<Hierarchy>,
}

impl Machine {
    /// This machine.
    pub fn probe() -> Machine {
        let no_wire = match geteuid().is_root() {
            true => wire::probe().err().map(|error| error.to_string()),
            false => Some("network namespaces need root".to_owned()),
        };
        let has_nic = fs::read_dir("/sys/class/infiniband").is_ok_and(|mut nics| nics.next().is_some());
        let [pids, memory] = [Controller::Pids, Controller::Memory].map(Hierarchy::of);
        Machine { has_nic, no_wire, pids, memory }
    }

    /// Why a fault cannot be made here.
    pub fn why_not(&self, fault: Fault) -> Option<String> {
        let missing = match fault {
            Fault::NoThread if self.pids.is_none() => "no writable cgroup with the controller pids",
            Fault::Memory if self.memory.is_none() => "no writable cgroup with the controller memory",
            fault if fault.is_of_wire() => return self.no_wire.clone(),
            _ => return None,
        };
        Some(missing.to_owned())
    }
}

/// A fault that lasts until it is lifted.
#[derive(Debug)]
pub enum Active {
    /// The process has ended.
    Killed,
    /// The process stands still.
    Stopped(Pid),
    /// The process has a limit, and had this one before.
    Limited(Pid, Rlimit),
    /// The process is in a group with a limit.
    Grouped(Group),
    /// Signals come.
    Storming(Storm),
    /// The wire is bad.
    Wired(Arc<Wire>),
}

impl Active {
    /// Makes a fault, of this process or of this wire.
    ///
    /// # Errors
    /// [`Error`], where the kernel refuses.
    pub fn strike(fault: Fault, victim: Pid, machine: &Machine, wire: Option<&Arc<Wire>>) -> Result<Active> {
        match (fault, wire) {
            (Fault::Sigkill, _) => {
                kill_process(victim, Signal::KILL).of_call("kill")?;
                Ok(Active::Killed)
            }
            (Fault::Sigstop, _) => {
                kill_process(victim, Signal::STOP).of_call("kill")?;
                Ok(Active::Stopped(victim))
            }
            (Fault::Emfile, _) => {
                let open = entries(victim, "fd")?.len() as u64;
                // The victim has inherited this program's other limit.
                let limit = Rlimit { current: Some(open), ..getrlimit(Resource::Nofile) };
                let before = prlimit(Some(victim), Resource::Nofile, limit).of_call("prlimit")?;
                Ok(Active::Limited(victim, before))
            }
            (Fault::NoThread, _) => {
                let threads = entries(victim, "task")?.len() as u64;
                group(&machine.pids, victim, threads)
            }
            (Fault::Memory, _) => group(&machine.memory, victim, MEMORY),
            (Fault::Eintr, _) => Ok(Active::Storming(Storm::of(victim))),
            (_, Some(wire)) => {
                wire.set(Trouble::of(fault));
                Ok(Active::Wired(Arc::clone(wire)))
            }
            (_, None) => Err(Error::NotReady { what: format!("no wire for {}", fault.name()) }),
        }
    }

    /// Ends the fault. What has ended stays so.
    ///
    /// # Errors
    /// [`Error`], where the kernel refuses.
    pub fn lift(self) -> Result<()> {
        match self {
            Active::Killed => Ok(()),
            Active::Grouped(group) => {
                drop(group);
                Ok(())
            }
            Active::Storming(storm) => {
                drop(storm);
                Ok(())
            }
            Active::Stopped(victim) => kill_process(victim, Signal::CONT).of_call("kill"),
            // A process that has ended has no limits.
            Active::Limited(victim, before) => {
                let _ = prlimit(Some(victim), Resource::Nofile, before);
                Ok(())
            }
            Active::Wired(wire) => {
                wire.set(Trouble::default());
                Ok(())
            }
        }
    }
}

fn group(hierarchy: &Option<Hierarchy>, victim: Pid, limit: u64) -> Result<Active> {
    let hierarchy =
        hierarchy.as_ref().ok_or_else(|| Error::NotReady { what: "no control group".to_owned() })?;
    Group::limit(hierarchy, victim, limit).map(Active::Grouped)
}

/// Numbers of a process's descriptors or threads.
///
/// # Errors
/// [`Error::File`] for a process that has ended.
pub fn entries(process: Pid, what: &str) -> Result<Vec<i32>> {
    let folder = format!("/proc/{}/{what}", process.as_raw_nonzero());
    let entries = fs::read_dir(&folder).of_file(folder)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Signals to all threads of a process. Dropping it ends them.
#[derive(Debug)]
pub struct Storm {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Storm {
    fn of(victim: Pid) -> Storm {
        let over = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&over);
        let thread = thread::spawn(move || {
            while !heard.load(Ordering::Acquire) {
                // Threads come and go, and the process may end.
                for thread in entries(victim, "task").unwrap_or_default() {
                    let _ = Pid::from_raw(thread).map(|thread| ffi::interrupt(victim, thread));
                }
                thread::sleep(GUST);
            }
        });
        Storm { over, thread: Some(thread) }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
