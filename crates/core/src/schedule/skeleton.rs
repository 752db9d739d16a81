//! The skeleton of a rank: the stages of its own part of a call, and those of its relay.
//!
//! [`Caller`] builds a rank's own part: its own rows, and its own waits.
//!
//! ```text
//!   dispatch   release   Wait read(l)                                   local peers have read what I offered last
//!              entry     Signal entry -> l , Signal block -> my relay ; Wait entry(l, senders, me)
//!                        - the planner places -
//!              rows      Put header -> r , Signal block -> r            r: my relays
//!                        PutRows chunk c -> r , Signal block c -> r     pxn; direct: as to l
//!                        PutRows -> l , Signal landed -> l ; PutRows -> me ; Wait landed(all) , Wait returned(me)
//!
//!   return     release , offer: entry, and Signal block -> r            the tag says where my rows may be put
//!              returned  Wait returned(r) , Wait returned(me)
//!              sum       Reduce rows, Reduce weights, Signal read -> l
//!   or         pull      Put l -> me                                      copy engines cannot add; own rows stay
//!              returned  as above
//!              pull rest Put staging -> me , Signal read -> l              rows that r returned
//!
//!   enqueued   reached   Signal ready -> me , Wait ready(me)                of the stream; the host waits for it
//!              posted    Signal posted -> l , Wait posted(l)              dispatch, before Wait landed: of streams
//!              ready     Signal ready -> l , Wait ready(l)                return on one node: of streams, around the entry
//! ```
//!
//! Where no net reaches the memory of the rows, they cross to *host staging*. A dispatch then ends
//! with one more stage: "bring in", Put staging -> me.
//!
//! A dispatch along a known layout is the same program with fewer operands. The rank's work for
//! others is the program of its [`Relay`]: "block -> me" starts it, "entry(me)" and "returned(me)"
//! are its answers.
//!
//! [`Relay`] builds a rank's work for others: it sends its counts to other nodes, relays the rows
//! that cross, and returns rows that it summed or read here.
//!
//! ```text
//!   agreement  node entered  Wait block(me) , Wait entry(l)                my node is in this call
//!                            - the relay adds up -
//!              counts sent   Put sums -> s , Signal entry -> s             s: the ranks whose rail peer I am
//!              all entered   Wait entry(senders)                      every node is
//!              agreed        Signal entry -> me
//!
//!   dispatch   headers       Wait block(s)                                 s: my sources
//!              relay rows    Wait block c(s) , PutRows -> l, me            pxn, chunk by chunk
//!                            PutRows metadata -> l, me , Signal landed of s -> l, me
//!
//!   return     headers       Wait block(s)                                 its tag says where s takes its rows
//!              return rows   Reduce chunk c of s , Put sums -> s            where relays sum; else Put rows of s -> s
//!                            Put chunk c of s , l -> me , Reduce it ,             where engines pull, and a kernel sums:
//!                            Signal ready c of s -> me , Wait , Put sums -> s     the host waits for that
//!                            Signal returned -> s
//!
//!   both       relay done    Signal returned -> me
//! ```
//!
//! "Done" is a stage of its own, behind the join of all tracks: it says that this relay has put all
//! that it reads of any rank's memory. The rank then signals its local peers that the memory that
//! they offered has been read. On a device it first waits until its NIC has read that.
//!
//! The two programs of a rank interact only through flags. So they may run in one thread,
//! interleaved in launch order (own puts and signals, then relayed operations, then own waits), or
//! in two. With two, a relay copies rows while its caller is busy elsewhere, between the start of a
//! call and its finish.

use super::op::Part;
use super::{Flag, FlagValue, Op, OperandId, Stage, TrackOp};
use crate::plan::PulledSums;
use crate::topology::{Paths, Route};

/// Builds the stages of a rank's own part. Operands are numbered by their contents, so filling the
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
    pub fn operands(&self) -> usize {
        (3 + usize::from(self.chunks)) * self.paths.ranks() as usize
    }

    /// Operand of the rows put to `peer` (dispatch), or pulled from it (return).
    pub fn rows(&self, peer: u32) -> OperandId {
        OperandId(peer)
    }

    /// Operand of the metadata of those rows (dispatch).
    pub fn metadata(&self, peer: u32) -> OperandId {
        OperandId(self.paths.ranks() + peer)
    }

    /// Operand of the header of the block for `relay` (dispatch).
    pub fn header(&self, relay: u32) -> OperandId {
        OperandId(2 * self.paths.ranks() + relay)
    }

    /// Operand of chunk `chunk` (from 1) of the block for `relay` (dispatch).
    pub fn block(&self, relay: u32, chunk: u8) -> OperandId {
        OperandId(3 * self.paths.ranks() + relay * u32::from(self.chunks) + u32::from(chunk) - 1)
    }

    /// Operand of the sum of rows (return).
    pub fn sum(&self) -> OperandId {
        OperandId(0)
    }

    /// Operand of the fetch of weights (return).
    pub fn weights(&self) -> OperandId {
        OperandId(1)
    }

    /// Return: rows that relays return have landed, and so has this rank's own relay finished.
    fn returned(&self) -> Vec<TrackOp> {
        let returned = self.paths.relays().map(|r| self.on(r, wait(r, Flag::Returned, FlagValue::Call)));
        returned.chain(self.answer(Flag::Returned)).collect()
    }

    /// Return: rows are summed where they lie; their owners may have the memory back.
    fn sum_stage(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let sums = [self.sum(), self.weights()].map(|operand| self.on(me, Op::Reduce { operand }));
        // On the track of the sums: a signal follows the reads that it vouches for.
        let read = paths.local_peers().map(|l| self.on(me, self.signal(l, Flag::Read, FlagValue::Call)));
        sums.into_iter().chain(read).collect()
    }

    /// All-gather: this rank's rows, from where they were gathered to their places. Its table has
    /// one operand.
    fn regroup(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, Op::PutRows { to: me, operand: OperandId(0) })]
    }

    /// Behind "rows" where copy engines bring in the rows that crossed: these lie in this rank's
    /// host staging.
    fn bring_in(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, Op::Put { to: me, operand: self.rows(me) })]
    }

    /// Replaces "sum" where copy engines read: they cannot add, so the rows that this rank sums
    /// come here first, but for its own. Those of this node come while relays return the rest.
    fn pull(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        let put = |peer| self.on(peer, Op::Put { to: me, operand: self.rows(peer) });
        self.paths.local_peers().map(put).collect()
    }

    /// Behind "returned": the rows that relays put into this rank's host staging come last. Owners
    /// may reuse their memory only now, since this rank's relay reads it, too.
    fn pull_rest(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let rest = paths.relays().map(|r| self.on(r, Op::Put { to: me, operand: self.rows(r) }));
        rest.chain(paths.local_peers().map(|l| self.on(l, self.signal(l, Flag::Read, FlagValue::Call))))
            .collect()
    }

    /// The memory that this rank offered in its last return has been read and may be written again.
    ///
    /// A return that fills its chunk before its entries needs this stage. In dispatches the entries
    /// imply it: a writer has heard the entries of all ranks, which they sent after their last
    /// sums. There it only lets the pool free memory early.
    fn read(&self) -> Vec<TrackOp> {
        let read = |l| self.on(l, wait(l, Flag::Read, FlagValue::LastReturn));
        self.paths.local_peers().map(read).collect()
    }

    /// Where hosts run ahead of their streams: this rank's stream says that it has reached the
    /// call, and the host waits for that.
    fn reached(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        let ops = [self.signal(me, Flag::Ready, FlagValue::Call), wait(me, Flag::Ready, FlagValue::Call)];
        ops.map(|op| self.on(me, op)).to_vec()
    }

    /// Where hosts run ahead of their streams: streams say that they have reached the call, and
    /// wait for those of local peers before they read the memory that these offer.
    fn ready(&self) -> Vec<TrackOp> {
        self.meeting(Flag::Ready)
    }

    /// Where hosts run ahead of their streams: hosts say that all copies and signals of the call
    /// are enqueued. Then the cause of every later wait of a stream is in a queue already, and
    /// needs no further driver call.
    fn posted(&self) -> Vec<TrackOp> {
        self.meeting(Flag::Posted)
    }

    /// All ranks of the node raise a flag for each other.
    fn meeting(&self, flag: Flag) -> Vec<TrackOp> {
        let raise = self.paths.local_peers().map(|l| self.on(l, self.signal(l, flag, FlagValue::Call)));
        raise.chain(self.paths.local_peers().map(|l| self.on(l, wait(l, flag, FlagValue::Call)))).collect()
    }

    /// Every rank sends the name of its call and where it can receive. One that `offers` also
    /// informs relays.
    fn entry(&self, offers: bool) -> Vec<TrackOp> {
        let paths = self.paths;
        let mut items: Vec<TrackOp> =
            paths.local_peers().map(|l| self.on(l, self.signal(l, Flag::Entry, FlagValue::Call))).collect();
        if offers {
            items.extend(paths.relays().map(|r| self.on(r, self.signal(r, Flag::Block, FlagValue::Call))));
        }
        if paths.is_multi_node() {
            items.push(self.on(paths.me(), self.signal(paths.me(), Flag::Block, FlagValue::Call)));
        }
        let heard = paths.local_peers().chain(paths.count_senders());
        items.extend(heard.map(|p| self.on(p, wait(p, Flag::Entry, FlagValue::Call))));
        items.extend(self.answer(Flag::Entry));
        items
    }

    /// Dispatch: this rank's rows go out, and those for it land.
    fn rows_stage(&self) -> Vec<TrackOp> {
        let paths = self.paths;
        let mut items = Vec::new();
        // Rows that cross go first: relays copy while this rank serves its local peers.
        for relay in paths.relays() {
            items.push(self.on(relay, Op::Put { to: relay, operand: self.header(relay) }));
            items.push(self.on(relay, self.signal(relay, Flag::Block, FlagValue::Call)));
        }
        match paths.route() {
            Route::Pxn => {
                for (chunk, relay) in (1..=self.chunks).flat_map(|c| paths.relays().map(move |r| (c, r))) {
                    let operand = self.block(relay, chunk);
                    items.push(self.on(relay, Op::PutRows { to: relay, operand }));
                    items.push(self.on(relay, self.signal(relay, Flag::Block, FlagValue::Part(chunk))));
                }
            }
            Route::Direct => paths.relays().for_each(|relay| self.rows_to(relay, &mut items)),
        }
        paths.local_peers().for_each(|local| self.rows_to(local, &mut items));
        // Own rows last: a kernel may place them while engines serve the other ranks.
        for operand in [self.metadata(paths.me()), self.rows(paths.me())] {
            items.push(self.on(paths.me(), Op::PutRows { to: paths.me(), operand }));
        }
        items.extend(paths.peers().map(|p| self.on(p, wait(p, Flag::Landed, FlagValue::Call))));
        items.extend(self.answer(Flag::Returned));
        items
    }

    fn rows_to(&self, peer: u32, items: &mut Vec<TrackOp>) {
        for operand in [self.rows(peer), self.metadata(peer)] {
            items.push(self.on(peer, Op::PutRows { to: peer, operand }));
        }
        items.push(self.on(peer, self.signal(peer, Flag::Landed, FlagValue::Call)));
    }

    /// The wait for a word of this rank's own relay.
    fn answer(&self, flag: Flag) -> Option<TrackOp> {
        let me = self.paths.me();
        self.paths.is_multi_node().then(|| self.on(me, wait(me, flag, FlagValue::Call)))
    }

    fn signal(&self, to: u32, flag: Flag, level: FlagValue) -> Op {
        Op::Signal { to, of: self.paths.me(), flag, level }
    }

    /// The track of a peer: one per peer; this rank's own number stands for its local work.
    fn on(&self, peer: u32, op: Op) -> TrackOp {
        TrackOp { track: peer, op }
    }
}

fn wait(from: u32, flag: Flag, level: FlagValue) -> Op {
    Op::Wait { from, flag, level }
}

/// Builds the stages of a rank's relay. Sources are numbered by their order in [`Paths::sources`].
#[derive(Clone, Copy, Debug)]
pub struct Relay<'a> {
    paths: Paths<'a>,
    chunks: u8,
    sums: RelaySums,
}

/// How relays make what they return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RelaySums {
    /// They return rows as they are.
    #[default]
    None,
    /// They read the rows of each sum where they lie, chunk by chunk.
    InPlace,
    /// Copy engines pull the rows of a chunk here, then a kernel sums them.
    Pulled,
}

impl<'a> Relay<'a> {
    /// For the rank of these paths; blocks come in `chunks` parts.
    pub fn new(paths: Paths<'a>, chunks: u8) -> Self {
        Relay { paths, chunks, sums: RelaySums::None }
    }

    /// One that sums the rows that it returns. Sums return in chunks, too.
    pub fn summing(self, sums: RelaySums) -> Self {
        Relay { sums, ..self }
    }

    /// Size of the operand table.
    pub fn operands(&self) -> usize {
        let (sources, served) = (self.paths.sources().count(), self.served().len());
        let (ranks, parts) = (self.paths.ranks() as usize, usize::from(self.chunks) + 1);
        ranks + sources * parts * served.max(3)
    }

    /// Operand of the message to `source`.
    pub fn message(&self, source: u32) -> OperandId {
        OperandId(source)
    }

    /// Operand of the rows returned to the `nth` source, part `chunk` (from 1) of them.
    pub fn returned(&self, nth: u32, chunk: u8) -> OperandId {
        OperandId(self.paths.ranks() + 3 * (nth * (u32::from(self.chunks) + 1) + u32::from(chunk)))
    }

    /// Operand of the sums that go with it.
    pub fn partials(&self, nth: u32, chunk: u8) -> OperandId {
        OperandId(self.returned(nth, chunk).0 + 1)
    }

    /// Operand of the rows that engines pull before that chunk is summed for the `nth` source.
    pub fn pulled(&self, nth: u32, chunk: u8) -> OperandId {
        OperandId(self.returned(nth, chunk).0 + 2)
    }

    /// In how many chunks, at most, rows are pulled and summed for each source.
    pub fn pulled_chunks(&self) -> u8 {
        PulledSums::most_chunks(self.chunks, self.paths)
    }

    /// Operand of chunk `chunk` (from 1) of the `nth` source for the `member`th rank served; chunk
    /// 0: the row metadata.
    pub fn rows(&self, nth: u32, chunk: u8, member: u32) -> OperandId {
        let served = self.served().len() as u32;
        let block = nth * (u32::from(self.chunks) + 1) + u32::from(chunk);
        OperandId(self.paths.ranks() + block * served + member)
    }

    /// This node has entered the call.
    fn node_entered(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        let begin = self.on(me, wait(me, Flag::Block, FlagValue::Call));
        let entered = self.paths.local_peers().map(|l| self.on(l, wait(l, Flag::Entry, FlagValue::Call)));
        [begin].into_iter().chain(entered).collect()
    }

    /// Other nodes hear of it, and of what this node counts.
    fn counts_sent(&self) -> Vec<TrackOp> {
        let put = |s| self.on(s, Op::Put { to: s, operand: self.message(s) });
        let signal = |s| self.on(s, self.signal(s, self.paths.me(), Flag::Entry));
        self.paths.count_receivers().flat_map(|source| [put(source), signal(source)]).collect()
    }

    /// All nodes have entered.
    fn all_entered(&self) -> Vec<TrackOp> {
        self.paths.count_senders().map(|t| self.on(t, wait(t, Flag::Entry, FlagValue::Call))).collect()
    }

    /// The rank itself hears that.
    fn agreed(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, self.signal(me, me, Flag::Entry))]
    }

    /// Sources have sent their headers, or their offers.
    fn headers(&self) -> Vec<TrackOp> {
        self.paths.sources().map(|s| self.on(s, wait(s, Flag::Block, FlagValue::Call))).collect()
    }

    /// The rank itself hears that its relay has finished.
    fn relay_done(&self) -> Vec<TrackOp> {
        let me = self.paths.me();
        vec![self.on(me, self.signal(me, me, Flag::Returned))]
    }

    /// Dispatch: rows of sources go to the ranks of this node.
    fn relay_rows(&self) -> Vec<TrackOp> {
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
    fn return_rows(&self) -> Vec<TrackOp> {
        let (paths, me) = (self.paths, self.paths.me());
        let mut items = Vec::new();
        let chunks = match self.sums {
            RelaySums::None => 1,
            RelaySums::InPlace => self.chunks,
            RelaySums::Pulled => self.pulled_chunks(),
        };
        for chunk in 1..=chunks {
            for (nth, source) in (0..).zip(paths.sources()) {
                if self.sums == RelaySums::Pulled {
                    items.push(self.on(source, Op::Put { to: me, operand: self.pulled(nth, chunk) }));
                }
                if self.sums != RelaySums::None {
                    items.push(self.on(source, Op::Reduce { operand: self.partials(nth, chunk) }));
                }
                if self.sums == RelaySums::Pulled {
                    // A word of the source that only this rank's stream writes here. A host sends
                    // sums only behind this word.
                    let (flag, level) = (Flag::Ready, FlagValue::Part(chunk));
                    items.push(self.on(source, Op::Signal { to: me, of: source, flag, level }));
                    items.push(self.on(source, wait(source, flag, level)));
                }
                items.push(self.on(source, Op::Put { to: source, operand: self.returned(nth, chunk) }));
            }
        }
        items.extend(paths.sources().map(|source| self.on(source, self.signal(source, me, Flag::Returned))));
        items
    }

    /// Rows of a source to every rank served, from the next rank on.
    fn members(&self, source: u32, operand: impl Fn(u32) -> OperandId) -> impl Iterator<Item = TrackOp> {
        let (paths, served) = (self.paths, self.served());
        let first = paths.nodes().index_in_node(paths.me()) as usize + 1;
        let order = (0..served.len()).map(move |step| (first + step) % served.len());
        order.map(move |member| {
            let (to, operand) = (served[member], operand(member as u32));
            self.on(source, Op::PutRows { to, operand })
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

/// A stage of a rank's skeleton.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum StageId {
    /// Waits until readers have read what this rank offered last.
    Release,
    /// Dispatch and agreement: sends this rank's tag, waits for those of all.
    Entry,
    /// Return: as [`StageId::Entry`], and sends relays the addresses of returned rows.
    Offer,
    /// Dispatch: puts the rows, waits for those that land here.
    Rows,
    /// Dispatch, behind [`StageId::Rows`]: copy engines bring in what landed in host staging.
    BringIn,
    /// Enqueued: the caller's stream signals its host that it has reached the call.
    Reached,
    /// Enqueued dispatch: hosts of this node signal each other that all their copies are enqueued.
    Posted,
    /// Enqueued return: streams of this node signal each other that they have reached the call.
    Ready,
    /// Return: waits until relays have returned their rows. Slots have no relays: there the stage
    /// puts partial rows, and waits for those that come here.
    Returned,
    /// Return: sums rows where they lie, and says that they are read.
    Sum,
    /// Return, in place of [`StageId::Sum`]: copy engines pull rows of local peers here, since they
    /// cannot add.
    Pull,
    /// Return, behind [`StageId::Returned`]: copy engines pull the rows that relays returned;
    /// owners may reuse their memory.
    PullRest,
    /// All-gather: copies gathered rows to their places.
    Regroup,
    /// Relay: waits until all ranks of this node have entered.
    NodeEntered,
    /// Relay: sends the counts of this node to other nodes.
    CountsSent,
    /// Relay: waits until all nodes have entered.
    AllEntered,
    /// Relay: signals its own rank that it has heard all nodes.
    Agreed,
    /// Relay: waits for headers, or offers, of its sources.
    Headers,
    /// Relay, dispatch: passes rows on to the ranks of this node.
    RelayRows,
    /// Relay, return: sends rows of this node back.
    ReturnRows,
    /// Relay: signals its own rank that it has put all that it reads of any rank's memory.
    RelayDone,
}

/// A tensor of the caller, along whose layout a stage moves or sums rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageTensor {
    /// None.
    None,
    /// The rows that go out.
    Rows,
    /// The sums of what came back.
    Sums,
}

/// The tables that the operands of a stage come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageOperands {
    /// The rank's own rows and tags.
    Own,
    /// Operands of the copies that bring rows in.
    BroughtIn,
    /// A relay's messages, before any verdict.
    Messages,
    /// Blocks that a relay passes on or returns: they alone count as relayed.
    Relayed,
}

impl StageId {
    /// All stages.
    pub const ALL: [StageId; 21] = [
        StageId::Release,
        StageId::Entry,
        StageId::Offer,
        StageId::Rows,
        StageId::BringIn,
        StageId::Reached,
        StageId::Posted,
        StageId::Ready,
        StageId::Returned,
        StageId::Sum,
        StageId::Pull,
        StageId::PullRest,
        StageId::Regroup,
        StageId::NodeEntered,
        StageId::CountsSent,
        StageId::AllEntered,
        StageId::Agreed,
        StageId::Headers,
        StageId::RelayRows,
        StageId::ReturnRows,
        StageId::RelayDone,
    ];

    /// Name for timelines and faults.
    pub const fn name(self) -> &'static str {
        match self {
            StageId::Release => "release",
            StageId::Entry => "entry",
            StageId::Offer => "offer",
            StageId::Rows => "rows",
            StageId::BringIn => "bring in",
            StageId::Reached => "reached",
            StageId::Posted => "posted",
            StageId::Ready => "ready",
            StageId::Returned => "returned",
            StageId::Sum => "sum",
            StageId::Pull => "pull",
            StageId::PullRest => "pull rest",
            StageId::Regroup => "regroup",
            StageId::NodeEntered => "node entered",
            StageId::CountsSent => "counts sent",
            StageId::AllEntered => "all entered",
            StageId::Agreed => "agreed",
            StageId::Headers => "headers",
            StageId::RelayRows => "relay rows",
            StageId::ReturnRows => "return rows",
            StageId::RelayDone => "relay done",
        }
    }

    /// The caller's tensor of the stage.
    pub const fn tensor(self) -> StageTensor {
        match self {
            StageId::Rows => StageTensor::Rows,
            StageId::Sum => StageTensor::Sums,
            _ => StageTensor::None,
        }
    }

    /// Where its operands come from.
    pub const fn operands(self) -> StageOperands {
        use StageId::{Agreed, AllEntered, CountsSent, NodeEntered};
        use StageId::{BringIn, Headers, RelayDone, RelayRows, ReturnRows};
        match self {
            BringIn => StageOperands::BroughtIn,
            NodeEntered | CountsSent | AllEntered | Agreed => StageOperands::Messages,
            Headers | RelayRows | ReturnRows | RelayDone => StageOperands::Relayed,
            _ => StageOperands::Own,
        }
    }

    /// Whether its flags are raised by the caller's stream, and not by that of copies.
    pub const fn is_of_caller(self) -> bool {
        matches!(self, StageId::Reached)
    }
}

/// The skeleton of one rank: what does not change from call to call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages {
    all: Box<[Stage]>,
}

impl Stages {
    /// Of the rank of these paths. Blocks come in `chunks` parts.
    pub fn new(paths: Paths<'_>, chunks: u8, sums: RelaySums) -> Self {
        let (caller, relay) = (Caller::new(paths, chunks), Relay::new(paths, chunks).summing(sums));
        let items = |id| match id {
            StageId::Release => caller.read(),
            StageId::Entry => caller.entry(false),
            StageId::Offer => caller.entry(true),
            StageId::Rows => caller.rows_stage(),
            StageId::BringIn => caller.bring_in(),
            StageId::Reached => caller.reached(),
            StageId::Posted => caller.posted(),
            StageId::Ready => caller.ready(),
            StageId::Returned => caller.returned(),
            StageId::Sum => caller.sum_stage(),
            StageId::Pull => caller.pull(),
            StageId::PullRest => caller.pull_rest(),
            StageId::Regroup => caller.regroup(),
            StageId::NodeEntered => relay.node_entered(),
            StageId::CountsSent => relay.counts_sent(),
            StageId::AllEntered => relay.all_entered(),
            StageId::Agreed => relay.agreed(),
            StageId::Headers => relay.headers(),
            StageId::RelayRows => relay.relay_rows(),
            StageId::ReturnRows => relay.return_rows(),
            StageId::RelayDone => relay.relay_done(),
        };
        Stages { all: StageId::ALL.map(|id| Stage { name: id.name(), items: items(id) }).into() }
    }

    /// One stage.
    pub fn of(&self, id: StageId) -> &Stage {
        &self.all[id as usize]
    }

    /// The operations of a stage, or of a part of it, in launch order.
    pub fn items(&self, id: StageId, part: Part) -> &[TrackOp] {
        self.of(id).part(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_lie_where_their_names_point() {
        assert!((0..).zip(StageId::ALL).all(|(index, id)| id as usize == index));
    }
}
