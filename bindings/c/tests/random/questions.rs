//! Queries: of existing objects, in structs of any size, and of handles that were never given.

use std::ffi::c_char;
use std::ptr::{null, null_mut};

use sidelane_c::*;

use super::spoilt::{Spoilt, Struct};

/// Asks for information in structs of any size.
pub fn infos(world: *mut World, group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut of_world = Struct::new::<WorldInfo>(&[], spoilt);
    let mut of_group = Struct::new::<GroupInfo>(&[], spoilt);
    let mut preset = Struct::new::<RouterConfig>(&[], spoilt);
    let mut balance = Struct::new::<Balance>(&[], spoilt);
    let name: Vec<c_char> = spoilt.words.iter().map(|&(_, word)| word as c_char).chain([0]).collect();
    let (experts, top_k) = spoilt.words.first().map_or((8, 2), |&(place, word)| (word, place as u32));
    // SAFETY: the structs are as large as every size that is read or written; the name ends with a
    // zero.
    unsafe {
        vec![
            sidelane_world_info(world, of_world.at()),
            sidelane_group_info(group, of_group.at()),
            sidelane_gate_preset(name.as_ptr(), experts, top_k, preset.at()),
            sidelane_gate_preset(c"deepseek_v3".as_ptr(), experts, top_k, preset.at()),
            sidelane_balance_preset(c"tutel".as_ptr(), balance.at()),
            sidelane_world_previous_ranks(world, null_mut(), experts),
        ]
    }
}

/// Handles that were never given.
pub fn strangers(numbers: [u64; 4]) -> Vec<Status> {
    let mut info = Struct::empty::<HandleInfo>();
    let mut of_shares = Struct::empty::<SharesInfo>();
    let mut statuses = Vec::new();
    for number in numbers {
        // Of places in use: generations that are never reached, and kinds that do not exist. The
        // kind, generation and place of a living object, guessed by chance, would be its handle.
        let of_places = [number & 0x0f00_0000_0000_0fff | 1 << 55, number & 0x0fff | 0xf << 60];
        for number in [number, number >> 8, number & 0x0fff].into_iter().chain(of_places) {
            let stranger = number as usize;
            // SAFETY: a number that is no handle is refused before anything is looked at.
            let refused = unsafe {
                [
                    sidelane_handle_info(stranger as *mut Handle, info.at()),
                    sidelane_window_put(stranger as *mut Window, 0, 0, null(), 0),
                    sidelane_ep_dispatch(stranger as *mut Ep, null(), null(), null_mut(), null_mut()),
                    sidelane_dispatch_finish(stranger as *mut PendingDispatch, null_mut(), null_mut()),
                    sidelane_output_close(stranger as *mut Output),
                    sidelane_stream_close(stranger as *mut Stream),
                    sidelane_ep_dispatch_start(stranger as *mut Ep, null(), null(), null_mut()),
                    sidelane_dispatch_unfinished(stranger as *mut PendingDispatch, null_mut(), null_mut()),
                    sidelane_combine_finish(stranger as *mut PendingCombine, null()),
                    sidelane_handle_return_report(stranger as *mut Handle, null_mut()),
                    sidelane_ep_set_stream(stranger as *mut Ep, stranger as *mut Stream),
                    sidelane_ep_release(stranger as *mut Ep, stranger as *mut Handle),
                    sidelane_ep_synchronize(stranger as *mut Ep),
                    sidelane_row_partition_info(stranger as *mut RowPartition, of_shares.at()),
                    sidelane_row_collective_close(stranger as *mut RowCollective),
                    sidelane_communicator_all_reduce(stranger as *mut Communicator, null()),
                    sidelane_communicator_flush(stranger as *mut Communicator, 0),
                    sidelane_moe_forward(stranger as *mut Moe, null(), null(), null_mut()),
                    sidelane_moe_set_weights(stranger as *mut Moe, null(), null(), null()),
                    sidelane_tape_close(stranger as *mut Tape),
                ]
            };
            for status in refused {
                assert!(number == 0 || status == Status::SIDELANE_ERROR_HANDLE, "{number:#x}: {status:?}");
            }
            statuses.extend(refused);
        }
    }
    statuses
}
