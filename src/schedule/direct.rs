//! The `direct` route: every row goes straight from its rank to the rank of its expert.
//!
//! ```text
//!   dispatch         licence   Wait read(p)                             peers have read what I offered last
//!                    counts    Put publication -> p (remote p) , Signal entry(p) ; Wait entry(p)
//!                    - the planner places -
//!                    rows      PutRows -> p , Signal landed(p) ; PutRows -> me ; Wait landed(p)
//!
//!   cached dispatch  licence, then   entry     Signal entry(p) ; Wait entry(p)   the tag says where to write
//!                                    rows      as above
//!
//!   return           licence, then   entry     Signal entry(p) ; Wait entry(p)   the tag says where to read
//!                                    home      Put chunk -> p , Signal landed(p) ; Wait landed(p)      remote p only
//!                                    sum       Reduce rows, Reduce weights, Signal read(p)             local p
//! ```
//!
//! Peers are visited from `rank + 1` on, so that not all ranks write to the same one first.

use super::{DispatchSkeleton, Flag, Item, Level, Op, ReturnSkeleton, Slot, Stage};
use crate::topology::NodeMap;

/// How rows reach the rank of their expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Route {
    /// From the source straight to the destination.
    Direct,
}

impl Route {
    /// All routes, for error messages and tests.
    pub const ALL: [Route; 1] = [Route::Direct];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Route::Direct => "direct",
        }
    }
}

/// Builds one rank's skeletons for the direct route. Slots are numbered by what they carry, so whoever fills the
/// operands needs no search.
#[derive(Clone, Debug)]
pub struct Direct<'a> {
    nodes: &'a NodeMap,
    rank: u32,
}

impl<'a> Direct<'a> {
    /// For `rank` of the group whose nodes are given.
    pub fn new(nodes: &'a NodeMap, rank: u32) -> Self {
        Direct { nodes, rank }
    }

    /// Slot of the publication put to `peer` (dispatch).
    pub fn publication(peer: u32) -> Slot {
        Slot(peer)
    }

    /// Slot of the rows put to `peer` (dispatch and cached dispatch).
    pub fn rows(&self, peer: u32) -> Slot {
        Slot(self.ranks() + peer)
    }

    /// Slot of the chunk put home to `peer` (return).
    pub fn home(peer: u32) -> Slot {
        Slot(peer)
    }

    /// Slot of the sum of rows (return).
    pub fn sum(&self) -> Slot {
        Slot(self.ranks())
    }

    /// Slot of the fetch of weights (return).
    pub fn weights(&self) -> Slot {
        Slot(self.ranks() + 1)
    }

    /// Dispatch with counts.
    pub fn dispatch(&self) -> DispatchSkeleton {
        let mut counts = Vec::new();
        for peer in self.peers() {
            if !self.local(peer) {
                counts.push(self.on(peer, Op::Put { to: peer, slot: Self::publication(peer) }));
            }
            counts.push(self.on(peer, Op::Signal { to: peer, flag: Flag::Entry, level: Level::Call }));
        }
        counts.extend(self.waits(Flag::Entry, Level::Call, |_| true));
        let entry = Stage { name: "counts", items: counts };
        DispatchSkeleton { licence: self.licence(), entry, rows: self.rows_stage() }
    }

    /// Dispatch along a known layout.
    pub fn cached_dispatch(&self) -> DispatchSkeleton {
        DispatchSkeleton { licence: self.licence(), entry: self.entry(), rows: self.rows_stage() }
    }

    /// Rows (and one `f32` per row) back to their tokens: combine, and the gradient of dispatch.
    pub fn ret(&self) -> ReturnSkeleton {
        let mut home = Vec::new();
        for peer in self.peers().filter(|&p| !self.local(p)) {
            home.push(self.on(peer, Op::Put { to: peer, slot: Self::home(peer) }));
            home.push(self.on(peer, Op::Signal { to: peer, flag: Flag::Landed, level: Level::Call }));
        }
        home.extend(self.waits(Flag::Landed, Level::Call, |p| !self.local(p)));
        let mut sum = vec![
            self.on(self.rank, Op::Reduce { slot: self.sum() }),
            self.on(self.rank, Op::Reduce { slot: self.weights() }),
        ];
        sum.extend(
            self.peers()
                .filter(|&p| self.local(p))
                .map(|p| self.on(self.rank, Op::Signal { to: p, flag: Flag::Read, level: Level::Call })),
        );
        ReturnSkeleton {
            licence: self.licence(),
            entry: self.entry(),
            home: Stage { name: "home", items: home },
            sum: Stage { name: "sum", items: sum },
        }
    }

    /// Whatever this rank offered in its last return has been read: its memory may be written again.
    ///
    /// A return that fills its chunk before its entries needs this. In dispatches the entries say it too, since
    /// whoever writes has heard every rank's, sent after its last sum; there it only lets the pool free memory early.
    fn licence(&self) -> Stage {
        Stage {
            name: "licence",
            items: self.waits(Flag::Read, Level::LastReturn, |p| self.local(p)).collect(),
        }
    }

    fn entry(&self) -> Stage {
        let signals =
            self.peers().map(|p| self.on(p, Op::Signal { to: p, flag: Flag::Entry, level: Level::Call }));
        Stage {
            name: "entry",
            items: signals.chain(self.waits(Flag::Entry, Level::Call, |_| true)).collect(),
        }
    }

    fn rows_stage(&self) -> Stage {
        let mut items = Vec::new();
        for peer in self.peers() {
            items.push(self.on(peer, Op::PutRows { to: peer, slot: self.rows(peer) }));
            items.push(self.on(peer, Op::Signal { to: peer, flag: Flag::Landed, level: Level::Call }));
        }
        items.push(self.on(self.rank, Op::PutRows { to: self.rank, slot: self.rows(self.rank) }));
        items.extend(self.waits(Flag::Landed, Level::Call, |_| true));
        Stage { name: "rows", items }
    }

    /// The track of a peer: one per peer, and this rank's own number for what it does at home.
    fn on(&self, peer: u32, op: Op) -> Item {
        Item { track: peer, op }
    }

    fn waits<'b>(
        &'b self,
        flag: Flag,
        level: Level,
        from: impl Fn(u32) -> bool + 'b,
    ) -> impl Iterator<Item = Item> + 'b {
        self.peers().filter(move |&p| from(p)).map(move |p| self.on(p, Op::Wait { from: p, flag, level }))
    }

    fn peers(&self) -> impl Iterator<Item = u32> + '_ {
        let (rank, ranks) = (self.rank, self.ranks());
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    fn local(&self, peer: u32) -> bool {
        self.nodes.same_node(self.rank, peer)
    }

    fn ranks(&self) -> u32 {
        self.nodes.ranks()
    }
}
