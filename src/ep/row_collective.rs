//! All-gather and reduce-scatter of rows, by the programs of dispatch and combine.
//!
//! ```text
//!   all_gather       [n of this rank, C]        ->  [rows of all ranks, C]      rank after rank, in each segment
//!   reduce_scatter   [rows of all ranks, C]     ->  [n of this rank, C]         sums over the ranks
//! ```
//!
//! They are each other's gradient. Ranks may have different numbers of rows, none too. The sum of a
//! row begins at +0 in `f32`, adds what the ranks have by ascending rank, and is rounded once: the
//! same bits on every lane, route and topology.
//!
//! **Token slicing** ([`TokenSlices`]): the ranks of a tensor-parallel group have the same tokens,
//! and each sends only its part of them.
//!
//! ```text
//!   [E, C, M]  --drop_tokens-->  [E, C/TP, M]  --exchange, experts, exchange-->  [E, C/TP, M]  --gather_tokens-->  [E, C, M]
//! ```
//!
//! DeepSpeed does the same before and after the exchange of an expert-parallel group
//! (`drop_tokens`, `gather_tokens`): 1/TP of the data crosses there, and the rest goes between
//! local peers. Each is the other's gradient.

use super::builder::Spec;
use super::handle::HandleAt;
use super::host::{CallTensors, Flight, HostExchange, HostRows, Inner, check_tensor};
use super::rows::RowsAt;
use super::{CombineInput, ExpertOutput, ExpertRows, Handle, Tensor, TensorMut};
use crate::digest::Digest;
use crate::dtype::{Dtype, Element, PartialDtype};
use crate::error::{CallKind, Error, PlanError};
use crate::lane::Io;
use crate::plan::{ExpertMap, GroupRouting, ReceiveMode, RowLayout, Strategy, SumOrder};
use crate::schedule::ReturnParts;
use crate::topology::Route;
use crate::world::Group;

/// Settings of a [`RowCollective`]. All ranks must choose the same.
#[derive(Clone, Debug)]
pub struct RowCollectiveBuilder<'g> {
    group: &'g Group,
    columns: usize,
    dtype: Dtype,
    segments: u32,
    max_rows: u32,
    route: Route,
    node_sums: Option<PartialDtype>,
}

/// All-gather and reduce-scatter over a group. Calls are collective, and come in the same order on
/// all ranks.
///
/// ```
/// use sidelane::{Dtype, World, ep::RowCollective};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut rows = RowCollective::builder(&world.all()?).columns(4).dtype(Dtype::F32).build()?;
///         let mine = vec![world.rank() as f32; 4 * (1 + world.rank() as usize)];      // 1 row, and 2
///         let (all, shares) = rows.all_gather(&mine)?;
///         assert_eq!(all.rows::<f32>()?, [[0.0; 4], [1.0; 4], [1.0; 4]].concat());
///         assert_eq!(shares.counts(), [1, 2]);
///         let sums: Vec<f32> = rows.reduce_scatter(&vec![1.5f32; 3 * 4], &shares)?;
///         assert_eq!(sums, vec![3.0; mine.len()]);
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct RowCollective {
    ep: HostExchange,
    everyone: GroupRouting,
}

/// How many rows each rank has, and so where they lie among those of all.
#[derive(Debug)]
pub struct RowPartition {
    handle: Handle,
    counts: Vec<u32>,
}

impl RowPartition {
    /// Rows of each rank.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Rows of all ranks.
    pub fn rows(&self) -> u32 {
        self.handle.rows()
    }

    /// A buffer for rows of all ranks, which a reduce-scatter takes without a copy.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn output(&self) -> Result<ExpertOutput, Error> {
        self.handle.output()
    }

    /// The layout as a dispatch would have it: its report says how the rows of an all-gather went.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl<'g> RowCollectiveBuilder<'g> {
    /// Elements of a row. A row must be a multiple of 16 bytes.
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns;
        self
    }

    /// Element type. Default: bf16. [`Dtype::Bytes`] can be gathered, but not summed.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// In how many equal parts the rows of a rank come. Gathered rows lie by part and then by rank:
    /// so an all-gather along the second dimension of `[E, n, C]` has `E` segments. Default: 1.
    pub fn segments(mut self, segments: u32) -> Self {
        self.segments = segments;
        self
    }

    /// The most rows that a rank will have. Default: 4096.
    pub fn max_rows(mut self, rows: u32) -> Self {
        self.max_rows = rows;
        self
    }

    /// How rows reach other nodes. Default: [`Route::Pxn`]: each crosses once per node.
    pub fn route(mut self, route: Route) -> Self {
        self.route = route;
        self
    }

    /// Sums are made per node first, then over nodes by ascending node: over [`Route::Pxn`] only
    /// one partial sum per node crosses, in this type, to which each is rounded whether it travels
    /// or not. The bits then depend on the nodes. Default: off.
    pub fn node_sums(mut self, partial_dtype: PartialDtype) -> Self {
        self.node_sums = Some(partial_dtype);
        self
    }

    /// Allocates the control window and lays missing connections. Collective.
    ///
    /// # Errors
    /// [`PlanError`] if a setting cannot be used,
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks chose differently,
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank has no room for the control
    /// window.
    pub fn build(self) -> Result<RowCollective, Error> {
        let checked = self.check();
        self.compare(checked.is_ok())?;
        checked?;
        let ranks = self.group.size();
        let spec = Spec {
            top_k: 0,
            hidden: self.columns,
            dtype: self.dtype,
            sum_order: if self.node_sums.is_some() { SumOrder::Node } else { SumOrder::default() },
            align: 1,
            max_tokens: self.max_rows,
            weighted: false,
            map: std::sync::Arc::new(ExpertMap::contiguous(self.segments * ranks, ranks)?),
            route: self.route,
            partial_dtype: self.node_sums.unwrap_or_default(),
            layout: RowLayout::default(),
            mode: ReceiveMode::Exact,
            record: None,
            coalesce_relays: false,
            strategy: Strategy::AllToAll,
            gathers: true,
            max_blocks: None,
            rank_sums: false,
            node_sums: false,
        };
        Ok(RowCollective { ep: HostExchange::new(self.group, spec)?, everyone: GroupRouting::default() })
    }

    fn check(&self) -> Result<(), PlanError> {
        let bad = |parameter, seen: u64, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        let (ranks, bytes) = (u64::from(self.group.size()), (self.columns * self.dtype.size()) as u64);
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return bad("bytes of a row", bytes, "a positive multiple of 16");
        }
        if self.segments == 0 {
            return bad("segments", 0, "at least 1");
        }
        let segments = u64::from(self.segments);
        if segments * ranks * 4 > self.group.shared.options.config.symmetric {
            return bad("segments", segments, "fewer, or a larger SIDELANE_SYMMETRIC for counts");
        }
        if u64::from(self.max_rows) * ranks > u64::from(u32::MAX / 2) {
            return bad("max_rows", self.max_rows.into(), "fewer: rows are counted in 32 bits");
        }
        if self.node_sums == Some(PartialDtype::Bf16) && !PartialDtype::Bf16.carries(self.dtype) {
            return bad("node_sums", PartialDtype::Bf16 as u64, "f32, unless rows are bf16");
        }
        Ok(())
    }

    fn compare(&self, usable: bool) -> Result<(), Error> {
        let settings: [(&'static str, u64); 7] = [
            ("whether their settings can be used (1: yes)", usable.into()),
            ("columns", self.columns as u64),
            ("dtype", self.dtype as u64),
            ("segments", self.segments.into()),
            ("max_rows", self.max_rows.into()),
            ("route", self.route as u64),
            ("node_sums", self.node_sums.map_or(0, |partial_dtype| 1 + partial_dtype as u64)),
        ];
        self.group.alike(&settings)
    }
}

impl RowCollective {
    /// Starts to describe one.
    pub fn builder(group: &Group) -> RowCollectiveBuilder<'_> {
        let (dtype, route) = (Dtype::Bf16, Route::Pxn);
        RowCollectiveBuilder { group, columns: 0, dtype, segments: 1, max_rows: 4096, route, node_sums: None }
    }

    /// Rows of all ranks, `[rows of all, columns]`, from this rank's, `[rows, columns]`. Ranks
    /// exchange their numbers of rows, the shares. Collective.
    ///
    /// # Errors
    /// On every rank, before a byte moves: [`PlanError`] for wrong input
    /// ([`PeerRefused`](crate::error::CallError::PeerRefused) on the others),
    /// [`CallError`](crate::error::CallError) if ranks make different calls,
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank cannot hold the rows.
    /// [`LaneError`](crate::error::LaneError) and [`Cause`](crate::error::Cause) end the world.
    pub fn all_gather<'a>(
        &mut self,
        rows: impl Into<Tensor<'a>>,
    ) -> Result<(ExpertRows, RowPartition), Error> {
        let ep = &mut self.ep;
        let checked = rows.into().on_host("rows to gather").and_then(|rows| Self::check_rows(ep, rows));
        let (input, tokens) = checked.as_ref().map_or((&[][..], 0), |&rows| rows);
        let mut flight = ep.placing(CallKind::Dispatch, checked.map(drop), false);
        let lent = CallTensors { tokens, input, ..CallTensors::default() };
        ep.make(&mut flight, lent)?;
        let (mut extent, inner) = (flight.landed()?, flight.made);
        let landing = ep.fixed.sizing(CallKind::Dispatch).landing(inner.layout.landed);
        let mut counts = vec![0; ep.fixed.lanes.ranks() as usize];
        for &source in extent.slice::<u32>(landing.metadata_at(), landing.metadata as usize)? {
            if let Some(count) = counts.get_mut((source as usize).wrapping_sub(1)) {
                *count += 1;
            }
        }
        extent.trim(landing.metadata_at());
        let (rows, handle) = gathered(ep, extent, inner);
        Ok((rows, RowPartition { handle, counts }))
    }

    /// Whole rows of this collective's type, and how many they are.
    fn check_rows<'a>(
        ep: &HostExchange,
        (bytes, dtype): (&'a [u8], Dtype),
    ) -> Result<(&'a [u8], u32), Error> {
        let (columns, expected, what) = (ep.spec().hidden, ep.spec().dtype, "rows to gather");
        if dtype != expected {
            return Err(PlanError::WrongDtype { what, seen: dtype, expected }.into());
        }
        let seen = bytes.len() / dtype.size();
        if !seen.is_multiple_of(columns) {
            return Err(PlanError::WrongShape { what, seen, rows: seen / columns, columns }.into());
        }
        Ok((bytes, Self::check_count(ep, (seen / columns) as u64)?))
    }

    fn check_count(ep: &HostExchange, rows: u64) -> Result<u32, PlanError> {
        let bad = |expected| PlanError::BadParameter { parameter: "rows of a rank", seen: rows, expected };
        if rows > ep.spec().max_tokens.into() {
            return Err(bad("at most max_rows"));
        }
        let segments = ep.fixed.bins.count() / ep.fixed.bins.ranks();
        if !rows.is_multiple_of(segments.into()) {
            return Err(bad("a multiple of segments"));
        }
        Ok(rows as u32)
    }

    /// Shares that all ranks know beforehand: `counts` are the rows of each rank, and must be the
    /// same on all. Nothing is exchanged; ranks that disagree find out in the call that uses them.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if there is not a count per rank, [`PlanError::BadParameter`] for
    /// one that is too large or does not make equal segments.
    pub fn shares(&mut self, counts: &[u32]) -> Result<RowPartition, Error> {
        let RowCollective { ep, everyone } = self;
        let (what, seen, rows) = ("counts", counts.len(), ep.fixed.lanes.ranks() as usize);
        if seen != rows {
            return Err(PlanError::WrongShape { what, seen, rows, columns: 1 }.into());
        }
        for &count in counts {
            Self::check_count(ep, count.into())?;
        }
        let (frame, mut inner) = (ep.fixed.frame(), ep.space.spare_handle());
        let (bins, me) = (frame.bins, ep.fixed.lanes.rank);
        everyone.sort(&frame, 0, |rank, sorted| -> Result<(), PlanError> {
            sorted.fill_gathered(bins, rank, counts[rank as usize], None);
            Ok(())
        })?;
        let mut blocks = vec![None; counts.len()];
        everyone.each(&frame, (0, 0), |of, known, scratch| {
            let (own, all) = ((&*known.sorted, &*known.crossing), (&*known.counts, known.sizes));
            if of.paths.me() == me {
                inner.layout.fill(of, own, 0, all.0, all.1);
            }
            let nth = of.paths.relays().position(|relay| relay == me);
            blocks[of.paths.me() as usize] = nth.map(|nth| scratch.block(of, own, all, nth));
        });
        if frame.paths.is_multi_node() {
            let forward = std::sync::Arc::make_mut(inner.forward.get_or_insert_default());
            forward.spans = true;
            forward.know(&frame, ep.fixed.partial_bytes().is_some(), |source, _| {
                blocks[source as usize].take().unwrap_or_default()
            });
        }
        inner.offer = frame.sizing.offer(inner.layout.landed);
        inner.name(ep.spec(), (ep.space.instance, digest(counts)));
        let handle = Handle(HandleAt::Host(ep.handle_of(inner)));
        Ok(RowPartition { handle, counts: counts.to_vec() })
    }

    /// Rows of all ranks, with shares that all ranks know already, so no counts are exchanged.
    /// Collective.
    ///
    /// # Errors
    /// As [`RowCollective::all_gather`], and [`CallError::ForeignHandle`](crate::error::CallError);
    /// [`CallError::Disagree`](crate::error::CallError) if ranks bring other shares.
    pub fn all_gather_cached<'a>(
        &mut self,
        rows: impl Into<Tensor<'a>>,
        shares: &RowPartition,
    ) -> Result<ExpertRows, Error> {
        let (rows, handle) = (rows.into().on_host("tokens"), shares.handle.on_host());
        let rows = self.ep.cached((CallKind::CachedDispatch, 0), rows, handle)?;
        Ok(ExpertRows(RowsAt::Host(rows)))
    }

    /// As [`ExpertParallel::on_agreed`](crate::ExpertParallel::on_agreed).
    pub(crate) fn on_agreed<R>(
        &mut self,
        agreed: impl FnOnce() + Send + Sync + 'static,
        call: impl FnOnce(&mut Self) -> R,
    ) -> R {
        self.ep.space.on_agreed = Some(Box::new(agreed));
        let done = call(self);
        self.ep.space.on_agreed = None;
        done
    }

    /// Sums of this rank's rows over all ranks, `[rows, columns]`. Each rank contributes rows for
    /// all ranks, `[rows of all, columns]`, in the layout of an all-gather along these shares.
    /// `rows` is the buffer of [`RowPartition::output`], which is used in place, or a slice, which
    /// is copied once. Collective.
    ///
    /// # Errors
    /// As [`RowCollective::all_gather_cached`]; [`PlanError::NoArithmetic`] for rows that cannot be
    /// summed.
    pub fn reduce_scatter<'a, E: Element>(
        &mut self,
        rows: impl Into<CombineInput<'a>>,
        shares: &RowPartition,
    ) -> Result<Vec<E>, Error> {
        let mut sums = vec![E::zeroed(); shares.handle.tokens() as usize * self.ep.spec().hidden];
        self.reduce_scatter_into(rows, shares, &mut sums)?;
        Ok(sums)
    }

    /// As [`RowCollective::reduce_scatter`], into `sums`, `[rows, columns]` of this rank.
    ///
    /// # Errors
    /// As [`RowCollective::reduce_scatter`]. Unless the world ends, `sums` is then as it was.
    pub fn reduce_scatter_into<'a, 'o>(
        &mut self,
        rows: impl Into<CombineInput<'a>>,
        shares: &RowPartition,
        sums: impl Into<TensorMut<'o>>,
    ) -> Result<(), Error> {
        let (ep, handle) = (&mut self.ep, shares.handle.on_host());
        let mut flight =
            Flight::returning(CallKind::Combine, ReturnParts { rows: true, weights: false }, false);
        let output = ep.sums(&mut flight, &handle, "sums", sums.into().on_host("sums"));
        let output = output.map(|output| Io { output, ..Io::default() });
        ep.ret(&mut flight, rows.into().on_host(), handle, CallTensors { output, ..CallTensors::default() })
    }
}

/// Gathered rows, and their layout.
fn gathered(ep: &HostExchange, extent: crate::memory::Extent, mut inner: Inner) -> (ExpertRows, Handle) {
    let (rows, row_bytes) = (inner.layout.landed, ep.spec().row_bytes());
    inner.received = super::row_metadata::ReceivedMetadata::default();
    inner.weights.clear();
    let rows = HostRows { extent, rows, row_bytes, record: None, index: None };
    (ExpertRows(RowsAt::Host(rows)), Handle(HandleAt::Host(ep.handle_of(inner))))
}

/// Number of shares that were not exchanged: above all numbers of calls.
fn digest(counts: &[u32]) -> u64 {
    Digest::of(counts.iter().flat_map(|count| count.to_le_bytes())) | 1 << 63
}

/// Slices of a buffer `[experts, capacity, columns]` along its second dimension, over a group.
///
/// ```
/// use sidelane::{Dtype, World, ep::TokenSlices};
///
/// let world = World::threads(1)?.remove(0);
/// let mut slices = TokenSlices::new(&world.all()?, [2, 3, 4], Dtype::F32)?;
/// let buffer: Vec<f32> = (0..24).map(|at| at as f32).collect();
/// let slice = slices.drop_tokens(&buffer)?;                 // alone, a rank keeps everything
/// assert_eq!(slices.gather_tokens(&slice)?.rows::<f32>()?, buffer);
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenSlices {
    gather: RowCollective,
    shares: RowPartition,
    /// Of the slice: experts, tokens of each, columns.
    slice: [usize; 3],
    dtype: Dtype,
    rank: usize,
    ranks: usize,
}

impl TokenSlices {
    /// For a buffer `[experts, capacity, columns]`, equal on all ranks of the group. Collective.
    ///
    /// # Errors
    /// On every rank: [`PlanError::BadParameter`] if the capacity is not a multiple of the size of
    /// the group, or a row not one of 16 bytes;
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks have other shapes.
    pub fn new(group: &Group, [experts, capacity, columns]: [u32; 3], dtype: Dtype) -> Result<Self, Error> {
        let ranks = group.size();
        let rows = experts.saturating_mul(capacity / ranks);
        let builder = RowCollective::builder(group).columns(columns as usize).dtype(dtype);
        let mut gather = builder.segments(experts).max_rows(rows).build()?;
        if !capacity.is_multiple_of(ranks) {
            let (parameter, expected) = ("capacity", "a multiple of the size of the tensor-parallel group");
            return Err(PlanError::BadParameter { parameter, seen: capacity.into(), expected }.into());
        }
        let shares = gather.shares(&vec![rows; ranks as usize])?;
        let slice = [experts as usize, (capacity / ranks) as usize, columns as usize];
        Ok(TokenSlices { gather, shares, slice, dtype, rank: group.rank() as usize, ranks: ranks as usize })
    }

    /// This rank's slice, `[experts, capacity / ranks, columns]`, of the buffer. Not collective:
    /// nothing moves.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`], [`PlanError::WrongDtype`].
    pub fn drop_tokens<E: Element>(&self, buffer: &[E]) -> Result<Vec<E>, Error> {
        let [experts, tokens, columns] = self.slice;
        let all = experts * tokens * self.ranks;
        let buffer_bytes = (bytemuck::cast_slice(buffer), E::DTYPE);
        check_tensor("buffer", buffer_bytes, all as u32, (columns, self.dtype))?;
        let part = tokens * columns;
        if part == 0 {
            return Ok(Vec::new());
        }
        let parts = buffer.chunks_exact(part).skip(self.rank).step_by(self.ranks);
        Ok(parts.flatten().copied().collect())
    }

    /// The buffer, `[experts, capacity, columns]`, from the slices of all ranks. Collective.
    ///
    /// # Errors
    /// As [`RowCollective::all_gather_cached`].
    pub fn gather_tokens<E: Element>(&mut self, slice: &[E]) -> Result<ExpertRows, Error> {
        self.gather.all_gather_cached(slice, &self.shares)
    }
}
