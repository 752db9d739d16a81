//! `ExpertParallel` on one GPU, its ranks as threads or as processes, against the same calls on the host: rows, choices,
//! weights, counts and sums to the bit.

mod both;
mod planned;
mod rank;

use std::time::Duration;

use half::{bf16, f16};
use sidelane::bootstrap::Clocks;
use sidelane::config::Config;
use sidelane::device::Driver;
use sidelane::{Element, Options, World};

use super::GpuCheckArgs;
use super::check::{About, Checks};
use super::row::State;
use super::task::{Part, Task};
use crate::command::Command;
use crate::error::{CliError, failed};
use crate::launch::{Bind, Job};
use crate::ranks;

pub use rank::{Call, Case, Input, Rank, experts_copy};

const ONE_GPU: &str = "the same between GPUs, over NVLink";

pub fn threads(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let shows = "as the host's ExpertParallel, to the bit";
    let mut tell = |what: String, found: Result<String, CliError>| {
        checks.check(About { what: &what, shows, open: Some(ONE_GPU) }, || found).map(drop)
    };
    for ranks in [2, 4, 8] {
        let case = case(task, ranks);
        tell(format!("{ranks} ranks"), on_ranks(task, ranks, |world| plain::<bf16>(task, case, world)))?;
    }
    let case = case(task, 4);
    tell("4 ranks, f16".to_owned(), on_ranks(task, 4, |world| plain::<f16>(task, case, world)))?;
    tell("4 ranks, f32".to_owned(), on_ranks(task, 4, |world| plain::<f32>(task, case, world)))?;
    for ranks in [2, 4, 8] {
        let case = self::case(task, ranks);
        tell(
            format!("{ranks} ranks in a graph"),
            on_ranks(task, ranks, |world| both::graph(task, case, world)),
        )?;
    }
    let nodes = [0, 0, 1, 1];
    let across = on_nodes(task, &nodes, |world| plain::<bf16>(task, case, world));
    tell("2 + 2 ranks, between nodes by memory of the host".to_owned(), across)?;
    let across = on_nodes(task, &nodes, |world| both::graph(task, case, world));
    tell("2 + 2 ranks, the same in a graph".to_owned(), across)?;
    tell("two exchanges in turns".to_owned(), on_ranks(task, 4, |world| both::turns(task, case, world)))?;
    for ranks in [2, 4, 8] {
        let case = self::case(task, ranks);
        for (mode, what) in [(planned::EAGER, "exact sizes"), (planned::half(case), "a budget")] {
            let found = on_ranks(task, ranks, |world| planned::plain(task, case, mode, world));
            tell(format!("{what}, {ranks} ranks"), found)?;
        }
    }
    tell(
        "a budget, 4 ranks in a graph".to_owned(),
        on_ranks(task, 4, |world| planned::graph(task, case, world)),
    )
}

/// The same, with ranks as processes that this one starts.
pub fn processes(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if !Driver::open()?.device(task.device)?.several_processes {
        let about =
            About { what: "ranks as processes", shows: "nothing: ranks are threads above", open: None };
        let found = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)".to_owned();
        return checks.tell(about, State::Skipped, found, None);
    }
    for count in [2, 4] {
        let job = Job {
            nodes: vec![count],
            part: None,
            command: ranks::again(GpuCheckArgs::NAME, &Task { part: Part::Rank, ..*task })?,
            env: Vec::new(),
            bind: Bind::None,
            grace: Duration::from_secs(5),
            tag: false,
        };
        let code = job.run()?.exit_code();
        if code != 0 {
            let what = format!("{count} ranks");
            let about = About {
                what: &what,
                shows: "several processes use this GPU at once; nvidia-smi -q shows the compute mode",
                open: Some(ONE_GPU),
            };
            let ended = failed!("a rank ended with {code}");
            checks.check(about, || Err(ended))?;
        }
    }
    Ok(())
}

/// One of those.
pub fn rank(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let world = World::from_env_with(options(task))?;
    let (me, ranks) = (world.rank(), world.size());
    let case = case(task, ranks);
    // One speaks for all, unless another has something to say.
    let mut tell = |what: String, found: Result<String, CliError>| {
        let shows = "memory and words go from one to the other as descriptors; to the bit";
        let about = About { what: &what, shows, open: Some(ONE_GPU) };
        if me == 0 || found.is_err() { checks.check(about, || found).map(drop) } else { Ok(()) }
    };
    tell(format!("{ranks} ranks as processes"), plain::<bf16>(task, case, &world))?;
    for (mode, what) in [(planned::EAGER, "exact sizes"), (planned::half(case), "a budget")] {
        tell(format!("{what}, {ranks} ranks as processes"), planned::plain(task, case, mode, &world))?;
    }
    Ok(())
}

fn plain<E: Element>(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    both::plain::<E>(task, case, world)
}

/// The layer of a large model, or a small one.
fn case(task: &Task, ranks: u32) -> Case {
    let full = Case { ranks, experts: 64, top_k: 8, hidden: 7168, max_tokens: 128 };
    task.few(full, Case { experts: 16, top_k: 4, hidden: 40, max_tokens: 9, ..full })
}

/// Runs the body on every rank of a world of threads. What is told is what rank 0 found, or the first thing that is wrong.
pub fn on_ranks<T: Send>(
    task: &Task,
    ranks: u32,
    body: impl Fn(&World) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    on_nodes(task, &vec![0; ranks as usize], body)
}

/// The same on pretended nodes: that of each rank.
fn on_nodes<T: Send>(
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
    // What differs says more than that others then missed their peer.
    let (right, mut wrong): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    wrong.sort_by_key(|error| {
        !matches!(error, Err(CliError::Wrong(_) | CliError::Library(sidelane::Error::Device(_))))
    });
    wrong.into_iter().chain(right).next().unwrap_or_else(|| Err(failed!("no ranks")))
}

/// Heaps for the host's side: full slots of all ranks, received and made.
fn options(task: &Task) -> Options {
    let config = Config { heap: task.few(256 << 20, 16 << 20), symmetric: 4 << 20, ..Config::default() };
    let clocks = Clocks { deadline: task.patience(), ..Clocks::default() };
    Options { config, clocks, ..Options::default() }
}
