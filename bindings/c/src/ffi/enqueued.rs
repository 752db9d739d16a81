//! How the bytes of calls on streams went.

use std::ffi::c_char;

use sidelane::ep::StreamReport;
use sidelane::ep::planned::PlannedReport as Said;
use sidelane::exec::Enqueued;
use sidelane::world::{Detour, Registration};

use super::memory::short_name;
use super::objects::{PlannedHandle, Slots};
use super::report::Lane;
use super::versioned::{OutStruct, versioned};
use super::{border, get};
use crate::Status;

/// What a stream, and rails beside it, were asked to do.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct EnqueuedWork {
    /// Calls that enqueued a batch of copies.
    pub batches: u64,
    /// Copies, in batches or one by one.
    pub copies: u64,
    /// Bytes of rows and of what goes with them, zeros included.
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
    /// Bytes that left the device by memory of the host, on the way to other nodes; not among `bytes`.
    pub out_bytes: u64,
    /// Bytes that came in by memory of the host, zeros included; not among `bytes`.
    pub in_bytes: u64,
    /// Puts on rails.
    pub rail_puts: u64,
    /// Their bytes, headers and messages among them.
    pub rail_bytes: u64,
    /// Signals over rails.
    pub rail_signals: u64,
    /// Of the puts, those of rows that cards read from memory of a device and wrote to that of another.
    pub straight_puts: u64,
    /// Their bytes.
    pub straight_bytes: u64,
}

/// The name of a kernel; empty: no more kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelName {
    /// It ends with a zero byte.
    pub name: [c_char; 32],
}

/// How the bytes of one call of an exchange beside a stream went at this rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlannedReport {
    /// sizeof(sidelane_planned_report_t).
    pub size: usize,
    /// The lanes in use; "copy engine" is that within the node.
    pub lanes: [Lane; 8],
    /// Why rows that cross go by memory of the host, if any do: the lane that registers memory of the host alone, "messages" (signals
    /// are), "card" (it does not take the device's memory), "unordered" (the device sees no order of what cards write),
    /// "one queue" (CUDA_DEVICE_MAX_CONNECTIONS is 1), "another rank".
    pub detour: [c_char; 16],
    /// What the planner's stream was asked to do.
    pub enqueued: EnqueuedWork,
    /// Kernels that ran on the caller's stream: before rows were packed, or after they had landed.
    pub kernels: [KernelName; 4],
    /// How cards know the device's memory, where rows cross straight from it and to it: "dma-buf" or "address".
    pub registration: [c_char; 16],
}
versioned!(PlannedReport, "sidelane_planned_report_t", registration: [c_char; 16]);

/// What a dispatch and a combine in slots ask of a stream.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SlotsReport {
    /// sizeof(sidelane_slots_report_t).
    pub size: usize,
    /// Between packed and landed.
    pub dispatch: EnqueuedWork,
    /// Between the experts' rows and the sum.
    pub combine: EnqueuedWork,
    /// Kernels, none of them in between.
    pub kernels: [KernelName; 4],
    /// Ranks on this rank's own device. Multiprocessors make the copies to them, but for batches
    /// from CUDA 13.1 on.
    pub same_device: u64,
    /// Why rows that cross go by memory of the host, if any do: as of a planned report.
    pub detour: [c_char; 16],
    /// How cards know the device's memory, where rows cross straight.
    pub registration: [c_char; 16],
}
versioned!(SlotsReport, "sidelane_slots_report_t", registration: [c_char; 16]);

impl From<Enqueued> for EnqueuedWork {
    fn from(work: Enqueued) -> Self {
        EnqueuedWork {
            batches: work.batches,
            copies: work.copies,
            bytes: work.bytes,
            own_bytes: work.own_bytes,
            single_copies: work.single_copies,
            copies_by_sms: work.copies_by_sms,
            memory_operations: work.memory_operations,
            out_bytes: work.out_bytes,
            in_bytes: work.in_bytes,
            rail_puts: work.rail_puts,
            rail_bytes: work.rail_bytes,
            rail_signals: work.rail_signals,
            straight_puts: work.straight_puts,
            straight_bytes: work.straight_bytes,
        }
    }
}

fn names(kernels: &[&str]) -> [KernelName; 4] {
    let mut names = [KernelName::default(); 4];
    for (name, kernel) in names.iter_mut().zip(kernels) {
        name.name = short_name(kernel);
    }
    names
}

pub(super) fn planned_report(said: &Said) -> PlannedReport {
    let mut lanes = [Lane::default(); 8];
    for (lane, used) in lanes.iter_mut().zip(&said.lanes) {
        *lane = Lane { name: short_name(used.lane), ranks: used.ranks.into() };
    }
    PlannedReport {
        size: 0,
        lanes,
        detour: short_name(said.detour.map_or("", Detour::name)),
        enqueued: said.enqueued.into(),
        kernels: names(said.kernels),
        registration: short_name(said.registration.map_or("", Registration::name)),
    }
}

/// Says how the bytes of a dispatch went. Waits until its rows have landed.
///
/// The caller's word: `report` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_handle_report(
    handle: *mut PlannedHandle,
    report: *mut PlannedReport,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(report) }?;
        let said = get(handle)?.lend(|layout| Ok(layout.held().report()?))?;
        out.write(planned_report(&said));
        Ok(())
    })
}

/// Says what a dispatch and a combine in slots ask of a stream.
///
/// The caller's word: `report` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_slots_report(slots: *mut Slots, report: *mut SlotsReport) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(report) }?;
        let said: StreamReport = get(slots)?.seat.lend(|exchange| Ok(exchange.report()))?;
        out.write(SlotsReport {
            size: 0,
            dispatch: said.dispatch.into(),
            combine: said.combine.into(),
            kernels: names(&said.kernels),
            same_device: said.same_device.into(),
            detour: short_name(said.detour.map_or("", Detour::name)),
            registration: short_name(said.registration.map_or("", Registration::name)),
        });
        Ok(())
    })
}
