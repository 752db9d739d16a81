//! Calls on streams that tests share: three replays each, since the third still sees the state that
//! the first leaves.
#![allow(dead_code, reason = "each test program uses a part of this")]

use sidelane_core::schedule::stream_program::Slots;
use sidelane_verify::unroll::StreamCall::{self, Combine, Dispatch, Release};

/// Geometry whose slots do not fill their places.
pub fn slots(ranks: u32) -> Slots {
    Slots::new(ranks, 48, 32).unwrap()
}

/// Three replays of `once`.
pub fn thrice(once: &[StreamCall]) -> Vec<StreamCall> {
    once.repeat(3)
}

/// Every way in which microbatches interleave, by name.
pub fn replays() -> impl Iterator<Item = (&'static str, Vec<StreamCall>)> {
    let all: [(&str, Vec<StreamCall>); 7] = [
        ("one", thrice(&[Dispatch(0), Combine(0)])),
        ("released", thrice(&[Dispatch(0), Release(0)])),
        ("both in turn", thrice(&[Dispatch(0), Combine(0), Dispatch(0), Release(0)])),
        ("first in, first out", thrice(&[Dispatch(0), Dispatch(1), Combine(0), Combine(1)])),
        ("first in, last out", thrice(&[Dispatch(0), Dispatch(1), Combine(1), Combine(0)])),
        (
            "one behind the other",
            vec![
                Dispatch(0),
                Dispatch(1),
                Combine(0),
                Dispatch(0),
                Combine(1),
                Dispatch(1),
                Combine(0),
                Dispatch(0),
                Combine(1),
                Dispatch(1),
                Combine(0),
                Combine(1),
            ],
        ),
        (
            "three at once",
            thrice(&[Dispatch(0), Dispatch(1), Dispatch(2), Combine(1), Release(2), Combine(0)]),
        ),
    ];
    all.into_iter()
}
