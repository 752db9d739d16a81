//! Emulated links: their bytes, and when signals become visible.

use std::time::{Duration, Instant};

use crate::support::{medium, on_ranks, repeated, tokens};
use half::bf16;
use sidelane::config::{EmulatedLink, NetChoice};
use sidelane::error::{Error, LaneError};
use sidelane::gate::Routing;
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, Options, Window, World};

fn at(link: &str) -> Options {
    medium().with_emulated_link(EmulatedLink::parse(link))
}

fn bytes(window: &Window, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    window.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_signal_is_not_seen_before_the_link_would_have_brought_it() {
    // A megabyte each way at 64 MB a second takes 15.6 ms, and 4 ms more to arrive.
    const LATENCY: Duration = Duration::from_micros(4_000);
    const LINK: Duration = Duration::from_micros(15_625 + 4_000);
    on_ranks(&[0, 1], &at("64M/4000"), |world| {
        assert_eq!(world.net().unwrap().lane, "emulated");
        let mut window = world.all().unwrap().window(1 << 20).unwrap();
        let peer = 1 - world.rank();
        for round in 1..=3 {
            // The peer passes the barrier when this rank's signal has come, and sends then.
            let entered = Instant::now();
            window.barrier().unwrap();
            let sent = Instant::now();
            window.put_signal(peer, 0, &vec![round as u8; 1 << 20], round).unwrap();
            window.wait_until(peer, round).unwrap();
            assert!(entered.elapsed() >= LATENCY + LINK, "{:?}", entered.elapsed());
            assert!(bytes(&window, 1 << 20).iter().all(|&byte| byte == round as u8));
            window.quiet().unwrap();
            assert!(sent.elapsed() >= LINK, "this rank's own bytes are on the link as long");
        }
    });
}

#[test]
fn rows_and_sums_are_those_of_any_other_lane() {
    const HIDDEN: usize = 24;
    for route in Route::ALL {
        on_ranks(&[0, 0, 1, 1], &at("1G/200"), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).experts(13).top_k(4).hidden(HIDDEN);
            let mut ep = builder.dtype(Dtype::Bf16).route(route).build().unwrap();
            for round in 0..10 {
                let mine = tokens::<bf16>(round * 4 + u64::from(world.rank()), 19, HIDDEN, 4, 13);
                let routing = Routing::new(4, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
                let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
                let returned: Vec<bf16> = ep.combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
                assert_eq!(returned, repeated(&mine, 4, HIDDEN));
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_at_once_has_been_heard() {
    on_ranks(&[0, 1], &at("1G/3000"), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        if world.rank() == 0 {
            window.put_signal(1, 0, &[7; 64], 1).unwrap();
        } else {
            window.wait_until(0, 1).unwrap();
            assert_eq!(bytes(&window, 64), [7; 64]);
        }
    });
}

#[test]
fn only_wires_within_a_machine_keep_another_links_time() {
    let options = at("1G/5").with_net(NetChoice::Tcp);
    let error = World::threads_with(&[0, 1], &options).unwrap_err();
    assert!(matches!(error, Error::Lane(LaneError::NoLinkEmulation { .. })), "{error:?}");
}
