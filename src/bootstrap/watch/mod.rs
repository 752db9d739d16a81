//! Watching: whether all ranks are alive, and the cause of the world's failure if one is not.
//!
//! ```text
//!   a peer falls silent    liveness ┐
//!   the launcher is gone   launcher ┼──►  health    one word that every wait looks at, one cause
//!   a connection ends        (link) ┘
//!   how long is too long     clocks
//!   the user has had enough  interrupt
//! ```

mod clocks;
mod health;
mod interrupt;
mod launcher;
mod liveness;

pub use clocks::Timeouts;
pub use health::Health;
pub(super) use health::lock;
pub use interrupt::interruptible;
pub(crate) use interrupt::{has_interrupt_check, interrupted};
pub(super) use launcher::LauncherWatch;
pub(super) use liveness::Liveness;
