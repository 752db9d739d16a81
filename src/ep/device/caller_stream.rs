//! Work of a call on its caller's stream, and between that and the stream of copies: the steps of
//! its program that a host enqueues there.
//!
//! ```text
//!   bring       choices -> host, or a kernel plans them
//!   reached     a word, which the host awaits where it needs what was brought
//!   pack        status: well so far | a kernel packs rows, if their order is known | event
//!   pack placed the order of rows -> device, if the host found it | a kernel packs those that are left | event
//!   partials    a kernel sums outputs by rank, if sums return | event
//!   follow      the stream of copies awaits the event
//!   place own   runs of own rows -> device | a kernel places their choices and metadata, if the device plans
//!   rows        a kernel places own rows, behind all copies of the stage
//!   join        the caller's stream awaits the stream of copies | status: why the call was refused
//!   metadata    a kernel lays choices apart
//!   regroup     a kernel puts arrived rows into visible order
//!   sum         a kernel sums what returned, or fetches weight gradients
//! ```
//!
//! The event of the first half stands before what the caller enqueues between the halves: copies do
//! not wait for that.

use std::sync::Arc;

use super::enqueuer::{CallerStream, ContextState, DeviceCall, Enqueuer, Outputs};
use super::memory::StreamFlag;
use super::session::Session;
use crate::device::{DeviceRange, FetchWeights, OwnRows, Stream, SumChoices};
use crate::dtype::{Dtype, PartialDtype};
use crate::ep::Status;
use crate::error::{CallKind, DeviceError, Error};
use crate::schedule::call_program::Part;
use crate::schedule::{CallProperties, Class, Operands, Payload, TrackOp};

impl CallerStream {
    /// Goes on with another stream, behind the one before.
    pub fn follow(&mut self, next: &Arc<Stream>) -> Result<(), DeviceError> {
        next.join(&self.stream, &self.done)?;
        self.stream = Arc::clone(next);
        Ok(())
    }

    /// Enqueues that own rows of a call go to where they land, this rank's `landing`. The caller's
    /// stream does that while the stream of copies serves the other ranks: neither touches what the
    /// other writes.
    pub fn place_own_rows(
        &self,
        common: &Session,
        landing: u64,
        ContextState { layout, own: (runs, rows), .. }: &ContextState,
        call: (CallKind, u32),
        tokens: (u32, &DeviceRange, Dtype),
    ) -> Result<(), Error> {
        if *rows == 0 {
            return Ok(());
        }
        let chunk = common.shape.landing(call.0, layout.landed);
        let behind = if common.shape.arrives() { chunk.bytes() } else { 0 };
        let places = (*rows, runs.end - runs.start, landing + behind, layout.landed);
        common.place_own_rows(&self.stream, &self.kernels, call, tokens, places)
    }
}

impl DeviceCall<'_> {
    fn call(&self) -> (CallKind, u32) {
        (self.tag.kind, self.context)
    }

    /// Brings choices to the planner.
    pub(super) fn bring(&self) -> Result<(), Error> {
        let Enqueuer { common, caller: CallerStream { stream, kernels, .. }, .. } = &*self.enqueuer;
        let Some(chosen) = self.chosen else { return Ok(()) };
        self.planner.bring(common, (stream, kernels), (self.context, chosen))
    }

    /// The caller's stream says that it has come to the call, or the host waits for that.
    pub(super) fn reached(&mut self, part: Part, items: &[TrackOp]) -> Result<(), Error> {
        let Enqueuer { engine, caller, common, calls, tables, .. } = &mut *self.enqueuer;
        let operands: Operands<'_> = tables.operands(*calls, 0);
        if part == Part::Start {
            return Ok(engine.raise_on(&caller.stream, items, &operands)?);
        }
        engine.run(items, &operands, None)?;
        common.progress.heard(common.running());
        Ok(())
    }

    /// Packs rows for other ranks if their order is known.
    pub(super) fn pack(&self) -> Result<(), Error> {
        let Enqueuer { common, caller, .. } = &*self.enqueuer;
        let CallerStream { stream, kernels, packed, .. } = caller;
        common.clear_status(stream, self.context)?;
        if let Some(chosen) = self.chosen.filter(|chosen| chosen.tokens > 0) {
            self.planner.order(common, (stream, kernels), (self.context, chosen))?;
        }
        if let Some((x, dtype)) = self.x.as_ref().filter(|_| !self.packs_later()) {
            common.pack(stream, kernels, self.call(), (self.tokens, x, *dtype))?;
        }
        Ok(packed.record(stream)?)
    }

    /// Whether tokens need not be packed, or it is known only when rows have places.
    fn packs_later(&self) -> bool {
        let Some((x, dtype)) = &self.x else { return false };
        match self.tag.kind.places() {
            true => self.enqueuer.common.packs_when_placed((x, *dtype)),
            false => self.in_place().is_some(),
        }
    }

    /// Makes what returns of this rank's outputs; a rank without memory for that refuses the call.
    pub(super) fn partials(&mut self) -> Result<(), Error> {
        if let Some(outputs) = self.outputs {
            match self.make_partials(outputs) {
                Ok(base) => self.base = Some(base),
                Err(error) => self.refused = Some(error),
            }
        }
        let CallerStream { stream, packed, .. } = &self.enqueuer.caller;
        Ok(packed.record(stream)?)
    }

    /// Where in this rank's memory what returns begins.
    fn make_partials(&mut self, outputs: Outputs<'_>) -> Result<u64, Error> {
        let (kind, context) = self.call();
        let Enqueuer { common, caller: CallerStream { stream, kernels, .. }, kept, .. } = &*self.enqueuer;
        if !common.returns_sums(kind) {
            self.enqueuer.take_node_sums((kind, context))?;
            return Ok(outputs.base);
        }
        let (rows, count) = ((outputs.rows, outputs.len), kept[context as usize].layout.received());
        let sums = common.sum_by_rank(stream, kernels, (kind, context), rows, count)?;
        let base = sums.offset();
        self.sums = Some(sums);
        Ok(base)
    }

    /// Packs rows whose order was not known before they had places.
    pub(super) fn pack_placed(&mut self) -> Result<(), Error> {
        if self.enqueuer.common.shape.arrives() {
            self.enqueuer.list(self.context, self.tokens)?;
            let Enqueuer { engine, caller, .. } = &mut *self.enqueuer;
            engine.precede(&caller.stream, &caller.done)?;
        }
        if !self.packs_later() || self.in_place().is_some() {
            return Ok(());
        }
        let Enqueuer { common, caller: CallerStream { stream, kernels, packed, .. }, .. } = &*self.enqueuer;
        if let Some((x, dtype)) = &self.x {
            common.pack(stream, kernels, self.call(), (self.tokens, x, *dtype))?;
            packed.record(stream)?;
        }
        Ok(())
    }

    /// The stream of copies goes on behind the caller's.
    pub(super) fn follow(&mut self) -> Result<(), Error> {
        let Enqueuer { common, engine, caller: CallerStream { packed, .. }, .. } = &mut *self.enqueuer;
        engine.follow(packed)?;
        common.progress.started(engine.awaited().0, common.running());
        Ok(())
    }

    /// The caller's stream goes on behind the call, and finds why it was refused. Otherwise the
    /// word keeps what kernels of the call report.
    pub(super) fn join_streams(&mut self) -> Result<(), Error> {
        let properties = CallProperties::of(self.tag.kind);
        let Enqueuer { common, engine, caller, .. } = &mut *self.enqueuer;
        // Of a world that died meanwhile the guard says so, again and again.
        common.fixed.shared.hub.health().check()?;
        // Later work of the caller's stream may write where NICs read.
        engine.settle()?;
        let CallerStream { stream, done, watch, .. } = caller;
        let (mark, awaited) = engine.awaited();
        watch.expect(mark, awaited);
        // Weight gradients return behind a call that is the caller's as well, with its faults.
        if properties.class == Class::Return && properties.payload != Payload::Weights {
            common.clear_status(stream, self.context)?;
        }
        engine.precede(stream, done)?;
        if self.ended != Status::OK {
            // Kernels of earlier calls may have yet to read the word.
            stream.write(common.word(self.context, StreamFlag::Status)?, self.ended.0)?;
        }
        Ok(())
    }

    /// Lays apart what came with the rows.
    pub(super) fn lay_choices_apart(&self) -> Result<(), Error> {
        let Enqueuer { common, caller: CallerStream { stream, kernels, .. }, kept, .. } = &*self.enqueuer;
        let rows = kept[self.context as usize].layout.landed;
        common.lay_choices_apart(stream, kernels, (self.context, rows))
    }

    /// Puts rows into visible order, where engines relay and rows have come.
    pub(super) fn regroup(&self) -> Result<(), Error> {
        let Enqueuer { common, caller, kept, tables, .. } = &*self.enqueuer;
        let CallerStream { stream, kernels, .. } = caller;
        let (kind, context) = self.call();
        if !common.shape.arrives() || CallProperties::of(kind).payload == Payload::Nothing {
            return Ok(());
        }
        let rows = kept[context as usize].layout.landed;
        let base = tables.landing[common.fixed.lanes.rank as usize];
        common.regroup(stream, kernels, kind, (context, base, rows))
    }

    /// Own outputs, or sums of them, and how many they are: what returns to own tokens is read
    /// where it was made.
    fn own_outputs(&self) -> Result<Option<(DeviceRange, u32)>, Error> {
        let (Some(base), Enqueuer { common, kept, .. }) = (self.base, &*self.enqueuer) else {
            return Ok(None);
        };
        let (kind, context) = self.call();
        let layout = &kept[context as usize].layout;
        let rows = if common.returns_sums(kind) { layout.received() } else { layout.landed };
        let bytes = u64::from(rows) * common.fixed.sizing(kind).return_bytes;
        Ok(Some((common.piece((base, bytes))?, rows)))
    }

    /// What returned goes to the caller's tensor: sums of rows, or weight gradients.
    pub(super) fn sum(&self) -> Result<(), Error> {
        let Enqueuer { common, caller: CallerStream { stream, kernels, .. }, .. } = &*self.enqueuer;
        let ((kind, context), tokens, own) = (self.call(), self.tokens, self.own_outputs()?);
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        let Some(out) = self.out.filter(|_| tokens > 0) else { return Ok(()) };
        let (rows, index) = (common.span(shape.staging())?, common.span(shape.places(context))?);
        let (n_rows, top_k) = (shape.entries() as u32, spec.top_k);
        let (status, out) = (common.word(context, StreamFlag::Status)?, out.span(0, out.len())?);
        let own = own
            .as_ref()
            .map(|(rows, count)| rows.span(0, rows.len()).map(|rows| OwnRows { rows, count: *count }));
        let own = own.transpose()?;
        if CallProperties::of(kind).payload == Payload::Weights {
            let words = common.fixed.sizing(CallKind::Combine).return_words;
            let choices = tokens * top_k;
            let fetch = FetchWeights { choices, n_rows, words, from: rows, own, index, status, out };
            return Ok(kernels.fetch_weights(stream, &fetch)?);
        }
        let weights = common.span(shape.weights(context))?;
        let groups = common.span(shape.groups())?;
        // Sums by rank are weighted and rounded already. A token's are added one after the other.
        let sums = common.returns_sums(kind);
        let partials = sums || common.sums_by_node(kind);
        let index = if partials { common.span(shape.sum_places(context))? } else { index };
        let weighted = common.weighs(kind);
        // Bytes have no sums: the call is refused, and its zeros are written as words.
        let (columns, dtype) = match spec.dtype {
            Dtype::Bytes => (spec.hidden / Dtype::F32.size(), Dtype::F32),
            dtype => (spec.hidden, dtype),
        };
        Ok(kernels.sum_choices(
            stream,
            &SumChoices {
                tokens,
                top_k,
                columns: columns as u32,
                dtype,
                wire: if sums { PartialDtype::F32 } else { spec.partial_dtype },
                n_rows,
                rows,
                own,
                index,
                n_experts: common.fixed.bins.count(),
                experts: Some(common.span(shape.sums(context))?),
                weights: (weighted && !sums).then_some(weights),
                group_of: (spec.sum_order.has_partials() && !sums).then_some(groups),
                status,
                out,
            },
        )?)
    }
}
