//! Unrolls messages between ranks, as the stages of a pipeline send them.
//!
//! ```text
//!   sender     | wait for the slot | put, signal                              each part is a call
//!   receiver   | wait for the part | copy to the caller | answer
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::schedule::collective::{MessageChannel, MessagePart, RankView, Staging};
use sidelane_core::schedule::{Calls, ControlLayout, Flag, Op, Operand, Operands, SpanCopy, WindowId};
use sidelane_core::topology::NodeMap;

use super::collective::{EPOCH, in_call, read};
use super::{
    ActorCall, Bytes, Effect, Effects, HostAccess, Role, StageRun, UnrolledOp, UnrolledProgram, numbered,
};

fn part(rank: u32, call: usize, kind: CallKind, scenes: Vec<StageRun>) -> ActorCall {
    ActorCall { rank, role: Role::Own, call, kind, scenes }
}

/// A call by which a rank sends a message, receives one, or does both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageCall {
    /// Sends one to a rank.
    Send(u32),
    /// Receives one from a rank.
    Receive(u32),
    /// Sends one to a rank and receives one from it, at once.
    Exchange(u32),
}

/// The calls of each rank, and where messages land.
///
/// Ranks with several communicators have a number in each: of `n` ranks, number `r` is rank `r mod
/// n` in communicator `r / n`.
#[derive(Clone, Debug)]
pub struct MessageScenario<'a> {
    /// The calls of each rank, in order, with the numbers of their peers.
    pub calls: &'a [Vec<MessageCall>],
    /// Where parts land, for all numbers.
    pub staging: Staging,
    /// Bytes of each message.
    pub len: u64,
    /// A rule that is broken: `None`, except to see that `prove` notices.
    pub seeded: Option<MessageBug>,
}

/// Rules that could be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageBug {
    /// Concurrent send and receive, run as a send and then a receive.
    SendFirst,
    /// It is received and then sent.
    ReceiveFirst,
    /// A sender does not wait for a free slot.
    Ungranted,
    /// A part is copied to the caller when it has been answered.
    CopyLate,
}

impl MessageBug {
    /// All of them.
    pub const ALL: [MessageBug; 4] =
        [MessageBug::SendFirst, MessageBug::ReceiveFirst, MessageBug::Ungranted, MessageBug::CopyLate];
}

/// One part of a message that a rank sends or receives.
#[derive(Clone, Copy)]
struct Passed {
    sends: bool,
    /// The communicator that carries it.
    communicator: usize,
    /// The number of the rank in it, and that of the peer.
    me: u32,
    peer: u32,
    nth: u64,
}

#[derive(Debug)]
struct MessageOperands {
    span: Option<SpanCopy>,
    ranks: u32,
}

impl Effects for MessageOperands {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let table = [Operand::Spans { first: 0, count: 1 }];
        match (step.op, self.span) {
            (Op::Put { to, operand }, Some(span)) => {
                Operands { table: &table, spans: &[span], ..Operands::default() }.puts(to, operand)
            }
            (Op::Signal { to, of, flag: flag @ Flag::Block, .. }, _) => {
                let at = ControlLayout::tag(of, flag, self.ranks, Calls::parity_of(step.value));
                vec![Effect::Tag(Bytes::new(to, WindowId::CONTROL, at, ControlLayout::TAG_BYTES))]
            }
            _ => Vec::new(),
        }
    }
}

pub(super) fn unroll(scenario: &MessageScenario) -> Result<UnrolledProgram, PlanError> {
    let (ranks, actors) = (scenario.staging.ranks(), scenario.calls.len() as u32);
    if actors == 0 || !ranks.is_multiple_of(actors) {
        let (parameter, seen) = ("ranks", actors.into());
        let expected = "as many as there are places for in each communicator";
        return Err(PlanError::BadParameter { parameter, seen, expected });
    }
    let nodes = NodeMap::from_labels(&vec![0; ranks as usize]);
    let views: Vec<RankView> =
        (0..ranks).map(|me| RankView { nodes: nodes.clone(), me, staging: scenario.staging }).collect();
    let own = |me: u32| views.iter().skip(me as usize).step_by(actors as usize).collect::<Vec<_>>();
    let orders: Vec<Vec<Passed>> =
        scenario.calls.iter().zip(0..).map(|(calls, me)| order(scenario, &own(me), calls)).collect();
    let sent = sent(&orders);
    let most = orders.iter().map(Vec::len).max().unwrap_or(0);
    let mut all: Vec<Vec<ActorCall>> =
        orders.iter().zip(0..).map(|(order, me)| rank(scenario, &own(me), order, &sent)).collect();
    for (parts, rank) in all.iter_mut().zip(0..) {
        parts.extend((parts.len()..most).map(|call| part(rank, call, CallKind::Unknown, Vec::new())));
    }
    let calls = (0..most).map(|call| all.iter().map(|parts| parts[call].clone()).collect());
    let calls = numbered(calls.collect());
    let control_bytes = ControlLayout::flag_bytes(ranks);
    let pool_bytes = scenario.staging.bytes();
    Ok(UnrolledProgram { ranks, actors, control_bytes, pool_bytes, calls, assumed: Vec::new() })
}

/// The parts that a rank sends and receives, in order.
fn order(scenario: &MessageScenario, own: &[&RankView], calls: &[MessageCall]) -> Vec<Passed> {
    let parts = MessageChannel::parts(own[0], scenario.len);
    let passed = |sends, peer, nth| {
        let communicator = peer as usize / scenario.calls.len();
        Passed { sends, communicator, me: own[communicator].me, peer, nth }
    };
    let all = |sends, peer| (0..parts).map(|nth| passed(sends, peer, nth)).collect::<Vec<_>>();
    let both = |peer| match scenario.seeded {
        Some(MessageBug::SendFirst) => [all(true, peer), all(false, peer)].concat(),
        Some(MessageBug::ReceiveFirst) => [all(false, peer), all(true, peer)].concat(),
        _ => {
            MessagePart::both(parts, parts).map(|passing| passed(passing.sends, peer, passing.nth)).collect()
        }
    };
    let of = |call: &MessageCall| match *call {
        MessageCall::Send(to) => all(true, to),
        MessageCall::Receive(from) => all(false, from),
        MessageCall::Exchange(peer) => both(peer),
    };
    calls.iter().flat_map(of).collect()
}

/// Per sender and receiver: in which of its calls the sender puts each part.
type Sent = HashMap<(u32, u32), Vec<usize>>;

fn sent(orders: &[Vec<Passed>]) -> Sent {
    let mut sent = Sent::new();
    for order in orders {
        for (call, passed) in order.iter().enumerate().filter(|(_, passed)| passed.sends) {
            sent.entry((passed.me, passed.peer)).or_default().push(call);
        }
    }
    sent
}

/// One rank's parts: each of a message is a call.
fn rank(scenario: &MessageScenario, own: &[&RankView], order: &[Passed], sent: &Sent) -> Vec<ActorCall> {
    let mut pairs: HashMap<(bool, u32), (MessageChannel, usize)> = HashMap::new();
    let mut late: Vec<HostAccess> = Vec::new();
    let mut parts = Vec::new();
    for (call, &Passed { sends, communicator, me, peer, nth }) in order.iter().enumerate() {
        let view = own[communicator];
        let (pair, count) =
            pairs.entry((sends, peer)).or_insert_with(|| (MessageChannel::new(peer, EPOCH), 0));
        pair.advance();
        let range = MessageChannel::part(view, scenario.len, nth);
        let scene = |name, touches, steps, span| {
            let filled = Rc::new(MessageOperands { span, ranks: view.nodes.ranks() });
            StageRun { name, first: 0, settled: true, touches, steps, filled }
        };
        if sends {
            let granted = pair.freed().filter(|_| scenario.seeded != Some(MessageBug::Ungranted));
            let free = granted.map(|value| in_call(&pair.free(), value));
            let send = pair.send(view).map(|item| in_call(&item, pair.value()));
            let span = Some(pair.sent(view, range));
            let scenes = vec![
                scene("free", std::mem::take(&mut late), free.into_iter().collect(), None),
                scene("send", Vec::new(), send.to_vec(), span),
            ];
            parts.push(part(me, call, CallKind::Send, scenes));
        } else {
            let of = sent.get(&(peer, me)).and_then(|calls| calls.get(*count)).copied().unwrap_or(call);
            *count += 1;
            let wait = vec![in_call(&pair.receive(), pair.value())];
            let answer = vec![in_call(&pair.answer(view, 0), pair.value())];
            let mut touches = came(pair, view, range, of);
            let before = std::mem::take(&mut late);
            if scenario.seeded == Some(MessageBug::CopyLate) {
                late.append(&mut touches);
            }
            let scenes = vec![scene("receive", before, wait, None), scene("answer", touches, answer, None)];
            parts.push(part(me, call, CallKind::Receive, scenes));
        }
    }
    parts
}

/// Reads of a receiver.
fn came(pair: &MessageChannel, view: &RankView, range: Range<u64>, of: usize) -> Vec<HostAccess> {
    let at = ControlLayout::tag(pair.peer, Flag::Block, view.nodes.ranks(), Calls::parity_of(pair.value()));
    let tag = Bytes::new(view.me, WindowId::CONTROL, at, ControlLayout::TAG_BYTES);
    vec![HostAccess { what: "tag", bytes: tag, write: false, of }, read(&pair.received(view, range), of)]
}
