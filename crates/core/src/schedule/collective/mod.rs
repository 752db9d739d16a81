//! Collectives: all-reduce, broadcast, all-to-all and messages between two ranks, as programs.
//!
//! A call goes in *rounds*, each of at most a chunk of bytes (of a broadcast three, as one rank
//! alone has any), so that staged bytes stay in the caches and memory is bounded. Every round
//! begins alike: each rank puts the bytes that it can, signals its entry to every other rank with a
//! tag that names its call, and waits for all of them. Only then does any rank read those bytes.
//!
//! ```text
//!   whole       enter: own vector -> own offer, other nodes' landings      | sum: all vectors                 small ones
//!   direct      enter: own chunk -> own offer, shares to other nodes       | sum: own share, where it lies
//!                                                                          | share: -> own result, other nodes' results
//!                                                                          | meet, unless another round of it follows
//!   ring        enter: own chunk -> own offer | step: landed partial + own -> outbox -> next ... | sum: own share
//!                                             | gather: result -> next ...
//!   broadcast   enter: root's chunk -> its offer | hand on: root's offer -> a leader per node (star), or from leader to leader
//!                                                in parts (chain)
//!   all-to-all  enter: to each rank its part -> a landing there
//!   landed      enter: words alone | land: to each rank its part -> its place in the result there; words
//!   all-gather  enter: own chunk -> own offer, other nodes' landings
//! ```
//!
//! At the end, unless its result has landed in place, a rank copies the result to its caller
//! ([`Copied`]): from the memory of local peers, where these left it, and from its own, where ranks
//! of other nodes put it.
//!
//! In a two-shot call, the sums of a round other than the last are copied when the next round has
//! been entered: by then they have landed. They are written after an entry, unlike all other bytes,
//! so ranks may read them until the entry after the next.
//!
//! **Write grants.** All places are doubled by the parity of the round, and that is enough. A rank
//! that writes into the place of round n + 2 has heard all ranks enter n + 1, so all have read
//! their bytes of round n. [`ControlLayout`](super::ControlLayout) follows the same rule.
//!
//! Results that land in place have one *room*, which the caller reads until its next call of any
//! kind. So the entry is the write grant: a rank that puts has heard all ranks enter this very
//! call, so all have read the result of the last one.
//!
//! ```text
//!   rank 0   enter n | put -> 1, 2, word | all words | reads its result ........... | enter n + 1 | put -> 1, 2
//!   rank 1   enter n | put -> 0, 2, word | all words | reads its result .................................. | enter n + 1 | ...
//!                                                                                       0 may not put yet  ^
//! ```
//!
//! **Bits.** One-shot and two-shot calls add in `f32` by ascending rank from +0 and round once: the
//! same bits, wherever ranks are. A ring adds share `s` in the order s + 1, s + 2, ... s, and
//! rounds each partial to its [`PartialDtype`](crate::dtype::PartialDtype).
//!
//! **Messages** ([`MessageChannel`]) have flags, slots and numbers of their own, independent of
//! collectives.

mod fill;
mod pair;
mod skeleton;
mod staging;

pub use fill::{Copied, Round, Rounds};
pub use pair::{MessageChannel, MessagePart};
pub use skeleton::{Program, Shape, Skeleton, Step, Tensor};
pub use staging::Staging;

use std::ops::Range;

use crate::topology::NodeMap;

/// One rank among those of a collective.
#[derive(Clone, Debug)]
pub struct RankView {
    /// Which ranks share memory.
    pub nodes: NodeMap,
    /// This rank.
    pub me: u32,
    /// Placement of bytes, at every rank alike.
    pub staging: Staging,
}

impl RankView {
    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.nodes.ranks()
    }

    /// Where the parts of all ranks, of this many bytes each, have landed in place at the end of a
    /// call.
    pub fn landed(&self, part: u64) -> Range<u64> {
        self.staging.in_place(0, part)..self.staging.in_place(self.ranks(), part)
    }

    /// All others, rotated, so that ranks do not all begin with the same one.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (me, ranks) = (self.me, self.ranks());
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// The peers of other nodes.
    fn far(&self) -> impl Iterator<Item = u32> + use<'_> {
        self.peers().filter(|&peer| !self.near(peer))
    }

    fn near(&self, peer: u32) -> bool {
        self.nodes.same_node(self.me, peer)
    }

    /// The window in which this rank finds the bytes that a rank has for it.
    fn holder(&self, of: u32) -> u32 {
        if self.near(of) { of } else { self.me }
    }

    fn next(&self) -> u32 {
        (self.me + 1) % self.ranks()
    }

    fn before(&self, steps: u32) -> u32 {
        (self.me + self.ranks() - steps % self.ranks()) % self.ranks()
    }

    /// Of each node the rank that a root's chunk comes to, the root's node and the root itself
    /// first.
    fn leaders(&self, root: u32) -> Vec<u32> {
        let (nodes, first) = (self.nodes.nodes(), self.nodes.node_of(root));
        (0..nodes).map(|step| self.nodes.rail_peer(root, (first + step) % nodes)).collect()
    }
}
