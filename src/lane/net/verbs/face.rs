//! The face of a rail: each call takes the lock, keeps the forecast, and asks.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{PoisonError, TryLockError};
use std::time::Instant;

use super::SignalMode;
use super::connection::{Connection, End};
use super::forecast::Forecast;
use crate::bootstrap::Health;
use crate::error::{Cause, LaneError, VerbsError};
use crate::lane::RowSource;
use crate::lane::net::{Counters, DeviceAddress, DeviceRail, NetConnection, RemoteAddress, SendBlocked};
use crate::lane::wait::WaitLimits;
use crate::schedule::Tag;

impl DeviceRail for Connection {
    fn put_device(
        &self,
        to: RemoteAddress,
        from: DeviceAddress,
        len: u64,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            if len == 0 {
                return Ok(());
            }
            let nowhere = VerbsError::OutOfRegion { offset: from.offset, len, size: 0 };
            let source = self.device.device_source(from, len).ok_or(nowhere)?;
            if let Some(forecast) = &mut state.forecast {
                forecast.device(self.remote(to)?.0, len);
            }
            self.put_in_place(state, to, source, len as usize)
        })
    }
}

impl NetConnection for Connection {
    fn lane(&self) -> &'static str {
        "verbs"
    }

    fn peer(&self) -> u32 {
        self.peer
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            if bytes.is_empty() {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                let registered = self.device.source(bytes).is_some();
                forecast.put(self.remote(to)?.0, bytes.len() as u64, registered);
            }
            self.put_bytes(state, to, bytes, patience)
        })
    }

    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let registered = self.device.source(source.bytes);
        let in_place = registered.filter(|_| source.row_bytes <= self.chunk);
        self.with(patience, |state| {
            if rows.is_empty() {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                forecast.rows(self.remote(to)?.0, rows, source.row_bytes, registered.is_some());
            }
            match in_place {
                Some(place) => self.gather(state, to, (rows, source), place, patience),
                None => self.pack(state, to, rows, source, patience),
            }
        })
    }

    fn devices(&self) -> Option<&dyn DeviceRail> {
        Some(self)
    }

    fn zero(&self, to: RemoteAddress, len: u64, patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            if len == 0 {
                return Ok(());
            }
            if let Some(forecast) = &mut state.forecast {
                forecast.zero(self.remote(to)?.0, len);
            }
            self.zeros(state, to, len)
        })
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            let named = self.raise(state, to, value, tag, patience)?;
            if let Some(forecast) = &mut state.forecast {
                forecast.signal(tag.is_some(), named);
            }
            state.sender.hurry();
            state.sender.post()?;
            Ok(())
        })
    }

    fn settled(&self) -> bool {
        let mut state = self.lock();
        state.hurry();
        state.end.is_some() || state.sender.is_settled()
    }

    fn settle(&self, patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            state.hurry();
            self.until(state, patience, |state| Ok(state.sender.is_settled().then_some(())))
        })
    }

    fn flush(&self, patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.with(patience, |state| {
            state.hurry();
            self.until(state, patience, |state| Ok(state.sender.is_done().then_some(())))
        })
    }

    fn progress(&self, health: &Health) -> bool {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if state.end.is_some() {
            // The requests in flight are over: they are counted, and have no effect.
            let _ = self.complete(&mut state);
            return false;
        }
        match self.step(&mut state) {
            Ok(any) => any,
            Err(error) => {
                self.fail(&mut state, error, health);
                true
            }
        }
    }

    fn arm(&self, health: &Health) -> bool {
        let armed = self.device.check().and_then(|()| match self.signal {
            SignalMode::Immediate => self.completions.woken().and_then(|_| self.completions.arm()),
            SignalMode::Write | SignalMode::FetchAdd => Ok(()),
        });
        if let Err(error) = armed {
            self.fail(&mut self.lock(), error, health);
            return false;
        }
        self.progress(health)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        (self.signal == SignalMode::Immediate).then(|| self.completions.as_fd())
    }

    fn wakes(&self) -> bool {
        self.signal == SignalMode::Immediate
    }

    fn import_region(&self, region: u32, said: &[u8]) -> Result<(), LaneError> {
        let mut theirs = self.theirs.write().unwrap_or_else(PoisonError::into_inner);
        theirs.learn(self.peer, region, said)
    }

    fn stop(&self, cause: &Cause) {
        self.end(&mut self.lock(), End::Dead(cause.clone()));
    }

    fn leave(&self, until: Instant) {
        let deadline = until.saturating_duration_since(Instant::now());
        let patience =
            WaitLimits { health: &self.health, crowded: true, awaited: self.peer, deadline, silent: true };
        if let Err(stuck) = self.flush(patience) {
            tracing::debug!(rank = self.me, peer = self.peer, ?stuck, "last words were not heard");
        }
    }

    fn cleared(&self, from: RemoteAddress, len: u64) {
        self.lock().sent.cleared(from, len);
    }

    fn counters(&self) -> Counters {
        let mut state = self.lock();
        if self.health.check().is_err() {
            // No progress thread serves the connections of a failed world any more.
            let _ = self.complete(&mut state);
        }
        state.sender.counters
    }

    fn forecast(&self) -> Counters {
        self.lock().forecast.as_ref().map(Forecast::counters).unwrap_or_default()
    }

    fn fault(&self) -> Option<LaneError> {
        match &self.lock().end {
            Some(End::Failed(error, _)) => Some(error.clone().into()),
            _ => None,
        }
    }
}
