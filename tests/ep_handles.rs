//! Handles: many at once, used in any order, dropped in any order.

mod support;

use half::bf16;
use sidelane::ep::{ExpertRows, Handle, LaneUse};
use sidelane::gate::Routing;
use sidelane::{Dtype, ExpertParallel, Group, World};
use support::{Tokens, on_ranks, placement, small, tokens};

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 7;
const NODES: [&[u32]; 3] = [&[0, 0, 0, 0], &[0, 1, 0, 1], &[0, 0, 0, 1, 1, 1, 1, 1]];

fn layer(group: &Group) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).unwrap().experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(32).build().unwrap()
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
fn comes_home(ep: &mut ExpertParallel, rows: &ExpertRows, handle: &Handle, tokens: &Tokens<bf16>) {
    let out: Vec<bf16> = ep.combine(rows.rows::<bf16>().unwrap(), handle).unwrap();
    assert_eq!(out, repeated(tokens));
}

fn repeated(tokens: &Tokens<bf16>) -> Vec<bf16> {
    let chosen = tokens.ids.chunks_exact(TOP_K as usize).map(|ids| ids.iter().filter(|&&id| id >= 0).count());
    let rows = tokens.x.chunks_exact(HIDDEN).zip(chosen);
    rows.flat_map(|(row, n)| row.iter().map(move |x| bf16::from_f32(n as f32 * x.to_f32()))).collect()
}

/// Once everybody is here and all readers have finished, nothing is held.
fn nothing_is_held(world: &World, group: &Group) {
    group.gather(&[]).unwrap();
    let report = world.pool().report();
    assert_eq!((report.used, report.live, report.retired), (0, 0, 0), "rank {}", world.rank());
    assert_eq!(report.largest_free, report.total);
}

#[test]
fn handles_are_combined_in_another_order_than_they_were_dispatched() {
    for nodes in NODES {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group);
            let tokens: Vec<_> = (0..6).map(|round| input(world.rank(), round)).collect();
            let mut held: Vec<_> = tokens.iter().map(|t| Some(dispatch(&mut ep, t))).collect();
            for round in [4, 0, 5, 2, 2, 1, 3] {
                let (rows, handle) = held[round].as_ref().unwrap();
                comes_home(&mut ep, rows, handle, &tokens[round]);
            }
            // Each rank drops in an order of its own; what is left is not disturbed.
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
    for nodes in NODES {
        on_ranks(nodes, &small(), |world| {
            let mut ep = layer(&world.all().unwrap());
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
fn halves_of_two_layers_interleave() {
    for nodes in NODES {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let (mut a, mut b) = (layer(&group), layer(&group));
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
                let (mut home_x, mut home_y) = (x.x.clone(), y.x.clone());
                second.finish(&mut home_y).unwrap();
                first.finish(&mut home_x).unwrap();
                assert_eq!((home_x, home_y), (repeated(&x), repeated(&y)));
            }
        });
    }
}

#[test]
fn interleaved_groups_work_at_once() {
    for nodes in &NODES[..2] {
        on_ranks(nodes, &small(), |world| {
            let ranks: [u32; 2] = if world.rank().is_multiple_of(2) { [0, 2] } else { [3, 1] };
            let (group, all) = (world.group(&ranks).unwrap(), world.all().unwrap());
            let (mut ep, mut wide) = (layer(&group), layer(&all));
            for round in 0..8 {
                let both: Vec<_> = ranks.iter().map(|&rank| input(rank, round)).collect();
                let mine = &both[group.rank() as usize];
                let (rows, handle) = dispatch(&mut ep, mine);
                let expected = &placement(&both, TOP_K, ep.expert_map(), 1)[group.rank() as usize];
                for (row, origin) in rows.rows::<bf16>().unwrap().chunks_exact(HIDDEN).zip(expected) {
                    let (source, token, _) = origin.unwrap();
                    assert_eq!(row, &both[source].x[token * HIDDEN..][..HIDDEN]);
                }
                comes_home(&mut ep, &rows, &handle, mine);
                let wider = input(world.rank(), round + 20);
                let (more, other) = dispatch(&mut wide, &wider);
                comes_home(&mut wide, &more, &other, &wider);
                comes_home(&mut ep, &rows, &handle, mine);
            }
        });
    }
}

#[test]
fn the_report_counts_exactly_the_bytes_of_the_plan() {
    on_ranks(NODES[2], &small(), |world| {
        let mut ep = layer(&world.all().unwrap());
        let mine = input(world.rank(), 2);
        let (rows, handle) = dispatch(&mut ep, &mine);
        let node_of = |rank: u32| world.nodes().node_of(rank);
        let ranks = |far: bool| -> u64 {
            let owners = mine.ids.iter().filter(|&&id| id >= 0).map(|&id| {
                let map = ep.expert_map();
                map.rank_of(map.slot_for(world.rank(), id as u32))
            });
            owners.filter(|&owner| (node_of(owner) != node_of(world.rank())) == far).count() as u64
        };
        let (row, moved) = (2 * HIDDEN as u64, handle.report().moved);
        assert_eq!((moved.local_bytes, moved.rail_bytes), (ranks(false) * row, ranks(true) * row));
        assert_eq!(moved.rows, ranks(false) + ranks(true));
        let mut lanes = handle.report().lanes.clone();
        lanes.sort_by_key(|used| used.lane);
        let mates = world.nodes().members(node_of(world.rank())).len() as u32;
        let [far, own, near] = [("loop", 8 - mates), ("own", 1), ("shm", mates - 1)];
        assert_eq!(lanes, [far, own, near].map(|(lane, ranks)| LaneUse { lane, ranks }));
        assert_eq!(lanes.len(), ep.lanes().len());
        assert!(handle.report().kernels.is_empty());

        let y = handle.output().unwrap();
        ep.combine::<bf16>(y, &handle).unwrap();
        assert_eq!(handle.copied_bytes(), 0, "outputs are combined where they lie");
        comes_home(&mut ep, &rows, &handle, &mine);
        assert_eq!(handle.copied_bytes(), u64::from(rows.len()) * row, "rows elsewhere are copied once");
    });
}

#[test]
fn two_hundred_rounds_leave_nothing_behind() {
    for nodes in NODES {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let mut ep = layer(&group);
            let mut held = Vec::new();
            for round in 0..200 {
                let mine = input(world.rank(), round);
                let (rows, handle) = dispatch(&mut ep, &mine);
                comes_home(&mut ep, &rows, &handle, &mine);
                // Some outlive the next rounds, others than at the neighbours.
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
fn what_outlives_its_world_stays_readable() {
    for nodes in NODES {
        let mut left = on_ranks(nodes, &small(), |world| {
            let mut ep = layer(&world.all().unwrap());
            let mine = input(world.rank(), 1);
            let (rows, handle) = dispatch(&mut ep, &mine);
            let copy = rows.to_vec::<bf16>().unwrap();
            comes_home(&mut ep, &rows, &handle, &mine);
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
fn what_is_dropped_while_peers_still_read_it_stays_until_they_have() {
    const WIDE: usize = 4096;
    for (nodes, weighted) in [(NODES[0], false), (NODES[0], true), (NODES[1], true)] {
        on_ranks(nodes, &small(), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).unwrap().experts(4).top_k(1).hidden(WIDE);
            let mut ep = builder.dtype(Dtype::F32).max_tokens(32).weighted(weighted).build().unwrap();
            for round in 0..30 {
                // Ranks have different amounts to read, so that some are long gone when others begin.
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
