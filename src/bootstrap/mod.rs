//! Bootstrap: how the ranks of a job meet, agree, share descriptors, and detect that one is gone.
//!
//! ```text
//!   Identity (who am I: torchrun, SLURM, Open MPI, sidelane)      Secret      Timeouts
//!        └──────────────── connect ── or, for ranks that are threads: threads ─┘
//!                             │
//!                            Hub ── set, get, gather, barrier       a rendezvous, not a data path
//!                             ├──── health: one word, one cause     every wait of the library looks at it
//!                             ├──── cancel                          ends the world everywhere
//!                             ├──── rebuild                         the survivors, in the next epoch
//!                             └──── pass                            proves to other ranks, on any stream, who this one is
//!                 exchange_fds (hub, members)                       descriptors within one machine
//! ```
//!
//! Rank 0 hosts a coordinator; every rank keeps one connection to it, on which heartbeats run both
//! ways. A closed connection names its rank at once, a silent one within two seconds. No dispatch
//! depends on it: it serves to build worlds, to end them, and to rebuild them.
//!
//! `docs/environment.md` has a table of the variables.

// The module map: each folder knows only those below it, with two exceptions. A hub can be rebuilt,
// which is a rendezvous, and its coordinator keeps the listener of the rendezvous that made it.
//
//   descriptors   ranks of one machine, and how they pass descriptors to each other
//   rendezvous    first contact and rebuild: from processes to the members of a world
//   hub           a world while it lives: store, coordinator, link; or threads
//   watch         silent ranks, the launcher's life, the word of health, the clocks
//   wire          proofs, messages, frames, a connection that never blocks
//   identity      who this process is, and the job's secret
//   os            waiting for descriptors, errors of system calls

mod descriptors;
mod hub;
mod identity;
mod os;
mod rendezvous;
mod watch;
mod wire;

pub use descriptors::Location;
pub use identity::{Identity, Secret};
pub use watch::{Timeouts, interruptible};

// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use descriptors::exchange_fds;
#[doc(hidden)]
pub use hub::{Hub, threads};
#[doc(hidden)]
pub use identity::{Launcher, LauncherPipe};
#[doc(hidden)]
pub use rendezvous::{PeerAuth, PeerListener, connect};
#[doc(hidden)]
pub use watch::Health;

pub(crate) use watch::{has_interrupt_check, interrupted};
