//! The messages between the stages of a pipeline, part by part. A stage is a rank.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::plan::{Pipeline, PipelineStep};
use sidelane_core::schedule::collective::{MessageChannel, MessagePart, RankView, Staging};
use sidelane_core::schedule::{Calls, ControlLayout, Flag, Op, Operand, Operands, SpanCopy, WindowId};
use sidelane_core::topology::NodeMap;

use super::{EPOCH, part, read, told};
use crate::unroll::effect::Effects;
use crate::unroll::{ActorCall, Bytes, Effect, HostAccess, StageRun, UnrolledOp, UnrolledProgram};

/// Which pipeline, and what passes between its stages.
#[derive(Clone, Debug)]
pub struct PipelineScenario<'a> {
    /// The order of each stage.
    pub pipeline: &'a Pipeline,
    /// Where parts land.
    pub staging: Staging,
    /// Bytes of each message.
    pub len: u64,
    /// A rule that is broken: `None`, except to see that `prove` notices.
    pub slip: Option<PipelineBug>,
}

/// Rules that could be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineBug {
    /// Concurrent send and receive, run as a send and then a receive.
    SendFirst,
    /// It is received and then sent.
    ReceiveFirst,
    /// A sender does not wait for a free slot.
    Unlicensed,
    /// A part is copied to the caller when it has been answered.
    CopyLate,
}

impl PipelineBug {
    /// All slips.
    pub const ALL: [PipelineBug; 4] =
        [PipelineBug::SendFirst, PipelineBug::ReceiveFirst, PipelineBug::Unlicensed, PipelineBug::CopyLate];
}

/// One part of a message that a rank sends or receives.
#[derive(Clone, Copy)]
struct Passed {
    sends: bool,
    peer: u32,
    nth: u64,
}

#[derive(Debug)]
struct Filled {
    span: Option<SpanCopy>,
    ranks: u32,
}

impl Effects for Filled {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let table = [Operand::Spans { first: 0, count: 1 }];
        match (step.op, self.span) {
            (Op::Put { to, slot }, Some(span)) => {
                Operands { table: &table, spans: &[span], ..Operands::default() }.puts(to, slot)
            }
            (Op::Signal { to, of, flag: flag @ Flag::Block, .. }, _) => {
                let at = ControlLayout::tag(of, flag, self.ranks, Calls::parity_of(step.value));
                vec![Effect::Tag(Bytes::new(to, WindowId::CONTROL, at, ControlLayout::TAG_BYTES))]
            }
            _ => Vec::new(),
        }
    }
}

pub fn tell(script: &PipelineScenario) -> Result<UnrolledProgram, PlanError> {
    let ranks = script.pipeline.stages();
    if script.staging.ranks() != ranks {
        let (parameter, expected) = ("stages", "as many as there are places for");
        return Err(PlanError::BadParameter { parameter, seen: ranks.into(), expected });
    }
    let nodes = NodeMap::from_labels(&vec![0; ranks as usize]);
    let seats: Vec<RankView> =
        (0..ranks).map(|me| RankView { nodes: nodes.clone(), me, staging: script.staging }).collect();
    let orders: Vec<Vec<Passed>> = seats.iter().map(|seat| order(script, seat)).collect();
    let sent = sent(&orders);
    let most = orders.iter().map(Vec::len).max().unwrap_or(0);
    let mut told: Vec<Vec<ActorCall>> =
        orders.iter().zip(&seats).map(|(order, seat)| rank(script, seat, order, &sent)).collect();
    for (parts, rank) in told.iter_mut().zip(0..) {
        parts.extend((parts.len()..most).map(|call| part(rank, call, CallKind::Unknown, Vec::new())));
    }
    let calls = (0..most).map(|call| told.iter().map(|parts| parts[call].clone()).collect()).collect();
    let control_bytes = Flag::COUNT as u64 * u64::from(ranks) * 64;
    let pool_bytes = script.staging.bytes();
    Ok(UnrolledProgram { ranks, actors: ranks, control_bytes, pool_bytes, calls, assumed: Vec::new() })
}

/// The parts that a stage sends and receives, in order.
fn order(script: &PipelineScenario, seat: &RankView) -> Vec<Passed> {
    let (me, parts) = (seat.me, MessageChannel::parts(seat, script.len));
    let all = |sends, peer| (0..parts).map(move |nth| Passed { sends, peer, nth }).collect::<Vec<_>>();
    let both = |peer| match script.slip {
        Some(PipelineBug::SendFirst) => [all(true, peer), all(false, peer)].concat(),
        Some(PipelineBug::ReceiveFirst) => [all(false, peer), all(true, peer)].concat(),
        _ => MessagePart::both(parts, parts)
            .map(|passing| Passed { sends: passing.sends, peer, nth: passing.nth })
            .collect(),
    };
    let of = |step: &PipelineStep| match *step {
        PipelineStep::ReceiveForward(_) => all(false, me - 1),
        PipelineStep::SendForward(_) => all(true, me + 1),
        PipelineStep::ReceiveBackward(_) => all(false, me + 1),
        PipelineStep::SendBackward(_) => all(true, me - 1),
        PipelineStep::ExchangeNext { .. } => both(me + 1),
        PipelineStep::ExchangePrevious { .. } => both(me - 1),
        PipelineStep::Forward(_) | PipelineStep::Backward(_) => Vec::new(),
    };
    script.pipeline.stage(me).iter().flat_map(of).collect()
}

/// Per sender and receiver: in which of its calls the sender puts each part.
type Sent = HashMap<(u32, u32), Vec<usize>>;

fn sent(orders: &[Vec<Passed>]) -> Sent {
    let mut sent = Sent::new();
    for (order, me) in orders.iter().zip(0..) {
        for (call, passed) in order.iter().enumerate().filter(|(_, passed)| passed.sends) {
            sent.entry((me, passed.peer)).or_default().push(call);
        }
    }
    sent
}

/// One rank's parts: each of a message is a call.
fn rank(script: &PipelineScenario, seat: &RankView, order: &[Passed], sent: &Sent) -> Vec<ActorCall> {
    let me = seat.me;
    let mut pairs: HashMap<(bool, u32), (MessageChannel, usize)> = HashMap::new();
    let mut late: Vec<HostAccess> = Vec::new();
    let mut parts = Vec::new();
    for (call, &Passed { sends, peer, nth }) in order.iter().enumerate() {
        let (pair, count) =
            pairs.entry((sends, peer)).or_insert_with(|| (MessageChannel::new(peer, EPOCH), 0));
        pair.advance();
        let range = MessageChannel::part(seat, script.len, nth);
        let scene = |name, touches, steps, span| {
            let filled = Rc::new(Filled { span, ranks: seat.nodes.ranks() });
            StageRun { name, first: 0, touches, steps, filled }
        };
        if sends {
            let licence = pair.freed().filter(|_| script.slip != Some(PipelineBug::Unlicensed));
            let free = licence.map(|value| told(&pair.free(), value));
            let send = pair.send(seat).map(|item| told(&item, pair.value()));
            let span = Some(pair.sent(seat, range));
            let scenes = vec![
                scene("free", std::mem::take(&mut late), free.into_iter().collect(), None),
                scene("send", Vec::new(), send.to_vec(), span),
            ];
            parts.push(part(me, call, CallKind::Send, scenes));
        } else {
            let of = sent.get(&(peer, me)).and_then(|calls| calls.get(*count)).copied().unwrap_or(call);
            *count += 1;
            let wait = vec![told(&pair.receive(), pair.value())];
            let answer = vec![told(&pair.answer(seat, 0), pair.value())];
            let mut touches = came(pair, seat, range, of);
            let before = std::mem::take(&mut late);
            if script.slip == Some(PipelineBug::CopyLate) {
                late.append(&mut touches);
            }
            let scenes = vec![scene("receive", before, wait, None), scene("answer", touches, answer, None)];
            parts.push(part(me, call, CallKind::Receive, scenes));
        }
    }
    parts
}

/// Reads of a receiver.
fn came(pair: &MessageChannel, seat: &RankView, range: Range<u64>, of: usize) -> Vec<HostAccess> {
    let at = ControlLayout::tag(pair.peer, Flag::Block, seat.nodes.ranks(), Calls::parity_of(pair.value()));
    let tag = Bytes::new(seat.me, WindowId::CONTROL, at, ControlLayout::TAG_BYTES);
    vec![HostAccess { what: "tag", bytes: tag, write: false, of }, read(&pair.received(seat, range), of)]
}
