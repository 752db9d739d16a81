//! Calls on the host: a layer, and a collective.

use std::ptr::{null, null_mut};

use sidelane_c::*;

use super::spoilt::{LAYER, ROOM, Spoilt, Struct};

/// Builds a layer, dispatches and combines.
pub fn layer(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<EpOptions>(&LAYER, spoilt);
    let mut ep = null_mut();
    // SAFETY: the struct is as large as any size that is read; the pointer is valid.
    let built = unsafe { sidelane_ep_build(group, options.at(), null(), &mut ep) };
    if built != Status::SIDELANE_OK {
        return vec![built];
    }
    let mut info = Struct::empty::<EpInfo>();
    let mut statuses = Vec::new();
    // SAFETY: arrays are as large as is said; what is dispatched fits them, or is not said to be there.
    unsafe {
        statuses.push(sidelane_ep_info(ep, info.at()));
        let info = *info.at::<EpInfo>();
        let mut data = vec![0_u64; ROOM];
        let columns = if info.record_bytes > 0 { info.record_bytes } else { info.hidden.into() };
        let tokens = 3_u64;
        let fits = columns < ROOM as u64 && u64::from(info.top_k) < ROOM as u64 / tokens;
        let tokens = if fits { tokens } else { 0 };
        let ids: Vec<i32> = (0..tokens).flat_map(|_| 0..info.top_k as i32).collect();
        let weights = vec![0.5_f32; ids.len()];
        let routing = Routing {
            experts: ids.as_ptr(),
            weights: weights.as_ptr(),
            tokens,
            top_k: info.top_k,
            reserved: 0,
        };
        let dtype = if info.record_bytes > 0 { SIDELANE_DTYPE_BYTES } else { info.dtype };
        let x = Tensor { data: data.as_mut_ptr().cast(), rows: tokens, columns, dtype, reserved: 0 };
        let (mut rows, mut handle, mut output) = (null_mut(), null_mut(), null_mut());
        let dispatched = sidelane_ep_dispatch(ep, &x, &routing, &mut rows, &mut handle);
        statuses.push(dispatched);
        if dispatched == Status::SIDELANE_OK {
            let room = tokens * u64::from(info.hidden);
            let mut sums = vec![0_u64; room as usize / 2 + 1];
            let columns = u64::from(info.hidden);
            let y = Tensor {
                data: sums.as_mut_ptr().cast(),
                rows: tokens,
                columns,
                dtype: info.dtype,
                reserved: 0,
            };
            statuses.push(sidelane_handle_output(handle, &mut output));
            statuses.push(sidelane_ep_combine(ep, output, null(), handle, &y));
            assert_eq!(sidelane_rows_close(rows), Status::SIDELANE_OK);
            assert_eq!(sidelane_handle_close(handle), Status::SIDELANE_OK);
        }
        assert_eq!(sidelane_ep_close(ep), Status::SIDELANE_OK);
    }
    statuses
}

/// Builds a collective, gathers and sums.
pub fn collective(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<CollectiveOptions>(&[8, SIDELANE_DTYPE_F32], spoilt);
    let mut collective = null_mut();
    // SAFETY: as in `layer`.
    unsafe {
        let built = sidelane_collective_build(group, options.at(), &mut collective);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let CollectiveOptions { columns, dtype, segments, .. } = *options.at();
        let fits = (columns as usize) < ROOM && (segments as usize) < ROOM / columns.max(1) as usize;
        let count = if fits { u64::from(segments.max(1)) } else { 0 };
        let mut data = vec![0_u64; ROOM];
        let mine = Tensor {
            data: data.as_mut_ptr().cast(),
            rows: count,
            columns: columns.into(),
            dtype,
            reserved: 0,
        };
        let (mut rows, mut shares, mut output) = (null_mut(), null_mut(), null_mut());
        let gathered = sidelane_all_gather(collective, &mine, &mut rows, &mut shares);
        let mut statuses = vec![built, gathered];
        if gathered == Status::SIDELANE_OK {
            let mut info = Struct::new::<SharesInfo>(&[], spoilt);
            let asked = sidelane_shares_info(shares, info.at());
            assert!(asked == Status::SIDELANE_OK || spoilt.size != 0);
            statuses.push(sidelane_shares_output(shares, &mut output));
            let summed = sidelane_reduce_scatter(collective, output, null(), shares, &mine);
            statuses.push(if dtype == SIDELANE_DTYPE_BYTES { Status::SIDELANE_OK } else { summed });
        }
        for closed in
            [sidelane_rows_close(rows), sidelane_shares_close(shares), sidelane_collective_close(collective)]
        {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}
