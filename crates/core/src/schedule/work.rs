//! Work of a rank between two stages of a call: what it plans, computes, or enqueues for its
//! caller's stream.

/// Planning or arithmetic of a rank between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Enqueued: the caller's stream brings its choices to where they are sorted.
    Bring,
    /// Enqueued: where engines relay, the order of rows is known now, and the stream of copies
    /// brings it to the device, where own rows need it, too. Then the caller's stream packs rows
    /// that [`Work::Pack`] has left: those that had to wait for their order, and tokens that might
    /// have gone as they lie.
    PackPlaced,
    /// Enqueued: the stream of copies goes on behind the caller's.
    Follow,
    /// Enqueued: the pool gets back what streams and all peers have read by now.
    Reclaim,
    /// Enqueued: the heaps of all ranks grow, if one has no memory for the rows of the call.
    Grow,
    /// Enqueued: the caller's stream goes on behind the stream of copies, and a word says how the
    /// call ended. NICs have read by then what the caller may write again.
    Join,
    /// Where engines relay: a kernel puts rows that arrived into visible order.
    Regroup,
    /// Sorts this rank's choices into bins. Reads the caller's routing.
    Sort,
    /// Writes this rank's counts per bin to its publication.
    Publish,
    /// Announces the largest free extent of the pool; the tag says where it lies.
    Announce,
    /// Takes an extent of the size that the handle knows.
    Take,
    /// Takes memory for rows that relays return, and offers the caller's chunk.
    Offer,
    /// Checks a new expert map.
    Propose,
    /// Gives an offloaded relay its program.
    StartRelay,
    /// Adds up the counts of all ranks. Reads publications of this node and messages of the others.
    Judge,
    /// Computes the layout, and clips what exceeds a budget.
    Place,
    /// Writes the headers of this rank's blocks.
    Describe,
    /// Cached dispatch: reads from tags where rows land at other ranks.
    Landings,
    /// Reads from tags where the chunks of this node's ranks begin.
    Bases,
    /// Tells a waiting caller that all ranks agreed: the call can no longer be refused.
    TellAgreed,
    /// Fills the operands of `StageId::Rows`.
    FillRows,
    /// Enqueued: the stream of copies brings to the device what kernels of the caller's stream read
    /// beside the rows: where the rows of choices are, the order of their sum, and how many rows
    /// each expert has. A refused call has none.
    SendTables,
    /// Enqueued: the caller's stream brings the runs of own rows to the device, where the kernel
    /// that places these finds them. Where the device plans, choices find own rows there, and their
    /// metadata goes with them.
    PlaceOwn,
    /// Fills the operands of `StageId::BringIn`.
    FillBringIn,
    /// Fills the operands of `StageId::Sum`.
    FillSum,
    /// Fills the operands of `StageId::Pull` and `StageId::PullRest`.
    FillPull,
    /// Waits until an offloaded relay has finished.
    JoinRelay,
    /// Trims the extent to what landed, and fills the handle's report.
    Report,
    /// Reads the metadata that landed behind the rows.
    Metadata,
    /// Retires the chunk: the pool has it back when all readers have read it.
    Retire,
    /// Replaces the expert map.
    Adopt,
    /// Relay: adds up the counts of this node, and writes the messages to other nodes.
    Compose,
    /// Relay: reads the headers of its sources.
    Learn,
    /// Relay: fills the operands of `StageId::RelayRows`.
    FillRelay,
    /// Relay: reads where its sources want their rows, and fills the operands of
    /// `StageId::ReturnRows`.
    FillReturn,
    /// Relay: sends the tables by which a kernel sums the rows of this node to the device.
    SendNodeSums,
    /// All-gather: sorts the choices of all ranks.
    SortAll,
    /// All-gather: computes the layouts of all ranks.
    PlaceAll,
    /// Collective: fills the operands of all stages of a round.
    FillRound,
    /// Collective: copies the part that is due to the caller's tensor.
    CopyOut,
    /// Collective: the round's result for the caller is due.
    EndRound,
    /// Packs this rank's rows for other ranks, in slots or by the layout, where that is known.
    Pack,
    /// Slots: compares the headers of landed slots with the expected ones.
    Check,
    /// Makes what returns of the experts' outputs: brings them to where they are sent from, if they
    /// lie elsewhere, or sums them by rank. Takes memory for sums. In slots, a refusal makes the
    /// mark that goes out in their place.
    Partials,
    /// Sums the rows that returned, by a kernel.
    Sum,
}

impl Work {
    /// Whether it is work of the caller's stream, where a host enqueues that and runs ahead.
    pub const fn is_of_stream(self) -> bool {
        use Work::{Bring, Join, Metadata, Pack, PackPlaced, Partials, PlaceOwn, Regroup, Sum};
        matches!(self, Bring | Pack | PackPlaced | Partials | PlaceOwn | Join | Metadata | Regroup | Sum)
    }
}
