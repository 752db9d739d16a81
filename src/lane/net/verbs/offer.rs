//! Descriptions that the ends of a connection exchange before they are joined.

use super::{Endpoint, Remote, SignalMode};
use crate::error::VerbsError;

/// One end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Its queue pair. First, as it begins with the version of all this.
    pub endpoint: Endpoint,
    /// How it signals.
    pub signal: SignalMode,
    /// Number of the rank's NIC.
    pub card: u8,
    /// Receives that it keeps posted.
    pub receives: u32,
    /// Address for the peer's count of taken signals.
    pub granted: Remote,
    /// Its heap, as [`keys`](super::keys) says it.
    pub heap: Vec<u8>,
}

const FIXED: usize = Endpoint::BYTES + 18;

impl ConnectionInfo {
    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.endpoint.to_bytes().to_vec();
        bytes.extend([self.signal as u8, self.card]);
        bytes.extend(self.receives.to_le_bytes());
        bytes.extend(self.granted.addr.to_le_bytes());
        bytes.extend(self.granted.rkey.to_le_bytes());
        bytes.extend(&self.heap);
        bytes
    }

    /// From what rank `peer` says.
    ///
    /// # Errors
    /// [`VerbsError::EndpointVersion`] and its like.
    pub fn from_bytes(peer: u32, bytes: &[u8]) -> Result<Self, VerbsError> {
        let endpoint = Endpoint::from_bytes(peer, bytes.get(..Endpoint::BYTES).unwrap_or(bytes))?;
        let (seen, expected) = (bytes.len(), FIXED);
        if seen < expected {
            return Err(VerbsError::EndpointLength { peer, seen, expected });
        }
        let (fixed, heap) = bytes.split_at(FIXED);
        let rest = &fixed[Endpoint::BYTES..];
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| rest[at + i]));
        let signal = SignalMode::ALL.into_iter().find(|&mode| mode as u8 == rest[0]);
        let signal =
            signal.ok_or(VerbsError::EndpointField { peer, field: "signal", value: rest[0].into() })?;
        let addr = u64::from(word(6)) | u64::from(word(10)) << 32;
        Ok(ConnectionInfo {
            endpoint,
            signal,
            card: rest[1],
            receives: word(2),
            granted: Remote { addr, rkey: word(14) },
            heap: heap.to_vec(),
        })
    }
}
