//! Waits of a port: for a flag, for sources that are free, for bytes that have landed.

use std::time::Duration;

use super::net::{NetConnection, SendBlocked};
use super::port::Port;
use super::wait::{self, SLEEP_INTERVAL, WaitError, WaitLimits, Waiter};
use super::{FlagLine, PeerLane};
use crate::bootstrap::Health;
use crate::error::{Error, LaneError};
use crate::rows::RowKernels;
use crate::schedule::Flag;

impl Port {
    /// Waits until the flag here that speaks of `from` has at least `value`. Receives from the
    /// rails meanwhile.
    ///
    /// # Errors
    /// [`LaneError::Deadline`], or the world's [`Cause`](crate::error::Cause).
    #[inline(always)]
    pub fn wait(&self, from: u32, flag: Flag, value: u64) -> Result<(), Error> {
        let reach = self.reach(from)?;
        let line = self.flag(from, flag)?;
        match wait::poll_once(line, value, self.lanes.crowded) {
            true => Ok(()),
            false => self.outlast(line, (from, flag), value, reach.name()),
        }
    }

    #[cold]
    fn outlast(
        &self,
        line: FlagLine<'_>,
        (from, flag): (u32, Flag),
        value: u64,
        lane: &'static str,
    ) -> Result<(), Error> {
        let patience = self.lanes.patience_for(from, flag);
        wait::wait_slow(line, value, patience, || self.lanes.progress()).map_err(|(seen, why)| match why {
            WaitError::Dead(cause) => self.lanes.fault().map_or(cause.into(), Error::from),
            WaitError::Asked => {
                LaneError::Interrupted { rank: self.lanes.rank, peer: self.lanes.writer_of(from) }.into()
            }
            WaitError::Late { waited } => LaneError::Deadline {
                rank: self.lanes.rank,
                peer: self.lanes.writer_of(from),
                lane,
                flag: flag as u32,
                awaited: value,
                seen,
                waited,
            }
            .into(),
        })
    }

    /// Returns when everything put or signalled so far has landed. On a node it has when the put
    /// returns.
    ///
    /// # Errors
    /// [`LaneError::Deadline`] if a peer takes nothing, or the world's cause.
    pub fn quiet(&self) -> Result<(), Error> {
        RowKernels::fence();
        for (reach, to) in self.lanes.reach.iter().zip(0..) {
            if let PeerLane::Rail(rail) = reach {
                rail.flush(self.lanes.patience(to)).map_err(|e| self.stuck(rail.as_ref(), to, e))?;
            }
        }
        Ok(())
    }

    /// Returns when nothing that was put so far is read here any more: its sources may be changed.
    ///
    /// # Errors
    /// As [`Port::quiet`].
    pub fn settle(&self) -> Result<(), Error> {
        self.attend();
        for (reach, to) in self.lanes.reach.iter().zip(0..) {
            if let PeerLane::Rail(rail) = reach {
                rail.settle(self.lanes.patience(to)).map_err(|e| self.stuck(rail.as_ref(), to, e))?;
            }
        }
        Ok(())
    }

    /// [`Port::settle`], if all puts went to this rank alone: stores have read their sources when
    /// they return.
    ///
    /// # Errors
    /// As [`Port::quiet`].
    #[inline]
    pub fn settle_with(&self, to: u32) -> Result<(), Error> {
        if let PeerLane::Rail(_) = self.reach(to)? { self.settle() } else { Ok(()) }
    }

    /// Attends to all rails in turn until all have settled, so that none stands still while another
    /// is waited for; or until one is late, which is then for that one to say.
    fn attend(&self) {
        let mut waiter = None;
        loop {
            let (mut open, mut moved) = (None, false);
            for (reach, to) in self.lanes.reach.iter().zip(0..) {
                if let PeerLane::Rail(rail) = reach
                    && !rail.settled()
                {
                    open = open.or(Some(to));
                    moved |= rail.progress(&self.lanes.health);
                }
            }
            let Some(to) = open else { return };
            if moved {
                waiter = None;
                continue;
            }
            let waiter = waiter.get_or_insert_with(|| Waiter::new(self.lanes.patience(to)));
            if waiter.turn(|slice| std::thread::sleep(slice.min(SLEEP_INTERVAL))).is_err() {
                return;
            }
        }
    }

    pub(super) fn stuck(&self, rail: &dyn NetConnection, to: u32, stuck: SendBlocked) -> Error {
        explain(rail, (self.lanes.rank, to), stuck)
    }
}

/// Returns when everything that was sent over a rail has landed.
///
/// # Errors
/// As [`Port::quiet`].
pub fn flush(rail: &dyn NetConnection, health: &Health, deadline: Duration, rank: u32) -> Result<(), Error> {
    let patience =
        WaitLimits { health, crowded: true, awaited: rail.peer(), deadline, silent: !rail.wakes() };
    rail.flush(patience).map_err(|stuck| explain(rail, (rank, rail.peer()), stuck))
}

fn explain(rail: &dyn NetConnection, (rank, peer): (u32, u32), stuck: SendBlocked) -> Error {
    match stuck.why {
        WaitError::Dead(cause) => rail.fault().map_or(cause.into(), Error::from),
        WaitError::Asked => LaneError::Interrupted { rank, peer }.into(),
        WaitError::Late { waited } => LaneError::Deadline {
            rank,
            peer,
            lane: rail.lane(),
            flag: u32::MAX,
            awaited: stuck.awaited,
            seen: stuck.seen,
            waited,
        }
        .into(),
    }
}
