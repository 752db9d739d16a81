//! Where a relay of the host is: with its caller or, while the caller is away, in a thread of its own.
//!
//! ```text
//!   dispatch()                caller: entry | relay: meeting | caller: place, own rows | relay: hand on | caller: waits
//!   start_dispatch()          caller: entry | -- away: compute of the caller's own --  | caller: place, own rows, waits
//!                             proxy:          relay: meeting, hand on
//! ```
//!
//! The two know each other through flags alone, so nothing has to be locked: an [`Errand`] goes to the relay, and comes
//! back when it is done.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::fixed::Fixed;
use super::relay::{Errand, Relay};
use crate::error::{Cause, Error, LaneError};
use crate::exec::Host;
use crate::lane::Io;
use crate::world::Shared;

/// A relay that the host steps.
pub(super) struct HostRelay {
    relay: Relay,
    host: Host,
    fixed: Arc<Fixed>,
}

impl HostRelay {
    pub fn new(fixed: &Arc<Fixed>, host: Host) -> Self {
        HostRelay { relay: Relay::new(Arc::clone(fixed)), host, fixed: Arc::clone(fixed) }
    }

    /// As [`Relay::meet`].
    pub fn meet(&mut self, errand: &mut Errand) -> Result<(), Error> {
        let (HostRelay { relay, host, fixed }, stores) = (self, errand.stores);
        relay.meet(errand, &mut |items, operands| {
            host.run(&fixed.port, items, operands, &mut Io::default(), stores)
        })
    }

    /// As [`Relay::carry`]; says what was moved.
    pub fn carry(&mut self, errand: &mut Errand) -> Result<(), Error> {
        let (HostRelay { relay, host, fixed }, stores) = (self, errand.stores);
        host.take_moved();
        let carried = relay.carry(errand, &mut |items, operands| {
            host.run(&fixed.port, items, operands, &mut Io::default(), stores)
        });
        errand.moved = host.take_moved();
        carried
    }
}

/// Where a relay is: with its caller, or on an errand of its own.
pub(super) struct Seat {
    here: Option<Box<HostRelay>>,
    proxy: Option<Proxy>,
}

/// The thread that relays while the caller is away.
struct Proxy {
    errands: SyncSender<(Box<HostRelay>, Errand)>,
    done: Receiver<(Box<HostRelay>, Errand)>,
    thread: JoinHandle<()>,
}

impl Seat {
    /// A relay that is here.
    pub fn new(relay: HostRelay) -> Self {
        Seat { here: Some(Box::new(relay)), proxy: None }
    }

    /// The relay, unless it is away.
    pub fn here(&mut self) -> Option<&mut HostRelay> {
        self.here.as_deref_mut()
    }

    /// Sends the relay away.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no thread to be had.
    pub fn send(&mut self, errand: Errand, fixed: &Arc<Fixed>) -> Result<(), Error> {
        let Some(relay) = self.here.take() else { return Ok(()) };
        let proxy = match self.proxy.take() {
            Some(proxy) => proxy,
            None => Proxy::start(fixed)?,
        };
        // The thread ends only when this end is dropped.
        let _ = proxy.errands.send((relay, errand));
        self.proxy = Some(proxy);
        Ok(())
    }

    /// Waits for the relay to come back. Nothing if it was not away.
    pub fn join(&mut self) -> Option<Errand> {
        if self.here.is_some() {
            return None;
        }
        let (relay, errand) = self.proxy.as_ref()?.done.recv().ok()?;
        self.here = Some(relay);
        Some(errand)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(Proxy { errands, done, thread }) = self.proxy.take() {
            drop((errands, done));
            let _ = thread.join();
        }
    }
}

/// Should a thread panic, its caller must not wait for it.
pub(super) struct EndsTheWorld<'a>(pub &'a Shared);

impl Drop for EndsTheWorld<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hub = &self.0.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
        }
    }
}

impl Proxy {
    fn start(fixed: &Arc<Fixed>) -> Result<Proxy, LaneError> {
        // There is one relay, so at most one errand is under way.
        let (errands, todo) = sync_channel::<(Box<HostRelay>, Errand)>(1);
        let (back, done) = sync_channel(1);
        let fixed = Arc::clone(fixed);
        let thread = std::thread::Builder::new()
            .name(format!("sidelane-relay-{}", fixed.lanes.rank))
            .spawn(move || {
                let _end = EndsTheWorld(&fixed.shared);
                for (mut relay, mut errand) in todo {
                    let result = relay.meet(&mut errand).and_then(|()| relay.carry(&mut errand));
                    if let Err(error) = result {
                        // The caller finds the world dead.
                        fixed.fail(error);
                    }
                    let _ = back.send((relay, errand));
                }
            })
            .map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(Proxy { errands, done, thread })
    }
}
