//! The dispatches of a script: what each rank's planners and caller do in them.

use std::rc::Rc;

use super::filled::Tables;
use super::place::Placed;
use super::sample::Told;
use super::tell::{Extent, Handle, Member, Teller, Until, bad};
use super::weave::{Act, Acts};
use super::{Script, Slip};
use crate::error::{CallKind, PlanError};
use crate::plan::{Arrivals, Chunk, Forward, Frame};
use crate::schedule::{Flag, Parts, RelayTables};

/// A dispatch, or one along a known layout.
struct Sending<'s> {
    kind: CallKind,
    handle: u64,
    /// Rows are placed anew: with headers, and what goes with the rows.
    noted: bool,
    until: Until,
    placed: &'s Placed,
    /// Memory that each rank takes: for the rows that land and what goes with them, behind it for the blocks that it
    /// relays.
    ground: &'s [Extent],
    /// The rank that makes another call.
    odd: Option<u32>,
}

impl Teller<'_> {
    pub(super) fn dispatch(
        &mut self,
        routing: usize,
        keep: bool,
        until: Until,
    ) -> Result<Vec<Told>, PlanError> {
        self.members.iter_mut().for_each(|member| member.dispatches += 1);
        let placed = Rc::new(self.place(routing)?);
        let ground = self.land(&placed);
        let handle = self.members[0].calls.number();
        let (kind, odd) = (CallKind::Dispatch, (until == Until::Tags).then_some(0));
        let sending = Sending { kind, handle, noted: true, until, placed: &placed, ground: &ground, odd };
        let told = self.ranks().map(|me| self.told(me, kind, self.send(me, &sending))).collect();
        let kept = self.leave(ground, &placed, keep);
        if until == Until::End {
            self.handles.push(Handle { call: self.call, placed, kept });
        }
        Ok(told)
    }

    pub(super) fn cached(&mut self, handle: usize) -> Result<Vec<Told>, PlanError> {
        let placed = Rc::clone(&self.handle(handle)?.placed);
        let ground = self.land(&placed);
        let (kind, until) = (CallKind::CachedDispatch, Until::End);
        let (placed, handle) = (&*placed, handle as u64);
        let sending = Sending { kind, handle, noted: false, until, placed, ground: &ground, odd: None };
        let told = self.ranks().map(|me| self.told(me, kind, self.send(me, &sending))).collect();
        self.leave(ground, placed, false);
        Ok(told)
    }

    /// A call in which nothing moves.
    pub(super) fn agree(&mut self) -> Vec<Told> {
        self.members.iter_mut().for_each(Member::licensed);
        let ranks = self.members.len();
        let (layouts, forwards, arrivals) = (vec![Rc::default(); ranks], Vec::new(), Vec::new());
        let placed = Placed { layouts, forwards, arrivals, numbers: Default::default() };
        let (kind, until, ground) = (CallKind::ExpertMap, Until::Tags, vec![0..0; ranks]);
        let (placed, ground) = (&placed, &ground[..]);
        let sending = Sending { kind, handle: 0, noted: false, until, placed, ground, odd: None };
        self.ranks().map(|me| self.told(me, kind, self.send(me, &sending))).collect()
    }

    /// Rank 0 enters a return, the others a dispatch. Until it has read the tags, a rank does what it would do if all
    /// made its call: so both are told, and each rank takes its part of one.
    pub(super) fn mixed(&mut self, routing: usize, handle: usize) -> Result<Vec<Told>, PlanError> {
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

    /// What comes first in what every rank relays: its node meets, others are told, and hear. `counts`: its rank counts;
    /// `alike`: so do its neighbours; `judged`: so do all, and the counts are looked at.
    pub(super) fn meeting(&self, me: u32, counts: bool, alike: bool, judged: bool) -> Vec<Act> {
        let paths = self.paths(me);
        let (_, mut tables) = self.tables(me);
        tables.messages(&self.setting(me, self.parity(me, Slip::OneMessage)), counts);
        let filled = self.filled(me, self.relayed(me, tables, &Rc::default()));
        let members = || paths.locals().chain([me]);
        let mut told = self.tags_read(me, Flag::Entry, paths.locals());
        told.extend(self.tags_read(me, Flag::Block, [me]));
        if counts && alike {
            told.extend(self.counts_read(me, members()));
        }
        told.extend(self.messages_written(me, counts));
        let mut heard = self.messages_read(me, counts && judged);
        if counts && judged {
            heard.extend(self.counts_read(me, members()));
        }
        let skeleton = self.programs(me).1.skeleton();
        let touches = [Vec::new(), told, Vec::new(), heard];
        skeleton.meeting().into_iter().zip(touches).map(|(stage, t)| self.act(stage, t, &filled)).collect()
    }

    fn send(&self, me: u32, call: &Sending) -> Acts {
        let (caller, end) = self.sender(me, call);
        let relay = if self.paths(me).rails() { self.forwarder(me, call) } else { Vec::new() };
        Acts { caller, end, relay }
    }

    fn sender(&self, me: u32, call: &Sending) -> (Vec<Act>, Vec<super::Touch>) {
        let (paths, layout, ground) = (self.paths(me), &call.placed.layouts[me as usize], call.ground);
        let (mut tables, _) = self.tables(me);
        tables.tags.fill(self.tag(call.kind, call.handle, ground[me as usize].start));
        tables.landing = ground.iter().map(|extent| extent.start).collect();
        if call.until == Until::End {
            let setting = self.setting(me, self.parity(me, Slip::OneHeader));
            tables.rows(&setting, layout, call.noted);
            if self.arrives() {
                let first = call.placed.arrivals[me as usize];
                tables.to_arrivals(&setting, layout, first, |rows| self.sizing.landing(rows));
            }
        }
        let filled = self.filled(
            me,
            Tables::Caller { tables, layout: Rc::clone(layout), row_bytes: self.script.row_bytes },
        );
        let published = self.counts_written(me).into_iter().filter(|_| self.counted(call)).collect();
        let counts = self.counted(call) && call.until >= Until::Counts;
        let mut heard = self.tags_read(me, Flag::Entry, paths.locals());
        if counts {
            heard.extend(self.counts_read(me, paths.locals().chain([me])));
        }
        heard.extend(self.messages_read(me, counts));
        let skeleton = self.programs(me).0.dispatch();
        let act = |stage, touches| self.act(stage, touches, &filled);
        let mut acts = vec![act(&skeleton.licence, Vec::new()), act(&skeleton.entry, published)];
        if call.until < Until::End {
            return (acts, heard);
        }
        if call.noted {
            heard.extend(self.headers_written(me, layout));
        }
        acts.push(act(&skeleton.rows, heard));
        if self.script.pulls && paths.rails() && (self.arrives() || !self.script.straight) {
            acts.push(self.bringer_in(me, call));
        }
        let end = match self.arrives() {
            true => self.arrivals_regrouped(me, call.placed, &ground[me as usize]),
            false => self.landed_read(me, layout, &ground[me as usize], self.call, call.noted),
        };
        (acts, end)
    }

    /// The stage in which engines bring in what crossed.
    fn bringer_in(&self, me: u32, call: &Sending) -> Act {
        let (layout, forward) = (&call.placed.layouts[me as usize], &call.placed.forwards[me as usize]);
        let (mut tables, _) = self.tables(me);
        tables.landing = call.ground.iter().map(|extent| extent.start).collect();
        let (setting, landing) = (self.setting(me, 0), self.sizing.landing(layout.landed));
        let mut touches = Vec::new();
        if self.arrives() {
            let landed: Vec<_> = self.far_segments(me, call.placed);
            let desk = self.desk(landing, &call.ground[me as usize]);
            tables.bring_notes_in(&setting, &landed, landing, desk);
            touches = self.arrivals_found(me, call.placed, &landed, desk);
        } else {
            tables.bring_in(&setting, forward, landing, call.noted);
        }
        let (layout, row_bytes) = (Rc::clone(layout), self.script.row_bytes);
        let filled = self.filled(me, Tables::Caller { tables, layout, row_bytes });
        self.act(&self.programs(me).0.bring_in(), touches, &filled)
    }

    /// Whether ranks count: they do unless all sizes are fixed.
    fn counted(&self, call: &Sending) -> bool {
        call.noted && self.script.mode.slots().is_none()
    }

    fn forwarder(&self, me: u32, call: &Sending) -> Vec<Act> {
        let alike = call.odd.is_none_or(|odd| !self.paths(me).near(odd));
        let mut acts = self.meeting(me, self.counted(call), alike, call.until >= Until::Counts);
        if call.until == Until::End {
            let mut forward = Rc::clone(&call.placed.forwards[me as usize]);
            let (_, mut tables) = self.tables(me);
            tables.bases = call.ground.iter().map(|extent| extent.start).collect();
            let setting = self.setting(me, self.parity(me, Slip::OneHeader));
            if self.arrives() {
                let Script { align, chunks, mode, .. } = *self.script;
                let (bins, sizing, paths) = (&self.bins, self.sizing, self.paths(me));
                let frame = Frame { bins, paths, align, chunks, sizing, mode };
                let (counts, sizes) = &call.placed.numbers;
                let mut runs = Arrivals::default();
                let own = (Rc::make_mut(&mut forward), &mut runs);
                tables.hand_on(&setting, &frame, own, (counts, sizes), |rows| sizing.landing(rows));
            } else {
                tables.forward(&setting, &forward, call.noted);
            }
            let forward = &forward;
            let filled = self.filled(me, self.relayed(me, tables, forward));
            let skeleton = self.programs(me).1.skeleton();
            let read = if call.noted { self.headers_read(me, forward) } else { Vec::new() };
            acts.push(self.act(&skeleton.headers, Vec::new(), &filled));
            acts.push(self.act(&skeleton.forward, read, &filled));
            acts.push(self.act(&skeleton.done, Vec::new(), &filled));
        }
        acts
    }

    /// Tables of a relay that knows these blocks.
    pub(super) fn relayed(&self, me: u32, tables: RelayTables, forward: &Rc<Forward>) -> Tables {
        let mut chunks = vec![Chunk::default(); self.members.len()];
        let landed = forward.blocks.first().map_or(&[][..], |block| &block.landed);
        for (&rank, &landed) in self.paths(me).served_by(me).iter().zip(landed) {
            chunks[rank as usize] = self.sizing.offer(landed);
        }
        Tables::Relay { tables, forward: Rc::clone(forward), chunks, held_by: self.ranks().collect() }
    }

    /// After the licence: takes extents of the exact size at every rank.
    fn land(&mut self, placed: &Placed) -> Vec<Extent> {
        let held = self.handles.iter().rev().find_map(|handle| handle.kept.clone());
        let held = held.filter(|_| self.script.slip == Some(Slip::AnnounceHeld));
        let (mut all, arrives) = (Vec::new(), self.arrives());
        for (me, (member, layout)) in self.members.iter_mut().zip(&placed.layouts).enumerate() {
            member.licensed();
            if let Some(held) = &held {
                member.pool.give(&held[me]);
            }
            let staged = if self.script.slip == Some(Slip::StageUnasked) { 0 } else { layout.staged };
            let bytes = match arrives {
                true => {
                    self.sizing.landing(layout.landed).staging() + u64::from(staged) * self.sizing.row_bytes
                }
                false => self.sizing.extent_bytes(layout.landed, staged),
            };
            all.push(member.pool.take(bytes));
        }
        all
    }

    /// What was staged is free again. The caller gives the landed rows back, or keeps them.
    fn leave(&mut self, ground: Vec<Extent>, placed: &Placed, keep: bool) -> Option<Vec<Extent>> {
        let (mut kept, arrives) = (Vec::new(), self.arrives());
        for ((member, extent), layout) in self.members.iter_mut().zip(ground).zip(&placed.layouts) {
            match keep {
                true => {
                    let landing = self.sizing.landing(layout.landed);
                    let len = if arrives { landing.arrivals().1 } else { landing.bytes() };
                    kept.push(member.pool.trim(&extent, len));
                }
                false => member.pool.give(&extent),
            }
        }
        keep.then_some(kept)
    }
}
