//! Work requests, and the pieces of memory they name.

use std::ffi::{c_int, c_uint};

/// A piece of registered memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// A request to a send queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// In network byte order; C has a union here.
    pub imm_data: u32,
    pub wr: ibv_send_target,
    pub remote_srqn: u32,
    /// Memory windows and segmentation offload, which are not used here.
    pub unused: [u64; 6],
}

/// Where a request goes, by its opcode. Sends leave it empty.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_target {
    pub rdma: ibv_send_rdma,
    pub atomic: ibv_send_atomic,
}

/// Target of a write.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// Target and operands of an atomic.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// A request to a receive queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

pub const IBV_WR_RDMA_WRITE: c_uint = 0;
pub const IBV_WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub const IBV_WR_SEND: c_uint = 2;
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;

pub const IBV_SEND_FENCE: c_uint = 1;
pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;
pub const IBV_SEND_INLINE: c_uint = 1 << 3;

const _: () = assert!(size_of::<ibv_sge>() == 16);
const _: () = assert!(size_of::<ibv_send_wr>() == 128);
const _: () = assert!(size_of::<ibv_recv_wr>() == 32);
