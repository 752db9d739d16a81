//! The suite of `sidelane conformance` on this GPU: a row for each feature.

use sidelane::device::Driver;

use super::Task;
use super::report::{About, Checks, State};
use crate::conformance::on_device;
use crate::device::one_process;
use crate::error::CliError;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    if let Some(reason) = one_process(&Driver::open()?, task.device)? {
        let about = About::new("the suite between processes", "nothing: ranks are threads below");
        return checks.tell(about, State::Skipped, reason.to_owned());
    }
    for finding in on_device(task.device, task.quick)? {
        let about = About::new(finding.feature, "bits of a naive reference, or refused by name at all ranks")
            .open("the same between GPUs, over NVLink");
        let state = match finding.correct {
            Some(true) => State::Right,
            Some(false) => State::Wrong,
            None => State::Skipped,
        };
        checks.tell(about, state, finding.text)?;
    }
    Ok(())
}
