//! The order in which a NIC places the writes of one queue pair, as far as it is known, and how the
//! two ends of a connection signal for it.
//!
//! Packets of a queue pair may take several paths (adaptive routing, multipath RoCE), and newer
//! NICs place them as they come. Then a flag may land before rows that were written before it.
//!
//! No call of libibverbs tells. `ibv_query_qp_data_in_order` is about the bytes within one request,
//! and answers for connected queue pairs only. The switch decides, too: NIC firmware has been seen
//! to allow any order by itself where the network routes adaptively. So order is known of parts
//! that cannot do otherwise, and all others may place writes in any order.

use super::SignalMode;
use crate::error::VerbsError;

/// Knowledge about a NIC's placement of the writes of one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementOrder {
    /// As they were posted; the reason.
    Kept(&'static str),
    /// Perhaps in any order, up to an atomic, an immediate or a send.
    Unknown,
}

/// Vendor that Soft-RoCE reports.
const SOFT_ROCE: u32 = 0xff_ffff;
/// NVIDIA, formerly Mellanox, by its Ethernet prefix.
const MELLANOX: u32 = 0x02c9;
/// ConnectX-3 to ConnectX-4 Lx, virtual functions included. Placement out of order came with
/// ConnectX-5, part 4119.
const BEFORE_CONNECTX_5: std::ops::RangeInclusive<u32> = 4099..=4118;

impl PlacementOrder {
    /// Of a part of a vendor.
    pub fn of(vendor: u32, part: u32) -> Self {
        match vendor {
            SOFT_ROCE => PlacementOrder::Kept("Soft-RoCE"),
            MELLANOX if BEFORE_CONNECTX_5.contains(&part) => PlacementOrder::Kept("older than ConnectX-5"),
            _ => PlacementOrder::Unknown,
        }
    }

    /// Whether it is known to be kept.
    pub fn is_kept(self) -> bool {
        matches!(self, PlacementOrder::Kept(_))
    }
}

/// How one end of a connection may signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signaling {
    /// The setting.
    pub requested: Option<SignalMode>,
    /// Whether its NIC is known to place writes in order.
    pub in_order: bool,
}

impl Signaling {
    /// How both ends signal: as requested, or by write if both NICs place writes in order, or else
    /// by immediate, which waits for all writes before it in any network.
    ///
    /// # Errors
    /// [`VerbsError::SignalsDiffer`] if the requests differ.
    pub fn agree(self, theirs: Signaling, peer: u32) -> Result<SignalMode, VerbsError> {
        if self.requested != theirs.requested {
            let [mine, theirs] = [self, theirs].map(|end| SignalMode::setting(end.requested));
            return Err(VerbsError::SignalsDiffer { peer, mine, theirs });
        }
        let in_order = self.in_order && theirs.in_order;
        let chosen = if in_order { SignalMode::Write } else { SignalMode::Immediate };
        Ok(self.requested.unwrap_or(chosen))
    }

    /// As bytes.
    pub fn to_bytes(self) -> [u8; 2] {
        [self.requested.map_or(u8::MAX, |mode| mode as u8), self.in_order.into()]
    }

    /// From what rank `peer` says.
    ///
    /// # Errors
    /// [`VerbsError::EndpointField`].
    pub fn from_bytes(peer: u32, [requested, in_order]: [u8; 2]) -> Result<Self, VerbsError> {
        let wrong = |field, value: u8| VerbsError::EndpointField { peer, field, value: value.into() };
        let mode = SignalMode::ALL.into_iter().find(|&mode| mode as u8 == requested);
        if mode.is_none() && requested != u8::MAX {
            return Err(wrong("signal", requested));
        }
        let in_order = match in_order {
            0 | 1 => in_order == 1,
            other => return Err(wrong("order of writes", other)),
        };
        Ok(Signaling { requested: mode, in_order })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_unable_to_reorder_count_as_keeping_order() {
        for (vendor, part) in [(SOFT_ROCE, 0), (MELLANOX, 4115), (MELLANOX, 4118)] {
            assert!(PlacementOrder::of(vendor, part).is_kept(), "{vendor:#x} {part}");
        }
        // ConnectX-5 and 7, BlueField-3, another vendor, and one that does not say.
        for (vendor, part) in [(MELLANOX, 4119), (MELLANOX, 4129), (MELLANOX, 0xa2dc), (0x14e4, 4115), (0, 0)]
        {
            assert_eq!(PlacementOrder::of(vendor, part), PlacementOrder::Unknown, "{vendor:#x} {part}");
        }
    }

    #[test]
    fn signals_are_writes_only_between_ordered_nics_or_on_request() {
        let end = |requested, in_order| Signaling { requested, in_order };
        let agreed = |mine: Signaling, theirs: Signaling| {
            assert_eq!(mine.agree(theirs, 1), theirs.agree(mine, 1));
            mine.agree(theirs, 1)
        };
        assert_eq!(agreed(end(None, true), end(None, true)), Ok(SignalMode::Write));
        assert_eq!(agreed(end(None, true), end(None, false)), Ok(SignalMode::Immediate));
        assert_eq!(agreed(end(None, false), end(None, false)), Ok(SignalMode::Immediate));
        for mode in SignalMode::ALL {
            assert_eq!(agreed(end(Some(mode), false), end(Some(mode), true)), Ok(mode));
        }
        let differ = VerbsError::SignalsDiffer { peer: 7, mine: "auto", theirs: "write" };
        assert_eq!(end(None, true).agree(end(Some(SignalMode::Write), true), 7), Err(differ));
    }

    #[test]
    fn every_signaling_reads_back_and_no_other_bytes_do() {
        let mut known = 0;
        for (requested, in_order) in (0..=u8::MAX).flat_map(|mode| [0, 1, 2].map(|order| (mode, order))) {
            match Signaling::from_bytes(3, [requested, in_order]) {
                Ok(read) => {
                    assert_eq!(read.to_bytes(), [requested, in_order]);
                    known += 1;
                }
                Err(VerbsError::EndpointField { peer, .. }) => assert_eq!(peer, 3),
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(known, 2 * (SignalMode::ALL.len() + 1));
    }
}
