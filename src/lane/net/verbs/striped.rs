//! A connection over several *queues*: queue pairs on one NIC or on several, each an ordinary
//! [`Connection`].
//!
//! ```text
//!   put of many bytes --cut at chunks--> stripe | stripe | ...   each to the queue that would be done first
//!   signal --> queue 0, the lead; then a tick on each other queue, if any of them got bytes
//!   peer       applies the signal when the ticks have come
//! ```
//!
//! Between queue pairs nothing is ordered. Between NICs even the completion of a write proves
//! nothing to another NIC: its bytes may still be on the way to memory, while the other writes a
//! flag. The completion of a receive is behind the bytes of its own NIC. So queues signal by
//! immediates alone, and the peer's processor counts ticks
//! ([`Arrivals`](sidelane_core::stripes::Arrivals)).
//!
//! A tick that could not be sent is *owed*, and goes before the next signal.
//!
//! Words of devices are writes, which vouch for no other queue. So once the peer has memory of
//! devices, everything goes to the lead.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use sidelane_core::stripes::Stripes;

use super::connection::Connection;
use crate::bootstrap::{FatalLock, Health};
use crate::error::{Cause, LaneError};
use crate::lane::RowSource;
use crate::lane::flag::WaitLimits;
use crate::lane::net::{
    Counters, DeviceAddress, DeviceConnection, NetConnection, RemoteAddress, SendBlocked,
};
use crate::schedule::Tag;

/// A connection to one peer over several queue pairs.
#[derive(Debug)]
pub struct StripedConnection {
    /// At least two; the first is the lead.
    queues: Vec<Arc<Connection>>,
    /// Bytes of a stripe at most.
    chunk: u64,
    /// Held over a whole call: no signal of another thread comes between the choice of a queue and
    /// its stripe.
    state: FatalLock<State>,
    health: Arc<Health>,
}

#[derive(Debug)]
struct State {
    stripes: Stripes,
    /// Ticks that each queue owes.
    owed: Vec<u64>,
    /// Nothing is striped any more.
    lead_only: bool,
}

impl StripedConnection {
    /// A connection over queues of these speeds, in one unit.
    pub fn new(
        rank: u32,
        health: &Arc<Health>,
        queues: Vec<Arc<Connection>>,
        speeds: Vec<u32>,
        chunk: u64,
    ) -> Self {
        let state =
            State { stripes: Stripes::new(speeds, chunk), owed: vec![0; queues.len()], lead_only: false };
        let (state, health) = (FatalLock::new(state, rank, health), Arc::clone(health));
        StripedConnection { queues, chunk, state, health }
    }

    fn lead(&self) -> &Connection {
        &self.queues[0]
    }

    /// Has the lead report signals that ticks of other queues have completed. A call on one of
    /// these may have taken ticks after the progress thread, which sleeps next, looked for them. If
    /// another thread holds the lead, that one reports. Call it behind all that can take ticks.
    fn grant(&self, health: &Health) {
        self.lead().request_visit(health);
    }

    /// Gives `part` a queue for each stripe of `len` bytes: from where on, and how many.
    fn stripe(
        &self,
        (len, stripe): (u64, u64),
        limits: WaitLimits<'_>,
        mut part: impl FnMut(&Connection, u64, u64) -> Result<(), SendBlocked>,
    ) -> Result<(), SendBlocked> {
        let mut state = self.state.lock();
        if state.lead_only {
            return part(self.lead(), 0, len);
        }
        let (mut done, mut others) = (0, false);
        while done < len {
            let bytes = stripe.min(len - done);
            let queue = state.stripes.pick(bytes);
            part(&self.queues[queue], done, bytes)?;
            done += bytes;
            others |= queue > 0;
        }
        if others {
            self.grant(limits.health);
        }
        Ok(())
    }

    /// Sends the ticks that are owed.
    fn pay(&self, state: &mut State, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let mut paid = false;
        for (queue, owed) in self.queues.iter().zip(&mut state.owed) {
            while *owed > 0 {
                queue.tick(limits)?;
                *owed -= 1;
                paid = true;
            }
        }
        if paid {
            self.grant(limits.health);
        }
        Ok(())
    }

    /// Posts what is left on all queues, before a wait for the first of them.
    fn post(&self, health: &Health) {
        for queue in &self.queues {
            queue.settled();
            queue.progress(health);
        }
    }
}

impl DeviceConnection for StripedConnection {
    fn put_device(
        &self,
        to: RemoteAddress,
        from: DeviceAddress,
        len: u64,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.lead().put_device(to, from, len, limits)
    }

    fn write_word(&self, to: RemoteAddress, value: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.lead().write_word(to, value, limits)
    }
}

impl NetConnection for StripedConnection {
    fn lane(&self) -> &'static str {
        self.lead().lane()
    }

    fn peer(&self) -> u32 {
        self.lead().peer()
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.stripe((bytes.len() as u64, self.chunk), limits, |queue, from, len| {
            queue.put(to.behind(from), &bytes[from as usize..][..len as usize], limits)
        })
    }

    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let row_bytes = source.row_bytes.max(1);
        let stripe = (self.chunk / row_bytes).max(1) * row_bytes;
        self.stripe((rows.len() as u64 * row_bytes, stripe), limits, |queue, from, len| {
            let [first, count] = [from, len].map(|bytes| (bytes / row_bytes) as usize);
            queue.put_rows(to.behind(from), &rows[first..][..count], source, limits)
        })
    }

    fn zero(&self, to: RemoteAddress, len: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.stripe((len, self.chunk), limits, |queue, from, len| queue.zero(to.behind(from), len, limits))
    }

    fn devices(&self) -> Option<&dyn DeviceConnection> {
        Some(self)
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let mut state = self.state.lock();
        self.pay(&mut state, limits)?;
        let striped = state.stripes.is_striped();
        self.lead().lead_signal(to, (value, tag), striped, limits)?;
        state.stripes.signalled();
        state.owed[1..].iter_mut().for_each(|owed| *owed += u64::from(striped));
        self.pay(&mut state, limits)
    }

    fn settled(&self) -> bool {
        // All of them: each call posts what is left.
        let settled = self.queues.iter().filter(|queue| !queue.settled()).count() == 0;
        self.grant(&self.health);
        settled
    }

    fn settle(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.post(limits.health);
        self.queues.iter().try_for_each(|queue| queue.settle(limits))?;
        self.grant(limits.health);
        Ok(())
    }

    fn flush(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.pay(&mut self.state.lock(), limits)?;
        self.post(limits.health);
        self.queues.iter().try_for_each(|queue| queue.flush(limits))?;
        self.grant(limits.health);
        Ok(())
    }

    fn progress(&self, health: &Health) -> bool {
        let (lead, others) = (self.lead(), &self.queues[1..]);
        match others.iter().filter(|queue| queue.progress(health)).count() {
            0 => lead.progress(health),
            _ => {
                self.grant(health);
                true
            }
        }
    }

    fn arm(&self, health: &Health) -> bool {
        // The lead last: ticks of others let it report more signals as taken.
        self.queues.iter().rev().filter(|queue| queue.arm(health)).count() > 0
    }

    fn event_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.queues.iter().flat_map(|queue| queue.event_fds()).collect()
    }

    fn take_events(&self, health: &Health) {
        self.queues.iter().for_each(|queue| queue.take_events(health));
    }

    fn wakes(&self) -> bool {
        self.lead().wakes()
    }

    fn import_region(&self, region: u32, description: &[u8]) -> Result<(), LaneError> {
        self.queues.iter().try_for_each(|queue| queue.import_region(region, description))
    }

    fn import_device_region(&self, region: u32, description: &[u8]) -> Result<(), LaneError> {
        self.state.lock().lead_only = true;
        self.lead().import_region(region, description)
    }

    fn forget_region(&self, region: u32) {
        self.queues.iter().for_each(|queue| queue.forget_region(region));
    }

    fn cleared(&self, from: RemoteAddress, len: u64) {
        self.lead().cleared(from, len);
    }

    fn counters(&self) -> Counters {
        let counters = self.queues.iter().map(|queue| queue.counters()).sum();
        self.grant(&self.health);
        counters
    }

    fn forecast(&self) -> Counters {
        let counters = self.queues.iter().map(|queue| NetConnection::forecast(queue.as_ref())).sum();
        self.grant(&self.health);
        counters
    }

    fn stop(&self, cause: &Cause) {
        self.queues.iter().for_each(|queue| queue.stop(cause));
    }

    fn leave(&self, until: Instant) {
        self.queues.iter().for_each(|queue| queue.leave(until));
    }

    fn fault(&self) -> Option<LaneError> {
        let fault = self.queues.iter().find_map(|queue| queue.fault());
        self.grant(&self.health);
        fault
    }
}
