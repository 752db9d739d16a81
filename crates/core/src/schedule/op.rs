//! Operations, the stages they are grouped in, and the actor of each.
//!
//! ```text
//!   stage   track of peer 1   PutRows  Signal ..         Wait
//!           track of peer 2   PutRows  Signal ..         Wait          tracks know of each other only through flags
//!           own track         PutRows ..
//!           launch order      | own puts and signals | waits |         any number of in-order queues keeps it
//! ```

use crate::topology::{Paths, Route};

/// Which of its flag words at a peer a rank writes.
///
/// At every rank there is one word of each kind for every rank of the group: a cache line each, one
/// writer, values that only grow. A word is named by the rank it speaks *of*, which is its writer
/// in all kinds but one. On a [stream](super::stream_program) words do not grow: there a word has
/// two writers, which take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Flag {
    /// "I am in this call, this is what I call, and this is where you may write": carries a
    /// [`Tag`](super::Tag). From a rank of another node: "my node is in this call, and here is what
    /// it counts". From a rank's relay to the rank itself: "I have heard all ranks".
    Entry = 0,
    /// "The rows of this source have landed at you." Written by the source on its own node, and by
    /// the source's relay elsewhere.
    Landed = 1,
    /// "I have read what you offered: its memory is yours again."
    Read = 2,
    /// "This part of my block has landed at you, its relay": part 0 is the header or, where nothing
    /// is sent, the offer; carries a [`Tag`](super::Tag). From a rank to its own relay: "begin".
    Block = 3,
    /// "The rows that I return to you have landed." From a rank's relay to the rank itself: "I am
    /// done."
    Returned = 4,
    /// "My stream has reached this call: my memory may be read as agreed." Written by the stream
    /// itself, for calls that its host enters ahead of it. Of a source of another node, to the
    /// rank's own host: "this part of what I return to it is summed."
    Ready = 5,
    /// "My copies and signals of this call are enqueued." From host to host.
    Posted = 6,
}

impl Flag {
    /// Number of kinds.
    pub const COUNT: usize = 7;
    /// All kinds, in the order of their words.
    pub const ALL: [Flag; Flag::COUNT] =
        [Flag::Entry, Flag::Landed, Flag::Read, Flag::Block, Flag::Returned, Flag::Ready, Flag::Posted];

    /// Name for errors and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Flag::Entry => "entry",
            Flag::Landed => "landed",
            Flag::Read => "read",
            Flag::Block => "block",
            Flag::Returned => "returned",
            Flag::Ready => "ready",
            Flag::Posted => "posted",
        }
    }
}

/// The generation that a flag operation means. The number itself is an operand: it grows with every
/// call, except on a [stream](super::stream_program), where it is a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlagValue {
    /// The running call.
    Call,
    /// A part of the running call: a chunk of a block, from 1 on.
    Part(u8),
    /// The last call that let peers read this rank's memory (0 before the first): the release that
    /// allows to reuse it.
    LastReturn,
    /// On a stream: signaled, and not yet reset by the waiting rank.
    Credit,
    /// On a stream: the value to which a rank resets a word of its own once it has waited.
    Reset,
}

/// Index into the operand table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperandId(pub u32);

/// One operation of a track. Peers are positions in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Copies spans from here, or from memory of this node, to a peer's windows. An empty operand
    /// moves nothing.
    Put {
        /// The peer (or this rank itself).
        to: u32,
        /// Which spans.
        operand: OperandId,
    },
    /// Copies rows by index to runs in a peer's window: a gather on the way.
    PutRows {
        /// The peer (or this rank itself).
        to: u32,
        /// Which rows.
        operand: OperandId,
    },
    /// Raises a flag word at a peer, after all earlier puts and reads of this track; or resets one
    /// at this rank itself ([`FlagValue::Reset`]).
    Signal {
        /// The peer (or this rank itself: between a rank and its own relay).
        to: u32,
        /// The rank that it speaks of.
        of: u32,
        /// Which kind of word.
        flag: Flag,
        /// To which generation.
        level: FlagValue,
    },
    /// Waits until a local flag word has at least the given generation.
    Wait {
        /// The rank that the word speaks of.
        from: u32,
        /// Which kind of word.
        flag: Flag,
        /// Which generation.
        level: FlagValue,
    },
    /// Sums rows of readable windows, by index and in a fixed order.
    Reduce {
        /// Which rows.
        operand: OperandId,
    },
}

/// An operation and the track it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrackOp {
    /// Operations of one track happen in order; tracks know of each other only through flags.
    pub track: u32,
    /// The operation.
    pub op: Op,
}

/// Operations between two planning steps. A stage completes before the planner continues, and the
/// planner fills the operands of the next stage from the tags that the waits of this one received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Purpose of the stage, in timelines and faults.
    pub name: &'static str,
    /// The operations in *launch order*: a linear extension by phase (own puts and signals, then
    /// waits), such that any executor may fold the tracks onto any number of in-order queues
    /// without a deadlock.
    pub items: Vec<TrackOp>,
}

/// Which part of a stage a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it.
    Whole,
    /// All operations before the first wait.
    Start,
    /// The first wait, and all operations behind it.
    Finish,
}

impl Stage {
    /// One half of a call's concurrent work: the part that is started now and finished later.
    pub fn start(&self) -> &[TrackOp] {
        &self.items[..self.first_wait()]
    }

    /// The other half, from the first wait on.
    pub fn finish(&self) -> &[TrackOp] {
        &self.items[self.first_wait()..]
    }

    /// One of the halves, or both.
    pub fn part(&self, part: Part) -> &[TrackOp] {
        match part {
            Part::Whole => &self.items,
            Part::Start => self.start(),
            Part::Finish => self.finish(),
        }
    }

    fn first_wait(&self) -> usize {
        let first = self.items.iter().position(|item| matches!(item.op, Op::Wait { .. }));
        first.unwrap_or(self.items.len())
    }
}

/// Actor of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// The host: tags, counts, and all that crosses to other nodes.
    Host,
    /// A stream of the device: copies within the node, and the flags that announce them.
    Stream,
}

impl Op {
    /// The actor of the operation at the rank of these paths, if its host runs ahead of its stream.
    pub fn line(&self, paths: Paths<'_>) -> Line {
        let here = |rank: u32| rank == paths.me() || paths.same_node(rank);
        let streams = match *self {
            Op::Put { to, .. } | Op::PutRows { to, .. } => here(to),
            Op::Signal { to, flag: Flag::Landed | Flag::Read | Flag::Ready, .. } => here(to),
            // A relay of this node, or the net, announces rows of other nodes.
            Op::Wait { from, flag: Flag::Landed, .. } => here(from) || paths.route() == Route::Pxn,
            // Signals of its own stream, of itself or of sums for a source, are for its host.
            Op::Wait { from, flag: Flag::Ready, .. } => from != paths.me() && paths.same_node(from),
            Op::Signal { .. } | Op::Wait { .. } => false,
            Op::Reduce { .. } => true,
        };
        if streams { Line::Stream } else { Line::Host }
    }

    /// Whether it gives local peers memory back that this rank's NIC may be reading, because its
    /// relay puts rows from there. A rank that does not wait for its NIC behind each stage waits
    /// before this.
    pub fn frees_sources(&self) -> bool {
        matches!(self, Op::Signal { flag: Flag::Read, .. })
    }
}
