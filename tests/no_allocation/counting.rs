//! Counts of allocations, of each thread and of those of the library.
#![allow(unsafe_code, reason = "an allocator cannot be written in safe Rust")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The system's allocator, which counts for each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Parts of fake hardware that the thread is in.
    static IN_HARDWARE: Cell<u32> = const { Cell::new(0) };
}

/// As long as it lives, its thread plays hardware that is not there: that allocates nothing of the
/// library's.
pub struct InHardware(PhantomData<*const ()>);

impl InHardware {
    #[allow(dead_code, reason = "the fake driver has an allocator of its own")]
    pub fn begin() -> Self {
        IN_HARDWARE.set(IN_HARDWARE.get() + 1);
        InHardware(PhantomData)
    }
}

impl Drop for InHardware {
    fn drop(&mut self) {
        IN_HARDWARE.set(IN_HARDWARE.get() - 1);
    }
}

/// Allocations of the library's own threads, while they are watched: each asks the kernel for the
/// name of its thread.
pub static OF_LIBRARY: AtomicU64 = AtomicU64::new(0);
pub static WATCHED: AtomicBool = AtomicBool::new(false);

/// How long a rank waits for the others, and for threads to sleep: for ever if one has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whether this is a thread of the library that takes part in calls, by the name that the kernel
/// keeps. Those that keep a world alive have heartbeats of their own.
fn is_of_library() -> bool {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let keeps_alive = [&b"sidelane-link"[..], b"sidelane-coord"].iter().any(|of| name.starts_with(of));
    name.starts_with(b"sidelane-") && !keeps_alive
}

/// Waits until all threads but this one sleep. Rust's runtime allocates at the start of a thread,
/// when that has no name yet, and at its first wait for a message.
///
/// # Panics
/// If some still run when patience ends.
pub fn until_others_sleep(patience: Duration) {
    let runs = |task: &str| {
        // The state stands behind the name, which is in parentheses.
        let (_, state) = task.rsplit_once(") ").unwrap();
        !state.starts_with('S')
    };
    let running = || -> Vec<String> {
        // A thread that has ended meanwhile has no line.
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let lines = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        lines.filter(|task| runs(task)).collect()
    };
    let since = Instant::now();
    loop {
        let running = running();
        if running.len() <= 1 {
            return;
        }
        assert!(since.elapsed() < patience, "threads that do not sleep: {running:?}");
        std::thread::yield_now();
    }
}

fn count() {
    if IN_HARDWARE.try_with(Cell::get).is_ok_and(|parts| parts > 0) {
        return;
    }
    if WATCHED.load(Ordering::Relaxed) && is_of_library() {
        OF_LIBRARY.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is ending has no counter any more, and no test reads it.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

pub fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// Until it is dropped, no other test runs that has threads: they would be counted in this one.
#[allow(dead_code, reason = "tests in processes of their own take no turns")]
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where ranks wait for each other, but not for ever: one that has failed does not come.
pub struct Meeting {
    ranks: usize,
    /// Ranks that have come, and how often all have.
    here: Mutex<(usize, u64)>,
    all: Condvar,
}

impl Meeting {
    pub fn new(ranks: usize) -> Self {
        Meeting { ranks, here: Mutex::new((0, 0)), all: Condvar::new() }
    }

    /// Waits for all ranks. One of them leads, and comes last.
    ///
    /// # Panics
    /// If a rank does not come.
    pub fn wait(&self) -> bool {
        self.wait_for(PATIENCE)
    }

    pub fn wait_for(&self, patience: Duration) -> bool {
        let mut here = self.here.lock().unwrap();
        here.0 += 1;
        if here.0 == self.ranks {
            *here = (0, here.1 + 1);
            self.all.notify_all();
            return true;
        }
        let turn = here.1;
        let (_here, late) = self.all.wait_timeout_while(here, patience, |here| here.1 == turn).unwrap();
        assert!(!late.timed_out(), "a rank has not come");
        false
    }
}

/// Allocations of the library's threads while all `ranks` do their rounds.
pub struct Library(Meeting, AtomicU64);

impl Library {
    pub fn new(ranks: usize) -> Self {
        Library(Meeting::new(ranks), AtomicU64::new(0))
    }

    /// The rounds of a rank, which begin and end with those of the others. All other threads sleep
    /// when they begin.
    pub fn during(&self, rounds: impl FnOnce()) -> u64 {
        let Library(meeting, before) = self;
        if meeting.wait() {
            until_others_sleep(PATIENCE);
            before.store(OF_LIBRARY.load(Ordering::Relaxed), Ordering::Relaxed);
            WATCHED.store(true, Ordering::Relaxed);
        }
        meeting.wait();
        rounds();
        meeting.wait();
        let during = OF_LIBRARY.load(Ordering::Relaxed) - before.load(Ordering::Relaxed);
        // What a rank does next, others do not count.
        if meeting.wait() {
            WATCHED.store(false, Ordering::Relaxed);
        }
        during
    }
}
