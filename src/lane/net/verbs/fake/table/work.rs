//! Posting.

use std::ffi::c_int;
use std::ptr;

use rustix::io::Errno;

use super::{open, state};
use crate::lane::net::verbs::fake::state::Job;
use crate::lane::net::verbs::ffi::*;

unsafe fn pieces(list: *mut ibv_sge, len: c_int) -> Vec<ibv_sge> {
    // SAFETY: the caller's list.
    (0..len as usize).map(|at| unsafe { *list.add(at) }).collect()
}

unsafe fn job(wr: &ibv_send_wr) -> Job {
    // SAFETY: the request's own list, and the target that its opcode has.
    let (pieces, wr_to) = unsafe { (pieces(wr.sg_list, wr.num_sge), wr.wr) };
    let (addr, rkey, add) = match wr.opcode {
        // SAFETY: as above.
        IBV_WR_ATOMIC_FETCH_AND_ADD => unsafe {
            (wr_to.atomic.remote_addr, wr_to.atomic.rkey, wr_to.atomic.compare_add)
        },
        // SAFETY: as above.
        _ => unsafe { (wr_to.rdma.remote_addr, wr_to.rdma.rkey, 0) },
    };
    let inline = (wr.send_flags & IBV_SEND_INLINE != 0).then(|| {
        let mut bytes = Vec::new();
        for piece in &pieces {
            let at: *const u8 = ptr::with_exposed_provenance(piece.addr as usize);
            // SAFETY: what travels inside a request is readable when it is posted.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at, piece.length as usize) });
        }
        bytes
    });
    let (wr_id, opcode, flags, immediate) = (wr.wr_id, wr.opcode, wr.send_flags, wr.imm_data);
    Job { wr_id, opcode, flags, immediate, addr, rkey, add, pieces, inline, not_ready: false }
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let (mut state, card) = (state(context), open(context).card);
    state.cards[card].statistics.doorbells += 1;
    let gone = state.cards[card].gone;
    let mut answer = 0;
    // SAFETY: a chain of requests that ends with a null.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: as above.
        let job = unsafe { job(request) };
        let inline = job.inline.as_ref().map_or(0, Vec::len);
        let pair = state.pair(qp_num);
        let refusal = match () {
            _ if gone => Some(Errno::IO),
            _ if !matches!(pair.state, IBV_QPS_RTS | IBV_QPS_ERR) => Some(Errno::INVAL),
            _ if job.pieces.len() > pair.cap.max_send_sge as usize => Some(Errno::INVAL),
            _ if inline > pair.cap.max_inline_data as usize => Some(Errno::INVAL),
            _ if pair.used == pair.cap.max_send_wr => Some(Errno::NOMEM),
            _ => None,
        };
        if let Some(errno) = refusal {
            // SAFETY: the caller's place.
            unsafe { *bad = wr };
            answer = errno.raw_os_error();
            break;
        }
        pair.used += 1;
        pair.jobs.push_back(job);
        state.cards[card].statistics.requests += 1;
        wr = request.next;
    }
    let now = state.pair(qp_num).state;
    match now {
        IBV_QPS_ERR => state.fail(qp_num),
        _ if !state.held => state.run(qp_num),
        _ => {}
    }
    answer
}

pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let (mut state, card) = (state(context), open(context).card);
    let gone = state.cards[card].gone;
    let mut answer = 0;
    // SAFETY: a chain of requests that ends with a null.
    while let Some(request) = unsafe { wr.as_ref() } {
        let pair = state.pair(qp_num);
        let refusal = match () {
            _ if gone => Some(Errno::IO),
            _ if pair.state == 0 || request.num_sge > pair.cap.max_recv_sge as c_int => Some(Errno::INVAL),
            _ if pair.receives.len() == pair.cap.max_recv_wr as usize => Some(Errno::NOMEM),
            _ => None,
        };
        if let Some(errno) = refusal {
            // SAFETY: the caller's place.
            unsafe { *bad = wr };
            answer = errno.raw_os_error();
            break;
        }
        // SAFETY: the request's own list.
        pair.receives.push_back((request.wr_id, unsafe { pieces(request.sg_list, request.num_sge) }));
        state.cards[card].statistics.receives += 1;
        wr = request.next;
    }
    let (now, partner) = (state.pair(qp_num).state, state.pair(qp_num).partner);
    match now {
        IBV_QPS_ERR => state.fail(qp_num),
        _ if !state.held => state.run(partner),
        _ => {}
    }
    answer
}
