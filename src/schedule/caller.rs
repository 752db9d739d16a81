//! What a rank does itself in a call: its own rows, and its own waits.
//!
//! ```text
//!   dispatch   licence   Wait read(l)                                   neighbours have read what I offered last
//!              entry     Signal entry -> l , Signal block -> my relay ; Wait entry(l, tellers, me)
//!                        - the planner places -
//!              rows      Put header -> r , Signal block -> r            r: my relays
//!                        PutRows chunk c -> r , Signal block c -> r     pxn; direct: as to l
//!                        PutRows -> l , Signal landed -> l ; PutRows -> me ; Wait landed(everybody) , Wait home(me)
//!
//!   return     licence , entry, and the offer: Signal block -> r        the tag says where my rows may be put
//!              home      Wait home(r) , Wait home(me)
//!              sum       Reduce rows, Reduce weights, Signal read -> l
//!   or         pull      Put l -> me , Signal read -> l ; Put me -> me    copy engines cannot add
//!                        Put twin -> me                                   what r brought home
//! ```
//!
//! Where no rail reaches the memory that rows are in, they cross to its *twin* in the host's memory, and a dispatch ends
//! with a stage more: "in", Put twin -> me.
//!
//! A dispatch along a known layout is the same program with fewer operands. What the rank does for others is its
//! [`Relay`](super::Relay)'s program; "block -> me" tells that to begin, "entry(me)" and "home(me)" are its answers.

use super::{Flag, Item, Level, Op, Slot, Stage};
use crate::topology::{Paths, Route};

/// What one rank does in a dispatch, with counts or along a known layout: the part that does not change from call to
/// call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchSkeleton {
    /// Peers have read what this rank offered last.
    pub licence: Stage,
    /// Everybody says what it calls, and where it can receive.
    pub entry: Stage,
    /// Rows move.
    pub rows: Stage,
}

/// What one rank does in a return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReturnSkeleton {
    /// Peers have read what this rank offered last.
    pub licence: Stage,
    /// Everybody says what it calls, and where its chunk lies or may be put.
    pub entry: Stage,
    /// What comes from other nodes has landed.
    pub home: Stage,
    /// Chunks are read.
    pub sum: Stage,
}

/// Builds the programs of a rank's own part. Slots are numbered by what they carry, so whoever fills the operands needs
/// no search.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    paths: Paths<'a>,
    chunks: u8,
}

impl<'a> Caller<'a> {
    /// For the rank of these paths; blocks go in `chunks` parts.
    pub fn new(paths: Paths<'a>, chunks: u8) -> Self {
        Caller { paths, chunks }
    }

    /// Size of the operand table.
    pub fn slots(&self) -> usize {
        (3 + usize::from(self.chunks)) * self.paths.ranks() as usize
    }

    /// Slot of the rows put to `peer` (dispatch), or pulled from it (return).
    pub fn rows(&self, peer: u32) -> Slot {
        Slot(peer)
    }

    /// Slot of what goes with those rows (dispatch).
    pub fn notes(&self, peer: u32) -> Slot {
        Slot(self.paths.ranks() + peer)
    }

    /// Slot of the header of the block for `relay` (dispatch).
    pub fn header(&self, relay: u32) -> Slot {
        Slot(2 * self.paths.ranks() + relay)
    }

    /// Slot of chunk `chunk` (from 1) of the block for `relay` (dispatch).
    pub fn block(&self, relay: u32, chunk: u8) -> Slot {
        Slot(3 * self.paths.ranks() + relay * u32::from(self.chunks) + u32::from(chunk) - 1)
    }

    /// Slot of the sum of rows (return).
    pub fn sum(&self) -> Slot {
        Slot(0)
    }

    /// Slot of the fetch of weights (return).
    pub fn weights(&self) -> Slot {
        Slot(1)
    }

    /// Tokens to the ranks of their experts.
    pub fn dispatch(&self) -> DispatchSkeleton {
        DispatchSkeleton { licence: self.licence(), entry: self.entry(false), rows: self.rows_stage() }
    }

    /// Rows (and one `f32` per row) back to their tokens: combine, and the gradient of dispatch.
    pub fn ret(&self) -> ReturnSkeleton {
        let paths = self.paths;
        let mut home: Vec<Item> =
            paths.relays().map(|r| self.on(r, wait(r, Flag::Home, Level::Call))).collect();
        home.extend(self.answer(Flag::Home));
        let mut sum = vec![
            self.on(paths.me(), Op::Reduce { slot: self.sum() }),
            self.on(paths.me(), Op::Reduce { slot: self.weights() }),
        ];
        sum.extend(paths.locals().map(|l| self.on(paths.me(), self.signal(l, Flag::Read, Level::Call))));
        ReturnSkeleton {
            licence: self.licence(),
            entry: self.entry(true),
            home: Stage { name: "home", items: home },
            sum: Stage { name: "sum", items: sum },
        }
    }

    /// Behind "rows" where copy engines bring in what crossed: it lies in this rank's twin.
    pub fn bring_in(&self) -> Stage {
        let me = self.paths.me();
        Stage { name: "in", items: vec![self.on(me, Op::Put { to: me, slot: self.rows(me) })] }
    }

    /// In place of "sum" where copy engines read: they cannot add, so the rows that this rank sums come home first; those of
    /// other nodes, which relays have put into its twin, last.
    pub fn pull(&self) -> Stage {
        let (paths, me) = (self.paths, self.paths.me());
        let from = |p| self.on(p, Op::Put { to: me, slot: self.rows(p) });
        let read = |l| self.on(l, self.signal(l, Flag::Read, Level::Call));
        let items = paths.locals().flat_map(|l| [from(l), read(l)]).chain([from(me)]);
        let items = items.chain(paths.relays().map(from));
        Stage { name: "pull", items: items.collect() }
    }

    /// Whatever this rank offered in its last return has been read: its memory may be written again.
    ///
    /// A return that fills its chunk before its entries needs this. In dispatches the entries say it too, since
    /// whoever writes has heard of every rank's, sent after its last sum; there it only lets the pool free memory early.
    fn licence(&self) -> Stage {
        let read = |l| self.on(l, wait(l, Flag::Read, Level::LastReturn));
        Stage { name: "licence", items: self.paths.locals().map(read).collect() }
    }

    fn entry(&self, offers: bool) -> Stage {
        let paths = self.paths;
        let mut items: Vec<Item> =
            paths.locals().map(|l| self.on(l, self.signal(l, Flag::Entry, Level::Call))).collect();
        if offers {
            items.extend(paths.relays().map(|r| self.on(r, self.signal(r, Flag::Block, Level::Call))));
        }
        if paths.rails() {
            items.push(self.on(paths.me(), self.signal(paths.me(), Flag::Block, Level::Call)));
        }
        let heard = paths.locals().chain(paths.tellers());
        items.extend(heard.map(|p| self.on(p, wait(p, Flag::Entry, Level::Call))));
        items.extend(self.answer(Flag::Entry));
        Stage { name: "entry", items }
    }

    fn rows_stage(&self) -> Stage {
        let paths = self.paths;
        let mut items = Vec::new();
        // What crosses goes first: relays hand on while this rank serves its neighbours.
        for relay in paths.relays() {
            items.push(self.on(relay, Op::Put { to: relay, slot: self.header(relay) }));
            items.push(self.on(relay, self.signal(relay, Flag::Block, Level::Call)));
        }
        match paths.route() {
            Route::Pxn => {
                for (chunk, relay) in (1..=self.chunks).flat_map(|c| paths.relays().map(move |r| (c, r))) {
                    let slot = self.block(relay, chunk);
                    items.push(self.on(relay, Op::PutRows { to: relay, slot }));
                    items.push(self.on(relay, self.signal(relay, Flag::Block, Level::Part(chunk))));
                }
            }
            Route::Direct => paths.relays().for_each(|relay| self.rows_to(relay, &mut items)),
        }
        paths.locals().for_each(|local| self.rows_to(local, &mut items));
        for slot in [self.rows(paths.me()), self.notes(paths.me())] {
            items.push(self.on(paths.me(), Op::PutRows { to: paths.me(), slot }));
        }
        items.extend(paths.peers().map(|p| self.on(p, wait(p, Flag::Landed, Level::Call))));
        items.extend(self.answer(Flag::Home));
        Stage { name: "rows", items }
    }

    fn rows_to(&self, peer: u32, items: &mut Vec<Item>) {
        for slot in [self.rows(peer), self.notes(peer)] {
            items.push(self.on(peer, Op::PutRows { to: peer, slot }));
        }
        items.push(self.on(peer, self.signal(peer, Flag::Landed, Level::Call)));
    }

    /// The wait for a word of this rank's own relay.
    fn answer(&self, flag: Flag) -> Option<Item> {
        let me = self.paths.me();
        self.paths.rails().then(|| self.on(me, wait(me, flag, Level::Call)))
    }

    fn signal(&self, to: u32, flag: Flag, level: Level) -> Op {
        Op::Signal { to, of: self.paths.me(), flag, level }
    }

    /// The track of a peer: one per peer, and this rank's own number for what it does at home.
    fn on(&self, peer: u32, op: Op) -> Item {
        Item { track: peer, op }
    }
}

pub(super) fn wait(from: u32, flag: Flag, level: Level) -> Op {
    Op::Wait { from, flag, level }
}
