//! Handles: many at once, used in any order, dropped in any order.

use crate::support::{Tokens, medium, on_ranks, small, tokens};
use half::bf16;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::gate::Routing;
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, Group, World};

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 7;
const WORLDS: [(&[u32], Route); 5] = [
    (&[0, 0, 0, 0], Route::Direct),
    (&[0, 1, 0, 1], Route::Direct),
    (&[0, 1, 0, 1], Route::Pxn),
    (&[0, 0, 0, 1, 1, 1, 1, 1], Route::Direct),
    (&[0, 0, 0, 1, 1, 1, 1, 1], Route::Pxn),
];

fn layer(group: &Group, route: Route) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(32).route(route).build().unwrap()
}

/// The tokens of a rank in a round: another number of them in each.
fn input(rank: u32, round: u64) -> Tokens<bf16> {
    tokens(
        round * 100 + u64::from(rank),
        (u64::from(rank) * 3 + round * 5) as u32 % 11,
        HIDDEN,
        TOP_K,
        EXPERTS,
    )
}

fn routing(tokens: &Tokens<bf16>) -> Routing<'_> {
    Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap()
}

fn dispatch(ep: &mut ExpertParallel, tokens: &Tokens<bf16>) -> (ExpertRows, Handle) {
    ep.dispatch(&tokens.x, &routing(tokens)).unwrap()
}

/// Combines rows as they came, and holds each token against itself, as often as it was chosen.
fn returns(ep: &mut ExpertParallel, rows: &ExpertRows, handle: &Handle, tokens: &Tokens<bf16>) {
    let out: Vec<bf16> = ep.combine(rows.rows::<bf16>().unwrap(), handle).unwrap();
    assert_eq!(out, repeated(tokens));
}

fn repeated(tokens: &Tokens<bf16>) -> Vec<bf16> {
    crate::support::repeated(tokens, TOP_K, HIDDEN)
}

/// Once all ranks have entered and all readers have finished, no memory is held.
fn nothing_is_held(world: &World, group: &Group) {
    group.gather(&[]).unwrap();
    let report = world.pool().report();
    assert_eq!((report.used, report.live, report.retired), (0, 0, 0), "rank {}", world.rank());
    assert_eq!(report.largest_free, report.total);
}

#[test]
fn handles_can_be_combined_in_other_order_than_dispatched() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group, route);
            let tokens: Vec<_> = (0..6).map(|round| input(world.rank(), round)).collect();
            let mut held: Vec<_> = tokens.iter().map(|t| Some(dispatch(&mut ep, t))).collect();
            for round in [4, 0, 5, 2, 2, 1, 3] {
                let (rows, handle) = held[round].as_ref().unwrap();
                returns(&mut ep, rows, handle, &tokens[round]);
            }
            // Ranks drop in different orders; the remaining objects are not disturbed.
            for step in 0..5 {
                held[(step + world.rank() as usize) % 6] = None;
                world.pool().poison(0xff);
            }
            drop(held);
            nothing_is_held(&world, &group);
        });
    }
}

#[test]
fn new_tokens_along_an_old_handle_land_as_in_a_fresh_dispatch() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &small(), |world| {
            let mut ep = layer(&world.all().unwrap(), route);
            let old = input(world.rank(), 3);
            let (_, handle) = dispatch(&mut ep, &old);
            let x: Vec<bf16> = old.x.iter().rev().copied().collect();
            drop(dispatch(&mut ep, &input(world.rank(), 4)));
            world.pool().poison(0xff);
            let cached = ep.dispatch_cached(&x, &handle).unwrap();
            let (fresh, again) = dispatch(&mut ep, &Tokens { x, ..old });
            assert_eq!(cached.rows::<bf16>().unwrap(), fresh.rows::<bf16>().unwrap());
            assert_eq!(handle.tokens_per_expert(), again.tokens_per_expert());
        });
    }
}

#[test]
fn cached_dispatches_follow_each_its_own_handle() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group, route);
            let tokens: Vec<_> = (0..8).map(|round| input(world.rank(), round)).collect();
            let mut held: Vec<_> = tokens[..4].iter().map(|t| dispatch(&mut ep, t)).collect();
            for (step, round) in [2, 0, 3, 1, 1, 2, 0, 3].into_iter().enumerate() {
                world.pool().poison(0xff);
                let (rows, handle) = &held[round];
                let again = ep.dispatch_cached(&tokens[round].x, handle).unwrap();
                assert_eq!(again.rows::<bf16>().unwrap(), rows.rows::<bf16>().unwrap(), "round {round}");
                returns(&mut ep, &again, handle, &tokens[round]);
                // Tables of a handle that is gone are used again, by another dispatch.
                if step == 4 {
                    held[1] = dispatch(&mut ep, &tokens[6]);
                    drop(dispatch(&mut ep, &tokens[7]));
                    returns(&mut ep, &held[1].0, &held[1].1, &tokens[6]);
                }
            }
            drop(held);
            nothing_is_held(&world, &group);
        });
    }
}

#[test]
fn two_hundred_rounds_leave_nothing_behind() {
    for (nodes, route) in WORLDS {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group, route);
            let mut held = Vec::new();
            for round in 0..200 {
                let mine = input(world.rank(), round);
                let (rows, handle) = dispatch(&mut ep, &mine);
                returns(&mut ep, &rows, &handle, &mine);
                // Some outlive the next rounds, others than at the local peers.
                held.push((Some(rows), handle));
                let index = (round as usize * 7 + world.rank() as usize) % held.len();
                held[index].0 = None;
                if held.len() > 5 {
                    held.swap_remove(index);
                }
            }
            drop(held);
            nothing_is_held(&world, &group);
            let report = world.pool().report();
            assert!(report.peak < report.total / 2, "{report:?}");
        });
    }
}

#[test]
fn rows_and_handles_that_outlive_world_stay_readable() {
    for (nodes, route) in WORLDS {
        let mut left = on_ranks(nodes, &small(), |world| {
            let mut ep = layer(&world.all().unwrap(), route);
            let mine = input(world.rank(), 1);
            let (rows, handle) = dispatch(&mut ep, &mine);
            let copy = rows.to_vec::<bf16>().unwrap();
            returns(&mut ep, &rows, &handle, &mine);
            (copy, rows, handle.output().unwrap(), handle)
        });
        left.reverse();
        for (copy, rows, mut y, handle) in left {
            assert_eq!(rows.rows::<bf16>().unwrap(), copy);
            y.rows_mut::<bf16>().unwrap().fill(bf16::ONE);
            drop(handle);
            drop(rows);
            assert!(y.rows_mut::<bf16>().unwrap().iter().all(|&x| x == bf16::ONE));
        }
    }
}

#[test]
fn dropped_outputs_stay_until_peers_have_read_them() {
    const WIDE: usize = 4096;
    let plain = [(WORLDS[0], false)];
    for ((nodes, route), weighted) in plain.into_iter().chain(WORLDS.map(|world| (world, true))) {
        on_ranks(nodes, &medium(), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).experts(4).top_k(1).hidden(WIDE);
            let builder = builder.dtype(Dtype::F32).max_tokens(32).weighted(weighted).route(route);
            let mut ep = builder.build().unwrap();
            for round in 0..30 {
                // Ranks have different amounts to read, so that some are done long before others
                // begin.
                let mine = tokens::<f32>(round, 1 + 31 * u32::from(world.rank() == 2), WIDE, 1, 4);
                let ones = vec![1.0; mine.ids.len()];
                let (rows, handle) =
                    ep.dispatch(&mine.x, &Routing::new(1, mine.ids.as_slice(), ones).unwrap()).unwrap();
                let mut y = handle.output().unwrap();
                y.rows_mut::<f32>().unwrap().copy_from_slice(rows.rows().unwrap());
                drop(rows);
                let out: Vec<f32> = ep.combine(y, &handle).unwrap();
                drop(handle);
                world.pool().poison(0xff);
                for (token, id) in mine.ids.iter().enumerate() {
                    let range = token * WIDE..(token + 1) * WIDE;
                    let same = out[range.clone()] == mine.x[range.clone()];
                    assert!(
                        if *id < 0 { out[range].iter().all(|&x| x == 0.0) } else { same },
                        "round {round}"
                    );
                }
            }
            nothing_is_held(&world, &group);
        });
    }
}
