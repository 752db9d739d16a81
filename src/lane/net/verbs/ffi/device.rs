//! NICs: devices, contexts, ports, and their events.

use std::ffi::{c_int, c_uint, c_void};

use super::{ibv_cq, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_wc};

/// A NIC in the list; only used by pointer.
#[repr(C)]
pub struct ibv_device {
    _opaque: [u8; 0],
}

/// An open NIC. Behind `num_comp_vectors` follow private fields of the library; only used by
/// pointer.
#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

/// An entry that is not used here.
type Unused = *const c_void;

/// The driver's functions. C calls them through inline functions, so the library exports no symbol
/// for them.
#[repr(C)]
pub struct ibv_context_ops {
    pub unused_before_poll_cq: [Unused; 11],
    pub poll_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, solicited_only: c_int) -> c_int>,
    pub unused_before_post_send: [Unused; 12],
    pub post_send: Option<
        unsafe extern "C" fn(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int,
    >,
    pub post_recv: Option<
        unsafe extern "C" fn(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int,
    >,
    pub unused_behind_post_recv: [Unused; 5],
}

/// Abilities of a NIC.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

pub const IBV_ATOMIC_NONE: c_uint = 0;

/// State of a port. The exported `ibv_query_port` fills all but the last fields, which stay as they
/// were.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_port_attr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

pub const IBV_PORT_DOWN: c_uint = 1;
pub const IBV_PORT_INIT: c_uint = 2;
pub const IBV_PORT_ARMED: c_uint = 3;
pub const IBV_PORT_ACTIVE: c_uint = 4;

pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

pub const IBV_MTU_256: c_uint = 1;
pub const IBV_MTU_512: c_uint = 2;
pub const IBV_MTU_1024: c_uint = 3;
pub const IBV_MTU_2048: c_uint = 4;
pub const IBV_MTU_4096: c_uint = 5;

/// An address of a port: a network part and an interface part, as they travel.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_gid {
    pub raw: [u8; 16],
    pub words: [u64; 2],
}

/// Events of a NIC that belong to no work request.
#[repr(C)]
pub struct ibv_async_event {
    pub element: ibv_async_element,
    pub event_type: c_uint,
}

/// Subject of an event, by its kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_async_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub port_num: c_int,
}

pub const IBV_EVENT_CQ_ERR: c_uint = 0;
pub const IBV_EVENT_QP_FATAL: c_uint = 1;
pub const IBV_EVENT_QP_REQ_ERR: c_uint = 2;
pub const IBV_EVENT_QP_ACCESS_ERR: c_uint = 3;
pub const IBV_EVENT_DEVICE_FATAL: c_uint = 8;

const _: () = assert!(size_of::<ibv_context_ops>() == 32 * size_of::<Unused>());
const _: () = assert!(size_of::<ibv_device_attr>() == 232);
const _: () = assert!(size_of::<ibv_port_attr>() == 52);
const _: () = assert!(size_of::<ibv_gid>() == 16);
const _: () = assert!(size_of::<ibv_async_event>() == 16);
