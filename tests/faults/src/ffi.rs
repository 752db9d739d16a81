//! System calls that have no safe wrapper.
#![allow(unsafe_code, reason = "each function wraps one system call")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::process::Pid;

/// The signal of a storm.
const STORM: i32 = libc::SIGUSR1;

extern "C" fn nothing(_: i32) {}

/// From now on signals of a storm interrupt system calls of this process, and do nothing else: they
/// are handled, and calls are not restarted.
pub fn let_signals_interrupt() -> io::Result<()> {
    // SAFETY: all bytes 0 are a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32) = nothing;
    action.sa_sigaction = handler as usize;
    // SAFETY: the action is valid, its handler touches nothing, and the old one is not asked for.
    succeed(unsafe { libc::sigaction(STORM, &action, std::ptr::null_mut()) })
}

/// Keeps the signals that end a program from this thread and all that it starts: one thread takes
/// them with [`await_end_signal`].
pub fn block_end_signals() -> io::Result<()> {
    // SAFETY: the set is a valid one of this function's, and the old mask is not asked for.
    let failed = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &end_signals(), std::ptr::null_mut()) };
    if failed == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(failed)) }
}

/// Waits for a signal that ends a program. Returns its number.
pub fn await_end_signal() -> io::Result<i32> {
    let mut signal = 0;
    // SAFETY: set and number live during the call.
    let failed = unsafe { libc::sigwait(&end_signals(), &mut signal) };
    if failed == 0 { Ok(signal) } else { Err(io::Error::from_raw_os_error(failed)) }
}

/// Those of Ctrl-C, of `kill`, and of a terminal that is closed.
fn end_signals() -> libc::sigset_t {
    // SAFETY: all bytes 0 are memory for a set, which is emptied before it is used.
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives during the call.
    unsafe { libc::sigemptyset(&mut signals) };
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the set lives during the call, and the signal exists.
        unsafe { libc::sigaddset(&mut signals, signal) };
    }
    signals
}

/// Sends a signal of a storm to one thread of a process.
pub fn interrupt(process: Pid, thread: Pid) -> io::Result<()> {
    let (process, thread) = (process.as_raw_nonzero().get(), thread.as_raw_nonzero().get());
    // SAFETY: takes numbers and touches no memory of this process.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, STORM) };
    succeed(if sent == 0 { 0 } else { -1 })
}

/// Makes an open `/dev/net/tun` the Ethernet device of this name, in the network namespace of this
/// thread.
pub fn attach_tap(tun: &File, name: &str) -> io::Result<()> {
    // SAFETY: all bytes 0 are a valid `ifreq`: an empty name, no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(name.as_bytes()).take(libc::IFNAMSIZ - 1) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes an `ifreq`, which lives during the call.
    succeed(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &mut request) })
}

fn succeed(returned: i32) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
