//! Calls of several instances on one device: programs of instances, each unrolled alone, in one.
//!
//! ```text
//!   turns      start a    start b    finish a    finish b
//!   host       enqueue    enqueue    call 0 ..   call 1 ..          instance a: flags and windows of set 0
//!   stream     ready a    ready b    pull a ..   pull b ..          instance b: those of set 1, behind them
//! ```
//!
//! All ranks take turns in the same order. An instance lends itself to a call between its halves,
//! so only calls of different instances are between their halves at the same time.

use std::collections::VecDeque;
use std::rc::Rc;

use sidelane_core::error::PlanError;
use sidelane_core::schedule::{Flag, Op, WindowId};

use super::call_sequence::{KEPT, bad};
use super::stage_runs::{ENQUEUED, SETS};
use super::{
    ActorCall, Bytes, Effect, Effects, HostAccess, Role, StageRun, Streams, UnrolledOp, UnrolledProgram,
    numbered,
};

/// The calls of several instances, all ranks in the same order.
#[derive(Clone, Debug)]
pub struct InstanceScenario<'a> {
    /// Each instance's calls alone. Callers' threads enqueue them, or no relay has a thread.
    pub instances: &'a [UnrolledProgram],
    /// Calls and halves of calls, in the order in which ranks make them.
    pub turns: &'a [Turn],
    /// [`Streams::One`] for all instances, or [`Streams::Each`] its own.
    pub streams: Streams,
    /// A rule that is broken: `None`, except to see that `prove` notices.
    pub seeded: Option<InstanceBug>,
}

/// A call of an instance, or half of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Its next call, whole.
    Call(usize),
    /// The first half of its next return, up to where its stream signals that it is
    /// [ready](Flag::Ready).
    Start(usize),
    /// The second half.
    Finish(usize),
}

impl Turn {
    fn instance(self) -> usize {
        let (Turn::Call(instance) | Turn::Start(instance) | Turn::Finish(instance)) = self;
        instance
    }
}

/// Rules that a library, or a caller with several instances, could break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceBug {
    /// All instances have the memory of the first; flags are apart.
    ShareMemory,
    /// All instances have memory of the first for rows that land and for outputs. Staging, tables
    /// and flags are apart.
    ShareRows,
    /// One rank takes a turn and the next in the other order.
    Crossed {
        /// The rank.
        rank: u32,
        /// The first of the two turns.
        turn: usize,
    },
}

pub(super) fn unroll(scenario: &InstanceScenario) -> Result<UnrolledProgram, PlanError> {
    let InstanceScenario { instances, turns, streams, seeded } = *scenario;
    let ranks = instances.first().map_or(0, |instance| instance.ranks);
    let fits = |(nth, instance): (usize, &UnrolledProgram)| {
        let made = turns.iter().filter(|turn| turn.instance() == nth && !matches!(turn, Turn::Start(_)));
        instance.ranks == ranks && made.count() == instance.calls.len()
    };
    if !instances.iter().enumerate().all(fits) {
        return Err(bad("turns", turns.len(), "one for each call of instances of one group"));
    }
    let mut shift = Shift::default();
    let places: Vec<Rc<Place>> = (0..)
        .zip(instances)
        .map(|(set, instance)| {
            let place = Rc::new(Place { set, shift, calls: calls_of(set as usize, turns) });
            if seeded != Some(InstanceBug::ShareMemory) {
                shift.pool += instance.pool_bytes;
            }
            if !matches!(seeded, Some(InstanceBug::ShareMemory | InstanceBug::ShareRows)) {
                shift.rows = shift.pool;
            }
            shift.control += instance.control_bytes;
            place
        })
        .collect();
    let mut actors: Vec<Vec<ActorCall>> = Vec::new();
    for nth in 0..instances.first().map_or(0, |instance| instance.actors) {
        let first = instances[0].parts_of(nth).next().map(|part| (part.rank, part.role));
        let (rank, role) = first.unwrap_or((nth, Role::Own));
        let mut turns = turns.to_vec();
        if let Some(InstanceBug::Crossed { turn, .. }) =
            seeded.filter(|bug| matches!(bug, InstanceBug::Crossed { rank: crossed, .. } if *crossed == rank))
        {
            turns.swap(turn, turn + 1);
        }
        let apart = role != Role::Own && streams == Streams::Each;
        let sets = if apart { instances.len() } else { 1 };
        for set in 0..sets {
            let of_actor = |instance: usize| !apart || instance == set;
            actors.push(taken(scenario, &places, (nth, rank, role), &turns, of_actor)?);
        }
    }
    let calls = actors.first().map_or(0, Vec::len);
    let calls = (0..calls).map(|call| actors.iter().map(|parts| parts[call].clone()).collect()).collect();
    Ok(UnrolledProgram {
        ranks,
        actors: actors.len() as u32,
        control_bytes: shift.control,
        pool_bytes: instances.iter().map(|instance| instance.pool_bytes).sum(),
        calls: numbered(calls),
        assumed: Vec::new(),
    })
}

/// Positions in the common order of the calls of an instance.
fn calls_of(instance: usize, turns: &[Turn]) -> Vec<usize> {
    let ends = turns.iter().filter(|turn| !matches!(turn, Turn::Start(_)));
    ends.enumerate().filter(|(_, turn)| turn.instance() == instance).map(|(call, _)| call).collect()
}

/// The calls of one actor, in its turns; those of other instances are empty.
fn taken(
    scenario: &InstanceScenario,
    places: &[Rc<Place>],
    (nth, rank, role): (u32, u32, Role),
    turns: &[Turn],
    of_actor: impl Fn(usize) -> bool,
) -> Result<Vec<ActorCall>, PlanError> {
    let mut next = vec![0; places.len()];
    let mut rest: Vec<Option<VecDeque<StageRun>>> = vec![None; places.len()];
    let (mut made, mut begun): (Vec<ActorCall>, Vec<StageRun>) = (Vec::new(), Vec::new());
    for &turn in turns {
        let of = turn.instance();
        let (instance, place) = (&scenario.instances[of], &places[of]);
        let call = next[of];
        let part = &instance.calls[call][nth as usize];
        let scenes = || part.scenes.iter().map(|scene| place.moved(scene)).collect::<VecDeque<_>>();
        match turn {
            Turn::Start(_) => {
                let mut scenes = scenes();
                let half = half_of(instance, (call, rank, role)).ok_or(bad("turn", of, "a return's half"))?;
                let first = scenes.drain(..half);
                begun.extend(first.filter(|_| of_actor(of)));
                rest[of] = Some(scenes);
            }
            Turn::Call(_) | Turn::Finish(_) => {
                let scenes = rest[of].take().unwrap_or_else(scenes);
                begun.extend(scenes.into_iter().filter(|_| of_actor(of)));
                let (call, scenes) = (made.len(), std::mem::take(&mut begun));
                made.push(ActorCall { rank, role, call, kind: part.kind, scenes });
                next[of] += 1;
            }
        }
    }
    Ok(made)
}

/// How many scenes of an actor the first half of a call has: as many as it takes until the rank's
/// stream of copies signals that it is ready. Its host has enqueued that much, and what precedes it
/// on the caller's stream. They move nothing, so they may stand in the call of another instance.
fn half_of(instance: &UnrolledProgram, (call, rank, role): (usize, u32, Role)) -> Option<usize> {
    let parts = &instance.calls[call];
    let part_of = |role| parts.iter().find(|part| part.rank == rank && part.role == role);
    let [host, stream] = [part_of(Role::Own)?, part_of(Role::Transfers)?].map(|part| &part.scenes);
    let signals = |step: &UnrolledOp| matches!(step.op, Op::Signal { flag: Flag::Ready, .. });
    let ready = stream.iter().position(|scene| scene.steps.iter().any(signals))? + 1;
    // The word by which a line hears that its host has enqueued what follows.
    let word = |scene: &StageRun| {
        let step = scene.steps.first().filter(|_| scene.name == ENQUEUED)?;
        Some((step.set, step.value))
    };
    let last = stream[..ready].iter().rev().find_map(word)?;
    let half = host.iter().position(|scene| word(scene) == Some(last))? + 1;
    match role {
        Role::Own => Some(half),
        Role::Caller => {
            let enqueued: Vec<_> = host[..half].iter().filter_map(word).collect();
            let later = |scene: &StageRun| word(scene).is_some_and(|word| !enqueued.contains(&word));
            let scenes = &part_of(Role::Caller)?.scenes;
            Some(scenes.iter().position(later).unwrap_or(scenes.len()))
        }
        _ => Some(ready),
    }
}

/// Distance of windows from those of an instance alone.
#[derive(Clone, Copy, Debug, Default)]
struct Shift {
    pool: u64,
    /// In the pool, of memory that calls take and give back.
    rows: u64,
    control: u64,
}

/// Where an instance has its flags, its windows and its calls.
#[derive(Debug)]
struct Place {
    set: u32,
    shift: Shift,
    /// Per call of the instance: its position among the calls of all.
    calls: Vec<usize>,
}

impl Place {
    fn moved(self: &Rc<Self>, scene: &StageRun) -> StageRun {
        let touch = |touch: &HostAccess| HostAccess {
            bytes: self.bytes(touch.bytes.clone()),
            of: self.calls[touch.of],
            ..touch.clone()
        };
        let filled = Rc::new(InstanceOperands { place: Rc::clone(self), filled: Rc::clone(&scene.filled) });
        StageRun {
            touches: scene.touches.iter().map(touch).collect(),
            steps: scene
                .steps
                .iter()
                .map(|step| UnrolledOp { set: self.set * SETS + step.set, ..*step })
                .collect(),
            filled,
            ..scene.clone()
        }
    }

    fn bytes(&self, bytes: Bytes) -> Bytes {
        let Bytes { owner, window, range } = bytes;
        let by = match window {
            WindowId::CONTROL => self.shift.control,
            WindowId::POOL if range.start >= KEPT => self.shift.rows,
            _ => self.shift.pool,
        };
        Bytes { owner, window, range: range.start + by..range.end + by }
    }
}

/// Operands of an instance, where it has its windows.
#[derive(Debug)]
struct InstanceOperands {
    place: Rc<Place>,
    filled: Rc<dyn Effects>,
}

impl Effects for InstanceOperands {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let moved = |bytes| self.place.bytes(bytes);
        let effects = self.filled.effects(step).into_iter().map(|effect| match effect {
            Effect::Copy { from, to } => Effect::Copy { from: from.map(moved), to: moved(to) },
            Effect::Tag(to) => Effect::Tag(moved(to)),
            Effect::Read(bytes) => Effect::Read(moved(bytes)),
            Effect::Sums(to) => Effect::Sums(moved(to)),
            // Words of the calls of an exchange grow, so they are no bytes.
            words => words,
        });
        effects.collect()
    }

    fn sources_of(&self) -> Option<usize> {
        self.filled.sources_of().map(|call| self.place.calls[call])
    }

    fn targets_of(&self) -> Option<usize> {
        self.filled.targets_of().map(|call| self.place.calls[call])
    }
}
