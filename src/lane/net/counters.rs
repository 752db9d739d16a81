//! Exact counts of a connection's requests, to compare with the prediction.

/// Counted since the rail was joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Work requests posted to the send queue.
    pub requests: u64,
    /// Doorbells: notifications of the NIC about new requests.
    pub doorbells: u64,
    /// Completions of sends.
    pub completions: u64,
    /// Packets that the requests are cut into, acknowledgements not counted.
    pub packets: u64,
    /// Bytes that the requests carried.
    pub bytes: u64,
    /// Of these, bytes that were copied before the NIC read them.
    #[serde(rename = "copied_bytes")]
    pub copied: u64,
    /// Completions of receives.
    pub received: u64,
    /// Completions of failed requests: the first fault of a connection, and the requests in flight
    /// behind it. Late requests of a failed world end here.
    pub failed: u64,
}

impl std::iter::Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Counters::default(), |sum, one| Counters {
            requests: sum.requests + one.requests,
            doorbells: sum.doorbells + one.doorbells,
            completions: sum.completions + one.completions,
            packets: sum.packets + one.packets,
            bytes: sum.bytes + one.bytes,
            copied: sum.copied + one.copied,
            received: sum.received + one.received,
            failed: sum.failed + one.failed,
        })
    }
}

impl std::ops::Sub for Counters {
    type Output = Counters;

    /// Counts since `earlier`.
    fn sub(self, earlier: Counters) -> Counters {
        Counters {
            requests: self.requests - earlier.requests,
            doorbells: self.doorbells - earlier.doorbells,
            completions: self.completions - earlier.completions,
            packets: self.packets - earlier.packets,
            bytes: self.bytes - earlier.bytes,
            copied: self.copied - earlier.copied,
            received: self.received - earlier.received,
            failed: self.failed - earlier.failed,
        }
    }
}
