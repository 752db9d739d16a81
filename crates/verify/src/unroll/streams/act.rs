//! Work of each actor of a rank in one call: scenes, and the steps of the stage with the seeded
//! bugs of a caller.

use std::mem::take;
use std::rc::Rc;

use sidelane_core::error::PlanError;
use sidelane_core::schedule::call::Action;
use sidelane_core::schedule::stream::{ProxyProgram, StreamProgram};
use sidelane_core::schedule::{Flag, FlagValue, Op, Stage, TrackOp};

use super::filled::{Filled, value};
use super::{Actor, StreamBug, Streams, Teller};
use crate::unroll::effect::Effects;
use crate::unroll::{ActorCall, HostAccess, Role, StageRun, UnrolledOp};

impl Teller<'_> {
    /// What all actors do in one call.
    pub fn parts(&self, call: usize) -> Result<Vec<ActorCall>, PlanError> {
        let kind = self.script.calls[call].call().kind();
        let (turn, aside) = (self.script.calls[call].microbatch(), self.script.streams == Streams::Aside);
        let parts = self.actors.iter().map(|&actor| {
            let filled = self.filled(call, actor.rank())?;
            let (role, scenes) = match actor {
                Actor::Stream { nth, .. } => match (self.script.streams, nth) {
                    (Streams::Each, nth) if nth != turn => (Role::Own, Vec::new()),
                    (_, 0) if aside => (Role::Own, self.kernels(call, &filled)),
                    _ if aside => (Role::Transfers, self.transfers(call, &filled)),
                    _ => (Role::Own, self.whole(call, &filled)),
                },
                Actor::Out { of, .. } | Actor::Back { of, .. } if of != turn => (Role::Relay, Vec::new()),
                Actor::Out { .. } => (Role::Relay, proxied_out(call, &filled)),
                Actor::Back { from, .. } => (Role::Relay, proxied_back(call, from, &filled)),
            };
            Ok(ActorCall { rank: actor.rank(), role, call, kind, scenes })
        });
        parts.collect()
    }

    fn filled(&self, call: usize, me: u32) -> Result<Rc<Filled>, PlanError> {
        let mut program = StreamProgram::new(self.script.calls[call].call(), self.script.slots, me)?;
        if let Some((nodes, way)) = self.script.across {
            program = program.across(nodes, way)?;
        }
        let set = self.turns.words[call].0;
        Ok(Rc::new(Filled { program, me, set, turns: Rc::clone(&self.turns) }))
    }

    /// Walks the program of a call: the accesses of kernels, and then the steps of the stage behind
    /// them. After the last stage there are only kernels.
    fn walk(&self, call: usize, filled: &Rc<Filled>) -> Vec<(Vec<HostAccess>, Vec<UnrolledOp>)> {
        let (which, me) = (self.script.calls[call].call(), filled.me);
        let planted = self.script.planted.filter(|(planted, _)| *planted == which);
        let program = planted.map_or_else(|| which.program(), |(_, program)| program.clone());
        let (mut walked, mut touches, mut steps) =
            (Vec::new(), self.experts(call, me), None::<Vec<UnrolledOp>>);
        for step in program.line(None) {
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
        walked.iter_mut().for_each(|(_, steps)| *steps = self.slip(call, take(steps), filled));
        touches.extend(self.slipped(call, me));
        walked.push((touches, Vec::new()));
        walked
    }

    /// Everything, on one stream.
    fn whole(&self, call: usize, filled: &Rc<Filled>) -> Vec<StageRun> {
        let (walked, stage) = (self.walk(call, filled), filled.program.stage().name);
        let last = walked.len() - 1;
        let scenes = walked.into_iter().enumerate().map(|(nth, (touches, steps))| {
            scene(if nth == last { "end" } else { stage }, touches, steps, filled)
        });
        scenes.collect()
    }

    /// What kernels do, on a stream of their own.
    fn kernels(&self, call: usize, filled: &Rc<Filled>) -> Vec<StageRun> {
        let me = filled.me;
        let arrived = |of| match self.script.slip {
            Some(StreamBug::NotArrived) => scene("arrived", Vec::new(), Vec::new(), filled),
            _ => scene("arrived", Vec::new(), vec![awaits(me, Flag::Entry, of)], filled),
        };
        let mut walked = self.walk(call, filled).into_iter().map(|(touches, _)| touches);
        let before = walked.next().unwrap_or_default();
        let ready = scene("kernels", before, vec![tells(me, Flag::Block, call)], filled);
        let end = scene("end", walked.flatten().collect(), Vec::new(), filled);
        match self.turns.slots_of[call] {
            dispatch if dispatch == call => vec![ready, end],
            dispatch => vec![arrived(dispatch), ready, arrived(call), end],
        }
    }

    /// What transfers do, on a stream of their own.
    fn transfers(&self, call: usize, filled: &Rc<Filled>) -> Vec<StageRun> {
        let ready =
            (self.script.slip != Some(StreamBug::NotReady)).then(|| awaits(filled.me, Flag::Block, call));
        let steps = self.walk(call, filled).into_iter().flat_map(|(_, steps)| steps);
        let steps = ready.into_iter().chain(steps).chain([tells(filled.me, Flag::Entry, call)]).collect();
        vec![
            scene(filled.program.stage().name, Vec::new(), steps, filled),
            scene("end", Vec::new(), Vec::new(), filled),
        ]
    }

    /// The stage, with words set back as a slip has it.
    fn slip(&self, call: usize, all: Vec<UnrolledOp>, filled: &Rc<Filled>) -> Vec<UnrolledOp> {
        let step = |of: usize, op| word(filled, of, 0, op);
        if !matches!(
            self.script.slip,
            Some(StreamBug::NeverBack | StreamBug::BackFirst | StreamBug::BackLate)
        ) {
            return all;
        }
        let (back, mut steps): (Vec<UnrolledOp>, Vec<UnrolledOp>) =
            all.into_iter().partition(UnrolledOp::sets_back);
        let flag = self.script.calls[call].call().flag();
        match self.script.slip {
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
fn proxied_out(call: usize, filled: &Rc<Filled>) -> Vec<StageRun> {
    let Some(ProxyProgram { bell, out, .. }) = filled.program.proxied() else { return Vec::new() };
    let scenes =
        [bell, out].map(|stage| scene(stage.name, Vec::new(), in_tracks(call, stage, filled), filled));
    scenes.into_iter().chain([scene("end", Vec::new(), Vec::new(), filled)]).collect()
}

/// Its work when the net has brought a peer's rows.
fn proxied_back(call: usize, from: u32, filled: &Rc<Filled>) -> Vec<StageRun> {
    let Some(ProxyProgram { back, .. }) = filled.program.proxied() else { return Vec::new() };
    let mut steps = in_tracks(call, back, filled);
    steps.retain(|step| step.track == from);
    steps.iter_mut().for_each(|step| step.track = 0);
    vec![scene(back.name, Vec::new(), steps, filled), scene("end", Vec::new(), Vec::new(), filled)]
}

fn in_tracks(call: usize, stage: &Stage, filled: &Rc<Filled>) -> Vec<UnrolledOp> {
    stage.items.iter().map(|&TrackOp { track, op }| word(filled, call, track, op)).collect()
}

fn word(filled: &Rc<Filled>, of: usize, track: u32, op: Op) -> UnrolledOp {
    let value = if matches!(op, Op::Put { .. }) { 0 } else { value(of) };
    UnrolledOp { track, set: filled.set, op, value }
}

fn scene(
    name: &'static str,
    touches: Vec<HostAccess>,
    steps: Vec<UnrolledOp>,
    filled: &Rc<Filled>,
) -> StageRun {
    StageRun { name, first: 0, touches, steps, filled: Rc::clone(filled) as Rc<dyn Effects> }
}

/// An event of a rank's streams is over: a word that grows.
fn tells(me: u32, flag: Flag, call: usize) -> UnrolledOp {
    UnrolledOp {
        track: 0,
        set: 0,
        op: Op::Signal { to: me, of: me, flag, level: FlagValue::Call },
        value: value(call),
    }
}

fn awaits(me: u32, flag: Flag, call: usize) -> UnrolledOp {
    UnrolledOp {
        track: 0,
        set: 0,
        op: Op::Wait { from: me, flag, level: FlagValue::Call },
        value: value(call),
    }
}
