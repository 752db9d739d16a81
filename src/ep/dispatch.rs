//! Dispatch: tokens to the ranks of their experts.

use std::sync::Arc;

use super::buffers::check_tensor;
use super::call::{ENTRY, ROWS};
use super::handle::Inner;
use super::{ExpertParallel, ExpertRows, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::rows::Stores;
use crate::schedule::{At, Tag};

/// A dispatch that was started: counts are on their way. Finish it before the next call; dropping it cancels the
/// world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingDispatch<'a> {
    ep: &'a mut ExpertParallel,
    x: &'a [u8],
    top_k: u32,
    weights: &'a [f32],
    started: Option<Started>,
}

#[derive(Debug)]
struct Started {
    announced: Extent,
    tag: Tag,
    refused: Option<Error>,
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
        let refused = self.sort(x, routing).err();
        if refused.is_some() {
            self.sorted.clear(&self.spec.map);
        }
        let announced = self.pool().announce(self.most_bytes());
        self.publish(&announced)?;
        let mut tag = Tag { kind: CallKind::Dispatch, handle: self.calls, ..Tag::default() };
        if let Some(error) = &refused {
            tag = Self::refuse(tag, error);
        }
        self.tables.tags.fill(tag);
        let at = At { nodes: &self.lanes.nodes, me: self.lanes.rank };
        self.tables.publications(&at, &self.control, self.calls, &self.spec.map, &self.sorted);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.dispatch.stages[ENTRY].halves().0, None, &mut Io::default(), Stores::Cached)?;
        let x = bytemuck::cast_slice(x);
        let started = Some(Started { announced, tag, refused });
        Ok(PendingDispatch { ep: self, x, top_k: routing.top_k(), weights: routing.weights(), started })
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
        Ok(self.sorted.fill(&spec.map, self.lanes.rank, routing, spec.order)?)
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
            self.landing[rank as usize] = offset;
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
        inner.number = self.calls;
        inner.pool = Some(Arc::clone(self.pool()));
        announced.trim(u64::from(inner.layout.landed) * row_bytes);
        self.host.take_moved();
        self.put_rows(&inner, x)?;
        inner.copied.set(0);
        inner.report.moved = self.host.take_moved();
        inner.report.lanes.clone_from(&self.lane_use);
        let rows = ExpertRows { extent: announced, rows: inner.layout.landed, row_bytes };
        Ok((rows, self.handle_of(inner)))
    }

    /// Stage "rows": everybody's rows to where `landing` says.
    fn put_rows(&mut self, inner: &Inner, x: &[u8]) -> Result<(), Error> {
        let at = At { nodes: &self.lanes.nodes, me: self.lanes.rank };
        self.tables.rows(&at, &inner.layout, &self.landing);
        let stores = self.stores(inner.layout.rows.len() as u64 * inner.row_bytes);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(
            &skeletons.dispatch.stages[ROWS].items,
            Some(inner),
            &mut Io { input: x, ..Io::default() },
            stores,
        )
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
        let mut tag = Tag { kind, options, handle: inner.number, ..Tag::default() };
        let row_bytes = self.spec.row_bytes();
        let ready = self.check_handle(inner).and_then(|()| {
            check_tensor("tokens", x, inner.layout.tokens, (self.spec.hidden, self.spec.dtype))?;
            Ok(self.pool().take(u64::from(inner.layout.landed) * row_bytes)?)
        });
        let (extent, refused) = match ready {
            Ok(extent) => (Some(extent), None),
            Err(error) => (None, Some(error)),
        };
        match (&extent, &refused) {
            (Some(extent), _) => tag.base = extent.offset(),
            (None, Some(error)) => tag = Self::refuse(tag, error),
            (None, None) => {}
        }
        self.tables.clear();
        self.tables.tags.fill(tag);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(&skeletons.cached.stages[ENTRY].items, None, &mut Io::default(), Stores::Cached)?;
        self.agree(tag, refused)?;
        let Some(extent) = extent else {
            return Err(CallError::PeerRefused { call: self.calls, peer: self.rank() }.into());
        };
        for peer in 0..self.size() {
            let base = if peer == self.rank() { extent.offset() } else { self.tag_of(peer)?.base };
            self.landing[peer as usize] = base;
        }
        self.put_rows(inner, bytemuck::cast_slice(x))?;
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
    pub fn finish(mut self) -> Result<(ExpertRows, Handle), Error> {
        let Some(Started { announced, tag, refused }) = self.started.take() else {
            unreachable!("a dispatch is finished once: finish takes it")
        };
        let ep = &mut *self.ep;
        let skeletons = Arc::clone(&ep.skeletons);
        ep.run(skeletons.dispatch.stages[ENTRY].halves().1, None, &mut Io::default(), Stores::Cached)?;
        ep.agree(tag, refused)?;
        ep.finish_dispatch(announced, self.x, self.top_k, self.weights)
    }
}

impl Drop for PendingDispatch<'_> {
    fn drop(&mut self) {
        if self.started.is_some() {
            self.ep.abandon();
        }
    }
}
