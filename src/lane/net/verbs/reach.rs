//! Which ports reach each other: the address of a port that connections use, the partition that two
//! ports share, and whether the NICs of all ranks reach each other.
//!
//! **Address.** The entry of a port's table that connections use:
//!
//! ```text
//!   ports/<p>/gids, gid_attrs/{types,ndevs}    Gid: address, kind, network device
//!     of the kind that routers pass             RoCE v2; on InfiniBand its own
//!     of this network namespace                 another container's address is in the table, too
//!     in the first of the wanted subnets        if the settings name some
//!     best known to routers                     IPv4, IPv6, link-local; on InfiniBand with an FLID
//!     of no VLAN, then by index
//! ```
//!
//! A RoCE port has each GID twice: for RoCE v1, which no router passes, and for RoCE v2, which
//! travels in UDP over IP. Switches are most often set up for those made of an IPv4 address.
//!
//! **Namespaces.** The table of a port that containers share has the addresses of all of them,
//! under device names that may be equal. So an address counts as ours if a device of this name has
//! it here. A link-local one is made of the port's own number and need not be assigned: its device
//! must be here.
//!
//! **FLID.** Routers between InfiniBand subnets know a switch by an FLID, which its ports carry in
//! their GIDs, as NCCL and UCX read it:
//!
//! ```text
//!   GID: fec0:0000  FLID (16 bits)  subnet (16 bits)  port (64 bits)
//! ```
//!
//! **Partition.** The key that a connection of two ports uses:
//!
//! ```text
//!   ports/<p>/pkeys --> Pkeys: all of them, or that of the settings --Reach--> peer
//!
//!   of the keys of both ends    one partition, and at least one end a full member of it
//!     full members first        both ends, before those where one is limited
//!     then the earliest         the smallest sum of the places in both lists
//!     then the lowest number
//! ```
//!
//! Two limited members of a partition do not hear each other: their packets are dropped, and
//! retries end after a while. A limited member and a full one do. The rule is the same seen from
//! both ends, so they take one partition without asking again.
//!
//! **All ranks.** Each announces its NICs before a lane is agreed on:
//!
//! ```text
//!   each rank    | queue pairs: u8 | NICs: u8 | per NIC: length of its name: u8, name, Reach |  --> all ranks
//!   each pair of ranks on different nodes    takes the NICs from its rail on, a queue pair each in turn:
//!                                            each NIC must reach that of the peer
//! ```
//!
//! Every rank has the same announcements, so all find the same pair, or none. The NICs of a cluster
//! are mostly alike: two kinds of NICs are compared once.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use sidelane_core::nic_choice::LinkLayer;

use super::Settings;
use super::nic::{Nic, Sysfs, link_code, link_of, numbered, read};
use crate::error::VerbsError;
use crate::topology::NodeMap;

/// An entry of a port's table of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its place in the table.
    pub index: u8,
    /// The address.
    pub gid: Ipv6Addr,
    /// Kind of the address.
    kind: GidType,
    /// The network device that has the address; none on InfiniBand.
    pub device: Option<String>,
    /// Whether that device is a VLAN.
    vlan: bool,
    /// Whether the address is one of this network namespace, as far as is known.
    own: bool,
}

/// Kind of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GidType {
    /// InfiniBand; on Ethernet, RoCE v1.
    IbOrRoceV1,
    /// RoCE v2.
    RoceV2,
}

impl Gid {
    /// The one that a connection uses: that of the index that the settings name, or else the first
    /// by the rules above.
    ///
    /// # Errors
    /// [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`], [`VerbsError::NoGidInSubnets`].
    pub fn choose(
        gids: &[Gid],
        link: LinkLayer,
        settings: &Settings,
        (nic, port): (&str, u8),
    ) -> Result<Gid, VerbsError> {
        let nic = nic.to_owned();
        if let Some(index) = settings.gid_index {
            let found = gids.iter().find(|gid| gid.index == index).cloned();
            return found.ok_or(VerbsError::NoSuchGid { nic, port, index });
        }
        let kind = match link {
            LinkLayer::InfiniBand => GidType::IbOrRoceV1,
            LinkLayer::Ethernet => GidType::RoceV2,
        };
        let usable = || gids.iter().filter(|gid| gid.kind == kind && gid.own);
        let subnets = &settings.subnets;
        if subnets.is_empty() {
            let best = usable().min_by_key(|gid| (gid.reach(), gid.vlan, gid.index));
            return best.cloned().ok_or(VerbsError::NoGid { nic, port });
        }
        let subnet_of = |gid: &Gid| subnets.iter().position(|subnet| subnet.contains(gid.gid));
        let inside = usable().filter_map(|gid| Some((subnet_of(gid)?, gid)));
        let best = inside.min_by_key(|(subnet, gid)| (*subnet, gid.reach(), gid.vlan, gid.index));
        best.map(|(_, gid)| gid.clone()).ok_or(VerbsError::NoGidInSubnets { nic, port })
    }

    /// How well routers know it: 0 is best.
    fn reach(&self) -> u32 {
        match self.kind {
            GidType::IbOrRoceV1 => u32::from(flid(self.gid).is_none()),
            GidType::RoceV2 if self.gid.to_ipv4_mapped().is_some() => 0,
            GidType::RoceV2 if !self.gid.is_unicast_link_local() => 1,
            GidType::RoceV2 => 2,
        }
    }
}

/// The address by which routers between InfiniBand subnets know the switch of a port, if its GID
/// carries one.
pub fn flid(gid: Ipv6Addr) -> Option<u16> {
    let [site, zero, flid, ..] = gid.segments();
    (site == 0xfec0 && zero == 0 && flid != 0).then_some(flid)
}

/// Whether two InfiniBand ports are in one subnet, by their GIDs. One with an FLID has only 16 bits
/// for the subnet.
pub fn same_subnet(one: Ipv6Addr, other: Ipv6Addr) -> bool {
    let subnet = |gid: Ipv6Addr| match flid(gid) {
        Some(_) => u64::from(gid.segments()[3]) | 0xfec0 << 48,
        None => (gid.to_bits() >> 64) as u64,
    };
    subnet(one) == subnet(other)
}

/// Addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    first: u128,
    /// Bits that are alike.
    prefix: u32,
}

impl Subnet {
    fn contains(self, gid: Ipv6Addr) -> bool {
        self.prefix == 0 || (gid.to_bits() ^ self.first) >> (128 - self.prefix) == 0
    }
}

impl FromStr for Subnet {
    type Err = ();

    /// An address, `/` and the bits that count: `10.1.0.0/16`, `fd00:1::/64`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, prefix) = text.trim().split_once('/').ok_or(())?;
        let (address, outer) = match address.parse().map_err(|_| ())? {
            IpAddr::V4(address) => (address.to_ipv6_mapped(), 96),
            IpAddr::V6(address) => (address, 0),
        };
        let prefix = prefix.parse::<u32>().ok().filter(|&bits| bits <= 128 - outer).ok_or(())?;
        Ok(Subnet { first: address.to_bits(), prefix: outer + prefix })
    }
}

impl Sysfs {
    /// The addresses of a port, in the order of its table; empty entries are left out.
    pub fn gids(&self, nic: &str, port: u8) -> Vec<Gid> {
        let dir = self.port(nic, port);
        let gid = |index: u8| {
            let entry = |table: &str| read(&dir.join(table).join(index.to_string()));
            let gid = self.gid(nic, port, index)?;
            let kind = match entry("gid_attrs/types")?.as_str() {
                "IB/RoCE v1" => GidType::IbOrRoceV1,
                "RoCE v2" => GidType::RoceV2,
                _ => return None,
            };
            let device = entry("gid_attrs/ndevs").filter(|name| !name.is_empty());
            let vlan = device.as_deref().is_some_and(|device| self.is_vlan(device));
            let own = kind == GidType::IbOrRoceV1 || self.is_own(gid, device.as_deref());
            Some(Gid { index, gid, kind, device, vlan, own })
        };
        numbered(&dir.join("gids"), "").into_iter().filter_map(gid).collect()
    }

    /// One address of a port, by its place in the table; none if that is empty.
    pub fn gid(&self, nic: &str, port: u8, index: u8) -> Option<Ipv6Addr> {
        let gid = read(&self.port(nic, port).join("gids").join(index.to_string()))?;
        gid.parse().ok().filter(|gid: &Ipv6Addr| !gid.is_unspecified())
    }

    /// Whether this network namespace has an address, as far as is known.
    fn is_own(&self, gid: Ipv6Addr, device: Option<&str>) -> bool {
        if gid.is_unicast_link_local() {
            let devices = self.root.join("class/net");
            return device.is_none_or(|device| !devices.exists() || devices.join(device).exists());
        }
        let same = |(name, address): &(String, Ipv6Addr)| {
            // An address with a label has that as its name, such as eth0:1.
            let name = name.split(':').next();
            *address == gid && device.is_none_or(|device| Some(device) == name)
        };
        self.addresses.as_ref().is_none_or(|addresses| addresses.iter().any(same))
    }

    fn is_vlan(&self, device: &str) -> bool {
        let about = read(&self.root.join("class/net").join(device).join("uevent"));
        about.is_some_and(|about| about.lines().any(|line| line == "DEVTYPE=vlan"))
    }
}

/// Addresses of this process's network namespace, and their devices; none if they are unknown.
pub fn own_addresses() -> Option<Vec<(String, Ipv6Addr)>> {
    let interfaces = if_addrs::get_if_addrs().ok()?.into_iter();
    let address = |ip| match ip {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    Some(interfaces.map(|interface| (interface.name.clone(), address(interface.ip()))).collect())
}

/// An entry of a port's table of partition keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pkey {
    /// Its place in the table.
    pub index: u16,
    /// The key: 15 bits of the partition, below that of full members.
    pub key: u16,
}

/// The bit that full members of a partition have.
const FULL_MEMBER: u16 = 1 << 15;

impl Pkey {
    /// The key of every RoCE port.
    const DEFAULT: Pkey = Pkey { index: 0, key: u16::MAX };

    fn is_full(self) -> bool {
        self.key & FULL_MEMBER != 0
    }
}

/// The keys that connections of a port may use, at least one, in the order of its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pkeys(Arc<[Pkey]>);

impl Pkeys {
    /// Of a port with these keys: that of index `wanted`, or else all.
    ///
    /// # Errors
    /// [`VerbsError::NoSuchPkey`], [`VerbsError::NoPartition`].
    pub fn of(
        mut table: Vec<Pkey>,
        link: LinkLayer,
        wanted: Option<u16>,
        (nic, port): (&str, u8),
    ) -> Result<Self, VerbsError> {
        // RoCE knows no other partition, and its drivers need not list that one.
        if table.is_empty() && link == LinkLayer::Ethernet {
            table.push(Pkey::DEFAULT);
        }
        let nic = nic.to_owned();
        if let Some(index) = wanted {
            table.retain(|pkey| pkey.index == index);
            let missing = VerbsError::NoSuchPkey { nic, port, index };
            return if table.is_empty() { Err(missing) } else { Ok(Pkeys(table.into())) };
        }
        if table.is_empty() { Err(VerbsError::NoPartition { nic, port }) } else { Ok(Pkeys(table.into())) }
    }

    /// All of them.
    pub fn all(&self) -> &[Pkey] {
        &self.0
    }

    /// The one that a queue pair has before it knows its peer: the first of a full member, or else
    /// the first.
    pub fn preferred(&self) -> Pkey {
        self.0.iter().find(|pkey| pkey.is_full()).copied().unwrap_or(self.0[0])
    }

    /// The entry of a key.
    pub fn find(&self, key: u16) -> Option<Pkey> {
        self.0.iter().find(|pkey| pkey.key == key).copied()
    }
}

/// Whether two ports can talk to each other depends on this of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The network.
    pub link: LinkLayer,
    /// The partition keys, in the order of the port's table.
    pub pkeys: Vec<u16>,
}

impl Reach {
    /// Of a port.
    pub fn of(link: LinkLayer, pkeys: &Pkeys) -> Self {
        Reach { link, pkeys: pkeys.all().iter().map(|pkey| pkey.key).collect() }
    }

    /// The key by which this port, of this NIC, talks to that of a peer.
    ///
    /// # Errors
    /// [`VerbsError::LinkLayers`], [`VerbsError::PartitionsDiffer`].
    pub fn key_to(&self, theirs: &Reach, nic: &str, peer: u32) -> Result<u16, VerbsError> {
        let nic = || nic.to_owned();
        if self.link != theirs.link {
            return Err(VerbsError::LinkLayers { nic: nic(), peer });
        }
        let pairs = self.pkeys.iter().enumerate().flat_map(|(at, &mine)| {
            let heard = move |&(_, &key): &(usize, &u16)| share_partition(mine, key);
            theirs.pkeys.iter().enumerate().filter(heard).map(move |(its_at, &key)| {
                let limited = mine & key & FULL_MEMBER == 0;
                ((limited, at + its_at, mine & !FULL_MEMBER), mine)
            })
        });
        let (mine, theirs) = (&self.pkeys, &theirs.pkeys);
        let differ =
            || VerbsError::PartitionsDiffer { nic: nic(), peer, mine: mine.clone(), theirs: theirs.clone() };
        pairs.min().map(|(_, key)| key).ok_or_else(differ)
    }

    /// As bytes: the network, the number of keys, the keys.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![link_code(self.link)];
        bytes.extend((self.pkeys.len() as u16).to_le_bytes());
        bytes.extend(self.pkeys.iter().flat_map(|key| key.to_le_bytes()));
        bytes
    }

    /// From the start of what rank `peer` says, and the bytes behind it.
    ///
    /// # Errors
    /// [`VerbsError::EndpointLength`], [`VerbsError::EndpointField`].
    pub fn from_bytes(peer: u32, bytes: &[u8]) -> Result<(Self, &[u8]), VerbsError> {
        let short = |expected| VerbsError::EndpointLength { peer, seen: bytes.len(), expected };
        let wrong = |field, value| VerbsError::EndpointField { peer, field, value };
        let (&[code, low, high], rest) = bytes.split_first_chunk().ok_or(short(3))?;
        let len = 2 * usize::from(u16::from_le_bytes([low, high]));
        let (keys, rest) = rest.split_at_checked(len).ok_or(short(3 + len))?;
        let link = link_of(code).ok_or(wrong("network", code.into()))?;
        let (keys, _) = keys.as_chunks::<2>();
        let pkeys: Vec<u16> = keys.iter().map(|&key| u16::from_le_bytes(key)).collect();
        match pkeys.iter().find(|&key| key & !FULL_MEMBER == 0) {
            Some(&key) => Err(wrong("partition key", key.into())),
            None => Ok((Reach { link, pkeys }, rest)),
        }
    }
}

/// Whether packets from a port with one key are taken by a port with the other.
fn share_partition(one: u16, other: u16) -> bool {
    (one ^ other) & !FULL_MEMBER == 0 && (one | other) & FULL_MEMBER != 0
}

impl Sysfs {
    /// The partition keys of a port, in the order of its table; empty entries are left out.
    pub fn pkeys(&self, nic: &str, port: u8) -> Vec<Pkey> {
        let dir = self.port(nic, port).join("pkeys");
        let pkey = |index: u16| {
            let text = read(&dir.join(index.to_string()))?;
            let key = u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
            // Without its first bit, a key of 0 names no partition.
            (key & !FULL_MEMBER != 0).then_some(Pkey { index, key })
        };
        numbered(&dir, "").into_iter().filter_map(pkey).collect()
    }
}

/// Number of the NIC that `rank` takes towards `peer`, of so many. Both ranks of a pair take NICs
/// of one number, because [`compare`] refuses ranks that have not as many. Peers of one rank are on
/// different nodes, or at different places of a node.
pub fn rail(nodes: &NodeMap, rank: u32, peer: u32, nics: usize) -> usize {
    let place = |rank: u32| {
        let node = nodes.node_of(rank);
        let at = nodes.members(node).iter().position(|&member| member == rank);
        (node as usize, at.unwrap_or(0))
    };
    let ((node, at), (its_node, its_at)) = (place(rank), place(peer));
    (node + its_node + (at + its_at) / 2) % nics
}

/// What a rank says about its NICs.
pub fn announcement<'a>(queue_pairs: u8, nics: impl ExactSizeIterator<Item = &'a Nic>) -> Vec<u8> {
    let mut bytes = vec![queue_pairs, nics.len() as u8];
    for nic in nics {
        // The kernel's names have at most 64 bytes.
        let name = nic.context.name();
        bytes.push(name.len() as u8);
        bytes.extend(name.as_bytes());
        bytes.extend(nic.path.reach().to_bytes());
    }
    bytes
}

/// What a rank announced.
struct Announced {
    /// Queue pairs to each peer.
    queue_pairs: usize,
    nics: Vec<(String, Reach)>,
}

/// What rank `peer` announced.
fn announced(peer: u32, bytes: &[u8]) -> Result<Announced, VerbsError> {
    let invalid = || VerbsError::Message { peer };
    let (&[queue_pairs, count], mut rest) = bytes.split_first_chunk().ok_or_else(invalid)?;
    let mut nics = Vec::new();
    for _ in 0..count {
        let (&len, behind) = rest.split_first().ok_or_else(invalid)?;
        let (name, behind) = behind.split_at_checked(len.into()).ok_or_else(invalid)?;
        let (reach, behind) = Reach::from_bytes(peer, behind).map_err(|_| invalid())?;
        nics.push((String::from_utf8_lossy(name).into_owned(), reach));
        rest = behind;
    }
    let valid = queue_pairs > 0 && !nics.is_empty() && rest.is_empty();
    if valid { Ok(Announced { queue_pairs: queue_pairs.into(), nics }) } else { Err(invalid()) }
}

/// The first rank with a NIC that does not reach that of a rank on another node, by what all ranks
/// announced.
///
/// # Errors
/// That rank, and why.
pub fn compare(nodes: &NodeMap, said: &[&[u8]]) -> Result<(), (u32, VerbsError)> {
    let read = |(rank, bytes): (u32, &&[u8])| announced(rank, bytes).map_err(|error| (rank, error));
    let ranks = (0..).zip(said).map(read).collect::<Result<Vec<_>, _>>()?;
    let mut kinds = HashMap::new();
    let mut kind_of = |(_, reach): &(String, Reach)| {
        let next = kinds.len();
        *kinds.entry(reach.to_bytes()).or_insert(next)
    };
    let kinds: Vec<Vec<usize>> =
        ranks.iter().map(|rank| rank.nics.iter().map(&mut kind_of).collect()).collect();
    let mut compared = HashSet::new();
    for (rank, mine) in (0..).zip(&ranks) {
        for (peer, theirs) in (rank + 1..).zip(&ranks[rank as usize + 1..]) {
            if nodes.node_of(rank) == nodes.node_of(peer) {
                continue;
            }
            let (nics, its_nics) = (mine.nics.len(), theirs.nics.len());
            if nics != its_nics {
                return Err((rank, VerbsError::NicCountsDiffer { peer, mine: nics, theirs: its_nics }));
            }
            let first = rail(nodes, rank, peer, nics);
            for queue in 0..mine.queue_pairs.min(theirs.queue_pairs).min(nics) {
                // Of one number at both ends.
                let nic = (first + queue) % nics;
                if compared.insert((kinds[rank as usize][nic], kinds[peer as usize][nic])) {
                    let (name, reach) = &mine.nics[nic];
                    reach.key_to(&theirs.nics[nic].1, name, peer).map_err(|error| (rank, error))?;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sidelane_core::nic_choice::LinkLayer;

    use super::*;
    use crate::lane::net::verbs::fake::Tree;

    fn table(entries: &[(u8, &str, GidType)]) -> Vec<Gid> {
        let gid = |&(index, gid, kind): &(u8, &str, GidType)| {
            let gid = gid.parse().unwrap();
            Gid { index, gid, kind, device: None, vlan: false, own: true }
        };
        entries.iter().map(gid).collect()
    }

    fn chosen(gids: &[Gid], link: LinkLayer, settings: &Settings) -> Result<u8, VerbsError> {
        Gid::choose(gids, link, settings, ("nic", 1)).map(|gid| gid.index)
    }

    fn within(subnets: &[&str]) -> Settings {
        let subnets = subnets.iter().map(|subnet| subnet.parse().unwrap()).collect();
        Settings { subnets, ..Settings::default() }
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
        let (any, none) = (Settings::default(), VerbsError::NoGid { nic: "nic".into(), port: 1 });
        let first = |len: usize, link| chosen(&all[..len], link, &any);
        assert_eq!(first(6, LinkLayer::Ethernet), Ok(4));
        assert_eq!(first(4, LinkLayer::Ethernet), Ok(3));
        assert_eq!(first(3, LinkLayer::Ethernet), Ok(1));
        assert_eq!(first(1, LinkLayer::Ethernet), Err(none.clone()));
        assert_eq!(first(6, LinkLayer::InfiniBand), Ok(0));
        assert_eq!(first(0, LinkLayer::InfiniBand), Err(none));
    }

    #[test]
    fn an_index_that_was_asked_for_is_taken_or_refused() {
        let gids = table(&[(0, "fe80::1", GidType::IbOrRoceV1)]);
        let at = |index| Settings { gid_index: Some(index), ..within(&["10.0.0.0/8"]) };
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, &at(0)), Ok(0));
        let missing = VerbsError::NoSuchGid { nic: "nic".into(), port: 1, index: 7 };
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, &at(7)), Err(missing));
    }

    #[test]
    fn address_in_first_wanted_subnet_is_preferred() {
        use GidType::RoceV2;
        let gids = table(&[
            (0, "::ffff:10.0.0.1", RoceV2),
            (1, "::ffff:10.1.0.1", RoceV2),
            (2, "fd00:1::1", RoceV2),
            (3, "fd00:2::1", RoceV2),
        ]);
        let first = |subnets: &[&str]| chosen(&gids, LinkLayer::Ethernet, &within(subnets));
        assert_eq!(first(&["10.1.0.0/16"]), Ok(1));
        assert_eq!(first(&["10.9.0.0/16", "fd00:2::/32", "10.0.0.0/8"]), Ok(3));
        assert_eq!(first(&["fd00::/16", "10.0.0.0/8"]), Ok(2));
        assert_eq!(first(&["0.0.0.0/0"]), Ok(0));
        assert_eq!(first(&["::/0"]), Ok(0));
        let outside = VerbsError::NoGidInSubnets { nic: "nic".into(), port: 1 };
        assert_eq!(first(&["10.9.0.0/16"]), Err(outside));
        for text in ["10.0.0.0", "10.0.0.0/33", "fd00::/129", "/8", "10.0.0/8", "10.0.0.0/-1", ""] {
            assert_eq!(text.parse::<Subnet>(), Err(()), "{text}");
        }
    }

    #[test]
    fn addresses_are_read_with_their_kinds_and_empty_ones_left_out() {
        let tree = Tree::new();
        let port = "class/infiniband/mlx5_0/ports/1";
        for (index, gid, kind) in [
            (0, "fe80::1", "IB/RoCE v1"),
            (1, "fe80::1", "RoCE v2"),
            (2, "::", "RoCE v2"),
            (10, "::ffff:10.0.0.2", "RoCE v2"),
            (3, "fe80::2", "RoCE v9"),
        ] {
            tree.gid("mlx5_0", index, gid.parse().unwrap(), kind);
        }
        tree.write(&format!("{port}/gids/4"), "fe80:0000:0000:0000:0000:0000:0000:0004");
        let expected = table(&[
            (0, "fe80::1", GidType::IbOrRoceV1),
            (1, "fe80::1", GidType::RoceV2),
            (10, "::ffff:10.0.0.2", GidType::RoceV2),
        ]);
        assert_eq!(tree.sysfs().gids("mlx5_0", 1), expected);
        assert_eq!(tree.sysfs().gids("mlx5_1", 1), []);
    }

    #[test]
    fn address_of_other_namespace_is_ignored_despite_equal_name() {
        let tree = Tree::new();
        let entry = |index: u8, gid: &str, device: &str| {
            tree.gid("mlx5_0", index, gid.parse().unwrap(), "RoCE v2");
            let ndevs = "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs";
            tree.write(&format!("{ndevs}/{index}"), device);
        };
        entry(0, "fe80::1", "host0");
        entry(1, "::ffff:10.0.0.1", "net1");
        entry(2, "::ffff:10.0.0.2", "net1");
        entry(3, "fe80::2", "net1");
        tree.write("class/net/net1/uevent", "INTERFACE=net1");
        let first =
            |sysfs: &Sysfs| chosen(&sysfs.gids("mlx5_0", 1), LinkLayer::Ethernet, &Settings::default());
        let here = |addresses: &[(&str, &str)]| {
            let own = |(device, gid): &(&str, &str)| ((*device).to_owned(), gid.parse().unwrap());
            let mut sysfs = tree.sysfs();
            sysfs.addresses = Some(addresses.iter().map(own).collect());
            sysfs
        };
        assert_eq!(first(&tree.sysfs()), Ok(1), "nothing is known of the namespace");
        assert_eq!(first(&here(&[("net1", "::ffff:10.0.0.2")])), Ok(2));
        assert_eq!(first(&here(&[("eth0", "::ffff:10.0.0.1")])), Ok(3), "another device has the address");
    }

    #[test]
    fn an_address_of_a_vlan_comes_behind_one_without() {
        let tree = Tree::new();
        for (index, gid, device) in [(0, "::ffff:10.7.0.1", "eth0.7"), (1, "::ffff:10.0.0.1", "eth0")] {
            tree.gid("mlx5_0", index, gid.parse().unwrap(), "RoCE v2");
            tree.write(&format!("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/{index}"), device);
        }
        tree.write("class/net/eth0/uevent", "INTERFACE=eth0\nIFINDEX=2");
        tree.write("class/net/eth0.7/uevent", "DEVTYPE=vlan\nINTERFACE=eth0.7\nIFINDEX=3");
        let gids = tree.sysfs().gids("mlx5_0", 1);
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, &Settings::default()), Ok(1));
        assert_eq!(chosen(&gids, LinkLayer::Ethernet, &within(&["10.7.0.0/16"])), Ok(0));
    }

    #[test]
    fn infiniband_prefers_flid_address_with_16_bit_subnet() {
        let gid = |text: &str| text.parse::<Ipv6Addr>().unwrap();
        let own = GidType::IbOrRoceV1;
        let gids = table(&[(0, "fe80::1", own), (1, "fec0:0:a001:7::1", own)]);
        assert_eq!(chosen(&gids, LinkLayer::InfiniBand, &Settings::default()), Ok(1));
        assert_eq!(flid(gid("fec0:0:a001:7::1")), Some(0xa001));
        for without in ["fec0:0:0:7::1", "fec0:1:a001:7::1", "fe80:0:a001:7::1"] {
            assert_eq!(flid(gid(without)), None, "{without}");
        }
        let same = |one, other| same_subnet(gid(one), gid(other));
        assert!(same("fec0:0:a001:7::1", "fec0:0:a002:7::2"));
        assert!(same("fec0:0:a001:7::1", "fec0:0:0:7::2"));
        assert!(!same("fec0:0:a001:7::1", "fec0:0:a001:8::1"));
        assert!(same("fe80::1", "fe80::2") && !same("fe80::1", "fe80:0:0:1::1"));
    }

    const IB: LinkLayer = LinkLayer::InfiniBand;

    fn reach(pkeys: &[u16]) -> Reach {
        Reach { link: IB, pkeys: pkeys.to_vec() }
    }

    /// The keys that two ports use, each as it finds it.
    fn used(mine: &[u16], theirs: &[u16]) -> [Option<u16>; 2] {
        let (mine, theirs) = (reach(mine), reach(theirs));
        [mine.key_to(&theirs, "nic", 1).ok(), theirs.key_to(&mine, "nic", 0).ok()]
    }

    #[test]
    fn all_keys_of_a_port_may_be_used_or_the_one_of_the_settings() {
        let tree = Tree::new();
        for (index, key) in [(0, 0x7fff), (1, 0), (2, 0x8000), (3, 0x8012), (4, 0xffff)] {
            tree.pkey("mlx5_0", index, key);
        }
        let table = || tree.sysfs().pkeys("mlx5_0", 1);
        let of = |table: Vec<Pkey>, link, wanted| Pkeys::of(table, link, wanted, ("nic", 1));
        let places = |pkeys: &Pkeys| pkeys.all().iter().map(|pkey| pkey.index).collect::<Vec<_>>();
        let all = of(table(), IB, None).unwrap();
        assert_eq!((places(&all), all.preferred()), (vec![0, 3, 4], Pkey { index: 3, key: 0x8012 }));
        let limited = of(table(), IB, Some(0)).unwrap();
        assert_eq!((places(&limited), limited.preferred()), (vec![0], Pkey { index: 0, key: 0x7fff }));
        let missing = VerbsError::NoSuchPkey { nic: "nic".into(), port: 1, index: 1 };
        assert_eq!(of(table(), IB, Some(1)), Err(missing));
        assert_eq!(of(vec![], IB, None), Err(VerbsError::NoPartition { nic: "nic".into(), port: 1 }));
        let roce = of(vec![], LinkLayer::Ethernet, None).unwrap();
        assert_eq!(roce.all(), [Pkey { index: 0, key: 0xffff }]);
    }

    #[test]
    fn two_ports_use_the_partition_that_they_share() {
        for (mine, theirs, expected) in [
            (&[0xffff, 0x8012][..], &[0x8012][..], [0x8012, 0x8012]),
            (&[0x8012, 0xffff], &[0xffff, 0x8012], [0x8012, 0x8012]),
            (&[0x8012, 0x8013, 0xffff], &[0xffff, 0x8013], [0x8013, 0x8013]),
            // A limited member hears a full one.
            (&[0x7fff], &[0xffff], [0x7fff, 0xffff]),
            // Full members on both sides come first, wherever they stand.
            (&[0x7fff, 0x8012, 0x8013], &[0xffff, 0x0012, 0x8013], [0x8013, 0x8013]),
            (&[0x7fff, 0xffff], &[0x7fff], [0xffff, 0x7fff]),
        ] {
            assert_eq!(used(mine, theirs), expected.map(Some), "{mine:x?}, {theirs:x?}");
        }
        for (mine, theirs) in [(0x7fff, 0x7fff), (0x8012, 0x8013)] {
            assert_eq!(used(&[mine], &[theirs]), [None, None], "{mine:x}, {theirs:x}");
        }
    }

    fn any_keys() -> impl Strategy<Value = Vec<u16>> {
        prop::collection::vec((1..6u16, any::<bool>()), 0..6)
            .prop_map(|keys| keys.into_iter().map(|(key, full)| key | u16::from(full) << 15).collect())
    }

    proptest! {
        #[test]
        fn both_ends_take_keys_that_hear_each_other_if_there_are_any(mine in any_keys(), theirs in any_keys()) {
            let heard = mine.iter().any(|&key| theirs.iter().any(|&its| share_partition(key, its)));
            match used(&mine, &theirs) {
                [Some(key), Some(its)] => prop_assert!(share_partition(key, its)),
                neither => prop_assert_eq!((neither, heard), ([None, None], false)),
            }
        }

        #[test]
        fn a_reach_reads_back_as_it_was_and_leaves_the_rest(keys in any_keys(), ethernet in any::<bool>(), rest in prop::collection::vec(any::<u8>(), 0..5)) {
            let link = if ethernet { LinkLayer::Ethernet } else { IB };
            let reach = Reach { link, pkeys: keys };
            let bytes = [reach.to_bytes(), rest.clone()].concat();
            prop_assert_eq!(Reach::from_bytes(3, &bytes), Ok((reach, &rest[..])));
        }
    }

    #[test]
    fn a_reach_that_is_cut_or_names_no_partition_is_an_error() {
        let bytes = reach(&[0xffff, 0x12]).to_bytes();
        for len in 0..bytes.len() {
            let expected = if len < 3 { 3 } else { 7 };
            let short = VerbsError::EndpointLength { peer: 3, seen: len, expected };
            assert_eq!(Reach::from_bytes(3, &bytes[..len]), Err(short));
        }
        let nothing = VerbsError::EndpointField { peer: 3, field: "partition key", value: 0x8000 };
        assert_eq!(Reach::from_bytes(3, &reach(&[0x8000]).to_bytes()), Err(nothing));
        let nowhere = VerbsError::EndpointField { peer: 3, field: "network", value: 9 };
        assert_eq!(Reach::from_bytes(3, &[9, 0, 0]), Err(nowhere));
    }

    /// The announcement of NICs with these keys.
    fn said(nics: &[&[u16]]) -> Vec<u8> {
        let mut bytes = vec![1, nics.len() as u8];
        for (nth, pkeys) in nics.iter().enumerate() {
            bytes.extend([4, b'n', b'i', b'c', b'0' + nth as u8]);
            bytes.extend(Reach { link: LinkLayer::InfiniBand, pkeys: pkeys.to_vec() }.to_bytes());
        }
        bytes
    }

    fn compared(nodes: &[u32], said: &[Vec<u8>]) -> Result<(), (u32, VerbsError)> {
        compare(&NodeMap::from_labels(nodes), &said.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    #[test]
    fn first_pair_across_nodes_without_common_key_is_named() {
        let (a, b, both) = (said(&[&[0xffff]]), said(&[&[0x8012]]), said(&[&[0xffff, 0x8012]]));
        let ranks = |kinds: &[&Vec<u8>]| kinds.iter().map(|&kind| kind.clone()).collect::<Vec<_>>();
        assert_eq!(compared(&[0, 0, 1, 1], &ranks(&[&a, &both, &both, &a])), Ok(()));
        // Ranks of one node need no NIC for each other.
        assert_eq!(compared(&[0, 0, 1, 1], &ranks(&[&a, &b, &both, &both])), Ok(()));
        let differ = VerbsError::PartitionsDiffer {
            nic: "nic0".into(),
            peer: 3,
            mine: vec![0x8012],
            theirs: vec![0xffff],
        };
        assert_eq!(compared(&[0, 0, 1, 1], &ranks(&[&both, &b, &both, &a])), Err((1, differ)));
    }

    #[test]
    fn each_pair_is_compared_by_the_nics_of_its_rail() {
        let two = said(&[&[0xffff], &[0x8012]]);
        assert_eq!(compared(&[0, 1], &[two.clone(), two.clone()]), Ok(()));
        let swapped = said(&[&[0x8012], &[0xffff]]);
        let nodes = NodeMap::from_labels(&[0u32, 1]);
        let rail = rail(&nodes, 0, 1, 2);
        let error = compared(&[0, 1], &[two, swapped]).unwrap_err();
        assert!(
            matches!(&error, (0, VerbsError::PartitionsDiffer { nic, .. }) if *nic == format!("nic{rail}"))
        );
    }

    #[test]
    fn ranks_on_different_nodes_with_unequal_numbers_of_nics_are_named() {
        let (one, two) = (said(&[&[0xffff]]), said(&[&[0xffff], &[0xffff]]));
        let differ = VerbsError::NicCountsDiffer { peer: 2, mine: 2, theirs: 1 };
        assert_eq!(compared(&[0, 0, 1], &[one.clone(), two.clone(), one.clone()]), Err((1, differ)));
        assert_eq!(compared(&[0, 0], &[one, two]), Ok(()), "of one node");
    }

    #[test]
    fn nics_of_all_queue_pairs_are_compared() {
        let with = |queue_pairs: u8, nics: &[&[u16]]| [&[queue_pairs], &said(nics)[1..]].concat();
        let first = rail(&NodeMap::from_labels(&[0u32, 1]), 0, 1, 2);
        let [mut mine, mut theirs] = [[&[0xffff_u16][..]; 2]; 2];
        // The NIC of the second queue pair has another partition.
        (mine[1 - first], theirs[1 - first]) = (&[0x8012], &[0x8013]);
        assert_eq!(compared(&[0, 1], &[with(1, &mine), with(2, &theirs)]), Ok(()));
        let error = compared(&[0, 1], &[with(2, &mine), with(3, &theirs)]).unwrap_err();
        assert!(matches!(error, (0, VerbsError::PartitionsDiffer { peer: 1, .. })), "{error:?}");
    }

    #[test]
    fn malformed_announcement_is_error_that_names_its_rank() {
        let good = said(&[&[0xffff]]);
        let behind = [&good[..], &[0]].concat();
        for bad in [
            &[][..],
            &[1],
            &[1, 0],
            &[&[0], &good[1..]].concat(),
            &good[..3],
            &good[..good.len() - 1],
            &behind,
        ] {
            let (rank, error) = compared(&[0, 1], &[good.clone(), bad.to_vec()]).unwrap_err();
            assert!(rank == 1 && error.to_string().contains("rank 1"), "{error}");
        }
    }
}
