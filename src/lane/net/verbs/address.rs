//! Addresses of a port: its table, and the entry that connections use.
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

use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use sidelane_core::nic_choice::LinkLayer;

use super::Settings;
use super::nic::{Sysfs, numbered, read};
use crate::error::VerbsError;

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

#[cfg(test)]
mod tests {
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
}
