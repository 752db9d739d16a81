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

mod builder;
mod calls;
mod rounds;
mod send_recv;

use std::sync::Arc;

pub use builder::CommunicatorBuilder;

use crate::dtype::PartialDtype;
use crate::exec::{HostStepper, TransferCounts};
use crate::lane::{Lanes, Port};
use crate::schedule::Calls;
use crate::schedule::collective::{MessageChannel, Program, RankView, Rounds, Skeleton};
use crate::world::WorldState;

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
    counts: calls::Counts,
    /// By peer: parts of messages to it, and from it.
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    held: Arc<builder::WindowHold>,
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
