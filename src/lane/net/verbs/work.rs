//! Work requests: chains of them, made once, filled and posted again and again, one doorbell each.
//!
//! Nothing is allocated after `new`, and nothing points at anything until a chain is posted, so
//! chains may be moved. Bytes that travel inside a request are copied into the chain, so the caller
//! need not keep them. Requests are linked when they are posted.
//!
//! ```text
//!   requests   | write | write | write with immediate |  free   |
//!   pieces     | a b   | c     | d e f                |         |   `stride` places per request
//!                 ^ taken by the NIC       ^ refused: stays, first in the next post
//! ```

use std::ptr;

use super::ffi::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, ibv_recv_wr, ibv_send_atomic, ibv_send_rdma, ibv_send_target,
    ibv_send_wr, ibv_sge,
};
use super::memory::{Remote, Sge};
use crate::error::VerbsError;

bitflags::bitflags! {
    /// How a request is done.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Flags: u32 {
        /// It makes a completion. Requests before it on the same queue pair are then done too.
        const SIGNALED = IBV_SEND_SIGNALED;
        /// It waits for earlier atomics of its queue pair.
        const FENCE = IBV_SEND_FENCE;
    }
}

/// How much a chain of sends holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainCaps {
    /// Requests.
    pub requests: usize,
    /// Pieces of memory per request.
    pub sges: usize,
    /// Bytes per request that travel inside it.
    pub inline: usize,
}

/// A chain of requests to a send queue.
pub struct SendChain {
    chain: Chain<ibv_send_wr>,
    inline: Box<[u8]>,
    caps: ChainCaps,
}

// SAFETY: its pointers point to its own memory, or to memory that only NICs access.
unsafe impl Send for SendChain {}

impl SendChain {
    /// An empty chain.
    pub fn new(caps: ChainCaps) -> Self {
        // Inline bytes are one piece.
        let sges = caps.sges.max(1);
        let inline = vec![0; caps.requests * caps.inline].into_boxed_slice();
        SendChain { chain: Chain::new(caps.requests, sges), inline, caps }
    }

    /// RDMA write: the pieces, one after another, to a place in the peer's memory.
    ///
    /// # Errors
    /// [`VerbsError::ChainLimit`], as of all requests: the chain is full, or the request is too
    /// large for it.
    pub fn write(
        &mut self,
        wr_id: u64,
        sges: impl IntoIterator<Item = Sge>,
        to: Remote,
        flags: Flags,
    ) -> Result<(), VerbsError> {
        self.chain.push(request(wr_id, IBV_WR_RDMA_WRITE, rdma(to), flags), sges)
    }

    /// RDMA write of bytes that travel inside the request.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_inline(
        &mut self,
        wr_id: u64,
        bytes: &[u8],
        to: Remote,
        flags: Flags,
    ) -> Result<(), VerbsError> {
        let (nth, limit) = (self.chain.next_place()?, self.caps.inline);
        let Some(place) = self.inline[nth * limit..][..limit].get_mut(..bytes.len()) else {
            return Err(VerbsError::ChainLimit { what: "inline bytes", asked: bytes.len(), limit });
        };
        place.copy_from_slice(bytes);
        let addr = place.as_mut_ptr().expose_provenance() as u64;
        // The NIC copies it when it is posted, and needs no key.
        let piece = Sge(ibv_sge { addr, length: bytes.len() as u32, lkey: 0 });
        let mut request = request(wr_id, IBV_WR_RDMA_WRITE, rdma(to), flags);
        request.send_flags |= IBV_SEND_INLINE;
        self.chain.push(request, [piece])
    }

    /// RDMA write that takes one of the peer's receives and hands it a number. No pieces at all is
    /// allowed.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_immediate(
        &mut self,
        wr_id: u64,
        sges: impl IntoIterator<Item = Sge>,
        to: Remote,
        immediate: u32,
        flags: Flags,
    ) -> Result<(), VerbsError> {
        let mut request = request(wr_id, IBV_WR_RDMA_WRITE_WITH_IMM, rdma(to), flags);
        request.imm_data = immediate.to_be();
        self.chain.push(request, sges)
    }

    /// Adds to an aligned word of 8 bytes in the peer's memory; its previous value comes to `old`,
    /// 8 bytes here.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn fetch_add(
        &mut self,
        wr_id: u64,
        old: Sge,
        to: Remote,
        add: u64,
        flags: Flags,
    ) -> Result<(), VerbsError> {
        let atomic = ibv_send_atomic { remote_addr: to.addr, compare_add: add, swap: 0, rkey: to.rkey };
        let request = request(wr_id, IBV_WR_ATOMIC_FETCH_AND_ADD, ibv_send_target { atomic }, flags);
        self.chain.push(request, [old])
    }

    /// Sends the pieces to one of the peer's receives.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn send(
        &mut self,
        wr_id: u64,
        sges: impl IntoIterator<Item = Sge>,
        flags: Flags,
    ) -> Result<(), VerbsError> {
        let nowhere = rdma(Remote { addr: 0, rkey: 0 });
        self.chain.push(request(wr_id, IBV_WR_SEND, nowhere, flags), sges)
    }

    /// Requests that wait to be posted, and how many more it holds.
    #[cfg(test)]
    pub fn fill(&self) -> (usize, usize) {
        (self.chain.len(), self.chain.room())
    }

    /// Limits that it was made for.
    pub fn caps(&self) -> ChainCaps {
        self.caps
    }

    pub(super) fn chain(&mut self) -> &mut Chain<ibv_send_wr> {
        &mut self.chain
    }
}

/// A chain of requests to a receive queue.
pub struct ReceiveChain {
    chain: Chain<ibv_recv_wr>,
}

// SAFETY: as of `SendChain`.
unsafe impl Send for ReceiveChain {}

impl ReceiveChain {
    /// An empty chain of so many receives of so many pieces.
    pub fn new(requests: usize, sges: usize) -> Self {
        ReceiveChain { chain: Chain::new(requests, sges) }
    }

    /// A receive into these pieces. None will do for writes with immediate.
    ///
    /// # Errors
    /// [`VerbsError::ChainLimit`].
    pub fn receive(&mut self, wr_id: u64, sges: impl IntoIterator<Item = Sge>) -> Result<(), VerbsError> {
        let (next, sg_list) = (std::ptr::null_mut(), std::ptr::null_mut());
        self.chain.push(ibv_recv_wr { wr_id, next, sg_list, num_sge: 0 }, sges)
    }

    /// Receives that wait to be posted.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    pub(super) fn chain(&mut self) -> &mut Chain<ibv_recv_wr> {
        &mut self.chain
    }
}

fn request(wr_id: u64, opcode: u32, wr: ibv_send_target, flags: Flags) -> ibv_send_wr {
    ibv_send_wr {
        wr_id,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode,
        send_flags: flags.bits(),
        imm_data: 0,
        wr,
        remote_srqn: 0,
        unused: [0; 6],
    }
}

fn rdma(to: Remote) -> ibv_send_target {
    ibv_send_target { rdma: ibv_send_rdma { remote_addr: to.addr, rkey: to.rkey } }
}

/// A request that can be linked to the next.
pub trait Request {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32);
    fn pieces(&self) -> i32;
    fn set_next(&mut self, next: *mut Self);
}

impl Request for ibv_send_wr {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32) {
        (self.sg_list, self.num_sge) = (at, count);
    }

    fn pieces(&self) -> i32 {
        self.num_sge
    }

    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }
}

impl Request for ibv_recv_wr {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32) {
        (self.sg_list, self.num_sge) = (at, count);
    }

    fn pieces(&self) -> i32 {
        self.num_sge
    }

    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }
}

/// Requests and their pieces.
pub struct Chain<R> {
    requests: Vec<R>,
    sges: Vec<ibv_sge>,
    stride: usize,
    limit: usize,
    /// Requests at the front that a NIC has taken.
    taken: usize,
}

impl<R: Request> Chain<R> {
    fn new(limit: usize, stride: usize) -> Self {
        Chain {
            requests: Vec::with_capacity(limit),
            sges: vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; limit * stride],
            stride,
            limit,
            taken: 0,
        }
    }

    /// Requests that wait to be posted.
    fn len(&self) -> usize {
        self.requests.len() - self.taken
    }

    /// How many more there is room for.
    #[cfg(test)]
    fn room(&self) -> usize {
        self.limit - self.requests.len()
    }

    /// The place of the next request.
    fn next_place(&self) -> Result<usize, VerbsError> {
        let (used, limit) = (self.requests.len(), self.limit);
        match used < limit {
            true => Ok(used),
            false => Err(VerbsError::ChainLimit { what: "requests", asked: used + 1, limit }),
        }
    }

    fn push(&mut self, mut request: R, sges: impl IntoIterator<Item = Sge>) -> Result<(), VerbsError> {
        let (nth, limit) = (self.next_place()?, self.stride);
        let places = &mut self.sges[nth * limit..][..limit];
        let mut count = 0;
        for Sge(sge) in sges {
            let what = "pieces of memory in a request";
            *places.get_mut(count).ok_or(VerbsError::ChainLimit { what, asked: count + 1, limit })? = sge;
            count += 1;
        }
        request.set_pieces(ptr::null_mut(), count as i32);
        self.requests.push(request);
        Ok(())
    }

    /// Links what waits; null if nothing does. The pointers hold until the chain is next touched.
    pub fn link(&mut self) -> *mut R {
        let (requests, sges, len) = (self.requests.as_mut_ptr(), self.sges.as_mut_ptr(), self.requests.len());
        for nth in self.taken..len {
            // SAFETY: `nth` is a request with its pieces, and but for the last there is a next one.
            unsafe {
                let next = if nth + 1 < len { requests.add(nth + 1) } else { ptr::null_mut() };
                let request = &mut *requests.add(nth);
                request.set_next(next);
                request.set_pieces(sges.add(nth * self.stride), request.pieces());
            }
        }
        // SAFETY: it is a request.
        if self.len() == 0 { ptr::null_mut() } else { unsafe { requests.add(self.taken) } }
    }

    /// Records that the NIC refused from `bad` on; null if it took all. Returns how many it took.
    pub fn settle(&mut self, bad: *const R) -> usize {
        let waiting = self.requests[self.taken..].iter();
        let taken = waiting.take_while(|&request| !ptr::eq(request, bad)).count();
        self.taken += taken;
        if self.len() == 0 {
            self.requests.clear();
            self.taken = 0;
        }
        taken
    }
}
