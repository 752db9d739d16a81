//! Compared declarations.

use std::mem::{offset_of, size_of};

use crate::ffi;

/// One number.
pub struct Row {
    /// An expression of C.
    pub what: String,
    /// The library's declarations.
    pub ours: u64,
    /// What `rdma-sys` has; none where it has nothing.
    pub theirs: Option<u64>,
}

/// Rows of a structure: its size, unless it has more fields than declared, and the offsets of its
/// fields.
macro_rules! structure {
    ($rows:ident, $name:ident { $($field:ident),* $(,)? } $(with { $($ours:ident . $($sub:ident).+ = $($theirs:ident).+),* })?) => {
        row($rows, concat!("sizeof(struct ", stringify!($name), ")"),
            size_of::<ffi::$name>(), size_of::<rdma_sys::$name>());
        structure!($rows, part of $name { $($field),* } $(with { $($ours . $($sub).+ = $($theirs).+),* })?);
    };
    ($rows:ident, part of $name:ident { $($field:ident),* $(,)? } $(with { $($ours:ident . $($sub:ident).+ = $($theirs:ident).+),* })?) => {
        $( row($rows, concat!("offsetof(struct ", stringify!($name), ", ", stringify!($field), ")"),
            offset_of!(ffi::$name, $field), offset_of!(rdma_sys::$name, $field)); )*
        $($( row($rows, concat!("offsetof(struct ", stringify!($name), ", ", stringify!($ours $(. $sub)+), ")"),
            offset_of!(ffi::$name, $ours $(. $sub)+), offset_of!(rdma_sys::$name, $($theirs).+)); )*)?
    };
}

/// Rows of constants. `in` a module of them, of flags, or of an enum.
macro_rules! constants {
    ($rows:ident, in $module:ident { $($name:ident),* $(,)? }) => {
        $( row($rows, stringify!($name), ffi::$name as usize, rdma_sys::$module::$name as usize); )*
    };
    ($rows:ident, flags $module:ident { $($name:ident),* $(,)? }) => {
        $( row($rows, stringify!($name), ffi::$name as usize, rdma_sys::$module::$name.0 as usize); )*
    };
    ($rows:ident, unknown { $($name:ident),* $(,)? }) => {
        $( $rows.push(Row { what: stringify!($name).to_owned(), ours: ffi::$name.into(), theirs: None }); )*
    };
}

fn row(rows: &mut Vec<Row>, what: &str, ours: usize, theirs: usize) {
    // `stringify!` puts blanks around the dots of a path.
    let what = what.replace(" . ", ".");
    rows.push(Row { what, ours: ours as u64, theirs: Some(theirs as u64) });
}

/// All numbers.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    structures(&mut rows);
    constants(&mut rows);
    rows
}

#[rustfmt::skip]
fn structures(rows: &mut Vec<Row>) {
    structure!(rows, part of ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors });
    structure!(rows, ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv });
    structure!(rows, ibv_device_attr {
        fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
        max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
        max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd,
        max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach,
        max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay,
        phys_port_cnt,
    });
    structure!(rows, ibv_port_attr {
        state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
        pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width,
        active_speed, phys_state, link_layer, flags, port_cap_flags2,
    });
    row(rows, "sizeof(union ibv_gid)", size_of::<ffi::ibv_gid>(), size_of::<rdma_sys::ibv_gid>());
    structure!(rows, ibv_async_event { element, event_type });
    structure!(rows, ibv_pd { context, handle });
    structure!(rows, ibv_mr { context, pd, addr, length, handle, lkey, rkey });
    structure!(rows, part of ibv_cq { context, channel, cq_context, handle, cqe });
    structure!(rows, ibv_comp_channel { context, fd, refcnt });
    structure!(rows, ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
    });
    row(rows, "offsetof(struct ibv_wc, imm_data)", offset_of!(ffi::ibv_wc, imm_data),
        offset_of!(rdma_sys::ibv_wc, imm_data_invalidated_rkey_union));
    structure!(rows, part of ibv_qp {
        context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type,
    });
    structure!(rows, ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data });
    structure!(rows, ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all });
    structure!(rows, ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class });
    structure!(rows, ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num });
    structure!(rows, ibv_qp_attr {
        qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
        ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
        max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
        rate_limit,
    });
    structure!(rows, ibv_sge { addr, length, lkey });
    structure!(rows, ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr } with {
        wr.rdma.remote_addr = wr.rdma.remote_addr,
        wr.rdma.rkey = wr.rdma.rkey,
        wr.atomic.remote_addr = wr.atomic.remote_addr,
        wr.atomic.compare_add = wr.atomic.compare_add,
        wr.atomic.swap = wr.atomic.swap,
        wr.atomic.rkey = wr.atomic.rkey
    });
    row(rows, "offsetof(struct ibv_send_wr, imm_data)", offset_of!(ffi::ibv_send_wr, imm_data),
        offset_of!(rdma_sys::ibv_send_wr, imm_data_invalidated_rkey_union));
    row(rows, "offsetof(struct ibv_send_wr, qp_type.xrc.remote_srqn)",
        offset_of!(ffi::ibv_send_wr, remote_srqn), offset_of!(rdma_sys::ibv_send_wr, qp_type));
    row(rows, "offsetof(struct ibv_send_wr, bind_mw)", offset_of!(ffi::ibv_send_wr, unused),
        offset_of!(rdma_sys::ibv_send_wr, bind_mw_tso_union));
    structure!(rows, ibv_recv_wr { wr_id, next, sg_list, num_sge });
}

#[rustfmt::skip]
fn constants(rows: &mut Vec<Row>) {
    constants!(rows, in ibv_atomic_cap { IBV_ATOMIC_NONE });
    constants!(rows, in ibv_port_state { IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE });
    constants!(rows, unknown { IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET, IBV_QPF_GRH_REQUIRED });
    constants!(rows, in ibv_mtu { IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 });
    constants!(rows, in ibv_event_type {
        IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_DEVICE_FATAL,
        IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE,
        IBV_EVENT_SM_CHANGE, IBV_EVENT_GID_CHANGE,
    });
    constants!(rows, flags ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_RELAXED_ORDERING,
    });
    constants!(rows, in ibv_wc_status {
        IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR,
        IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
        IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR,
        IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR,
    });
    constants!(rows, in ibv_wc_opcode {
        IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_FETCH_ADD, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM,
    });
    constants!(rows, flags ibv_wc_flags { IBV_WC_WITH_IMM });
    constants!(rows, in ibv_qp_type { IBV_QPT_RC });
    constants!(rows, in ibv_qp_state { IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR });
    constants!(rows, flags ibv_qp_attr_mask {
        IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV, IBV_QP_PATH_MTU,
        IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC,
        IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN,
    });
    constants!(rows, in ibv_wr_opcode {
        IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_ATOMIC_FETCH_AND_ADD,
    });
    constants!(rows, flags ibv_send_flags {
        IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_INLINE,
    });
}
