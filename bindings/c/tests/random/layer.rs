//! Calls of a layer: on the host, enqueued, and in fixed slots.

use std::ptr::{null, null_mut};

use sidelane::device::{Driver, PinnedMemory, Priority};
use sidelane_c::*;

use super::message;
use super::spoilt::{LAYER, ROOM, Spoilt, Struct};

/// A stream, and memory that its device and the host reach.
pub struct Device {
    pub stream: *mut Stream,
    memory: PinnedMemory,
    _own: sidelane::device::Stream,
}

impl Device {
    pub fn new() -> Device {
        let context = Driver::open().and_then(|driver| driver.context(0)).expect("a device");
        let own = sidelane::device::Stream::new(&context, Priority::Normal).expect("a stream");
        let memory = PinnedMemory::new(&context, 12 * ROOM).expect("memory");
        let mut stream = null_mut();
        // SAFETY: the stream lives as long as the handle; the pointer is valid.
        let borrowed = unsafe { sidelane_stream_borrow(0, own.handle(), &mut stream) };
        assert_eq!(borrowed, Status::SIDELANE_OK, "{}", message());
        Device { stream, memory, _own: own }
    }

    /// Tokens, their choices, and where their sums go: for the first experts, and as many as there
    /// is room for. Tokens are what calls before left.
    fn tensors(&self, info: &EpInfo) -> (Tensor, Routing, Tensor) {
        let at = self.memory.range().address() as usize;
        let EpInfo { hidden, top_k, dtype, record_bytes, place, .. } = *info;
        let (columns, sent) = match record_bytes {
            0 => (hidden.into(), dtype),
            bytes => (bytes, SIDELANE_DTYPE_BYTES),
        };
        let most = columns.max(hidden.into()).max(top_k.into());
        let tokens = if most < ROOM as u64 / 4 { 3 } else { 0 };
        let ids: Vec<u32> = (0..tokens).flat_map(|_| 0..top_k).collect();
        self.memory.write_words(4 * ROOM, &ids).expect("room");
        let (experts, weights) = ((at + 4 * ROOM) as *const i32, (at + 8 * ROOM) as *const f32);
        let x = Tensor { data: at as *mut _, rows: tokens, columns, dtype: sent, place };
        let sums = Tensor { columns: hidden.into(), dtype, ..x };
        (x, Routing { experts, weights, tokens, top_k, place }, sums)
    }
}

/// Settings of a layer on the host.
pub fn on_host() -> Vec<u32> {
    LAYER.to_vec()
}

/// Settings of a layer whose calls are enqueued.
pub fn planned(device: &Device) -> Vec<u32> {
    let stream = device.stream as u64;
    [&LAYER[..], &[0; 14], &[stream as u32, (stream >> 32) as u32, 1 << 20]].concat()
}

/// Settings of a layer in fixed slots on a device.
pub fn in_slots(device: &Device) -> Vec<u32> {
    let (order, layout, mode) = (SIDELANE_ORDER_RANK, SIDELANE_LAYOUT_RANK_MAJOR, SIDELANE_MODE_SLOTS);
    let (mut options, slots) = (planned(device), 16);
    options[4..][..10].copy_from_slice(&[order, 0, 0, layout, mode, slots, 0, 0, 0, slots]);
    options[20] = 0;
    options
}

/// Builds a layer of these settings, dispatches and combines.
pub fn layer(group: *mut Group, device: &Device, good: &[u32], spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<EpOptions>(good, spoilt);
    let mut ep = null_mut();
    // SAFETY: the struct is as large as any size that is read; the pointer is valid.
    let built = unsafe { sidelane_ep_build(group, options.at(), null(), &mut ep) };
    if built != Status::SIDELANE_OK {
        return vec![built];
    }
    let mut info = Struct::empty::<EpInfo>();
    let mut of_layer = Struct::new::<EpInfo>(&[], spoilt);
    let mut of_rows = Struct::new::<RowsInfo>(&[], spoilt);
    let mut of_output = Struct::new::<OutputInfo>(&[], spoilt);
    let mut of_handle = Struct::new::<HandleInfo>(&[], spoilt);
    let mut report = Struct::new::<Report>(&[], spoilt);
    let (mut rows, mut handle, mut output) = (null_mut(), null_mut(), null_mut());
    let (flag, mut active) = (spoilt.words.first().map_or(1, |&(_, word)| (word % 3) as u8), 0);
    // SAFETY: arrays are as large as is said, or not said to be there; they stay until the stream
    // was waited for.
    unsafe {
        let mut statuses = vec![built, sidelane_ep_info(ep, info.at()), sidelane_ep_mask(ep, &flag, 1)];
        assert_eq!((sidelane_ep_active(ep, &mut active, 1), active), (Status::SIDELANE_OK, 1));
        let (x, routing, sums) = device.tensors(&*info.at());
        statuses.push(sidelane_ep_dispatch(ep, &x, &routing, &mut rows, &mut handle));
        if !handle.is_null() {
            let mut asked = vec![
                sidelane_ep_info(ep, of_layer.at()),
                sidelane_rows_info(rows, of_rows.at()),
                sidelane_handle_info(handle, of_handle.at()),
                sidelane_handle_report(handle, report.at()),
            ];
            statuses.push(sidelane_handle_output(handle, &mut output));
            if !output.is_null() {
                asked.push(sidelane_output_info(output, of_output.at()));
            }
            // The same sizes, which may be none of theirs.
            let fits = |&status: &Status| status == Status::SIDELANE_OK || spoilt.size != 0;
            assert!(asked.iter().all(fits), "{asked:?}: {}", message());
            statuses.push(sidelane_ep_combine(ep, output, null(), handle, &sums));
            statuses.push(sidelane_handle_return_report(handle, null_mut()));
        }
        statuses.push(sidelane_ep_synchronize(ep));
        for closed in [sidelane_rows_close(rows), sidelane_handle_close(handle), sidelane_ep_close(ep)] {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}
