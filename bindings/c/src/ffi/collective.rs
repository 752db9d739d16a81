//! All-gather and reduce-scatter of rows: each other's gradient, run by the programs of dispatch
//! and combine.

use sidelane::Dtype;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{ExpertRows, RowCollective as Gathers, RowCollectiveBuilder, RowPartition as Layout};

use super::combine::Outputs;
use super::memory::{Out, slice};
use super::objects::{Group, Output, RowCollective, RowPartition, Rows};
use super::report::{Report, report_of};
use super::tensor::{Source, Target, Tensor};
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give};
use crate::fault::Fault;
use crate::handles::{ExclusiveCell, Kind};
use crate::refuse::Gathering;
use crate::words::choice;
use crate::{Status, refuse, words};

/// A `Collective`, and what the FFI boundary needs to know of it.
#[derive(Debug)]
pub struct CollectiveLayer {
    cell: ExclusiveCell<Gathers>,
    dtype: Dtype,
    columns: u64,
}

/// Sums are made over ranks.
pub const SIDELANE_NODE_SUMS_NONE: u32 = 0;
/// Per node first, then over nodes; what crosses keeps all bits of the f32 sum.
pub const SIDELANE_NODE_SUMS_F32: u32 = 1;
/// Likewise, and what crosses is rounded to bf16.
pub const SIDELANE_NODE_SUMS_BF16: u32 = 2;

/// Settings of a collective: all ranks must pass the same. 0 is the default of every field but
/// `columns`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CollectiveOptions {
    /// sizeof(sidelane_row_collective_options_t).
    pub size: usize,
    /// Elements of a row, which must be a multiple of 16 bytes.
    pub columns: u32,
    /// Their type: SIDELANE_DTYPE_... Bytes can be gathered, but not summed.
    pub dtype: u32,
    /// Number of equal parts in which the rows of a rank come: gathered rows lie by part and then
    /// by rank. Default: 1.
    pub segments: u32,
    /// The most rows of a rank. Default: 4096.
    pub max_rows: u32,
    /// How rows reach other nodes: SIDELANE_ROUTE_... With SIDELANE_ROUTE_PXN each crosses once per
    /// node.
    pub route: u32,
    /// Whether nodes sum first, over SIDELANE_ROUTE_PXN: SIDELANE_NODE_SUMS_...
    pub node_sums: u32,
}
versioned!(CollectiveOptions, "sidelane_row_collective_options_t", node_sums: u32);

/// Number of rows of each rank, and so the place of its rows among all. It may be read until the
/// shares are closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SharesInfo {
    /// sizeof(sidelane_row_partition_info_t).
    pub size: usize,
    /// Rows of each rank, [ranks].
    pub counts: *const u32,
    /// Ranks.
    pub ranks: u64,
    /// Rows of all ranks.
    pub rows: u64,
}
versioned!(SharesInfo, "sidelane_row_partition_info_t", rows: u64);

impl CollectiveOptions {
    fn apply<'g>(&self, mut builder: RowCollectiveBuilder<'g>) -> Result<RowCollectiveBuilder<'g>, Fault> {
        let sums = [
            (SIDELANE_NODE_SUMS_NONE, None),
            (SIDELANE_NODE_SUMS_F32, Some(PartialDtype::F32)),
            (SIDELANE_NODE_SUMS_BF16, Some(PartialDtype::Bf16)),
        ];
        let sums = choice("node_sums", self.node_sums, &sums, "one of SIDELANE_NODE_SUMS_NONE, _F32, _BF16")?;
        builder = builder.columns(self.columns as usize).dtype(words::dtype(self.dtype)?);
        builder = builder.route(words::route(self.route)?);
        if self.segments > 0 {
            builder = builder.segments(self.segments);
        }
        if self.max_rows > 0 {
            builder = builder.max_rows(self.max_rows);
        }
        Ok(sums.into_iter().fold(builder, RowCollectiveBuilder::node_sums))
    }
}

/// Builds a collective on a group. Collective.
///
/// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_row_collective_build(
    group: *mut Group,
    options: *const CollectiveOptions,
    collective: *mut *mut RowCollective,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, options) = unsafe { (Out::new("collective", collective)?, read(options)?) };
            Ok((out, options, options.apply(Gathers::builder(&group))?))
        };
        let (out, options, builder) = arguments().inspect_err(|_| refuse::collective(&group))?;
        let cell = ExclusiveCell::new(Kind::RowCollective, builder.build()?);
        let (dtype, columns) = (words::dtype(options.dtype)?, options.columns.into());
        give(CollectiveLayer { cell, dtype, columns }, out)
    })
}

/// Gathers the rows of all ranks, by rank, from this rank's, [rows, columns]. Ranks may have
/// different numbers of rows, or none, and exchange these numbers: the shares. Collective. The
/// caller closes both results.
///
/// The caller guarantees: pointers are NULL or valid; `mine` is as large as it says, and no other
/// thread writes to it during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_all_gather(
    collective: *mut RowCollective,
    mine: *const Tensor,
    all: *mut *mut Rows,
    shares: *mut *mut RowPartition,
) -> Status {
    border(|| {
        let layer = get(collective)?;
        // SAFETY: as the caller promised.
        let arguments = unsafe {
            let outs = Out::new("all", all).and_then(|all| Ok((all, Out::new("shares", shares)?)));
            outs.map_err(Fault::from).and_then(|outs| Ok((outs, layer.mine(mine)?)))
        };
        layer.cell.lend(|gathers| {
            let ((all, shares), mine) =
                arguments.inspect_err(|_| refuse::gathering(gathers, layer.dtype, None, Gathering::All))?;
            let (rows, layout): (ExpertRows, Layout) = gathers.all_gather(mine.lend())?;
            give(ExclusiveCell::new(Kind::Rows, rows), all)?;
            give(ExclusiveCell::new(Kind::RowPartition, layout), shares)
        })
    })
}

/// Shares that all ranks know beforehand: `counts`, [ranks], the same on all. Local: nothing is
/// exchanged.
///
/// The caller guarantees: `counts` is NULL or points to `ranks` numbers; `shares` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_row_collective_shares(
    collective: *mut RowCollective,
    counts: *const u32,
    ranks: u32,
    shares: *mut *mut RowPartition,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, counts) = unsafe { (Out::new("shares", shares)?, slice("counts", counts, ranks.into())?) };
        let layout = get(collective)?.cell.lend(|gathers| Ok(gathers.shares(counts)?))?;
        give(ExclusiveCell::new(Kind::RowPartition, layout), out)
    })
}

/// Gathers the rows of all ranks when all know the shares, so no counts are exchanged. Collective.
///
/// The caller guarantees: as sidelane_all_gather().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_all_gather_cached(
    collective: *mut RowCollective,
    mine: *const Tensor,
    shares: *mut RowPartition,
    all: *mut *mut Rows,
) -> Status {
    border(|| {
        let (layer, cell) = (get(collective)?, get(shares));
        layer.cell.lend(|gathers| {
            let call = Gathering::Along;
            let cell = cell.inspect_err(|_| refuse::gathering(gathers, layer.dtype, None, call))?;
            cell.lend(|layout| {
                // SAFETY: as the caller promised.
                let arguments = unsafe {
                    Out::new("all", all).map_err(Fault::from).and_then(|out| Ok((out, layer.mine(mine)?)))
                };
                let (out, mine) =
                    arguments.inspect_err(|_| refuse::gathering(gathers, layer.dtype, Some(layout), call))?;
                let rows = gathers.all_gather_cached(mine.lend(), layout)?;
                give(ExclusiveCell::new(Kind::Rows, rows), out)
            })
        })
    })
}

/// Sums over all ranks of this rank's rows, to `sums`, [rows of this rank, columns]: from each
/// rank's rows for all ranks, [rows of all, columns], in the layout of an all-gather along these
/// shares. Collective.
///
/// Either `output`, the buffer of sidelane_row_partition_output(), which is consumed, or `all`, a
/// tensor anywhere, which is copied once; the other is NULL. If an argument is invalid, `output`
/// stays open.
///
/// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
/// other thread uses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_reduce_scatter(
    collective: *mut RowCollective,
    output: *mut Output,
    all: *const Tensor,
    shares: *mut RowPartition,
    sums: *const Tensor,
) -> Status {
    border(|| {
        let (layer, cell) = (get(collective)?, get(shares));
        layer.cell.lend(|gathers| {
            let call = Gathering::Sum;
            let cell = cell.inspect_err(|_| refuse::gathering(gathers, layer.dtype, None, call))?;
            cell.lend(|layout| {
                let (columns, returned) = (layer.columns, layout.handle().tokens().into());
                let shape = (Some(layout.rows().into()), columns);
                // SAFETY: as the caller promised.
                let given = unsafe { Outputs::read(None, "all", shape, (output, all)) };
                let arguments = given.and_then(|given| {
                    // SAFETY: as the caller promised.
                    let sums = unsafe { Target::read(None, "sums", sums, (returned, columns)) }?;
                    given.apart_from(("sums", sums.addresses()))?;
                    Ok((given.used()?, sums))
                });
                let (all, mut sums) =
                    arguments.inspect_err(|_| refuse::gathering(gathers, layer.dtype, Some(layout), call))?;
                Ok(all.with(|all| gathers.reduce_scatter_into(all, layout, sums.lend()))?)
            })
        })
    })
}

/// Closes the collective. Rows, outputs and shares that are open stay readable. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_row_collective_close(collective: *mut RowCollective) -> Status {
    close(collective)
}

/// Says how many rows each rank has.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_row_partition_info(
    shares: *mut RowPartition,
    info: *mut SharesInfo,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(shares)?.lend(|layout| {
            let (counts, rows) = (layout.counts(), layout.rows().into());
            out.write(SharesInfo { size: 0, counts: counts.as_ptr(), ranks: counts.len() as u64, rows });
            Ok(())
        })
    })
}

/// A buffer for rows of all ranks that a reduce-scatter takes without a copy. Local.
///
/// The caller guarantees: `output` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_row_partition_output(
    shares: *mut RowPartition,
    output: *mut *mut Output,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("output", output) }?;
        let buffer = get(shares)?.lend(|layout| Ok(layout.output()?))?;
        give(ExclusiveCell::new(Kind::Output, buffer), out)
    })
}

/// Says how the rows of an all-gather went.
///
/// The caller guarantees: `report` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_row_partition_report(
    shares: *mut RowPartition,
    report: *mut Report,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(report) }?;
        get(shares)?.lend(|layout| {
            out.write(report_of(layout.handle())?);
            Ok(())
        })
    })
}

/// Closes shares. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_row_partition_close(shares: *mut RowPartition) -> Status {
    close(shares)
}

impl CollectiveLayer {
    /// This rank's rows.
    ///
    /// # Safety
    /// As [`Source::read`].
    unsafe fn mine<'a>(&self, mine: *const Tensor) -> Result<Source<'a>, Fault> {
        // SAFETY: as the caller promised.
        unsafe { Source::read(None, "mine", mine, (None, self.columns)) }
    }
}
