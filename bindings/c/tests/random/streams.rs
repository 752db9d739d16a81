//! Calls on a stream: an exchange that is planned beside it, and one in slots.

use std::ptr::{null, null_mut};

use sidelane::device::{Driver, PinnedMemory, Priority};
use sidelane_c::*;

use super::message;
use super::spoilt::{LAYER, ROOM, Spoilt, Struct};

/// A stream, and memory that its device reaches.
pub struct Device {
    pub stream: *mut Stream,
    memory: PinnedMemory,
    _own: sidelane::device::Stream,
}

impl Device {
    pub fn new() -> Device {
        let context = Driver::open().and_then(|driver| driver.context(0)).expect("a device");
        let own = sidelane::device::Stream::new(&context, Priority::Usual).expect("a stream");
        let memory = PinnedMemory::new(&context, 12 * ROOM).expect("memory");
        let mut stream = null_mut();
        // SAFETY: the stream lives as long as the handle; the pointer is valid.
        let borrowed = unsafe { sidelane_stream_borrow(0, own.handle(), &mut stream) };
        assert_eq!(borrowed, Status::SIDELANE_OK, "{}", message());
        Device { stream, memory, _own: own }
    }

    /// Tokens and their choices, as many as there is room for: for the first experts. Tokens are what calls before left.
    fn tokens(&self, hidden: u32, top_k: u32, dtype: u32) -> (Tensor, Routing) {
        let at = self.memory.range().address() as usize;
        let fits = (hidden as usize) < ROOM / 4 && (top_k as usize) < ROOM / 4;
        let tokens = if fits { 3 } else { 0 };
        let ids: Vec<u32> = (0..tokens).flat_map(|_| 0..top_k).collect();
        self.memory.write_words(4 * ROOM, &ids).expect("room");
        let (experts, weights) = ((at + 4 * ROOM) as *const i32, (at + 8 * ROOM) as *const f32);
        let x = Tensor { data: at as *mut _, rows: tokens, columns: hidden.into(), dtype, reserved: 0 };
        (x, Routing { experts, weights, tokens, top_k, reserved: 0 })
    }
}

/// Builds an exchange beside a stream, dispatches and combines.
pub fn planned(group: *mut Group, device: &Device, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<EpOptions>(&LAYER, spoilt);
    let mut more = Struct::new::<PlannedOptions>(&[1 << 20], spoilt);
    let mut exchange = null_mut();
    // SAFETY: as in `layer`; the memory of tensors stays until the stream is waited for.
    unsafe {
        let built =
            sidelane_planned_build(group, options.at(), null(), more.at(), device.stream, &mut exchange);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let options = *options.at::<EpOptions>();
        let (x, routing) = device.tokens(options.hidden, options.top_k, options.dtype);
        let mut info = Struct::new::<PlannedInfo>(&[], spoilt);
        let mut of_rows = Struct::new::<PlannedRowsInfo>(&[], spoilt);
        let mut of_handle = Struct::new::<PlannedHandleInfo>(&[], spoilt);
        let mut report = Struct::new::<PlannedReport>(&[], spoilt);
        let (mut dispatch, mut combine) = (null_mut(), null_mut());
        let (mut rows, mut handle, mut output) = (null_mut(), null_mut(), null_mut());
        let started = sidelane_planned_dispatch_start(exchange, &x, &routing, &mut dispatch);
        let mut statuses = vec![built, started];
        if started == Status::SIDELANE_OK {
            statuses.push(sidelane_planned_dispatch_finish(dispatch, &mut rows, &mut handle));
        }
        if !handle.is_null() {
            statuses.push(sidelane_planned_handle_output(handle, &mut output));
            statuses.push(sidelane_planned_combine(exchange, output, handle, &x, &mut combine));
            statuses.push(sidelane_planned_combine_finish(combine, null_mut()));
            let asked = [
                sidelane_planned_info(exchange, info.at()),
                sidelane_planned_rows_info(rows, of_rows.at()),
                sidelane_planned_handle_info(handle, of_handle.at()),
                sidelane_planned_handle_report(handle, report.at()),
            ];
            // The same sizes, which may be none of theirs.
            assert!(asked.iter().all(|&status| status == Status::SIDELANE_OK || spoilt.size != 0));
        }
        for closed in [
            sidelane_planned_rows_close(rows),
            sidelane_planned_handle_close(handle),
            sidelane_planned_close(exchange),
        ] {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}

/// Builds an exchange in slots, dispatches and combines.
pub fn slots(group: *mut Group, device: &Device, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<SlotsOptions>(&LAYER, spoilt);
    let mut exchange = null_mut();
    // SAFETY: as in `planned`.
    unsafe {
        let built = sidelane_slots_build(group, options.at(), null(), device.stream, &mut exchange);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let options = *options.at::<SlotsOptions>();
        let (x, routing) = device.tokens(options.hidden, options.top_k, options.dtype);
        let mut info = Struct::new::<SlotsInfo>(&[], spoilt);
        let mut report = Struct::new::<SlotsReport>(&[], spoilt);
        let started = sidelane_slots_dispatch_start(exchange, device.stream, &x, &routing);
        let mut statuses = vec![built, started];
        if started == Status::SIDELANE_OK {
            statuses.push(sidelane_slots_dispatch_finish(exchange, device.stream));
            statuses.push(sidelane_slots_combine_start(exchange, device.stream));
            statuses.push(sidelane_slots_combine_finish(exchange, device.stream, &x));
            statuses.push(sidelane_slots_synchronize(exchange, device.stream));
        }
        let asked = [sidelane_slots_info(exchange, info.at()), sidelane_slots_report(exchange, report.at())];
        assert!(asked.iter().all(|&status| status == Status::SIDELANE_OK || spoilt.size != 0));
        assert_eq!(sidelane_slots_close(exchange), Status::SIDELANE_OK);
        statuses
    }
}
