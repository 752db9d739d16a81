//! Protection domains and registered memory.

use std::ffi::{c_uint, c_void};

use super::ibv_context;

/// A protection domain: which queue pairs may use which memory.
#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// A registered range of memory.
#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

pub const IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
pub const IBV_ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub const IBV_ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
/// Optional: a driver without it may leave it out. Only `ibv_reg_mr_iova2` and newer calls know
/// optional flags.
pub const IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

const _: () = assert!(size_of::<ibv_pd>() == 16);
const _: () = assert!(size_of::<ibv_mr>() == 48);
