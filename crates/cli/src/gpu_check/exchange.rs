//! `ExpertParallel` on one GPU, its ranks as threads or as processes, against the naive reference:
//! rows, choices, weights, counts and sums to the bit.
//!
//! Calls are those of the conformance suite, here with the layer of a large model.
//!
//! Ranks as threads share the context of their GPU, and memory that is freed waits for all that the
//! context does: for the streams of peers that wait for this rank. So a rank makes its memory
//! before the first call and keeps it until the last.

use sidelane::bootstrap::Timeouts;
use sidelane::config::Config;
use sidelane::device::Driver;
use sidelane::ep::Feature;
use sidelane::plan::Overflow;
use sidelane::{Dtype, Options, World};
use sidelane_verify::reference::Real;

use super::report::{About, Checks, State};
use super::{GpuCheckArgs, Part, Task};
use crate::command::Command;
use crate::conformance::{Call, Case, Device, Memory, Player, Setting, Way, on_device};
use crate::device::one_process;
use crate::error::{CliError, failed, wrong};
use crate::ranks;
use crate::settings::{Settings, with_element};

const ONE_GPU: &str = "the same between GPUs, over NVLink";

/// Four layers.
const LAYERS: &[Call] = &[
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
];

/// A layer that is captured once, and launched with several inputs.
const GRAPH: &[Call] = &[Call::Capture];

/// The layer of a large model.
const LARGE: Case = Case {
    feature: Feature::RankMajor,
    name: "a large layer",
    group: &[],
    second: &[],
    experts: 64,
    top_k: 8,
    hidden: 7168,
    tokens: &[128, 0, 77, 128, 31],
    dtype: Dtype::Bf16,
    settings: &[],
    calls: LAYERS,
    ways: &Way::ALL,
};
const SMALL: Case = Case { experts: 16, top_k: 4, hidden: 40, tokens: &[9, 0, 5, 9, 2], ..LARGE };

/// So many rows as half of a rank's choices: some are dropped.
const HALF: &[Setting] = &[Setting::Budget(512, Overflow::Drop)];
const SMALL_HALF: &[Setting] = &[Setting::Budget(18, Overflow::Drop)];

/// Calls of a row of the report.
#[derive(Clone, Copy)]
struct Exchange {
    case: Case,
    way: Way,
    /// Whether each rank has two instances, whose calls take turns.
    two: bool,
}

/// Slots, exact sizes, a budget that drops.
fn modes(task: &Task) -> [(&'static str, Exchange); 3] {
    let case = task.few(LARGE, SMALL);
    let budget = Case { settings: task.few(HALF, SMALL_HALF), ..case };
    [("", case, Way::Slots), ("exact sizes, ", case, Way::Exact), ("a budget, ", budget, Way::Budget)]
        .map(|(what, case, way)| (what, Exchange { case, way, two: false }))
}

pub fn threads(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let [(_, slots), exact, budget] = modes(task);
    let graph = |one: Exchange| Exchange { case: Case { calls: GRAPH, ..one.case }, ..one };
    let of = |dtype| Exchange { case: Case { dtype, ..slots.case }, ..slots };
    let flat = |ranks: u32| vec![0; ranks as usize];
    let mut tell = |what: String, nodes: &[u32], exchange: Exchange| {
        let about = About::new(&what, "as the naive reference, to the bit").open(ONE_GPU);
        checks.check(about, || on_nodes(task, nodes, |world| play(task, exchange, nodes, world))).map(drop)
    };
    for ranks in [2, 4, 8] {
        tell(format!("{ranks} ranks"), &flat(ranks), slots)?;
    }
    tell("4 ranks, f16".to_owned(), &flat(4), of(Dtype::F16))?;
    tell("4 ranks, f32".to_owned(), &flat(4), of(Dtype::F32))?;
    for ranks in [2, 4, 8] {
        tell(format!("{ranks} ranks in a graph"), &flat(ranks), graph(slots))?;
    }
    let nodes = [0, 0, 1, 1];
    tell("2 + 2 ranks, between nodes by memory of the host".to_owned(), &nodes, slots)?;
    tell("2 + 2 ranks, the same in a graph".to_owned(), &nodes, graph(slots))?;
    tell("two exchanges in turns".to_owned(), &flat(4), Exchange { two: true, ..slots })?;
    for (ranks, (what, mode)) in [2, 4, 8].into_iter().flat_map(|ranks| [exact, budget].map(|m| (ranks, m))) {
        tell(format!("{what}{ranks} ranks"), &flat(ranks), mode)?;
    }
    let held = graph(Exchange { way: Way::Graphs, ..budget.1 });
    tell("a budget, 4 ranks in a graph".to_owned(), &flat(4), held)
}

/// The same, with ranks as processes that this one starts.
pub fn processes(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if let Some(reason) = one_process(&Driver::open()?, task.device)? {
        let about = About::new("ranks as processes", "nothing: ranks are threads above");
        return checks.tell(about, State::Skipped, reason.to_owned());
    }
    for count in [2, 4] {
        let task = Task { part: Part::Rank, ..*task };
        let code = ranks::job(GpuCheckArgs::NAME, &[count], &task, Vec::new())?.run()?.exit_code();
        if code != 0 {
            let what = format!("{count} ranks");
            let shows = "several processes use this GPU at once; nvidia-smi -q shows the compute mode";
            let ended = failed!("a rank ended with {code}");
            checks.check(About::new(&what, shows).open(ONE_GPU), || Err(ended))?;
        }
    }
    Ok(())
}

/// The suite of `sidelane conformance`: a row for each feature.
pub fn conformance(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if let Some(reason) = one_process(&Driver::open()?, task.device)? {
        let about = About::new("the suite between processes", "nothing: ranks are threads below");
        return checks.tell(about, State::Skipped, reason.to_owned());
    }
    for finding in on_device(task.device, task.quick)? {
        let about = About::new(finding.feature, "bits of a naive reference, or refused by name at all ranks")
            .open(ONE_GPU);
        let state = match finding.correct {
            Some(true) => State::Right,
            Some(false) => State::Wrong,
            None => State::Skipped,
        };
        checks.tell(about, state, finding.text)?;
    }
    Ok(())
}

/// A rank of those.
pub fn rank(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let world = World::from_env_with(options(task))?;
    let ranks = world.size();
    for (what, exchange) in modes(task) {
        let found = play(task, exchange, &vec![0; ranks as usize], &world);
        let what = format!("{what}{ranks} ranks as processes");
        let shows = "memory and words go from one to the other as descriptors; to the bit";
        // Rank 0 speaks for all, unless another has something to say.
        if world.rank() == 0 || found.is_err() {
            checks.check(About::new(&what, shows).open(ONE_GPU), || found)?;
        }
    }
    Ok(())
}

/// The calls of one rank.
fn play(task: &Task, exchange: Exchange, nodes: &[u32], world: &World) -> Result<String, CliError> {
    with_element!(exchange.case.dtype, calls(task, exchange, nodes, world))
}

fn calls<E: Real>(task: &Task, exchange: Exchange, nodes: &[u32], world: &World) -> Result<String, CliError> {
    let Exchange { case, way, two } = exchange;
    let (group, settings) = (world.all()?, case.settings(way, nodes)?);
    let device = Device::new(Some(task.device), world.rank(), memory(&settings))?;
    let player = |part| Player::<E>::build(&settings, &group, Some(&device), (0, part));
    let (mut first, mut second) = (player(0)?, if two { Some(player(1)?) } else { None });
    let told = match (&mut second, case.calls) {
        (Some(second), _) => {
            (0..2).try_for_each(|_| first.around(second))?;
            "two layers of each, a dispatch begun before the other one's combine".to_owned()
        }
        (None, calls) => {
            calls.iter().try_for_each(|&call| first.play(call))?;
            let graph = "a graph's copies on one GPU are single ones, which its SMs do";
            if calls == GRAPH { graph.to_owned() } else { first.last_dispatch()? }
        }
    };
    let players = [Some(first), second];
    players.iter().flatten().try_for_each(Player::end)?;
    // Memory is given back when no rank waits for this one.
    group.gather(&[])?;
    let found = players.iter().flatten().find_map(|player| player.found.first());
    found.map_or(Ok(told), |difference| Err(wrong!("{}", difference.text())))
}

/// Memory of a rank for these settings: rows for all choices of a rank's tokens, and more.
pub fn memory(settings: &Settings) -> Memory {
    let row = (settings.case.hidden * settings.dtype.size() + 64) as u64;
    let tokens = u64::from(settings.max_tokens) * row + (1 << 12);
    let choices = tokens * u64::from(settings.case.top_k) + (1 << 20);
    Memory { tensors: 32 * tokens, staging: 4 * choices, heap: 8 * choices }
}

/// Runs the body on every rank of a world of threads, on these nodes. Gives what rank 0 found, or
/// the first thing that is wrong.
pub fn on_nodes<T: Send>(
    task: &Task,
    nodes: &[u32],
    body: impl Fn(&World) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    let worlds = World::threads_with(nodes, &options(task))?;
    let results: Vec<Result<T, CliError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.iter().map(|world| scope.spawn(|| body(world))).collect();
        let panicked = || failed!("a rank panicked");
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    // A difference says more than that others then missed their peer.
    let (right, mut wrong): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    wrong.sort_by_key(|error| {
        !matches!(error, Err(CliError::Wrong(_) | CliError::Library(sidelane::Error::Device(_))))
    });
    wrong.into_iter().chain(right).next().unwrap_or_else(|| Err(failed!("no ranks")))
}

fn options(task: &Task) -> Options {
    let config = Config { heap: task.few(64 << 20, 16 << 20), symmetric: 4 << 20, ..Config::default() };
    let timeouts = Timeouts { deadline: task.patience(), ..Timeouts::default() };
    Options { config, timeouts, ..Options::default() }
}

/// The layer of slots that is timed: as many tokens at each rank.
pub fn timed(task: &Task) -> Case {
    let full = Case { tokens: &[128], ..LARGE };
    task.few(full, Case { hidden: 512, tokens: &[16], ..full })
}
