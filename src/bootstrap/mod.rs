//! Bootstrap: how the ranks of a job meet, agree on things, share descriptors, and notice that one is gone.
//!
//! ```text
//!   Identity (who am I: torchrun, SLURM, Open MPI, sidelane)      Secret      Clocks
//!        └──────────────── connect ── or, for ranks that are threads: threads ─┘
//!                             │
//!                            Hub ── set, get, gather, barrier       a rendezvous, not a data path
//!                             ├──── health: one word, one cause     every wait of the library looks at it
//!                             ├──── cancel                          ends the world everywhere
//!                             └──── rebuild                         the survivors, in the next epoch
//!                 exchange_fds (hub, members)                       descriptors within one machine
//! ```
//!
//! Rank 0 hosts a coordinator; every rank keeps one connection to it, on which heartbeats run both ways. A
//! closed connection names its rank at once, a silent one within two seconds. Nothing here is on the path of a
//! dispatch: it serves to build worlds, to end them, and to build them again.
//!
//! | variable | meaning |
//! |---|---|
//! | `SIDELANE_SECRET`, `SIDELANE_SECRET_FILE` | the job's [`Secret`] |
//! | `SIDELANE_INSECURE=1` | do without one beyond loopback |
//! | `SIDELANE_PORT` | the one port of the rendezvous, instead of 16 candidates |
//! | `SIDELANE_JOB` | the job's name |
//! | `SIDELANE_NODE` | splits a machine into nodes ([`Location`]) |
//! | `SIDELANE_DEADLINE_MS`, `SIDELANE_RENDEZVOUS_MS` | two of the [`Clocks`] |
//! | `SIDELANE_LAUNCHER_FD`, `SIDELANE_LAUNCHER_PID` | a pipe whose end is the end of the launcher |

mod auth;
mod client;
mod clocks;
mod coordinator;
mod descriptors;
mod frame;
mod health;
mod identity;
mod join;
mod launcher;
mod link;
mod liveness;
mod lobby;
mod location;
mod message;
mod muster;
mod parts;
mod passing;
mod rebuild;
mod rendezvous;
mod secret;
mod slurm;
mod store;
mod threads;
mod wire;

use std::{sync::Arc, time::Duration};

pub use clocks::Clocks;
pub use descriptors::exchange_fds;
pub use health::Health;
pub use identity::{Identity, Launcher, LauncherPipe};
pub use location::Location;
pub use rendezvous::connect;
pub use secret::Secret;
pub use threads::threads;

use crate::error::{BootstrapError, Cause};

/// A rank's connection to its world.
///
/// Dropping a hub leaves in peace, which is no failure: only a step that needs the rank fails. A hub dropped by
/// an unwinding thread counts as lost.
pub trait Hub: Send + Sync {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks of this epoch.
    fn size(&self) -> u32;

    /// How often the world has been rebuilt.
    fn epoch(&self) -> u16;

    /// Sets a value that every rank can get.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError>;

    /// The value of a key, when it is set.
    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>, BootstrapError>;

    /// All-gather among `count` participants: number `index` contributes `blob`, all get all blobs in order of
    /// index. A key serves one step; the step succeeds for all its participants or fails for all, and is
    /// dropped then. Together the blobs must stay below 64 MiB.
    fn gather(
        &self,
        key: &str,
        index: u32,
        count: u32,
        blob: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError>;

    /// Returns when all `count` participants are here.
    fn barrier(&self, key: &str, index: u32, count: u32, deadline: Duration) -> Result<(), BootstrapError> {
        self.gather(key, index, count, &[], deadline).map(drop)
    }

    /// The health of this world. Whatever ends it ends every call of this hub at once.
    fn health(&self) -> &Arc<Health>;

    /// Ends the world on every rank with this cause.
    fn cancel(&self, cause: Cause);

    /// Meets the survivors in the next epoch. Returns its hub and, for each of its ranks, the rank in this one. A
    /// world that still lives is cancelled first. All survivors must call it; one that does not come within a
    /// short time after the others is left behind.
    fn rebuild(&self, deadline: Duration) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError>;

    /// Goes away without a goodbye, as a killed process does. For tests.
    #[doc(hidden)]
    fn abandon(self: Box<Self>);
}
