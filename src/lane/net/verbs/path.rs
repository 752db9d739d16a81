//! Path of a queue pair through the network: everything that connecting sets next to the peer's
//! address.

use std::net::Ipv6Addr;

use super::port::{LinkLayer, Mtu};

/// Our side of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The port's number.
    pub port: u8,
    /// Its network.
    pub link: LinkLayer,
    /// Its address within an InfiniBand subnet.
    pub lid: u16,
    /// Place of its GID in the port's table.
    pub gid_index: u8,
    /// That GID.
    pub gid: Ipv6Addr,
    /// The largest packet; a connection uses the smaller of both ends.
    pub mtu: Mtu,
    /// Place of the partition key in the port's table.
    pub pkey_index: u16,
    /// InfiniBand's service level; the priority on Ethernet.
    pub service_level: u8,
    /// Traffic class of the global header: DSCP and ECN of RoCE v2.
    pub traffic_class: u8,
    /// Time for an answer: 4.096 us * 2^timeout; 0 waits for ever.
    pub timeout: u8,
    /// How often an unanswered request is sent again, at most 7.
    pub retries: u8,
    /// How often one is sent again that met no receive; 7 is for ever.
    pub rnr_retries: u8,
}

impl Path {
    /// Whether packets to this GID need the global header: always on Ethernet; on InfiniBand only
    /// beyond the subnet.
    pub(super) fn is_global(&self, remote: Ipv6Addr) -> bool {
        let network = |gid: Ipv6Addr| gid.to_bits() >> 64;
        self.link == LinkLayer::Ethernet || network(self.gid) != network(remote)
    }
}
