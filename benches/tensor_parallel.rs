//! Sequence parallel layers on an emulated link: how much of the shorter of products and transfers
//! token chunks hide.
//!
//! Two ranks on two nodes, a thread each, and a link on which transfers take about as long as
//! products. Median of the rounds, each from the first rank's begin to the last one's end. *In
//! turn* is the same plan on one thread.

use std::num::NonZeroU64;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use sidelane::collective::Communicator;
use sidelane::config::EmulatedLink;
use sidelane::overlap::{HostExecutor, TokenChunks};
use sidelane::rows::{Matrix, product};
use sidelane::{Error, Options, World};
use sidelane_parallel::tensor::{Activations, ColumnParallelLinear, LinearShape, RowParallelLinear};
use sidelane_testkit::machines::Machines;
use sidelane_testkit::timing::stats::{Laps, median};

const RANKS: usize = 2;
const TOKENS: usize = 2048;
const HIDDEN: usize = 512;
const FFN: usize = 2048;
const ROUNDS: usize = 15;
const LATENCY: Duration = Duration::from_micros(10);

/// A call of each rank, and its begin and end.
type Call<'a> = Box<dyn FnMut(&mut Communicator) -> Result<(), Error> + 'a>;

/// Products of one forward pass of a layer, on every rank at once.
fn products_time() -> Duration {
    let barrier = Barrier::new(RANKS);
    let times: Vec<Vec<Duration>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|_| {
                scope.spawn(|| {
                    let (x, w) = (vec![0.5; TOKENS * HIDDEN], vec![0.25; FFN / RANKS * HIDDEN]);
                    let mut y = vec![0.0; TOKENS * FFN / RANKS];
                    let round = |_| {
                        barrier.wait();
                        let begin = Instant::now();
                        let w = Matrix::new(&w, FFN / RANKS, HIDDEN).transposed();
                        product(&mut y, Matrix::new(&x, TOKENS, HIDDEN), w, false);
                        begin.elapsed()
                    };
                    (0..ROUNDS).map(round).collect()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    });
    let slowest = |round: usize| times.iter().map(|of| of[round]).max().unwrap_or_default().as_secs_f64();
    Duration::from_secs_f64(median(&mut (0..ROUNDS).map(slowest).collect::<Vec<f64>>()))
}

/// A call's name, and its median in milliseconds.
type Timed = (&'static str, f64);

/// Names of calls, and the median of each over rounds in which all take turns.
fn measure(link: EmulatedLink, chunks: u32) -> Result<Vec<Timed>, Error> {
    let options = Options::default().with_emulated_link(Some(link));
    let worlds = World::threads_with(&[0, 1], &options)?;
    let barrier = Barrier::new(RANKS);
    let mut ranks: Vec<Vec<Timed>> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.iter().map(|world| scope.spawn(|| rank(world, chunks, &barrier))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect::<Result<_, Error>>()
    })?;
    // All ranks know the same.
    Ok(ranks.swap_remove(0))
}

fn rank(world: &World, chunks: u32, barrier: &Barrier) -> Result<Vec<Timed>, Error> {
    let all = world.all()?;
    let mut group = Communicator::builder(&all).build()?;
    let (way, up) = (Activations::SequenceParallel, LinearShape { inputs: HIDDEN, outputs: FFN });
    let down = LinearShape { inputs: FFN, outputs: HIDDEN };
    let weight = vec![0.25; HIDDEN * FFN / RANKS];
    let column = ColumnParallelLinear::new(&mut group, up, way, weight.clone(), None)?;
    let row = RowParallelLinear::new(&mut group, down, way, weight, None)?;
    let (x, h) = (vec![0.5; TOKENS / RANKS * HIDDEN], vec![0.5; TOKENS * FFN / RANKS]);
    let chunks = TokenChunks::new(chunks);
    let (alone, both) = (HostExecutor::new().overlap(false), HostExecutor::new());
    let (alone, both) = (&alone, &both);
    let (x, h, column, row) = (&x, &h, &column, &row);
    let pieces: Vec<usize> = chunks.of((TOKENS / RANKS) as u32).map(|of| of.len() * HIDDEN).collect();
    let pieces = &pieces;
    let mut calls: Vec<(&'static str, Call<'_>)> = vec![
        (
            "gathers",
            Box::new(move |group| {
                pieces.iter().try_for_each(|&len| group.all_gather(&x[..len], &mut vec![0.0; RANKS * len]))
            }),
        ),
        (
            "reduces",
            Box::new(move |group| {
                pieces
                    .iter()
                    .try_for_each(|&len| group.reduce_scatter(&h[..RANKS * len], &mut vec![0.0; len]))
            }),
        ),
    ];
    for (names, executor) in [
        (
            [
                "column, forward, in turn",
                "row, forward, in turn",
                "column, backward, in turn",
                "row, backward, in turn",
            ],
            alone,
        ),
        (
            [
                "column, forward, overlapped",
                "row, forward, overlapped",
                "column, backward, overlapped",
                "row, backward, overlapped",
            ],
            both,
        ),
    ] {
        let [column_forward, row_forward, column_backward, row_backward] = names;
        calls.push((
            column_forward,
            Box::new(move |group| column.forward_in_chunks(group, x, chunks, executor).map(drop)),
        ));
        calls.push((
            row_forward,
            Box::new(move |group| row.forward_in_chunks(group, h, chunks, executor).map(drop)),
        ));
        calls.push((
            column_backward,
            Box::new(move |group| column.backward_in_chunks(group, x, h, chunks, executor).map(drop)),
        ));
        calls.push((
            row_backward,
            Box::new(move |group| row.backward_in_chunks(group, h, x, chunks, executor).map(drop)),
        ));
    }
    let mut laps = vec![Laps::default(); calls.len()];
    for _ in 0..ROUNDS {
        for ((_, call), laps) in calls.iter_mut().zip(&mut laps) {
            barrier.wait();
            laps.time(|| call(&mut group))?;
        }
    }
    let machines = Machines::of(&all)?;
    let timed = |((name, _), laps): (&(&'static str, Call<'_>), &Laps)| {
        Ok((*name, median(&mut laps.rounds(&all, &machines)?) / 1e3))
    };
    calls.iter().zip(&laps).map(timed).collect()
}

fn main() -> Result<(), Error> {
    let products = products_time();
    // A rank sends its tokens to the other one.
    let sent = (TOKENS / RANKS * HIDDEN * size_of::<f32>()) as f64;
    let rate = (sent / products.as_secs_f64()) as u64;
    let bytes_per_second = NonZeroU64::new(rate).unwrap_or(NonZeroU64::MIN);
    let link = EmulatedLink::new(bytes_per_second, LATENCY);
    println!("{RANKS} ranks, {TOKENS} tokens, hidden {HIDDEN}, ffn {FFN}, f32; {} MB/s", rate / 1_000_000);
    println!("products of a forward pass: {products:.2?}");
    for chunks in [1, 2, 4, 8, 16] {
        let times = measure(link, chunks)?;
        let time = |name: &str| {
            let found = times.iter().find(|(of, _)| *of == name);
            found.map_or(0.0, |(_, ms)| *ms)
        };
        let products = products.as_secs_f64() * 1e3;
        println!("{chunks} chunks: gathers {:.2} ms, reduces {:.2} ms", time("gathers"), time("reduces"));
        for (pass, transfers, products) in [
            ("column, forward", time("gathers"), products),
            ("row, forward", time("reduces"), products),
            ("column, backward", time("gathers") + time("reduces"), 2.0 * products),
            ("row, backward", time("gathers"), 2.0 * products),
        ] {
            let turn = time(&format!("{pass}, in turn"));
            let overlapped = time(&format!("{pass}, overlapped"));
            let hidden = (turn - overlapped) / transfers.min(products);
            println!("  {pass}: in turn {turn:.2} ms, overlapped {overlapped:.2} ms, hidden {hidden:.2}");
        }
    }
    Ok(())
}
