//! Calls in halves: work of ranks between them, and of their relays.

use std::time::Duration;

use crate::support::{Tokens, on_ranks, tiny, tokens};
use half::bf16;
use sidelane::bootstrap::Timeouts;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::exec::{Event, OpKind};
use sidelane::gate::Routing;
use sidelane::topology::{Paths, Route};
use sidelane::{Dtype, ExpertParallel, Group, Options, World};

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 7;
const WORLDS: [(&[u32], Route); 6] = [
    (&[0, 0, 0, 0], Route::Direct),
    (&[0, 1, 0, 1], Route::Direct),
    (&[0, 1, 0, 1], Route::Pxn),
    (&[0, 0, 0, 1, 1, 1, 1, 1], Route::Direct),
    (&[0, 0, 0, 1, 1, 1, 1, 1], Route::Pxn),
    (&[0, 1, 0, 2, 1, 1, 0, 1], Route::Pxn),
];

/// A rank that waits for an absent rank reports it soon.
fn impatient() -> Options {
    tiny().with_timeouts(Timeouts::default().with_deadline(Duration::from_secs(30)))
}

fn layer(group: &Group, route: Route) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(32).route(route).build().unwrap()
}

/// The tokens of a rank in a round: another number of them in each.
fn input(rank: u32, round: u64) -> Tokens<bf16> {
    let count = (u64::from(rank) * 3 + round * 5) as u32 % 11;
    tokens(round * 100 + u64::from(rank), count, HIDDEN, TOP_K, EXPERTS)
}

fn routing(tokens: &Tokens<bf16>) -> Routing<'_> {
    Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap()
}

fn dispatch(ep: &mut ExpertParallel, tokens: &Tokens<bf16>) -> (ExpertRows, Handle) {
    ep.dispatch(&tokens.x, &routing(tokens)).unwrap()
}

fn repeated(tokens: &Tokens<bf16>) -> Vec<bf16> {
    crate::support::repeated(tokens, TOP_K, HIDDEN)
}

#[test]
fn halves_of_two_layers_interleave() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &impatient(), |world| {
            let group = world.all().unwrap();
            let (mut a, mut b) = (layer(&group, route), layer(&group, route));
            for round in 0..4 {
                let (x, y) = (input(world.rank(), round), input(world.rank(), round + 9));
                let (of_x, of_y) = (routing(&x), routing(&y));
                let first = a.start_dispatch(&x.x, &of_x).unwrap();
                let second = b.start_dispatch(&y.x, &of_y).unwrap();
                let ((rows_y, handle_y), (rows_x, handle_x)) = match round % 2 {
                    0 => (second.finish().unwrap(), first.finish().unwrap()),
                    _ => {
                        let x = first.finish().unwrap();
                        (second.finish().unwrap(), x)
                    }
                };
                let first = a.start_combine(rows_x.rows::<bf16>().unwrap(), &handle_x).unwrap();
                let second = b.start_combine(rows_y.rows::<bf16>().unwrap(), &handle_y).unwrap();
                let (mut returned_x, mut returned_y) = (x.x.clone(), y.x.clone());
                second.finish(&mut returned_y).unwrap();
                first.finish(&mut returned_x).unwrap();
                assert_eq!((returned_x, returned_y), (repeated(&x), repeated(&y)));
            }
        });
    }
}

#[test]
fn several_microbatches_are_under_way_in_halves() {
    const UNDER_WAY: usize = 4;
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &impatient(), |world| {
            let group = world.all().unwrap();
            let mut layers: Vec<_> = (0..UNDER_WAY).map(|_| layer(&group, route)).collect();
            for round in 0..3 {
                let tokens: Vec<_> =
                    (0..UNDER_WAY as u64).map(|n| input(world.rank(), round + 7 * n)).collect();
                let routings: Vec<_> = tokens.iter().map(routing).collect();
                let mut started = Vec::new();
                for (ep, (tokens, routing)) in layers.iter_mut().zip(tokens.iter().zip(&routings)) {
                    started.push(ep.start_dispatch(&tokens.x, routing).unwrap());
                }
                let landed: Vec<_> = started.into_iter().map(|started| started.finish().unwrap()).collect();
                let mut started = Vec::new();
                for (ep, (rows, handle)) in layers.iter_mut().zip(&landed) {
                    started.push(Some(ep.start_combine(rows.rows::<bf16>().unwrap(), handle).unwrap()));
                }
                // Offered memory needs no further action of its rank: ranks finish in different
                // orders.
                for step in 0..UNDER_WAY {
                    let nth = (step + world.rank() as usize) % UNDER_WAY;
                    let mut returned = vec![bf16::NAN; tokens[nth].x.len()];
                    started[nth].take().unwrap().finish(&mut returned).unwrap();
                    assert_eq!(
                        returned,
                        repeated(&tokens[nth]),
                        "rank {}, {nodes:?}, {route:?}",
                        world.rank()
                    );
                }
            }
        });
    }
}

#[test]
fn some_ranks_call_in_halves_and_others_do_not() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &impatient(), |world| {
            let mut ep = layer(&world.all().unwrap(), route);
            for round in 0..12 {
                let mine = input(world.rank(), round);
                let of_mine = routing(&mine);
                let in_halves = |call: u32| (round as u32 + call + world.rank()).is_multiple_of(3);
                let (rows, handle) = match in_halves(0) {
                    true => ep.start_dispatch(&mine.x, &of_mine).unwrap().finish().unwrap(),
                    false => ep.dispatch(&mine.x, &of_mine).unwrap(),
                };
                let mut returned = vec![bf16::NAN; mine.x.len()];
                let given = rows.rows::<bf16>().unwrap();
                match in_halves(1) {
                    true => ep.start_combine(given, &handle).unwrap().finish(&mut returned).unwrap(),
                    false => ep.combine_into(given, &handle, &mut returned).unwrap(),
                }
                assert_eq!(returned, repeated(&mine), "rank {}, {nodes:?}, {route:?}", world.rank());
            }
        });
    }
}

#[test]
fn others_finish_their_combine_while_their_relay_is_away() {
    for (nodes, route) in WORLDS {
        // Each rank is absent once; with several nodes most are relays, whose threads return the
        // rows that others wait for.
        for away in 0..nodes.len() as u32 {
            on_ranks(nodes, &impatient(), |world| {
                let group = world.all().unwrap();
                let mut ep = layer(&group, route);
                let mine = input(world.rank(), 3);
                let (rows, handle) = dispatch(&mut ep, &mine);
                let given = rows.rows::<bf16>().unwrap();
                let mut returned = vec![bf16::NAN; mine.x.len()];
                if world.rank() == away {
                    let started = ep.start_combine(given, &handle).unwrap();
                    group.gather(b"all others have finished").unwrap();
                    started.finish(&mut returned).unwrap();
                } else {
                    ep.combine_into(given, &handle, &mut returned).unwrap();
                    group.gather(b"this one, too").unwrap();
                }
                assert_eq!(returned, repeated(&mine), "rank {} without {away}, {nodes:?}", world.rank());
            });
        }
    }
}

/// Signals that the relay of a rank has raised since the last query: its tracks lie behind those of
/// the rank itself.
fn raised_by_relay(world: &World) -> usize {
    let events = world.recorder().unwrap().take().events;
    let signal = |event: &&Event| event.kind == OpKind::Signal;
    events.iter().filter(signal).filter(|event| event.track >= world.size()).count()
}

#[test]
fn a_relay_hands_on_all_that_crosses_while_its_caller_is_away() {
    let options = impatient().with_record(1 << 12);
    for (nodes, route) in WORLDS.into_iter().filter(|(nodes, _)| nodes.contains(&1)) {
        for away in 0..nodes.len() as u32 {
            on_ranks(nodes, &options, |world| {
                let mut ep = layer(&world.all().unwrap(), route);
                let paths = Paths::new(world.nodes(), route, world.rank());
                let handed_on = if route == Route::Pxn { paths.sources().count() } else { 0 };
                // Signals to others that this node has entered, to its own caller that all have; to
                // local peers that rows of a source have landed; and last to its own caller that
                // all is done.
                let all =
                    paths.count_receivers().count() + 1 + handed_on * (paths.local_peers().count() + 1) + 1;
                let mine = input(world.rank(), 3);
                let of_mine = routing(&mine);
                let (rows, handle) = if world.rank() == away {
                    let started = ep.start_dispatch(&mine.x, &of_mine).unwrap();
                    let mut raised = 0;
                    while raised < all {
                        world.health().check().expect("nobody gives up");
                        raised += raised_by_relay(&world);
                        std::thread::yield_now();
                    }
                    assert_eq!(raised, all);
                    started.finish().unwrap()
                } else {
                    ep.dispatch(&mine.x, &of_mine).unwrap()
                };
                let returned: Vec<bf16> = ep.combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
                assert_eq!(returned, repeated(&mine), "rank {} without {away}, {nodes:?}", world.rank());
            });
        }
    }
}

#[test]
fn a_layer_that_is_under_way_does_not_hold_up_another() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &impatient(), |world| {
            let group = world.all().unwrap();
            let (mut slow, mut fast) = (layer(&group, route), layer(&group, route));
            let mut rounds = 0..;
            let mut overtake = |rounds: &mut dyn Iterator<Item = u64>| {
                for round in rounds.take(3) {
                    let mine = input(world.rank(), round);
                    let (rows, handle) = dispatch(&mut fast, &mine);
                    let returned: Vec<bf16> = fast.combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
                    assert_eq!(returned, repeated(&mine));
                }
            };
            for round in 0..3 {
                let mine = input(world.rank(), round + 50);
                let of_mine = routing(&mine);
                let started = slow.start_dispatch(&mine.x, &of_mine).unwrap();
                overtake(&mut rounds);
                let (rows, handle) = started.finish().unwrap();
                let started = slow.start_combine(rows.rows::<bf16>().unwrap(), &handle).unwrap();
                overtake(&mut rounds);
                let mut returned = vec![bf16::NAN; mine.x.len()];
                started.finish(&mut returned).unwrap();
                assert_eq!(returned, repeated(&mine), "rank {}, {nodes:?}, {route:?}", world.rank());
            }
        });
    }
}
