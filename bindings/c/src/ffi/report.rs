//! How the bytes of a dispatch went: as planned, and as counted while they moved.

use std::ffi::c_char;

use sidelane::ep::Handle as Layout;
use sidelane::exec::Moved;
use sidelane::plan::Hops;

use super::memory::short_name;
use super::objects::Handle;
use super::versioned::{OutStruct, versioned};
use super::{border, get};
use crate::Status;

/// What a rank moved.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MovedBytes {
    /// Bytes of rows copied or put within the node, own rows included.
    pub local_bytes: u64,
    /// Bytes of rows put to other nodes.
    pub rail_bytes: u64,
    /// Bytes of messages, headers, and what goes with the rows.
    pub control_bytes: u64,
    /// Rows copied, zeros included.
    pub rows: u64,
    /// Copies by which rows were moved.
    pub copies: u64,
    /// Signals raised.
    pub signals: u64,
    /// Bytes of the rows read by sums.
    pub summed_bytes: u64,
}

/// Rows, by how far they go.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct HopRows {
    /// From a rank to itself.
    pub own: u64,
    /// To other ranks of its node.
    pub local: u64,
    /// To other nodes.
    pub rail: u64,
}

/// A lane, and how many ranks it reaches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Lane {
    /// "own", "shm", the lane between nodes, or "relay": of ranks that are reached through others. Empty: no more lanes.
    pub name: [c_char; 16],
    /// Ranks.
    pub ranks: u64,
}

/// How the bytes of a dispatch went at this rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// sizeof(sidelane_report_t).
    pub size: usize,
    /// The lanes in use.
    pub lanes: [Lane; 8],
    /// What this rank moved in the dispatch.
    pub moved: MovedBytes,
    /// What of that it handed on for others.
    pub relayed: MovedBytes,
    /// What it moved in the last combine or gradient along the handle; 0 before the first.
    pub returned: MovedBytes,
    /// As planned: a row for each (token, expert) or, rank-major, each (token, rank).
    pub wanted: HopRows,
    /// As planned: rows that this rank puts, those of zeros included.
    pub put: HopRows,
    /// (token, rank) pairs whose rank is on another node.
    pub remote_ranks: u64,
    /// (token, node) pairs whose node is another.
    pub remote_nodes: u64,
    /// As planned: rows that this rank hands on to the ranks of its node.
    pub handed_on: u64,
    /// Bytes of a row that goes out.
    pub row_bytes: u64,
    /// Bytes of a row that comes home.
    pub home_row_bytes: u64,
    /// Bytes that combines and gradients along the handle copied, because rows did not lie in an output of it.
    pub copied_bytes: u64,
}
versioned!(Report, "sidelane_report_t", copied_bytes: u64);

impl From<Moved> for MovedBytes {
    fn from(moved: Moved) -> Self {
        let Moved { local_bytes, rail_bytes, control_bytes, rows, copies, signals, summed_bytes } = moved;
        MovedBytes { local_bytes, rail_bytes, control_bytes, rows, copies, signals, summed_bytes }
    }
}

impl From<Hops> for HopRows {
    fn from(Hops { own, local, rail }: Hops) -> Self {
        HopRows { own, local, rail }
    }
}

/// Says how the bytes of a dispatch went.
///
/// The caller's word: `report` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_report(handle: *mut Handle, report: *mut Report) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(report) }?;
        get(handle)?.lend(|layout| {
            out.write(report_of(layout));
            Ok(())
        })
    })
}

/// How the bytes of a dispatch went, or of an all-gather.
pub(super) fn report_of(layout: &Layout) -> Report {
    let report = layout.report();
    let mut lanes = [Lane::default(); 8];
    for (lane, used) in lanes.iter_mut().zip(&report.lanes) {
        *lane = Lane { name: short_name(used.lane), ranks: used.ranks.into() };
    }
    let traffic = report.traffic;
    Report {
        size: 0,
        lanes,
        moved: report.moved.into(),
        relayed: report.relayed.into(),
        returned: layout.returned().into(),
        wanted: traffic.wanted.into(),
        put: traffic.put.into(),
        remote_ranks: traffic.remote_ranks,
        remote_nodes: traffic.remote_nodes,
        handed_on: traffic.handed_on,
        row_bytes: traffic.row_bytes,
        home_row_bytes: traffic.home_row_bytes,
        copied_bytes: layout.copied_bytes(),
    }
}
