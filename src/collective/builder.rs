//! Building a communicator: settings that all ranks compare, and how long its windows live.
//!
//! A rank may leave a call while local peers still copy from its memory. It may leave a message
//! while up to two unread parts, or the receiver's last answers, are still in flight; no sender
//! waits for those. So a dropped communicator signals all others that it is done, behind all its
//! earlier messages. Its windows live until all of them have signaled the same.
//!
//! ```text
//!   rank 0   send to 2, drop: done -> 1, 2          | held ...                      ... held | free
//!   rank 2                        ... receive: answer -> 0, drop: done -> 0, 1 --------------^
//! ```

use std::sync::Arc;

use super::calls::Counts;
use super::{AllReduceAlgorithm, Communicator, Incoming, Outgoing, RoundState};
use crate::dtype::Dtype;
use crate::error::{Error, PlanError};
use crate::exec::HostStepper;
use crate::lane::Port;
use crate::memory::ReleaseCheck;
use crate::schedule::collective::{MessageChannel, RankView, Rounds, Staging};
use crate::schedule::{Calls, ControlLayout, Flag, WindowId};
use crate::topology::Route;
use crate::world::{Group, SymmetricRange};

/// Settings of a [`Communicator`]. All ranks must choose the same.
#[derive(Clone, Debug)]
pub struct CommunicatorBuilder<'g> {
    group: &'g Group,
    chunk: u64,
    whole: u64,
    landing: u64,
    sums: AllReduceAlgorithm,
}

/// Parts of a ring are counted in eight bits.
const MOST_OF_A_RING: u32 = 256;

impl<'g> CommunicatorBuilder<'g> {
    pub(super) fn new(group: &'g Group) -> Self {
        CommunicatorBuilder {
            group,
            chunk: 512 << 10,
            whole: 16 << 10,
            landing: 0,
            sums: AllReduceAlgorithm::Direct,
        }
    }

    /// Bytes of a round, rounded down to whole lines for each rank; those of a broadcast are three
    /// times as many. The window takes about ten times as much of `SIDELANE_SYMMETRIC`. Two and a
    /// half chunks of each rank should fit the last-level cache together. Default: 512 KiB.
    pub fn chunk(mut self, bytes: u64) -> Self {
        self.chunk = bytes;
        self
    }

    /// Limit in bytes up to which every rank sums a whole all-reduce, with the same bits
    /// ([`AllReduceAlgorithm::Direct`]). Default: 16 KiB.
    pub fn one_shot_bytes(mut self, bytes: u64) -> Self {
        self.whole = bytes;
        self
    }

    /// Bytes of the window for a result that lands in place, the limit of an
    /// [`all_to_all_zero_copy`](Communicator::all_to_all_zero_copy). It takes as much more of
    /// `SIDELANE_SYMMETRIC`. Default: none.
    pub fn zero_copy_bytes(mut self, bytes: u64) -> Self {
        self.landing = bytes;
        self
    }

    /// Algorithm of all-reduces. Default: [`AllReduceAlgorithm::Direct`] for every size, because
    /// its bits depend on the inputs only.
    pub fn algorithm(mut self, sums: AllReduceAlgorithm) -> Self {
        self.sums = sums;
        self
    }

    /// Allocates the window and opens missing connections. Collective.
    ///
    /// # Errors
    /// [`PlanError`] if a setting cannot be used,
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks chose differently,
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank has no room for the window.
    pub fn build(self) -> Result<Communicator, Error> {
        let (group, ranks, me) = (self.group, self.group.size(), self.group.rank());
        let staging = self.check();
        self.compare(staging.is_ok())?;
        let staging = staging?;
        let lanes = group.lanes(Route::Direct)?;
        let data = group.take_symmetric(staging.bytes())?;
        let control = group.take_symmetric(ControlLayout::flag_bytes(ranks))?;
        let windows = vec![data.window(), control.window()];
        let port = Arc::new(Port::new(Arc::clone(&lanes), windows, WindowId::CONTROL));
        let others = (0..ranks).filter(|&peer| peer != me).collect();
        let held = WindowHold { port: Arc::clone(&port), others, _ranges: [data, control] };
        let epoch = group.shared.hub.epoch();
        let pairs = (0..ranks).map(|peer| MessageChannel::new(peer, epoch));
        let state = RoundState {
            world: Arc::clone(&group.shared),
            port,
            host: HostStepper::new(Dtype::Bytes, group.shared.recorder.clone()),
            view: RankView { nodes: lanes.nodes.clone(), me, staging },
            rounds: Rounds::new(ranks),
            calls: Calls::new(epoch),
            lanes,
        };
        Ok(Communicator {
            state,
            cache: group.shared.options.config.cache,
            sums: self.sums,
            whole: self.whole.min(staging.slot()),
            programs: Vec::new(),
            counts: Counts::new(ranks),
            outgoing: pairs.clone().map(|pair| Outgoing { pair, heard: 0, unsaid: 0 }).collect(),
            incoming: pairs.map(|pair| Incoming { pair, refused: 0 }).collect(),
            held: Arc::new(held),
        })
    }

    fn check(&self) -> Result<Staging, PlanError> {
        let ranks = self.group.size();
        if matches!(self.sums, AllReduceAlgorithm::Ring(_)) && ranks > MOST_OF_A_RING {
            let (parameter, expected) = ("ranks", "at most 256 on a ring");
            return Err(PlanError::BadParameter { parameter, seen: ranks.into(), expected });
        }
        Staging::new(ranks, self.chunk)?.with_room(self.landing)
    }

    fn compare(&self, usable: bool) -> Result<(), Error> {
        let sums = match self.sums {
            AllReduceAlgorithm::Direct => 0,
            AllReduceAlgorithm::Ring(wire) => 1 + wire as u64,
        };
        let settings: [(&'static str, u64); 5] = [
            ("whether their settings can be used (1: yes)", usable.into()),
            ("chunk", self.chunk),
            ("whole", self.whole),
            ("landing", self.landing),
            ("sums", sums),
        ];
        self.group.alike(&settings)
    }
}

/// Above all numbers of rounds.
const DONE: u64 = u64::MAX >> 1;

/// The windows, and the other ranks, which may read or write there.
pub(super) struct WindowHold {
    pub port: Arc<Port>,
    pub others: Vec<u32>,
    pub _ranges: [SymmetricRange; 2],
}

impl std::fmt::Debug for WindowHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("others", &self.others).finish_non_exhaustive()
    }
}

impl ReleaseCheck for WindowHold {
    fn is_released(&self, value: u64) -> bool {
        let done = |&of: &u32| self.port.flag(of, Flag::Returned).is_ok_and(|flag| flag.value() >= value);
        self.others.iter().all(done)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let me = self.state.view.me;
        for &peer in &self.held.others {
            // A rank that cannot be reached is gone, and the world with it: then no memory is given
            // back.
            let _ = self.state.port.signal(peer, (me, Flag::Returned), DONE, None);
        }
        let pool = self.state.world.heap.pool();
        if let Ok(nothing) = pool.alloc(0) {
            let release: Arc<dyn ReleaseCheck> = Arc::clone(&self.held) as _;
            pool.retire(nothing, &release, DONE);
        }
    }
}
