//! The floor moves and sums exactly the bytes of a dispatch and its combine: same places, same
//! bits.

use crate::support::{Tokens, medium, on_ranks, placement, tokens};
use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{ExpertOutput, ExpertRows, FloorBench, Handle};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SumOrder};
use sidelane::rows::{Arithmetic, Stores};
use sidelane::topology::{NodeMap, Route};
use sidelane::{Dtype, ExpertParallel, Group, World};

const HIDDEN: usize = 40;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 11;
const ALIGN: u32 = 4;

/// State of a rank after a dispatch and before its combine.
struct Ready<'a> {
    group: Group,
    ep: ExpertParallel,
    mine: &'a Tokens<bf16>,
    rows: ExpertRows,
    y: ExpertOutput,
    handle: Handle,
}

fn all_tokens(ranks: usize) -> Vec<Tokens<bf16>> {
    (0..ranks as u64).map(|rank| tokens(rank + 7, 23, HIDDEN, TOP_K, EXPERTS)).collect()
}

fn ready<'a>(
    world: &World,
    all: &'a [Tokens<bf16>],
    route: Route,
    order: SumOrder,
    wire: PartialDtype,
) -> Ready<'a> {
    let group = world.all().unwrap();
    let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    let mut ep = builder
        .dtype(Dtype::Bf16)
        .align(ALIGN)
        .route(route)
        .sum_order(order)
        .partial_dtype(wire)
        .build()
        .unwrap();
    let mine = &all[world.rank() as usize];
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    world.pool().poison(0xff);
    let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
    let mut y = handle.output().unwrap();
    y.rows_mut::<bf16>().unwrap().copy_from_slice(rows.rows().unwrap());
    Ready { group, ep, mine, rows, y, handle }
}

impl Ready<'_> {
    /// The floor, and the remaining objects.
    fn measure(self) -> (FloorBench, Group, ExpertParallel, Handle) {
        let Ready { group, ep, rows, y, handle, .. } = self;
        let floor = ep.floor_bench(&group, rows, y, &handle).unwrap();
        (floor, group, ep, handle)
    }
}

#[test]
fn every_row_is_written_again_unless_a_nic_writes_it() {
    const POISON: bf16 = bf16::from_bits(0x4242);
    for nodes in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 0]] {
        let all = all_tokens(nodes.len());
        let map = ExpertMap::contiguous(EXPERTS, nodes.len() as u32).unwrap();
        let origins = placement(&all, TOP_K, &map, ALIGN);
        for route in Route::ALL {
            on_ranks(nodes, &medium(), |world| {
                let me = world.rank() as usize;
                let ready = ready(&world, &all, route, SumOrder::Expert, PartialDtype::F32);
                let x: &[u8] = bytemuck::cast_slice(&ready.mine.x);
                let before = ready.rows.to_vec::<bf16>().unwrap();
                let (mut floor, group, _ep, _handle) = ready.measure();
                let mut rows = floor.lend_rows().unwrap();
                rows.rows_mut::<bf16>().unwrap().fill(POISON);
                floor.keep_rows(rows).unwrap();
                group.gather(&[]).unwrap();
                for stores in [Stores::Cached, Stores::Streaming] {
                    floor.dispatch(x, stores);
                }
                group.gather(&[]).unwrap();
                let rows = floor.lend_rows().unwrap();
                let after = rows.rows::<bf16>().unwrap();
                // The rank of the last row before a pad writes it.
                let mut source = 0;
                for (row, origin) in origins[me].iter().enumerate() {
                    source = origin.map_or(source, |(source, ..)| source);
                    let again = route == Route::Pxn || nodes[source] == nodes[me];
                    let of = |rows: &[bf16]| rows[row * HIDDEN..][..HIDDEN].to_vec();
                    let expected = if again { of(&before) } else { vec![POISON; HIDDEN] };
                    assert_eq!(of(after), expected, "row {row} of rank {me} on {nodes:?}, {route:?}");
                }
            });
        }
    }
}

#[test]
fn sums_of_rows_that_are_here_have_the_bits_of_a_combine() {
    for nodes in [&[0, 0, 0][..], &[0, 0, 1, 1], &[0, 0, 0, 1, 1, 1, 1, 1]] {
        let all = all_tokens(nodes.len());
        let (map, labels) =
            (ExpertMap::contiguous(EXPERTS, nodes.len() as u32).unwrap(), NodeMap::from_labels(nodes));
        for (route, order, wire) in Route::ALL
            .iter()
            .flat_map(|route| SumOrder::ALL.iter().map(move |order| (*route, *order)))
            .flat_map(|(route, order)| PartialDtype::ALL.map(|wire| (route, order, wire)))
        {
            on_ranks(nodes, &medium(), |world| {
                let me = world.rank();
                let mut ready = ready(&world, &all, route, order, wire);
                let y = ready.rows.to_vec::<bf16>().unwrap();
                let real: Vec<bf16> = ready.ep.combine(&y, &ready.handle).unwrap();
                let mine = ready.mine;
                let (mut floor, group, ..) = ready.measure();
                let mut bare = vec![bf16::NAN; real.len()];
                floor.combine(Arithmetic::Bf16, bytemuck::cast_slice_mut(&mut bare), Stores::Streaming);
                group.gather(&[]).unwrap();
                let here = |&&id: &&i32| {
                    id < 0 || labels.same_node(me, map.rank_of(map.slot_for(me, id as u32).unwrap()))
                };
                let tokens = real.chunks_exact(HIDDEN).zip(bare.chunks_exact(HIDDEN));
                let mut compared = 0;
                for ((real, bare), ids) in tokens.zip(mine.ids.chunks_exact(TOP_K as usize)) {
                    assert!(bare.iter().all(|e| e.is_finite()), "every token is summed");
                    if ids.iter().filter(here).count() == ids.len() {
                        assert_eq!(real, bare, "rank {me} on {nodes:?}, {route:?}, {order:?}, {wire:?}");
                        compared += 1;
                    }
                }
                assert!(compared > 0, "some token stays on its node");
            });
        }
    }
}
