//! Collectives: all-reduce, broadcast, all-to-all and messages between two ranks, as programs.
//!
//! A call goes in *rounds*, each of at most a chunk of bytes (of a broadcast three, as one rank alone has any), so that what is
//! staged stays in the caches and memory is bounded. Every round begins alike: each rank puts what it can, tells every other that it has entered, with a tag that says
//! what it calls, and waits for all of them. Only then does anybody look at what was put.
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
//! At the end, unless what it wants has landed in its place, a rank copies to its caller what it wants ([`Copied`]): from the memory of its neighbours, where these left it,
//! and from its own, where ranks of other nodes put it.
//!
//! Sums of a round of direct that is not the last are copied when the next round has been entered: by then they have landed. They are
//! written behind an entry, not before one as all else is, so they may be read until the one after the next.
//!
//! **Licence.** All places are doubled by the parity of the round, and that is enough: who writes into round n + 2's has heard
//! everybody enter n + 1, so everybody has read what it wanted of round n. It is the rule of
//! [`ControlLayout`](super::ControlLayout) for what is doubled there.
//!
//! There is one *room* for results that land in place, which the caller reads there until its next call, of whatever kind. So the entry is the
//! licence: who puts has heard that everybody entered this very call, and has therefore read the result of the last one.
//!
//! ```text
//!   rank 0   enter n | put -> 1, 2, word | all words | reads its result ........... | enter n + 1 | put -> 1, 2
//!   rank 1   enter n | put -> 0, 2, word | all words | reads its result .................................. | enter n + 1 | ...
//!                                                                                       0 may not put yet  ^
//! ```
//!
//! **Bits.** Whole and direct add in `f32` by ascending rank from +0 and round once: the same bits, wherever ranks are. A ring
//! adds share `s` in the order s + 1, s + 2, ... s, and rounds each partial to its [`PartialDtype`](crate::dtype::PartialDtype).
//!
//! **Messages** ([`MessageChannel`]) have words, slots and numbers of their own, and pass collectives by.

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
    /// Where bytes lie, at every rank alike.
    pub staging: Staging,
}

impl RankView {
    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.nodes.ranks()
    }

    /// Where the parts of all ranks, of so many bytes each, have landed in place when a call is over.
    pub fn landed(&self, part: u64) -> Range<u64> {
        self.staging.in_place(0, part)..self.staging.in_place(self.ranks(), part)
    }

    /// All others, rotated, so that no rank is everybody's first.
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

    /// In whose window this rank finds what a rank has for it.
    fn holder(&self, of: u32) -> u32 {
        if self.near(of) { of } else { self.me }
    }

    fn next(&self) -> u32 {
        (self.me + 1) % self.ranks()
    }

    fn before(&self, steps: u32) -> u32 {
        (self.me + self.ranks() - steps % self.ranks()) % self.ranks()
    }

    /// Of each node the rank that a root's chunk comes to, the root's node and the root itself first.
    fn leaders(&self, root: u32) -> Vec<u32> {
        let (nodes, first) = (self.nodes.nodes(), self.nodes.node_of(root));
        (0..nodes).map(|step| self.nodes.rail_peer(root, (first + step) % nodes)).collect()
    }
}
