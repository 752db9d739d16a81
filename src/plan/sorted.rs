//! A rank's own routing, sorted by expert slot: all it can know before the counts of the others arrive.

use super::{ExpertMap, Order};
use crate::error::PlanError;
use crate::gate::Routing;

/// The (token, expert) entries of one rank, by destination slot and then token.
///
/// Reused from call to call: after the first call of a size nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct Sorted {
    /// Entries per slot.
    pub counts: Vec<u32>,
    /// First entry of each slot; one more than there are slots.
    pub starts: Vec<u32>,
    /// Token of each entry.
    pub tokens: Vec<u32>,
    /// Routing weight of each entry.
    pub weights: Vec<f32>,
    /// The choices of each token that are not dropped, in summation order: `choices[t]` entries each.
    pub(super) picks: Vec<Pick>,
    /// First pick of each token; one more than there are tokens.
    pub(super) pick_starts: Vec<u32>,
    /// Per expert the last token that named it, plus one: finds doubles in one pass.
    seen: Vec<u32>,
}

/// One choice of a token: which slot, which entry of that slot, which of the `[tokens, top_k]` choices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pick {
    pub slot: u32,
    pub expert: u32,
    /// Position among this rank's entries of the slot.
    pub nth: u32,
    pub choice: u32,
}

impl Sorted {
    /// Checks and sorts `routing` of rank `me`. Two passes over the choices, nothing else.
    ///
    /// # Errors
    /// [`PlanError::ExpertOutOfRange`], [`PlanError::ExpertTwice`], [`PlanError::NanWeight`]: the first found in
    /// token order. What was sorted before is lost, but may be filled again.
    pub fn fill(
        &mut self,
        map: &ExpertMap,
        me: u32,
        routing: &Routing,
        order: Order,
    ) -> Result<(), PlanError> {
        self.count(map, me, routing)?;
        self.place(routing);
        self.sort_picks(order, map);
        Ok(())
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.tokens.len()
    }

    /// Leaves no entries and no tokens, as for an empty routing.
    pub fn clear(&mut self, map: &ExpertMap) {
        refill(&mut self.counts, map.slots() as usize, 0);
        refill(&mut self.starts, map.slots() as usize + 1, 0);
        refill(&mut self.seen, map.experts() as usize, 0);
        self.tokens.clear();
        self.weights.clear();
        self.picks.clear();
        refill(&mut self.pick_starts, 1, 0);
    }

    fn count(&mut self, map: &ExpertMap, me: u32, routing: &Routing) -> Result<(), PlanError> {
        self.clear(map);
        for token in 0..routing.tokens() {
            let first = token * routing.top_k();
            for (k, &id) in routing.experts_of(token).iter().enumerate() {
                if id == -1 {
                    continue;
                }
                let (k, choice) = (k as u32, first + k as u32);
                let Some(expert) = u32::try_from(id).ok().filter(|&e| e < map.experts()) else {
                    return Err(PlanError::ExpertOutOfRange { token, k, expert: id, experts: map.experts() });
                };
                if routing.weights()[choice as usize].is_nan() {
                    return Err(PlanError::NanWeight { token, k });
                }
                if std::mem::replace(&mut self.seen[expert as usize], token + 1) == token + 1 {
                    return Err(PlanError::ExpertTwice { token, expert: id });
                }
                let slot = map.slot_for(me, expert);
                let nth = self.counts[slot as usize];
                self.counts[slot as usize] += 1;
                self.picks.push(Pick { slot, expert, nth, choice });
            }
            self.pick_starts.push(self.picks.len() as u32);
        }
        Ok(())
    }

    fn place(&mut self, routing: &Routing) {
        let mut sum = 0;
        for (start, &count) in self.starts[1..].iter_mut().zip(&self.counts) {
            sum += count;
            *start = sum;
        }
        refill(&mut self.tokens, self.picks.len(), 0);
        refill(&mut self.weights, self.picks.len(), 0.0);
        for pick in &self.picks {
            let entry = (self.starts[pick.slot as usize] + pick.nth) as usize;
            self.tokens[entry] = pick.choice / routing.top_k();
            self.weights[entry] = routing.weights()[pick.choice as usize];
        }
    }

    /// A token has few choices: insertion sort beats anything that allocates.
    fn sort_picks(&mut self, order: Order, map: &ExpertMap) {
        for token in self.pick_starts.windows(2) {
            let picks = &mut self.picks[token[0] as usize..token[1] as usize];
            match order {
                Order::Expert => insertion_sort(picks, |p| (0, p.expert)),
                Order::Rank => insertion_sort(picks, |p| (map.rank_of(p.slot), p.expert)),
            }
        }
    }
}

fn insertion_sort<K: PartialOrd>(picks: &mut [Pick], key: impl Fn(&Pick) -> K) {
    for i in 1..picks.len() {
        let mut j = i;
        while j > 0 && key(&picks[j - 1]) > key(&picks[j]) {
            picks.swap(j - 1, j);
            j -= 1;
        }
    }
}

/// Sets a table to `len` equal entries without giving its memory back.
pub(super) fn refill<T: Copy>(table: &mut Vec<T>, len: usize, value: T) {
    table.clear();
    table.resize(len, value);
}
