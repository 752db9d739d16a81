use proptest::prelude::*;

use super::*;

fn caller(rank: u32) -> Requester {
    Requester { rank, ticket: 100 + u64::from(rank) }
}

fn gather(store: &mut Store, rank: u32, count: u32) -> Vec<Delivery> {
    store.gather(caller(rank), "step".into(), rank, count, vec![rank as u8])
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
fn who_gives_up_ends_the_step_for_all_and_late_comers_are_told() {
    let mut store = Store::new(4);
    gather(&mut store, 0, 4);
    gather(&mut store, 2, 4);
    let missing = Answer::Missing(vec![1, 3]);
    let deliveries = store.withdraw(caller(2));
    assert_eq!(deliveries, [caller(0).deliver(missing.clone()), caller(2).deliver(missing.clone())]);
    assert_eq!(gather(&mut store, 3, 4), [caller(3).deliver(missing.clone())]);
    assert_eq!(gather(&mut store, 1, 4), [caller(1).deliver(missing)]);
    assert!(store.steps.is_empty(), "forgotten when all have been told");
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
    let twice = store.gather(caller(3), "step".into(), 0, 3, vec![]);
    assert_eq!(ranks(&twice), [0, 3]);
    assert!(matches!(&twice[1].answer, Answer::Disagree { rank: 3, .. }));
    let outside = store.gather(caller(1), "other".into(), 2, 2, vec![]);
    assert!(matches!(&outside[..], [Delivery { rank: 1, answer: Answer::Disagree { .. }, .. }]));
    let crowd = store.gather(caller(1), "third".into(), 0, u32::MAX, vec![]);
    assert!(matches!(&crowd[..], [Delivery { rank: 1, answer: Answer::Disagree { .. }, .. }]));
}

#[test]
fn a_rank_that_left_fails_the_steps_that_need_it_and_no_others() {
    let mut store = Store::new(4);
    gather(&mut store, 0, 4);
    store.gather(caller(1), "pair".into(), 0, 2, vec![]);
    assert_eq!(store.leave(3), [caller(0).deliver(Answer::Left(3))]);
    assert_eq!(gather(&mut store, 2, 4), [caller(2).deliver(Answer::Left(3))]);
    let late = store.gather(caller(2), "new".into(), 2, 4, vec![]);
    assert_eq!(late, [caller(2).deliver(Answer::Left(3))], "steps begun after it left fail at once");
    assert_eq!(ranks(&store.gather(caller(2), "pair".into(), 1, 2, vec![])), [1, 2]);
}

#[test]
fn blobs_too_large_for_one_answer_are_refused() {
    let mut store = Store::new(2);
    store.gather(caller(0), "big".into(), 0, 2, vec![0; MAX_FRAME / 2]);
    let deliveries = store.gather(caller(1), "big".into(), 1, 2, vec![0; MAX_FRAME / 2]);
    assert_eq!(deliveries.len(), 2);
    assert!(deliveries.iter().all(|delivery| delivery.answer == Answer::TooLarge(MAX_FRAME as u64 + 8)));
}
