//! Worlds, groups, and the one-sided face.
//!
//! A [`World`] is all ranks of a job, as one of them sees it: their identity, which of them share
//! memory, its heap, its health. A [`Group`] is some of them in an order of their own; everything
//! collective is built on a group. A [`Window`] is memory that the ranks of a group write to each
//! other directly.
//!
//! ```text
//!   World::from_env / World::threads
//!      |  rendezvous, node map, heaps mapped, progress thread     (once per epoch)
//!      +-- group(&ranks)                                          (any number, interleaved)
//!             +-- window(len)       put, put_nbi, put_signal, signal, wait_until, quiet
//!             +-- ExpertParallel    dispatch, combine
//!   a rank is lost --> every wait ends with the cause --> rebuild --> a World of the survivors, next epoch
//! ```

mod device_window;
mod group;
mod net_selection;
mod setup;
mod window;

// For the program and the bindings of this repository: no promises are made about them.
#[doc(hidden)]
pub use crate::lane::{NicCounters, NoDmaBuf, NoGpuDirect, Registration};
#[doc(inline)]
pub use crate::memory::PoolReport;
pub use group::Group;
pub use net_selection::NetReport;
pub use setup::{Options, World};
pub use window::Window;

pub(crate) use device_window::{DeviceWindow, GpuDirectMemory, Growth, HostStaging, Member, WindowSizes};
pub(crate) use group::SymmetricRange;
pub(crate) use setup::WorldState;
