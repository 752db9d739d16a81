//! Partitions: the keys of a port, and the one that a connection of two ports uses.
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

use std::sync::Arc;

use sidelane_core::nic_choice::LinkLayer;

use super::nic::{Sysfs, link_code, link_of, numbered, read};
use crate::error::VerbsError;

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lane::net::verbs::fake::Tree;

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
}
