//! Laying the wires of a group: every pair of members that the route wires, and that has no wire yet, gets one.
//!
//! Both ends of each wire are opened, told of each other, and joined. A rank that fails says so, so that no rank waits for it.

use std::os::fd::{AsFd, BorrowedFd};

use super::Group;
use crate::bootstrap::exchange_fds;
use crate::error::{Error, LaneError};
use crate::lane::WireOffer;
use crate::topology::Paths;

/// Lays what wires are missing. Collective over the group.
pub(super) fn lay(group: &Group, paths: &Paths) -> Result<(), Error> {
    let Some(rails) = &group.shared.rails else { return Ok(()) };
    let (wiring, card, own) = (&*rails.wiring, &rails.card, group.shared.hub.rank());
    let wanted = |&(_, (&rank, position)): &(usize, (&u32, u32))| {
        paths.wired(position) && card.rail_to(rank).is_none()
    };
    let members = group.ranks().iter().zip(0..).enumerate();
    let peers: Vec<(usize, u32)> = members.filter(wanted).map(|(at, (&rank, _))| (at, rank)).collect();
    let mut opened = Ok(());
    let offers: Vec<WireOffer> = peers
        .iter()
        .map(|&(_, peer)| {
            let offer = wiring.offer(peer).map_err(|error| {
                if opened.is_ok() {
                    opened = Err(error);
                }
            });
            // An empty offer says that there is none.
            offer.unwrap_or_default()
        })
        .collect();
    let offered = match wiring.passes_descriptors() {
        true => pass_descriptors(group, &peers, &offers)?,
        false => pass_bytes(group, &peers, &offers)?,
    };
    let mut joined = Vec::new();
    for (&(_, peer), offered) in peers.iter().zip(offered) {
        if opened.is_ok() && !offered.is_empty() {
            opened = wiring.join(peer, offered).map(|rail| joined.push(rail));
        }
    }
    // Nobody sends before all ends are joined, and all learn of it if one is not.
    let verdicts = group.gather(&[u8::from(opened.is_ok() && joined.len() == peers.len())])?;
    opened?;
    if let Some((&rank, _)) = group.ranks().iter().zip(&verdicts).find(|(_, verdict)| verdict[..] != [1]) {
        return Err(LaneError::NoLane { rank: own, peer: rank, missing: "its end of a wire" }.into());
    }
    joined.into_iter().try_for_each(|rail| card.attach(rail))?;
    Ok(())
}

/// Offers by the rendezvous.
fn pass_bytes(group: &Group, peers: &[(usize, u32)], offers: &[WireOffer]) -> Result<Vec<WireOffer>, Error> {
    let (hub, step) = (group.shared.hub.as_ref(), group.step());
    let (own, deadline) = (hub.rank(), group.shared.options.clocks.rendezvous);
    let key = |from: u32, to: u32| format!("{step}/{from}-{to}");
    for (&(_, peer), offer) in peers.iter().zip(offers) {
        hub.set(&key(own, peer), &offer.bytes)?;
    }
    peers.iter().map(|&(_, peer)| Ok(hub.get(&key(peer, own), deadline)?.into())).collect()
}

/// Offers between processes of one machine.
fn pass_descriptors(
    group: &Group,
    peers: &[(usize, u32)],
    offers: &[WireOffer],
) -> Result<Vec<WireOffer>, Error> {
    let offer = |member: usize| -> Option<Vec<BorrowedFd<'_>>> {
        let nth = peers.iter().position(|&(at, _)| at == member)?;
        Some(offers[nth].descriptors.iter().map(AsFd::as_fd).collect())
    };
    let (hub, me) = (group.shared.hub.as_ref(), group.rank() as usize);
    let deadline = group.shared.options.clocks.rendezvous;
    let mut received = exchange_fds(hub, &group.step(), group.ranks(), me, &offer, deadline)?;
    let mut take = |&(at, _): &(usize, u32)| std::mem::take(&mut received[at]);
    Ok(peers.iter().map(|peer| WireOffer { bytes: Vec::new(), descriptors: take(peer) }).collect())
}
