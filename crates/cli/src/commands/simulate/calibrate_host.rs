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
use sidelane_model::time::{Hardware, HostFigures, Loops};
use sidelane_testkit::timing::planning_steps::{self, Cost, Shape};
use sidelane_testkit::worlds::on_ranks;

use crate::error::{CliError, failed};
use crate::table;

/// Tokens of each rank where loops are measured, choices of each, and experts of each rank.
const TOKENS: u32 = 512;
const TOP_K: u32 = 8;
/// Elements of a small row and of a large one.
const HIDDEN: [u32; 2] = [32, 8192];
const ROUNDS: u32 = 40;

/// Measures.
///
/// # Errors
/// If large rows took no longer than small ones: then no rate follows.
pub fn measure() -> Result<Hardware, CliError> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let ranks = cores.max(2);
    let loops = [loops(ranks, HIDDEN[0])?, loops(ranks, HIDDEN[1])?];
    let figures = HostFigures { cores, ranks, loops, words: words()?, planning: planning()? };
    figures.hardware().ok_or_else(|| {
        failed!(
            "rows of 16 KiB were copied as fast as rows of 64 bytes: something else keeps this machine busy; try again"
        )
    })
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
    Ok(Loops { copy: most(|loops| loops.copy), sum: most(|loops| loops.sum), ..all[0] })
}

fn measured(world: &World, ranks: u32, hidden: u32) -> Result<Loops, CliError> {
    let group = world.all()?;
    let mut ep = ExpertParallel::builder(&group)
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
    Ok(Loops {
        row_bytes: f64::from(hidden) * 2.0,
        copy: best(copies),
        sum: best(sums),
        rows: f64::from(TOKENS * TOP_K),
        sums: f64::from(TOKENS),
    })
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
fn planning() -> Result<[f64; 3], Error> {
    const MANY: u32 = 4096;
    let cost = |ranks| {
        let (experts, per_node) = (ranks * TOP_K, ranks);
        let (route, layout) = (Route::Direct, RowLayout::ExpertMajor);
        let (pattern, tokens, top_k) = (Pattern::Uniform, MANY, TOP_K);
        let shape = Shape { pattern, tokens, top_k, experts, ranks, per_node, route, layout };
        planning_steps::measure(&shape, ROUNDS)
    };
    let (few, many) = (cost(8)?, cost(128)?);
    let bins = |ranks: u32| f64::from(ranks * (TOP_K + 1));
    let placed = |cost: &Cost| (cost.place + cost.fill) / 1e6;
    let choices = f64::from(MANY * TOP_K);
    // The cost of more bins and ranks at the same number of choices.
    let per_bin = ((placed(&many) - placed(&few)) / (bins(128) - bins(8))).max(0.0);
    let place = (placed(&few) - per_bin * bins(8)).max(0.0);
    Ok([few.sort / 1e6 / choices, place / choices, per_bin])
}
