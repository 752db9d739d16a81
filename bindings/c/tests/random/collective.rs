//! Calls of a collective.

use std::ptr::{null, null_mut};

use sidelane_c::*;

use super::spoilt::{ROOM, Spoilt, Struct};

/// Builds a collective, gathers and sums.
pub fn collective(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<CollectiveOptions>(&[8, SIDELANE_DTYPE_F32], spoilt);
    let mut collective = null_mut();
    // SAFETY: the struct is as large as any size that is read; arrays are as large as is said.
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
            place: SIDELANE_PLACE_HOST,
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
