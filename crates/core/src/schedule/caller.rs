//! A rank's own part of a call: its own rows, and its own waits.
//!
//! ```text
//!   dispatch   release   Wait read(l)                                   local peers have read what I offered last
//!              entry     Signal entry -> l , Signal block -> my relay ; Wait entry(l, tellers, me)
//!                        - the planner places -
//!              rows      Put header -> r , Signal block -> r            r: my relays
//!                        PutRows chunk c -> r , Signal block c -> r     pxn; direct: as to l
//!                        PutRows -> l , Signal landed -> l ; PutRows -> me ; Wait landed(all) , Wait home(me)
//!
//!   return     release , offer: entry, and Signal block -> r            the tag says where my rows may be put
//!              home      Wait home(r) , Wait home(me)
//!              sum       Reduce rows, Reduce weights, Signal read -> l
//!   or         pull      Put l -> me ; Put me -> me                       copy engines cannot add
//!              home      as above
//!              pull rest Put twin -> me , Signal read -> l                 what r returned
//!
//!   enqueued   posted    Signal posted -> l , Wait posted(l)              dispatch, before Wait landed: of streams
//!              ready     Signal ready -> l , Wait ready(l)                return on one node: of streams, around the entry
//! ```
//!
//! Where no net reaches the memory of the rows, they cross to its *twin*, staging in host memory. A
//! dispatch then ends with one more stage: "bring in", Put twin -> me.
//!
//! A dispatch along a known layout is the same program with fewer operands. The rank's work for
//! others is the program of its [`Relay`](super::Relay): "block -> me" starts it, "entry(me)" and
//! "home(me)" are its answers.

use super::{Flag, FlagValue, Op, OperandId, TrackOp};
use crate::topology::{Paths, Route};

/// Builds the stages of a rank's own part. Slots are numbered by their contents, so filling the
/// operands needs no search.
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
    pub fn rows(&self, peer: u32) -> OperandId {
        OperandId(peer)
    }

    /// Slot of the metadata of those rows (dispatch).
    pub fn notes(&self, peer: u32) -> OperandId {
        OperandId(self.paths.ranks() + peer)
    }

    /// Slot of the header of the block for `relay` (dispatch).
    pub fn header(&self, relay: u32) -> OperandId {
        OperandId(2 * self.paths.ranks() + relay)
    }

    /// Slot of chunk `chunk` (from 1) of the block for `relay` (dispatch).
    pub fn block(&self, relay: u32, chunk: u8) -> OperandId {
        OperandId(3 * self.paths.ranks() + relay * u32::from(self.chunks) + u32::from(chunk) - 1)
    }

    /// Slot of the sum of rows (return).
    pub fn sum(&self) -> OperandId {
        OperandId(0)
    }

    /// Slot of the fetch of weights (return).
    pub fn weights(&self) -> OperandId {
        OperandId(1)
    }

    /// Return: rows that relays return have landed, and so has this rank's own relay finished.
    pub(super) fn home(&self) -> Vec<TrackOp> {
        let home = self.paths.relays().map(|r| self.on(r, wait(r, Flag::Returned, FlagValue::Call)));
        home.chain(self.answer(Flag::Returned)).collect()
    }

    /// Return: rows are summed where they lie; their owners may have the memory back.
    pub(super) fn sum_stage(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let sums = [self.sum(), self.weights()].map(|slot| self.on(me, Op::Reduce { slot }));
        // On the track of the sums: a signal follows the reads that it vouches for.
        let read = paths.local_peers().map(|l| self.on(me, self.signal(l, Flag::Read, FlagValue::Call)));
        sums.into_iter().chain(read).collect()
    }

    /// All-gather: this rank's rows, from where they were gathered to their places. Its table has
    /// one operand.
    pub(super) fn regroup(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, Op::PutRows { to: me, slot: OperandId(0) })]
    }

    /// Behind "rows" where copy engines bring in the rows that crossed: these lie in this rank's
    /// twin.
    pub(super) fn bring_in(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, Op::Put { to: me, slot: self.rows(me) })]
    }

    /// Replaces "sum" where copy engines read: they cannot add, so the rows that this rank sums
    /// come here first. Those of this node come while relays return the rest.
    pub(super) fn pull(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        self.paths
            .local_peers()
            .chain([me])
            .map(|p| self.on(p, Op::Put { to: me, slot: self.rows(p) }))
            .collect()
    }

    /// Behind "home": the rows that relays put into this rank's host staging come last. Owners may
    /// reuse their memory only now, since this rank's relay reads it, too.
    pub(super) fn pull_rest(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let rest = paths.relays().map(|r| self.on(r, Op::Put { to: me, slot: self.rows(r) }));
        rest.chain(paths.local_peers().map(|l| self.on(l, self.signal(l, Flag::Read, FlagValue::Call))))
            .collect()
    }

    /// The memory that this rank offered in its last return has been read and may be written again.
    ///
    /// A return that fills its chunk before its entries needs this stage. In dispatches the entries
    /// imply it: a writer has heard the entries of all ranks, which they sent after their last
    /// sums. There it only lets the pool free memory early.
    pub(super) fn read(&self) -> Vec<TrackOp> {
        let read = |l| self.on(l, wait(l, Flag::Read, FlagValue::LastReturn));
        self.paths.local_peers().map(read).collect()
    }

    /// Where hosts run ahead of their streams: streams say that they have reached the call, and
    /// wait for those of local peers before they read the memory that these offer.
    pub(super) fn ready(&self) -> Vec<TrackOp> {
        self.meeting(Flag::Ready)
    }

    /// Where hosts run ahead of their streams: hosts say that all copies and signals of the call
    /// are enqueued. Then the cause of every later wait of a stream is in a queue already, and
    /// needs no further driver call.
    pub(super) fn posted(&self) -> Vec<TrackOp> {
        self.meeting(Flag::Posted)
    }

    /// All ranks of the node raise a flag for each other.
    fn meeting(&self, flag: Flag) -> Vec<TrackOp> {
        let raise = self.paths.local_peers().map(|l| self.on(l, self.signal(l, flag, FlagValue::Call)));
        raise.chain(self.paths.local_peers().map(|l| self.on(l, wait(l, flag, FlagValue::Call)))).collect()
    }

    /// Every rank sends the name of its call and where it can receive. One that `offers` also
    /// informs relays.
    pub(super) fn entry(&self, offers: bool) -> Vec<TrackOp> {
        let paths = self.paths;
        let mut items: Vec<TrackOp> =
            paths.local_peers().map(|l| self.on(l, self.signal(l, Flag::Entry, FlagValue::Call))).collect();
        if offers {
            items.extend(paths.relays().map(|r| self.on(r, self.signal(r, Flag::Block, FlagValue::Call))));
        }
        if paths.rails() {
            items.push(self.on(paths.me(), self.signal(paths.me(), Flag::Block, FlagValue::Call)));
        }
        let heard = paths.local_peers().chain(paths.count_senders());
        items.extend(heard.map(|p| self.on(p, wait(p, Flag::Entry, FlagValue::Call))));
        items.extend(self.answer(Flag::Entry));
        items
    }

    /// Dispatch: this rank's rows go out, and those for it land.
    pub(super) fn rows_stage(&self) -> Vec<TrackOp> {
        let paths = self.paths;
        let mut items = Vec::new();
        // Rows that cross go first: relays copy while this rank serves its local peers.
        for relay in paths.relays() {
            items.push(self.on(relay, Op::Put { to: relay, slot: self.header(relay) }));
            items.push(self.on(relay, self.signal(relay, Flag::Block, FlagValue::Call)));
        }
        match paths.route() {
            Route::Pxn => {
                for (chunk, relay) in (1..=self.chunks).flat_map(|c| paths.relays().map(move |r| (c, r))) {
                    let slot = self.block(relay, chunk);
                    items.push(self.on(relay, Op::PutRows { to: relay, slot }));
                    items.push(self.on(relay, self.signal(relay, Flag::Block, FlagValue::Part(chunk))));
                }
            }
            Route::Direct => paths.relays().for_each(|relay| self.rows_to(relay, &mut items)),
        }
        paths.local_peers().for_each(|local| self.rows_to(local, &mut items));
        for slot in [self.rows(paths.me()), self.notes(paths.me())] {
            items.push(self.on(paths.me(), Op::PutRows { to: paths.me(), slot }));
        }
        items.extend(paths.peers().map(|p| self.on(p, wait(p, Flag::Landed, FlagValue::Call))));
        items.extend(self.answer(Flag::Returned));
        items
    }

    fn rows_to(&self, peer: u32, items: &mut Vec<TrackOp>) {
        for slot in [self.rows(peer), self.notes(peer)] {
            items.push(self.on(peer, Op::PutRows { to: peer, slot }));
        }
        items.push(self.on(peer, self.signal(peer, Flag::Landed, FlagValue::Call)));
    }

    /// The wait for a word of this rank's own relay.
    fn answer(&self, flag: Flag) -> Option<TrackOp> {
        let me = self.paths.me();
        self.paths.rails().then(|| self.on(me, wait(me, flag, FlagValue::Call)))
    }

    fn signal(&self, to: u32, flag: Flag, level: FlagValue) -> Op {
        Op::Signal { to, of: self.paths.me(), flag, level }
    }

    /// The track of a peer: one per peer; this rank's own number stands for its local work.
    fn on(&self, peer: u32, op: Op) -> TrackOp {
        TrackOp { track: peer, op }
    }
}

pub(super) fn wait(from: u32, flag: Flag, level: FlagValue) -> Op {
    Op::Wait { from, flag, level }
}
