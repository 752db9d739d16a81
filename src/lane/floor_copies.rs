//! The floor: the bytes of a call moved by bare loops, nothing else.
//!
//! No counts, no placement, no flags, no checks per call: addresses are resolved once, then each
//! run is gathered and each token summed. The time of a dispatch or combine beyond this is the
//! library's own cost.
//!
//! ```text
//!   dispatch   own rows -> their places here, or scratch for other nodes | relayed rows: scratch -> their places here
//!   combine    relayed rows, or their partial sums -> scratch | rows here, and scratch for returned rows -> sums
//! ```
//!
//! Rows for other nodes are written to scratch of this rank, and sums over their rows read scratch.
//! So each byte of the plan is written once, on one side of the network. Between machines as many
//! bytes are sent instead, in bare writes to memory that no rank reads ([`RawWrites`]).

use std::sync::Arc;

use super::net::is_copied;
use super::{Lanes, MappedWindow, Port};
use crate::dtype::PartialDtype;
use crate::error::{Error, LaneError};
use crate::plan::{Bins, DispatchLayout, RelayPlan, RowBuffer, RowRun, Summand};
use crate::rows::{Arithmetic, GroupedSum, RowKernels, Stores, SumOutput};
use crate::schedule::{SumOperands, WindowId};
use crate::topology::Route;

/// The moves of a dispatch and its combine.
#[derive(Clone, Copy, Debug)]
pub struct Moves<'a> {
    /// This rank's own rows.
    pub layout: &'a DispatchLayout,
    /// The rows that it relays.
    pub forward: &'a RelayPlan,
    /// The bins that rows are counted by.
    pub bins: &'a Bins,
    /// Bytes of a row that goes out.
    pub row_bytes: u64,
    /// Bytes of a row that returns.
    pub return_bytes: u64,
    /// Bytes of a partial sum, where relays sum.
    pub partial_bytes: Option<u64>,
    /// Per rank, where rows land in its pool.
    pub landing: &'a [u64],
    /// The sum of what comes back, each chunk where its owner offers it.
    pub sum: SumOperands<'a>,
    /// [`RAW`] bytes at each rank, for traffic to other machines.
    pub scratch: &'a MappedWindow,
}

/// A call's moves, ready to run. It keeps the port alive, since it holds addresses of the port's
/// windows. A caller that runs it must exclusively hold the extents that it was built from.
#[derive(Debug)]
pub struct Floor {
    _port: Arc<Port>,
    /// Memory that is read and written in place of other nodes' memory.
    _scratch: Scratch,
    kernels: RowKernels,
    row_bytes: usize,
    return_bytes: usize,
    input_rows: usize,
    runs: Vec<FloorRun>,
    rows: Vec<u32>,
    returns: Vec<FloorCopy>,
    /// Rows for other machines in a dispatch, and in a combine.
    raw: [RawWrites; 2],
    /// Sums for other nodes, to `outbox`, one after another.
    partials: FloorSums,
    partial_bytes: usize,
    outbox: *mut u8,
    tokens: FloorSums,
}

#[derive(Debug)]
struct FloorRun {
    /// Where the rows lie; `None` for the call's input.
    from: Option<*const u8>,
    to: *mut u8,
    first: usize,
    count: usize,
    pad: usize,
}

#[derive(Debug)]
struct FloorCopy {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

/// Sums of rows, each to one row.
#[derive(Debug)]
struct FloorSums {
    terms: Vec<*const u8>,
    starts: Vec<u32>,
    groups: Vec<u32>,
    group_starts: Vec<u32>,
    wire: PartialDtype,
}

impl FloorSums {
    fn count(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Takes the sum `nth`, while the rows of the next one are fetched.
    ///
    /// # Safety
    /// `columns` elements are readable at all terms, and writable at `out`.
    unsafe fn take(
        &self,
        nth: usize,
        kernels: RowKernels,
        (dtype, columns): (Arithmetic, usize),
        (out, stores): (SumOutput, Stores),
    ) {
        let (first, last) = (self.starts[nth] as usize, self.starts[nth + 1] as usize);
        let next = self.starts.get(nth + 2).map_or(last, |&next| next as usize);
        let all = [(last - first) as u32];
        let groups = match self.groups[..] {
            [] => &all[..],
            _ => &self.groups[self.group_starts[nth] as usize..self.group_starts[nth + 1] as usize],
        };
        let (rows, wire) = (&self.terms[first..next], self.wire);
        let sum = GroupedSum { dtype, wire, out, rows, weights: None, groups, columns, stores };
        // SAFETY: the caller's.
        unsafe { kernels.grouped_sum(sum) }
    }
}

/// Memory in place of other nodes', handed out piece by piece.
#[derive(Debug, Default)]
struct Scratch {
    pieces: Vec<Vec<[u64; 8]>>,
}

impl Scratch {
    /// Written to at once, with small numbers of every type: memory that was never written is no
    /// memory yet, and reading it would cost nothing.
    fn take(&mut self, bytes: u64) -> *mut u8 {
        const NUMBERS: u64 = 0x3c00_3c00_3c00_3c00;
        self.pieces.push(vec![[NUMBERS; 8]; bytes.div_ceil(64) as usize]);
        self.pieces.last_mut().map_or(std::ptr::null_mut(), |piece| piece.as_mut_ptr().cast())
    }
}

// SAFETY: the pointers lead into mappings, and into scratch that belongs to the floor; none belongs
// to a thread.
unsafe impl Send for Floor {}

impl Port {
    /// The moves of a dispatch and its combine, ready to run. The rows of that dispatch must have
    /// landed at all ranks of this node, and no rank may write there before all have built theirs:
    /// the rows to relay are read from there.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError) if any of it lies outside its
    /// window.
    pub fn floor(self: &Arc<Self>, moves: &Moves<'_>) -> Result<Floor, Error> {
        let mut scratch = Scratch::default();
        let (mut runs, mut rows) = (Vec::new(), moves.layout.rows.clone());
        let mut raw = [(); 2].map(|()| RawWrites::new(self.shared_lanes(), moves.scratch.clone()));
        self.own_runs(moves, &mut raw[0], &mut scratch, &mut runs)?;
        self.relayed_runs(moves, &mut scratch, &mut runs, &mut rows)?;
        let returns = self.relayed_returns(moves, &mut raw[1], &mut scratch)?;
        let (sum, chunks) = (&moves.sum, self.chunks_of(moves, &mut scratch)?);
        let tokens = FloorSums {
            terms: point(sum.terms, &chunks, sum.chunks)?,
            starts: sum.starts.to_vec(),
            groups: sum.groups.to_vec(),
            group_starts: sum.group_starts.to_vec(),
            wire: if sum.groups.is_empty() { PartialDtype::F32 } else { sum.wire },
        };
        let partials = &moves.forward.partials;
        let partials = FloorSums {
            terms: point(&partials.terms, &chunks, sum.chunks)?,
            starts: partials.starts.clone(),
            groups: Vec::new(),
            group_starts: Vec::new(),
            wire: sum.wire,
        };
        let partial_bytes = moves.partial_bytes.unwrap_or(0);
        Ok(Floor {
            _port: Arc::clone(self),
            kernels: self.lanes().rows,
            row_bytes: moves.row_bytes as usize,
            return_bytes: moves.return_bytes as usize,
            input_rows: moves.layout.tokens as usize,
            runs,
            rows,
            returns,
            raw,
            outbox: scratch.take(partials.count() as u64 * partial_bytes),
            partials,
            partial_bytes: partial_bytes as usize,
            tokens,
            _scratch: scratch,
        })
    }

    fn own_runs(
        &self,
        moves: &Moves<'_>,
        raw: &mut RawWrites,
        scratch: &mut Scratch,
        runs: &mut Vec<FloorRun>,
    ) -> Result<(), Error> {
        let layout = moves.layout;
        let bytes = |run: &RowRun| u64::from(run.count + run.pad) * moves.row_bytes;
        let own = |run: &RowRun, to| FloorRun {
            from: None,
            to,
            first: run.first as usize,
            count: run.count as usize,
            pad: run.pad as usize,
        };
        if let Some(&row) = layout.rows.iter().find(|&&row| row >= layout.tokens) {
            return Err(bounds(row, layout.tokens));
        }
        let direct = layout.run_starts.last().map_or(0, |&end| end as usize);
        for peer in 0..self.lanes().ranks() {
            let to_peer = layout.runs_to(peer);
            for run in &layout.runs[to_peer.start as usize..to_peer.end as usize] {
                if raw.add(peer, bytes(run)) {
                    continue;
                }
                let offset = moves.landing[peer as usize] + u64::from(run.to_row) * moves.row_bytes;
                let to = match self.lanes().paths().same_node(peer) {
                    true => self.range(peer, WindowId::POOL, offset, bytes(run))?.cast_mut(),
                    false => scratch.take(bytes(run)),
                };
                runs.push(own(run, to));
            }
        }
        let sent = self.lanes().paths().relays().zip(&layout.blocks);
        let remote = sent.filter(|(relay, block)| raw.add(*relay, u64::from(block.rows) * moves.row_bytes));
        if remote.count() == 0 {
            runs.extend(layout.runs[direct..].iter().map(|run| own(run, scratch.take(bytes(run)))));
        }
        Ok(())
    }

    /// Relayed rows, from scratch that holds the blocks of this rank's sources: the rows that have
    /// landed.
    fn relayed_runs(
        &self,
        moves: &Moves<'_>,
        scratch: &mut Scratch,
        runs: &mut Vec<FloorRun>,
        rows: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let (paths, forward, row_bytes) = (self.lanes().paths(), moves.forward, moves.row_bytes as usize);
        if paths.route() == Route::Direct {
            return Ok(());
        }
        for (nth, block) in forward.blocks.iter().enumerate() {
            let staged = scratch.take(u64::from(block.rows) * moves.row_bytes);
            for (member, &to) in paths.served_by(paths.me()).iter().enumerate() {
                let chunks = (1..=forward.chunks()).flat_map(|chunk| forward.runs_of(nth, chunk, member));
                for run in chunks.map(|run| forward.runs[run as usize]) {
                    let offset = moves.landing[to as usize] + u64::from(run.to_row) * moves.row_bytes;
                    let len = u64::from(run.count + run.pad) * moves.row_bytes;
                    let landed = self.range(to, WindowId::POOL, offset, len)?;
                    let (first, count) = (rows.len(), run.count as usize);
                    rows.extend(forward.rows_of(run));
                    for (at, &row) in rows[first..first + count].iter().enumerate() {
                        if row >= block.rows {
                            return Err(bounds(row, block.rows));
                        }
                        // SAFETY: both rows were checked; no one writes them, as the caller
                        // promises.
                        unsafe {
                            let (to, from) =
                                (staged.add(row as usize * row_bytes), landed.add(at * row_bytes));
                            self.lanes().rows.copy(to, from, row_bytes, Stores::Cached);
                        }
                    }
                    let (from, to) = (Some(staged.cast_const()), landed.cast_mut());
                    runs.push(FloorRun { from, to, first, count, pad: run.pad as usize });
                }
            }
        }
        Ok(())
    }

    /// Every relayed entry's row, from its rank's chunk to scratch; none where relays sum.
    fn relayed_returns(
        &self,
        moves: &Moves<'_>,
        raw: &mut RawWrites,
        scratch: &mut Scratch,
    ) -> Result<Vec<FloorCopy>, Error> {
        let (paths, row_bytes) = (self.lanes().paths(), moves.return_bytes);
        let mut returns = Vec::new();
        for (nth, (source, block)) in paths.sources().zip(&moves.forward.blocks).enumerate() {
            let bytes = match moves.partial_bytes {
                Some(partial) => {
                    let chunks = 1..=moves.forward.chunks();
                    let sums = chunks.map(|chunk| moves.forward.partials_of(nth, chunk).len() as u64);
                    sums.sum::<u64>() * partial
                }
                None => u64::from(block.entries()) * row_bytes,
            };
            if raw.add(source, bytes) || moves.partial_bytes.is_some() {
                continue;
            }
            let mut to = scratch.take(u64::from(block.entries()) * row_bytes);
            let mut segments = block.segments.iter();
            for &owner in paths.served_by(paths.me()) {
                for segment in segments.by_ref().take(moves.bins.of(owner).len()).filter(|s| s.count > 0) {
                    let offset = moves.sum.bases[owner as usize] + u64::from(segment.to_row) * row_bytes;
                    let len = u64::from(segment.count) * row_bytes;
                    let from = self.range(owner, WindowId::POOL, offset, len)?;
                    returns.push(FloorCopy { from, to, len: len as usize });
                    // SAFETY: the piece has room for all entries, one after another.
                    to = unsafe { to.add(len as usize) };
                }
            }
        }
        Ok(returns)
    }

    /// Per owner: its chunk where it offers it, or scratch in place of returned rows.
    fn chunks_of(&self, moves: &Moves<'_>, scratch: &mut Scratch) -> Result<Vec<*const u8>, Error> {
        let sum = &moves.sum;
        let chunk = |(owner, chunk): (u32, &RowBuffer)| match self.lanes().paths().same_node(owner) {
            true => Ok(self.range(owner, WindowId::POOL, sum.bases[owner as usize], chunk.bytes())?),
            false => Ok(scratch.take(chunk.bytes()).cast_const()),
        };
        (0..).zip(sum.chunks).map(chunk).collect()
    }
}

/// Points at the rows of some terms. The chunks are there as a whole.
fn point(terms: &[Summand], at: &[*const u8], chunks: &[RowBuffer]) -> Result<Vec<*const u8>, Error> {
    let row = |term: &Summand| {
        let chunk = &chunks[term.owner as usize];
        if term.row >= chunk.rows {
            return Err(bounds(term.row, chunk.rows));
        }
        // SAFETY: the row lies inside the chunk.
        Ok(unsafe { at[term.owner as usize].add(term.row as usize * chunk.row_bytes as usize) })
    };
    terms.iter().map(row).collect()
}

fn bounds(row: u32, rows: u32) -> Error {
    LaneError::SourceBounds { offset: row.into(), len: 1, size: rows.into() }.into()
}

impl Floor {
    /// Gathers all runs: own rows from `input`, `[tokens, row]`. A shorter input moves nothing.
    pub fn dispatch(&self, input: &[u8], stores: Stores) {
        if input.len() < self.input_rows * self.row_bytes {
            return;
        }
        for run in &self.runs {
            // SAFETY: targets and row indices were checked when this was built, or belong to it;
            // `input` holds all tokens.
            unsafe {
                self.kernels.gather(
                    run.to,
                    run.from.unwrap_or(input.as_ptr()),
                    self.row_bytes,
                    &self.rows[run.first..run.first + run.count],
                    stores,
                );
                self.kernels.zero(run.to.add(run.count * self.row_bytes), run.pad * self.row_bytes, stores);
            }
        }
        self.raw[0].write();
        // As a real call does it: the signal or barrier that comes next must not pass the rows.
        RowKernels::fence();
    }

    /// Sums all tokens into `output`, `[tokens, row]`. A shorter output is left as it is.
    pub fn combine(&self, dtype: Arithmetic, output: &mut [u8], stores: Stores) {
        if output.len() < self.input_rows * self.return_bytes {
            return;
        }
        for copy in &self.returns {
            // SAFETY: the source was checked when this was built, the target belongs to it.
            unsafe { self.kernels.copy(copy.to, copy.from, copy.len, stores) };
        }
        let row = (dtype, self.return_bytes / dtype.size());
        for nth in 0..self.partials.count() {
            // SAFETY: terms were checked when this was built; the outbox has room for all, one
            // after another.
            unsafe {
                let out = SumOutput::Partial(self.outbox.add(nth * self.partial_bytes));
                self.partials.take(nth, self.kernels, row, (out, stores));
            }
        }
        self.raw[1].write();
        for (token, out) in output.chunks_exact_mut(self.return_bytes).enumerate().take(self.input_rows) {
            let out = SumOutput::Total(out.as_mut_ptr());
            // SAFETY: terms were checked when this was built; `out` is one row.
            unsafe { self.tokens.take(token, self.kernels, row, (out, stores)) };
        }
        RowKernels::fence();
    }
}

/// Bytes of one write: like the chunks of a connection.
pub const RAW: u64 = 256 << 10;

/// Bare writes over the connections of a rank.
#[derive(Debug)]
struct RawWrites {
    lanes: Arc<Lanes>,
    scratch: MappedWindow,
    /// Peer and bytes.
    out: Vec<(u32, u64)>,
}

impl RawWrites {
    /// Writes to `scratch`, [`RAW`] bytes at each rank, from this rank's part of it.
    fn new(lanes: Arc<Lanes>, scratch: MappedWindow) -> Self {
        RawWrites { lanes, scratch, out: Vec::new() }
    }

    /// So many bytes more go to a rank. `false` if no connection to another machine leads there,
    /// and nothing will go.
    fn add(&mut self, to: u32, bytes: u64) -> bool {
        let connection = self.lanes.reach[to as usize].connection();
        let remote = connection.is_some_and(|connection| !is_copied(connection.lane()));
        if remote {
            match self.out.iter_mut().find(|(peer, _)| *peer == to) {
                Some((_, sum)) => *sum += bytes,
                None => self.out.push((to, bytes)),
            }
        }
        remote
    }

    /// Writes all bytes, a chunk to each peer in turn, and waits until they have landed. A
    /// connection that fails has ended the world, and the measuring rank learns of it at the next
    /// meeting.
    fn write(&self) {
        let _ = self.try_write();
    }

    fn try_write(&self) -> Result<(), Error> {
        let most = self.out.iter().map(|&(_, bytes)| bytes.div_ceil(RAW)).max().unwrap_or(0);
        let source = self.scratch.bytes(self.lanes.rank)?;
        for nth in 0..most {
            for &(to, bytes) in &self.out {
                let len = bytes.saturating_sub(nth * RAW).min(RAW);
                if let (Some(connection), true) = (self.lanes.reach[to as usize].connection(), len > 0) {
                    let target = self.scratch.target(to, 0, len)?;
                    let limits = self.lanes.limits_of(to);
                    let _ = connection.put(target, &source[..len as usize], limits);
                }
            }
        }
        for &(to, _) in &self.out {
            if let Some(connection) = self.lanes.reach[to as usize].connection() {
                let _ = connection.flush(self.lanes.limits_of(to));
            }
        }
        Ok(())
    }
}
