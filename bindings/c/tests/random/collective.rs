//! Calls of a collective and of a communicator.

use std::ptr::{null, null_mut};

use sidelane_c::*;

use super::spoilt::{ROOM, Spoilt, Struct};

/// Builds a collective, gathers and sums.
pub fn collective(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<CollectiveOptions>(&[8, SIDELANE_DTYPE_F32], spoilt);
    let mut collective = null_mut();
    // SAFETY: the struct is as large as any size that is read; arrays are as large as is said.
    unsafe {
        let built = sidelane_row_collective_build(group, options.at(), &mut collective);
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
            let asked = sidelane_row_partition_info(shares, info.at());
            assert!(asked == Status::SIDELANE_OK || spoilt.size != 0);
            statuses.push(sidelane_row_partition_output(shares, &mut output));
            let summed = sidelane_reduce_scatter(collective, output, null(), shares, &mine);
            statuses.push(if dtype == SIDELANE_DTYPE_BYTES { Status::SIDELANE_OK } else { summed });
        }
        for closed in [
            sidelane_rows_close(rows),
            sidelane_row_partition_close(shares),
            sidelane_row_collective_close(collective),
        ] {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}

/// Builds a communicator and sums.
pub fn communicator(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<CommunicatorOptions>(&[8192], spoilt);
    let mut communicator = null_mut();
    let mut data = [1.0_f32; 8];
    let (columns, dtype) = (data.len() as u64, SIDELANE_DTYPE_F32);
    let tensor =
        Tensor { data: data.as_mut_ptr().cast(), rows: 1, columns, dtype, place: SIDELANE_PLACE_HOST };
    // SAFETY: the struct is as large as any size that is read, and the tensor as it says.
    unsafe {
        let built = sidelane_communicator_build(group, options.at(), &mut communicator);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let summed = sidelane_communicator_all_reduce(communicator, &tensor);
        let message = sidelane_communicator_send(communicator, 0, &tensor);
        assert_ne!(message, Status::SIDELANE_OK, "there is no other rank");
        assert_eq!(sidelane_communicator_close(communicator), Status::SIDELANE_OK);
        vec![built, summed, message]
    }
}
