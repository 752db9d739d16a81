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
//!
//! **Completions.** The NIC reports work requests as done, or the reason of a failure. The
//! completion of a failed request contains its number, its queue pair and a status; the other
//! fields are not written. So the number alone identifies the request, and [`Completion::outcome`]
//! does not offer the rest.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::ffi::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, ibv_comp_channel, ibv_context_ops, ibv_cq, ibv_recv_wr,
    ibv_send_atomic, ibv_send_rdma, ibv_send_target, ibv_send_wr, ibv_sge, ibv_wc,
};
use super::library::{check_object, check_status, trace_failure};
use super::memory::{Remote, Sge};
use super::{Context, ffi};
use crate::error::{CompletionStatus, VerbsError};

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

/// A completion queue. The completion channel of its NIC, if it has one, wakes a waiter.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    context: Arc<Context>,
    channel: Option<Arc<CompletionChannel>>,
}

// SAFETY: drivers lock their queues; none belongs to a thread.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue for at least `entries` completions. Without a channel it wakes no thread.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn create(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<&Arc<CompletionChannel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        let (entries, none) = (i32::try_from(entries).unwrap_or(i32::MAX), ptr::null_mut());
        let at = channel.map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: the context lives, and so does the channel; the first vector is always there.
        let raw = unsafe { (context.functions().create_cq)(context.raw(), entries, none, at, 0) };
        let raw = check_object(raw).map_err(|errno| context.failed("ibv_create_cq", errno))?;
        Ok(Arc::new(CompletionQueue { raw, context: Arc::clone(context), channel: channel.cloned() }))
    }

    /// Takes completions, oldest first: as many as there are and `into` holds.
    ///
    /// # Errors
    /// [`VerbsError::Call`] if the queue has failed.
    pub fn poll<'a>(&self, into: &'a mut [Completion]) -> Result<&'a [Completion], VerbsError> {
        let most = i32::try_from(into.len()).unwrap_or(i32::MAX);
        let Some(poll) = self.ops().poll_cq else {
            return Err(self.context.failed("ibv_poll_cq", Errno::NOSYS.raw_os_error()));
        };
        // SAFETY: the queue lives; a completion is the driver's structure, and there are so many.
        let taken = unsafe { poll(self.raw.as_ptr(), most, into.as_mut_ptr().cast()) };
        match usize::try_from(taken) {
            Ok(taken) => Ok(&into[..taken.min(into.len())]),
            // Drivers return -1 or an errno with its sign turned.
            Err(_) => Err(self.context.failed("ibv_poll_cq", taken.saturating_neg())),
        }
    }

    /// Asks to be woken by the next completion. What came before does not wake: poll once more
    /// after arming.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn arm(&self) -> Result<(), VerbsError> {
        let Some(arm) = self.ops().req_notify_cq else {
            return Err(self.context.failed("ibv_req_notify_cq", Errno::NOSYS.raw_os_error()));
        };
        // SAFETY: the queue lives.
        check_status(unsafe { arm(self.raw.as_ptr(), 0) })
            .map_err(|errno| self.context.failed("ibv_req_notify_cq", errno))
    }

    /// What wakes a waiter, if anything does.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.channel.as_deref()
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open; its table does not change.
        unsafe { &(*self.context.raw()).ops }
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it kept it alive, so none is left. The call waits until
        // events that other threads have taken are acknowledged.
        let answer = unsafe { (self.context.functions().destroy_cq)(self.raw.as_ptr()) };
        trace_failure(self.context.name(), "ibv_destroy_cq", answer);
    }
}

/// The descriptor that wakes a waiter for the completion queues of a NIC.
#[derive(Debug)]
pub struct CompletionChannel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: a handle to an object of the kernel, locked there; it belongs to no thread.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A channel of a NIC.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn create(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = check_object(unsafe { (context.functions().create_comp_channel)(context.raw()) });
        let raw = raw.map_err(|errno| context.failed("ibv_create_comp_channel", errno))?;
        let channel = CompletionChannel { raw, context: Arc::clone(context) };
        let fd = channel.as_fd();
        let unblocked = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        unblocked.map_err(|e| context.failed("fcntl", e.raw_os_error()))?;
        Ok(Arc::new(channel))
    }

    /// Takes all events, of all its queues. Returns how many there were. A queue whose event was
    /// taken wakes again only after [`arm`](CompletionQueue::arm).
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn take_events(&self) -> Result<u64, VerbsError> {
        let functions = self.context.functions();
        let mut taken = 0;
        loop {
            let (mut cq, mut tag) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel lives and does not block.
            let answer = unsafe { (functions.get_cq_event)(self.raw.as_ptr(), &mut cq, &mut tag) };
            match check_status(answer).map_err(Errno::from_raw_os_error) {
                // An event that is not acknowledged would block the queue's destruction.
                Ok(()) => {
                    // SAFETY: the event is of this queue, which is not destroyed before this.
                    unsafe { (functions.ack_cq_events)(cq, 1) };
                    taken += 1;
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(taken),
                Err(errno) => return Err(self.context.failed("ibv_get_cq_event", errno.raw_os_error())),
            }
        }
    }
}

impl AsFd for CompletionChannel {
    /// Readable after a completion that [`arm`](CompletionQueue::arm) asked for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives and owns this descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its queues kept it alive, so none is left.
        let answer = unsafe { (self.context.functions().destroy_comp_channel)(self.raw.as_ptr()) };
        trace_failure(self.context.name(), "ibv_destroy_comp_channel", answer);
    }
}

/// Report of a NIC about one work request.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Completion(ibv_wc);

/// A work request that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The completed operation.
    pub kind: Kind,
    /// Of a receive: bytes that came.
    pub bytes: u32,
    /// Of a receive: the immediate that came with them.
    pub immediate: Option<u32>,
}

/// Operation that a NIC reports as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A send.
    Send,
    /// A write, with or without immediate.
    Write,
    /// An atomic addition.
    FetchAdd,
    /// A receive that a send took.
    Receive,
    /// A receive that a write with immediate took.
    ReceiveImmediate,
    /// Something that the lane did not ask for.
    Other(u32),
}

/// A work request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Why.
    pub status: CompletionStatus,
    /// Vendor error code.
    pub vendor: u32,
}

impl Completion {
    /// A place for a completion.
    // SAFETY: all zero is a value of this plain structure.
    pub const EMPTY: Completion = Completion(unsafe { std::mem::zeroed() });

    /// The number that the request was posted with.
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// The queue pair it was posted to.
    pub fn queue_pair(&self) -> u32 {
        self.0.qp_num
    }

    /// Whether it is done, or why it failed.
    ///
    /// # Errors
    /// [`Failed`].
    pub fn outcome(&self) -> Result<Done, Failed> {
        let wc = &self.0;
        if wc.status != ffi::IBV_WC_SUCCESS {
            return Err(Failed { status: status(wc.status), vendor: wc.vendor_err });
        }
        let kind = match wc.opcode {
            ffi::IBV_WC_SEND => Kind::Send,
            ffi::IBV_WC_RDMA_WRITE => Kind::Write,
            ffi::IBV_WC_FETCH_ADD => Kind::FetchAdd,
            ffi::IBV_WC_RECV => Kind::Receive,
            ffi::IBV_WC_RECV_RDMA_WITH_IMM => Kind::ReceiveImmediate,
            other => Kind::Other(other),
        };
        let immediate = (wc.wc_flags & ffi::IBV_WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data));
        Ok(Done { kind, bytes: wc.byte_len, immediate })
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("Completion");
        fields.field("wr_id", &self.wr_id()).field("queue_pair", &self.queue_pair());
        fields.field("outcome", &self.outcome()).finish()
    }
}

fn status(code: u32) -> CompletionStatus {
    match code {
        ffi::IBV_WC_LOC_LEN_ERR => CompletionStatus::LocalLength,
        ffi::IBV_WC_LOC_QP_OP_ERR => CompletionStatus::LocalOperation,
        ffi::IBV_WC_LOC_PROT_ERR => CompletionStatus::LocalProtection,
        ffi::IBV_WC_WR_FLUSH_ERR => CompletionStatus::Flushed,
        ffi::IBV_WC_BAD_RESP_ERR => CompletionStatus::BadResponse,
        ffi::IBV_WC_LOC_ACCESS_ERR => CompletionStatus::LocalAccess,
        ffi::IBV_WC_REM_INV_REQ_ERR => CompletionStatus::RemoteRequest,
        ffi::IBV_WC_REM_ACCESS_ERR => CompletionStatus::RemoteAccess,
        ffi::IBV_WC_REM_OP_ERR => CompletionStatus::RemoteOperation,
        ffi::IBV_WC_RETRY_EXC_ERR => CompletionStatus::RetriesExceeded,
        ffi::IBV_WC_RNR_RETRY_EXC_ERR => CompletionStatus::ReceiverNotReady,
        ffi::IBV_WC_REM_ABORT_ERR => CompletionStatus::RemoteAbort,
        ffi::IBV_WC_FATAL_ERR => CompletionStatus::Fatal,
        ffi::IBV_WC_RESP_TIMEOUT_ERR => CompletionStatus::ResponseTimeout,
        ffi::IBV_WC_GENERAL_ERR => CompletionStatus::General,
        other => CompletionStatus::Other(other),
    }
}
