//! Gathering of the survivors of a world: who is here, whom the next world leaves out, and when it
//! begins. A state machine without sockets, which gets the time from its caller.
//!
//! ```text
//!   join 2, join 5, join 4 ──► all that are not gone, or the window is over ──► Offer { epoch, 2 4 5 }
//!   accept 2, accept 5, accept 4 ──────────────────────────────────────────────► Begin
//!   part 5 before that ──► the offer is void; the next one has another epoch
//! ```
//!
//! **Two rounds.** A rank that accepts an offer cannot know whether the others began that world, so
//! from then on it joins none that has other members. Two worlds that share a member are thus
//! always a world and its successor, and two worlds with more than half of the ranks share one.
//!
//! **Left out.** Two ranks cannot be in one world if the one has agreed to a world without the
//! other, or if they do not reach each other although both reach the host. Of such pairs the rank
//! that is in most goes, among equals the highest, and never the host. A rank that knows the other,
//! and is unknown to it, is a spare that the other has not admitted: the pair counts for it alone.
//!
//! **Window.** It is for ranks that died unnoticed, and opens with the second arrival: a rank alone
//! never concludes that it is the only one left.
//!
//! **Lineage.** A rank keeps from world to world its number and its listener of the first world,
//! and the newest world that it has agreed to:
//!
//! ```text
//!   epoch 0    members 0 1 2 3 4      numbers of the first world name a rank for ever
//!   epoch 1    members 0   2 3 4      accepted: from here on this rank joins no world with 1 in it
//!   epoch 3    members     2 3        epoch 2 was offered, and did not begin
//!              members     2 3 5      a spare was admitted as rank 5: worlds with it may follow
//!              members     2 3        it was dismissed: the larger world did not begin
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::bootstrap::health::lock;
use crate::bootstrap::wire::{Roster, Survivor};

/// The next step of a hosting rank.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Wait,
    /// Ask these ranks whether they agree.
    Offer(Roster),
    /// All have agreed.
    Begin(Roster),
}

#[derive(Debug)]
struct Offer {
    roster: Roster,
    accepted: BTreeSet<u32>,
}

/// The survivors that have come to one host.
#[derive(Debug)]
pub struct Gathering {
    /// The rank that may not be left out. Ranks that are threads of one process need no host.
    host: Option<u32>,
    window: Duration,
    here: BTreeMap<u32, Survivor>,
    second: Option<Instant>,
    offer: Option<Offer>,
}

impl Gathering {
    pub fn new(host: Option<u32>, window: Duration) -> Self {
        Gathering { host, window, here: BTreeMap::new(), second: None, offer: None }
    }

    /// The epoch that has gone on without a rank that comes.
    pub fn evicts(&self, rank: u32, survivor: &Survivor) -> Option<u16> {
        let newer = |other: &&Roster| other.epoch > survivor.roster.epoch && !other.has(rank);
        let rosters = self.here.values().map(|other| &other.roster);
        rosters.filter(newer).map(|roster| roster.epoch).max()
    }

    /// A rank comes. Returns the ranks that newer worlds have gone on without, which may be this
    /// one, and the epochs of those worlds.
    pub fn join(&mut self, rank: u32, survivor: Survivor, now: Instant) -> Vec<(u32, u16)> {
        if let Some(epoch) = self.evicts(rank, &survivor) {
            return vec![(rank, epoch)];
        }
        self.part(rank, now);
        let roster = survivor.roster.clone();
        self.here.insert(rank, survivor);
        if self.here.len() == 2 {
            self.second = Some(now);
        }
        let older = |(other, seen): (&u32, &Survivor)| {
            (seen.roster.epoch < roster.epoch && !roster.has(*other)).then_some((*other, roster.epoch))
        };
        let evicted: Vec<(u32, u16)> = self.here.iter().filter_map(older).collect();
        evicted.iter().for_each(|&(other, _)| self.part(other, now));
        evicted
    }

    /// A rank goes away. If an offer needs it, there will be another one, for which it has a window
    /// to come back.
    pub fn part(&mut self, rank: u32, now: Instant) {
        if self.here.remove(&rank).is_none() {
            return;
        }
        if self.offer.as_ref().is_some_and(|offer| offer.roster.has(rank)) {
            self.offer = None;
            self.second = Some(now);
        }
        if self.here.len() < 2 {
            self.second = None;
        }
    }

    /// A rank agrees to a world. That of a rank that was not asked counts for nothing.
    pub fn accept(&mut self, rank: u32, epoch: u16) {
        let is_asked = |offer: &&mut Offer| offer.roster.epoch == epoch && offer.roster.has(rank);
        if let Some(offer) = self.offer.as_mut().filter(is_asked) {
            offer.accepted.insert(rank);
        }
    }

    /// The ranks that have come.
    pub fn here(&self) -> impl Iterator<Item = u32> {
        self.here.keys().copied()
    }

    /// Ranks of the newest world that have not come.
    pub fn missing(&self, gone: &BTreeSet<u32>) -> Vec<u32> {
        let newest = self.here.values().map(|survivor| &survivor.roster).max_by_key(|roster| roster.epoch);
        let members = newest.into_iter().flat_map(|roster| roster.members.iter().copied());
        members.filter(|rank| !self.here.contains_key(rank) && !gone.contains(rank)).collect()
    }

    /// When the window is over.
    pub fn closes(&self) -> Option<Instant> {
        self.offer.is_none().then_some(self.second? + self.window)
    }

    /// Whether ranks were asked, and not all have agreed.
    pub fn is_offered(&self) -> bool {
        self.offer.is_some()
    }

    /// The next step, given the ranks that are known to be gone.
    pub fn step(&mut self, gone: &BTreeSet<u32>, now: Instant) -> Step {
        if let Some(offer) = &self.offer {
            let all = offer.accepted.len() == offer.roster.members.len();
            return if all { Step::Begin(offer.roster.clone()) } else { Step::Wait };
        }
        let hosted = self.host.is_none_or(|host| self.here.contains_key(&host));
        let complete = !self.here.is_empty() && self.missing(gone).is_empty();
        let closed = self.closes().is_some_and(|closes| now >= closes);
        if !hosted || !(complete || closed) {
            return Step::Wait;
        }
        let members = self.fitting();
        let at_least = self.here.values().map(|survivor| survivor.at_least).max().unwrap_or_default();
        let last = self.here.values().map(|survivor| survivor.roster.epoch).max();
        // No epoch is used twice, so the last one is followed by none.
        let Some(epoch) = last.and_then(|last| last.checked_add(1)) else { return Step::Wait };
        if (members.len() as u64) < u64::from(at_least) {
            return Step::Wait;
        }
        let roster = Roster { epoch, members };
        for rank in &roster.members {
            // It may agree, and go away before that is heard.
            if let Some(survivor) = self.here.get_mut(rank) {
                survivor.roster.clone_from(&roster);
            }
        }
        self.offer = Some(Offer { roster: roster.clone(), accepted: BTreeSet::new() });
        Step::Offer(roster)
    }

    /// Ranks that can be in one world.
    fn fitting(&self) -> Vec<u32> {
        let mut fit: Vec<u32> = self.here.keys().copied().collect();
        loop {
            let mut apart: BTreeMap<u32, usize> = BTreeMap::new();
            for (nth, &a) in fit.iter().enumerate() {
                for &b in &fit[nth + 1..] {
                    let is_cut = self.is_cut_off(a, b) || self.is_cut_off(b, a);
                    for (rank, other) in [(a, b), (b, a)] {
                        if is_cut || !self.knows(other, rank) {
                            *apart.entry(rank).or_default() += 1;
                        }
                    }
                }
            }
            let may_go = apart.into_iter().filter(|&(rank, _)| Some(rank) != self.host);
            let Some((goes, _)) = may_go.max_by_key(|&(rank, pairs)| (pairs, rank)) else { return fit };
            fit.retain(|&rank| rank != goes);
        }
    }

    fn is_cut_off(&self, rank: u32, other: u32) -> bool {
        self.here.get(&rank).is_some_and(|survivor| survivor.cut_off.contains(&other))
    }

    /// Whether the newest world of a rank has the other.
    fn knows(&self, rank: u32, other: u32) -> bool {
        self.here.get(&rank).is_none_or(|survivor| survivor.roster.has(other))
    }
}

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
    use super::*;

    const WINDOW: Duration = Duration::from_secs(3);

    fn roster(epoch: u16, members: impl IntoIterator<Item = u32>) -> Roster {
        Roster { epoch, members: members.into_iter().collect() }
    }

    fn survivor(roster: Roster) -> Survivor {
        Survivor { roster, at_least: 1, cut_off: Vec::new() }
    }

    /// Survivors of a first world of `size` ranks that have come to the lowest of them.
    fn gathered(size: u32, here: &[u32], now: Instant) -> Gathering {
        let mut gathering = Gathering::new(here.first().copied(), WINDOW);
        for &rank in here {
            assert_eq!(gathering.join(rank, survivor(roster(0, 0..size)), now), []);
        }
        gathering
    }

    fn gone(ranks: &[u32]) -> BTreeSet<u32> {
        ranks.iter().copied().collect()
    }

    #[test]
    fn world_begins_when_all_that_are_not_gone_have_agreed() {
        let now = Instant::now();
        let mut gathering = gathered(4, &[1, 3], now);
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Wait);
        assert_eq!(gathering.missing(&gone(&[2])), [0]);
        let next = roster(1, [1, 3]);
        assert_eq!(gathering.step(&gone(&[0, 2]), now), Step::Offer(next.clone()));
        gathering.accept(1, 1);
        gathering.accept(3, 0);
        assert_eq!(gathering.step(&gone(&[0, 2]), now), Step::Wait, "one has agreed to something else");
        gathering.accept(3, 1);
        assert_eq!(gathering.step(&gone(&[0, 2]), now), Step::Begin(next));
    }

    #[test]
    fn window_opens_with_the_second_arrival() {
        let now = Instant::now();
        let mut gathering = gathered(4, &[1], now);
        let later = now + WINDOW * 9;
        assert_eq!(gathering.step(&gone(&[]), later), Step::Wait, "alone, it waits");
        gathering.join(2, survivor(roster(0, 0..4)), later);
        assert_eq!(gathering.step(&gone(&[]), later + WINDOW / 2), Step::Wait);
        assert_eq!(gathering.step(&gone(&[]), later + WINDOW), Step::Offer(roster(1, [1, 2])));
        let mut alone = gathered(4, &[1], now);
        let step = alone.step(&gone(&[0, 2, 3]), now);
        assert_eq!(step, Step::Offer(roster(1, [1])), "known to be the only one");
    }

    #[test]
    fn loss_after_an_offer_makes_another_one_with_another_epoch() {
        let now = Instant::now();
        let mut gathering = gathered(4, &[0, 1, 2, 3], now);
        assert_eq!(gathering.step(&gone(&[]), now), Step::Offer(roster(1, 0..4)));
        gathering.accept(0, 1);
        gathering.part(2, now);
        assert_eq!(gathering.step(&gone(&[]), now + WINDOW / 2), Step::Wait, "it may come back");
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Offer(roster(2, [0, 1, 3])));
        gathering.accept(0, 1);
        [1, 3].into_iter().for_each(|rank| gathering.accept(rank, 2));
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Wait, "an answer to the first offer");
    }

    #[test]
    fn rank_that_a_newer_world_has_left_behind_is_evicted() {
        let now = Instant::now();
        let mut gathering = gathered(4, &[1, 2], now);
        let newer = survivor(roster(3, [1, 3]));
        assert_eq!(gathering.join(3, newer, now), [(2, 3)], "before it");
        assert_eq!(gathering.join(2, survivor(roster(0, 0..4)), now), [(2, 3)], "and after it");
        assert_eq!(gathering.step(&gone(&[]), now), Step::Offer(roster(4, [1, 3])));
    }

    #[test]
    fn ranks_of_two_worlds_of_one_epoch_are_not_mixed() {
        let now = Instant::now();
        let mut gathering = Gathering::new(Some(1), WINDOW);
        gathering.join(1, survivor(roster(1, [1, 2, 5])), now);
        gathering.join(2, survivor(roster(1, [1, 2, 5])), now);
        assert_eq!(gathering.join(4, survivor(roster(1, [3, 4])), now), []);
        assert_eq!(gathering.step(&gone(&[]), now + WINDOW), Step::Offer(roster(2, [1, 2])));
    }

    #[test]
    fn spares_that_a_member_has_not_admitted_are_left_out() {
        let now = Instant::now();
        let mut gathering = Gathering::new(Some(0), WINDOW);
        for rank in [0, 1, 3, 4] {
            gathering.join(rank, survivor(roster(1, [0, 1, 2, 3, 4])), now);
        }
        gathering.join(2, survivor(roster(1, [0, 1, 2])), now);
        assert_eq!(gathering.step(&gone(&[]), now), Step::Offer(roster(2, [0, 1, 2])));
    }

    #[test]
    fn fewer_ranks_than_one_wants_are_no_world() {
        let now = Instant::now();
        let mut gathering = gathered(4, &[0, 1], now);
        let wants_three = Survivor { at_least: 3, ..survivor(roster(0, 0..4)) };
        gathering.join(1, wants_three, now);
        assert_eq!(gathering.step(&gone(&[2, 3]), now + WINDOW), Step::Wait);
        gathering.join(2, survivor(roster(0, 0..4)), now);
        assert_eq!(gathering.step(&gone(&[3]), now), Step::Offer(roster(1, [0, 1, 2])));
    }

    #[test]
    fn rank_with_most_cut_connections_is_left_out() {
        let offered = |cuts: &[(u32, u32)]| {
            let now = Instant::now();
            let mut gathering = Gathering::new(Some(0), WINDOW);
            for rank in 0..5 {
                let cut_off = cuts.iter().filter(|cut| cut.0 == rank).map(|cut| cut.1).collect();
                gathering.join(rank, Survivor { cut_off, ..survivor(roster(0, 0..5)) }, now);
            }
            match gathering.step(&gone(&[]), now) {
                Step::Offer(roster) => roster.members,
                step => panic!("{step:?}"),
            }
        };
        assert_eq!(offered(&[]), [0, 1, 2, 3, 4]);
        assert_eq!(offered(&[(1, 3), (3, 1)]), [0, 1, 2, 4], "of equals the highest");
        assert_eq!(offered(&[(1, 2), (1, 3)]), [0, 2, 3, 4], "one side has two cuts");
        assert_eq!(offered(&[(4, 0)]), [0, 1, 2, 3], "the host stays");
        assert_eq!(offered(&[(1, 2), (3, 4)]), [0, 1, 3]);
    }

    #[test]
    fn agreement_of_a_rank_that_was_not_asked_begins_no_world() {
        let now = Instant::now();
        let mut gathering = gathered(3, &[0, 1], now);
        let next = roster(1, [0, 1]);
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Offer(next.clone()));
        gathering.accept(0, 1);
        gathering.accept(2, 1);
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Wait, "rank 1 has not answered");
        gathering.accept(1, 1);
        assert_eq!(gathering.step(&gone(&[2]), now), Step::Begin(next));
    }

    #[test]
    fn epochs_end() {
        let now = Instant::now();
        let mut gathering = Gathering::new(None, WINDOW);
        gathering.join(0, survivor(roster(u16::MAX, [0])), now);
        assert_eq!(gathering.step(&gone(&[]), now), Step::Wait);
    }

    /// Events at a host, of three bytes each: kind, rank, argument.
    const EVENTS: [&[u8]; 3] = [
        &[0, 0, 0, 0, 1, 0, 0, 2, 0, 3, 0, 0, 2, 0, 1, 2, 1, 1, 2, 2, 1, 3, 0, 0],
        &[0, 0, 0, 0, 2, 0, 4, 0, 0, 3, 0, 0, 2, 0, 1, 1, 2, 0, 3, 0, 0, 0, 2, 1, 3, 0, 0],
        &[0, 1, 0, 0, 0, 3, 0, 2, 7, 3, 0, 0, 5, 3, 0, 3, 0, 0],
    ];

    #[test]
    fn world_begins_in_a_later_epoch_and_when_all_have_agreed() {
        let seeds = EVENTS.map(<[u8]>::to_vec);
        fuzz::run("gathering", &seeds, |bytes| {
            let (start, mut gathering, mut gone) =
                (Instant::now(), Gathering::new(Some(0), WINDOW), BTreeSet::new());
            // Of each rank the newest world that it has agreed to, and of the offer who has agreed.
            let mut newest: BTreeMap<u32, Roster> = BTreeMap::new();
            let (mut offered, mut agreed) = (None::<Roster>, BTreeSet::new());
            // Ranks that were asked and have not come anew: none agrees to an offer of a connection
            // that it has given up.
            let mut asked = BTreeSet::new();
            let mut now = start;
            for &[kind, rank, more] in bytes.as_chunks::<3>().0 {
                let rank = u32::from(rank % 5);
                match kind {
                    0 => {
                        // A rank comes with what it has agreed to, in a first world of five.
                        asked.remove(&rank);
                        let newest = newest.entry(rank).or_insert_with(|| roster(0, 0..5));
                        let cut_off = if more & 4 == 0 { Vec::new() } else { vec![u32::from(more & 3)] };
                        let survivor =
                            Survivor { roster: newest.clone(), at_least: u32::from(more & 1), cut_off };
                        gathering.join(rank, survivor, now);
                    }
                    1 => gathering.part(rank, now),
                    2 => {
                        let Some(offer) = offered.as_ref().filter(|_| asked.contains(&rank)) else {
                            continue;
                        };
                        newest.insert(rank, offer.clone());
                        agreed.insert(rank);
                        gathering.accept(rank, offer.epoch);
                    }
                    4 => now += WINDOW,
                    5 => drop(gone.insert(rank)),
                    _ => match gathering.step(&gone, now) {
                        Step::Wait => {}
                        Step::Offer(offer) => {
                            assert!(offer.has(0) && offer.members.is_sorted_by(|a, b| a < b));
                            for rank in &offer.members {
                                let older = newest.get(rank).is_some_and(|seen| seen.epoch < offer.epoch);
                                assert!(older && gathering.here().any(|here| here == *rank), "{offer:?}");
                            }
                            asked = offer.members.iter().copied().collect();
                            (offered, agreed) = (Some(offer), BTreeSet::new());
                        }
                        Step::Begin(begun) => {
                            assert_eq!(offered.as_ref(), Some(&begun));
                            assert!(begun.members.iter().all(|rank| agreed.contains(rank)), "{begun:?}");
                        }
                    },
                }
            }
        });
    }

    fn lineage(rank: u32, size: u32) -> Lineage {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        Lineage::new(rank, vec![listener.local_addr().unwrap(); size as usize], listener)
    }

    #[test]
    fn rank_accepts_only_later_worlds_of_ranks_in_its_last_world() {
        let lineage = lineage(2, 5);
        assert_eq!(lineage.accepted(), roster(0, [0, 1, 2, 3, 4]));
        assert!(!lineage.accept(&roster(0, [1, 2, 3])), "the epoch is taken");
        assert!(!lineage.accept(&roster(1, [1, 3])), "it is not in it");
        assert!(lineage.accept(&roster(3, [1, 2, 3])));
        assert!(!lineage.accept(&roster(2, [2, 3])), "an older world");
        assert!(!lineage.accept(&roster(4, [0, 2, 3])), "rank 0 was left behind");
        assert_eq!(lineage.accepted(), roster(3, [1, 2, 3]));
    }

    #[test]
    fn spares_that_are_admitted_may_be_in_later_worlds() {
        let lineage = lineage(0, 3);
        assert!(lineage.accept(&roster(1, [0, 2])));
        let spare = lineage.address(0);
        assert!(!lineage.accept(&roster(2, [0, 2, 3])), "rank 3 is a stranger");
        assert_eq!(lineage.admit(&[0, 2], 3, &[spare]), roster(1, [0, 2, 3]));
        assert_eq!((lineage.ranks(), lineage.accepted()), (4, roster(1, [0, 2, 3])));
        assert!(lineage.accept(&roster(2, [0, 2])), "the spare did not come");
        assert_eq!(lineage.admit(&[0, 2], 4, &[spare]), roster(2, [0, 2, 4]), "no number twice");
        assert!(lineage.accept(&roster(3, [0, 2, 4])));
    }

    #[test]
    fn spares_of_a_growth_that_failed_are_strangers_again() {
        let lineage = lineage(0, 3);
        let spare = lineage.address(0);
        assert_eq!(lineage.admit(&[0, 1, 2], 3, &[spare, spare]), roster(0, [0, 1, 2, 3, 4]));
        assert!(lineage.accept(&roster(1, [0, 1, 2, 3, 4])));
        lineage.dismiss(3, 0);
        assert_eq!((lineage.ranks(), lineage.accepted()), (5, roster(1, [0, 1, 2])));
        assert!(!lineage.accept(&roster(2, [0, 3, 4])), "two spares and one rank are no majority");
        assert_eq!(lineage.admit(&[0, 1, 2], 5, &[spare]), roster(1, [0, 1, 2, 5]), "the next growth");
        assert!(lineage.accept(&roster(2, [0, 1, 2, 5])));
    }

    #[test]
    fn rank_that_missed_a_growth_numbers_spares_as_the_others_do() {
        let lineage = lineage(0, 3);
        let spare = lineage.address(0);
        assert_eq!(lineage.admit(&[0, 1, 2], 4, &[spare]), roster(0, [0, 1, 2, 4]));
        assert_eq!((lineage.ranks(), lineage.address(4)), (5, spare));
    }

    #[test]
    fn losses_after_failed_growth_are_those_of_old_world() {
        let lineage = lineage(0, 4);
        let spare = lineage.address(0);
        lineage.admit(&[0, 1, 2, 3], 4, &[spare]);
        assert!(lineage.accept(&roster(1, [0, 1, 2, 3, 4])));
        lineage.note_lost(1, 2);
        lineage.note_lost(0, 3);
        assert!(lineage.is_lost(2) && !lineage.is_lost(3));
        lineage.dismiss(4, 0);
        assert!(!lineage.is_lost(2), "it left the larger world, and is in the old one");
        assert!(lineage.is_lost(3), "while the larger world was built");
        lineage.note_lost(0, 1);
        assert!(lineage.is_lost(1), "later");
        assert!(lineage.accept(&roster(2, [0, 2])));
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
        assert!(lineage.accept(&roster(1, [0, 1, 3])), "rank 3 has come after all");
        assert!(!lineage.is_lost(3));
        lineage.note_lost(0, 1);
        assert!(!lineage.is_lost(1), "it has left the old world for the new one");
    }
}
