//! Waits for words that devices write. Nothing wakes a thread for them, so it polls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Lanes;
use super::wait::{WaitError, WaitLimits, Waiter};
use crate::error::{Error, LaneError};
use crate::schedule::Flag;

/// Name of the lane, for reports and errors.
pub const COPY_ENGINE: &str = "copy engine";

impl Lanes {
    /// Waits until a word here that a device of rank `from` writes has at least `value`; `look` is
    /// called between looks, and may end the wait. Connections are served meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Deadline`], the world's [`Cause`](crate::error::Cause), or an error of `look`.
    pub fn wait_for_word(
        &self,
        word: &AtomicU64,
        value: u64,
        (from, flag): (u32, Flag),
        look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.outlast(word, value, (from, flag), self.patience(from), look)
    }

    /// Waits until this rank's own stream has set a word here; `look` as above. There is no
    /// deadline: the caller's own work may come first.
    ///
    /// # Errors
    /// The world's [`Cause`](crate::error::Cause), an interruption, or an error of `look`.
    pub fn wait_for_stream(
        &self,
        word: &AtomicU64,
        look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let patience = WaitLimits { deadline: Duration::MAX, ..self.patience(self.rank) };
        self.outlast(word, 1, (self.rank, Flag::Ready), patience, look)
    }

    fn outlast(
        &self,
        word: &AtomicU64,
        value: u64,
        (from, flag): (u32, Flag),
        patience: WaitLimits<'_>,
        mut look: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut waiter = Waiter::new(WaitLimits { silent: true, ..patience });
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            look()?;
            self.progress();
            waiter.turn(std::thread::sleep).map_err(|why| match why {
                WaitError::Dead(cause) => Error::from(cause),
                WaitError::Asked => LaneError::Interrupted { rank: self.rank, peer: from }.into(),
                WaitError::Late { waited } => {
                    let (rank, lane, flag) = (self.rank, COPY_ENGINE, flag as u32);
                    LaneError::Deadline { rank, peer: from, lane, flag, awaited: value, seen, waited }.into()
                }
            })?;
        }
    }
}
