//! Unrolls a script: plays the planner and the caller of every rank.
//!
//! ```text
//!   dispatch   | licence | free offered, announce, write publication | counts | read tags, publications | rows | caller reads rows
//!   cached     | licence | free offered, take extent                 | entry  | read tags               | rows | caller reads rows
//!   return     caller writes chunk | licence | free offered, take staging | entry | read tags | home | sum | free staging, offer chunk
//! ```

use std::ops::Range;
use std::rc::Rc;

use super::calls::Until;
use super::pool::Pool;
use super::{Call, Part, Scene, Script, Slip, Step, Story, Touch};
use crate::error::{CallKind, PlanError};
use crate::plan::{Counts, Frame, Layout, Sizes, Sorted};
use crate::schedule::{At, Calls, Control, Direct, Op, Parts, Stage, Tables};

/// Epoch of all stories.
const EPOCH: u16 = 1;

pub(super) type Extent = Range<u64>;

/// What one rank remembers from call to call.
#[derive(Clone)]
pub(super) struct Member {
    pub calls: Calls,
    /// Dispatches alone: see [`Slip::CountDispatches`].
    pub dispatches: u64,
    pub pool: Pool,
    pub offered: Vec<Extent>,
}

pub(super) struct Handle {
    pub call: usize,
    pub layouts: Vec<Rc<Layout>>,
    pub kept: Option<Vec<Extent>>,
}

/// What the planner and the caller of a rank add to a skeleton, scene by scene.
pub(super) type Touches = [Vec<Touch>; 5];

pub(super) struct Teller<'a> {
    pub(super) script: &'a Script<'a>,
    pub(super) control: Control,
    pub(super) members: Vec<Member>,
    pub(super) handles: Vec<Handle>,
    pub(super) call: usize,
}

pub(super) fn tell(script: &Script) -> Result<Story, PlanError> {
    let ranks = script.nodes.ranks();
    if script.map.ranks() != ranks {
        return Err(bad("ranks of the expert map", script.map.ranks() as usize, "as many as the nodes have"));
    }
    let choices = script.routings.iter().flatten().map(|routing| routing.experts().len()).max();
    let mut teller = Teller {
        script,
        control: Control::new(ranks, script.map.slots(), choices.unwrap_or(0) as u64),
        members: vec![Member::new(); ranks as usize],
        handles: Vec::new(),
        call: 0,
    };
    let mut calls = Vec::new();
    for (number, call) in script.calls.iter().enumerate() {
        teller.call = number;
        teller.members.iter_mut().for_each(|member| member.calls.enter());
        calls.push(match *call {
            Call::Dispatch { routing, keep } => teller.dispatch(routing, keep, Until::End)?,
            Call::RefusedDispatch { routing } => teller.dispatch(routing, false, Until::Counts)?,
            Call::Cached { handle } => teller.cached(handle)?,
            Call::Return { handle, parts, copied } => teller.ret(handle, parts, copied, Until::End)?,
            Call::RefusedReturn { handle } => {
                teller.ret(handle, Parts { rows: true, weights: false }, false, Until::Tags)?
            }
            Call::Mixed { routing, handle } => teller.mixed(routing, handle)?,
        });
    }
    let pool_bytes = teller.members.iter().map(|member| member.pool.high).max().unwrap_or(0);
    Ok(Story { ranks, control: teller.control, pool_bytes, calls })
}

pub(super) fn bad(parameter: &'static str, seen: usize, expected: &'static str) -> PlanError {
    PlanError::BadParameter { parameter, seen: seen as u64, expected }
}

impl<'a> Teller<'a> {
    /// After the licence: takes an extent of the exact size at every rank.
    pub(super) fn land(&mut self, layouts: &[Rc<Layout>]) -> Vec<Extent> {
        let held = self.handles.iter().rev().find_map(|handle| handle.kept.as_ref());
        let announce_held = self.script.slip == Some(Slip::AnnounceHeld);
        let mut landing = Vec::new();
        for (me, (member, layout)) in self.members.iter_mut().zip(layouts).enumerate() {
            member.licensed();
            if let Some(held) = held.filter(|_| announce_held) {
                member.pool.give(&held[me]);
            }
            landing.push(member.pool.take(u64::from(layout.landed) * self.script.row_bytes));
        }
        landing
    }

    /// The caller gives the landed rows back, or keeps them.
    pub(super) fn leave(&mut self, landing: Vec<Extent>, keep: bool) -> Option<Vec<Extent>> {
        if keep {
            return Some(landing);
        }
        self.members.iter_mut().zip(&landing).for_each(|(member, extent)| member.pool.give(extent));
        None
    }

    pub(super) fn layout(&self, me: u32, sorted: &[Sorted], top_k: u32) -> Layout {
        let Script { map, nodes, align, order, .. } = *self.script;
        let (mut counts, mut sizes, mut layout) = Default::default();
        Counts::clear(&mut counts, map, me);
        for (source, sorted) in (0..).zip(sorted) {
            counts.add(map, me, source, sorted.counts.iter().copied());
        }
        Sizes::fill(&mut sizes, map, align, &counts.total);
        Layout::fill(
            &mut layout,
            &Frame { map, nodes, me, align, order },
            &sorted[me as usize],
            top_k,
            &counts,
            &sizes,
        );
        layout
    }

    pub(super) fn part(
        &self,
        rank: u32,
        kind: CallKind,
        stages: Vec<&Stage>,
        touches: Touches,
        tables: Tables,
        layout: &Rc<Layout>,
    ) -> Part {
        let mut part = Part {
            rank,
            call: self.call,
            kind,
            scenes: Vec::new(),
            calls: self.members[rank as usize].calls,
            row_bytes: self.script.row_bytes,
            tag_parity: self.tag_parity(rank),
            tables,
            layout: layout.clone(),
        };
        let operands = part.operands();
        let mut touches = touches.into_iter();
        let mut scenes: Vec<Scene> = stages
            .into_iter()
            .zip(&mut touches)
            .map(|(stage, touches)| Scene {
                name: stage.name,
                touches,
                steps: stage
                    .items
                    .iter()
                    .map(|item| Step {
                        track: item.track,
                        op: item.op,
                        value: match item.op {
                            Op::Signal { level, .. } | Op::Wait { level, .. } => operands.value(level),
                            _ => 0,
                        },
                    })
                    .collect(),
            })
            .collect();
        scenes.push(Scene { name: "end", touches: touches.flatten().collect(), steps: Vec::new() });
        part.scenes = scenes;
        part
    }

    pub(super) fn handle(&mut self, handle: usize) -> Result<&mut Handle, PlanError> {
        self.handles.get_mut(handle).ok_or(bad("handle", handle, "one of an earlier dispatch"))
    }

    pub(super) fn at(&self, me: u32) -> At<'a> {
        At { nodes: self.script.nodes, me }
    }

    pub(super) fn direct(&self, me: u32) -> Direct<'_> {
        Direct::new(self.script.nodes, me)
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..self.script.nodes.ranks()
    }
}

impl Member {
    fn new() -> Self {
        Member { calls: Calls::new(EPOCH), dispatches: 0, pool: Pool::default(), offered: Vec::new() }
    }

    /// The readers of what was offered have said so: it is free.
    pub fn licensed(&mut self) {
        for extent in std::mem::take(&mut self.offered) {
            self.pool.give(&extent);
        }
    }
}
