//! Host thread that puts slots to other nodes, because a stream cannot.
//!
//! ```text
//!   caller's stream    pack | flag | copies within the node ... | waits for words that NICs, or this thread, raise
//!   proxy                     hears the request, clears its flag, puts and signals
//!   host-staged               hears what the net has brought, and tells the stream
//! ```
//!
//! A *request* is a flag with one meaning. The thread knows neither calls nor graphs, so it
//! serves a replay like a call.
//!
//! *Order.* A stream may set a second flag before the first is served: its next call does not wait
//! until its own rows have left. It sets no third one, because it then awaits a signal that peers
//! send after they have seen the first. So at most two flags are set, one of a dispatch and one of
//! its answer. These alternate, and the thread serves them in turn.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::bootstrap::{Thread, turn, wait};
use crate::ep::device::row_transport::RowTransport;
use crate::ep::device::watchdog::Words;
use crate::error::{Error, LaneError};
use crate::exec::ProxyOps;
use crate::lane::Port;
use crate::schedule::{Calls, Flag};
use crate::sync::stream_use::{Request, StreamUse};
use crate::world::{SymmetricRange, WorldState};

/// Polls before the thread sleeps, because calls often follow each other closely.
const AWAKE: u32 = 20_000;
/// The same, where ranks share cores.
const AWAKE_IN_A_CROWD: u32 = 100;
/// Sleep between two looks.
const NAP: Duration = Duration::from_micros(50);

/// Work of one proxy.
#[derive(Debug)]
pub(super) struct Work {
    pub shared: Arc<WorldState>,
    /// Programs that reach other nodes.
    pub port: Port,
    /// This rank's words, in memory of the host.
    pub words: Arc<Words>,
    pub requests: Vec<ProxyRequest>,
    /// Host-staged.
    pub back: Vec<Back>,
    /// Other nodes write to it as long as this lives.
    pub passage: RowTransport,
    /// Host-staged: the flags that the net raises.
    pub _flags: Option<SymmetricRange>,
}

/// A request flag, and the program that it requests.
#[derive(Debug)]
pub(super) struct ProxyRequest {
    /// Which: [`Flag::Landed`] for a dispatch, others for what answers it.
    pub flag: Flag,
    /// Its place among the words.
    pub place: usize,
    pub crossed: ProxyOps,
}

impl ProxyRequest {
    /// The request to serve after so many, if its flag is set.
    fn next(
        requests: &[ProxyRequest],
        served: Calls,
        is_set: impl Fn(usize) -> bool,
    ) -> Option<&ProxyRequest> {
        let dispatch = is_dispatch(served.number() + 1);
        requests.iter().find(|request| (request.flag == Flag::Landed) == dispatch && is_set(request.place))
    }
}

/// Dispatches and what answers them come in turn, from 1.
fn is_dispatch(number: u64) -> bool {
    number % 2 == 1
}

/// Peers whose signals this thread passes to the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Back {
    /// A rank of another node.
    pub from: u32,
    /// The places of the words that speak of it: of a dispatch, and of what answers it.
    pub words: [usize; 2],
}

/// The thread, and its work.
#[derive(Debug)]
pub(super) struct Proxy {
    work: Arc<Work>,
    streams: Arc<StreamUse>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts it.
    ///
    /// # Errors
    /// [`LaneError::System`] if there is no thread to be had.
    pub fn start(work: Work) -> Result<Self, LaneError> {
        let (work, streams) = (Arc::new(work), Arc::new(StreamUse::default()));
        let hub = &work.shared.hub;
        let thread = Thread::new("slots", hub.rank(), hub.health());
        let (serves, served) = (Arc::clone(&work), Arc::clone(&streams));
        let started = thread.spawn(move || {
            if let Err(error) = serves.serve(&served) {
                let _ = serves.shared.fail(&serves.port.lanes().world_ranks, error);
            }
        });
        let refused =
            |e: std::io::Error| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) };
        Ok(Proxy { work, streams, thread: Some(started.map_err(refused)?) })
    }

    /// Work that it serves.
    pub fn work(&self) -> &Work {
        &self.work
    }
}

impl Drop for Proxy {
    /// Remaining work of streams is served by a thread that stays behind, unless they are seen to
    /// be done.
    fn drop(&mut self) {
        self.streams.close();
        if let Some(thread) = self.thread.take().filter(|_| !self.work.words.is_claimed()) {
            wait::join(thread);
        }
    }
}

impl Work {
    /// Serves until the exchange is dropped and no stream runs, or the world has failed.
    fn serve(&self, streams: &StreamUse) -> Result<(), Error> {
        let none = || Calls::new(self.shared.hub.epoch());
        let (mut sent, mut heard) = (none(), vec![none(); self.back.len()]);
        let awake = if self.port.lanes().oversubscribed { AWAKE_IN_A_CROWD } else { AWAKE };
        let mut idle = 0;
        loop {
            turn();
            self.port.lanes().check()?;
            // Asked before the requests are looked at: a stream requests last, and is done then.
            let done = !streams.is_needed(|| self.words.is_claimed());
            if self.hear(&mut sent)? | self.tell(&mut heard)? {
                idle = 0;
                continue;
            }
            if done {
                return Ok(());
            }
            idle += 1;
            if idle < awake { std::thread::yield_now() } else { wait::nap(NAP) }
        }
    }

    /// Serves the next request in turn, if its flag is set.
    fn hear(&self, sent: &mut Calls) -> Result<bool, Error> {
        let is_set = |place| self.words.request(place).is_some_and(Request::is_set);
        let Some(request) = ProxyRequest::next(&self.requests, *sent, is_set) else {
            return Ok(false);
        };
        if let Some(flag) = self.words.request(request.place) {
            flag.clear();
        }
        sent.enter();
        request.crossed.perform(&self.port, sent.value())?;
        Ok(true)
    }

    /// Tells the stream which rows have arrived.
    fn tell(&self, heard: &mut [Calls]) -> Result<bool, Error> {
        if self.back.is_empty() {
            return Ok(false);
        }
        self.port.lanes().progress();
        let mut told = false;
        for (back, heard) in self.back.iter().zip(heard) {
            let mut next = *heard;
            next.enter();
            if self.port.flag(back.from, Flag::Block)?.value() >= next.value() {
                *heard = next;
                self.words.set(back.words[usize::from(!is_dispatch(next.number()))], 1);
                told = true;
            }
        }
        Ok(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::ProxyOps;
    use crate::schedule::call_program::SlotCall;
    use crate::schedule::stream_program::{RowPath, Slots, StreamProgram};
    use crate::topology::NodeMap;
    use std::collections::BTreeSet;

    #[test]
    fn requests_set_together_are_served_in_order() {
        let (slots, nodes) = (Slots::new(2, 512, 256).unwrap(), NodeMap::from_labels(&[0, 1]));
        for way in [RowPath::GpuDirect, RowPath::HostStaged] {
            let requests = SlotCall::ALL.map(|call| {
                let program = StreamProgram::new(call, slots, 0).unwrap().across(&nodes, way).unwrap();
                let flag = program.proxied().unwrap().request;
                ProxyRequest { flag, place: slots.flag(0, flag) as usize, crossed: ProxyOps::of(&program) }
            });
            // Flags that may be set when the thread wakes, in the order in which the stream sets
            // them.
            let [landed, returned, read] =
                [&requests[0], &requests[1], &requests[2]].map(|request| request.place);
            let set_in_order = [
                vec![landed],
                vec![returned, landed],
                vec![read, landed],
                vec![returned],
                vec![landed, returned],
            ];
            let mut served = Calls::new(3);
            for set_in_order in set_in_order {
                let mut set: BTreeSet<usize> = set_in_order.iter().copied().collect();
                for &place in &set_in_order {
                    let request =
                        ProxyRequest::next(&requests, served, |place| set.contains(&place)).unwrap();
                    assert_eq!(request.place, place, "after {} in {set_in_order:?}", served.number());
                    set.remove(&place);
                    served.enter();
                }
                assert!(ProxyRequest::next(&requests, served, |place| set.contains(&place)).is_none());
            }
        }
    }
}
