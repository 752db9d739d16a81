//! Work requests: chains of them, made once, filled and posted again and again, one doorbell each.
//!
//! Nothing is allocated after `new`, and nothing points at anything until a chain is posted, so
//! chains may be moved. Bytes that travel inside a request are copied into the chain, so the caller
//! need not keep them.

use super::chain::Chain;
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
        const SIGNALLED = IBV_SEND_SIGNALED;
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
