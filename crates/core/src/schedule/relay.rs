//! A rank's work for others: it sends its counts to other nodes, relays the rows that cross, and
//! returns rows that it summed or read here.
//!
//! ```text
//!   agreement  node entered  Wait block(me) , Wait entry(l)                my node is in this call
//!                            - the relay adds up -
//!              counts sent   Put sums -> s , Signal entry -> s             s: the ranks whose rail peer I am
//!              all entered   Wait entry(count_senders)                           every node is
//!              agreed        Signal entry -> me
//!
//!   dispatch   headers       Wait block(s)                                 s: my sources
//!              relay rows    Wait block c(s) , PutRows -> l, me            pxn, chunk by chunk
//!                            PutRows metadata -> l, me , Signal landed of s -> l, me
//!
//!   return     headers       Wait block(s)                                 its tag says where s takes its rows
//!              return rows   Reduce chunk c of s , Put sums -> s            where relays sum; else Put rows of s -> s
//!                            Signal home -> s
//!
//!   both       relay done    Signal home -> me
//! ```
//!
//! "Done" is a stage of its own, behind the join of all tracks: it says that this relay reads no
//! rank's memory any more. The rank then signals its local peers that the memory that they offered
//! has been read.
//!
//! The two programs of a rank interact only through flags. So they may run in one thread,
//! interleaved in launch order (own puts and signals, then relayed operations, then own waits), or
//! in two. With two, a relay copies rows while its caller is busy elsewhere, between the start of a
//! call and its finish.

use super::caller::wait;
use super::{Flag, FlagValue, Op, OperandId, TrackOp};
use crate::topology::{Paths, Route};

/// Builds the stages of a rank's relay. Sources are numbered by their order in [`Paths::sources`].
#[derive(Clone, Copy, Debug)]
pub struct Relay<'a> {
    paths: Paths<'a>,
    chunks: u8,
    sums: bool,
}

impl<'a> Relay<'a> {
    /// For the rank of these paths; blocks come in `chunks` parts.
    pub fn new(paths: Paths<'a>, chunks: u8) -> Self {
        Relay { paths, chunks, sums: false }
    }

    /// One that sums the rows that it returns: partials go in `chunks` parts, too.
    pub fn summing(self, sums: bool) -> Self {
        Relay { sums, ..self }
    }

    /// Size of the operand table.
    pub fn slots(&self) -> usize {
        let (sources, served) = (self.paths.sources().count(), self.served().len());
        let (ranks, parts) = (self.paths.ranks() as usize, usize::from(self.chunks) + 1);
        ranks + sources * parts * served.max(2)
    }

    /// Slot of the message to `source`.
    pub fn message(&self, source: u32) -> OperandId {
        OperandId(source)
    }

    /// Slot of the rows returned to the `nth` source, part `chunk` (from 1) of them.
    pub fn home(&self, nth: u32, chunk: u8) -> OperandId {
        OperandId(self.paths.ranks() + 2 * (nth * (u32::from(self.chunks) + 1) + u32::from(chunk)))
    }

    /// Slot of the sums that go with it.
    pub fn partials(&self, nth: u32, chunk: u8) -> OperandId {
        OperandId(self.home(nth, chunk).0 + 1)
    }

    /// Slot of chunk `chunk` (from 1) of the `nth` source for the `member`th rank served; chunk 0:
    /// the row metadata.
    pub fn rows(&self, nth: u32, chunk: u8, member: u32) -> OperandId {
        let served = self.served().len() as u32;
        let block = nth * (u32::from(self.chunks) + 1) + u32::from(chunk);
        OperandId(self.paths.ranks() + block * served + member)
    }

    /// This node has entered the call.
    pub(super) fn node_entered(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        let begin = self.on(me, wait(me, Flag::Block, FlagValue::Call));
        let entered = self.paths.local_peers().map(|l| self.on(l, wait(l, Flag::Entry, FlagValue::Call)));
        [begin].into_iter().chain(entered).collect()
    }

    /// Other nodes hear of it, and of what this node counts.
    pub(super) fn counts_sent(&self) -> Vec<TrackOp> {
        let put = |s| self.on(s, Op::Put { to: s, slot: self.message(s) });
        let signal = |s| self.on(s, self.signal(s, self.paths.me(), Flag::Entry));
        self.paths.count_receivers().flat_map(|source| [put(source), signal(source)]).collect()
    }

    /// All nodes have entered.
    pub(super) fn all_entered(&self) -> Vec<TrackOp> {
        self.paths.count_senders().map(|t| self.on(t, wait(t, Flag::Entry, FlagValue::Call))).collect()
    }

    /// The rank itself hears that.
    pub(super) fn agreed(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, self.signal(me, me, Flag::Entry))]
    }

    /// Sources have sent their headers, or their offers.
    pub(super) fn headers(&self) -> Vec<TrackOp> {
        self.paths.sources().map(|s| self.on(s, wait(s, Flag::Block, FlagValue::Call))).collect()
    }

    /// The rank itself hears that its relay has finished.
    pub(super) fn relay_done(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, self.signal(me, me, Flag::Returned))]
    }

    /// Dispatch: rows of sources go to the ranks of this node.
    pub(super) fn relay_rows(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let mut items = Vec::new();
        if paths.route() == Route::Pxn {
            for (chunk, (nth, source)) in
                (1..=self.chunks).flat_map(|c| (0..).zip(paths.sources()).map(move |s| (c, s)))
            {
                items.push(self.on(source, wait(source, Flag::Block, FlagValue::Part(chunk))));
                items.extend(self.members(source, |m| self.rows(nth, chunk, m)));
            }
            for (nth, source) in (0..).zip(paths.sources()) {
                items.extend(self.members(source, |m| self.rows(nth, 0, m)));
                // Its own rank last: its signal implies that all others have been sent theirs.
                let locals = paths.local_peers().chain([me]);
                items.extend(locals.map(|to| self.on(source, self.signal(to, source, Flag::Landed))));
            }
        }
        items
    }

    /// Return: rows of this node go back to their sources.
    pub(super) fn return_rows(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let mut items = Vec::new();
        for chunk in 1..=if self.sums { self.chunks } else { 1 } {
            for (nth, source) in (0..).zip(paths.sources()) {
                if self.sums {
                    items.push(self.on(source, Op::Reduce { slot: self.partials(nth, chunk) }));
                }
                items.push(self.on(source, Op::Put { to: source, slot: self.home(nth, chunk) }));
            }
        }
        items.extend(paths.sources().map(|source| self.on(source, self.signal(source, me, Flag::Returned))));
        items
    }

    /// Rows of a source to every rank served, from the next rank on.
    fn members(&self, source: u32, slot: impl Fn(u32) -> OperandId) -> impl Iterator<Item = TrackOp> {
        let (paths, served) = (self.paths, self.served());
        let first = paths.nodes().index_in_node(paths.me()) as usize + 1;
        let order = (0..served.len()).map(move |step| (first + step) % served.len());
        order.map(move |member| {
            let (to, slot) = (served[member], slot(member as u32));
            self.on(source, Op::PutRows { to, slot })
        })
    }

    fn served(&self) -> &'a [u32] {
        self.paths.served_by(self.paths.me())
    }

    fn signal(&self, to: u32, of: u32, flag: Flag) -> Op {
        Op::Signal { to, of, flag, level: FlagValue::Call }
    }

    /// A track per rank that is relayed, behind those of the rank itself.
    fn on(&self, peer: u32, op: Op) -> TrackOp {
        TrackOp { track: self.paths.ranks() + peer, op }
    }
}
