//! Rows in fp8 with their scales: every record lands whole, and returned rows have the ordinary
//! type.

use crate::support::{Tokens, medium, on_ranks, placement, tokens};
use half::bf16;
use sidelane::dtype::Fp8RowShape;
use sidelane::error::{CallError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, RowLayout};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, World};

const HIDDEN: usize = 200;
const TOP_K: u32 = 3;
const EXPERTS: u32 = 7;
const COUNTS: [u32; 5] = [6, 0, 11, 3, 1];

fn layer(world: &World, route: Route) -> ExpertParallel {
    ExpertParallel::builder(&world.all().unwrap())
        .experts(EXPERTS)
        .top_k(TOP_K)
        .hidden(HIDDEN)
        .dtype(Dtype::Bf16)
        .align(4)
        .route(route)
        .fp8(true)
        .build()
        .unwrap()
}

#[test]
fn records_land_whole_and_rows_return() {
    let map = ExpertMap::contiguous(EXPERTS, 5).unwrap();
    let all: Vec<Tokens<bf16>> =
        (0..).zip(COUNTS).map(|(rank, count)| tokens(rank + 40, count, HIDDEN, TOP_K, EXPERTS)).collect();
    let expected = placement(&all, TOP_K, &map, 4);
    let shape = Fp8RowShape::new(HIDDEN as u32);
    for (nodes, route) in
        [([0; 5], Route::Direct), ([0, 1, 0, 1, 1], Route::Direct), ([0, 1, 0, 1, 1], Route::Pxn)]
    {
        on_ranks(&nodes, &medium(), |world| {
            let me = world.rank() as usize;
            let mut ep = layer(&world, route);
            let records: Vec<Vec<u8>> = all
                .iter()
                .map(|tokens| {
                    let mut records = Vec::new();
                    ep.quantize(&tokens.x, &mut records).unwrap();
                    records
                })
                .collect();
            let mine = &all[me];
            let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
            for _ in 0..3 {
                world.pool().poison(0xff);
                let (rows, handle) = ep.dispatch(&records[me], &routing).unwrap();
                let again = ep.dispatch_cached(&records[me], &handle).unwrap();
                for rows in [&rows, &again] {
                    let (payload, scales) =
                        (rows.payload().unwrap().unwrap(), rows.scales().unwrap().unwrap());
                    assert_eq!(payload.shape(), (expected[me].len(), HIDDEN));
                    assert_eq!(scales.shape(), (expected[me].len(), 2));
                    for ((origin, values), scales) in
                        expected[me].iter().zip(payload.rows()).zip(scales.rows())
                    {
                        let sent = match *origin {
                            Some((source, token, _)) => {
                                records[source][token * shape.bytes()..][..shape.bytes()].to_vec()
                            }
                            None => vec![0; shape.bytes()],
                        };
                        assert_eq!(values, &sent[..HIDDEN]);
                        assert_eq!(
                            bytemuck::cast_slice::<f32, u8>(scales),
                            &sent[shape.scales_offset()..][..8]
                        );
                    }
                }
                // Every expert answers with ones: each token gets as many as it has choices.
                let mut y = handle.output().unwrap();
                y.rows_mut::<bf16>().unwrap().fill(bf16::ONE);
                let out: Vec<bf16> = ep.combine(y, &handle).unwrap();
                for (row, ids) in out.chunks_exact(HIDDEN).zip(mine.ids.chunks_exact(TOP_K as usize)) {
                    let chosen = ids.iter().filter(|&&id| id >= 0).count();
                    assert!(row.iter().all(|&x| x == bf16::from_f32(chosen as f32)));
                }
                // The gradient of a combine is rows of the ordinary type.
                let (grads, _) = ep.combine_backward(&mine.x, &handle).unwrap();
                assert!(grads.payload().unwrap().is_none());
                let seen = grads.rows::<bf16>().unwrap();
                for (row, origin) in expected[me].iter().enumerate() {
                    if let Some((source, token, _)) = *origin {
                        let sent = &all[source].x[token * HIDDEN..][..HIDDEN];
                        assert_eq!(&seen[row * HIDDEN..][..HIDDEN], sent);
                    }
                }
            }
        });
    }
}

#[test]
fn records_go_with_rank_major_rows_too() {
    on_ranks(&[0, 0, 1, 1], &medium(), |world| {
        let mut ep = ExpertParallel::builder(&world.all().unwrap())
            .experts(8)
            .top_k(2)
            .hidden(128)
            .dtype(Dtype::Bf16)
            .layout(RowLayout::RankMajor)
            .route(Route::Pxn)
            .fp8(true)
            .build()
            .unwrap();
        let x = vec![bf16::from_f32(world.rank() as f32 + 1.0); 128];
        let mut records = Vec::new();
        ep.quantize(&x, &mut records).unwrap();
        let routing = Routing::new(2, vec![1, 6], vec![0.25, 0.75]).unwrap();
        let (rows, _handle) = ep.dispatch(&records, &routing).unwrap();
        let holds = [0, 3].contains(&world.rank());
        assert_eq!(rows.len(), if holds { 4 } else { 0 }, "experts 1 and 6 live on ranks 0 and 3");
        for (source, (values, scales)) in
            rows.payload().unwrap().unwrap().rows().zip(rows.scales().unwrap().unwrap().rows()).enumerate()
        {
            // The largest value of a block is 448 scales.
            assert!(values.iter().all(|&code| code == 0x7e));
            assert_eq!(scales, [(source as f32 + 1.0) / 448.0]);
        }
    });
}

#[test]
fn tokens_that_are_no_records_are_refused_on_every_rank() {
    on_ranks(&[0, 1], &medium(), |world| {
        let mut ep = layer(&world, Route::Pxn);
        let routing = Routing::new(TOP_K, vec![0, 1, 2], vec![1.0; 3]).unwrap();
        let plain = vec![bf16::ONE; HIDDEN];
        let error = ep.dispatch(&plain, &routing).unwrap_err();
        assert!(
            matches!(error, Error::Plan(PlanError::WrongDtype { expected: Dtype::Bytes, .. })),
            "{error}"
        );
        let mut records = Vec::new();
        ep.quantize(&plain, &mut records).unwrap();
        ep.dispatch(&records, &routing).expect("the world stays usable");
        let mut other = ExpertParallel::builder(&world.all().unwrap()).experts(2).hidden(8).build().unwrap();
        let error = other.quantize(&plain[..8], &mut records).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::NotKept { .. })), "{error}");
        drop(other.dispatch(&plain[..8], &Routing::new(1, vec![0], vec![1.0]).unwrap()).unwrap());
    });
}
