//! GIDs: the addresses of a port, and which of them a connection uses.
//!
//! A RoCE port has each address twice: for RoCE v1, which no router passes, and for RoCE v2, which
//! travels in UDP over IP. Those made of an IPv4 address are what switches are most often set up
//! for.

use std::net::Ipv6Addr;

use super::port::LinkLayer;
use crate::error::VerbsError;

/// An entry of a port's table of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the table.
    pub index: u8,
    /// The address.
    pub gid: Ipv6Addr,
    /// Kind of the address.
    pub kind: GidType,
}

/// Kind of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand; on Ethernet, RoCE v1.
    IbOrRoceV1,
    /// RoCE v2.
    RoceV2,
}

impl Gid {
    /// The one that a connection uses: that of index `wanted`; on Ethernet RoCE v2 with an IPv4
    /// address, else one with an IPv6 address, else the one of the link; on InfiniBand the first.
    ///
    /// # Errors
    /// [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`].
    pub fn choose(
        gids: &[Gid],
        link: LinkLayer,
        wanted: Option<u8>,
        (card, port): (&str, u8),
    ) -> Result<Gid, VerbsError> {
        let card = card.to_owned();
        if let Some(index) = wanted {
            let found = gids.iter().find(|gid| gid.index == index).copied();
            return found.ok_or(VerbsError::NoSuchGid { card, port, index });
        }
        let kind = match link {
            LinkLayer::InfiniBand => GidType::IbOrRoceV1,
            LinkLayer::Ethernet => GidType::RoceV2,
        };
        let usable = gids.iter().filter(|gid| gid.kind == kind);
        usable.min_by_key(|gid| (gid.reach(), gid.index)).copied().ok_or(VerbsError::NoGid { card, port })
    }

    /// How well routers know it: 0 is best.
    fn reach(&self) -> u32 {
        match self.kind {
            GidType::IbOrRoceV1 => 0,
            GidType::RoceV2 if self.gid.to_ipv4_mapped().is_some() => 0,
            GidType::RoceV2 if !self.gid.is_unicast_link_local() => 1,
            GidType::RoceV2 => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(entries: &[(u8, &str, GidType)]) -> Vec<Gid> {
        let gid = |&(index, gid, kind): &(u8, &str, GidType)| Gid { index, gid: gid.parse().unwrap(), kind };
        entries.iter().map(gid).collect()
    }

    fn chosen(gids: &[Gid], link: LinkLayer, wanted: Option<u8>) -> Result<u8, VerbsError> {
        Gid::choose(gids, link, wanted, ("card", 1)).map(|gid| gid.index)
    }

    #[test]
    fn roce_v2_with_ipv4_comes_first_then_ipv6_then_the_link_s_own() {
        use GidType::{IbOrRoceV1, RoceV2};
        let all = table(&[
            (0, "fe80::1", IbOrRoceV1),
            (1, "fe80::1", RoceV2),
            (2, "::ffff:10.0.0.1", IbOrRoceV1),
            (3, "2001:db8::1", RoceV2),
            (4, "::ffff:10.0.0.1", RoceV2),
            (5, "::ffff:10.0.0.9", RoceV2),
        ]);
        assert_eq!(chosen(&all, LinkLayer::Ethernet, None), Ok(4));
        assert_eq!(chosen(&all[..4], LinkLayer::Ethernet, None), Ok(3));
        assert_eq!(chosen(&all[..3], LinkLayer::Ethernet, None), Ok(1));
        let none = VerbsError::NoGid { card: "card".into(), port: 1 };
        assert_eq!(chosen(&all[..1], LinkLayer::Ethernet, None), Err(none.clone()));
        assert_eq!(chosen(&all, LinkLayer::InfiniBand, None), Ok(0));
        assert_eq!(chosen(&[], LinkLayer::InfiniBand, None), Err(none));
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let gids = table(&[(0, "fe80::1", GidType::IbOrRoceV1)]);
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, Some(0)), Ok(0));
        let missing = VerbsError::NoSuchGid { card: "card".into(), port: 1, index: 7 };
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, Some(7)), Err(missing));
    }
}
