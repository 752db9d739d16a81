//! The returns of a script: what each rank's planners and caller do in them.

use std::rc::Rc;

use super::filled::Tables;
use super::sample::Told;
use super::tell::{Extent, Handle, Teller, Until};
use super::weave::{Act, Acts};
use super::{Slip, Touch};
use crate::error::{CallKind, PlanError};
use crate::schedule::{CallerTables, Flag, Parts, RelayTables, Tag};

/// What a rank brings into a return.
struct Offer {
    chunk: Extent,
    /// For what relays bring home and, behind it, for sums that are to be sent; or for rows that engines bring.
    staging: Extent,
    /// Where sums wait.
    outbox: u64,
    tags: Vec<Tag>,
    /// Where what each relay brings has its place.
    bases: Vec<u64>,
}

/// A return, as all ranks have entered it.
struct Returning<'s> {
    handle: &'s Handle,
    parts: Parts,
    copied: bool,
    until: Until,
    offers: &'s [Offer],
}

impl Teller<'_> {
    pub(super) fn ret(
        &mut self,
        handle: usize,
        parts: Parts,
        copied: bool,
        until: Until,
    ) -> Result<Vec<Told>, PlanError> {
        let found = self.handle(handle)?;
        let known = found.clone();
        found.kept = None;
        let offers: Vec<Offer> = self.ranks().map(|me| self.offer(me, handle, &known, copied)).collect();
        let call = Returning { handle: &known, parts, copied, until, offers: &offers };
        let bring = |me| {
            let (caller, end) = self.summer(me, &call);
            let relay = if self.paths(me).rails() { self.bringer(me, &call) } else { Vec::new() };
            self.told(me, CallKind::Combine, Acts { caller, end, relay })
        };
        let told = self.ranks().map(bring).collect();
        for (member, offer) in self.members.iter_mut().zip(offers) {
            member.pool.give(&offer.staging);
            // Nobody reads what was offered in a call that was refused.
            if until < Until::End || self.script.slip == Some(Slip::FreeBeforeAck) {
                member.pool.give(&offer.chunk);
            } else {
                member.offered.push(offer.chunk);
            }
            if until == Until::End {
                member.calls.returned();
            }
        }
        Ok(told)
    }

    /// Takes the memory of a return, around the licence.
    fn offer(&mut self, me: u32, number: usize, handle: &Handle, copied: bool) -> Offer {
        let paths = self.paths(me);
        let layout = &handle.placed.layouts[me as usize];
        let size = self.sizing.offer(layout.landed).bytes();
        let home = CallerTables::home_bytes(&paths, layout);
        let at = self.setting(me, 0);
        let wait = RelayTables::outbox_bytes(&at, &handle.placed.forwards[me as usize]);
        let member = &mut self.members[me as usize];
        if let Some(kept) = &handle.kept {
            member.pool.give(&kept[me as usize]);
        }
        let early = (!copied).then(|| member.pool.take(size));
        member.licensed();
        let chunk = early.unwrap_or_else(|| member.pool.take(size));
        let pulled = if self.script.pulls { layout.terms.len() as u64 * self.sizing.home_bytes } else { 0 };
        let staging = member.pool.take(home + wait + pulled);
        let (at, (mut tables, _)) = (self.setting(me, 0), self.tables(me));
        match self.script.pulls {
            true => tables.stage_rows(&at, layout, staging.start),
            false => tables.stage(&paths, layout, staging.start),
        }
        if self.script.slip == Some(Slip::ShareHome) {
            paths.relays().for_each(|relay| tables.bases[relay as usize] = staging.start);
        }
        let shared = self.script.slip == Some(Slip::ShareOutbox);
        let outbox = staging.start + if shared { 0 } else { home };
        tables.offer(&paths, self.tag(CallKind::Combine, number as u64, 0), chunk.start);
        Offer { chunk, staging, outbox, tags: tables.tags, bases: tables.bases }
    }

    fn summer(&self, me: u32, call: &Returning) -> (Vec<Act>, Vec<Touch>) {
        let (paths, layout) = (self.paths(me), &call.handle.placed.layouts[me as usize]);
        let Offer { chunk, tags, bases, .. } = &call.offers[me as usize];
        let (mut tables, _) = self.tables(me);
        tables.tags.clone_from(tags);
        tables.bases.clone_from(bases);
        for near in paths.locals().chain([me]) {
            tables.bases[near as usize] = call.offers[near as usize].chunk.start;
        }
        let home = &call.offers[me as usize].staging;
        if self.script.pulls {
            tables.pull(&self.setting(me, 0), layout, home.start);
        } else {
            tables.sum(&self.setting(me, 0), layout, call.parts);
        }
        let filled = self.filled(
            me,
            Tables::Caller { tables, layout: Rc::clone(layout), row_bytes: self.script.row_bytes },
        );
        let mut touches = [Vec::new(), Vec::new()];
        if let Some(kept) = &call.handle.kept {
            touches[0] = self.landed_read(me, layout, &kept[me as usize], call.handle.call, true);
        }
        touches[usize::from(call.copied)].extend(self.chunk_written(me, layout, chunk, call.parts));
        let mut heard = self.tags_read(me, Flag::Entry, paths.locals());
        heard.extend(self.messages_read(me, false));
        let skeleton = self.programs(me).0.ret();
        let act = |stage, touches| self.act(stage, touches, &filled);
        let [before, after] = touches;
        let mut acts = vec![act(&skeleton.licence, before), act(&skeleton.entry, after)];
        if call.until < Until::End {
            return (acts, heard);
        }
        acts.push(act(&skeleton.home, heard));
        if self.script.pulls {
            acts.push(act(&self.programs(me).0.pull(), Vec::new()));
            let len = layout.terms.len() as u64 * self.sizing.home_bytes;
            return (acts, self.home_read(me, home.start, len));
        }
        acts.push(act(&skeleton.sum, Vec::new()));
        (acts, Vec::new())
    }

    fn bringer(&self, me: u32, call: &Returning) -> Vec<Act> {
        let paths = self.paths(me);
        let mut acts = self.meeting(me, false, true, false);
        if call.until == Until::End {
            let forward = &call.handle.placed.forwards[me as usize];
            let (_, mut tables) = self.tables(me);
            tables.bases = call.offers.iter().map(|offer| offer.chunk.start).collect();
            tables.offers = call.offers.iter().map(|offer| offer.tags[me as usize].base).collect();
            let outbox = call.offers[me as usize].outbox;
            tables.home(&self.setting(me, 0), forward, &self.bins, call.parts, outbox);
            let filled = self.filled(me, self.relayed(me, tables, forward));
            let skeleton = self.programs(me).1.skeleton();
            acts.push(self.act(&skeleton.headers, Vec::new(), &filled));
            let offers = self.tags_read(me, Flag::Block, paths.sources());
            acts.push(self.act(&skeleton.home, offers, &filled));
            acts.push(self.act(&skeleton.done, Vec::new(), &filled));
        }
        acts
    }
}
