//! `ExpertParallel` on one GPU, its ranks as threads or as processes, against the naive reference:
//! rows, choices, weights, counts and sums to the bit.
//!
//! Calls are those of the conformance suite, here with the [layer of a large model](large_layers).

use sidelane::bootstrap::Timeouts;
use sidelane::config::Config;
use sidelane::device::Driver;
use sidelane::{Options, World};
use sidelane_testkit::conformance::large_layers::{self, LayerCase};
use sidelane_testkit::device::gpu::patience;
use sidelane_testkit::worlds;

use super::report::{About, Checks, State};
use super::{GpuCheckArgs, Part, Task};
use crate::command_frame::Command;
use crate::commands::conformance::on_device;
use crate::error::{CliError, failed, wrong};
use crate::ranks::{self, one_process};

const ONE_GPU: &str = "the same between GPUs, over NVLink";

pub fn threads(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (what, nodes, layer) in large_layers::all(task.quick) {
        let about = About::new(&what, "as the naive reference, to the bit").open(ONE_GPU);
        checks.check(about, || on_nodes(task, &nodes, |world| carry_out(task, layer, &nodes, world)))?;
    }
    Ok(())
}

/// The same, with ranks as processes that this one starts.
pub fn processes(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if let Some(reason) = one_process(&Driver::open()?, task.device)? {
        let about = About::new("ranks as processes", "nothing: ranks are threads above");
        return checks.tell(about, State::Skipped, reason.to_owned());
    }
    for count in [2, 4] {
        let task = Task { part: Part::Rank, ..*task };
        let code = ranks::job(GpuCheckArgs::NAME, &[count], &task, Vec::new())?.run()?;
        if code != 0 {
            let what = format!("{count} ranks");
            let shows = "several processes use this GPU at once; nvidia-smi -q shows the compute mode";
            let ended = failed!("a rank ended with {code}");
            checks.check(About::new(&what, shows).open(ONE_GPU), || Err(ended))?;
        }
    }
    Ok(())
}

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

pub fn rank(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let world = World::from_env_with(options(task))?;
    let ranks = world.size();
    for (what, layer) in large_layers::modes(task.quick) {
        let found = carry_out(task, layer, &vec![0; ranks as usize], &world);
        let what = format!("{what}{ranks} ranks as processes");
        let shows = "memory and words go from one to the other as descriptors; to the bit";
        // Rank 0 speaks for all, unless another has something to say.
        if world.rank() == 0 || found.is_err() {
            checks.check(About::new(&what, shows).open(ONE_GPU), || found)?;
        }
    }
    Ok(())
}

fn carry_out(task: &Task, layer: LayerCase, nodes: &[u32], world: &World) -> Result<String, CliError> {
    layer.carry_out(nodes, world, task.device)?.map_err(|difference| wrong!("{}", difference.text()))
}

/// Runs the body on every rank of a world of threads, on these nodes. Gives what rank 0 found, or
/// the first thing that is wrong.
pub fn on_nodes<T: Send>(
    task: &Task,
    nodes: &[u32],
    body: impl Fn(&World) -> Result<T, CliError> + Sync,
) -> Result<T, CliError> {
    let worlds = World::threads_with(nodes, &options(task))?;
    let results = worlds::on_ranks(&worlds, body);
    // A difference says more than that others then missed their peer.
    let (right, mut wrong): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    wrong.sort_by_key(|error| {
        !matches!(error, Err(CliError::Wrong(_) | CliError::Library(sidelane::Error::Device(_))))
    });
    wrong.into_iter().chain(right).next().unwrap_or_else(|| Err(failed!("no ranks")))
}

fn options(task: &Task) -> Options {
    let config = Config::default().with_heap(task.few(64 << 20, 16 << 20)).with_symmetric(4 << 20);
    let timeouts = Timeouts::default().with_deadline(patience(task.quick));
    Options::default().with_config(config).with_timeouts(timeouts)
}
