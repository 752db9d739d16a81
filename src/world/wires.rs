//! Laying the wires of a group: every pair of members that the route wires, and that has no wire yet, gets one.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::Group;
use super::rails::Kind;
use crate::bootstrap::exchange_fds;
use crate::error::{BootstrapError, Error, LaneError};
use crate::lane::{self, Card, Egress, Link, Wiring};
use crate::memory::{Mapped, Segment};
use crate::topology::Paths;

/// Lays what wires are missing. Collective over the group.
pub(super) fn lay(group: &Group, paths: &Paths) -> Result<(), Error> {
    let Some(rails) = &group.shared.rails else { return Ok(()) };
    let missing = |(&rank, position)| paths.wired(position) && rails.card.rail_to(rank).is_none();
    let wanted: Vec<bool> = group.ranks().iter().zip(0..).map(missing).collect();
    match &rails.kind {
        Kind::Loop(egress) => lay_segments(group, &rails.card, egress.as_ref(), &wanted),
        Kind::Wired(wiring) => join_ends(group, &rails.card, wiring.as_ref(), &wanted),
    }
}

/// Every pair shares a segment of its own. The lower rank of the world makes it.
fn lay_segments(
    group: &Group,
    card: &Card,
    egress: Option<&Arc<Egress>>,
    wanted: &[bool],
) -> Result<(), Error> {
    let own = group.shared.hub.rank();
    let mut made: Vec<Option<Segment>> = Vec::new();
    for (&rank, &want) in group.ranks().iter().zip(wanted) {
        if want && !group.shared.same_machine(rank) {
            return Err(BootstrapError::Unreachable { me: own, rank }.into());
        }
        let make = want && own < rank;
        made.push(make.then(|| Segment::create("sidelane-wire", lane::ring_bytes())).transpose()?);
    }
    let offer = |peer: usize| {
        wanted[peer].then(|| {
            let wire = made[peer].as_ref().map(AsFd::as_fd);
            [Some(card.bell()), wire].into_iter().flatten().collect::<Vec<BorrowedFd<'_>>>()
        })
    };
    let (hub, key) = (group.shared.hub.as_ref(), group.step());
    let deadline = group.shared.options.clocks.rendezvous;
    let received = exchange_fds(hub, &key, group.ranks(), group.rank() as usize, &offer, deadline)?;
    for ((mut fds, wire), &rank) in received.into_iter().map(Vec::into_iter).zip(made).zip(group.ranks()) {
        let Some(bell) = fds.next() else { continue };
        let wire = match (wire, fds.next()) {
            (Some(own), _) => own,
            (None, Some(theirs)) => Segment::adopt(theirs, rank)?,
            (None, None) => {
                let missing = "the segment of the wire";
                return Err(LaneError::NoLane { rank: own, peer: rank, missing }.into());
            }
        };
        let mapped = Arc::new(Mapped::new(&[Some(&wire)])?);
        mapped.populate(0, 0, wire.len())?;
        let (regions, egress) = (Arc::clone(card.regions()), egress.cloned());
        card.attach(Arc::new(Link::new(rank, own < rank, mapped, bell, regions, egress)?))?;
    }
    Ok(())
}

/// Both ends of each wire are opened, told of each other, and joined. Who fails says so, so that nobody waits for it.
fn join_ends(group: &Group, card: &Card, wiring: &dyn Wiring, wanted: &[bool]) -> Result<(), Error> {
    let hub = group.shared.hub.as_ref();
    let (own, step, deadline) = (hub.rank(), group.step(), group.shared.options.clocks.rendezvous);
    let partners = group.ranks().iter().zip(wanted).filter(|&(_, &want)| want).map(|(&rank, _)| rank);
    let partners: Vec<u32> = partners.collect();
    let key = |from: u32, to: u32| format!("{step}/{from}-{to}");
    let mut opened = Ok(());
    for &peer in &partners {
        // An empty offer says that there is none.
        let offer = wiring.offer(peer);
        hub.set(&key(own, peer), offer.as_deref().unwrap_or_default())?;
        opened = opened.and(offer.map(drop));
    }
    let mut joined = Vec::new();
    for &peer in &partners {
        let offered = hub.get(&key(peer, own), deadline)?;
        if opened.is_ok() && !offered.is_empty() {
            opened = wiring.join(peer, &offered).map(|rail| joined.push(rail));
        }
    }
    // Nobody sends before all ends are joined, and all learn of it if one is not.
    let verdicts = group.gather(&[u8::from(opened.is_ok() && joined.len() == partners.len())])?;
    opened?;
    if let Some((&rank, _)) = group.ranks().iter().zip(&verdicts).find(|(_, verdict)| verdict[..] != [1]) {
        return Err(LaneError::NoLane { rank: own, peer: rank, missing: "its end of a wire" }.into());
    }
    joined.into_iter().try_for_each(|rail| card.attach(rail))?;
    Ok(())
}
