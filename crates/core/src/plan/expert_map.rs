//! Ranks and slots of experts: which rank holds an expert, and which of its replicas a rank uses.

use crate::digest::Digest;
use crate::error::PlanError;

/// Experts of a map, at most, as of a gate.
const MOST_EXPERTS: u32 = 1 << 20;

/// Expert -> (rank, local slot). Contiguous blocks by default; may be permuted, and experts may be
/// replicated.
///
/// Slots are numbered rank by rank: those of rank 0 first. Which replica a rank uses is a fixed
/// rule, (source rank + expert id) mod (number of replicas), so no rank has to ask another. Only
/// replicas at active ranks count. All ranks are active, but for those that a mask leaves out
/// ([`with_active`](ExpertMap::with_active)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    experts: u32,
    /// Expert of each slot.
    expert_of: Vec<u32>,
    /// Rank of each slot.
    rank_of: Vec<u32>,
    /// First slot of each rank; one entry more than there are ranks.
    rank_starts: Vec<u32>,
    /// Per rank: whether it is active.
    active: Vec<bool>,
    /// Slots of each expert at active ranks, ascending, all experts after one another.
    replicas: Vec<u32>,
    /// First entry in `replicas` of each expert; one entry more than there are experts.
    replica_starts: Vec<u32>,
}

impl ExpertMap {
    /// Blocks of consecutive experts; where the division is uneven the first ranks hold one more.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] without experts or ranks.
    pub fn contiguous(experts: u32, ranks: u32) -> Result<Self, PlanError> {
        if ranks == 0 {
            return Err(PlanError::BadParameter { parameter: "ranks", seen: 0, expected: "at least 1" });
        }
        Self::check_experts(experts)?;
        let (each, more) = (experts / ranks, experts % ranks);
        let mut next = 0;
        let held: Vec<Vec<u32>> = (0..ranks)
            .map(|rank| {
                let first = next;
                next += each + u32::from(rank < more);
                (first..next).collect()
            })
            .collect();
        Self::from_slots(experts, &held)
    }

    /// Before memory is taken for each of them.
    fn check_experts(experts: u32) -> Result<(), PlanError> {
        if experts == 0 || experts > MOST_EXPERTS {
            let expected = "between 1 and 2^20";
            return Err(PlanError::BadParameter { parameter: "experts", seen: experts.into(), expected });
        }
        Ok(())
    }

    /// From the experts that each rank holds, in the order of its local slots.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] without experts, [`PlanError::BadMap`] if an id is out of range,
    /// no rank holds an expert, or one rank holds it twice.
    pub fn from_slots(experts: u32, held: &[Vec<u32>]) -> Result<Self, PlanError> {
        Self::check_experts(experts)?;
        let mut slots_of: Vec<Vec<u32>> = vec![Vec::new(); experts as usize];
        let (mut expert_of, mut rank_of, mut rank_starts) = (Vec::new(), Vec::new(), vec![0]);
        for (rank, ids) in held.iter().enumerate() {
            let first = expert_of.len() as u32;
            for &expert in ids {
                let bad = |problem| PlanError::BadMap { problem, expert, rank: rank as u32 };
                let slots = slots_of.get_mut(expert as usize).ok_or(bad("expert id out of range"))?;
                if slots.last().is_some_and(|&slot| slot >= first) {
                    return Err(bad("expert twice on one rank"));
                }
                slots.push(expert_of.len() as u32);
                expert_of.push(expert);
                rank_of.push(rank as u32);
            }
            rank_starts.push(expert_of.len() as u32);
        }
        if let Some(expert) = slots_of.iter().position(Vec::is_empty) {
            return Err(PlanError::BadMap {
                problem: "no rank holds the expert",
                expert: expert as u32,
                rank: 0,
            });
        }
        let (active, replicas, replica_starts) = (vec![true; held.len()], Vec::new(), Vec::new());
        let mut map =
            ExpertMap { experts, expert_of, rank_of, rank_starts, active, replicas, replica_starts };
        map.list_replicas(&slots_of);
        Ok(map)
    }

    /// The same experts in the same slots, where only these ranks are active: a flag for each rank,
    /// true for an active one. Tokens of the other ranks choose nothing, and no token chooses an
    /// expert there.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if there is not a flag for each rank, or no rank is active.
    pub fn with_active(&self, active: &[bool]) -> Result<Self, PlanError> {
        let bad = |parameter, seen, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        if active.len() != self.active.len() {
            return bad("ranks of the mask", active.len() as u64, "the number of ranks");
        }
        if !active.contains(&true) {
            return bad("active ranks of the mask", 0, "at least 1");
        }
        let mut slots_of: Vec<Vec<u32>> = vec![Vec::new(); self.experts as usize];
        for (slot, (&expert, &rank)) in (0..).zip(self.expert_of.iter().zip(&self.rank_of)) {
            if active[rank as usize] {
                slots_of[expert as usize].push(slot);
            }
        }
        let mut map = ExpertMap { active: active.to_vec(), ..self.clone() };
        map.list_replicas(&slots_of);
        Ok(map)
    }

    /// The slots of these ranks alone, which become ranks 0, 1 and so on: of the survivors of a
    /// loss, for example. All of them are active.
    ///
    /// # Errors
    /// [`PlanError::BadMap`] if none of them holds some expert; [`PlanError::BadParameter`] for a
    /// rank that the map does not have.
    pub fn subset(&self, ranks: &[u32]) -> Result<Self, PlanError> {
        if let Some(&rank) = ranks.iter().find(|&&rank| rank >= self.ranks()) {
            let (parameter, expected) = ("rank of the expert map", "below its number of ranks");
            return Err(PlanError::BadParameter { parameter, seen: rank.into(), expected });
        }
        let held = |&rank: &u32| self.slots_of(rank).map(|slot| self.expert_of(slot)).collect();
        Self::from_slots(self.experts, &ranks.iter().map(held).collect::<Vec<_>>())
    }

    fn list_replicas(&mut self, slots_of: &[Vec<u32>]) {
        self.replicas = slots_of.concat();
        let ends = slots_of.iter().scan(0, |end, slots| {
            *end += slots.len() as u32;
            Some(*end)
        });
        self.replica_starts = [0].into_iter().chain(ends).collect();
    }

    /// Number of experts.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.rank_starts.len() as u32 - 1
    }

    /// Number of slots: experts, replicas counted each.
    pub fn slots(&self) -> u32 {
        self.expert_of.len() as u32
    }

    /// The slots of a rank.
    pub fn slots_of(&self, rank: u32) -> std::ops::Range<u32> {
        self.rank_starts[rank as usize]..self.rank_starts[rank as usize + 1]
    }

    /// The expert of a slot.
    pub fn expert_of(&self, slot: u32) -> u32 {
        self.expert_of[slot as usize]
    }

    /// The rank of a slot.
    pub fn rank_of(&self, slot: u32) -> u32 {
        self.rank_of[slot as usize]
    }

    /// Per rank: whether it is active.
    pub fn active(&self) -> &[bool] {
        &self.active
    }

    /// The slot that tokens of rank `source` use for `expert`: none if the rank is not active, or
    /// no active rank holds the expert.
    pub fn slot_for(&self, source: u32, expert: u32) -> Option<u32> {
        let first = self.replica_starts[expert as usize];
        let count = self.replica_starts[expert as usize + 1] - first;
        let turn = (u64::from(source) + u64::from(expert)).checked_rem(count.into())?;
        self.active[source as usize].then(|| self.replicas[first as usize + turn as usize])
    }

    /// Digest by which ranks find out whether they hold the same map, with the same ranks active.
    pub fn digest(&self) -> u64 {
        let numbers = [self.experts]
            .into_iter()
            .chain(self.rank_starts.iter().copied())
            .chain(self.expert_of.iter().copied())
            .chain(self.active.iter().map(|&active| u32::from(active)));
        Digest::of(numbers.flat_map(u32::to_le_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_division_gives_the_first_ranks_one_more() {
        let map = ExpertMap::contiguous(10, 4).unwrap();
        let sizes: Vec<usize> = (0..4).map(|r| map.slots_of(r).len()).collect();
        assert_eq!(sizes, [3, 3, 2, 2]);
        assert_eq!(map.expert_of(9), 9);
    }

    #[test]
    fn fewer_experts_than_ranks_leaves_ranks_without() {
        let map = ExpertMap::contiguous(2, 3).unwrap();
        assert!(map.slots_of(2).is_empty());
    }

    #[test]
    fn replicas_are_chosen_by_source_and_expert() {
        let map = ExpertMap::from_slots(3, &[vec![0, 1], vec![1, 2], vec![2, 1]]).unwrap();
        let picks: Vec<_> = (0..3).filter_map(|source| map.slot_for(source, 1)).collect();
        assert_eq!(picks, [2, 5, 1], "(source + 1) mod 3 into slots 1, 2, 5");
    }

    #[test]
    fn masked_rank_neither_chooses_nor_is_chosen() {
        let map = ExpertMap::from_slots(3, &[vec![0, 1], vec![1, 2], vec![2, 1]]).unwrap();
        let masked = map.with_active(&[true, false, true]).unwrap();
        let picks = |expert| (0..3).map(|source| masked.slot_for(source, expert)).collect::<Vec<_>>();
        assert_eq!(picks(0), [Some(0), None, Some(0)]);
        assert_eq!(picks(1), [Some(5), None, Some(5)], "(source + 1) mod 2 into slots 1, 5");
        assert_eq!(picks(2), [Some(4), None, Some(4)], "the replica at rank 2");
        assert_eq!(masked.slots_of(1), map.slots_of(1), "slots stay");
        assert_eq!(masked.with_active(&[true, true, false]).unwrap().slot_for(1, 2), Some(3));
        assert_ne!(masked.digest(), map.digest());
        assert_eq!(masked.with_active(&[true; 3]).unwrap(), map, "and back");
    }

    #[test]
    fn expert_without_an_active_rank_has_no_slot() {
        let map = ExpertMap::contiguous(2, 2).unwrap().with_active(&[false, true]).unwrap();
        assert_eq!([0, 1].map(|expert| map.slot_for(1, expert)), [None, Some(1)]);
    }

    #[test]
    fn subset_has_the_slots_of_its_ranks_in_their_order() {
        let map = ExpertMap::from_slots(3, &[vec![0, 1], vec![1, 2], vec![2, 0]]).unwrap();
        let masked = map.with_active(&[true, true, false]).unwrap();
        let left = ExpertMap::from_slots(3, &[vec![2, 0], vec![0, 1]]).unwrap();
        assert_eq!(masked.subset(&[2, 0]).unwrap(), left, "and no mask");
        assert_eq!(map.subset(&[0, 1, 2]).unwrap(), map);
    }

    #[test]
    fn subset_names_the_expert_that_nobody_holds() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        let problem = "no rank holds the expert";
        assert_eq!(map.subset(&[0]), Err(PlanError::BadMap { problem, expert: 2, rank: 0 }));
        let absent = map.subset(&[0, 2]).unwrap_err();
        assert!(matches!(absent, PlanError::BadParameter { parameter: "rank of the expert map", .. }));
    }

    #[test]
    fn bad_masks_are_named() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        let parameter = |active: &[bool]| match map.with_active(active) {
            Err(PlanError::BadParameter { parameter, .. }) => parameter,
            other => panic!("{other:?}"),
        };
        assert_eq!(parameter(&[true; 3]), "ranks of the mask");
        assert_eq!(parameter(&[]), "ranks of the mask");
        assert_eq!(parameter(&[false; 2]), "active ranks of the mask");
    }

    #[test]
    fn bad_maps_are_named() {
        assert!(matches!(
            ExpertMap::from_slots(2, &[vec![0, 0], vec![1]]),
            Err(PlanError::BadMap { problem: "expert twice on one rank", expert: 0, rank: 0 })
        ));
        assert!(matches!(
            ExpertMap::from_slots(2, &[vec![0], vec![]]),
            Err(PlanError::BadMap { problem: "no rank holds the expert", expert: 1, .. })
        ));
        assert!(matches!(
            ExpertMap::from_slots(2, &[vec![0, 1], vec![7]]),
            Err(PlanError::BadMap { problem: "expert id out of range", expert: 7, rank: 1 })
        ));
    }
}
