//! Completion queues: the NIC reports work requests as done, or the reason of a failure.
//!
//! The completion of a failed request contains its number, its queue pair and a status; the other
//! fields are not written. So the number alone identifies the request, and [`Completion::outcome`]
//! does not offer the rest.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::Context;
use super::ffi::{self, ibv_comp_channel, ibv_context_ops, ibv_cq, ibv_wc};
use super::library::{check_object, check_status, trace_failure};
use crate::error::{CompletionStatus, VerbsError};

/// A completion queue and the descriptor that wakes a waiter.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    channel: Channel,
}

// SAFETY: drivers lock their queues; none belongs to a thread.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue for at least `entries` completions.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn create(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let channel = Channel::create(context)?;
        let asked = i32::try_from(entries).unwrap_or(i32::MAX);
        let (context, at) = (&channel.context, channel.raw.as_ptr());
        // SAFETY: context and channel live; the first vector is always there.
        let raw = unsafe { (context.functions().create_cq)(context.raw(), asked, ptr::null_mut(), at, 0) };
        let raw = check_object(raw).map_err(|errno| context.failed("ibv_create_cq", errno))?;
        Ok(Arc::new(CompletionQueue { raw, channel }))
    }

    /// Takes completions, oldest first: as many as there are and `into` holds.
    ///
    /// # Errors
    /// [`VerbsError::Call`] if the queue has failed.
    pub fn poll<'a>(&self, into: &'a mut [Completion]) -> Result<&'a [Completion], VerbsError> {
        let most = i32::try_from(into.len()).unwrap_or(i32::MAX);
        let Some(poll) = self.ops().poll_cq else {
            return Err(self.context().failed("ibv_poll_cq", Errno::NOSYS.raw_os_error()));
        };
        // SAFETY: the queue lives; a completion is the driver's structure, and there are so many.
        let taken = unsafe { poll(self.raw.as_ptr(), most, into.as_mut_ptr().cast()) };
        match usize::try_from(taken) {
            Ok(taken) => Ok(&into[..taken.min(into.len())]),
            // Drivers return -1 or an errno with its sign turned.
            Err(_) => Err(self.context().failed("ibv_poll_cq", taken.saturating_neg())),
        }
    }

    /// Asks to be woken by the next completion. What came before does not wake: poll once more
    /// after arming.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn arm(&self) -> Result<(), VerbsError> {
        let Some(arm) = self.ops().req_notify_cq else {
            return Err(self.context().failed("ibv_req_notify_cq", Errno::NOSYS.raw_os_error()));
        };
        // SAFETY: the queue lives.
        check_status(unsafe { arm(self.raw.as_ptr(), 0) })
            .map_err(|errno| self.context().failed("ibv_req_notify_cq", errno))
    }

    /// Takes what made the descriptor readable; true if there was something. It wakes again only
    /// after [`arm`](Self::arm).
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn woken(&self) -> Result<bool, VerbsError> {
        let (mut cq, mut tag) = (ptr::null_mut(), ptr::null_mut());
        let (functions, channel) = (self.context().functions(), self.channel.raw.as_ptr());
        // SAFETY: the channel lives and does not block.
        let answer = unsafe { (functions.get_cq_event)(channel, &mut cq, &mut tag) };
        match check_status(answer).map_err(Errno::from_raw_os_error) {
            // An event that is not acknowledged would block the queue's destruction.
            Ok(()) => {
                // SAFETY: only this queue uses the channel.
                unsafe { (functions.ack_cq_events)(cq, 1) };
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(self.context().failed("ibv_get_cq_event", errno.raw_os_error())),
        }
    }

    /// The NIC.
    fn context(&self) -> &Arc<Context> {
        &self.channel.context
    }

    fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open; its table does not change.
        unsafe { &(*self.context().raw()).ops }
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl AsFd for CompletionQueue {
    /// Readable after a completion that [`arm`](CompletionQueue::arm) asked for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives and owns this descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.channel.raw.as_ptr()).fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let context = self.context();
        // SAFETY: queue pairs that use it kept it alive, so none is left; all events were
        // acknowledged.
        let answer = unsafe { (context.functions().destroy_cq)(self.raw.as_ptr()) };
        trace_failure(context.name(), "ibv_destroy_cq", answer);
    }
}

/// The descriptor of one completion queue.
#[derive(Debug)]
struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

impl Channel {
    fn create(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = check_object(unsafe { (context.functions().create_comp_channel)(context.raw()) });
        let raw = raw.map_err(|errno| context.failed("ibv_create_comp_channel", errno))?;
        let channel = Channel { raw, context: Arc::clone(context) };
        // SAFETY: the channel was just made and owns this descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw((*raw.as_ptr()).fd) };
        let unblocked = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        unblocked.map_err(|e| context.failed("fcntl", e.raw_os_error()))?;
        Ok(channel)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: its queue is destroyed before it, being dropped as a field after the queue's own
        // drop.
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
