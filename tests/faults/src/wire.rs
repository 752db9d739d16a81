//! A wire between two machines that are network namespaces. This program carries each frame from
//! one to the other: it needs nothing of the kernel but TAP devices, and is bad on request.
//!
//! ```text
//!   namespace 0                    this program                      namespace 1
//!   10.79.0.1  device "wire" ══ frame ─► lost? late? twice? ─► frame ══ device "wire"  10.79.0.2
//! ```
//!
//! Frames of one direction stay in order, as on a cable.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::cell::Fault;
use crate::error::{About, Error, Result};
use crate::{ffi, leftovers};

/// Device of a machine.
const DEVICE: &str = "wire";
const TUN: &str = "/dev/net/tun";
/// How the names of namespaces begin.
pub const NAMESPACE: &str = "faults";
/// The longest time without a look whether the wire is taken down.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of a frame.
const FRAME: usize = 2048;

/// How bad a wire is. A whole one has neither.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trouble {
    /// Share of frames that are lost.
    loss: f64,
    /// Share of the others that come twice.
    twice: f64,
    /// Time that each takes, and up to as much again.
    delay: Duration,
}

impl Trouble {
    /// The trouble of a fault.
    pub fn of(fault: Fault) -> Trouble {
        let whole = Trouble::default();
        match fault {
            Fault::Loss => Trouble { loss: 0.02, ..whole },
            Fault::Delay => Trouble { delay: Duration::from_millis(5), ..whole },
            Fault::Duplicate => Trouble { twice: 0.2, ..whole },
            Fault::Partition => Trouble { loss: 1.0, ..whole },
            _ => whole,
        }
    }
}

/// Frames so far.
#[derive(Debug, Default)]
struct Counts {
    carried: AtomicU64,
    lost: AtomicU64,
    twice: AtomicU64,
}

/// Two machines and the wire between them. Dropping it takes them down.
#[derive(Debug)]
pub struct Wire {
    name: String,
    trouble: Arc<Mutex<Trouble>>,
    counts: Arc<Counts>,
    over: Arc<AtomicBool>,
    carrier: Option<JoinHandle<()>>,
}

/// Fails where root lacks what a wire needs.
///
/// # Errors
/// [`Error::Tool`], [`Error::File`].
pub fn probe() -> Result<()> {
    ip("netns list")?;
    OpenOptions::new().read(true).write(true).open(TUN).of_file(TUN).map(drop)
}

impl Wire {
    /// Two machines. The seed is that of lost and doubled frames.
    ///
    /// # Errors
    /// [`Error`], where the kernel refuses a part.
    pub fn new(seed: u64) -> Result<Wire> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{count}", leftovers::prefix(NAMESPACE, std::process::id()));
        let mut wire = Wire {
            name,
            trouble: Arc::default(),
            counts: Arc::default(),
            over: Arc::default(),
            carrier: None,
        };
        let ends = [wire.plug(0)?, wire.plug(1)?];
        let carrier = Carrier {
            ends,
            queues: [VecDeque::new(), VecDeque::new()],
            trouble: Arc::clone(&wire.trouble),
            counts: Arc::clone(&wire.counts),
            over: Arc::clone(&wire.over),
            rng: ChaCha8Rng::seed_from_u64(seed),
        };
        wire.carrier =
            Some(thread::Builder::new().name("wire".to_owned()).spawn(|| carrier.carry()).of_call("clone")?);
        Ok(wire)
    }

    /// Address of a machine.
    pub fn address(machine: u32) -> String {
        format!("10.79.0.{}", machine + 1)
    }

    /// A program that will run on a machine.
    pub fn run(&self, machine: u32, program: &Path) -> Command {
        let mut ip = Command::new("ip");
        ip.args(["netns", "exec", &self.namespace(machine)]).arg(program);
        ip
    }

    /// From now on the wire is as bad as this.
    pub fn set(&self, trouble: Trouble) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Frames so far, in words.
    pub fn counts(&self) -> String {
        let [carried, lost, twice] = [&self.counts.carried, &self.counts.lost, &self.counts.twice]
            .map(|count| count.load(Ordering::Relaxed));
        format!("{carried} packets carried, {lost} lost, {twice} twice")
    }

    fn namespace(&self, machine: u32) -> String {
        format!("{}-{machine}", self.name)
    }

    /// Makes a machine and its device. The device lives as long as the file.
    fn plug(&self, machine: u32) -> Result<File> {
        let namespace = self.namespace(machine);
        let making = leftovers::making();
        ip(&format!("netns add {namespace}"))?;
        drop(making);
        ip(&format!("-n {namespace} link set lo up"))?;
        let path = format!("/run/netns/{namespace}");
        let inside = File::open(&path).of_file(path)?;
        // A thread of its own: it stays in the namespace.
        let opened = thread::spawn(move || open_tap(&inside)).join().expect("it does not panic")?;
        ip(&format!("-n {namespace} addr add {}/24 dev {DEVICE}", Wire::address(machine)))?;
        ip(&format!("-n {namespace} link set {DEVICE} up"))?;
        Ok(opened)
    }
}

fn open_tap(namespace: &File) -> Result<File> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).of_call("setns")?;
    let flags = libc::O_NONBLOCK;
    let tun = OpenOptions::new().read(true).write(true).custom_flags(flags).open(TUN).of_file(TUN)?;
    ffi::attach_tap(&tun, DEVICE).of_call("ioctl(TUNSETIFF)")?;
    Ok(tun)
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let _ = self.carrier.take().map(JoinHandle::join);
        for machine in 0..2 {
            remove(&self.namespace(machine));
        }
    }
}

/// A frame that is on its way.
struct Frame {
    due: Instant,
    bytes: Vec<u8>,
}

/// The thread that carries frames.
struct Carrier {
    ends: [File; 2],
    /// Frames from each end to the other.
    queues: [VecDeque<Frame>; 2],
    trouble: Arc<Mutex<Trouble>>,
    counts: Arc<Counts>,
    over: Arc<AtomicBool>,
    rng: ChaCha8Rng,
}

impl Carrier {
    fn carry(mut self) {
        while !self.over.load(Ordering::Acquire) {
            let first = self.queues.iter().filter_map(|queue| queue.front()).map(|frame| frame.due).min();
            let left = first.map_or(LOOK, |due| due.saturating_duration_since(Instant::now()).min(LOOK));
            let limit = Timespec { tv_sec: 0, tv_nsec: left.as_nanos() as _ };
            let mut fds = self.ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
            // A signal counts as a look.
            let _ = poll(&mut fds, Some(&limit));
            for from in 0..2 {
                self.take(from);
                self.deliver(from);
            }
        }
    }

    /// Takes what an end has sent.
    fn take(&mut self, from: usize) {
        let trouble = *self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let mut frame = [0; FRAME];
        while let Ok(len) = (&self.ends[from]).read(&mut frame) {
            if self.rng.random::<f64>() < trouble.loss {
                self.counts.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let late = Instant::now() + trouble.delay.mul_f64(1.0 + self.rng.random::<f64>());
            let last = self.queues[from].back().map_or(late, |last| last.due);
            let frame = || Frame { due: late.max(last), bytes: frame[..len].to_vec() };
            self.queues[from].push_back(frame());
            if self.rng.random::<f64>() < trouble.twice {
                self.counts.twice.fetch_add(1, Ordering::Relaxed);
                self.queues[from].push_back(frame());
            }
        }
    }

    /// Gives the other end what is due.
    fn deliver(&mut self, from: usize) {
        let now = Instant::now();
        while let Some(frame) = self.queues[from].front().filter(|frame| frame.due <= now) {
            match (&self.ends[1 - from]).write(&frame.bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // A device that is down takes none, as a cable that is not plugged in.
                _ => self.counts.carried.fetch_add(1, Ordering::Relaxed),
            };
            self.queues[from].pop_front();
        }
    }
}

/// Names of all namespaces of this machine.
pub fn namespaces() -> Vec<String> {
    let listed = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    listed.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Removes a namespace. One that was never made is not there.
pub fn remove(namespace: &str) {
    let _ = ip(&format!("netns del {namespace}"));
}

/// Runs `ip` with these words.
fn ip(words: &str) -> Result<()> {
    let done = Command::new("ip").args(words.split(' ')).output();
    let done = done.map_err(|source| Error::Tool { program: "ip", package: "iproute2", source })?;
    if done.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    Err(Error::Failed { line: format!("ip {words}"), stderr })
}
