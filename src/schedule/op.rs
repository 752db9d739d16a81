//! Operations, stages, skeletons.

/// Which of its flag words at a peer a rank writes.
///
/// Every pair of ranks has one word of each kind in each direction: one writer, one cache line, values that only
/// grow. All three carry the number of the call (with the world's epoch in the high bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Flag {
    /// "I am in this call, this is what I call, and this is where you may write": carries a [`Tag`](super::Tag).
    Entry = 0,
    /// "What I had to write to you has landed."
    Landed = 1,
    /// "I have read what you offered: its memory is yours again."
    Read = 2,
}

impl Flag {
    /// Number of kinds.
    pub const COUNT: usize = 3;
    /// All kinds, in the order of their words.
    pub const ALL: [Flag; Flag::COUNT] = [Flag::Entry, Flag::Landed, Flag::Read];

    /// Name for errors and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Flag::Entry => "entry",
            Flag::Landed => "landed",
            Flag::Read => "read",
        }
    }
}

/// Which generation a flag operation means. The number itself is an operand: it grows with every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// The running call.
    Call,
    /// The last call that let peers read this rank's memory (0 before the first): the licence to reuse it.
    LastReturn,
}

/// Index into the operand table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// One operation of a track. Peers are positions in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Copies spans from here to a peer's windows. An empty operand moves nothing.
    Put {
        /// The peer (or this rank itself).
        to: u32,
        /// Which spans.
        slot: Slot,
    },
    /// Copies rows by index from the call's input to runs in a peer's window: a gather on the way.
    PutRows {
        /// The peer (or this rank itself).
        to: u32,
        /// Which rows.
        slot: Slot,
    },
    /// Raises a flag word at a peer, after all earlier puts and reads of this track.
    Signal {
        /// The peer.
        to: u32,
        /// Which of this rank's words there.
        flag: Flag,
        /// To which generation.
        level: Level,
    },
    /// Waits until a local flag word has at least the given generation.
    Wait {
        /// The word's writer.
        from: u32,
        /// Which of its words.
        flag: Flag,
        /// Which generation.
        level: Level,
    },
    /// Sums rows of readable windows, by index and in a fixed order, into the call's output.
    Reduce {
        /// Which rows.
        slot: Slot,
    },
}

/// An operation and the track it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// Operations of one track happen in order; tracks know of each other only through flags.
    pub track: u32,
    /// The operation.
    pub op: Op,
}

/// Operations between two steps of whoever plans. All of a stage is complete before the planner goes on, and the
/// planner fills the operands of the next stage from what the waits of this one brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// What the stage is for, in timelines and faults.
    pub name: &'static str,
    /// The operations in *launch order*: a linear extension by phase (own puts and signals, then waits), such that
    /// any executor may fold the tracks onto any number of in-order queues without a deadlock.
    pub items: Vec<Item>,
}

impl Stage {
    /// What a rank can do at once: the half of a call that is started now and finished later.
    pub fn start(&self) -> &[Item] {
        &self.items[..self.first_wait()]
    }

    /// What begins with the first wait: the other half.
    pub fn finish(&self) -> &[Item] {
        &self.items[self.first_wait()..]
    }

    fn first_wait(&self) -> usize {
        let first = self.items.iter().position(|item| matches!(item.op, Op::Wait { .. }));
        first.unwrap_or(self.items.len())
    }
}

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

impl DispatchSkeleton {
    /// The stages, in order.
    pub fn stages(&self) -> Vec<&Stage> {
        vec![&self.licence, &self.entry, &self.rows]
    }
}

/// What one rank does in a return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReturnSkeleton {
    /// Peers have read what this rank offered last.
    pub licence: Stage,
    /// Everybody says what it calls, and where its chunk lies or may be put.
    pub entry: Stage,
    /// Chunks move to other nodes.
    pub home: Stage,
    /// Chunks are read.
    pub sum: Stage,
}

impl ReturnSkeleton {
    /// The stages, in order.
    pub fn stages(&self) -> Vec<&Stage> {
        vec![&self.licence, &self.entry, &self.home, &self.sum]
    }
}
