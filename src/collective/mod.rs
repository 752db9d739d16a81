//! All-reduce, reduce-scatter, reduce, broadcast, all-to-all, all-gather, and messages between two
//! ranks.
//!
//! ```text
//!   all_reduce     [n]                       ->  [n]                 sums over the ranks, on all of them
//!   reduce_scatter [ranks, n]                ->  [n]                 part r, summed over the ranks, on rank r
//!   reduce         [n]                       ->  [n] of the root     sums over the ranks
//!   broadcast      [n] of the root           ->  [n]                 on all
//!   all_to_all     [ranks, n]                ->  [ranks, n]          part r of rank s becomes part s of rank r
//!   all_to_all_zero_copy                                             the same, read where it lands
//!   all_to_all_v   [sum of counts], counts   ->  [sum], counts       the same, of different lengths
//!   all_gather     [n]                       ->  [ranks, n]          part s is rank s's
//!   send, receive, send_receive                                      between two ranks, in order
//! ```
//!
//! [`ep::RowCollective`](crate::ep::RowCollective) has all-gather and reduce-scatter of rows, with
//! different numbers per rank, in memory that experts read in place.
//!
//! A call goes in rounds of a chunk, by the programs of
//! [`schedule::collective`](crate::schedule::collective), which are proved. Buffers are slices of
//! the caller's. Staged data lies in a window of fixed size, and no call allocates after its
//! program was built.
//!
//! **On one node** an all-reduce is a copy into the window, a sum of this rank's share in place,
//! and a copy of the others' sums:
//!
//! ```text
//!   floor, per rank and byte of n:   1 written + 1 read (offer)   |  ranks x 1/ranks read (sum)  |  1 read + 1 written (sums)
//! ```
//!
//! These are five moves of n bytes. Only the caller's tensor, read once and written once, must come
//! from memory: chunks of all ranks together fit the last-level cache. Ranks meet once in a round.
//! The entry to the next round says that the sums of this one have landed, and only the last round
//! has a meeting for that. Every rank sums small tensors whole (up to
//! [`CommunicatorBuilder::one_shot_bytes`]), which saves a round trip.
//!
//! **In place.** An all-to-all by rounds writes each byte twice. If the window has room for the
//! whole result ([`CommunicatorBuilder::zero_copy_bytes`]), each byte is written once, in one
//! round, and read where it landed:
//!
//! ```text
//!   all_to_all          parts -> windows | entry | copy, parts -> windows | entry | copy ...       chunk / ranks bytes of a part each time
//!   all_to_all_zero_copy                   entry | parts -> their places, words | [ranks, n], borrowed | ... next call: entry
//! ```
//!
//! The borrow is the write grant: others write there again when this rank has entered its next
//! call, for which the borrow must have ended.
//!
//! **Stores.** Large tensors are staged, and written to the caller, past the cache
//! ([`Stores::of`](crate::rows::Stores::of)). This halves the traffic of ordinary stores and does
//! not wait for lines of other cores. Results of an all-reduce are not: they are written where the
//! data was just read.
//!
//! **End.** A rank may leave a call while local peers still copy from its memory. It may leave a
//! message while up to two unread parts, or the receiver's last answers, are still in flight; no
//! sender waits for those. So a dropped communicator signals all others that it is done, behind all
//! its earlier messages. Its windows live until all of them have signaled the same.
//!
//! ```text
//!   rank 0   send to 2, drop: done -> 1, 2          | held ...                      ... held | free
//!   rank 2                        ... receive: answer -> 0, drop: done -> 0, 1 --------------^
//! ```

mod calls;
mod rounds;

use std::sync::Arc;

use calls::ElementRanges;

use crate::dtype::{Dtype, PartialDtype};
use crate::error::{Error, PlanError};
use crate::exec::{HostStepper, TransferCounts};
use crate::lane::{Lanes, Port};
use crate::memory::ReleaseCheck;
use crate::schedule::collective::{MessageChannel, Program, RankView, Rounds, Skeleton, Staging};
use crate::schedule::{Calls, ControlLayout, Flag, WindowId};
use crate::topology::Route;
use crate::world::{Group, SymmetricRange, WorldState};

/// How an all-reduce adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum AllReduceAlgorithm {
    /// In `f32` by ascending rank from +0, rounded once: the same bits on every lane and for every
    /// number of nodes. Each rank sums its share, so `ranks - members` shares leave a rank of a
    /// node for others.
    #[default]
    Direct,
    /// From rank to rank in group order: share `s` of each round begins at rank s + 1 and ends at
    /// s, and each partial sum is rounded to the wire's type. It suits many nodes: two chunks cross
    /// from a node to the next, however many members it has. The bits depend on the order of ranks
    /// and on where shares begin, not on nodes.
    Ring(PartialDtype),
}

/// The collectives of a group.
///
/// Calls are collective unless they are messages, and come in the same order on all ranks. If a
/// rank makes another call, or the same with other sizes, all ranks find it before any result is
/// visible. Then no tensor changes, and the next call works.
///
/// ```
/// use sidelane::{World, collective::Communicator};
///
/// let ranks = World::threads(3)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let mut gradients = [world.rank() as f32, 1.0];
///         group.all_reduce(&mut gradients)?;
///         assert_eq!(gradients, [3.0, 3.0]);
///         group.broadcast(2, &mut gradients)?;
///         if world.rank() == 0 {
///             group.send(1, &gradients)?;
///         } else if world.rank() == 1 {
///             group.receive(0, &mut gradients)?;
///         }
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct Communicator {
    state: RoundState,
    /// Bytes of the cache that the ranks of a node share.
    cache: u64,
    sums: AllReduceAlgorithm,
    whole: u64,
    /// Skeletons of the programs that were called.
    programs: Vec<(Program, Skeleton)>,
    counts: calls::ElementRanges,
    /// By peer: parts of messages to it, and from it.
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    held: Arc<WindowHold>,
}

/// State of rounds and messages. It lies apart from the programs, of which a round borrows one.
#[derive(Debug)]
struct RoundState {
    world: Arc<WorldState>,
    lanes: Arc<Lanes>,
    port: Arc<Port>,
    host: HostStepper,
    view: RankView,
    rounds: Rounds,
    calls: Calls,
}

/// State of messages to a peer.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    pair: MessageChannel,
    /// The peer's count of refusals, as it was last heard.
    heard: u8,
    /// Refusals that were not reported to the caller yet.
    unsaid: u32,
}

/// State of messages from a peer.
#[derive(Clone, Copy, Debug)]
struct Incoming {
    pair: MessageChannel,
    /// Refusals so far, modulo 256: the sender is at most two parts ahead, so it sees each of them.
    refused: u8,
}

impl Communicator {
    /// Starts to describe one.
    pub fn builder(group: &crate::world::Group) -> CommunicatorBuilder<'_> {
        CommunicatorBuilder::new(group)
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> u32 {
        self.state.view.me
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.state.view.ranks()
    }

    /// Counts of the puts and sums since the last call of this function.
    pub fn take_counts(&mut self) -> TransferCounts {
        self.state.host.take_counts()
    }
}

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
            counts: ElementRanges::new(ranks),
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
struct WindowHold {
    port: Arc<Port>,
    others: Vec<u32>,
    _ranges: [SymmetricRange; 2],
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
