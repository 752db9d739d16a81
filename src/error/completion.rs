//! A NIC's report of a failed work request.

/// Operation of a work request. The sender knows it by the request's number: the NIC does not
/// report it on failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum Operation {
    /// RDMA write.
    Write,
    /// RDMA write that takes one of the peer's receives.
    WriteImmediate,
    /// Atomic addition.
    FetchAdd,
    /// Send.
    Send,
    /// Receive.
    Receive,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Operation::Write => "RDMA write",
            Operation::WriteImmediate => "RDMA write with immediate",
            Operation::FetchAdd => "fetch-add",
            Operation::Send => "send",
            Operation::Receive => "receive",
        })
    }
}

/// Why a work request failed: the statuses of libibverbs that a reliable connection can end with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum CompletionStatus {
    /// `IBV_WC_LOC_LEN_ERR`.
    #[error("local length error: the message does not fit what was posted")]
    LocalLength,
    /// `IBV_WC_LOC_QP_OP_ERR`.
    #[error("local queue pair operation error")]
    LocalOperation,
    /// `IBV_WC_LOC_PROT_ERR`.
    #[error("local protection error: the source is not registered for this NIC")]
    LocalProtection,
    /// `IBV_WC_WR_FLUSH_ERR`.
    #[error("flushed: the queue pair had failed before")]
    Flushed,
    /// `IBV_WC_BAD_RESP_ERR`.
    #[error("bad response")]
    BadResponse,
    /// `IBV_WC_LOC_ACCESS_ERR`.
    #[error("local access error")]
    LocalAccess,
    /// `IBV_WC_REM_INV_REQ_ERR`.
    #[error("remote invalid request: the peer's queue pair does not allow this operation")]
    RemoteRequest,
    /// `IBV_WC_REM_ACCESS_ERR`.
    #[error("remote access error: the target is outside the peer's region, or its key is no longer valid")]
    RemoteAccess,
    /// `IBV_WC_REM_OP_ERR`.
    #[error("remote operation error")]
    RemoteOperation,
    /// `IBV_WC_RETRY_EXC_ERR`.
    #[error(
        "retries exceeded: the peer's NIC does not answer (machine, cable or switch down, or its queue pair gone)"
    )]
    RetriesExceeded,
    /// `IBV_WC_RNR_RETRY_EXC_ERR`.
    #[error("receiver not ready: the peer has posted no receive")]
    ReceiverNotReady,
    /// `IBV_WC_REM_ABORT_ERR`.
    #[error("aborted by the peer")]
    RemoteAbort,
    /// `IBV_WC_FATAL_ERR`.
    #[error("fatal error of the NIC")]
    Fatal,
    /// `IBV_WC_RESP_TIMEOUT_ERR`.
    #[error("the response timed out")]
    ResponseTimeout,
    /// `IBV_WC_GENERAL_ERR`.
    #[error("general error of the NIC")]
    General,
    /// A status that is not of a reliable connection, or newer than this library.
    #[error("status {0}")]
    Other(u32),
}

impl CompletionStatus {
    /// Whether the peer, or the path to it, failed.
    pub fn is_remote(self) -> bool {
        use CompletionStatus as S;
        matches!(
            self,
            S::RemoteRequest
                | S::RemoteAccess
                | S::RemoteOperation
                | S::RetriesExceeded
                | S::ReceiverNotReady
                | S::RemoteAbort
                | S::BadResponse
                | S::ResponseTimeout
        )
    }
}
