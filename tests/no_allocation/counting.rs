//! Counts of allocations, of each thread and of those of the library.
#![allow(unsafe_code, reason = "an allocator cannot be written in safe Rust")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

/// The system's allocator, which counts for each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of the library's own threads.
static OF_LIBRARY: AtomicU64 = AtomicU64::new(0);

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
fn until_others_sleep() {
    let runs = |task: &str| {
        // The state stands behind the name, which is in parentheses.
        let (_, state) = task.rsplit_once(") ").unwrap();
        !state.starts_with('S')
    };
    let running = || {
        // A thread that has ended meanwhile has no line.
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let lines = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        lines.filter(|task| runs(task)).count()
    };
    while running() > 1 {
        std::thread::yield_now();
    }
}

fn count() {
    if is_of_library() {
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
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocations of the library's threads while all `ranks` do their rounds.
pub struct Library(Barrier, AtomicU64);

impl Library {
    pub fn new(ranks: usize) -> Self {
        Library(Barrier::new(ranks), AtomicU64::new(0))
    }

    /// The rounds of a rank, which begin and end with those of the others. All other threads sleep
    /// when they begin.
    pub fn during(&self, rounds: impl FnOnce()) -> u64 {
        let Library(barrier, before) = self;
        if barrier.wait().is_leader() {
            until_others_sleep();
            before.store(OF_LIBRARY.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        barrier.wait();
        rounds();
        barrier.wait();
        let during = OF_LIBRARY.load(Ordering::Relaxed) - before.load(Ordering::Relaxed);
        // What a rank does next, others do not count.
        barrier.wait();
        during
    }
}

#[test]
fn the_counter_counts() {
    let before = allocations();
    let held = std::hint::black_box(vec![1u8; 100]);
    assert_eq!(allocations() - before, 1);
    drop(held);
}

/// Only threads whose name says that they take part in calls count as the library's.
#[test]
fn the_counter_knows_the_threads_of_calls() {
    let _turn = turn();
    let counted = |name: &str| {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let allocate = || {
            let before = OF_LIBRARY.load(Ordering::Relaxed);
            drop(std::hint::black_box(vec![1u8; 100]));
            OF_LIBRARY.load(Ordering::Relaxed) - before
        };
        thread.spawn(allocate).unwrap().join().unwrap()
    };
    assert_eq!(
        ["sidelane-relay-0", "sidelane-link-0", "sidelane-coord-0", "main"].map(counted),
        [1, 0, 0, 0]
    );
}
