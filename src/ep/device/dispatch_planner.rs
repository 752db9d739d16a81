//! Planner of a dispatch: the host or the device sorts its choices and finds their places.
//!
//! ```text
//!               host                                            device
//!   start       ids, weights -> host | flag | sort_choices      plan_choices | flag
//!   sort        all of SortedRouting, by the host's rules       rows of each bin, first wrong choice: as the kernel left them
//!   metadata    in pinned memory: engines copy own rows', too   in memory of the device
//!   fill rows   rows and places of choices -> device            place_choices: where own rows land, with their metadata
//! ```
//!
//! Ranks exchange the same counts either way, so no rank knows how another one plans. The device
//! plans where counts are all that the host needs: sizes are exact, the ranks are one node, no rank
//! is masked, ranks do not sum a token's rows, and tokens are packed. Those in the device heap may
//! go as they lie; while there is a token buffer, so may those that come later. Between nodes the
//! host has metadata that NICs and relays read; beyond a budget and under a mask it says which
//! choices are dropped; sums of ranks it numbers.

use std::sync::atomic::Ordering;

use super::REFUSED;
use super::enqueuer::{Enqueuer, Scratch};
use super::memory::ByteRange;
use super::session::Session;
use crate::device::{
    ByteSpan, ChoiceFault, DeviceRange, Kernels, PlaceArgs, PlanArgs, RunArgs, SortArgs, Stream,
};
use crate::ep::tensor::Chosen;
use crate::error::{DeviceError, Error, PlanError};
use crate::exec::PackedMetadata;
use crate::gate::Routing;
use crate::plan::ReceiveMode;

/// Planner of one dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Planner {
    #[default]
    Host,
    Device,
}

impl Session {
    /// Planner of the next dispatch, whose tokens may lie in this rank's memory.
    pub fn planner(&self, lies_here: bool) -> Planner {
        let (spec, paths) = (&self.fixed.spec, self.fixed.paths());
        let (one_node, exact) = (!paths.is_multi_node(), spec.mode == ReceiveMode::Exact);
        let counts_suffice = spec.map.active().iter().all(|&active| active) && !spec.rank_sums;
        // Relaxed: a buffer that another thread drops at the same time may count or not.
        let packs = !lies_here && self.buffers.load(Ordering::Relaxed) == 0;
        match one_node && exact && counts_suffice && packs {
            true => Planner::Device,
            false => Planner::Host,
        }
    }

    /// Choices of a call, and where the order of their rows goes: by bin, then by token.
    fn sort_args<'a>(
        &'a self,
        context: u32,
        Chosen { tokens, experts, .. }: Chosen<'a>,
    ) -> Result<SortArgs<'a>, DeviceError> {
        let spec = &self.fixed.spec;
        let choices = tokens * spec.top_k;
        Ok(SortArgs {
            experts: experts.span(0, u64::from(choices) * 4)?,
            choices,
            top_k: spec.top_k,
            bin_of: self.span(self.shape.map())?,
            n_experts: spec.map.experts(),
            bins: self.fixed.bins.count(),
            once: spec.layout.merges(),
            order: self.span(self.shape.order(context))?,
        })
    }

    /// The same with all else that a plan by the device writes.
    fn plan_args<'a>(&'a self, context: u32, chosen: Chosen<'a>) -> Result<PlanArgs<'a>, DeviceError> {
        let shape = &self.shape;
        let sort = self.sort_args(context, chosen)?;
        let kept = self.fixed.spec.weighted.then(|| self.span(shape.weights(context)));
        Ok(PlanArgs {
            weights: chosen.weights.span(0, u64::from(sort.choices) * 4)?,
            local_of: self.span(shape.locals())?,
            place_of: self.span(shape.places_in_sums())?,
            rows: self.span(shape.places(context))?,
            places: self.span(shape.sums(context))?,
            metadata: self.span(shape.packed_metadata())?,
            kept: kept.transpose()?,
            counts: self.host_span(shape.host_bin_counts())?,
            faults: self.host_span(shape.host_faults())?,
            sort,
        })
    }

    fn host_span(&self, (offset, len): ByteRange) -> Result<ByteSpan<'_>, DeviceError> {
        self.host.range().span(offset, len)
    }
}

impl Planner {
    /// Enqueues what comes before the flag by which the host knows that choices are here.
    pub fn bring(
        self,
        common: &Session,
        (stream, kernels): (&Stream, &Kernels),
        (context, chosen): (u32, Chosen<'_>),
    ) -> Result<(), Error> {
        let Chosen { tokens, experts, weights } = chosen;
        match self {
            Planner::Host => {
                let shape = &common.shape;
                let choices = u64::from(tokens) * u64::from(common.fixed.spec.top_k) * 4;
                for (from, to) in [(experts, shape.host_experts()), (weights, shape.host_weights())] {
                    stream.copy(common.host_span((to.0, choices))?, from.span(0, choices)?)?;
                }
            }
            Planner::Device if tokens == 0 => {}
            Planner::Device => kernels.plan_choices(stream, &common.plan_args(context, chosen)?)?,
        }
        Ok(())
    }

    /// Enqueues what finds the order of rows behind that flag, of at least one token. Where engines
    /// relay, the second half finds the order.
    pub fn order(
        self,
        common: &Session,
        (stream, kernels): (&Stream, &Kernels),
        (context, chosen): (u32, Chosen<'_>),
    ) -> Result<(), Error> {
        if self == Planner::Host && !common.shape.arrives() {
            kernels.sort_choices(stream, &common.sort_args(context, chosen)?)?;
        }
        Ok(())
    }

    /// This rank's own routing, as its stream left it, or what is wrong with it.
    pub fn sort(self, enqueuer: &mut Enqueuer, tokens: u32) -> Result<(), Error> {
        let max = enqueuer.common.fixed.spec.max_tokens;
        match (tokens, self) {
            (REFUSED, _) => Err(PlanError::RefusedHere.into()),
            _ if tokens > max => Err(PlanError::TooManyTokens { tokens, max }.into()),
            (_, Planner::Host) => enqueuer.sort_choices(tokens),
            (_, Planner::Device) => enqueuer.take_counts(tokens),
        }
    }

    /// Keeps metadata of packed rows where NICs and the device read it.
    pub fn record(self, enqueuer: &mut Enqueuer) -> Result<(), Error> {
        let Enqueuer { common, sorted, scratch, .. } = enqueuer;
        scratch.metadata.clone_from(&sorted.metadata);
        match self {
            Planner::Host => {
                Ok(common.host.write_words(common.shape.host_metadata().0 as usize, &sorted.metadata)?)
            }
            Planner::Device => Ok(()),
        }
    }

    /// Whether the host knows the token of each packed row.
    pub fn knows_tokens(self) -> bool {
        self == Planner::Host
    }

    /// Collects what the sums of the caller's stream add up: the row of each choice, and the place
    /// of its bin. A call that is not `placed` has none.
    pub fn send_places(
        self,
        enqueuer: &mut Enqueuer,
        context: u32,
        tokens: u32,
        placed: bool,
    ) -> Result<(), Error> {
        match self {
            Planner::Host => enqueuer.send_places(context, tokens, placed),
            // The kernels write both.
            Planner::Device => Ok(()),
        }
    }

    /// Enqueues that choices of own rows find these where they land, and that their metadata goes
    /// there.
    pub fn place_own(self, enqueuer: &Enqueuer, context: u32, tokens: u32) -> Result<(), Error> {
        let Enqueuer { common, caller, kept, .. } = enqueuer;
        let ((runs, own), landed) = (&kept[context as usize].own, kept[context as usize].layout.landed);
        if self == Planner::Host || *own == 0 {
            return Ok(());
        }
        let (shape, spec) = (&common.shape, &common.fixed.spec);
        let (choices, count) = (tokens * spec.top_k, runs.end - runs.start);
        let runs = common.span(shape.own_runs(context))?;
        let place = PlaceArgs {
            choices,
            rows: common.span(shape.places(context))?,
            behind: shape.entries() as u32,
            words: spec.metadata().words(spec.top_k),
            from: common.span(shape.packed_metadata())?,
            metadata: common.span(shape.metadata(context))?,
            own: *own,
            runs: RunArgs { runs, count, entries: choices, places: landed },
        };
        Ok(caller.kernels.place_choices(&caller.stream, &place)?)
    }

    /// Memory in which metadata of packed rows lies.
    pub fn metadata(self, common: &Session) -> Result<DeviceRange, DeviceError> {
        match self {
            Planner::Host => common.host_piece(common.shape.host_metadata()),
            Planner::Device => common.piece(common.shape.packed_metadata()),
        }
    }

    /// The same, as engines and NICs read it.
    pub fn packed_metadata<'a>(self, memory: &'a DeviceRange, scratch: &'a Scratch) -> PackedMetadata<'a> {
        match self {
            Planner::Host => PackedMetadata::Host(memory, bytemuck::cast_slice(&scratch.metadata)),
            Planner::Device => PackedMetadata::Device(memory),
        }
    }

    /// Kernels of a dispatch that has rows of its own or not, before those that move rows.
    pub fn kernels(self, has_own: bool) -> [Option<&'static str>; 2] {
        match self {
            Planner::Host => [Some("sort_choices"), None],
            Planner::Device => [Some("plan_choices"), has_own.then_some("place_choices")],
        }
    }
}

impl Enqueuer {
    /// Sorts choices that were copied to the host.
    fn sort_choices(&mut self, tokens: u32) -> Result<(), Error> {
        let (fixed, shape) = (&self.common.fixed, &self.common.shape);
        let (spec, count) = (&fixed.spec, tokens as usize * fixed.spec.top_k as usize);
        for (words, (at, _)) in [
            (&mut self.scratch.experts, shape.host_experts()),
            (&mut self.scratch.weights, shape.host_weights()),
        ] {
            words.resize(count, 0);
            self.common.host.read_words(at as usize, words)?;
        }
        let experts: &[i32] = bytemuck::cast_slice(&self.scratch.experts);
        let weights: &[f32] = bytemuck::cast_slice(&self.scratch.weights);
        let routing = Routing::new(spec.top_k, experts, weights)?;
        Ok(self.sorted.fill(&spec.map, &fixed.bins, spec.metadata(), fixed.lanes.rank, &routing)?)
    }

    /// Takes the rows of each bin from a kernel, unless it found a choice that is wrong.
    fn take_counts(&mut self, tokens: u32) -> Result<(), Error> {
        let Enqueuer { common, sorted, scratch, .. } = self;
        let (fixed, shape) = (&common.fixed, &common.shape);
        let (spec, bins) = (&fixed.spec, fixed.bins.count() as usize);
        let Scratch { bin_counts, faults, weights, .. } = scratch;
        bin_counts.clear();
        bin_counts.resize(bins, 0);
        faults.clear();
        faults.resize(bins, ChoiceFault::default());
        // No choice is dropped, so no weight of one is asked for.
        weights.clear();
        // Of no tokens a kernel counts nothing.
        if tokens > 0 {
            common.host.read_words(shape.host_bin_counts().0 as usize, bin_counts)?;
            common.host.read_words(shape.host_faults().0 as usize, bytemuck::cast_slice_mut(faults))?;
        }
        // Shares of the choices follow each other.
        if let Some(error) = faults.iter().find_map(|fault| fault.error(spec.top_k, spec.map.experts())) {
            return Err(error.into());
        }
        sorted.fill_counted(&fixed.bins, (tokens, spec.top_k), bin_counts);
        Ok(())
    }

    /// Sends where the host has found the rows of choices.
    fn send_places(&mut self, context: u32, tokens: u32, placed: bool) -> Result<(), Error> {
        let Enqueuer { common, engine, sorted, crossing, rank_sums, node_sums, kept, scratch, .. } = self;
        let (fixed, shape) = (&common.fixed, &common.shape);
        let (top_k, Scratch { places, sums, sum_places, starts, weights, .. }) = (fixed.spec.top_k, scratch);
        if placed {
            sorted.places(&fixed.bins, top_k, starts, [places, sums]);
            if fixed.spec.rank_sums {
                rank_sums.places(&fixed.frame(), top_k, shape.entries() as u32, sum_places);
            }
            if fixed.spec.node_sums {
                sum_places.clone_from(places);
                let (layout, sent) = (&kept[context as usize].layout, (&*sorted, &*crossing));
                let weighted = (&mut sum_places[..], bytemuck::cast_slice_mut(weights));
                node_sums.replace_places(&fixed.frame(), sent, layout, weighted);
                if fixed.spec.weighted {
                    common.host.write_words(shape.host_weights().0 as usize, weights)?;
                }
            }
        } else {
            let tokens = if tokens == REFUSED { 0 } else { tokens };
            let choices = tokens.min(fixed.spec.max_tokens) as usize * top_k as usize;
            for words in [&mut *places, sums, sum_places] {
                words.clear();
                words.resize(choices, -1);
            }
        }
        let choices = places.len() as u64 * 4;
        let [places, sums]: [&[u32]; 2] = [bytemuck::cast_slice(places), bytemuck::cast_slice(sums)];
        for (words, (at, _)) in [(places, shape.host_places()), (sums, shape.host_sums())] {
            common.host.write_words(at as usize, words)?;
        }
        common.send(engine, (shape.host_places(), shape.places(context)), choices)?;
        common.send(engine, (shape.host_sums(), shape.sums(context)), choices)?;
        if fixed.spec.rank_sums || fixed.spec.node_sums {
            let (from, to) = (shape.host_sum_places(), shape.sum_places(context));
            common.host.write_words(from.0 as usize, bytemuck::cast_slice(sum_places))?;
            common.send(engine, (from, to), choices)?;
        }
        match fixed.spec.weighted {
            true => common.send(engine, (shape.host_weights(), shape.weights(context)), choices),
            false => Ok(()),
        }
    }
}
