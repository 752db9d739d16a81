//! Dispatches, as the enqueuer serves them: from choices to the places of rows.
//!
//! ```text
//!   caller's stream    plan choices | flag | regroup: rows packed | place choices, regroup: own rows | join |
//!   caller's thread      counts | entry, all ranks' | place | enqueue -.
//!   stream of copies                                 rows, pads, metadata | landed -> peers
//! ```
//!
//! Where the host plans ([`dispatch_planner`](super::dispatch_planner)), ids and weights are copied
//! to it before the flag, and rows are sorted behind that.
//!
//! Rows lie packed as [`SortedRouting`](crate::plan::SortedRouting) numbers entries: by bin, then
//! token. So all rows from here for one expert of another rank are one run, and move as one copy to
//! their final place. Rows for this rank's own experts are placed by a kernel instead, all runs at
//! once: within a GPU SMs would make the copies, too. A layout that is prepared is a dispatch of
//! rows without bytes.
//!
//! **Where engines relay:**
//!
//! ```text
//!   caller's stream    ids, weights -> host | flag |          join | regroup: rows packed |        join | regroup: visible rows
//!   caller's thread      ... counts, placement: list                | enqueue ..           index
//!   stream of copies                       list -> device           | runs to arrivals, blocks out | relayed runs
//! ```
//!
//! Only the enqueuer knows which tokens cross, and in which order, so it says how rows are packed.
//! They lie by bin for local peers, then block by block, each token once. The caller's stream puts
//! arrived rows into visible order, by an index that every enqueuer finds from what all ranks have
//! published: the counts of its local peers, and the headers of their blocks.

use super::device_pool::Extent;
use super::dispatch_planner::Planner;
use super::enqueuer::{ContextState, DeviceCall, Enqueuer, Header, Scratch};
use crate::device::{DeviceRange, RunArgs};
use crate::dtype::Dtype;
use crate::ep::Status;
use crate::ep::call_agreement::GroupCounts;
use crate::error::{CallKind, Cause, Error};
use crate::exec::Until;
use crate::plan::Segment;
use crate::schedule::call_program::{CallMachine, RankPrograms};
use crate::schedule::{CallProperties, Payload, Tag, WindowId};

/// Where this rank lets others write.
#[derive(Debug)]
pub(super) struct WriteTarget {
    pub base: u64,
    pub len: u64,
    /// Memory of the pool; none where metadata alone lands.
    pub extent: Option<Extent>,
}

impl Enqueuer {
    /// Serves the dispatch of a context, or the layout of one.
    ///
    /// # Errors
    /// Those that end the world. What is refused is told.
    pub fn dispatch(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        (kind, context, planner): (CallKind, u32, Planner),
        (tokens, x): (u32, Option<(DeviceRange, Dtype)>),
    ) -> Result<(), Error> {
        let mut call = DeviceCall { x, planner, ..DeviceCall::new(self, programs, kind, context) };
        call.tokens = tokens;
        call.drive(&mut machine, Until::End)?;
        let (staging, status) = (call.staging.take(), call.ended);
        self.kept[context as usize].status = status;
        if let Some(mut staging) = staging {
            staging.trim(0);
        }
        let enqueued = self.engine.take_enqueued();
        self.common.contexts[context as usize].tell(|told| {
            told.dispatched = enqueued;
        });
        Ok(())
    }

    /// Says what this rank has for every bin, and keeps how its rows lie packed.
    fn publish(&mut self, planner: Planner) -> Result<(), Error> {
        let common = &self.common;
        let (port, control) = (&common.fixed.port, &common.fixed.control);
        self.crossing.fill(&common.fixed.bins, &common.fixed.paths(), &self.sorted);
        let numbers = &mut self.numbers.scratch;
        numbers.clone_from(&self.sorted.counts);
        self.crossing.staged(&common.fixed.paths(), numbers);
        port.write(WindowId::CONTROL, control.publication(self.calls.parity()), numbers)?;
        self.scratch.starts.clone_from(&self.sorted.starts);
        planner.record(self)
    }

    pub fn announce(&self, kind: CallKind, context: u32) -> WriteTarget {
        let common = &self.common;
        if CallProperties::of(kind).payload == Payload::Nothing {
            let (base, len) = common.shape.metadata(context);
            return WriteTarget { base, len, extent: None };
        }
        let most = common.fixed.most_bytes(CallKind::Dispatch, &self.numbers.sizes);
        let extent = common.space.announce(most.saturating_add(self.announced_beyond()));
        WriteTarget { base: extent.offset(), len: extent.len(), extent: Some(extent) }
    }

    /// From the counts of all to this rank's layout.
    fn place(&mut self, context: u32, planner: Planner) -> Result<(), Error> {
        let Enqueuer { common, tables, sorted, crossing, arrivals, rank_sums, .. } = self;
        let Enqueuer { numbers, kept, scratch, .. } = self;
        let (fixed, kept) = (&common.fixed, &mut kept[context as usize]);
        let (top_k, GroupCounts { counts, sizes, landing, .. }) = (fixed.spec.top_k, numbers);
        tables.landing.clone_from(landing);
        let clipped = fixed.spec.mode.budget().is_some();
        let dropped = clipped && sorted.keep(top_k, |bin| sizes.room(&fixed.bins, counts, bin));
        if dropped && fixed.arrives() {
            crossing.fill(&fixed.bins, &fixed.paths(), sorted);
        }
        let frame = fixed.frame();
        if fixed.arrives() {
            arrivals.arrange(&frame, sorted, crossing);
            arrivals.pack(&frame, sorted, crossing);
        }
        if fixed.spec.rank_sums {
            rank_sums.number(&frame, sorted, top_k, (counts, sizes));
        }
        match fixed.arrives() {
            true => common.rewrite_metadata(&arrivals.starts, sorted)?,
            false if fixed.spec.rank_sums => {
                common.rewrite_metadata(&scratch.starts, sorted)?;
                sorted.copy_metadata(&scratch.starts, &mut scratch.metadata);
            }
            false => {}
        }
        let ContextState { layout, first_run, numbers, .. } = kept;
        layout.fill_transfers(&frame, (sorted, crossing), top_k, counts, sizes);
        if fixed.spec.rank_sums {
            rank_sums.describe(&frame, layout);
        }
        if fixed.arrives() {
            arrivals.add_runs(&frame, sorted, layout, (counts, sizes));
            scratch.starts.clone_from(&arrivals.starts);
            *first_run = arrivals.first_run;
            numbers.0.clone_from(counts);
            numbers.1.clone_from(sizes);
        } else {
            layout.pack(sorted, &scratch.starts);
            // Relays return rows one behind the other, without those that were dropped.
            for rank in fixed.paths().relays().filter(|_| fixed.gpu_direct()) {
                let mut next = layout.returned_at(&fixed.paths(), rank, false);
                for bin in fixed.bins.of(rank) {
                    scratch.starts[bin as usize] = next;
                    next += sorted.counts[bin as usize];
                }
            }
        }
        let (paths, me) = (fixed.paths(), fixed.lanes.rank);
        // Own outputs are summed where they are made, and counted on behind rows that return.
        for bin in fixed.bins.of(me) {
            let first = sizes.begin[bin as usize].saturating_add(counts.below[bin as usize]);
            scratch.starts[bin as usize] = first.saturating_add(common.shape.entries() as u32);
        }
        let runs = match fixed.arrives() {
            // Behind those to the local peers before this rank.
            true => {
                let run = *first_run + (0..me).filter(|&rank| paths.same_node(rank)).count() as u32;
                run..run + 1
            }
            false => layout.runs_to(me),
        };
        let own = &layout.runs[runs.start as usize..runs.end as usize];
        kept.own = (runs, RunArgs::lay_out(own, &mut scratch.own_runs));
        kept.in_place = None;
        match fixed.arrives() {
            // Rows that are dropped lie packed, too.
            _ if dropped || !planner.knows_tokens() => {}
            true => kept.find_in_place(|row| arrivals.packed[row as usize] as u32),
            false => kept.find_in_place(|row| sorted.tokens[row as usize]),
        }
        Ok(())
    }

    /// Tells where rows land. What is staged behind them is this rank's as long as the extent that
    /// is returned.
    fn tell_placement(
        &mut self,
        (context, gathered): (u32, [bool; 2]),
        landing: WriteTarget,
    ) -> Option<Extent> {
        let Enqueuer { common, kept, calls, sorted, scratch, numbers, .. } = self;
        let (layout, number) = (&kept[context as usize].layout, calls.number());
        let mut extent = landing.extent;
        let staging = extent.as_mut().and_then(|extent| common.trim(CallKind::Dispatch, extent, layout));
        common.contexts[context as usize].tell(|told| {
            let placement = &mut told.placement;
            (placement.number, placement.rows, placement.gathered) = (number, layout.landed, gathered);
            let counted = common.fixed.spec.layout.expert_bins(layout.rows_per_bin.len());
            placement.tokens_per_expert.clear();
            placement.tokens_per_expert.extend_from_slice(&layout.rows_per_bin[..counted]);
            placement.padded_per_expert.clone_from(&layout.padded_per_bin);
            placement.dropped.clone_from(&sorted.dropped);
            placement.dropped_weight = sorted.dropped_weight(bytemuck::cast_slice(&scratch.weights));
            placement.required.clone_from(&numbers.sizes.required);
            placement.has_own = kept[context as usize].own.1 > 0;
            told.extent = extent;
            told.refused = None;
        });
        staging
    }

    /// Collects what the caller's stream finds beside the rows: what its sums add up, and how many
    /// rows there are; none of a call that is not `placed`.
    fn send_tables(
        &mut self,
        planner: Planner,
        (context, tokens): (u32, u32),
        placed: bool,
    ) -> Result<(), Error> {
        planner.send_places(self, context, tokens, placed)?;
        let Enqueuer { common, engine, kept, scratch: Scratch { counts, .. }, .. } = self;
        let (fixed, shape) = (&common.fixed, &common.shape);
        let layout = &kept[context as usize].layout;
        let experts = fixed.spec.layout.expert_bins(fixed.bins.of(fixed.lanes.rank).len());
        counts.clear();
        if placed {
            counts.extend_from_slice(&layout.rows_per_bin[..experts]);
            counts.extend_from_slice(&layout.padded_per_bin[..experts]);
        } else {
            counts.resize(2 * experts, 0);
        }
        let counted: &[u32] = bytemuck::cast_slice(counts);
        let len = counted.len() as u64 * 4;
        common.host.write_words(shape.host_counts().0 as usize, counted)?;
        match len {
            // The device counts the choices of each row.
            0 => Ok(()),
            _ => common.send(engine, (shape.host_counts(), shape.counts(context)), len),
        }
    }

    /// Tells the caller's stream where own rows go, of this call and of those along its layout.
    fn send_own_runs(&self, context: u32) -> Result<(), Error> {
        let Enqueuer { common, caller, kept, scratch, .. } = self;
        match kept[context as usize].own.1 {
            0 => Ok(()),
            _ => common.send_own_runs(&caller.stream, context, &scratch.own_runs),
        }
    }

    /// Tells the caller's stream how to pack: which token's row is where.
    pub fn list(&mut self, context: u32, tokens: u32) -> Result<(), Error> {
        let Enqueuer { common, engine, arrivals, .. } = self;
        let shape = &common.shape;
        let entries = tokens as usize * common.fixed.spec.top_k as usize;
        arrivals.packed.resize(entries, -1);
        let words = bytemuck::cast_slice(&arrivals.packed);
        common.host.write_words(shape.host_order().0 as usize, words)?;
        common.send(engine, (shape.host_order(), shape.order(context)), entries as u64 * 4)
    }

    /// Where the index and the metadata of a dispatch lie in the enqueuer's scratch, or in host
    /// staging beside what lands there.
    pub fn enqueuer_scratch(&self, context: u32) -> (u64, u64) {
        let base = self.tables.landing[self.common.fixed.lanes.rank as usize];
        let shape = &self.common.shape;
        match self.common.fixed.gpu_direct() {
            true => (0, shape.scratch_metadata()),
            false => (base, shape.metadata(context).0),
        }
    }

    /// Finds where every visible row has arrived, which the context keeps; and writes to the
    /// enqueuer's scratch what goes with rows of other nodes.
    pub fn find_arrivals(&mut self, context: u32) -> Result<(), Error> {
        let (_, scratch_metadata) = self.enqueuer_scratch(context);
        let Enqueuer { common, calls, arrivals, numbers, scratch, kept, .. } = self;
        let fixed = &common.fixed;
        let (paths, me, control, parity) = (fixed.paths(), fixed.lanes.rank, &fixed.control, calls.parity());
        let (bins, own) = (&fixed.bins, fixed.bins.of(me));
        let words = (control.metadata_bytes() / 4) as usize;
        let kept = &mut kept[context as usize];
        let (counts, sizes) = (&numbers.counts, &numbers.sizes);
        let (landed, Header { segments, listed, weights, pads, counted }) =
            (&mut scratch.landed, &mut scratch.header);
        landed.clear();
        arrivals.begin(bins, me, common.shape.landing(CallKind::Dispatch, kept.layout.landed).rows);
        counted.resize(own.len(), 0);
        for source in 0..paths.ranks() {
            if paths.same_node(source) {
                let at = control.publication(parity) + u64::from(own.start) * 4;
                fixed.port.read(source, WindowId::CONTROL, at, counted)?;
                arrivals.from_local_peer(bins, me, counted, (counts, sizes));
                continue;
            }
            let relay = paths.of(source).relay_to(me);
            let at = control.header_in(paths.of(source).place_at(relay), parity);
            let mut head = [0u32; 3];
            fixed.port.read(relay, WindowId::CONTROL, at, &mut head)?;
            let [rows, entries, _] = head;
            let before: usize = paths
                .served_by(relay)
                .iter()
                .take_while(|&&rank| rank != me)
                .map(|&rank| bins.of(rank).len())
                .sum();
            segments.resize(before + own.len(), Default::default());
            fixed.port.read(relay, WindowId::CONTROL, at + control.segments(), segments)?;
            let count = |segments: &[Segment]| -> u32 { segments.iter().map(|s| s.count).sum() };
            let (skip, mine) = (count(&segments[..before]), count(&segments[before..]));
            listed.resize(mine as usize, 0);
            weights.resize(mine as usize * words, 0);
            fixed.port.read(relay, WindowId::CONTROL, at + control.index() + u64::from(skip) * 4, listed)?;
            let metadata = at + control.metadata(entries) + u64::from(skip) * control.metadata_bytes();
            fixed.port.read(relay, WindowId::CONTROL, metadata, weights)?;
            arrivals.from_other_node(rows, listed, &segments[before..]);
            let mut rest = &weights[..];
            for &Segment { to_row, count, pad } in &segments[before..] {
                let metadata = rest.split_off(..count as usize * words).unwrap_or_default();
                let at = scratch_metadata + u64::from(to_row) * control.metadata_bytes();
                if count + pad > 0 {
                    fixed.port.write(WindowId::HOST_STAGING, at, metadata)?;
                    pads.resize(pad as usize * words, 0);
                    fixed.port.write(
                        WindowId::HOST_STAGING,
                        at + u64::from(count) * control.metadata_bytes(),
                        pads,
                    )?;
                }
                landed.push((to_row, count + pad));
            }
        }
        kept.index.clone_from(&arrivals.index);
        Ok(())
    }
}

impl DeviceCall<'_> {
    /// Sorts this rank's choices; what is wrong with them it refuses.
    pub fn sort(&mut self) {
        if let Err(error) = self.planner.sort(self.enqueuer, self.tokens) {
            self.enqueuer.sorted.clear(&self.enqueuer.common.fixed.bins);
            self.refused = Some(error);
        }
    }

    pub fn announce(&mut self) {
        let landing = self.refused.is_none().then(|| self.enqueuer.announce(self.tag.kind, self.context));
        let said = |landing: &WriteTarget| match landing.extent {
            Some(_) => (landing.base, self.enqueuer.said_bytes(landing.len)),
            None => (landing.base, landing.len),
        };
        let (base, handle) = landing.as_ref().map_or((0, 0), said);
        self.landing = landing;
        self.say(Tag { base, handle, ..self.tag });
    }

    /// Tells the caller where rows land, if that is new, and fills the operands by which they do.
    pub fn fill_rows(&mut self) -> Result<(), Error> {
        let (context, kind) = (self.context, self.tag.kind);
        let noted = kind.places();
        if noted {
            self.enqueuer.kept[context as usize].number = self.enqueuer.calls.number();
            let gathered = self.gathered();
            let tell = |landing| self.enqueuer.tell_placement((context, gathered), landing);
            self.staging = self.landing.take().and_then(tell);
        }
        self.find_metadata(noted)?;
        let in_place = self.in_place();
        let Enqueuer { common, calls, tables, kept, metadata_at, .. } = &mut *self.enqueuer;
        let (setting, shape) = (common.rows_setting(*calls, kind, metadata_at), &common.shape);
        let ContextState { layout, first_run, .. } = &kept[context as usize];
        tables.rows(&setting, layout, noted);
        if shape.arrives() {
            tables.to_arrivals(&setting, layout, *first_run, |rows| shape.landing(kind, rows));
        }
        if let Some((_, runs)) = in_place {
            tables.in_place(&setting, runs);
        }
        Ok(())
    }

    /// Collects the tables of the call's context. A call without one is refused, and has none.
    pub fn send_tables(&mut self) -> Result<(), Error> {
        match self.context == self.enqueuer.common.shape.no_context() {
            true => Ok(()),
            false => {
                let (call, placed) = ((self.context, self.tokens), self.ended == Status::OK);
                self.enqueuer.send_tables(self.planner, call, placed)
            }
        }
    }

    /// Enqueues that own rows, their choices and their metadata find their places.
    pub fn place_own(&self) -> Result<(), Error> {
        self.enqueuer.send_own_runs(self.context)?;
        self.planner.place_own(self.enqueuer, self.context, self.tokens)
    }

    /// Whether a kernel makes rows of this call's tokens: for peers, and for this rank.
    fn gathered(&self) -> [bool; 2] {
        let Enqueuer { common, kept, .. } = &*self.enqueuer;
        let for_peers = common.has_peers() && self.in_place().is_none();
        let (_, own) = kept[self.context as usize].own;
        [for_peers, own > 0].map(|gathers| gathers && self.x.is_some())
    }

    /// Finds where metadata lands: here, and at peers, whose entries name the contexts that they
    /// use, if it goes there.
    ///
    /// # Errors
    /// [`Cause::Protocol`].
    fn find_metadata(&mut self, noted: bool) -> Result<(), Error> {
        let (kind, rank) = (self.tag.kind, self.enqueuer.common.fixed.lanes.rank);
        let Enqueuer { common, calls, metadata_at, .. } = &mut *self.enqueuer;
        metadata_at[rank as usize] = common.shape.metadata(self.context).0;
        let agreement = common.fixed.agreement(*calls, kind);
        for peer in (0..common.fixed.lanes.ranks()).filter(|&peer| noted && peer != rank) {
            let theirs = agreement.tag_of(peer)?.context;
            // No rank names a context that it lacks, and only its peers here would see it.
            if u32::from(theirs) >= common.shape.contexts() {
                return Err(Cause::Protocol { rank: common.fixed.lanes.world_ranks[peer as usize] }.into());
            }
            metadata_at[peer as usize] = common.shape.metadata(theirs.into()).0;
        }
        Ok(())
    }

    /// Fills the operands by which what crossed is brought in.
    pub fn fill_bring_in(&mut self) -> Result<(), Error> {
        let (kind, context, enqueuer) = (self.tag.kind, self.context, &mut *self.enqueuer);
        let arrives = enqueuer.common.shape.arrives();
        enqueuer.scratch.landed.clear();
        if arrives && kind.places() {
            enqueuer.find_arrivals(context)?;
        }
        let enqueuer_scratch = enqueuer.enqueuer_scratch(context);
        let Enqueuer { common, calls, tables, scratch, kept, metadata_at, .. } = enqueuer;
        let (setting, kept) = (common.rows_setting(*calls, kind, metadata_at), &kept[context as usize]);
        let rows = kept.layout.landed;
        match &self.task {
            _ if arrives => {
                if setting.sizing.row_bytes > 0 {
                    common.fixed.port.write(WindowId::HOST_STAGING, enqueuer_scratch.0, &kept.index)?;
                }
                tables.bring_metadata_in(&setting, &scratch.landed, rows, enqueuer_scratch);
            }
            Some(_) => tables.bring_in(&setting, &kept.forward, rows, kind.places()),
            None => {}
        }
        Ok(())
    }

    /// Says what this rank has for every bin, and keeps how its rows lie packed.
    pub fn publish(&mut self) -> Result<(), Error> {
        self.enqueuer.publish(self.planner)
    }

    pub fn place(&mut self) -> Result<(), Error> {
        self.enqueuer.place(self.context, self.planner)
    }
}
