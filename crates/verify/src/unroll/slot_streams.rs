//! Unrolls slots on streams, by the [programs](SlotCall::program) of their calls.
//!
//! ```text
//!   dispatch   pack: write send, own receive  |  puts, signals, waits, words set back
//!   combine    experts read receive  |  partials: write partial  |  puts, signals, waits, words set back
//!              |  sum: read own partial, returned
//!   release    the caller has read receive           |        signals, waits, words set back
//!   refusal    the same  |  write own mark           |  puts, signals, waits, words set back
//! ```
//!
//! Where a rank refuses, the sums of the others read its mark and no rows. If it refuses the
//! dispatch, the first half of its refusal is right behind this, and the second before its next
//! dispatch or, if there is none, at the end:
//!
//! ```text
//!   rank that refuses a    dispatch a, refusal a: signal | dispatch b |           | refusal a: wait, dispatch a
//!   others                 dispatch a                    | dispatch b | combine a | dispatch a
//! ```
//!
//! Kernels may run [aside](Streams::Aside). Then two events join the streams, modeled as words that
//! grow:
//!
//! ```text
//!   kernels      pack | ready            arrived | experts | ready            arrived | sum
//!   transfers           ready | dispatch | arrived           ready | combine | arrived
//! ```
//!
//! Between nodes there are proxies, too: for each microbatch of a rank one that puts over the net
//! and, on the host-staged path, one for each peer of another node that signals arrivals. Each
//! takes the calls in their order, at the stream's requests, as a real proxy does. A real proxy is
//! one thread for all of these; as separate actors they have no order that the thread would not
//! keep.
//!
//! **Queues.** Streams of a rank may share queues of its device ([`fold`]):
//!
//! ```text
//!   rank 0, one queue    dispatch a: signal a, wait a | dispatch b: signal b, wait b
//!   rank 1, one queue    dispatch b: signal b, wait b | dispatch a: signal a, wait a
//!                                              ^ rank 0 signals b behind its wait for a, rank 1 signals a behind this one
//! ```
//!
//! If all ranks enqueue in one order, no rank waits forever, regardless of which streams share a
//! queue at each rank. To see this, take the first call in that order that is not over everywhere.
//! All earlier calls are done, so each rank has enqueued and run its puts and signals, which come
//! before its waits. If two ranks differ, take the first place in a queue where they do: each waits
//! there for an operation that the other has behind its own wait.

use std::collections::HashMap;
use std::iter;
use std::mem::take;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::schedule::call_program::{Action, CallProgram, SlotCall, Work};
use sidelane_core::schedule::stream_program::{ProxyProgram, RowPath, Slots, StreamProgram};
use sidelane_core::schedule::{Flag, FlagValue, LINE, Op, Stage, TrackOp, WindowId};
use sidelane_core::topology::NodeMap;

use super::call_sequence::bad;
use super::{
    ActorCall, Bytes, Effect, Effects, HostAccess, Role, StageRun, UnrolledOp, UnrolledProgram, numbered,
};

/// The calls of a group on streams, all ranks in the same order.
#[derive(Clone, Debug)]
pub struct StreamScenario<'a> {
    /// Geometry of each microbatch's windows.
    pub slots: Slots,
    /// Which streams there are.
    pub streams: Streams,
    /// Which ranks share memory, if not all, and how rows cross.
    pub across: Option<(&'a NodeMap, RowPath)>,
    /// The calls.
    pub calls: &'a [StreamCall],
    /// Which rank refuses what the others combine or release, if one does.
    pub refuses: Option<Refusals>,
    /// A rule that the caller breaks: `None`, except to see that `prove` notices.
    pub seeded: Option<StreamBug>,
    /// The program of these calls, in place of [theirs](SlotCall::program): `None`, except to see
    /// that `prove` notices bugs of a driver.
    pub planted: Option<(SlotCall, &'a CallProgram)>,
}

/// One rank refuses each round of each microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusals {
    /// The rank, or the first one.
    pub rank: u32,
    /// Whether ranks take turns: the number of the answering call is added to the first.
    pub in_turn: bool,
    /// The call that it refuses.
    pub refused: RefusedCall,
}

/// A call that a rank refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedCall {
    /// It sends empty slots and answers them at once.
    Dispatch,
    /// A combine or a release.
    Answer,
}

/// One call. Microbatches are numbered from 0, and each has windows and flags of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamCall {
    /// Packed slots to their ranks.
    Dispatch(u32),
    /// Partial rows return: the turn after a dispatch.
    Combine(u32),
    /// In place of a combine.
    Release(u32),
}

impl StreamCall {
    /// The microbatch.
    pub fn microbatch(self) -> u32 {
        let (StreamCall::Dispatch(of) | StreamCall::Combine(of) | StreamCall::Release(of)) = self;
        of
    }

    /// The call of its microbatch.
    fn call(self) -> SlotCall {
        match self {
            StreamCall::Dispatch(_) => SlotCall::Dispatch,
            StreamCall::Combine(_) => SlotCall::Combine,
            StreamCall::Release(_) => SlotCall::Release,
        }
    }
}

/// Which streams a rank has. Each is an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// One for all that it does.
    One,
    /// One for each microbatch: actors are those of the first, then those of the next.
    Each,
    /// One for kernels and one for transfers: actors are the first of all ranks, then the second.
    Aside,
}

impl Streams {
    /// All of them.
    pub const ALL: [Streams; 3] = [Streams::One, Streams::Each, Streams::Aside];
}

/// Rules that a caller of streams could break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamBug {
    /// Words that were awaited are not set back.
    NeverBack,
    /// Words are set back when their next call begins.
    BackFirst,
    /// Words are set back behind the signals of the call after theirs.
    BackLate,
    /// A dispatch follows a dispatch, without a combine or release between them.
    Unreleased,
    /// The caller still reads its slots when the combine is over.
    KeepSlots,
    /// The returned rows are summed after the next dispatch.
    SumLate,
    /// All microbatches have the same windows and flags.
    Share,
    /// Kernels aside: the next slots are packed without waiting for the copies of the last ones.
    PackAhead,
    /// Kernels aside: transfers do not wait for kernels.
    NotReady,
    /// Kernels aside: kernels do not wait for transfers.
    NotArrived,
}

impl StreamBug {
    /// All of them.
    pub const ALL: [StreamBug; 10] = [
        StreamBug::NeverBack,
        StreamBug::BackFirst,
        StreamBug::BackLate,
        StreamBug::Unreleased,
        StreamBug::KeepSlots,
        StreamBug::SumLate,
        StreamBug::Share,
        StreamBug::PackAhead,
        StreamBug::NotReady,
        StreamBug::NotArrived,
    ];
}

pub(super) fn unroll(scenario: &StreamScenario) -> Result<UnrolledProgram, PlanError> {
    let turns = Rc::new(CallOrder::of(scenario)?);
    let (ranks, sets) = (scenario.slots.ranks(), turns.sets);
    let unroller = StreamUnroller { scenario, actors: Actor::all(scenario, sets), turns };
    let calls = (0..scenario.calls.len()).map(|call| unroller.parts(call)).collect::<Result<_, _>>()?;
    Ok(UnrolledProgram {
        ranks,
        actors: unroller.actors.len() as u32,
        control_bytes: u64::from(sets) * scenario.slots.flag_bytes(),
        pool_bytes: u64::from(sets) * scenario.slots.bytes(),
        calls: numbered(calls),
        assumed: Vec::new(),
    })
}

/// An actor, which runs by itself.
#[derive(Clone, Copy, Debug)]
enum Actor {
    /// The `nth` stream of a rank.
    Stream { rank: u32, nth: u32 },
    /// The proxy of a microbatch: hears the stream, and puts over the net.
    Out { rank: u32, of: u32 },
    /// On the host-staged path: signals the stream that a rank's rows have come.
    Back { rank: u32, of: u32, from: u32 },
}

impl Actor {
    fn all(scenario: &StreamScenario, sets: u32) -> Vec<Actor> {
        let ranks = scenario.slots.ranks();
        let streams = match scenario.streams {
            Streams::One => 1,
            Streams::Each => sets,
            Streams::Aside => 2,
        };
        let of_all = |count| (0..count).flat_map(move |nth| (0..ranks).map(move |rank| (rank, nth)));
        let mut all: Vec<Actor> = of_all(streams).map(|(rank, nth)| Actor::Stream { rank, nth }).collect();
        let Some((nodes, way)) = scenario.across else { return all };
        all.extend(of_all(sets).map(|(rank, of)| Actor::Out { rank, of }));
        for (rank, of) in of_all(sets).filter(|_| way == RowPath::HostStaged) {
            let far = (0..ranks).filter(|&from| from < nodes.ranks() && !nodes.same_node(rank, from));
            all.extend(far.map(|from| Actor::Back { rank, of, from }));
        }
        all
    }

    fn rank(self) -> u32 {
        let (Actor::Stream { rank, .. } | Actor::Out { rank, .. } | Actor::Back { rank, .. }) = self;
        rank
    }
}

struct StreamUnroller<'a> {
    scenario: &'a StreamScenario<'a>,
    actors: Vec<Actor>,
    turns: Rc<CallOrder>,
}

impl StreamUnroller<'_> {
    /// Work of all actors in one call.
    fn parts(&self, call: usize) -> Result<Vec<ActorCall>, PlanError> {
        let kind = self.turns.calls[call].kind();
        let (turn, aside) = (self.scenario.calls[call].microbatch(), self.scenario.streams == Streams::Aside);
        let parts = self.actors.iter().map(|&actor| {
            let filled = self.filled(call, actor.rank())?;
            let (role, scenes) = match actor {
                Actor::Stream { rank, nth } => {
                    let mut scenes = Vec::new();
                    for (of, piece) in self.turns.pieces(rank, call) {
                        if self.scenario.streams == Streams::Each
                            && self.scenario.calls[of].microbatch() != nth
                        {
                            continue;
                        }
                        let filled = self.filled(of, rank)?;
                        scenes.extend(match nth {
                            0 if aside => self.kernels(of, &filled, piece),
                            _ if aside => self.transfers(of, &filled, piece),
                            _ => self.whole(of, &filled, piece),
                        });
                    }
                    (if aside && nth > 0 { Role::Transfers } else { Role::Own }, scenes)
                }
                Actor::Out { of, .. } | Actor::Back { of, .. } if of != turn => (Role::Relay, Vec::new()),
                Actor::Out { .. } => (Role::Relay, proxied_out(call, &filled)),
                Actor::Back { from, .. } => (Role::Relay, proxied_back(call, from, &filled)),
            };
            Ok(ActorCall { rank: actor.rank(), role, call, kind, scenes })
        });
        parts.collect()
    }

    fn filled(&self, call: usize, me: u32) -> Result<Rc<StreamOperands>, PlanError> {
        let mut program = StreamProgram::new(self.turns.call_at(me, call), self.scenario.slots, me)?;
        if let Some((nodes, way)) = self.scenario.across {
            program = program.across(nodes, way)?;
        }
        let set = self.turns.words[call].0;
        Ok(Rc::new(StreamOperands { program, me, set, call, turns: Rc::clone(&self.turns) }))
    }

    /// Walks the program of a call, or half of it: the accesses of kernels, and then the steps of
    /// the stage behind them. After the last stage there are only kernels.
    fn walk(
        &self,
        call: usize,
        filled: &Rc<StreamOperands>,
        piece: Piece,
    ) -> Vec<(Vec<HostAccess>, Vec<UnrolledOp>)> {
        let (which, me) = (self.turns.call_at(filled.me, call), filled.me);
        let planted = self.scenario.planted.filter(|(planted, _)| *planted == which);
        let program = planted.map_or_else(|| which.program(), |(_, program)| program.clone());
        let (half, all) = (program.half(), program.steps().len());
        let (taken, read) = match piece {
            Piece::Whole => (0..all, self.experts(call, me)),
            Piece::Start => (0..half, self.experts(call, me)),
            Piece::Finish => (half..all, Vec::new()),
        };
        let (mut walked, mut touches, mut steps) = (Vec::new(), read, None::<Vec<UnrolledOp>>);
        for step in program.line(None).take(taken.end).skip(taken.start) {
            match step.action {
                Action::Run(_, part) => {
                    let items = filled.program.stage().part(part).iter();
                    steps.get_or_insert_default().extend(items.map(|item| word(filled, call, 0, item.op)));
                }
                Action::Compute(work) => {
                    walked.extend(steps.take().map(|steps| (take(&mut touches), steps)));
                    touches.extend(self.touches(work, call, me));
                }
                _ => {}
            }
        }
        walked.extend(steps.map(|steps| (take(&mut touches), steps)));
        walked.iter_mut().for_each(|(_, steps)| *steps = self.with_seeded_bug(call, take(steps), filled));
        touches.extend(self.seeded_accesses(call, me));
        walked.push((touches, Vec::new()));
        walked
    }

    /// Everything, on one stream.
    fn whole(&self, call: usize, filled: &Rc<StreamOperands>, piece: Piece) -> Vec<StageRun> {
        let (walked, stage) = (self.walk(call, filled, piece), filled.program.stage().name);
        let last = walked.len() - 1;
        let scenes = walked.into_iter().enumerate().map(|(nth, (touches, steps))| {
            scene(if nth == last { "end" } else { stage }, touches, steps, filled)
        });
        scenes.collect()
    }

    /// Work of kernels, on a stream of their own.
    fn kernels(&self, call: usize, filled: &Rc<StreamOperands>, piece: Piece) -> Vec<StageRun> {
        let arrived = |of| match self.scenario.seeded {
            Some(StreamBug::NotArrived) => scene("arrived", Vec::new(), Vec::new(), filled),
            _ => scene("arrived", Vec::new(), vec![awaits(filled, Flag::Entry, of)], filled),
        };
        let mut walked = self.walk(call, filled, piece).into_iter().map(|(touches, _)| touches);
        let before = walked.next().unwrap_or_default();
        let ready = scene("kernels", before, vec![signals(filled, Flag::Block, call)], filled);
        let end = scene("end", walked.flatten().collect(), Vec::new(), filled);
        match (piece, self.turns.slots_of[call]) {
            (Piece::Finish, _) => vec![arrived(call), end],
            (Piece::Start, dispatch) => vec![arrived(dispatch), ready, end],
            (Piece::Whole, dispatch) if dispatch == call => vec![ready, end],
            (Piece::Whole, dispatch) => vec![arrived(dispatch), ready, arrived(call), end],
        }
    }

    /// Work of transfers, on a stream of their own.
    fn transfers(&self, call: usize, filled: &Rc<StreamOperands>, piece: Piece) -> Vec<StageRun> {
        let ready = (self.scenario.seeded != Some(StreamBug::NotReady) && piece != Piece::Finish)
            .then(|| awaits(filled, Flag::Block, call));
        let arrived = (piece != Piece::Start).then(|| signals(filled, Flag::Entry, call));
        let steps = self.walk(call, filled, piece).into_iter().flat_map(|(_, steps)| steps);
        let steps = ready.into_iter().chain(steps).chain(arrived).collect();
        vec![
            scene(filled.program.stage().name, Vec::new(), steps, filled),
            scene("end", Vec::new(), Vec::new(), filled),
        ]
    }

    /// The stage, with words set back as a seeded has it.
    fn with_seeded_bug(
        &self,
        call: usize,
        all: Vec<UnrolledOp>,
        filled: &Rc<StreamOperands>,
    ) -> Vec<UnrolledOp> {
        let step = |of: usize, op| word(filled, of, 0, op);
        if !matches!(
            self.scenario.seeded,
            Some(StreamBug::NeverBack | StreamBug::BackFirst | StreamBug::BackLate)
        ) {
            return all;
        }
        let (back, mut steps): (Vec<UnrolledOp>, Vec<UnrolledOp>) =
            all.into_iter().partition(UnrolledOp::sets_back);
        let flag = self.scenario.calls[call].call().flag();
        match self.scenario.seeded {
            Some(StreamBug::BackFirst) => {
                let before = self.turns.before(call, flag);
                let back = before.iter().flat_map(|&of| back.iter().map(move |back| step(of, back.op)));
                steps.splice(0..0, back);
            }
            Some(StreamBug::BackLate) => {
                let other = if flag == Flag::Returned { Flag::Landed } else { Flag::Returned };
                let peers = (0..filled.program.slots().ranks()).filter(|&peer| peer != filled.me);
                let back = |of| Op::Signal { to: filled.me, of, flag: other, level: FlagValue::Reset };
                let before = self.turns.before(call, other);
                steps.extend(
                    before.into_iter().flat_map(|call| peers.clone().map(move |of| step(call, back(of)))),
                );
            }
            _ => {}
        }
        steps
    }
}

/// Work of the proxy in one call: waits, and puts over the net.
fn proxied_out(call: usize, filled: &Rc<StreamOperands>) -> Vec<StageRun> {
    let Some(ProxyProgram { heard, out, .. }) = filled.program.proxied() else { return Vec::new() };
    let scenes =
        [heard, out].map(|stage| scene(stage.name, Vec::new(), in_tracks(call, stage, filled), filled));
    scenes.into_iter().chain([scene("end", Vec::new(), Vec::new(), filled)]).collect()
}

/// Its work when the net has brought a peer's rows.
fn proxied_back(call: usize, from: u32, filled: &Rc<StreamOperands>) -> Vec<StageRun> {
    let Some(ProxyProgram { back, .. }) = filled.program.proxied() else { return Vec::new() };
    let mut steps = in_tracks(call, back, filled);
    steps.retain(|step| step.track == from);
    steps.iter_mut().for_each(|step| step.track = 0);
    vec![scene(back.name, Vec::new(), steps, filled), scene("end", Vec::new(), Vec::new(), filled)]
}

fn in_tracks(call: usize, stage: &Stage, filled: &Rc<StreamOperands>) -> Vec<UnrolledOp> {
    stage.items.iter().map(|&TrackOp { track, op }| word(filled, call, track, op)).collect()
}

fn word(filled: &Rc<StreamOperands>, of: usize, track: u32, op: Op) -> UnrolledOp {
    let value = if matches!(op, Op::Put { .. }) { 0 } else { value(of) };
    UnrolledOp { id: 0, track, set: filled.set, op, value }
}

fn scene(
    name: &'static str,
    touches: Vec<HostAccess>,
    steps: Vec<UnrolledOp>,
    filled: &Rc<StreamOperands>,
) -> StageRun {
    let filled = Rc::clone(filled) as Rc<dyn Effects>;
    StageRun { name, first: 0, settled: true, touches, steps, filled }
}

/// An event of a rank's streams is over: a word of the microbatch that grows.
fn signals(filled: &Rc<StreamOperands>, flag: Flag, call: usize) -> UnrolledOp {
    let op = Op::Signal { to: filled.me, of: filled.me, flag, level: FlagValue::Call };
    UnrolledOp { id: 0, track: 0, set: filled.set, op, value: value(call) }
}

fn awaits(filled: &Rc<StreamOperands>, flag: Flag, call: usize) -> UnrolledOp {
    let op = Op::Wait { from: filled.me, flag, level: FlagValue::Call };
    UnrolledOp { id: 0, track: 0, set: filled.set, op, value: value(call) }
}

impl StreamUnroller<'_> {
    /// Reads of experts before a call that answers a dispatch. No program runs them.
    fn experts(&self, call: usize, me: u32) -> Vec<HostAccess> {
        match self.scenario.calls[call].call() {
            SlotCall::Dispatch => Vec::new(),
            SlotCall::Combine | SlotCall::Release | SlotCall::Refusal => self.landed(call, me),
        }
    }

    /// Reads and writes of a step of a call. A check reads no bytes but those that experts read
    /// behind it.
    fn touches(&self, work: Work, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, seeded) = (self.scenario.slots, self.scenario.seeded);
        match work {
            Work::Pack => {
                let packed =
                    seeded == Some(StreamBug::PackAhead) && self.turns.before(call, Flag::Landed).is_some();
                let send = if packed { Vec::new() } else { self.pack(call, me) };
                let own = self.touch("own rows", true, call, (me, slots.receive(me)), self.slot());
                send.into_iter().chain([own]).collect()
            }
            Work::Partials if self.turns.call_at(me, call) == SlotCall::Refusal => {
                vec![self.touch("own mark", true, call, (me, slots.mark(me)), Slots::MARK_BYTES)]
            }
            Work::Partials => {
                let at = |of| (me, slots.partial(of));
                let partial = |of| self.touch("partial rows", true, call, at(of), slots.return_bytes());
                (0..slots.ranks()).map(partial).collect()
            }
            Work::Sum if seeded != Some(StreamBug::SumLate) => self.sum(call, me),
            _ => Vec::new(),
        }
    }

    /// Accesses that a seeded bug adds to kernels at the end of a call.
    fn seeded_accesses(&self, call: usize, me: u32) -> Vec<HostAccess> {
        match (self.scenario.seeded, self.scenario.calls[call].call()) {
            (Some(StreamBug::SumLate), SlotCall::Dispatch) => {
                let before = self.turns.before(call, Flag::Returned);
                let combine = before.filter(|&c| self.scenario.calls[c].call() == SlotCall::Combine);
                combine.map_or_else(Vec::new, |combine| self.sum(combine, me))
            }
            (Some(StreamBug::PackAhead), SlotCall::Dispatch) => {
                let next = self.turns.after(call, Flag::Landed);
                next.map_or_else(Vec::new, |next| self.pack(next, me))
            }
            (Some(StreamBug::KeepSlots), SlotCall::Combine | SlotCall::Release | SlotCall::Refusal) => {
                self.landed(call, me)
            }
            _ => Vec::new(),
        }
    }

    /// Rows for every peer are packed.
    fn pack(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let slot = |to| self.touch("slot", true, call, (me, self.scenario.slots.send(to)), self.slot());
        self.peers(me).map(slot).collect()
    }

    /// Reads of landed rows, own rows included.
    fn landed(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, dispatch) = (self.scenario.slots, self.turns.slots_of[call]);
        let slot = |of| self.touch("landed rows", false, dispatch, (me, slots.receive(of)), self.slot());
        (0..slots.ranks()).map(slot).collect()
    }

    /// Sums the returned rows with the partial rows of this rank itself. Where a rank refuses,
    /// reads its mark alone.
    fn sum(&self, call: usize, me: u32) -> Vec<HostAccess> {
        let (slots, bytes) = (self.scenario.slots, self.scenario.slots.return_bytes());
        if let Some(refuses) = self.turns.refuses(call) {
            let at = (me, slots.mark(refuses));
            return vec![self.touch("mark of a refusal", false, call, at, Slots::MARK_BYTES)];
        }
        let read = |what, at| self.touch(what, false, call, (me, at), bytes);
        let returned = self.peers(me).map(|peer| read("returned rows", slots.returned(peer)));
        iter::once(read("own partial rows", slots.partial(me))).chain(returned).collect()
    }

    fn touch(
        &self,
        what: &'static str,
        write: bool,
        of: usize,
        (me, at): (u32, u64),
        len: u64,
    ) -> HostAccess {
        let first = u64::from(self.turns.words[of].0) * self.scenario.slots.bytes();
        HostAccess { what, bytes: Bytes::new(me, Slots::WINDOW, first + at, len), write, of }
    }

    fn slot(&self) -> u64 {
        self.scenario.slots.slot_bytes()
    }

    fn peers(&self, me: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.scenario.slots.ranks()).filter(move |&peer| peer != me)
    }
}

/// Operands of one program, and where its microbatch has its windows.
#[derive(Debug)]
struct StreamOperands {
    program: StreamProgram,
    me: u32,
    set: u32,
    call: usize,
    turns: Rc<CallOrder>,
}

impl StreamOperands {
    /// Whether a stream brings in from host staging what was not sent: the rows of a rank that
    /// refuses, or the mark of one that does not. No sum reads it.
    fn brings_nothing(&self, effect: &Effect) -> bool {
        let Effect::Copy { from: Some(from), .. } = effect else { return false };
        let (slots, at) = (self.program.slots(), from.range.start);
        let (refuses, marks) = (self.turns.refuses(self.call), slots.mark(0)..slots.bytes());
        let sent = match marks.contains(&at) {
            true => refuses.is_some_and(|refuses| at == slots.mark(refuses)),
            false => refuses.is_none_or(|refuses| at != slots.returned(refuses)),
        };
        from.window == WindowId::HOST_STAGING && from.owner == self.me && !sent
    }

    fn word(&self, owner: u32, of: u32, flag: Flag) -> Bytes {
        let slots = self.program.slots();
        let at = u64::from(self.set) * slots.flag_bytes() + slots.flag(of, flag);
        Bytes::new(owner, WindowId::CONTROL, at, LINE)
    }
}

/// The value of the words of a call.
fn value(call: usize) -> u64 {
    call as u64 + 1
}

/// The call that says it.
fn call_of(value: u64) -> usize {
    (value as usize).saturating_sub(1)
}

impl Effects for StreamOperands {
    fn sources_of(&self) -> Option<usize> {
        Some(self.call)
    }

    fn targets_of(&self) -> Option<usize> {
        Some(self.call)
    }

    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let first = u64::from(self.set) * self.program.slots().bytes();
        let shift = |to: Bytes| {
            Bytes::new(to.owner, to.window, first + to.range.start, to.range.end - to.range.start)
        };
        match step.op {
            Op::Put { to, operand } => self
                .program
                .operands()
                .puts(to, operand)
                .into_iter()
                .filter(|effect| !self.brings_nothing(effect))
                .map(|effect| match effect {
                    Effect::Copy { from, to } => Effect::Copy { from: from.map(shift), to: shift(to) },
                    other => other,
                })
                .collect(),
            Op::Signal { to, of, flag, level: FlagValue::Reset } => {
                vec![Effect::SetsBack { word: self.word(to, of, flag), call: call_of(step.value) }]
            }
            Op::Signal { to, of, flag, level: FlagValue::Credit } => {
                let call = call_of(step.value);
                let rung = || self.turns.rung(call, self.me);
                let after = if of == to { rung() } else { self.turns.before(call, flag) };
                vec![Effect::Raises { word: self.word(to, of, flag), call, after }]
            }
            Op::Wait { from, flag, level: FlagValue::Credit } => {
                vec![Effect::Awaits { word: self.word(self.me, from, flag), call: call_of(step.value) }]
            }
            _ => Vec::new(),
        }
    }
}

/// A call, or half of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Whole,
    Start,
    Finish,
}

/// Which call follows which.
#[derive(Debug)]
struct CallOrder {
    /// Number of microbatches.
    sets: u32,
    /// Per call: its windows and flags, and its words.
    words: Vec<(u32, Flag)>,
    /// Per call: its kind, which decides whose request flag it sets.
    calls: Vec<SlotCall>,
    refusals: Option<Refusals>,
    ranks: u32,
    /// Per call: the dispatch whose slots it uses; itself, if it is one.
    slots_of: Vec<usize>,
}

impl CallOrder {
    fn of(scenario: &StreamScenario) -> Result<Self, PlanError> {
        let sets = scenario.calls.iter().map(|call| call.microbatch() + 1).max().unwrap_or(1);
        let (words, calls, slots_of) = (Vec::new(), Vec::new(), Vec::new());
        let (refusals, ranks) = (scenario.refuses, scenario.slots.ranks());
        let mut turns = CallOrder { sets, words, calls, refusals, ranks, slots_of };
        let mut dispatched: Vec<Option<usize>> = vec![None; sets as usize];
        for (number, call) in scenario.calls.iter().enumerate() {
            let of = call.microbatch();
            let open = &mut dispatched[of as usize];
            let slots_of = match (call, *open) {
                (StreamCall::Dispatch(_), Some(_)) if scenario.seeded != Some(StreamBug::Unreleased) => None,
                (StreamCall::Dispatch(_), _) => Some(number),
                (_, open) => open,
            };
            let expected = "dispatch and combine (or release) of each microbatch in turn";
            turns.slots_of.push(slots_of.ok_or(bad("call", number, expected))?);
            *open = slots_of.filter(|&dispatch| dispatch == number);
            let set = if scenario.seeded == Some(StreamBug::Share) { 0 } else { of };
            turns.words.push((set, call.call().flag()));
            turns.calls.push(call.call());
        }
        Ok(turns)
    }

    /// The call before (or after) this one that has the same words.
    fn next<'t>(
        &'t self,
        call: usize,
        flag: Flag,
        mut others: impl Iterator<Item = usize> + 't,
    ) -> Option<usize> {
        others.find(|&other| self.words[other] == (self.words[call].0, flag))
    }

    fn before(&self, call: usize, flag: Flag) -> Option<usize> {
        self.next(call, flag, (0..call).rev())
    }

    /// The rank that refuses this answer to a dispatch, or the dispatch.
    fn refuses(&self, call: usize) -> Option<u32> {
        let Refusals { rank, in_turn, .. } = self.refusals?;
        let moved = if in_turn { rank + call as u32 } else { rank };
        (self.calls[call] != SlotCall::Dispatch).then_some(moved % self.ranks)
    }

    /// The call as a rank makes it.
    fn call_at(&self, me: u32, call: usize) -> SlotCall {
        match self.calls[call] {
            SlotCall::Combine | SlotCall::Release if self.refuses(call) == Some(me) => SlotCall::Refusal,
            call => call,
        }
    }

    /// Pieces of calls that the streams of a rank run in the turn of a call.
    fn pieces(&self, me: u32, call: usize) -> Vec<(usize, Piece)> {
        let at_once = |answer: &usize| {
            let of_dispatch = self.refusals.is_some_and(|all| all.refused == RefusedCall::Dispatch);
            of_dispatch && self.refuses(*answer) == Some(me)
        };
        let answers = |dispatch: usize| {
            (dispatch + 1..self.calls.len()).find(|&answer| self.slots_of[answer] == dispatch)
        };
        let mut pieces = Vec::new();
        if self.calls[call] == SlotCall::Dispatch {
            let before = self.before(call, Flag::Returned).filter(at_once);
            pieces.extend(before.map(|answer| (answer, Piece::Finish)));
            pieces.push((call, Piece::Whole));
            pieces.extend(answers(call).filter(at_once).map(|answer| (answer, Piece::Start)));
        } else if !at_once(&call) {
            pieces.push((call, Piece::Whole));
        }
        if call + 1 == self.calls.len() {
            let last = |answer: &usize| at_once(answer) && self.after(*answer, Flag::Landed).is_none();
            pieces.extend((0..self.calls.len()).filter(last).map(|answer| (answer, Piece::Finish)));
        }
        pieces
    }

    /// The previous call of a rank that sets the same request flag.
    fn rung(&self, call: usize, me: u32) -> Option<usize> {
        let same = |other: &usize| (self.words[*other].0, self.call_at(me, *other));
        (0..call).rev().find(|other| same(other) == same(&call))
    }

    fn after(&self, call: usize, flag: Flag) -> Option<usize> {
        self.next(call, flag, call + 1..self.words.len())
    }
}

/// Signals and waits alone: the bytes that they guard do not matter here.
#[derive(Debug)]
struct Bare;

impl Effects for Bare {
    fn effects(&self, _: &UnrolledOp) -> Vec<Effect> {
        Vec::new()
    }
}

/// Each rank enqueues its calls in an order of its own, each microbatch on a stream of its own: a
/// track.
pub(super) fn fold(slots: Slots, orders: &[Vec<StreamCall>]) -> Result<UnrolledProgram, PlanError> {
    let parts = (0..).zip(orders).map(|(rank, order)| {
        let mut turns: HashMap<(u32, Flag), u64> = HashMap::new();
        let mut steps = Vec::new();
        for &call in order {
            let (track, program) = (call.microbatch(), StreamProgram::new(call.call(), slots, rank)?);
            let turn = turns.entry((track, call.call().flag())).or_default();
            *turn += 1;
            let ops = program.stage().items.iter().map(|item| item.op);
            let step = |op| UnrolledOp { id: 0, track, set: track, op, value: *turn };
            steps.extend(ops.filter(|op| !matches!(op, Op::Put { .. })).map(step).filter(|s| !s.sets_back()));
        }
        let (name, touches, filled) = ("queue", Vec::new(), Rc::new(Bare));
        let scene = StageRun { name, first: 0, settled: true, touches, steps, filled };
        Ok(ActorCall { rank, role: Role::Own, call: 0, kind: CallKind::Unknown, scenes: vec![scene] })
    });
    Ok(UnrolledProgram {
        ranks: slots.ranks(),
        actors: orders.len() as u32,
        control_bytes: 0,
        pool_bytes: 0,
        calls: numbered(vec![parts.collect::<Result<_, _>>()?]),
        assumed: Vec::new(),
    })
}
