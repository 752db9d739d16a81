//! Happens-before, exactly.
//!
//! A put to a peer is *issued* in track order, but it *lands* only some time before the next signal
//! of its track is visible. So one actor can know two things of another:
//!
//! ```text
//!   era[actor]     touches and operations before this era are done there    (stage joins, passed on by signals)
//!   landed[lane]   puts before this position of the track have landed       (only by waiting for its signals)
//! ```
//!
//! A *lane* is a track of an actor. Both are passed on from signal to wait and through joins.
//! Knowing that a peer has *issued* a signal, by way of another track, says nothing about its
//! bytes: the two may overtake each other.

use std::ops::Range;

use sidelane_core::schedule::{FlagValue, Op};

use super::flat_program::{Node, Program};

/// Knowledge of some actor at some moment.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    /// Per actor: eras known to be over.
    pub era: &'a [u32],
    /// Per lane: positions known to have landed.
    pub landed: &'a [u32],
}

/// Knowledge at each point. Views are shared, since most operations know what their stage began
/// with.
pub(super) struct Knowledge {
    /// All views, one after another: the numbers per actor, then those per lane.
    views: Vec<u32>,
    actors: usize,
    lanes: usize,
    /// Per actor and scene: the view its touches and operations begin with.
    scene_views: Vec<Vec<u32>>,
    /// Per operation: the view that it begins with, and the one in which it is over.
    op_views: Vec<[u32; 2]>,
}

/// Era of a scene's touches; the scene's operations have the next.
pub(super) fn touch_era(scene: u32) -> u32 {
    2 * scene
}

/// Signals of one flag word so far: value and operation, both ascending.
type Signals = Vec<(u64, u32)>;

struct Learner<'a> {
    program: &'a Program<'a>,
    known: Knowledge,
    signals: Vec<Signals>,
    /// Per actor: signals heard in the running scene.
    heard: Vec<Vec<u32>>,
    /// Per actor and track: the view within the running scene, where the track has waited.
    track_views: Vec<Vec<Option<u32>>>,
}

impl Knowledge {
    /// Follows the operations in an order in which they can happen.
    pub fn follow(program: &Program, order: &[u32]) -> Knowledge {
        let (actors, tracks) = (program.unrolled.actors as usize, program.tracks as usize);
        let lanes = program.lanes as usize;
        let mut learner = Learner {
            program,
            known: Knowledge {
                views: vec![0; actors + lanes],
                actors,
                lanes,
                scene_views: vec![vec![0]; actors],
                op_views: vec![[0; 2]; program.nodes.len()],
            },
            signals: vec![Vec::new(); program.words as usize],
            heard: vec![Vec::new(); actors],
            track_views: vec![vec![None; tracks]; actors],
        };
        for &op in order {
            learner.learn(op);
        }
        for (actor, scenes) in program.scenes.iter().enumerate() {
            learner.enter(actor, scenes.len().saturating_sub(1));
        }
        learner.known
    }

    pub fn at_begin(&self, op: u32) -> u32 {
        self.op_views[op as usize][0]
    }

    pub fn at_end(&self, op: u32) -> u32 {
        self.op_views[op as usize][1]
    }

    pub fn of_scene(&self, actor: u32, scene: u32) -> u32 {
        self.scene_views[actor as usize][scene as usize]
    }

    #[inline]
    pub fn view(&self, view: u32) -> View<'_> {
        let (era, landed) = self.views[self.numbers_of(view)].split_at(self.actors);
        View { era, landed }
    }

    /// The numbers of a view.
    #[inline]
    fn numbers_of(&self, view: u32) -> Range<usize> {
        let count = self.actors + self.lanes;
        view as usize * count..(view as usize + 1) * count
    }
}

impl Learner<'_> {
    fn learn(&mut self, op: u32) {
        let node = self.program.nodes[op as usize];
        let Node { actor, scene, step, .. } = node;
        let at = actor as usize;
        self.enter(at, scene as usize);
        let view = self.track_views[at][step.track as usize].unwrap_or(self.known.of_scene(actor, scene));
        self.known.op_views[op as usize] = [view; 2];
        match step.op {
            Op::Signal { .. } if !step.sets_back() => self.signals[node.word()].push((step.value, op)),
            Op::Wait { level, .. } => {
                let signals = &self.signals[node.word()];
                let first = signals.partition_point(|&(value, _)| value < step.value);
                if let Some(&(_, signal)) = signals.get(first).filter(|_| step.value > 0) {
                    self.heard[at].push(signal);
                    if self.goes_on(op) || level == FlagValue::Credit {
                        let view = self.merge(view, &[signal]);
                        self.track_views[at][step.track as usize] = Some(view);
                        self.known.op_views[op as usize][1] = view;
                    }
                }
            }
            _ => {}
        }
    }

    /// Whether the track has more to do in this scene.
    fn goes_on(&self, op: u32) -> bool {
        let node = &self.program.nodes[op as usize];
        let end = self.program.scenes[node.actor as usize][node.scene as usize].end;
        self.program.nodes[op as usize + 1..end as usize].iter().any(|n| n.step.track == node.step.track)
    }

    /// Joins all tracks at the end of each scene before `scene`.
    fn enter(&mut self, actor: usize, scene: usize) {
        while self.known.scene_views[actor].len() <= scene {
            let before = self.known.scene_views[actor][self.known.scene_views[actor].len() - 1];
            let heard = std::mem::take(&mut self.heard[actor]);
            let view = if heard.is_empty() { before } else { self.merge(before, &heard) };
            self.known.scene_views[actor].push(view);
            self.track_views[actor].fill(None);
        }
    }

    /// A view that also contains the knowledge of these signals.
    fn merge(&mut self, view: u32, signals: &[u32]) -> u32 {
        let Knowledge { actors, .. } = self.known;
        let merged = self.known.views.len();
        self.known.views.extend_from_within(self.known.numbers_of(view));
        for &signal in signals {
            let node = &self.program.nodes[signal as usize];
            let sent = self.known.numbers_of(self.known.at_end(signal));
            let (known, merged) = self.known.views.split_at_mut(merged);
            max_into(merged, &known[sent]);
            let era = &mut merged[node.actor as usize];
            *era = (*era).max(touch_era(node.scene) + 1);
            if let Some(lane) = node.lane {
                let landed = &mut merged[actors + lane as usize];
                *landed = (*landed).max(node.pos + 1);
            }
        }
        self.known.views.len() as u32 / (actors + self.known.lanes) as u32 - 1
    }
}

fn max_into(to: &mut [u32], from: &[u32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = (*to).max(from);
    }
}
