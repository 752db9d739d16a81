//! Ranks that are threads of one process behave as processes do.

use std::{thread, time::Duration};

use crate::bootstrap::common::{LONG, Signal, death, each};
use sidelane::{
    bootstrap::{Timeouts, threads},
    error::{BootstrapError, Cause, LostReason},
};

#[test]
fn ranks_meet_and_agree() {
    let seen = each(threads(4, Timeouts::default()), |hub| {
        let me = hub.rank();
        if me == 1 {
            hub.set("color", b"green").unwrap();
        }
        assert_eq!(hub.get("color", LONG).unwrap(), b"green");
        hub.barrier("here", me, 4, LONG).unwrap();
        let own = |to: u8| vec![me as u8, to];
        let exchanged = hub.exchange("each", me, (0..4).map(own).collect(), LONG).unwrap();
        assert_eq!(exchanged, [0, 1, 2, 3].map(|from: u8| vec![from, me as u8]));
        hub.gather("ranks", me, 4, &[me as u8], LONG).unwrap().concat()
    });
    assert_eq!(seen, vec![vec![0, 1, 2, 3]; 4]);
}

#[test]
fn the_deadline_of_a_step_names_the_missing_ranks() {
    let over = Signal::default();
    let seen = each(threads(3, Timeouts::default()), |hub| {
        if hub.rank() == 1 {
            over.wait_for(2);
            return None;
        }
        let error = hub.gather("half", hub.rank(), 3, &[], Duration::from_millis(100)).unwrap_err();
        over.raise();
        hub.health().check().unwrap();
        Some(error)
    });
    let named =
        |error: &BootstrapError| matches!(error, BootstrapError::Deadline { missing, .. } if *missing == [1]);
    assert_eq!(seen.iter().flatten().filter(|error| named(error)).count(), 2, "{seen:?}");
}

#[test]
fn a_thread_that_panics_is_lost_and_ends_all_waits() {
    let seen = each(threads(3, Timeouts::default()), |hub| {
        let me = hub.rank();
        if me == 2 {
            let unwinding = thread::spawn(move || {
                let _hub = hub;
                std::panic::resume_unwind(Box::new("on purpose"));
            });
            assert!(unwinding.join().is_err());
            return None;
        }
        Some(hub.gather("never", me, 3, &[], LONG).unwrap_err())
    });
    let lost = BootstrapError::World(Cause::Lost { rank: 2, how: LostReason::Closed });
    assert_eq!(seen, [Some(lost.clone()), Some(lost), None]);
}

#[test]
fn a_thread_that_leaves_fails_only_the_steps_that_need_it() {
    let seen = each(threads(3, Timeouts::default()), |hub| {
        let me = hub.rank();
        if me == 0 {
            return None;
        }
        let error = hub.gather("needs all", me, 3, &[], LONG).unwrap_err();
        hub.barrier("needs two", me - 1, 2, LONG).unwrap();
        assert!(hub.health().is_absent(0));
        Some((error, hub.health().check()))
    });
    let left = BootstrapError::Left { rank: 0, step: "needs all".into() };
    assert_eq!(seen, [None, Some((left.clone(), Ok(()))), Some((left, Ok(())))]);
}

#[test]
fn cancel_reaches_everybody() {
    let seen = each(threads(3, Timeouts::default()), |hub| {
        if hub.rank() == 1 {
            hub.cancel(Cause::Cancelled { by: 1 });
        }
        (death(&*hub), hub.set("a", &[]).unwrap_err())
    });
    let cause = Cause::Cancelled { by: 1 };
    assert_eq!(seen, vec![(cause.clone(), BootstrapError::World(cause)); 3]);
}
