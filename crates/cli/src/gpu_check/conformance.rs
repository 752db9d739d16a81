//! The suite of `sidelane conformance` on this GPU: a row for each feature.

use sidelane::device::Driver;

use super::Task;
use super::report::{About, Checks, State};
use crate::conformance::on_device;
use crate::error::CliError;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if !Driver::open()?.device(task.device)?.several_processes {
        let about = About::new("the suite between processes", "nothing: ranks are threads below");
        let found = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)".to_owned();
        return checks.tell(about, State::Skipped, found, None);
    }
    for finding in on_device(task.device, task.quick)? {
        let about = About::new(finding.feature, "bits of a naive reference, or refused by name at all ranks")
            .open("the same between GPUs, over NVLink");
        let state = match finding.correct {
            Some(true) => State::Right,
            Some(false) => State::Wrong,
            None => State::Skipped,
        };
        checks.tell(about, state, finding.text, None)?;
    }
    Ok(())
}
