//! The stages of a rank by name: its skeleton, built once.

use crate::schedule::{Caller, Relay, Stage, TrackOp};
use crate::topology::Paths;

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
    /// Enqueued dispatch: hosts of this node signal each other that all their copies are enqueued.
    Posted,
    /// Enqueued return: streams of this node signal each other that they have reached the call.
    Ready,
    /// Return: waits until relays have returned their rows. Slots have no relays: there the stage
    /// puts partial rows, and waits for those that come here.
    Home,
    /// Return: sums rows where they lie, and says that they are read.
    Sum,
    /// Return, in place of [`StageId::Sum`]: copy engines pull rows of this node here, since they
    /// cannot add.
    Pull,
    /// Return, behind [`StageId::Home`]: copy engines pull the rows that relays returned; owners
    /// may reuse their memory.
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
    /// Relay: signals its own rank that it reads no rank's memory any more.
    RelayDone,
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

impl StageId {
    /// All stages.
    pub const ALL: [StageId; 20] = [
        StageId::Release,
        StageId::Entry,
        StageId::Offer,
        StageId::Rows,
        StageId::BringIn,
        StageId::Posted,
        StageId::Ready,
        StageId::Home,
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
            StageId::Posted => "posted",
            StageId::Ready => "ready",
            StageId::Home => "home",
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
}

/// The skeleton of one rank: what does not change from call to call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages {
    all: Box<[Stage]>,
}

impl Stages {
    /// Of the rank of these paths. Blocks come in `chunks` parts; relays sum what they return if
    /// `sums`.
    pub fn new(paths: Paths<'_>, chunks: u8, sums: bool) -> Self {
        let (caller, relay) = (Caller::new(paths, chunks), Relay::new(paths, chunks).summing(sums));
        let items = |id| match id {
            StageId::Release => caller.read(),
            StageId::Entry => caller.entry(false),
            StageId::Offer => caller.entry(true),
            StageId::Rows => caller.rows_stage(),
            StageId::BringIn => caller.bring_in(),
            StageId::Posted => caller.posted(),
            StageId::Ready => caller.ready(),
            StageId::Home => caller.home(),
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
