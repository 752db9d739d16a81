//! A rank's own routing, sorted by expert slot: all it can know before the counts of the others arrive.

use super::ExpertMap;
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
    /// Place of each entry among the `[tokens, top_k]` choices.
    pub(super) choices: Vec<u32>,
    /// Entries of all tokens before each token; one more than there are tokens.
    pub(super) token_starts: Vec<u32>,
    /// Per expert: the slot that this rank uses, and the last token that named it, plus one, which finds doubles.
    experts: Vec<Expert>,
    /// Per slot: where its next entry goes.
    cursors: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Expert {
    slot: u32,
    named: u32,
}

impl Sorted {
    /// Checks and sorts `routing` of rank `me`: a counting sort, two passes over the choices.
    ///
    /// # Errors
    /// [`PlanError::ExpertOutOfRange`], [`PlanError::ExpertTwice`], [`PlanError::NanWeight`]: the first found in
    /// token order. What was sorted before is lost, but may be filled again.
    pub fn fill(&mut self, map: &ExpertMap, me: u32, routing: &Routing) -> Result<(), PlanError> {
        self.count(map, me, routing)?;
        self.place(routing);
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
        self.tokens.clear();
        self.weights.clear();
        self.choices.clear();
        refill(&mut self.token_starts, 1, 0);
    }

    fn count(&mut self, map: &ExpertMap, me: u32, routing: &Routing) -> Result<(), PlanError> {
        self.clear(map);
        self.experts.clear();
        self.experts
            .extend((0..map.experts()).map(|expert| Expert { slot: map.slot_for(me, expert), named: 0 }));
        let k = routing.top_k() as usize;
        let (mut entries, mut token) = (0, 0);
        for (ids, weights) in routing.experts().chunks_exact(k).zip(routing.weights().chunks_exact(k)) {
            for (k, (&id, weight)) in (0..).zip(ids.iter().zip(weights)) {
                if id == -1 {
                    continue;
                }
                let Some(expert) = usize::try_from(id).ok().and_then(|id| self.experts.get_mut(id)) else {
                    return Err(PlanError::ExpertOutOfRange { token, k, expert: id, experts: map.experts() });
                };
                if weight.is_nan() {
                    return Err(PlanError::NanWeight { token, k });
                }
                if std::mem::replace(&mut expert.named, token + 1) == token + 1 {
                    return Err(PlanError::ExpertTwice { token, expert: id });
                }
                self.counts[expert.slot as usize] += 1;
                entries += 1;
            }
            token += 1;
            self.token_starts.push(entries);
        }
        Ok(())
    }

    /// Every id was checked by `count`.
    fn place(&mut self, routing: &Routing) {
        let mut sum = 0;
        for (start, &count) in self.starts[1..].iter_mut().zip(&self.counts) {
            sum += count;
            *start = sum;
        }
        let entries = sum as usize;
        refill(&mut self.tokens, entries, 0);
        refill(&mut self.weights, entries, 0.0);
        refill(&mut self.choices, entries, 0);
        self.cursors.clone_from(&self.starts);
        let (k, mut choice) = (routing.top_k() as usize, 0);
        for (token, ids) in (0..).zip(routing.experts().chunks_exact(k)) {
            for &id in ids {
                if id >= 0 {
                    let cursor = &mut self.cursors[self.experts[id as usize].slot as usize];
                    let entry = *cursor as usize;
                    *cursor += 1;
                    self.tokens[entry] = token;
                    self.weights[entry] = routing.weights()[choice];
                    self.choices[entry] = choice as u32;
                }
                choice += 1;
            }
        }
    }
}

/// Sets a table to `len` equal entries without giving its memory back.
pub(super) fn refill<T: Copy>(table: &mut Vec<T>, len: usize, value: T) {
    table.clear();
    table.resize(len, value);
}
