//! The calls of a script, one after another: what each rank's planner and caller do in them.

use std::rc::Rc;

use super::tell::{Handle, Teller, Touches, bad};
use super::{Part, Slip};
use crate::error::{CallKind, PlanError};
use crate::plan::{Layout, Sorted};
use crate::schedule::{Parts, Stage, Tables, chunk_bytes};

/// How far a call gets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Until {
    /// Ranks leave when they have read the tags.
    Tags,
    /// Ranks leave when they have read tags and publications.
    Counts,
    /// To the end.
    End,
}

impl Until {
    /// The stages that are done: whoever leaves early leaves after the entry, the second one of every call.
    fn of(self, mut stages: Vec<&Stage>) -> Vec<&Stage> {
        if self < Until::End {
            stages.truncate(2);
        }
        stages
    }
}

impl Teller<'_> {
    pub(super) fn dispatch(
        &mut self,
        routing: usize,
        keep: bool,
        until: Until,
    ) -> Result<Vec<Part>, PlanError> {
        let script = self.script;
        let set = script.routings.get(routing).filter(|set| set.len() == self.members.len()).ok_or(bad(
            "set of routings",
            routing,
            "one that exists, with a routing per rank",
        ))?;
        self.members.iter_mut().for_each(|member| member.dispatches += 1);
        let mut sorted = vec![Sorted::default(); set.len()];
        for ((sorted, routing), me) in sorted.iter_mut().zip(set).zip(0..) {
            sorted.fill(script.map, me, routing)?;
        }
        let layouts: Vec<Rc<Layout>> =
            self.ranks().map(|me| Rc::new(self.layout(me, &sorted, set[me as usize].top_k()))).collect();
        let landing = self.land(&layouts);
        let mut parts = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let (at, own) = (self.at(me), &sorted[me as usize]);
            let mut tables = Tables::new(script.nodes.ranks());
            tables.publications(&at, &self.control, self.parity(me), script.map, own);
            tables.landing = landing.iter().map(|extent| extent.start).collect();
            tables.rows(&at, layout);
            let number = self.members[me as usize].calls.number();
            tables.tags.fill(self.tag(CallKind::Dispatch, number, 0));
            let mut touches = Touches::default();
            let publication = self.publication(me, me, own, None);
            touches[1].extend(publication.map(|bytes| self.write("publication", bytes)));
            touches[2] = self.tags_read(me);
            for peer in self.ranks().filter(|&peer| peer != me && until >= Until::Counts) {
                let read = self.publication(peer, me, &sorted[peer as usize], Some(me));
                touches[2].extend(read.map(|bytes| self.read("publication", bytes)));
            }
            if until == Until::End {
                touches[3].push(self.rows_read(me, layout, &landing[me as usize], self.call));
            }
            let skeleton = self.direct(me).dispatch();
            let stages = until.of(skeleton.stages());
            parts.push(self.part(me, CallKind::Dispatch, stages, touches, tables, layout));
        }
        let kept = self.leave(landing, keep);
        if until == Until::End {
            self.handles.push(Handle { call: self.call, layouts, kept });
        }
        Ok(parts)
    }

    pub(super) fn cached(&mut self, handle: usize) -> Result<Vec<Part>, PlanError> {
        let layouts = self.handle(handle)?.layouts.clone();
        let landing = self.land(&layouts);
        let mut parts = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let mut tables = Tables::new(self.script.nodes.ranks());
            tables.landing = landing.iter().map(|extent| extent.start).collect();
            tables.rows(&self.at(me), layout);
            tables.tags.fill(self.tag(CallKind::CachedDispatch, handle as u64, landing[me as usize].start));
            let mut touches = Touches::default();
            touches[2] = self.tags_read(me);
            touches[3].push(self.rows_read(me, layout, &landing[me as usize], self.call));
            let skeleton = self.direct(me).cached_dispatch();
            let (kind, stages) = (CallKind::CachedDispatch, skeleton.stages());
            parts.push(self.part(me, kind, stages, touches, tables, layout));
        }
        self.leave(landing, false);
        Ok(parts)
    }

    pub(super) fn ret(
        &mut self,
        handle: usize,
        parts: Parts,
        copied: bool,
        until: Until,
    ) -> Result<Vec<Part>, PlanError> {
        let script = self.script;
        let Handle { call: written, layouts, kept } = self.handle(handle)?;
        let (written, layouts, kept) = (*written, layouts.clone(), kept.take());
        let row_bytes = script.row_bytes;
        let (mut chunks, mut stagings, mut offers) = (Vec::new(), Vec::new(), Vec::new());
        for (me, layout) in self.ranks().zip(&layouts) {
            let (at, member) = (self.at(me), &mut self.members[me as usize]);
            if let Some(kept) = &kept {
                member.pool.give(&kept[me as usize]);
            }
            let size = chunk_bytes(layout.landed, row_bytes);
            let early = (!copied).then(|| member.pool.take(size));
            member.licensed();
            let chunk = early.unwrap_or_else(|| member.pool.take(size));
            let staging = member.pool.take(at.staging_bytes(layout, row_bytes));
            let mut tables = Tables::new(script.nodes.ranks());
            tables.stage(&at, layout, row_bytes, staging.start);
            tables.offer(&at, self.tag(CallKind::Combine, handle as u64, 0), chunk.start);
            chunks.push(chunk);
            stagings.push(staging);
            offers.push(tables);
        }
        let mut told = Vec::new();
        for (me, layout) in self.ranks().zip(&layouts) {
            let at = self.at(me);
            let mut tables = offers[me as usize].clone();
            for (peer, offer) in (0..).zip(&offers) {
                tables.offered(&at, peer, offer.tags[me as usize].base);
            }
            tables.home(&at, layout, row_bytes, parts);
            tables.sum(&at, parts);
            let mut touches = Touches::default();
            if let Some(kept) = &kept {
                touches[0].push(self.rows_read(me, layout, &kept[me as usize], written));
            }
            let chunk = &chunks[me as usize];
            touches[usize::from(copied)].extend(self.chunk_written(me, layout, chunk, parts));
            touches[2] = self.tags_read(me);
            let skeleton = self.direct(me).ret();
            let stages = until.of(skeleton.stages());
            told.push(self.part(me, CallKind::Combine, stages, touches, tables, layout));
        }
        for ((member, chunk), staging) in self.members.iter_mut().zip(chunks).zip(&stagings) {
            member.pool.give(staging);
            // Nobody reads what was offered in a call that was refused.
            if until < Until::End || script.slip == Some(Slip::FreeBeforeAck) {
                member.pool.give(&chunk);
            } else {
                member.offered.push(chunk);
            }
            if until == Until::End {
                member.calls.returned();
            }
        }
        Ok(told)
    }

    /// Rank 0 enters a return, the others a dispatch. Until it has read the tags, a rank does what it would do if all
    /// made its call: so both are told, and each rank takes its part of one.
    pub(super) fn mixed(&mut self, routing: usize, handle: usize) -> Result<Vec<Part>, PlanError> {
        if self.handle(handle)?.kept.is_some() {
            return Err(bad("handle", handle, "one whose rows the caller does not keep"));
        }
        let before = self.members.clone();
        let mut told = self.dispatch(routing, false, Until::Tags)?;
        let dispatched = std::mem::replace(&mut self.members, before);
        let returned = self.ret(handle, Parts { rows: true, weights: false }, false, Until::Tags)?;
        self.members.splice(1.., dispatched.into_iter().skip(1));
        told.splice(..1, returned.into_iter().take(1));
        Ok(told)
    }
}
