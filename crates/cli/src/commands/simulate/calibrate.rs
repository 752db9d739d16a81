//! Figures of this machine, for the time interpreter: costs of bare copies, bare sums, words and
//! planning, with all cores at work.
//!
//! ```text
//!   rows of 64 bytes, rows of 16 KiB     bare loops of a dispatch      price of a row, rate of a copy
//!   rows of 16 KiB                       bare loops of a combine       rate of a sum
//!   two ranks, turn by turn              words                         price of a word, latency
//!   4096 tokens, top-8                   sort, place                   price of a choice
//! ```
//!
//! The loops are those of the floor, which know no flags, counts or placement. The rest is the
//! interpreter's prediction, which a measurement of real calls checks.

use std::time::{Duration, Instant};

use half::bf16;
use sidelane::ep::FloorBench;
use sidelane::gate::{Pattern, synthetic};
use sidelane::plan::RowLayout;
use sidelane::rows::{Arithmetic, Stores};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, Options, World};
use sidelane_model::time::{Compute, CopyCost, Engines, Executor, Hardware, Host, Link, NicModel, Source};
use sidelane_testkit::worlds::on_ranks;

use crate::commands::plan_bench::{Cost, Shape};
use crate::error::{CliError, failed};
use crate::table;

/// Tokens of each rank where loops are measured, choices of each, and experts of each rank.
const TOKENS: u32 = 512;
const TOP_K: u32 = 8;
/// Elements of a small row and of a large one.
const HIDDEN: [u32; 2] = [32, 8192];
const ROUNDS: u32 = 40;

/// Seconds that bare loops of all cores took, in the best of many rounds: one rank's bytes.
#[derive(Clone, Copy)]
struct Loops {
    copy: f64,
    sum: f64,
    /// Rows that a rank copied.
    rows: f64,
}

/// Measures.
///
/// # Errors
/// If large rows took no longer than small ones: then no rate follows.
pub fn measure() -> Result<Hardware, CliError> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let ranks = cores.max(2);
    let [small, large] = [loops(ranks, HIDDEN[0])?, loops(ranks, HIDDEN[1])?];
    let bytes = |hidden: u32| f64::from(hidden) * 2.0;
    // Two equations, time = rows * price + bytes / rate, where cores take turns if there are more
    // ranks than these.
    let turns = f64::from(ranks) / f64::from(cores);
    let per_row = |loops: &Loops| loops.copy / turns / loops.rows;
    let per_byte = (per_row(&large) - per_row(&small)) / (bytes(HIDDEN[1]) - bytes(HIDDEN[0]));
    if per_byte <= 0.0 {
        return Err(failed!(
            "rows of 16 KiB were copied as fast as rows of 64 bytes: something else keeps this machine busy; try again"
        ));
    }
    let price = (per_row(&small) - per_byte * bytes(HIDDEN[0])).max(0.0);
    let rate = mb_s(1.0 / per_byte);
    // A sum reads as many rows as were copied here, and writes a row for each token.
    let summed = (large.rows + f64::from(TOKENS)) * bytes(HIDDEN[1]);
    let sum_rate = mb_s(summed / (large.sum / turns));
    let [signal, one_way] = words()?;
    let (sort, place, per_bin) = planning()?;
    let cost = CopyCost { from_bytes: 0, per_copy: ns(price), rate };
    Ok(Hardware {
        name: "this machine".to_owned(),
        executor: Executor::Host,
        // Cores copy: there is nothing to enqueue.
        engines: Engines {
            peer: vec![cost],
            own: vec![cost],
            host: vec![cost],
            per_batch: 0,
            per_word: 0,
            per_list: 0,
            per_call: 0,
            enqueue_copy: 0,
            enqueue_word: 0,
            switched: true,
        },
        link: Link { rate, load_rate: sum_rate, latency: 0 },
        nic: NicModel {
            per_node: 0,
            rate,
            per_message: ns(price),
            message_bytes: 65_536,
            latency: ns(one_way),
        },
        compute: Compute { rate: sum_rate, launch: 0, sort: 0 },
        host: Host {
            cores,
            signal: ns(signal),
            latency: ns((one_way - 2.0 * signal).max(0.0)),
            sort: ps(sort),
            place: ps(place),
            per_bin: ps(per_bin),
        },
        peaks: None,
        sources: sources(),
    })
}

/// All is measured here, apart from what a host has not.
fn sources() -> Vec<Source> {
    let source = |figures: &[&str], source: &str| Source {
        figures: figures.iter().map(|&name| name.to_owned()).collect(),
        source: source.to_owned(),
    };
    let parts = ["engines", "link", "nic", "compute", "host"];
    vec![
        source(
            &["link.latency", "compute.launch", "compute.sort"],
            "assumed: 0, a host launches nothing, and words have their own latency",
        ),
        source(
            &["nic.per_message", "nic.message_bytes"],
            "assumed: a ring costs a copy, and takes 64 KiB at once",
        ),
        source(&parts, "measured: simulate --calibrate"),
    ]
}

pub fn words_of(hardware: &Hardware) -> String {
    let Hardware { engines, compute, host, .. } = hardware;
    let [copies, sums] = [engines.peer[0].rate, compute.rate].map(|rate| rate as f64 / 1e3);
    let [sort, place, bin] = [host.sort, host.place, host.per_bin].map(|ps| ps as f64 / 1e3);
    let planning = format!("{sort:.1} ns a choice to sort, {place:.1} ns to place, {bin:.1} ns a bin");
    table::head(&[
        ("cores", host.cores.to_string()),
        ("copies", format!("{} ns a row, {copies:.1} GB/s a core", engines.peer[0].per_copy)),
        ("sums", format!("{sums:.1} GB/s a core")),
        ("words", format!("{} ns, seen {} ns later", host.signal, host.latency)),
        ("planning", planning),
    ])
}

fn mb_s(bytes_per_second: f64) -> u64 {
    (bytes_per_second / 1e6).round().max(1.0) as u64
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

fn ps(seconds: f64) -> u64 {
    (seconds * 1e12).round() as u64
}

/// Speed of the machine: other work only adds time.
fn least(times: &[Duration]) -> f64 {
    times.iter().min().copied().unwrap_or_default().as_secs_f64()
}

/// Bare loops of a dispatch and its combine between so many ranks, one for each core.
fn loops(ranks: u32, hidden: u32) -> Result<Loops, CliError> {
    let mut options = Options::default();
    // Landed rows, outputs, and as much again for announced rows.
    let landed = u64::from(TOKENS * TOP_K) * u64::from(hidden) * 2;
    options.config.heap = (8 * landed).max(64 << 20);
    let worlds = World::threads_with(&vec![0; ranks as usize], &options)?;
    let all = on_ranks(&worlds, |world| measured(world, ranks, hidden));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    // All ranks work at once, so the slowest rank's best round is one in which every core was busy.
    let most = |of: fn(&Loops) -> f64| all.iter().map(of).fold(0.0, f64::max);
    Ok(Loops { copy: most(|loops| loops.copy), sum: most(|loops| loops.sum), rows: most(|loops| loops.rows) })
}

fn measured(world: &World, ranks: u32, hidden: u32) -> Result<Loops, CliError> {
    let group = world.all()?;
    let mut ep = ExpertParallel::builder(&group)?
        .experts(ranks * TOP_K)
        .top_k(TOP_K)
        .hidden(hidden as usize)
        .dtype(Dtype::Bf16)
        .build()?;
    let routing = synthetic(Pattern::Uniform, ranks * TOP_K, TOP_K, TOKENS, 1, world.rank())?;
    let x = vec![bf16::ONE; (TOKENS * hidden) as usize];
    let mut out = x.clone();
    let (rows, handle) = ep.dispatch(&x, &routing)?;
    let mut barrier = group.window(64)?;
    let mut floor: FloorBench = ep.floor_bench(&group, rows, handle.output()?, &handle)?;
    let (mut copies, mut sums) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for _ in 0..ROUNDS {
        for (nth, stores) in [Stores::Streaming, Stores::Cached].into_iter().enumerate() {
            barrier.barrier()?;
            let begin = Instant::now();
            floor.dispatch(bytemuck::cast_slice(&x), stores);
            copies[nth].push(begin.elapsed());
            barrier.barrier()?;
            let begin = Instant::now();
            floor.combine(Arithmetic::Bf16, bytemuck::cast_slice_mut(&mut out), stores);
            sums[nth].push(begin.elapsed());
        }
    }
    barrier.barrier()?;
    // The faster stores, as the library would take.
    let best = |[a, b]: [Vec<Duration>; 2]| least(&a).min(least(&b));
    Ok(Loops { copy: best(copies), sum: best(sums), rows: f64::from(TOKENS * TOP_K) })
}

/// Seconds of a word raised, and from one rank's to another's seeing it.
fn words() -> Result<[f64; 2], CliError> {
    const TURNS: u64 = 50;
    const MANY: u64 = 100;
    let turns = on_ranks(&World::threads(2)?, |world| -> Result<_, CliError> {
        let group = world.all()?;
        let mut window = group.window(64)?;
        let (me, peer) = (world.rank(), 1 - world.rank());
        let (mut value, mut found) = (0, Vec::new());
        for _ in 0..MANY {
            window.barrier()?;
            let begin = Instant::now();
            for _ in 0..TURNS {
                value += 1;
                if me == 0 {
                    window.signal(peer, value)?;
                    window.wait_until(peer, value)?;
                } else {
                    window.wait_until(peer, value)?;
                    window.signal(peer, value)?;
                }
            }
            let turn = begin.elapsed() / TURNS as u32 / 2;
            window.barrier()?;
            let begin = Instant::now();
            for _ in 0..TURNS {
                value += 1;
                window.signal(peer, value)?;
            }
            found.push([begin.elapsed() / TURNS as u32, turn]);
        }
        Ok(found)
    });
    let turns = turns.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok([0, 1].map(|which| least(&turns[0].iter().map(|found| found[which]).collect::<Vec<_>>())))
}

/// Seconds of planning: a choice sorted, a choice placed, a bin.
fn planning() -> Result<(f64, f64, f64), Error> {
    const MANY: u32 = 4096;
    let cost = |ranks| {
        let (experts, per_node) = (ranks * TOP_K, ranks);
        let (route, layout) = (Route::Direct, RowLayout::ExpertMajor);
        let shape = Shape { tokens: MANY, top_k: TOP_K, experts, ranks, per_node, route, layout };
        crate::commands::plan_bench::measure(&shape, ROUNDS)
    };
    let (few, many) = (cost(8)?, cost(128)?);
    let bins = |ranks: u32| f64::from(ranks * (TOP_K + 1));
    let placed = |cost: &Cost| (cost.place + cost.fill) / 1e6;
    let choices = f64::from(MANY * TOP_K);
    // The cost of more bins and ranks at the same number of choices.
    let per_bin = ((placed(&many) - placed(&few)) / (bins(128) - bins(8))).max(0.0);
    let place = (placed(&few) - per_bin * bins(8)).max(0.0);
    Ok((few.sort / 1e6 / choices, place / choices, per_bin))
}
