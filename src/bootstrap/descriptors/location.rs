//! Where a process runs: what decides whether two ranks can share memory.

use std::{fs, os::unix::fs::MetadataExt};

use crate::{
    bootstrap::{
        os::failed,
        wire::{Malformed, Reader, Writer},
    },
    error::BootstrapError,
};

/// The place of a process. Two processes share a *machine* if the same kernel runs them, in one
/// network namespace (through which descriptors are passed), for one user. They share a *node*
/// unless `SIDELANE_NODE` makes them act as different nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    boot: String,
    network: u64,
    user: u32,
    node: String,
}

impl Location {
    /// The place of this process. `SIDELANE_NODE` splits a machine into nodes: ranks with different
    /// values act as if they were on different machines, although descriptors can still be passed.
    pub fn here() -> Result<Self, BootstrapError> {
        Location::in_node(&std::env::var("SIDELANE_NODE").unwrap_or_default())
    }

    /// The place of this process, in the node of this name.
    pub fn in_node(node: &str) -> Result<Self, BootstrapError> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let boot = boot.map_err(|error| failed("read of boot_id", &error))?.trim_end().to_owned();
        let network = fs::metadata("/proc/self/ns/net").map_err(|error| failed("stat of ns/net", &error))?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Location { boot, network: network.ino(), user, node: node.to_owned() })
    }

    /// The label to gather from all ranks.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.bytes(self.boot.as_bytes());
        writer.u64(self.network);
        writer.u32(self.user);
        writer.bytes(self.node.as_bytes());
        writer.finish()
    }

    /// The place of rank `rank` from its label.
    pub fn from_bytes(rank: u32, label: &[u8]) -> Result<Self, BootstrapError> {
        parse(label).map_err(|Malformed| BootstrapError::Malformed { peer: format!("rank {rank}") })
    }

    /// Whether two places are on one machine, whatever nodes it is split into.
    pub fn same_machine(&self, other: &Location) -> bool {
        (&self.boot, self.network, self.user) == (&other.boot, other.network, other.user)
    }

    /// Whether two places are in one node.
    pub fn same_node(&self, other: &Location) -> bool {
        self == other
    }
}

fn parse(label: &[u8]) -> Result<Location, Malformed> {
    let mut outer = Reader::new(label);
    let body = outer.bytes()?;
    outer.end()?;
    let mut r = Reader::new(body);
    let location = Location { boot: r.text()?, network: r.u64()?, user: r.u32()?, node: r.text()? };
    r.end()?;
    Ok(location)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_carries_the_place() {
        let here = Location::in_node("rack 7").unwrap();
        assert!(!here.boot.is_empty());
        assert_eq!(Location::from_bytes(3, &here.to_bytes()), Ok(here.clone()));
        let error = Location::from_bytes(3, &here.to_bytes()[1..]);
        assert_eq!(error, Err(BootstrapError::Malformed { peer: "rank 3".into() }));
    }

    #[test]
    fn a_machine_can_be_split_into_nodes() {
        let (a, b) = (Location::in_node("a").unwrap(), Location::in_node("b").unwrap());
        assert!(a.same_machine(&b) && !a.same_node(&b));
        assert!(a.same_node(&a.clone()));
        let elsewhere = Location { boot: "other".into(), ..a.clone() };
        assert!(!a.same_machine(&elsewhere));
    }
}
