//! Dispatch: tokens to the ranks of their experts.

use std::sync::Arc;

use super::buffers::check_tensor;
use super::call::Begun;
use super::handle::Inner;
use super::{ExpertParallel, ExpertRows, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::rows::Stores;
use crate::schedule::{DispatchSkeleton, Tag};

/// A dispatch that was started: counts are on their way. Finish it before the next call; dropping it cancels the
/// world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingDispatch<'a> {
    begun: Begun<'a>,
    x: &'a [u8],
    top_k: u32,
    weights: &'a [f32],
    tag: Tag,
    /// The extent this rank announced, unless it refuses its input.
    ready: Result<Extent, Error>,
}

impl ExpertParallel {
    /// Sends every token to the ranks of its experts, and receives the rows of this rank's experts. Collective.
    ///
    /// `x` is `[tokens, hidden]`, `routing` `[tokens, top_k]`; both may be empty.
    ///
    /// # Errors
    /// On every rank, before a byte moves: [`PlanError`] where the input is wrong ([`CallError::PeerRefused`] on the
    /// others), [`CallError`] where ranks make different calls, [`MemoryError::OutOfSpace`](crate::error::MemoryError)
    /// if a rank cannot hold its rows. The world stays usable after these. [`LaneError`](crate::error::LaneError) and
    /// [`Cause`](crate::error::Cause) end it.
    pub fn dispatch<E: Element>(
        &mut self,
        x: &[E],
        routing: &Routing<'_>,
    ) -> Result<(ExpertRows, Handle), Error> {
        self.start_dispatch(x, routing)?.finish()
    }

    /// First half of [`ExpertParallel::dispatch`]: announces memory and publishes counts, and does not wait.
    ///
    /// # Errors
    /// Those that end the world. Bad input is reported by the second half, on all ranks.
    pub fn start_dispatch<'a, E: Element>(
        &'a mut self,
        x: &'a [E],
        routing: &'a Routing<'_>,
    ) -> Result<PendingDispatch<'a>, Error> {
        self.enter()?;
        let sorted = self.sort(x, routing);
        if sorted.is_err() {
            self.sorted.clear(&self.spec.map);
        }
        let announced = self.pool().announce(self.most_bytes());
        self.publish(&announced)?;
        let ready = sorted.map(|()| announced);
        let tag = Tag { kind: CallKind::Dispatch, handle: self.calls.number(), ..Tag::default() };
        let tag = Self::entry(tag, &ready);
        self.tables.tags.fill(tag);
        let at = Self::at(&self.lanes);
        self.tables.publications(&at, &self.control, self.calls.parity(), &self.spec.map, &self.sorted);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.dispatch.entry.start(), None, &mut Io::default(), Stores::Cached)?;
        let (x, top_k, weights) = (bytemuck::cast_slice(x), routing.top_k(), routing.weights());
        Ok(PendingDispatch { begun: Begun::new(self), x, top_k, weights, tag, ready })
    }

    fn sort<E: Element>(&mut self, x: &[E], routing: &Routing<'_>) -> Result<(), Error> {
        let (tokens, spec) = (routing.tokens(), &self.spec);
        if routing.top_k() != spec.top_k {
            let (what, seen) = ("routing", routing.experts().len());
            return Err(PlanError::WrongShape {
                what,
                seen,
                rows: tokens as usize,
                columns: spec.top_k as usize,
            }
            .into());
        }
        if tokens > spec.max_tokens {
            return Err(PlanError::TooManyTokens { tokens, max: spec.max_tokens }.into());
        }
        check_tensor("tokens", x, tokens, (spec.hidden, spec.dtype))?;
        Ok(self.sorted.fill(&spec.map, self.lanes.rank, routing)?)
    }

    /// What this rank receives at most, if every token of every rank chooses as many of its experts as it can.
    fn most_bytes(&self) -> u64 {
        let spec = &self.spec;
        let slots = spec.map.slots_of(self.rank()).len() as u64;
        let rows = u64::from(self.size()) * u64::from(spec.max_tokens) * slots.min(spec.top_k.into());
        rows.saturating_add(slots * u64::from(spec.align - 1)).saturating_mul(spec.row_bytes())
    }

    fn finish_dispatch(
        &mut self,
        mut announced: Extent,
        x: &[u8],
        top_k: u32,
        weights: &[f32],
    ) -> Result<(ExpertRows, Handle), Error> {
        self.collect()?;
        self.sizes.fill(&self.spec.map, self.spec.align, &self.counts.total);
        let row_bytes = self.spec.row_bytes();
        for (rank, (&rows, &(offset, free))) in
            (0..).zip(self.sizes.rows.iter().zip(&self.publication.announced))
        {
            let asked = u64::from(rows) * row_bytes;
            if asked > free || rows == u32::MAX {
                return Err(self.out_of_space(rank, asked, free));
            }
            self.tables.landing[rank as usize] = offset;
        }
        let mut inner = self.spare_handle();
        let frame = self.frame();
        inner.layout.fill(&frame, &self.sorted, top_k, &self.counts, &self.sizes);
        self.collect_weights(&mut inner.layout)?;
        inner.weights.clear();
        if self.spec.weighted {
            inner.weights.extend_from_slice(weights);
        }
        inner.row_bytes = row_bytes;
        inner.instance = self.instance;
        inner.number = self.calls.number();
        announced.trim(u64::from(inner.layout.landed) * row_bytes);
        self.host.take_moved();
        let skeletons = Arc::clone(&self.skeletons);
        self.put_rows(&skeletons.dispatch, &inner, x)?;
        inner.copied.set(0);
        inner.report.moved = self.host.take_moved();
        inner.report.lanes.clone_from(&self.lane_use);
        let rows = ExpertRows { extent: announced, rows: inner.layout.landed, row_bytes };
        Ok((rows, self.handle_of(inner)))
    }

    /// Stage "rows": everybody's rows to where `tables.landing` says.
    fn put_rows(&mut self, skeleton: &DispatchSkeleton, inner: &Inner, x: &[u8]) -> Result<(), Error> {
        self.tables.rows(&Self::at(&self.lanes), &inner.layout);
        let stores = self.stores(inner.layout.rows.len() as u64 * inner.row_bytes);
        self.run(&skeleton.rows.items, Some(inner), &mut Io { input: x, ..Io::default() }, stores)
    }

    /// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective.
    ///
    /// `x` is `[tokens, hidden]` with the tokens of that dispatch.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`].
    pub fn dispatch_cached<E: Element>(&mut self, x: &[E], handle: &Handle) -> Result<ExpertRows, Error> {
        self.cached(CallKind::CachedDispatch, 0, x, handle)
    }

    pub(super) fn cached<E: Element>(
        &mut self,
        kind: CallKind,
        options: u32,
        x: &[E],
        handle: &Handle,
    ) -> Result<ExpertRows, Error> {
        self.enter()?;
        let inner = handle.inner();
        let row_bytes = self.spec.row_bytes();
        let ready = self.check_handle(inner).and_then(|()| {
            check_tensor("tokens", x, inner.layout.tokens, (self.spec.hidden, self.spec.dtype))?;
            Ok(self.pool().take(u64::from(inner.layout.landed) * row_bytes)?)
        });
        let base = ready.as_ref().map_or(0, Extent::offset);
        let tag = Self::entry(Tag { kind, options, handle: inner.number, base, ..Tag::default() }, &ready);
        self.tables.clear();
        self.tables.tags.fill(tag);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(&skeletons.cached.entry.items, None, &mut Io::default(), Stores::Cached)?;
        let extent = self.agree(tag, ready, drop)?;
        for peer in 0..self.size() {
            self.tables.landing[peer as usize] = self.base_of(peer)?;
        }
        self.put_rows(&skeletons.cached, inner, bytemuck::cast_slice(x))?;
        Ok(ExpertRows { extent, rows: inner.layout.landed, row_bytes })
    }

    pub(super) fn check_handle(&self, inner: &Inner) -> Result<(), Error> {
        if inner.instance != self.instance {
            return Err(CallError::ForeignHandle { seen: inner.instance, expected: self.instance }.into());
        }
        Ok(())
    }
}

impl PendingDispatch<'_> {
    /// Second half: waits for the counts of all, places, moves the rows, and waits for those that come here.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`].
    pub fn finish(self) -> Result<(ExpertRows, Handle), Error> {
        let PendingDispatch { mut begun, x, top_k, weights, tag, ready } = self;
        let ep = begun.finish();
        let skeletons = Arc::clone(&ep.skeletons);
        ep.run(skeletons.dispatch.entry.finish(), None, &mut Io::default(), Stores::Cached)?;
        let announced = ep.agree(tag, ready, drop)?;
        ep.finish_dispatch(announced, x, top_k, weights)
    }
}
