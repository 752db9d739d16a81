//! Whether the NICs of all ranks reach each other, known before a lane is agreed on.
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

use super::nic::Nic;
use super::partition::Reach;
use crate::error::VerbsError;
use crate::topology::NodeMap;

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
    use sidelane_core::nic_choice::LinkLayer;

    use super::*;

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
