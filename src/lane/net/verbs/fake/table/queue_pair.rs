//! Queue pairs: creation, states, destruction.

use std::ffi::c_int;
use std::net::Ipv6Addr;

use rustix::io::Errno;

use super::{freed, null, open, state};
use crate::lane::net::verbs::fake::state::Pair;
use crate::lane::net::verbs::ffi::*;

pub unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: made by `alloc_pd`; the caller's structure, with queues made by `create_cq`.
    let (&ibv_pd { context, handle: domain }, attr) = unsafe { (&*pd, &mut *attr) };
    // SAFETY: as above.
    let (send, receive) = unsafe { ((*attr.send_cq).handle, (*attr.recv_cq).handle) };
    let (mut state, card) = (state(context), open(context).card);
    let (limits, cap) = (&state.cards[card], attr.cap);
    let sges = cap.max_send_sge.max(cap.max_recv_sge);
    if cap.max_inline_data > limits.inline || sges > limits.sges || attr.qp_type != IBV_QPT_RC {
        return null(Errno::INVAL);
    }
    let number = state.number();
    let object = Box::into_raw(Box::new(ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: attr.qp_type,
    }));
    let pair = Pair {
        card,
        domain,
        send,
        receive,
        cap,
        state: 0,
        partner: 0,
        partner_card: card,
        rnr_retries: 0,
        jobs: Default::default(),
        receives: Default::default(),
        used: 0,
        unsignalled: 0,
        object: object.expose_provenance(),
    };
    state.pairs.insert(number, pair);
    object
}

pub unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    /// Attributes that the standard requires in each step.
    const INIT: c_int = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const RTR: c_int = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    const RTS: c_int = IBV_QP_STATE
        | IBV_QP_SQ_PSN
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC;
    // SAFETY: made by `create_qp`; the caller's structure.
    let (&ibv_qp { context, qp_num, .. }, attr) = unsafe { (&*qp, &*attr) };
    let mut state = state(context);
    // SAFETY: a GID is its bytes.
    let gid = Ipv6Addr::from(unsafe { attr.ah_attr.grh.dgid.raw });
    let there = state.cards.iter().position(|card| card.gid == gid);
    let pair = state.pair(qp_num);
    match (pair.state, attr.qp_state, mask) {
        (0, IBV_QPS_INIT, INIT) if attr.port_num == 1 => {}
        (IBV_QPS_INIT, IBV_QPS_RTR, RTR) if attr.ah_attr.is_global == 1 => match there {
            Some(card) => (pair.partner, pair.partner_card) = (attr.dest_qp_num, card),
            None => return Errno::NETUNREACH.raw_os_error(),
        },
        (IBV_QPS_RTR, IBV_QPS_RTS, RTS) => pair.rnr_retries = attr.rnr_retry,
        (_, IBV_QPS_ERR, IBV_QP_STATE) => {
            state.fail(qp_num);
            return 0;
        }
        _ => return Errno::INVAL.raw_os_error(),
    }
    pair.state = attr.qp_state;
    let partner = pair.partner;
    if !state.held {
        state.run(partner);
    }
    0
}

pub unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let answer = state(context).destroy(true, |state| state.pairs.remove(&qp_num));
    // SAFETY: as above.
    unsafe { freed(qp, answer) }
}
