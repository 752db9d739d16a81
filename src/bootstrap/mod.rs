//! Bootstrap: how the ranks of a job meet, agree, share descriptors, and detect that one is gone.
//!
//! ```text
//!   Identity (who am I: torchrun, SLURM, Open MPI, sidelane)      Secret      Timeouts
//!        └──────────────── connect ── or, for ranks that are threads: threads ─┘
//!                             │
//!                            Hub ── set, get, gather, exchange      a rendezvous, not a data path
//!                             ├──── health: one word, one cause     every wait of the library looks at it
//!                             ├──── cancel                          ends the world everywhere
//!                             ├──── rebuild                         the survivors, in a later epoch
//!                             ├──── grow                            with spares, in a later epoch
//!                             └──── pass                            proves to other ranks, on any stream, who this one is
//!                 exchange_fds (hub, members)                       descriptors within one machine
//! ```
//!
//! Rank 0 hosts a coordinator; every rank keeps one connection to it, on which heartbeats run both
//! ways. A closed connection names its rank at once, a silent one within two seconds. No dispatch
//! depends on it: it serves to build worlds, to end them, and to rebuild them.
//!
//! `docs/environment.md` has a table of the variables.
//!
//! Each module knows only those below it, with two exceptions. A hub can be rebuilt, which is a
//! rendezvous, and its coordinator keeps the listener of the rendezvous that made it.
//!
//! ```text
//!   descriptors   ranks of one machine, and how they pass descriptors to each other
//!   notice        what they tell each other before
//!   rendezvous    first contact and rebuild: from processes to the members of a world
//!   hub           a world while it lives: store, coordinator, client; or threads
//!   threads       threads of the library, the deaths of which end the world
//!   wait          what blocks a thread: bounded sleeps, the network, ends of threads
//!   health        silent ranks, the launcher's life, the health of the world, timeouts
//!   connection          proofs, messages, frames, a connection that never blocks
//!   identity      this process as its launcher describes it
//!   secret        what the ranks of a job prove to know
//! ```

mod file_descriptors;
mod health;
mod hub;
mod identity;
mod notice;
mod rendezvous;
mod secret;
mod threads;
pub(crate) mod wait;
mod wire;

use std::io;

use rustix::io::Errno;

pub(crate) use health::interrupted;
pub use health::{Timeouts, interruptible};
pub use identity::Identity;
pub use secret::Secret;
#[cfg(test)]
pub(crate) use threads::locks;
pub(crate) use threads::{FatalGuard, FatalLock, Thread, caught, count_lock, spawn_scoped, turn};

use crate::error::BootstrapError;

// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use file_descriptors::{Location, exchange_fds};
#[doc(hidden)]
pub use health::Health;
#[doc(hidden)]
pub use hub::{Hub, threads};
#[doc(hidden)]
pub use identity::{Launcher, LauncherPipe};
#[doc(hidden)]
pub use rendezvous::{Growth, PeerAuth, PeerListener, connect, spare};
#[doc(hidden)]
pub use threads::fault::panic_in;
#[doc(hidden)]
pub use wire::Setting;

/// The error of a system call.
fn system(call: &'static str, errno: Errno) -> BootstrapError {
    BootstrapError::System { call, errno: errno.raw_os_error() }
}

/// The error of a call of the standard library.
fn failed(call: &'static str, error: &io::Error) -> BootstrapError {
    BootstrapError::System { call, errno: error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()) }
}
