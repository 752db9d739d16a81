//! Ports: whether they carry traffic, and what kind of network they are on.

use super::ffi::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048,
    IBV_MTU_4096, IBV_PORT_ACTIVE, IBV_PORT_ARMED, IBV_PORT_DOWN, IBV_PORT_INIT, ibv_port_attr,
};

/// A port of a NIC, as of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it carries traffic.
    pub state: PortState,
    /// Its network; `None` where the NIC does not report it (iWARP).
    pub link: Option<LinkLayer>,
    /// Its address within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// The largest packet it sends now.
    pub mtu: Mtu,
}

/// Whether a port carries traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// A link, but no subnet manager has been here.
    Initialising,
    /// Configured, not yet in use.
    Armed,
    /// It carries traffic.
    Active,
    /// Something newer.
    Other(u32),
}

impl PortState {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            PortState::Down => "down",
            PortState::Initialising => "initialising",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::Other(_) => "in an unknown state",
        }
    }
}

/// The network under a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

impl LinkLayer {
    pub(super) fn code(self) -> u8 {
        match self {
            LinkLayer::InfiniBand => IBV_LINK_LAYER_INFINIBAND,
            LinkLayer::Ethernet => IBV_LINK_LAYER_ETHERNET,
        }
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        [LinkLayer::InfiniBand, LinkLayer::Ethernet].into_iter().find(|link| link.code() == code)
    }
}

/// The largest packet on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// All, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// In bytes.
    pub fn bytes(self) -> u32 {
        256 << self as u32
    }

    pub(super) fn code(self) -> u32 {
        match self {
            Mtu::B256 => IBV_MTU_256,
            Mtu::B512 => IBV_MTU_512,
            Mtu::B1024 => IBV_MTU_1024,
            Mtu::B2048 => IBV_MTU_2048,
            Mtu::B4096 => IBV_MTU_4096,
        }
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }
}

impl Port {
    pub(super) fn of(number: u8, attr: &ibv_port_attr) -> Self {
        let state = match attr.state {
            IBV_PORT_DOWN => PortState::Down,
            IBV_PORT_INIT => PortState::Initialising,
            IBV_PORT_ARMED => PortState::Armed,
            IBV_PORT_ACTIVE => PortState::Active,
            other => PortState::Other(other),
        };
        let link = LinkLayer::from_code(attr.link_layer);
        // A code that is not known is larger than any that is.
        let mtu = Mtu::from_code(attr.active_mtu).unwrap_or(Mtu::B4096);
        Port { number, state, link, lid: attr.lid, mtu }
    }
}
