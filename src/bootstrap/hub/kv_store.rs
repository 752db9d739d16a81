//! The key-value store and the collective steps of a world: a state machine without sockets,
//! threads or time.
//!
//! ```text
//!   request (rank, ticket) ──► Store ──► deliveries (rank, ticket, answer), at once or when the last one came
//! ```
//!
//! A collective step succeeds for all participants or fails for all. When one gives up, the others
//! get the missing ranks instead of waiting for a step that cannot complete any more. A failed step
//! is remembered until all its participants have their error.

use std::{
    collections::{BTreeSet, HashMap},
    mem::discriminant,
    sync::Arc,
};

use crate::bootstrap::wire::{Answer, Blobs, Column, MAX_FRAME};

/// Room for everything in an answer that is not a blob.
const OVERHEAD: usize = 64 << 10;

/// An answer on its way.
#[derive(Debug, PartialEq)]
pub(super) struct Delivery {
    pub rank: u32,
    pub ticket: u64,
    pub answer: Answer,
}

/// Recipient of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Requester {
    pub rank: u32,
    pub ticket: u64,
}

impl Requester {
    fn deliver(self, answer: Answer) -> Delivery {
        Delivery { rank: self.rank, ticket: self.ticket, answer }
    }
}

/// Bytes that a participant brings to a step.
#[derive(Debug)]
pub(super) enum Contribution {
    /// The same for all participants.
    ForAll(Vec<u8>),
    /// For each participant its own.
    ForEach(Blobs),
}

/// A contribution to a step.
#[derive(Debug)]
struct Part {
    caller: Requester,
    contribution: Contribution,
}

/// A collective step that is not complete.
#[derive(Debug)]
struct Step {
    parts: Vec<Option<Part>>,
    /// The failure, and the ranks that have received it.
    failed: Option<(Answer, BTreeSet<u32>)>,
}

impl Step {
    fn missing(&self) -> Vec<u32> {
        (0u32..).zip(&self.parts).filter(|(_, part)| part.is_none()).map(|(index, _)| index).collect()
    }

    /// Fails for all waiting ranks; the others get the failure when they come.
    fn fail(&mut self, answer: Answer) -> Vec<Delivery> {
        let mut informed = BTreeSet::new();
        let mut deliveries = Vec::new();
        for (index, part) in (0u32..).zip(&mut self.parts) {
            if let Some(part) = part.take() {
                informed.insert(index);
                deliveries.push(part.caller.deliver(answer.clone()));
            }
        }
        self.failed = Some((answer, informed));
        deliveries
    }
}

/// The store of one world.
#[derive(Debug)]
pub(super) struct Store {
    size: u32,
    values: HashMap<String, Arc<Vec<u8>>>,
    readers: HashMap<String, Vec<Requester>>,
    steps: HashMap<String, Step>,
    left: BTreeSet<u32>,
}

impl Store {
    /// The empty store of a world of `size` ranks.
    pub(super) fn new(size: u32) -> Self {
        Store {
            size,
            values: HashMap::new(),
            readers: HashMap::new(),
            steps: HashMap::new(),
            left: BTreeSet::new(),
        }
    }

    /// Sets a value, which may wake its readers.
    pub(super) fn set(&mut self, caller: Requester, key: String, value: Vec<u8>) -> Vec<Delivery> {
        let value = Arc::new(value);
        let readers = self.readers.remove(&key).unwrap_or_default();
        let mut deliveries: Vec<_> =
            readers.into_iter().map(|reader| reader.deliver(Answer::Value(value.clone()))).collect();
        self.values.insert(key, value);
        deliveries.push(caller.deliver(Answer::Done));
        deliveries
    }

    /// Asks for a value, now or when it is set.
    pub(super) fn get(&mut self, caller: Requester, key: String) -> Vec<Delivery> {
        if let Some(value) = self.values.get(&key) {
            return vec![caller.deliver(Answer::Value(value.clone()))];
        }
        self.readers.entry(key).or_default().push(caller);
        Vec::new()
    }

    /// Takes part in a collective step.
    pub(super) fn gather(
        &mut self,
        caller: Requester,
        key: String,
        index: u32,
        count: u32,
        contribution: Contribution,
    ) -> Vec<Delivery> {
        let parts = match &contribution {
            Contribution::ForAll(_) => count,
            Contribution::ForEach(blobs) => blobs.len() as u32,
        };
        if count > self.size || index >= count || parts != count {
            let (seen, expected) =
                (format!("index {index} of {count}"), format!("at most {} ranks", self.size));
            return vec![caller.deliver(Answer::Disagree { rank: caller.rank, seen, expected })];
        }
        let step = self
            .steps
            .entry(key.clone())
            .or_insert_with(|| Step { parts: (0..count).map(|_| None).collect(), failed: None });
        if let Some((answer, informed)) = &mut step.failed {
            let answer = answer.clone();
            informed.insert(index);
            if informed.len() >= step.parts.len() {
                self.steps.remove(&key);
            }
            return vec![caller.deliver(answer)];
        }
        let expected = step.parts.len() as u32;
        let other_kind = |part: &&Part| discriminant(&part.contribution) != discriminant(&contribution);
        let difference = match &step.parts.get(index as usize) {
            _ if count != expected => {
                Some((format!("{count} participants"), format!("{expected} participants")))
            }
            Some(Some(first)) => Some((
                format!("participant {index}"),
                format!("another one: rank {} is that", first.caller.rank),
            )),
            _ if step.parts.iter().flatten().any(|part| other_kind(&part)) => {
                Some(("one kind of step".to_owned(), "the other".to_owned()))
            }
            _ => None,
        };
        if let Some((seen, expected)) = difference {
            let answer = Answer::Disagree { rank: caller.rank, seen, expected };
            let mut deliveries = step.fail(answer.clone());
            deliveries.push(caller.deliver(answer));
            return deliveries;
        }
        step.parts[index as usize] = Some(Part { caller, contribution });
        match step.missing() {
            missing if missing.is_empty() => self.complete(&key),
            _ => self.fail_hopeless(),
        }
    }

    /// A caller waits no longer.
    pub(super) fn withdraw(&mut self, caller: Requester) -> Vec<Delivery> {
        let mut waited = false;
        self.readers.retain(|_, readers| {
            waited |= readers.contains(&caller);
            readers.retain(|reader| *reader != caller);
            !readers.is_empty()
        });
        if waited {
            return vec![caller.deliver(Answer::Missing(Vec::new()))];
        }
        let waits = |step: &&mut Step| step.parts.iter().flatten().any(|part| part.caller == caller);
        match self.steps.values_mut().find(waits) {
            Some(step) => {
                let missing = step.missing();
                step.fail(Answer::Missing(missing))
            }
            // The answer is on its way already.
            None => Vec::new(),
        }
    }

    /// A rank leaves in peace. Steps that need it fail.
    pub(super) fn leave(&mut self, rank: u32) -> Vec<Delivery> {
        self.left.insert(rank);
        self.readers.retain(|_, readers| {
            readers.retain(|reader| reader.rank != rank);
            !readers.is_empty()
        });
        self.fail_hopeless()
    }

    fn complete(&mut self, key: &str) -> Vec<Delivery> {
        let parts = self.steps.remove(key).map(|step| step.parts).unwrap_or_default();
        let (mut callers, mut for_all, mut for_each) = (Vec::new(), Vec::new(), Vec::new());
        for Part { caller, contribution } in parts.into_iter().flatten() {
            callers.push(caller);
            match contribution {
                Contribution::ForAll(blob) => for_all.push(blob),
                Contribution::ForEach(blobs) => for_each.push(blobs),
            }
        }
        if for_all.is_empty() {
            let of: Arc<[Blobs]> = for_each.into();
            let column = |(number, caller): (usize, Requester)| {
                let column = Column { of: Arc::clone(&of), number };
                caller.deliver(bounded(column.bytes(), of.len(), || Answer::Exchanged(column)))
            };
            return callers.into_iter().enumerate().map(column).collect();
        }
        let (bytes, count) = (for_all.iter().map(Vec::len).sum(), for_all.len());
        let answer = bounded(bytes, count, || Answer::Gathered(Arc::new(for_all)));
        callers.into_iter().map(|caller| caller.deliver(answer.clone())).collect()
    }

    /// Fails the steps for which too few ranks are left.
    fn fail_hopeless(&mut self) -> Vec<Delivery> {
        let (size, left) = (self.size as usize, &self.left);
        let mut deliveries = Vec::new();
        for step in self.steps.values_mut().filter(|step| step.failed.is_none()) {
            let gone = |rank: &&u32| step.parts.iter().flatten().all(|part| part.caller.rank != **rank);
            let gone: Vec<u32> = left.iter().filter(gone).copied().collect();
            if let Some(&rank) = gone.first()
                && size - gone.len() < step.parts.len()
            {
                deliveries.extend(step.fail(Answer::Left(rank)));
            }
        }
        deliveries
    }
}

/// The answer with so many bytes in so many blobs, unless they are too many for one.
fn bounded(bytes: usize, blobs: usize, answer: impl FnOnce() -> Answer) -> Answer {
    let bytes = bytes + 4 * blobs;
    match bytes + OVERHEAD > MAX_FRAME {
        true => Answer::TooLarge(bytes as u64),
        false => answer(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn caller(rank: u32) -> Requester {
        Requester { rank, ticket: 100 + u64::from(rank) }
    }

    fn gather(store: &mut Store, rank: u32, count: u32) -> Vec<Delivery> {
        store.gather(caller(rank), "step".into(), rank, count, Contribution::ForAll(vec![rank as u8]))
    }

    fn nothing() -> Contribution {
        Contribution::ForAll(Vec::new())
    }

    fn ranks(deliveries: &[Delivery]) -> Vec<u32> {
        deliveries.iter().map(|delivery| delivery.rank).collect()
    }

    #[test]
    fn a_reader_waits_for_its_value() {
        let mut store = Store::new(3);
        assert_eq!(store.get(caller(1), "a".into()), []);
        let value = || Answer::Value(Arc::new(vec![7]));
        let deliveries = store.set(caller(0), "a".into(), vec![7]);
        assert_eq!(deliveries, [caller(1).deliver(value()), caller(0).deliver(Answer::Done)]);
        assert_eq!(store.get(caller(2), "a".into()), [caller(2).deliver(value())]);
    }

    proptest! {
        #[test]
        fn a_step_completes_for_all_with_the_last_whatever_the_order(
            order in Just((0..6u32).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let mut store = Store::new(8);
            let (last, first) = order.split_last().unwrap();
            for &rank in first {
                prop_assert_eq!(gather(&mut store, rank, 6), []);
            }
            let deliveries = gather(&mut store, *last, 6);
            prop_assert_eq!(ranks(&deliveries), (0..6).collect::<Vec<_>>());
            let blobs: Vec<_> = (0..6u8).map(|rank| vec![rank]).collect();
            for delivery in deliveries {
                prop_assert_eq!(delivery.ticket, caller(delivery.rank).ticket);
                prop_assert_eq!(delivery.answer, Answer::Gathered(Arc::new(blobs.clone())));
            }
            prop_assert!(store.steps.is_empty(), "a complete step is dropped");
        }
    }

    #[test]
    fn an_exchange_brings_each_participant_what_is_meant_for_it() {
        let mut store = Store::new(5);
        let exchange = |store: &mut Store, rank: u32, blobs: &[[u8; 2]]| {
            let blobs = blobs.iter().collect();
            store.gather(caller(rank), "step".into(), rank, 3, Contribution::ForEach(blobs))
        };
        let of = |rank: u8| [0, 1, 2].map(|to| [rank, to]);
        assert_eq!([exchange(&mut store, 2, &of(2)), exchange(&mut store, 0, &of(0))], [[], []]);
        let deliveries = exchange(&mut store, 1, &of(1));
        for (rank, Delivery { rank: to, ticket, answer }) in (0u8..).zip(deliveries) {
            assert_eq!((to, ticket), (rank.into(), caller(to).ticket));
            let Answer::Exchanged(column) = answer else { panic!("{answer:?}") };
            assert_eq!(column.to_vec(), [0, 1, 2].map(|from| [from, rank]));
        }
        assert!(store.steps.is_empty(), "a complete step is dropped");
        // Fewer parts than participants are a disagreement, and so are two kinds of step.
        assert!(matches!(exchange(&mut store, 0, &of(0)[..2])[0].answer, Answer::Disagree { rank: 0, .. }));
        exchange(&mut store, 0, &of(0));
        let mixed = gather(&mut store, 1, 3);
        assert_eq!(ranks(&mixed), [0, 1]);
        assert!(mixed.iter().all(|told| matches!(told.answer, Answer::Disagree { rank: 1, .. })));
    }

    #[test]
    fn answers_of_an_exchange_share_what_ranks_have_brought() {
        for ranks in [16, 256, 1024] {
            let mut store = Store::new(ranks as u32);
            let mut deliveries = Vec::new();
            for rank in 0..ranks {
                // A NIC, the same for all peers, and the numbers of each.
                let blob = |peer: usize| [&[rank as u8; 110][..], &[peer as u8; 20]].concat();
                let blobs = Contribution::ForEach((0..ranks).map(blob).collect());
                deliveries =
                    store.gather(caller(rank as u32), "step".into(), rank as u32, ranks as u32, blobs);
            }
            assert_eq!(deliveries.len(), ranks);
            let Answer::Exchanged(column) = &deliveries[0].answer else { panic!("{:?}", deliveries[0]) };
            assert_eq!(Arc::strong_count(&column.of), ranks);
            let held: usize = column.of.iter().map(Blobs::held_bytes).sum();
            assert_eq!(held, ranks * (110 + 20 + 4 * 20 + 21 * ranks));
            assert!(store.steps.is_empty());
        }
    }

    #[test]
    fn rank_that_gives_up_ends_the_step_for_all() {
        let mut store = Store::new(4);
        gather(&mut store, 0, 4);
        gather(&mut store, 2, 4);
        let missing = Answer::Missing(vec![1, 3]);
        let deliveries = store.withdraw(caller(2));
        assert_eq!(deliveries, [caller(0).deliver(missing.clone()), caller(2).deliver(missing.clone())]);
        assert_eq!(gather(&mut store, 3, 4), [caller(3).deliver(missing.clone())]);
        assert_eq!(gather(&mut store, 1, 4), [caller(1).deliver(missing)]);
        assert!(store.steps.is_empty(), "forgotten when all have their error");
    }

    #[test]
    fn a_reader_may_give_up() {
        let mut store = Store::new(2);
        store.get(caller(1), "a".into());
        assert_eq!(store.withdraw(caller(1)), [caller(1).deliver(Answer::Missing(vec![]))]);
        assert_eq!(store.withdraw(caller(1)), [], "once");
        assert_eq!(ranks(&store.set(caller(0), "a".into(), vec![])), [0]);
    }

    #[test]
    fn participants_that_disagree_are_all_told() {
        let mut store = Store::new(4);
        gather(&mut store, 0, 3);
        let deliveries = gather(&mut store, 1, 2);
        assert_eq!(ranks(&deliveries), [0, 1]);
        for delivery in deliveries {
            let (seen, expected) = ("2 participants".into(), "3 participants".into());
            assert_eq!(delivery.answer, Answer::Disagree { rank: 1, seen, expected });
        }
        assert!(matches!(
            gather(&mut store, 2, 3)[..],
            [Delivery { rank: 2, answer: Answer::Disagree { .. }, .. }]
        ));
    }

    #[test]
    fn an_index_taken_twice_or_out_of_range_is_a_disagreement() {
        let mut store = Store::new(4);
        gather(&mut store, 0, 3);
        let twice = store.gather(caller(3), "step".into(), 0, 3, nothing());
        assert_eq!(ranks(&twice), [0, 3]);
        assert!(matches!(&twice[1].answer, Answer::Disagree { rank: 3, .. }));
        let outside = store.gather(caller(1), "other".into(), 2, 2, nothing());
        assert!(matches!(&outside[..], [Delivery { rank: 1, answer: Answer::Disagree { .. }, .. }]));
        let crowd = store.gather(caller(1), "third".into(), 0, u32::MAX, nothing());
        assert!(matches!(&crowd[..], [Delivery { rank: 1, answer: Answer::Disagree { .. }, .. }]));
    }

    #[test]
    fn a_rank_that_left_fails_the_steps_that_need_it_and_no_others() {
        let mut store = Store::new(4);
        gather(&mut store, 0, 4);
        store.gather(caller(1), "pair".into(), 0, 2, nothing());
        assert_eq!(store.leave(3), [caller(0).deliver(Answer::Left(3))]);
        assert_eq!(gather(&mut store, 2, 4), [caller(2).deliver(Answer::Left(3))]);
        let late = store.gather(caller(2), "new".into(), 2, 4, nothing());
        assert_eq!(late, [caller(2).deliver(Answer::Left(3))], "steps begun after it left fail at once");
        assert_eq!(ranks(&store.gather(caller(2), "pair".into(), 1, 2, nothing())), [1, 2]);
    }

    #[test]
    fn blobs_too_large_for_one_answer_are_refused() {
        let mut store = Store::new(2);
        store.gather(caller(0), "big".into(), 0, 2, Contribution::ForAll(vec![0; MAX_FRAME / 2]));
        let deliveries =
            store.gather(caller(1), "big".into(), 1, 2, Contribution::ForAll(vec![0; MAX_FRAME / 2]));
        assert_eq!(deliveries.len(), 2);
        assert!(deliveries.iter().all(|delivery| delivery.answer == Answer::TooLarge(MAX_FRAME as u64 + 8)));
    }
}
