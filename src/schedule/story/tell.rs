//! Unrolls a script: plays the planner and the caller of every rank.
//!
//! ```text
//!   dispatch   | licence | free offered, announce, write publication | counts | read publications, tags | rows | caller reads rows
//!   cached     | licence | free offered, take extent                 | entry  | read tags               | rows | caller reads rows
//!   return     caller writes chunk | licence | free offered, take staging | entry | read tags | home | sum | free staging, offer chunk
//! ```

use std::ops::Range;
use std::rc::Rc;

use super::pool::Pool;
use super::{Call, Part, Scene, Script, Slip, Step, Story, Touch};
use crate::error::{CallKind, PlanError};
use crate::plan::{Counts, Frame, Layout, Sizes, Sorted};
use crate::schedule::{At, Control, Direct, Op, Parts, Skeleton, Tables, chunk_bytes};

/// Epoch of all stories.
const EPOCH: u64 = 1 << 48;

pub(super) type Extent = Range<u64>;

/// What one rank remembers from call to call.
#[derive(Default)]
struct Member {
    pool: Pool,
    offered: Vec<Extent>,
    last_return: u64,
}

struct Handle {
    call: usize,
    layouts: Vec<Rc<Layout>>,
    kept: Option<Vec<Extent>>,
}

/// What the planner and the caller of a rank add to a skeleton, scene by scene.
type Touches = [Vec<Touch>; 5];

pub(super) struct Teller<'a> {
    pub(super) script: &'a Script<'a>,
    pub(super) control: Control,
    members: Vec<Member>,
    handles: Vec<Handle>,
    dispatches: u64,
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
        members: (0..ranks).map(|_| Member::default()).collect(),
        handles: Vec::new(),
        dispatches: 0,
        call: 0,
    };
    let mut calls = Vec::new();
    for (number, call) in script.calls.iter().enumerate() {
        teller.call = number;
        calls.push(match *call {
            Call::Dispatch { routing, keep } => teller.dispatch(routing, keep, false)?,
            Call::RefusedDispatch { routing } => teller.dispatch(routing, false, true)?,
            Call::Cached { handle } => teller.cached(handle)?,
            Call::Return { handle, parts, copied } => teller.ret(handle, parts, copied, false)?,
            Call::RefusedReturn { handle } => {
                teller.ret(handle, Parts { rows: true, weights: false }, false, true)?
            }
        });
    }
    let pool_bytes = teller.members.iter().map(|member| member.pool.high).max().unwrap_or(0);
    Ok(Story { ranks, control: teller.control, pool_bytes, calls })
}

fn bad(parameter: &'static str, seen: usize, expected: &'static str) -> PlanError {
    PlanError::BadParameter { parameter, seen: seen as u64, expected }
}

impl Teller<'_> {
    fn dispatch(&mut self, routing: usize, keep: bool, refused: bool) -> Result<Vec<Part>, PlanError> {
        let script = self.script;
        let set = script.routings.get(routing).filter(|set| set.len() == self.members.len()).ok_or(bad(
            "set of routings",
            routing,
            "one that exists, with a routing per rank",
        ))?;
        let parity = if script.slip == Some(Slip::OnePublication) { 0 } else { self.dispatches };
        self.dispatches += 1;
        let mut sorted = vec![Sorted::default(); set.len()];
        for ((sorted, routing), me) in sorted.iter_mut().zip(set).zip(0..) {
            sorted.fill(script.map, me, routing, script.order)?;
        }
        let layouts: Vec<Rc<Layout>> =
            self.ranks().map(|me| Rc::new(self.layout(me, &sorted, set[me as usize].top_k()))).collect();
        let landing = self.land(&layouts);
        let mut parts = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let at = self.at(me);
            let mut tables = Tables::new(self.script.nodes.ranks());
            tables.publications(&at, &self.control, parity, script.map, &sorted[me as usize]);
            tables.rows(&at, layout, &starts(&landing));
            tables.tags.fill(self.tag(CallKind::Dispatch, self.call as u64, 0));
            let mut touches = Touches::default();
            let publication = self.publication(me, me, parity, &sorted[me as usize], None);
            touches[1].extend(publication.map(|bytes| self.write("publication", bytes)));
            touches[2] = self.tags_read(me);
            for peer in self.ranks().filter(|&peer| peer != me) {
                let read = self.publication(peer, me, parity, &sorted[peer as usize], Some(me));
                touches[2].extend(read.map(|bytes| self.read("publication", bytes)));
            }
            if !refused {
                touches[3].push(self.rows_read(me, layout, &landing[me as usize], self.call));
            }
            let skeleton = self.direct(me).dispatch();
            parts.push(self.part(CallKind::Dispatch, &skeleton, refused, touches, tables, layout));
        }
        let kept = self.leave(landing, keep);
        if !refused {
            self.handles.push(Handle { call: self.call, layouts, kept });
        }
        Ok(parts)
    }

    fn cached(&mut self, handle: usize) -> Result<Vec<Part>, PlanError> {
        let layouts = self.handle(handle)?.layouts.clone();
        let landing = self.land(&layouts);
        let mut parts = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let mut tables = Tables::new(self.script.nodes.ranks());
            tables.rows(&self.at(me), layout, &starts(&landing));
            tables.tags.fill(self.tag(CallKind::CachedDispatch, handle as u64, landing[me as usize].start));
            let mut touches = Touches::default();
            touches[2] = self.tags_read(me);
            touches[3].push(self.rows_read(me, layout, &landing[me as usize], self.call));
            let skeleton = self.direct(me).cached_dispatch();
            parts.push(self.part(CallKind::CachedDispatch, &skeleton, false, touches, tables, layout));
        }
        self.leave(landing, false);
        Ok(parts)
    }

    fn ret(
        &mut self,
        handle: usize,
        parts: Parts,
        copied: bool,
        refused: bool,
    ) -> Result<Vec<Part>, PlanError> {
        let Handle { call: written, layouts, kept } = self.handle(handle)?;
        let (written, layouts, kept) = (*written, layouts.clone(), kept.take());
        let row_bytes = self.script.row_bytes;
        let (mut chunks, mut staging) = (Vec::new(), Vec::new());
        for (me, layout) in self.ranks().zip(&layouts) {
            let remote: Vec<u32> = self.at(me).remote().collect();
            let member = &mut self.members[me as usize];
            if let Some(kept) = &kept {
                member.pool.give(&kept[me as usize]);
            }
            let size = chunk_bytes(layout.landed, row_bytes);
            let early = (!copied).then(|| member.pool.take(size));
            member.licensed();
            chunks.push(early.unwrap_or_else(|| member.pool.take(size)));
            let mut held = vec![0..0; layouts.len()];
            for owner in remote.iter().map(|&owner| owner as usize) {
                held[owner] = member.pool.take(chunk_bytes(layout.chunk_rows[owner], row_bytes));
            }
            staging.push(held);
        }
        let mut told = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let (at, chunk) = (self.at(me), &chunks[me as usize]);
            let local = |peer: u32| self.script.nodes.same_node(me, peer);
            let mut tables = Tables::new(self.script.nodes.ranks());
            let landing: Vec<u64> =
                self.ranks().map(|peer| staging[peer as usize][me as usize].start).collect();
            tables.home(&at, layout, row_bytes, chunk.start, &landing, parts);
            tables.sum(&at, parts);
            for (peer, staged) in self.ranks().zip(&staging[me as usize]) {
                let theirs = if local(peer) { &chunks[peer as usize] } else { staged };
                tables.bases[peer as usize] = theirs.start;
                let mine = if local(peer) { chunk } else { staged };
                tables.tags[peer as usize] = self.tag(CallKind::Combine, handle as u64, mine.start);
            }
            let mut touches = Touches::default();
            if let Some(kept) = &kept {
                touches[0].push(self.rows_read(me, layout, &kept[me as usize], written));
            }
            touches[usize::from(copied)].extend(self.chunk_written(me, layout, chunk, parts));
            touches[2] = self.tags_read(me);
            let skeleton = self.direct(me).ret();
            told.push(self.part(CallKind::Combine, &skeleton, refused, touches, tables, layout));
        }
        let call = EPOCH + self.call as u64 + 1;
        for ((member, chunk), staging) in self.members.iter_mut().zip(chunks).zip(&staging) {
            staging.iter().for_each(|extent| member.pool.give(extent));
            if self.script.slip == Some(Slip::FreeBeforeAck) {
                member.pool.give(&chunk);
            } else {
                member.offered.push(chunk);
            }
            if !refused {
                member.last_return = call;
            }
        }
        Ok(told)
    }

    /// After the licence: takes an extent of the exact size at every rank.
    fn land(&mut self, layouts: &[Rc<Layout>]) -> Vec<Extent> {
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
    fn leave(&mut self, landing: Vec<Extent>, keep: bool) -> Option<Vec<Extent>> {
        if keep {
            return Some(landing);
        }
        self.members.iter_mut().zip(&landing).for_each(|(member, extent)| member.pool.give(extent));
        None
    }

    fn layout(&self, me: u32, sorted: &[Sorted], top_k: u32) -> Layout {
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

    fn part(
        &self,
        kind: CallKind,
        skeleton: &Skeleton,
        refused: bool,
        touches: Touches,
        tables: Tables,
        layout: &Rc<Layout>,
    ) -> Part {
        let call_value = EPOCH + self.call as u64 + 1;
        let mut part = Part {
            rank: skeleton.rank,
            call: self.call,
            kind,
            scenes: Vec::new(),
            call_value,
            last_return: self.members[skeleton.rank as usize].last_return,
            row_bytes: self.script.row_bytes,
            tag_parity: self.tag_parity(),
            tables,
            layout: layout.clone(),
        };
        let operands = part.operands();
        let stages = &skeleton.stages[..if refused { 2 } else { skeleton.stages.len() }];
        let mut touches = touches.into_iter();
        let mut scenes: Vec<Scene> = stages
            .iter()
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

    fn handle(&mut self, handle: usize) -> Result<&mut Handle, PlanError> {
        self.handles.get_mut(handle).ok_or(bad("handle", handle, "one of an earlier dispatch"))
    }

    fn at(&self, me: u32) -> At<'_> {
        At { nodes: self.script.nodes, me }
    }

    fn direct(&self, me: u32) -> Direct<'_> {
        Direct::new(self.script.nodes, me)
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..self.script.nodes.ranks()
    }
}

impl Member {
    /// The readers of what was offered have said so: it is free.
    fn licensed(&mut self) {
        for extent in std::mem::take(&mut self.offered) {
            self.pool.give(&extent);
        }
    }
}

fn starts(extents: &[Extent]) -> Vec<u64> {
    extents.iter().map(|extent| extent.start).collect()
}
