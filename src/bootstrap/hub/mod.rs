//! The hub: messages between the ranks of a world during its life.
//!
//! ```text
//!   Hub ─┬─ client (TcpHub) ── link ═══ TCP ═══ admission, coordinator ── kv_store   ranks that are processes
//!        └─ in_process ─────────────────────────────────────────────────────┘        ranks that are threads of one
//! ```
//!
//! The store makes all decisions and knows neither sockets nor time, so both kinds of world behave
//! alike.

mod client;
mod coordinator;
mod in_process;
mod kv_store;

use std::sync::Arc;
use std::time::Duration;

pub(super) use client::{HOST, Job, TcpHub};
pub(super) use coordinator::{GatheringKind, HubConfig, coordinate};
pub use in_process::threads;

use crate::bootstrap::health::Health;
use crate::bootstrap::rendezvous::{Growth, PeerAuth};
use crate::bootstrap::wire::Setting;
use crate::error::{BootstrapError, Cause};

/// A rank's connection to its world.
///
/// Dropping a hub is a clean leave, not a failure: only steps that need the rank fail. A hub
/// dropped by an unwinding thread counts as lost.
pub trait Hub: Send + Sync {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks of this epoch.
    fn size(&self) -> u32;

    /// The number of this world of the job: 0 at first, higher after each rebuild.
    fn epoch(&self) -> u16;

    /// Sets a value that every rank can get.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError>;

    /// The value of a key, when it is set.
    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>, BootstrapError>;

    /// All-gather among `count` participants: number `index` contributes `blob`, all get all blobs
    /// in order of index. A key serves one step; the step succeeds for all its participants or
    /// fails for all, and is dropped then. Together the blobs must stay below 64 MiB.
    fn gather(
        &self,
        key: &str,
        index: u32,
        count: u32,
        blob: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError>;

    /// All-to-all among participants: number `index` has a blob for each of them, itself included,
    /// and gets the blobs of all that are meant for it, in order of index. Otherwise as
    /// [`Hub::gather`].
    fn exchange(
        &self,
        key: &str,
        index: u32,
        blobs: Vec<Vec<u8>>,
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

    /// Meets the survivors in a later epoch, in a world of at least so many ranks. Returns its hub
    /// and, for each of its ranks, the rank in this one. A live world is cancelled first. All
    /// survivors must call it; one that does not come within a short time after the others is left
    /// behind. If ranks are lost before the new world is of use, call it again.
    fn rebuild(&self, deadline: Duration, at_least: u32) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError>;

    /// Meets the spares that ask within a deadline and have these settings, in a later epoch. All
    /// ranks must call it, and complete the growth. Without a spare this world stays as it is.
    ///
    /// # Errors
    /// [`BootstrapError::NoSpare`]; [`BootstrapError::NoPort`] at rank 0; the cause that ends this
    /// world.
    fn grow(&self, deadline: Duration, settings: &[Setting]) -> Result<Growth<'_>, BootstrapError>;

    /// Credentials that this rank shows to others of its world on streams of their own.
    ///
    /// # Errors
    /// [`BootstrapError::System`] if there is no source of randomness for a secret.
    fn pass(&self) -> Result<PeerAuth, BootstrapError>;

    /// Goes away without a goodbye, as a killed process does. For tests.
    #[doc(hidden)]
    fn abandon(self: Box<Self>);
}
