//! What a rank keeps from world to world: its number and its listener of the first world, and the
//! newest world that it has agreed to.
//!
//! ```text
//!   epoch 0    members 0 1 2 3 4      numbers of the first world name a rank for ever
//!   epoch 1    members 0   2 3 4      accepted: from here on this rank joins no world with 1 in it
//!   epoch 3    members     2 3        epoch 2 was offered, and did not begin
//!              members     2 3 5      a spare was admitted as rank 5: worlds with it may follow
//!              members     2 3        it was dismissed: the larger world did not begin
//! ```

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Mutex;

use crate::bootstrap::health::lock;
use crate::bootstrap::wire::Roster;

/// No address.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// The worlds of a rank, one after the other.
#[derive(Debug)]
pub struct Lineage {
    /// The number of this rank among all that the job has had.
    pub rank: u32,
    /// Where this rank listens for survivors. It lives as long as this rank has a world, so a
    /// refused connection says that a rank is gone.
    pub listener: TcpListener,
    /// Where each rank that the job has had listens for survivors.
    addresses: Mutex<Vec<SocketAddr>>,
    newest: Mutex<Newest>,
}

#[derive(Debug)]
struct Newest {
    roster: Roster,
    /// Epoch of the world that goes on: an older one after a growth that failed.
    world: u16,
    /// Ranks that are known to be lost, with the epochs of the worlds that have lost them. One that
    /// has left may come to a rebuild.
    lost: BTreeSet<(u16, u32)>,
}

impl Newest {
    fn new(roster: Roster) -> Self {
        Newest { world: roster.epoch, roster, lost: BTreeSet::new() }
    }
}

impl Lineage {
    pub fn new(rank: u32, addresses: Vec<SocketAddr>, listener: TcpListener) -> Self {
        let members = (0..addresses.len() as u32).collect();
        Lineage::admitted(rank, addresses, listener, Roster { epoch: 0, members })
    }

    /// That of a spare, which is to be in a world that follows this one.
    pub fn admitted(rank: u32, addresses: Vec<SocketAddr>, listener: TcpListener, roster: Roster) -> Self {
        let newest = Mutex::new(Newest::new(roster));
        Lineage { rank, listener, addresses: Mutex::new(addresses), newest }
    }

    /// Number of ranks that the job has had, each with a number of its own.
    pub fn ranks(&self) -> u32 {
        lock(&self.addresses).len() as u32
    }

    /// Where a rank listens for survivors.
    pub fn address(&self, rank: u32) -> SocketAddr {
        lock(&self.addresses)[rank as usize]
    }

    /// Takes spares into a world, with the numbers from `first` on: worlds that follow may have
    /// them. No rank of this job has one of these numbers. Returns the world with them, under the
    /// newest epoch that this rank has agreed to: growths that failed may have used some.
    pub fn admit(&self, members: &[u32], first: u32, spares: &[SocketAddr]) -> Roster {
        let mut addresses = lock(&self.addresses);
        // Spares that other ranks know of, and that no world has.
        addresses.resize(first as usize, NOWHERE);
        addresses.extend(spares);
        let mut newest = lock(&self.newest);
        newest.roster.members = members.iter().copied().chain(first..addresses.len() as u32).collect();
        newest.roster.clone()
    }

    /// The world with the spares from this number on did not begin: that of this epoch goes on. No
    /// later one has the spares, and they count for nothing among the survivors.
    pub fn dismiss(&self, first: u32, epoch: u16) {
        let mut newest = lock(&self.newest);
        newest.roster.members.retain(|&member| member < first);
        newest.world = epoch;
    }

    /// The newest world that this rank has agreed to. Others may have begun it.
    pub fn accepted(&self) -> Roster {
        lock(&self.newest).roster.clone()
    }

    /// Agrees to a world. False if this rank may not be in it: it is not a later one, or it has
    /// ranks that this rank has gone on without.
    pub fn accept(&self, next: &Roster) -> bool {
        let mut newest = lock(&self.newest);
        let known = next.members.iter().all(|&rank| newest.roster.has(rank));
        let may = known && next.has(self.rank) && next.epoch > newest.roster.epoch;
        if may {
            // The next world may not begin, and then the one that goes on has lost these still.
            let mut lost = std::mem::take(&mut newest.lost);
            lost.retain(|&(epoch, _)| epoch == newest.world);
            *newest = Newest { lost, ..Newest::new(next.clone()) };
        }
        may
    }

    /// Whether the world that goes on is known to have lost a rank.
    pub fn is_lost(&self, rank: u32) -> bool {
        let newest = lock(&self.newest);
        newest.lost.contains(&(newest.world, rank))
    }

    /// A member that was lost, or taken for lost behind a cut, answers.
    pub fn note_found(&self, rank: u32) {
        lock(&self.newest).lost.retain(|&(_, lost)| lost != rank);
    }

    /// A member of the world of an epoch is lost.
    pub fn note_lost(&self, epoch: u16, rank: u32) {
        lock(&self.newest).lost.insert((epoch, rank));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn lineage(rank: u32, size: u32) -> Lineage {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        Lineage::new(rank, vec![listener.local_addr().unwrap(); size as usize], listener)
    }

    fn roster(epoch: u16, members: &[u32]) -> Roster {
        Roster { epoch, members: members.to_vec() }
    }

    #[test]
    fn rank_accepts_only_later_worlds_of_ranks_in_its_last_world() {
        let lineage = lineage(2, 5);
        assert_eq!(lineage.accepted(), roster(0, &[0, 1, 2, 3, 4]));
        assert!(!lineage.accept(&roster(0, &[1, 2, 3])), "the epoch is taken");
        assert!(!lineage.accept(&roster(1, &[1, 3])), "it is not in it");
        assert!(lineage.accept(&roster(3, &[1, 2, 3])));
        assert!(!lineage.accept(&roster(2, &[2, 3])), "an older world");
        assert!(!lineage.accept(&roster(4, &[0, 2, 3])), "rank 0 was left behind");
        assert_eq!(lineage.accepted(), roster(3, &[1, 2, 3]));
    }

    #[test]
    fn spares_that_are_admitted_may_be_in_later_worlds() {
        let lineage = lineage(0, 3);
        assert!(lineage.accept(&roster(1, &[0, 2])));
        let spare = lineage.address(0);
        assert!(!lineage.accept(&roster(2, &[0, 2, 3])), "rank 3 is a stranger");
        assert_eq!(lineage.admit(&[0, 2], 3, &[spare]), roster(1, &[0, 2, 3]));
        assert_eq!((lineage.ranks(), lineage.accepted()), (4, roster(1, &[0, 2, 3])));
        assert!(lineage.accept(&roster(2, &[0, 2])), "the spare did not come");
        assert_eq!(lineage.admit(&[0, 2], 4, &[spare]), roster(2, &[0, 2, 4]), "no number twice");
        assert!(lineage.accept(&roster(3, &[0, 2, 4])));
    }

    #[test]
    fn spares_of_a_growth_that_failed_are_strangers_again() {
        let lineage = lineage(0, 3);
        let spare = lineage.address(0);
        assert_eq!(lineage.admit(&[0, 1, 2], 3, &[spare, spare]), roster(0, &[0, 1, 2, 3, 4]));
        assert!(lineage.accept(&roster(1, &[0, 1, 2, 3, 4])));
        lineage.dismiss(3, 0);
        assert_eq!((lineage.ranks(), lineage.accepted()), (5, roster(1, &[0, 1, 2])));
        assert!(!lineage.accept(&roster(2, &[0, 3, 4])), "two spares and one rank are no majority");
        assert_eq!(lineage.admit(&[0, 1, 2], 5, &[spare]), roster(1, &[0, 1, 2, 5]), "the next growth");
        assert!(lineage.accept(&roster(2, &[0, 1, 2, 5])));
    }

    #[test]
    fn rank_that_missed_a_growth_numbers_spares_as_the_others_do() {
        let lineage = lineage(0, 3);
        let spare = lineage.address(0);
        assert_eq!(lineage.admit(&[0, 1, 2], 4, &[spare]), roster(0, &[0, 1, 2, 4]));
        assert_eq!((lineage.ranks(), lineage.address(4)), (5, spare));
    }

    #[test]
    fn losses_after_failed_growth_are_those_of_old_world() {
        let lineage = lineage(0, 4);
        let spare = lineage.address(0);
        lineage.admit(&[0, 1, 2, 3], 4, &[spare]);
        assert!(lineage.accept(&roster(1, &[0, 1, 2, 3, 4])));
        lineage.note_lost(1, 2);
        lineage.note_lost(0, 3);
        assert!(lineage.is_lost(2) && !lineage.is_lost(3));
        lineage.dismiss(4, 0);
        assert!(!lineage.is_lost(2), "it left the larger world, and is in the old one");
        assert!(lineage.is_lost(3), "while the larger world was built");
        lineage.note_lost(0, 1);
        assert!(lineage.is_lost(1), "later");
        assert!(lineage.accept(&roster(2, &[0, 2])));
        assert!(!lineage.is_lost(1) && !lineage.is_lost(3));
    }

    #[test]
    fn losses_are_those_of_the_newest_world() {
        let lineage = lineage(0, 4);
        lineage.note_lost(0, 3);
        lineage.note_lost(0, 2);
        assert!(lineage.is_lost(3) && lineage.is_lost(2) && !lineage.is_lost(1));
        lineage.note_found(2);
        assert!(!lineage.is_lost(2));
        assert!(lineage.accept(&roster(1, &[0, 1, 3])), "rank 3 has come after all");
        assert!(!lineage.is_lost(3));
        lineage.note_lost(0, 1);
        assert!(!lineage.is_lost(1), "it has left the old world for the new one");
    }
}
