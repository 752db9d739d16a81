//! How the bytes of a dispatch or of a return went: as planned, and as counted.

use std::ffi::c_char;

use sidelane::ep::{CallExecutor, Handle as Layout, MAX_KERNELS, Report as Said};
use sidelane::exec::{EnqueueCounts, TransferCounts};
use sidelane::plan::RowsByDistance;

use super::memory::short_name;
use super::objects::Handle;
use super::versioned::{OutStruct, versioned};
use super::{border, get};
use crate::Status;
use crate::fault::Fault;

/// Traffic of a rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MovedBytes {
    /// Bytes of rows copied or put within the node, own rows included.
    pub intra_node_bytes: u64,
    /// Bytes of rows put to other nodes.
    pub inter_node_bytes: u64,
    /// Bytes of messages, headers, and row metadata.
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
    pub remote: u64,
}

/// A lane, and how many ranks it reaches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Lane {
    /// "own", "shm", "copy engine" (that of devices within a node), the lane between nodes, or
    /// "relay": of ranks that are reached through others. Empty: no more lanes.
    pub name: [c_char; 16],
    /// Ranks.
    pub ranks: u64,
}

/// Requests to a stream, and to nets next to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct EnqueuedWork {
    /// Calls that enqueued a batch of copies.
    pub batches: u64,
    /// Copies, in batches or one by one.
    pub copies: u64,
    /// Bytes of rows and of their metadata, zeros included.
    pub bytes: u64,
    /// Of these, bytes that stayed at this rank.
    pub own_bytes: u64,
    /// Copies that were enqueued one by one: the driver has no batches, or the stream takes none.
    pub single_copies: u64,
    /// Copies within one device that multiprocessors make: single ones, and before CUDA 13.1 those
    /// of batches, too.
    pub copies_by_sms: u64,
    /// Memory operations: writes and waits.
    pub memory_operations: u64,
    /// Kernels that summed rows for other nodes.
    pub relay_sums: u64,
    /// Bytes that left the device by memory of the host, on the way to other nodes; not among
    /// `bytes`.
    pub staged_out_bytes: u64,
    /// Bytes that came in by memory of the host, zeros included; not among `bytes`.
    pub staged_in_bytes: u64,
    /// Puts to other nodes.
    pub inter_node_puts: u64,
    /// Their bytes, headers and messages among them.
    pub inter_node_bytes: u64,
    /// Signals to other nodes.
    pub inter_node_signals: u64,
    /// Puts by GPUDirect among them: NICs read rows from device memory and wrote them to that of
    /// another.
    pub gpu_direct_puts: u64,
    /// Their bytes.
    pub gpu_direct_bytes: u64,
}

/// The name of a kernel; empty: no more kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelName {
    /// It ends with a zero byte.
    pub name: [c_char; 32],
}

/// Bytes of one call at this rank: of a dispatch, or of a return. The host counts the bytes that it
/// moved, a device the requests to its stream; the other fields are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// sizeof(sidelane_report_t).
    pub size: usize,
    /// The lanes in use.
    pub lanes: [Lane; 8],
    /// Host: what this rank moved in the call.
    pub moved: MovedBytes,
    /// Host: the part of it that this rank relayed.
    pub relayed: MovedBytes,
    /// Host: traffic of the last combine or gradient along the handle; 0 before the first.
    pub returned: MovedBytes,
    /// As planned: a row for each (token, expert) or, rank-major, each (token, rank).
    pub logical: HopRows,
    /// As planned: rows that this rank puts, those of zeros included.
    pub sent: HopRows,
    /// (token, rank) pairs whose rank is on another node.
    pub remote_ranks: u64,
    /// (token, node) pairs whose node is another.
    pub remote_nodes: u64,
    /// As planned: rows that this rank relays to the ranks of its node.
    pub relayed_rows: u64,
    /// Bytes of a row that goes out.
    pub row_bytes: u64,
    /// Bytes of a returned row.
    pub combine_row_bytes: u64,
    /// Bytes that combines and gradients along the handle copied, because rows did not lie in one
    /// of its outputs.
    pub copied_bytes: u64,
    /// What carried the call out: as in sidelane_ep_info_t.
    pub executor: [c_char; 24],
    /// Device: requests to the stream.
    pub enqueued: EnqueuedWork,
    /// Device: kernels that ran on the stream before rows were packed, or after they had landed.
    pub kernels: [KernelName; 6],
    /// Device, fixed slots: other ranks on this rank's own device.
    pub same_device: u64,
    /// Device: why rows between nodes are staged in host memory, if they are: the lane that
    /// registers host memory alone, "nic" (the NIC does not take the device's memory), "unordered"
    /// (the device sees no order in the NICs' writes), "one queue" (CUDA_DEVICE_MAX_CONNECTIONS is
    /// 1), "another rank".
    pub host_staged: [c_char; 16],
    /// Device: how NICs address device memory where rows between nodes move by GPUDirect: "dma-buf"
    /// or "address".
    pub registration: [c_char; 16],
    /// Device: limit on the blocks of each kernel (sidelane_ep_options_t.max_blocks); 0: none.
    pub max_blocks: u64,
    /// Device, calls that the caller finishes: bytes of it that each open handle takes, beside rows
    /// and outputs.
    pub handle_bytes: u64,
}
// Structs of the sizes between held shorter counts, so none of them begins this one.
versioned!(Report, "sidelane_report_t", handle_bytes: u64, 464);

/// Structs of C that mirror counts of the library, which are all u64. A count that the library
/// gains stops the build here until its mirror and this list have it.
macro_rules! mirrored {
    ($($counts:ident => $mirror:ident { $($field:ident),+ $(,)? })+) => {$(
        const _: () = assert!(size_of::<$counts>() == size_of::<$mirror>(), "a count without its mirror");

        impl From<$counts> for $mirror {
            fn from(counts: $counts) -> Self {
                $mirror { $($field: counts.$field),+ }
            }
        }
    )+};
}

mirrored! {
    TransferCounts => MovedBytes {
        intra_node_bytes, inter_node_bytes, control_bytes, rows, copies, signals, summed_bytes,
    }
    RowsByDistance => HopRows { own, local, remote }
    EnqueueCounts => EnqueuedWork {
        batches, copies, bytes, own_bytes, single_copies, copies_by_sms, memory_operations, relay_sums,
        staged_out_bytes, staged_in_bytes, inter_node_puts, inter_node_bytes, inter_node_signals,
        gpu_direct_puts, gpu_direct_bytes,
    }
}

/// Says how the bytes of a dispatch went.
///
/// The caller guarantees: `report` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_report(handle: *mut Handle, report: *mut Report) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(report) }?;
        get(handle)?.lend(|layout| {
            out.write(report_of(layout)?);
            Ok(())
        })
    })
}

/// Says how the last combine or gradient along the handle went. On a device it returns the refusal
/// of the call, on any rank: its sums are zeros then. Ask before another combine along the
/// handle is enqueued.
///
/// The caller guarantees: `report` is NULL (then nothing is written), or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_return_report(handle: *mut Handle, report: *mut Report) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = (!report.is_null()).then(|| unsafe { OutStruct::new(report) }).transpose()?;
        get(handle)?.lend(|layout| {
            let said = layout.return_report()?;
            out.into_iter().for_each(|out| out.write(written(layout, &said, said.moved)));
            Ok(())
        })
    })
}

/// How the bytes of a dispatch went, or of an all-gather.
pub(super) fn report_of(layout: &Layout) -> Result<Report, Fault> {
    let said = layout.report()?;
    // A device's last return has a report of its own, which may have to be waited for.
    let returned = match said.executor {
        CallExecutor::HostStepper => layout.return_report()?.moved,
        _ => TransferCounts::default(),
    };
    Ok(written(layout, &said, returned))
}

/// A report as C reads it.
fn written(layout: &Layout, said: &Said, returned: TransferCounts) -> Report {
    // The report has as many places: cbindgen reads numbers alone, so it says theirs itself.
    let (mut lanes, mut kernels) = ([Lane::default(); 8], [KernelName::default(); MAX_KERNELS]);
    for (lane, used) in lanes.iter_mut().zip(&said.lanes) {
        *lane = Lane { name: short_name(used.lane), ranks: used.ranks.into() };
    }
    for (kernel, name) in kernels.iter_mut().zip(&said.kernels) {
        kernel.name = short_name(name);
    }
    let traffic = said.traffic;
    Report {
        size: 0,
        lanes,
        moved: said.moved.into(),
        relayed: said.relayed.into(),
        returned: returned.into(),
        logical: traffic.logical.into(),
        sent: traffic.sent.into(),
        remote_ranks: traffic.remote_ranks,
        remote_nodes: traffic.remote_nodes,
        relayed_rows: traffic.relayed,
        row_bytes: traffic.row_bytes,
        combine_row_bytes: traffic.combine_row_bytes,
        copied_bytes: layout.copied_bytes(),
        executor: short_name(said.executor.name()),
        enqueued: said.enqueued.into(),
        kernels,
        same_device: said.same_device.into(),
        host_staged: short_name(said.host_staged().unwrap_or("")),
        registration: short_name(said.registration().unwrap_or("")),
        max_blocks: said.max_blocks.unwrap_or(0).into(),
        handle_bytes: said.handle_bytes,
    }
}
